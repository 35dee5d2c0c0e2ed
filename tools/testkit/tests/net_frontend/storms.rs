//! Load attacks on the real datapath: one worker, one switch, two correct guests and one hostile guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::testing::frame;
use ringfence_platform::{Gref, Platform};
use ringfence_switch::dataplane::{DataplaneConfig, DataplaneHandle, DataplaneWorker, PortGone};
use ringfence_switch::forwarding::{Fabric, PortPolicy, Switch};
use ringfence_testkit::net::frontend::TX_PAGES;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::{TxFlags, TxRequest};

/// Ethernet addresses of the two correct guests.
const A: [u8; 6] = [2, 0, 0, 0, 0, 0xA];
const B: [u8; 6] = [2, 0, 0, 0, 0, 0xB];

struct Scene {
    // Dropped first: the worker stops before the objects that it uses.
    worker: Option<DataplaneHandle>,
    thread: Option<std::thread::JoinHandle<()>>,
    gone: Receiver<PortGone>,
    stage: Stage,
    guests: [Neighbour; 2],
    hostile: HostileFrontend,
    counters: Arc<PortCounters>,
    rounds: u32,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.worker = None;
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|e| e.is_ok()));
    }
}

impl Scene {
    fn new() -> Scene {
        let mut stage = Stage::new(Mode::Copy);
        let guests = [(); 2].map(|()| Neighbour::join(&mut stage));
        let hostile = HostileFrontend::connected(&mut stage);
        let counters = stage.vifs[hostile.vif].host.counters.clone().unwrap();
        let (sender, gone) = channel();
        let system = Arc::clone(stage.platform.counters());
        let fabric = Fabric::Switch(Switch::new());
        let config = DataplaneConfig::default();
        let on_gone = move |port| drop(sender.send(port));
        let (dataplane, worker) = DataplaneWorker::new(fabric, config, system, on_gone).unwrap();
        let thread = Some(std::thread::spawn(move || dataplane.run()));
        for (vif, name) in stage.vifs.iter_mut().zip(["a", "b", "hostile"]) {
            let port = vif.host.port.take().unwrap();
            worker.add_port(port, PortPolicy::default(), name).unwrap();
        }
        let worker = Some(worker);
        Scene { worker, thread, gone, stage, guests, hostile, counters, rounds: 0 }
    }

    /// Checks that a frame in each direction passes the worker unchanged and in time.
    fn exchange(&mut self) {
        self.rounds += 1;
        for (from, to, addresses) in [(0, 1, [B, A]), (1, 0, [A, B])] {
            let mut sent = frame(self.rounds, 1000);
            sent[..12].copy_from_slice(addresses.as_flattened());
            assert_eq!(self.guests[from].send(&sent).sent, 1, "no room");
            let begun = Instant::now();
            // Broadcasts of the hostile guest arrive too.
            while !self.guests[to].take().iter().any(|a| a.bytes == sent) {
                assert!(begun.elapsed() < Duration::from_secs(60), "round {} is late", self.rounds);
                std::thread::yield_now();
            }
            // The sender processes its responses.
            self.guests[from].take();
        }
    }

    /// Exchanges frames until `done`, while a thread repeats `act`.
    fn exchange_beside(
        &mut self,
        mut act: impl FnMut(&mut HostileFrontend) + Send,
        done: impl Fn(&PortCounters) -> bool,
    ) {
        let stop = AtomicBool::new(false);
        let counters = Arc::clone(&self.counters);
        // The thread owns the hostile guest's rings meanwhile.
        let mut spare = HostileFrontend::join(&mut self.stage);
        core::mem::swap(&mut spare, &mut self.hostile);
        let mut guest = spare;
        std::thread::scope(|scope| {
            let stop = &stop;
            let storm = scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    act(&mut guest);
                }
                guest
            });
            let begun = Instant::now();
            let first = self.rounds;
            while begun.elapsed() < Duration::from_millis(200)
                || self.rounds < first + 50
                || !done(&counters)
            {
                self.exchange();
                assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", counters.named());
            }
            stop.store(true, Ordering::Relaxed);
            self.hostile = storm.join().unwrap();
        });
        self.exchange();
    }
}

/// Checks that events without work are counted, and that after some of them the port ignores events for a
/// while.
#[test]
fn xsa_332_event_storm_is_throttled() {
    let mut scene = Scene::new();
    scene.exchange();
    let storm = |guest: &mut HostileFrontend| guest.channels.iter().for_each(|c| c.notify());
    scene.exchange_beside(storm, |counters| {
        counters.spurious_wakeups.get() > 16 && counters.throttles.get() > 0
    });
    // The port serves its channel again as soon as an event announces work.
    let packet = scene.hostile.packet(1, &frame(1, 60), &[60]);
    scene.hostile.post(&packet);
    scene.hostile.channels[0].notify();
    let begun = Instant::now();
    while scene.hostile.responses().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "events are ignored");
    }
    assert!(scene.gone.try_recv().is_err(), "a port was removed");
}

/// Checks that events without work are counted and that packets posted after each are served.
#[test]
fn xsa_331_event_without_work_is_counted_and_port_is_served() {
    let mut scene = Scene::new();
    for round in 1..=5_u32 {
        let counted = scene.counters.spurious_wakeups.get();
        scene.hostile.channels[round as usize % 2].notify();
        let begun = Instant::now();
        while scene.counters.spurious_wakeups.get() == counted {
            assert!(begun.elapsed() < Duration::from_secs(60), "event {round} was not counted");
            std::thread::yield_now();
        }
        scene.exchange();
        let packet = scene.hostile.packet(1, &frame(round, 60), &[60]);
        scene.hostile.post(&packet);
        scene.hostile.channels[0].notify();
        let begun = Instant::now();
        while scene.hostile.responses().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "packet {round} is not served");
        }
    }
    assert_eq!(scene.counters.throttles.get(), 0, "five events are no storm");
    assert!(scene.gone.try_recv().is_err(), "a port was removed");
}

/// The ring is always full of packets that break a rule.
#[test]
fn flood_of_refused_packets_leaves_other_guests_served() {
    let mut scene = Scene::new();
    let slot = TxRequest { gref: Gref(0), offset: 0, flags: TxFlags::NONE, id: 1, size: 1 };
    let flood = move |guest: &mut HostileFrontend| {
        let free = 256 - guest.tx.produced.wrapping_sub(guest.tx.rsp_prod());
        (0..free).for_each(|_| guest.tx.put(&slot.to_bytes()));
        guest.tx.set_req_prod(guest.tx.produced);
        guest.channels[0].notify();
    };
    scene.exchange_beside(flood, |counters| counters.drops(DropReason::BadRequest) > 1000);
    assert!(scene.stage.rules(scene.hostile.vif).get("tx_too_short") > 1000);
}

/// The ring is always full of broadcasts of 18 slots each.
#[test]
fn flood_of_broadcasts_leaves_other_guests_served() {
    let mut scene = Scene::new();
    let mut bytes = frame(1, 180);
    bytes[..6].copy_from_slice(&[0xFF; 6]);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0xC]);
    let slots = scene.hostile.packet(1, &bytes, &[10; 18]);
    let flood = move |guest: &mut HostileFrontend| {
        let free = 256 - guest.tx.produced.wrapping_sub(guest.tx.rsp_prod());
        if free >= 18 {
            guest.post(&slots);
            guest.channels[0].notify();
        }
    };
    scene.exchange_beside(flood, |counters| counters.rx_frames.get() > 1000);
    let begun = Instant::now();
    while scene.hostile.tx.rsp_prod() != scene.hostile.tx.produced {
        assert!(begun.elapsed() < Duration::from_secs(60), "packets that are never answered");
    }
    let uses = (TX_PAGES..TX_PAGES + 64).map(|gref| scene.hostile.arena.status(gref));
    assert_eq!(uses.sum::<u32>(), 0, "a page stays in use");
}

/// Checks that the port of a guest that breaks its ring is removed, and no other port.
#[test]
fn xsa_39_xsa_90_faulty_port_is_removed_alone_and_torn_down_by_owner() {
    let mut scene = Scene::new();
    scene.exchange();
    scene.hostile.tx.set_req_prod(0x8000_0000);
    scene.hostile.channels[0].notify();
    let gone = scene.gone.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(gone.name, "hostile");
    let vif = scene.hostile.vif;
    assert_eq!(scene.stage.rules(vif).get("tx_producer_overflow"), 1);
    scene.stage.vifs[vif].backend.close_with_penalty(gone.reason.to_string());
    // XSA-90, XSA-424, XSA-441: the packet path hands the port over and tears nothing down.
    let rings = |scene: &Scene| [8, 9].map(|gref| scene.hostile.arena.status(gref));
    assert_eq!(rings(&scene), [1, 1], "the worker unmapped a ring in its packet path");
    scene.exchange();
    assert_eq!(rings(&scene), [1, 1], "the worker unmapped a ring");
    drop(gone);
    assert_eq!(rings(&scene), [0, 0], "the owner left a ring mapped");
    scene.stage.look(vif);
    for _ in 0..20 {
        scene.exchange();
    }
    assert!(scene.gone.try_recv().is_err());
}
