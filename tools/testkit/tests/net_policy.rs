//! Limits of a vif over time, with real rings and a clock that the test advances: rate policy, multicast
//! filter, stall detection. The peer is a hostile frontend; a correct guest is served in the same rounds.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_frame::counters::DropReason;
use ringfence_frame::port::PortCapabilities;
use ringfence_frame::testing::MemoryPort;
use ringfence_frame::testing::frame;
use ringfence_frame::{Port, PortCounters};
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::controls::VifPolicy;
use ringfence_platform::Counters;
use ringfence_platform::DomId;
use ringfence_switch::dataplane::{DataplaneConfig, DataplaneWorker};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_sys::clock::Clock;
use ringfence_testkit::net::frontend::RX_BUFFERS;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::{Status, TxFlags, TxRequest, keys};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

/// Stage with a guest under a policy, another guest, and the first guest's clock.
struct Scene {
    stage: Stage,
    guest: HostileFrontend,
    neighbour: Neighbour,
    clock: Clock,
}

impl Scene {
    fn new(mode: Mode, rate: Option<&str>) -> Scene {
        let mut stage = Stage::new(mode);
        let neighbour = Neighbour::join(&mut stage);
        let guest = HostileFrontend::join(&mut stage);
        let clock = Clock::standing();
        let policy = VifPolicy { multicast_control: true, ..VifPolicy::default() };
        let options = BackendOptions { mode, mtu: 1500 };
        stage.vifs[guest.vif].backend =
            VifBackend::new(guest.device, options).with_policy(policy).with_clock(clock.clone());
        let mut scene = Scene { stage, guest, neighbour, clock };
        if let Some(rate) = rate {
            scene.write_as_toolstack(keys::RATE, rate);
        }
        scene.guest.domain.lend(DomId(0), &scene.guest.arena).unwrap();
        scene.connect();
        scene
    }

    /// Connects as a guest that accepts GSO packets, so that the largest frame has 17 slots.
    fn connect(&mut self) {
        self.guest.connect(&mut self.stage, |keys| {
            keys.insert(keys::FEATURE_GSO_TCPV4, "1".to_owned());
        });
        assert_eq!(self.stage.state(self.guest.vif), XenbusState::Connected);
    }

    /// Writes a key of the backend's directory, which the backend then reads.
    fn write_as_toolstack(&mut self, key: &str, value: &str) {
        let path = format!("{}/{key}", self.guest.device.backend_path());
        self.stage.store.write(&path, value).unwrap();
        self.stage.look(self.guest.vif);
    }

    /// Writes a key of the guest's directory, which the backend then reads.
    fn write_as_guest(&mut self, key: &str, value: &str) {
        self.guest.write(key, value);
        self.stage.look(self.guest.vif);
    }

    fn counters(&self) -> Arc<PortCounters> {
        self.stage.vifs[self.guest.vif].host.counters.clone().unwrap()
    }

    fn port(&mut self) -> &mut dyn Port {
        &mut **self.stage.vifs[self.guest.vif].host.port.as_mut().unwrap()
    }

    /// Publishes `count` packets of `len` bytes.
    fn publish(&mut self, count: usize, len: usize) {
        for _ in 0..count {
            let slots = self.guest.packet(1, &frame(5, len), &[len]);
            self.guest.post(&slots);
        }
    }

    /// Runs one round. Returns the number of the guest's packets that arrived in it.
    fn round(&mut self) -> usize {
        self.stage.round();
        self.stage.arrived(self.guest.vif).len()
    }

    fn rules(&self, rule: &str) -> u64 {
        self.stage.rules(self.guest.vif).get(rule)
    }

    /// Sends a request that changes the multicast filter (2 adds a group, 3 removes one).
    fn change_filter(&mut self, changes: &[(u8, [u8; 6])]) -> Vec<Status> {
        let flags = TxFlags::EXTRA_INFO;
        let dummy =
            TxRequest { gref: ringfence_wire::grant::Gref(0), offset: 0, flags, id: 7, size: 0 };
        self.guest.tx.put(&dummy.to_bytes());
        for (n, (kind, group)) in changes.iter().enumerate() {
            let more = u8::from(n + 1 < changes.len());
            let mut slot = [0; 12];
            (slot[0], slot[1]) = (*kind, more);
            slot[2..8].copy_from_slice(group);
            self.guest.tx.put(&slot);
        }
        self.guest.tx.set_req_prod(self.guest.tx.produced);
        self.stage.round();
        self.guest.statuses()
    }

    /// Sends the guest a frame to `to`. Returns `true` if it arrived.
    fn send_to_guest(&mut self, to: [u8; 6]) -> bool {
        self.guest.post_buffers([RX_BUFFERS]);
        let mut bytes = frame(3, 100);
        bytes[..6].copy_from_slice(&to);
        let sent = self.stage.send(self.guest.vif, &[bytes]).unwrap().sent;
        assert_eq!(self.guest.rx_responses().len(), sent);
        if sent == 0 {
            // The buffer stays posted; the guest takes it back so that each frame finds one.
            self.guest.rx.produced = self.guest.rx.produced.wrapping_sub(1);
            self.guest.rx.set_req_prod(self.guest.rx.produced);
        }
        sent == 1
    }
}

fn group(n: u8) -> [u8; 6] {
    [0x33, 0x33, 0, 0, 0, n]
}

#[test]
fn packets_over_rate_limit_stay_in_ring_until_credit_returns() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode, Some("3000,50000"));
        scene.publish(10, 1000);
        assert_eq!(scene.round(), 3, "{mode}");
        assert_eq!(scene.guest.statuses().len(), 3, "{mode}: the others wait, unanswered");
        assert_eq!((scene.round(), scene.port().deadline()), (0, Some(50 * MS)), "{mode}");
        scene.clock.advance(50 * MS - Duration::from_nanos(1));
        assert_eq!(scene.round(), 0, "{mode}");
        scene.clock.advance(Duration::from_nanos(1));
        assert_eq!(scene.round(), 3, "{mode}");
        scene.clock.advance(500 * MS);
        assert_eq!(scene.round(), 4, "{mode}: the remaining packets");
        assert_eq!(scene.port().deadline(), None, "{mode}");
        assert_eq!(scene.counters().rate_limited.get(), 2, "{mode}: each wait counts once");
        assert_eq!(scene.counters().drops_total(), 0, "{mode}");
        scene.neighbour.exchange(&mut scene.stage);
    }
}

#[test]
fn changed_rate_applies_at_once_and_invalid_rate_is_counted() {
    let mut scene = Scene::new(Mode::Copy, None);
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 20, "no key, no limit");
    scene.write_as_toolstack(keys::RATE, "2000,1000000");
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 2);
    assert_eq!(scene.port().deadline(), Some(S));
    scene.write_as_toolstack(keys::RATE, "5000,1000000");
    assert_eq!(scene.round(), 0, "the credit of the interval is used up");
    scene.clock.advance(S);
    assert_eq!(scene.round(), 5);
    scene.write_as_toolstack(keys::RATE, "5 MB/s");
    scene.write_as_toolstack("online", "1");
    assert_eq!((scene.round(), scene.rules("rate_unusable")), (13, 1));
    scene.write_as_toolstack(keys::RATE, "0,50000");
    assert_eq!(scene.rules("rate_unusable"), 2);
    let rate = format!("{}/{}", scene.guest.device.backend_path(), keys::RATE);
    scene.write_as_toolstack(keys::RATE, "1,1");
    scene.stage.store.rm(&rate).unwrap();
    scene.stage.look(scene.guest.vif);
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 20);
    scene.neighbour.exchange(&mut scene.stage);
}

/// Checks that a guest that takes back its published packet leaves no deadline in the past, with which the
/// worker would never sleep.
#[test]
fn packet_taken_back_leaves_no_deadline() {
    let mut scene = Scene::new(Mode::Copy, Some("100,1000"));
    scene.publish(1, 1000);
    assert_eq!(scene.round(), 0);
    scene.guest.tx.set_req_prod(0);
    scene.clock.advance(S);
    assert_eq!(scene.round(), 0);
    assert!(!scene.port().arm().unwrap());
    assert_eq!(scene.port().deadline(), None);
    scene.neighbour.exchange(&mut scene.stage);
}

/// Checks that a guest without credit can publish any number of packets: the backend fetches none and
/// requests no event.
#[test]
fn xsa_332_guest_without_credit_is_not_polled() {
    let mut scene = Scene::new(Mode::Copy, Some("1000,1000000"));
    scene.publish(5, 1000);
    assert_eq!(scene.round(), 1);
    let wanted = scene.guest.tx.req_event();
    scene.publish(5, 1000);
    assert!(!scene.port().arm().unwrap(), "there is work, but not now");
    assert_eq!(scene.guest.tx.req_event(), wanted);
    assert!(scene.port().deadline().unwrap() <= S, "the rate is not checked each second");
    // The backend validates the index at the guest's next round.
    scene.guest.tx.set_req_prod(1000);
    assert_eq!(scene.round(), 0);
    scene.clock.advance(S);
    scene.stage.round();
    assert_eq!(scene.stage.rules(scene.guest.vif).get("tx_producer_overflow"), 1);
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn multicast_filter_applies_only_after_request() {
    let mut scene = Scene::new(Mode::Copy, None);
    let offered =
        format!("{}/{}", scene.guest.device.backend_path(), keys::FEATURE_MULTICAST_CONTROL);
    assert!(scene.stage.store.read_flag(&offered).unwrap());
    assert!(scene.send_to_guest(group(1)), "the filter is on without a request");
    scene.write_as_guest(keys::REQUEST_MULTICAST_CONTROL, "1");
    scene.stage.round();
    assert!(!scene.send_to_guest(group(1)));
    assert!(
        scene.send_to_guest([0xFF; 6]) && scene.send_to_guest([2, 0, 0, 0, 0, 9]),
        "no multicast"
    );
    assert_eq!(
        scene.change_filter(&[(2, group(1)), (2, group(2))]),
        [Status::Okay, Status::Null, Status::Null]
    );
    assert!(
        scene.send_to_guest(group(1))
            && scene.send_to_guest(group(2))
            && !scene.send_to_guest(group(3))
    );
    assert_eq!(scene.change_filter(&[(3, group(1))]), [Status::Okay, Status::Null]);
    assert!(!scene.send_to_guest(group(1)) && scene.send_to_guest(group(2)));
    scene.write_as_guest(keys::REQUEST_MULTICAST_CONTROL, "maybe");
    scene.stage.round();
    assert!(scene.send_to_guest(group(9)));
    assert_eq!(scene.rules("multicast_request_unusable"), 1);
    scene.write_as_guest(keys::REQUEST_MULTICAST_CONTROL, "1");
    scene.stage.round();
    assert!(!scene.send_to_guest(group(9)) && scene.send_to_guest(group(2)), "the list is kept");
    assert_eq!(scene.counters().drops(DropReason::MulticastFilter), 4);
    scene.connect();
    scene.stage.round();
    assert!(!scene.send_to_guest(group(2)), "the list survived a reconnect");
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn multicast_list_over_limit_is_refused() {
    let mut scene = Scene::new(Mode::Copy, None);
    for n in 0..64 {
        assert_eq!(scene.change_filter(&[(2, group(n))])[0], Status::Okay);
    }
    for n in 64..=255 {
        assert_eq!(scene.change_filter(&[(2, group(n))])[0], Status::Error);
    }
    assert_eq!(scene.rules("tx_multicast_list_full"), 192);
    assert_eq!(scene.change_filter(&[(2, [2, 0, 0, 0, 0, 1])])[0], Status::Error);
    assert_eq!(scene.rules("tx_multicast_no_group"), 1);
    // A ring full of filter changes.
    for n in 0..128 {
        let mut slot = [0; 12];
        slot[6..8].copy_from_slice(&TxFlags::EXTRA_INFO.0.to_le_bytes());
        scene.guest.tx.put(&slot);
        slot = [3, 0, 0x33, 0x33, 0, 0, 0, n, 0, 0, 0, 0];
        scene.guest.tx.put(&slot);
    }
    scene.guest.tx.set_req_prod(scene.guest.tx.produced);
    scene.stage.round();
    assert_eq!(scene.guest.statuses().len(), 128, "the budget of a round, in pairs of slots");
    scene.neighbour.exchange(&mut scene.stage);
}

/// Checks a guest that always keeps one buffer posted, which is too few for the largest frame.
#[test]
fn xsa_392_guest_with_one_free_buffer_is_stalled_after_a_minute() {
    for mode in Mode::NETWORK {
        let mut scene = Scene::new(mode, None);
        let vif = scene.guest.vif;
        let large = [frame(1, 9000)];
        let dropped = |scene: &Scene, reason| scene.counters().drops(reason);
        scene.guest.post_buffers([RX_BUFFERS]);
        assert_eq!(scene.stage.send(vif, &large).unwrap().dropped, 1);
        scene.clock.advance(60 * S - MS);
        scene.stage.send(vif, &large).unwrap();
        assert_eq!(dropped(&scene, DropReason::PortFull), 2, "{mode}");
        scene.clock.advance(MS);
        scene.stage.send(vif, &large).unwrap();
        assert_eq!(scene.counters().stalls.get(), 1, "{mode}");
        // From now on the port drops even a frame that would fit, without reading the ring.
        assert_eq!(scene.stage.send(vif, &[frame(1, 60)]).unwrap().dropped, 1);
        assert_eq!(dropped(&scene, DropReason::LinkDown), 1, "{mode}");
        assert_eq!(scene.rules("rx_stalled"), 1);
        scene.guest.post_buffers((1..16).map(|n| RX_BUFFERS + n));
        scene.stage.send(vif, &large).unwrap();
        assert_eq!(dropped(&scene, DropReason::LinkDown), 2, "{mode}: 16 buffers are one too few");
        scene.guest.post_buffers([RX_BUFFERS + 16]);
        assert_eq!(scene.stage.send(vif, &large).unwrap().sent, 1, "{mode}");
        assert_eq!(scene.counters().stall_ends.get(), 1, "{mode}");
        scene.neighbour.exchange(&mut scene.stage);
    }
}

#[test]
fn slow_or_idle_guest_is_not_stalled() {
    let mut scene = Scene::new(Mode::Copy, None);
    let vif = scene.guest.vif;
    for _ in 0..10 {
        scene.stage.send(vif, &[frame(1, 9000)]).unwrap();
        scene.clock.advance(50 * S);
        scene.guest.post_buffers([RX_BUFFERS]);
        assert_eq!(scene.stage.send(vif, &[frame(1, 60)]).unwrap().sent, 1);
    }
    scene.clock.advance(1000 * S);
    scene.stage.round();
    assert_eq!((scene.counters().stalls.get(), scene.port().deadline()), (0, None));
}

/// Checks a guest that never has room for the largest frame and to which no port sends one.
#[test]
fn guest_with_few_buffers_and_no_sender_is_not_stalled() {
    let mut scene = Scene::new(Mode::Copy, None);
    scene.guest.post_buffers((0..8).map(|n| RX_BUFFERS + n));
    for _ in 0..100 {
        assert_eq!(scene.port().slots().unwrap(), 8);
        assert!(!scene.port().arm().unwrap());
        assert_eq!(scene.port().deadline(), None);
        scene.clock.advance(30 * S);
    }
    scene.port().await_slots(17);
    assert_eq!(scene.port().deadline(), scene.clock.now().checked_add(60 * S));
    scene.clock.advance(60 * S);
    assert_eq!(scene.port().slots().unwrap(), 8);
    scene.port().await_slots(17);
    assert_eq!(scene.port().slots().unwrap(), usize::MAX, "a stalled port slows its sender");
    assert_eq!(scene.counters().stalls.get(), 1);
}

/// Checks that a full guest slows the sender on a patch cable, for a limited time.
#[test]
fn xsa_392_backpressure_of_stalled_guest_ends_after_a_minute() {
    let mut scene = Scene::new(Mode::Copy, None);
    assert_eq!(scene.port().room().unwrap(), 0);
    assert_eq!(scene.port().deadline(), Some(60 * S));
    scene.clock.advance(60 * S);
    // The worker sleeps, so no code asks for room.
    assert!(!scene.port().arm().unwrap());
    assert_eq!((scene.port().deadline(), scene.counters().stalls.get()), (None, 1));
    assert_eq!(scene.port().room().unwrap(), usize::MAX, "a stalled port slows its sender");
    assert_eq!(scene.stage.send(scene.guest.vif, &[frame(1, 60)]).unwrap().dropped, 1);
    scene.guest.post_buffers((0..40).map(|n| RX_BUFFERS + n));
    assert_eq!(scene.port().room().unwrap(), 2);
    assert_eq!(scene.counters().stall_ends.get(), 1);
}

/// Checks that the worker sleeps until there is credit, and wakes no more often than intervals end.
#[test]
fn worker_wakes_when_credit_returns_without_polling() {
    for fabric in
        [Fabric::Switch(ringfence_switch::forwarding::Switch::new()), Fabric::Patch(Patch::new())]
    {
        let mut stage = Stage::new(Mode::Copy);
        let mut guest = HostileFrontend::join(&mut stage);
        let rate = format!("{}/{}", guest.device.backend_path(), keys::RATE);
        stage.store.write(&rate, "1000,20000").unwrap();
        guest.domain.lend(DomId(0), &guest.arena).unwrap();
        guest.connect(&mut stage, |_| {});
        let port = stage.vifs[guest.vif].host.port.take().unwrap();
        let (receiver, peer) = MemoryPort::pair(256, PortCapabilities::plain(1500)).unwrap();
        let system = Arc::new(Counters::default());
        let (gone, _) = channel();
        let config = DataplaneConfig { spin_max: Duration::ZERO, ..DataplaneConfig::default() };
        let (dataplane, handle) =
            DataplaneWorker::new(fabric, config, Arc::clone(&system), move |port| {
                let _ = gone.send(port.name);
            })
            .unwrap();
        let thread = std::thread::spawn(move || dataplane.run());
        handle.add_port(Box::new(receiver), PortPolicy::default(), "to").unwrap();
        for _ in 0..11 {
            let slots = guest.packet(1, &frame(5, 1000), &[1000]);
            guest.post(&slots);
        }
        let begin = Instant::now();
        let policy = PortPolicy { mac: Some([2, 0, 0, 0, 0, 1]), ..PortPolicy::default() };
        handle.add_port(port, policy, "from").unwrap();
        for _ in 0..11 {
            assert!(peer.take_within(20 * S).is_some(), "the worker did not wake");
        }
        let took = begin.elapsed();
        assert!(took >= 180 * MS, "ten intervals of 20 ms, of which the first had begun: {took:?}");
        let wakeups = system.wakeups.get();
        assert!(wakeups <= 40, "{wakeups} wake-ups for ten intervals");
        // A frame with a foreign source address is dropped on a patch cable too.
        let mut spoofed = frame(5, 100);
        spoofed[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 77]);
        let slots = guest.packet(2, &spoofed, &[100]);
        guest.post(&slots);
        let valid = guest.packet(3, &frame(6, 101), &[101]);
        guest.post(&valid);
        guest.channels[0].notify();
        assert!(peer.take_within(20 * S).unwrap().0 == frame(6, 101));
        let counted = handle.stats().unwrap().ports.into_iter().find(|p| p.name == "from").unwrap();
        let spoofed = counted.counters.iter().find(|(name, _)| *name == "drop_spoofed_source");
        assert_eq!(spoofed, Some(&("drop_spoofed_source", 1)));
        drop(handle);
        thread.join().unwrap();
    }
}
