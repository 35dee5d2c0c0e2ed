//! What holds for a guest over time, with real rings and a clock that the test moves: how much it may
//! send, which groups' frames it gets, and when it counts as stalled. The peer is a hostile frontend;
//! a neighbour with manners is served in the same rounds.

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
use ringfence_switch::dataplane::{Dataplane, DataplaneConfig};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_sys::clock::Clock;
use ringfence_testkit::net::frontend::RX_BUFFERS;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::{Status, TxFlags, TxRequest, keys};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

/// A stage, a guest on it whose backend has this policy, a neighbour, and the guest's clock.
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
            scene.toolstack(keys::RATE, rate);
        }
        scene.guest.domain.lend(DomId(0), &scene.guest.arena).unwrap();
        scene.connect();
        scene
    }

    /// Connects as a guest that takes super-packets, so that the largest frame has 17 slots.
    fn connect(&mut self) {
        self.guest.connect(&mut self.stage, |keys| {
            keys.insert(keys::FEATURE_GSO_TCPV4, "1".to_owned());
        });
        assert_eq!(self.stage.state(self.guest.vif), XenbusState::Connected);
    }

    /// Writes a key of the backend's directory, which the backend then looks at.
    fn toolstack(&mut self, key: &str, value: &str) {
        let path = format!("{}/{key}", self.guest.device.backend_path());
        self.stage.store.write(&path, value).unwrap();
        self.stage.look(self.guest.vif);
    }

    /// Writes a key of the guest's directory, which the backend then looks at.
    fn guest_writes(&mut self, key: &str, value: &str) {
        self.guest.write(key, value);
        self.stage.look(self.guest.vif);
    }

    fn counters(&self) -> Arc<PortCounters> {
        self.stage.vifs[self.guest.vif].host.counters.clone().unwrap()
    }

    fn port(&mut self) -> &mut dyn Port {
        &mut **self.stage.vifs[self.guest.vif].host.port.as_mut().unwrap()
    }

    /// Publishes `count` packets of `len` octets.
    fn publish(&mut self, count: usize, len: usize) {
        for _ in 0..count {
            let slots = self.guest.packet(1, &frame(5, len), &[len]);
            self.guest.post(&slots);
        }
    }

    /// Goes a round; packets of the guest that came through in it.
    fn round(&mut self) -> usize {
        self.stage.round();
        self.stage.arrived(self.guest.vif).len()
    }

    fn rules(&self, rule: &str) -> u64 {
        self.stage.rules(self.guest.vif).get(rule)
    }

    /// A request that carries changes of the multicast filter (2 adds, 3 takes away).
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

    /// Sends the guest a frame to `to`; whether it got it.
    fn reaches(&mut self, to: [u8; 6]) -> bool {
        self.guest.post_buffers([RX_BUFFERS]);
        let mut bytes = frame(3, 100);
        bytes[..6].copy_from_slice(&to);
        let sent = self.stage.send(self.guest.vif, &[bytes]).unwrap().sent;
        assert_eq!(self.guest.rx_responses().len(), sent);
        if sent == 0 {
            // The buffer stays posted; it is taken back so that each frame finds one.
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
fn what_is_beyond_the_rate_stays_in_the_ring_and_goes_later() {
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
        assert_eq!(scene.round(), 4, "{mode}: what is left");
        assert_eq!(scene.port().deadline(), None, "{mode}");
        assert_eq!(scene.counters().rate_limited.get(), 2, "{mode}: each wait counts once");
        assert_eq!(scene.counters().drops_total(), 0, "{mode}");
        scene.neighbour.exchange(&mut scene.stage);
    }
}

#[test]
fn a_rate_that_changes_holds_at_once_and_one_that_is_none_is_said() {
    let mut scene = Scene::new(Mode::Copy, None);
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 20, "no key, no limit");
    scene.toolstack(keys::RATE, "2000,1000000");
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 2);
    assert_eq!(scene.port().deadline(), Some(S));
    scene.toolstack(keys::RATE, "5000,1000000");
    assert_eq!(scene.round(), 0, "the credit of the interval is used up");
    scene.clock.advance(S);
    assert_eq!(scene.round(), 5);
    scene.toolstack(keys::RATE, "5 MB/s");
    scene.toolstack("online", "1");
    assert_eq!((scene.round(), scene.rules("rate_unusable")), (13, 1));
    scene.toolstack(keys::RATE, "0,50000");
    assert_eq!(scene.rules("rate_unusable"), 2);
    let rate = format!("{}/{}", scene.guest.device.backend_path(), keys::RATE);
    scene.toolstack(keys::RATE, "1,1");
    scene.stage.store.rm(&rate).unwrap();
    scene.stage.look(scene.guest.vif);
    scene.publish(20, 1000);
    assert_eq!(scene.round(), 20);
    scene.neighbour.exchange(&mut scene.stage);
}

/// A guest that takes back what it published leaves no alarm in the past, with which the data plane
/// would not sleep any more.
#[test]
fn a_packet_taken_back_does_not_keep_anybody_awake() {
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

/// While it waits a guest can announce as much as it likes: nothing is fetched, and no event asked for.
#[test]
fn xsa_332_a_guest_without_credit_is_not_asked() {
    let mut scene = Scene::new(Mode::Copy, Some("1000,1000000"));
    scene.publish(5, 1000);
    assert_eq!(scene.round(), 1);
    let wanted = scene.guest.tx.req_event();
    scene.publish(5, 1000);
    assert!(!scene.port().arm().unwrap(), "there is work, but not now");
    assert_eq!(scene.guest.tx.req_event(), wanted);
    assert!(
        scene.port().deadline().unwrap() <= S,
        "asked at least each second: the rate may change"
    );
    // What it says meanwhile is judged when it is its turn again.
    scene.guest.tx.set_req_prod(1000);
    assert_eq!(scene.round(), 0);
    scene.clock.advance(S);
    scene.stage.round();
    assert_eq!(scene.stage.rules(scene.guest.vif).get("tx_producer_overflow"), 1);
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn multicast_is_filtered_for_who_asks_and_only_then() {
    let mut scene = Scene::new(Mode::Copy, None);
    let offered =
        format!("{}/{}", scene.guest.device.backend_path(), keys::FEATURE_MULTICAST_CONTROL);
    assert!(scene.stage.store.read_flag(&offered).unwrap());
    assert!(scene.reaches(group(1)), "nobody asked for less");
    scene.guest_writes(keys::REQUEST_MULTICAST_CONTROL, "1");
    scene.stage.round();
    assert!(!scene.reaches(group(1)));
    assert!(scene.reaches([0xFF; 6]) && scene.reaches([2, 0, 0, 0, 0, 9]), "no multicast");
    assert_eq!(
        scene.change_filter(&[(2, group(1)), (2, group(2))]),
        [Status::Okay, Status::Null, Status::Null]
    );
    assert!(scene.reaches(group(1)) && scene.reaches(group(2)) && !scene.reaches(group(3)));
    assert_eq!(scene.change_filter(&[(3, group(1))]), [Status::Okay, Status::Null]);
    assert!(!scene.reaches(group(1)) && scene.reaches(group(2)));
    scene.guest_writes(keys::REQUEST_MULTICAST_CONTROL, "maybe");
    scene.stage.round();
    assert!(scene.reaches(group(9)));
    assert_eq!(scene.rules("multicast_request_unusable"), 1);
    scene.guest_writes(keys::REQUEST_MULTICAST_CONTROL, "1");
    scene.stage.round();
    assert!(!scene.reaches(group(9)) && scene.reaches(group(2)), "the list is kept");
    assert_eq!(scene.counters().drops(DropReason::MulticastFilter), 4);
    scene.connect();
    scene.stage.round();
    assert!(!scene.reaches(group(2)), "who connects again begins with an empty list");
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn a_list_of_groups_without_end_is_refused_and_costs_nobody() {
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
    // A ring full of changes at once.
    for n in 0..128 {
        let mut slot = [0; 12];
        slot[6..8].copy_from_slice(&TxFlags::EXTRA_INFO.0.to_le_bytes());
        scene.guest.tx.put(&slot);
        slot = [3, 0, 0x33, 0x33, 0, 0, 0, n, 0, 0, 0, 0];
        scene.guest.tx.put(&slot);
    }
    scene.guest.tx.set_req_prod(scene.guest.tx.produced);
    scene.stage.round();
    assert_eq!(scene.guest.statuses().len(), 128, "the budget of a turn, in pairs of slots");
    scene.neighbour.exchange(&mut scene.stage);
}

/// One buffer is always free, but not enough of them for the largest frame.
#[test]
fn xsa_392_a_guest_that_leaves_one_buffer_free_is_found_out() {
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
        // From now on even what would fit is dropped, without a look at the buffers.
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
fn who_is_slow_or_is_sent_nothing_is_not_stalled() {
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

/// A guest that never has room for the largest frame, and to which nobody sends one.
#[test]
fn who_has_few_buffers_and_nobody_waiting_is_not_stalled() {
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
    assert_eq!(scene.port().slots().unwrap(), usize::MAX, "what waited for a minute is dropped");
    assert_eq!(scene.counters().stalls.get(), 1);
}

/// Who sends to a guest over a cable is held up while that has no room, but not for ever.
#[test]
fn xsa_392_a_sender_is_not_held_up_for_ever() {
    let mut scene = Scene::new(Mode::Copy, None);
    assert_eq!(scene.port().room().unwrap(), 0);
    assert_eq!(scene.port().deadline(), Some(60 * S));
    scene.clock.advance(60 * S);
    // Nobody asks for room any more, but the data plane sleeps.
    assert!(!scene.port().arm().unwrap());
    assert_eq!((scene.port().deadline(), scene.counters().stalls.get()), (None, 1));
    assert_eq!(scene.port().room().unwrap(), usize::MAX, "what comes is taken, and dropped");
    assert_eq!(scene.stage.send(scene.guest.vif, &[frame(1, 60)]).unwrap().dropped, 1);
    scene.guest.post_buffers((0..40).map(|n| RX_BUFFERS + n));
    assert_eq!(scene.port().room().unwrap(), 2);
    assert_eq!(scene.counters().stall_ends.get(), 1);
}

/// The data plane sleeps until there is credit again, and is awake no more often than intervals end.
#[test]
fn the_data_plane_wakes_when_credit_returns_and_does_not_poll_for_it() {
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
            Dataplane::new(fabric, config, Arc::clone(&system), move |port| {
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
            assert!(peer.take_within(20 * S).is_some(), "nobody woke the data plane");
        }
        let took = begin.elapsed();
        assert!(took >= 180 * MS, "ten intervals of 20 ms, of which the first had begun: {took:?}");
        let wakeups = system.wakeups.get();
        assert!(wakeups <= 40, "{wakeups} wake-ups for ten intervals");
        // A source that is not the guest's own goes nowhere, over a cable either.
        let mut spoofed = frame(5, 100);
        spoofed[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 77]);
        let slots = guest.packet(2, &spoofed, &[100]);
        guest.post(&slots);
        let honest = guest.packet(3, &frame(6, 101), &[101]);
        guest.post(&honest);
        guest.channels[0].notify();
        assert!(peer.take_within(20 * S).unwrap().0 == frame(6, 101));
        let counted = handle.stats().unwrap().ports.into_iter().find(|p| p.name == "from").unwrap();
        let spoofed = counted.counters.iter().find(|(name, _)| *name == "drop_spoofed_source");
        assert_eq!(spoofed, Some(&("drop_spoofed_source", 1)));
        drop(handle);
        thread.join().unwrap();
    }
}
