use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use ringfence_frame::batch::HEADER_MAX;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::{Fault, GsoOffload, Port, PortCapabilities};
use ringfence_frame::testing::{MemoryPeer, MemoryPort, tcp_frame};
use ringfence_offload::checksum::internet_checksum;
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};

use super::*;
use crate::forwarding::{AttachError, Mac, Patch, PortPolicy, Switch};

mod workers;

const SOON: Duration = Duration::from_secs(60);
const BROADCAST: Mac = [0xff; 6];

fn mac(n: u8) -> Mac {
    [2, 0, 0, 0, 0, n]
}

fn frame(dst: Mac, src: Mac, len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
    frame[..6].copy_from_slice(&dst);
    frame[6..12].copy_from_slice(&src);
    frame
}

fn switch() -> Fabric {
    Fabric::Switch(Switch::new())
}

/// Creates a port that keeps 256 frames, and its peer.
fn port() -> (MemoryPort, MemoryPeer) {
    MemoryPort::pair(256, PortCapabilities::plain(1500)).unwrap()
}

/// Dataplane whose worker runs on a thread of its own.
struct Running {
    handle: Option<DataplaneHandle>,
    gone: Receiver<PortGone>,
    system: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn new(fabric: Fabric) -> Running {
        let (sender, gone) = channel();
        let system = Arc::new(Counters::default());
        let (worker, handle) = DataplaneWorker::new(
            fabric,
            DataplaneConfig::default(),
            Arc::clone(&system),
            move |port| {
                let _ = sender.send(port);
            },
        )
        .unwrap();
        let thread = Some(std::thread::spawn(move || worker.run()));
        Running { handle: Some(handle), gone, system, thread }
    }

    fn handle(&self) -> &DataplaneHandle {
        self.handle.as_ref().unwrap()
    }

    fn add(&self, name: &str, port: MemoryPort) -> PortId {
        self.handle().add_port(Box::new(port), PortPolicy::default(), name).unwrap()
    }

    /// Adds a port and returns its peer.
    fn peer(&self, name: &str) -> MemoryPeer {
        let (port, peer) = port();
        self.add(name, port);
        peer
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle = None;
        let joined = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            joined.unwrap().unwrap();
        }
    }
}

/// Adds a port to a worker that does not run on a thread.
fn add(worker: &mut DataplaneWorker, port: impl Port + 'static, name: &str) {
    let policy = PortPolicy::default();
    worker.add(Some(Box::new(port)), 1, None, policy, name.into()).unwrap();
}

/// Creates a worker whose rounds the test runs itself.
fn manual(ports: Vec<MemoryPort>) -> (DataplaneWorker, DataplaneHandle) {
    let (mut worker, handle) =
        DataplaneWorker::new(switch(), DataplaneConfig::default(), Arc::default(), |_| ()).unwrap();
    for port in ports {
        add(&mut worker, port, "port");
    }
    (worker, handle)
}

#[test]
fn frames_are_forwarded_unchanged_and_completed() {
    let running = Running::new(switch());
    let peers: Vec<_> = ["a", "b", "c"].map(|name| running.peer(name)).into();
    let hello = frame(BROADCAST, mac(1), 60);
    peers[0].send(&hello, OffloadMeta::PLAIN);
    assert_eq!(peers[1].take_within(SOON).unwrap().0, hello);
    assert_eq!(peers[2].take_within(SOON).unwrap().0, hello);
    let answer = frame(mac(1), mac(2), 1514);
    peers[1].send(&answer, OffloadMeta::PLAIN);
    assert_eq!(peers[0].take_within(SOON).unwrap().0, answer);
    assert_eq!(peers[2].take(), None);
    // The reply comes after the rounds that forwarded these frames.
    let stats = running.handle().stats().unwrap();
    assert_eq!((stats.ports.len(), stats.addresses), (3, 2));
    assert_eq!((peers[0].completed(), peers[1].completed()), (1, 1));
    assert_eq!((peers[0].flushed(), peers[2].flushed()), (1, 1));
    assert_eq!(stats.ports[1].name, "b");
    assert!(stats.ports[1].counters.contains(&("rx_bytes", 1514)));
}

#[test]
fn lent_frame_is_forwarded_by_patch() {
    let running = Running::new(Fabric::Patch(Patch::new()));
    let (lending, peer) = port();
    running.add("lending", lending.lending());
    let other = running.peer("other");
    let long = frame(mac(1), mac(2), 1400);
    peer.send(&long, OffloadMeta::PLAIN);
    assert_eq!(other.take_within(SOON).unwrap().0, long);
    let refused = running.handle().add_port(Box::new(port().0), PortPolicy::default(), "third");
    assert!(matches!(refused, Err(AddPortError::Attach(AttachError::Full { limit: 2 }))));
}

#[test]
fn port_waits_for_at_most_one_budget_of_another() {
    let (pairs, peers): (Vec<_>, Vec<_>) = (0..3).map(|_| port()).unzip();
    let (mut worker, _handle) = manual(pairs);
    for _ in 0..1000 {
        peers[0].send(&frame(mac(9), mac(1), 60), OffloadMeta::PLAIN);
    }
    peers[1].send(&frame(mac(9), mac(2), 60), OffloadMeta::PLAIN);
    assert!(worker.round());
    assert_eq!((peers[0].completed(), peers[1].completed()), (64, 1));
    let flushed: Vec<_> = peers.iter().map(MemoryPeer::flushed).collect();
    assert_eq!(flushed, [1, 1, 1], "one flush a round");
}

/// Port that always has a frame, and needs 2 ms to receive it.
struct Costly {
    counters: Arc<ringfence_frame::counters::PortCounters>,
}

impl Port for Costly {
    fn receive(&mut self, batch: &mut Batch, _: usize) -> Result<ringfence_frame::Received, Fault> {
        let begin = monotonic();
        while monotonic() - begin < Duration::from_millis(2) {}
        let bytes = frame(BROADCAST, mac(9), 60);
        let at = batch.reserve(60).unwrap();
        batch.scratch_mut(at..at + 60).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, 60, OffloadMeta::PLAIN).unwrap();
        self.counters.received(1, 60);
        Ok(ringfence_frame::Received { frames: 1, work: 1 })
    }
    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn transmit(
        &mut self,
        _: &Batch,
        frames: &[u32],
    ) -> Result<ringfence_frame::Transmitted, Fault> {
        Ok(ringfence_frame::Transmitted { sent: frames.len(), dropped: 0 })
    }
    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(true)
    }
    fn wait_fds(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        Vec::new()
    }
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::plain(1500)
    }
    fn counters(&self) -> &Arc<ringfence_frame::counters::PortCounters> {
        &self.counters
    }
}

#[test]
fn costly_port_under_contention_is_served_less_often() {
    let (cheap, peer) = port();
    let (mut worker, _handle) = manual(vec![cheap]);
    let costly = Costly { counters: Arc::default() };
    let counters = Arc::clone(&costly.counters);
    add(&mut worker, costly, "costly");
    let mut cheap_polls = 0;
    for _ in 0..200 {
        let before = peer.completed();
        for _ in 0..64 {
            peer.send(&frame(mac(9), mac(1), 60), OffloadMeta::PLAIN);
        }
        worker.now = monotonic();
        assert!(worker.round());
        cheap_polls += u64::from(peer.completed() > before);
        while peer.take().is_some() {}
    }
    // Other load may interrupt either port, so the bound is loose; one poll of `Costly` costs ten of the other.
    let polls = counters.rx_frames.get();
    assert!(polls >= 1 && cheap_polls > 2 * polls, "{polls} costly polls, {cheap_polls} others");
    while peer.completed() < 200 * 64 {
        worker.now = monotonic();
        worker.round();
    }
    let polls = counters.rx_frames.get();
    // As the only port with work it is polled in every round.
    for _ in 0..10 {
        worker.now = monotonic();
        assert!(worker.round());
    }
    assert_eq!(counters.rx_frames.get() - polls, 10);
}

#[test]
fn full_port_drops_flooded_frames_and_other_port_gets_them() {
    let (small, small_peer) = MemoryPort::pair(3, PortCapabilities::plain(1500)).unwrap();
    let (large, large_peer) = port();
    let (from, from_peer) = port();
    let (mut worker, _handle) = manual(vec![small, large, from]);
    for _ in 0..50 {
        from_peer.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    }
    worker.round();
    assert_eq!(small_peer.counters().drops(DropReason::PortFull), 47);
    assert_eq!(large_peer.counters().tx_frames.get(), 50);
}

#[test]
fn fault_removes_only_its_port_and_reports_reason() {
    let running = Running::new(switch());
    let (a, b, c) = (running.peer("a"), running.peer("b"), running.peer("c"));
    b.misbehave();
    let gone = running.gone.recv_timeout(SOON).unwrap();
    assert_eq!((gone.id, gone.name.as_str()), (PortId(1), "b"));
    assert!(matches!(gone.reason, Fault::Misbehaved(_)));
    drop(c);
    let gone = running.gone.recv_timeout(SOON).unwrap();
    assert!(matches!(gone.reason, Fault::Gone), "{}", gone.reason);
    let d = running.peer("d");
    a.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    assert!(d.take_within(SOON).is_some());
    let names: Vec<_> =
        running.handle().stats().unwrap().ports.into_iter().map(|p| (p.id.0, p.name)).collect();
    assert_eq!(names, [(0, "a".into()), (3, "d".into())], "indices are reused, ids are not");
}

#[test]
fn removed_port_is_returned_and_unused() {
    let running = Running::new(switch());
    let (a, b) = (running.peer("a"), running.peer("b"));
    let (c, c_peer) = port();
    let id = running.add("c", c);
    a.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    assert!(c_peer.take_within(SOON).is_some());
    let port = running.handle().remove_port(id).pop().unwrap();
    assert!(running.handle().remove_port(id).is_empty());
    a.send(&frame(BROADCAST, mac(1), 61), OffloadMeta::PLAIN);
    b.take_within(SOON);
    assert_eq!(b.take_within(SOON).unwrap().0.len(), 61);
    assert_eq!(c_peer.take(), None);
    assert_eq!(port.counters().tx_frames.get(), 1);
}

#[test]
fn port_of_patch_with_few_slots_receives_frames_of_unknown_length() {
    let running = Running::new(Fabric::Patch(Patch::new()));
    // 18 buffers, as iPXE posts, and no segmentation: the longest frame would take 48 of them.
    let (few, few_peer) = MemoryPort::pair(18, PortCapabilities::plain(1500)).unwrap();
    running.add("few", few.with_backpressure());
    let (tap, tap_peer) = port();
    running.add("tap", tap.level_triggered().of_unknown_lengths(65_553));
    for n in 0..200u16 {
        let mut numbered = frame(mac(1), mac(2), 60);
        numbered[14..16].copy_from_slice(&n.to_be_bytes());
        tap_peer.send(&numbered, OffloadMeta::PLAIN);
    }
    for n in 0..200u16 {
        let (got, _) = few_peer.take_within(SOON).unwrap();
        assert_eq!(got[14..16], n.to_be_bytes());
    }
    assert_eq!(few_peer.counters().drops_total() + tap_peer.counters().drops_total(), 0);
}

#[test]
fn raised_mtu_of_connected_port_admits_longer_frames() {
    let running = Running::new(Fabric::Patch(Patch::new()));
    let (one, from) = port();
    running.add("one", one);
    let (other, to) = MemoryPort::pair(8, PortCapabilities::plain(1500)).unwrap();
    let other = running.add("other", other);
    from.send(&frame(mac(1), mac(2), 8000), OffloadMeta::PLAIN);
    from.send(&frame(mac(1), mac(2), 1514), OffloadMeta::PLAIN);
    assert_eq!(to.take_within(SOON).unwrap().0.len(), 1514);
    assert_eq!(to.counters().drops(DropReason::TooLong), 1);
    let set = running.handle().execute(other, 0, PortCommand::SetMtu(9000));
    assert!(matches!(set, Some(PortReply::MtuSet)));
    from.send(&frame(mac(1), mac(2), 8000), OffloadMeta::PLAIN);
    assert_eq!(to.take_within(SOON).unwrap().0.len(), 8000);
}

#[test]
fn capabilities_that_a_port_changes_by_itself_hold_for_the_next_frames() {
    let running = Running::new(Fabric::Patch(Patch::new()));
    let (one, from) = port();
    running.add("one", one);
    let (other, to) = MemoryPort::pair(8, PortCapabilities::plain(1500)).unwrap();
    running.add("other", other);
    from.send(&frame(mac(1), mac(2), 8000), OffloadMeta::PLAIN);
    from.send(&frame(mac(1), mac(2), 1514), OffloadMeta::PLAIN);
    assert_eq!(to.take_within(SOON).unwrap().0.len(), 1514);
    to.set_mtu(9000);
    // The change is known once a later frame of that port has arrived.
    to.send(&frame(mac(2), mac(1), 60), OffloadMeta::PLAIN);
    assert_eq!(from.take_within(SOON).unwrap().0.len(), 60);
    from.send(&frame(mac(1), mac(2), 8000), OffloadMeta::PLAIN);
    assert_eq!(to.take_within(SOON).unwrap().0.len(), 8000);
}

#[test]
fn full_port_of_patch_slows_sender_without_loss() {
    let running = Running::new(Fabric::Patch(Patch::new()));
    let (slow, slow_peer) = MemoryPort::pair(4, PortCapabilities::plain(1500)).unwrap();
    running.add("slow", slow.with_backpressure());
    let (fast_port, fast) = port();
    running.add("fast", fast_port.level_triggered());
    for n in 0..500u16 {
        let mut numbered = frame(mac(1), mac(2), 60);
        numbered[14..16].copy_from_slice(&n.to_be_bytes());
        fast.send(&numbered, OffloadMeta::PLAIN);
    }
    // The slow port is full and the sender has an event pending: the worker must sleep.
    while slow_peer.counters().tx_frames.get() < 4 {
        std::thread::yield_now();
    }
    assert_sleeps(&running);
    for n in 0..500u16 {
        let (got, _) = slow_peer.take_within(SOON).unwrap();
        assert_eq!(got[14..16], n.to_be_bytes());
    }
    assert_eq!(slow_peer.counters().drops_total() + fast.counters().drops_total(), 0);
}

/// Creates a worker with a port that reports room for four frames, one with room for all, and two senders.
/// The switch knows their addresses, 1 to 4.
fn narrow_wide_and_two_senders() -> (DataplaneWorker, DataplaneHandle, [MemoryPeer; 4]) {
    let (narrow, narrow_peer) = MemoryPort::pair(4, PortCapabilities::plain(1500)).unwrap();
    let ((wide, wide_peer), (from, from_peer), (other, other_peer)) = (port(), port(), port());
    let peers = [narrow_peer, wide_peer, from_peer, other_peer];
    let (mut worker, handle) = manual(vec![narrow.with_backpressure(), wide, from, other]);
    for (peer, n) in peers.iter().zip(1..) {
        peer.send(&frame(BROADCAST, mac(n), 60), OffloadMeta::PLAIN);
        round(&mut worker);
        peers.iter().for_each(|peer| while peer.take().is_some() {});
    }
    (worker, handle, peers)
}

/// Runs a round in which no time passes.
fn round(worker: &mut DataplaneWorker) {
    worker.round();
    worker.end_round();
}

/// Takes all frames that the port transmitted to its peer, and returns their number.
fn take_all(peer: &MemoryPeer) -> usize {
    core::iter::from_fn(|| peer.take()).count()
}

fn send(peer: &MemoryPeer, count: usize, to: u8, from: u8) {
    for _ in 0..count {
        peer.send(&frame(mac(to), mac(from), 60), OffloadMeta::PLAIN);
    }
}

#[test]
fn sender_to_one_full_port_waits_without_loss() {
    let (mut worker, _handle, [narrow, wide, from, other]) = narrow_wide_and_two_senders();
    send(&from, 1, 1, 3);
    round(&mut worker);
    assert_eq!(take_all(&narrow), 1);
    send(&from, 50, 1, 3);
    let mut arrived = 0;
    for _ in 0..20 {
        round(&mut worker);
        // Senders to other ports do not wait.
        send(&other, 64, 2, 4);
        round(&mut worker);
        assert_eq!(take_all(&wide), 64);
        arrived += take_all(&narrow);
    }
    assert_eq!(arrived, 50);
    let counters = narrow.counters();
    assert_eq!((counters.drops_total(), counters.hold_ups.get() > 0), (0, true));
}

#[test]
fn sender_to_stalled_port_waits_for_its_budget_only() {
    let (mut worker, _handle, [narrow, wide, from, _other]) = narrow_wide_and_two_senders();
    send(&from, 1, 1, 3);
    round(&mut worker);
    take_all(&narrow);
    // The frames for another port are behind the waiting ones.
    send(&from, 50, 1, 3);
    send(&from, 5, 2, 3);
    for _ in 0..10 {
        round(&mut worker);
    }
    assert_eq!((narrow.counters().drops_total(), take_all(&wide)), (0, 0), "the sender waits");
    let end = worker.ports[0].as_ref().unwrap().wakeup_time().unwrap();
    assert!(end - worker.now <= Duration::from_millis(10), "the sleep ends with the budget");
    worker.now = end;
    round(&mut worker);
    round(&mut worker);
    assert_eq!((narrow.counters().drops(DropReason::PortFull), take_all(&wide)), (46, 5));
    // Without a budget no sender waits, until the port accepts frames again.
    for _ in 0..10 {
        send(&from, 60, 1, 3);
        send(&from, 4, 2, 3);
        round(&mut worker);
        assert_eq!(take_all(&wide), 4);
    }
    assert_eq!(narrow.counters().hold_ups.get(), 1);
}

#[test]
fn port_that_was_drained_is_left_out_of_one_round_unless_it_is_woken() {
    let (tap, tap_peer) = port();
    let (other, other_peer) = port();
    let (mut worker, _handle) = manual(vec![tap.level_triggered(), other]);
    let round = |worker: &mut DataplaneWorker| {
        worker.round();
        worker.end_round();
        (tap_peer.receives(), other_peer.receives())
    };
    assert_eq!(round(&mut worker), (1, 1));
    assert_eq!(round(&mut worker), (1, 2), "it was empty");
    // A busy worker finds the frame one round later; one that sleeps is woken by it.
    tap_peer.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    assert_eq!(round(&mut worker), (2, 3));
    assert_eq!(take_all(&other_peer), 1);
    tap_peer.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    worker.sleep();
    assert_eq!(round(&mut worker), (3, 4));
    assert_eq!(take_all(&other_peer), 1);
    assert_eq!(round(&mut worker), (3, 5));
    assert_eq!(round(&mut worker), (4, 6));
    // The event of the frame that it has received is still there.
    worker.sleep();
    assert_eq!(round(&mut worker), (5, 7));
    assert_eq!(round(&mut worker), (5, 8));
    // An event of another port does not concern it.
    other_peer.announce();
    worker.sleep();
    assert_eq!(round(&mut worker), (5, 9));
    assert_eq!(round(&mut worker), (6, 10));
}

#[test]
fn sender_to_several_ports_does_not_wait() {
    let (mut worker, _handle, [narrow, wide, from, _other]) = narrow_wide_and_two_senders();
    for _ in 0..50 {
        send(&from, 1, 1, 3);
        send(&from, 1, 2, 3);
        round(&mut worker);
    }
    assert_eq!(take_all(&wide), 50);
    assert_eq!((take_all(&narrow), narrow.counters().drops(DropReason::PortFull)), (4, 46));
}

/// Waits until the worker neither wakes up nor makes a system call for a tenth of a second. On a busy machine, it may have
/// something left to do after a shorter rest.
fn assert_sleeps(running: &Running) {
    let counts = || (running.system.wakeups.get(), running.system.syscalls.get());
    let end = std::time::Instant::now() + SOON;
    loop {
        let before = counts();
        std::thread::sleep(Duration::from_millis(100));
        if counts() == before {
            return;
        }
        assert!(std::time::Instant::now() < end, "the worker does not sleep: {:?}", counts());
    }
}

#[test]
fn idle_worker_sleeps() {
    let running = Running::new(switch());
    let (_a, _b) = (running.peer("a"), running.peer("b"));
    assert_sleeps(&running);
}

#[test]
fn xsa_332_event_storm_is_throttled_and_other_port_is_served() {
    let running = Running::new(switch());
    let (storm, a, b) = (running.peer("storm"), running.peer("a"), running.peer("b"));
    let begin = monotonic();
    let mut notified = 0;
    while monotonic() - begin < Duration::from_millis(300) {
        storm.announce();
        notified += 1;
    }
    let spurious = storm.counters().spurious_wakeups.get();
    let throttles = storm.counters().throttles.get();
    assert!(throttles >= 1, "{notified} notifications, {spurious} spurious");
    // 16 events are tolerated. After that each throttling ignores events for 5 ms of the elapsed time.
    let elapsed = u64::try_from((monotonic() - begin).as_millis()).unwrap();
    assert!(spurious <= 16 + 8 + elapsed / 5, "{spurious} in {elapsed} ms");
    a.send(&frame(BROADCAST, mac(1), 60), OffloadMeta::PLAIN);
    assert!(b.take_within(SOON).is_some());
    storm.send(&frame(BROADCAST, mac(2), 61), OffloadMeta::PLAIN);
    assert_eq!(b.take_within(SOON).unwrap().0.len(), 61, "the throttled port is still served");
    assert_eq!(b.counters().throttles.get(), 0);
}

#[test]
fn blank_checksum_is_completed_for_plain_port() {
    let (plain, plain_peer) = port();
    let any = PortCapabilities {
        checksum: ringfence_frame::ChecksumOffload::Any,
        ..PortCapabilities::plain(1500)
    };
    let (any_port, any_peer) = MemoryPort::pair(256, any).unwrap();
    let (from, from_peer) = port();
    let (mut worker, _handle) = manual(vec![any_port, plain, from.lending()]);
    let mut blank = frame(BROADCAST, mac(1), HEADER_MAX * 4 + 1);
    blank[40..42].fill(0);
    let checksum = Checksum::Partial { start: 34, offset: 6 };
    from_peer.send(&blank, OffloadMeta { checksum, gso: None });
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1000 });
    from_peer.send(&blank, OffloadMeta { checksum, gso });
    worker.round();
    assert_eq!(any_peer.take().unwrap(), (blank, OffloadMeta { checksum, gso: None }));
    let (bytes, meta) = plain_peer.take().unwrap();
    assert!(meta.is_finished());
    assert_eq!(internet_checksum(&bytes[34..]), 0);
    assert_eq!((any_peer.take(), plain_peer.take()), (None, None));
    assert_eq!(
        plain_peer.counters().drops(DropReason::BadOffload),
        1,
        "GSO metadata on a frame without TCP"
    );
}

/// Sends frames through a patch to a port with these capabilities, in one round. Returns what the port gets.
fn through_patch(
    sent: &[(Vec<u8>, OffloadMeta)],
    capabilities: PortCapabilities,
    join_in_patch: bool,
) -> Vec<(Vec<u8>, OffloadMeta)> {
    let fabric = Fabric::Patch(Patch::new());
    let (mut worker, _handle) =
        DataplaneWorker::new(fabric, DataplaneConfig::default(), Arc::default(), |_| ()).unwrap();
    let (from, from_peer) = port();
    let (to, to_peer) = MemoryPort::pair(256, capabilities).unwrap();
    add(&mut worker, from, "from");
    let policy = PortPolicy { join_in_patch, ..PortPolicy::default() };
    worker.add(Some(Box::new(to)), 1, None, policy, "to".into()).unwrap();
    sent.iter().for_each(|(bytes, meta)| from_peer.send(bytes, *meta));
    worker.round();
    std::iter::from_fn(|| to_peer.take()).collect()
}

#[test]
fn segments_are_joined_in_patch_only_if_policy_of_port_says_so() {
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1400 });
    let whole = (
        tcp_frame(false, 14_000),
        OffloadMeta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso },
    );
    let segments =
        through_patch(std::slice::from_ref(&whole), PortCapabilities::plain(1500), false);
    assert_eq!(segments.len(), 10);
    let takes_all = PortCapabilities {
        checksum: ringfence_frame::ChecksumOffload::Any,
        gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
        scatter_gather: true,
        ..PortCapabilities::plain(1500)
    };
    assert_eq!(through_patch(&segments, takes_all, true), [whole]);
    assert_eq!(through_patch(&segments, takes_all, false), segments);
    assert_eq!(through_patch(&segments, PortCapabilities::plain(1500), true), segments);
}

#[test]
fn worker_ends_on_stop_and_on_drop_of_last_handle() {
    let running = Running::new(switch());
    let _peer = running.peer("a");
    let other = running.handle().clone();
    other.stop();
    let late = loop {
        match other.add_port(Box::new(port().0), PortPolicy::default(), "late") {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(late, AddPortError::Stopped));
    assert_eq!(other.stats(), None);
    drop((other, running));
    // The drop joins the thread, which ends because the last handle is dropped.
    drop(Running::new(switch()));
}
