//! Dataplanes with many workers.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_frame::commands::PortCommand;
use ringfence_frame::steer::Steering;
use ringfence_offload::flow_hash::FlowFieldSet;

use super::*;
use crate::dataplane::handoff::BATCHES_MAX;

/// Dataplane with two or more workers, each on a thread of its own.
struct Group {
    handle: Option<DataplaneHandle>,
    gone: Receiver<PortGone>,
    threads: Vec<JoinHandle<()>>,
}

/// Creates workers that no thread runs yet.
fn workers(count: usize, fabric: fn() -> Fabric) -> (Vec<DataplaneWorker>, Group) {
    let (sender, gone) = channel();
    let on_gone = move |port| drop(sender.send(port));
    let config = DataplaneConfig::default();
    let (workers, handle) =
        DataplaneWorker::group(count, fabric, config, &Arc::default(), on_gone).unwrap();
    (workers, Group { handle: Some(handle), gone, threads: Vec::new() })
}

impl Group {
    fn new(count: usize, fabric: fn() -> Fabric) -> Group {
        let (workers, mut group) = workers(count, fabric);
        let run = |worker: DataplaneWorker| std::thread::spawn(move || worker.run());
        group.threads = workers.into_iter().map(run).collect();
        group
    }

    fn handle(&self) -> &DataplaneHandle {
        self.handle.as_ref().unwrap()
    }

    /// Adds a port with that number of queues.
    fn add(&self, queues: usize, mac: Option<Mac>) -> (PortId, Vec<MemoryPeer>) {
        let (ports, peers): (Vec<_>, Vec<_>) = (0..queues).map(|_| large_port()).unzip();
        (self.add_ports(ports, mac), peers)
    }

    fn add_ports(&self, ports: Vec<MemoryPort>, mac: Option<Mac>) -> PortId {
        let ports = ports.into_iter().map(|port| Box::new(port) as Box<dyn Port>).collect();
        let policy = PortPolicy { mac, ..PortPolicy::default() };
        self.handle().add_queues(ports, policy, "port").unwrap()
    }

    /// Returns the number of frames handed between workers, and of those dropped instead.
    fn handed_over(&self) -> (u64, u64) {
        let stats = self.handle().stats().unwrap();
        let Some(peers) = stats.ports.iter().find(|port| port.name == "relay") else {
            return (0, 0);
        };
        let of = |wanted| peers.counters.iter().find(|(name, _)| *name == wanted).unwrap().1;
        (of("tx_frames"), of("drop_relay_full"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.handle = None;
        for thread in self.threads.drain(..) {
            let joined = thread.join();
            assert!(joined.is_ok() || std::thread::panicking());
        }
    }
}

fn large_port() -> (MemoryPort, MemoryPeer) {
    MemoryPort::pair(100_000, PortCapabilities::plain(1500)).unwrap()
}

/// Builds a TCP segment of a flow with a number in its payload.
fn segment(dst: Mac, src: Mac, flow: u16, number: u32) -> Vec<u8> {
    let mut bytes = frame(dst, src, 60);
    bytes[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
    bytes[14..].fill(0);
    bytes[14] = 0x45;
    bytes[16..18].copy_from_slice(&46u16.to_be_bytes());
    bytes[23] = 6;
    bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[34..36].copy_from_slice(&flow.to_be_bytes());
    bytes[46] = 0x50;
    bytes[54..58].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Returns the flow and the number of a segment.
fn numbers(bytes: &[u8]) -> (u16, u32) {
    let flow = u16::from_be_bytes(bytes[34..36].try_into().unwrap());
    (flow, u32::from_be_bytes(bytes[54..58].try_into().unwrap()))
}

/// Receives `count` segments from all queues. Returns their numbers by queue and flow, in order of arrival.
fn collect(queues: &[MemoryPeer], count: usize) -> Vec<BTreeMap<u16, Vec<u32>>> {
    let mut arrived = vec![BTreeMap::<_, Vec<u32>>::new(); queues.len()];
    let mut total = 0;
    let end = std::time::Instant::now() + SOON;
    while total < count && std::time::Instant::now() < end {
        let before = total;
        for (flows, queue) in arrived.iter_mut().zip(queues) {
            while let Some((bytes, _)) = queue.take() {
                let (flow, number) = numbers(&bytes);
                flows.entry(flow).or_default().push(number);
                total += 1;
            }
        }
        if total == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(total, count);
    arrived
}

fn in_order(numbers: &[u32], count: u32) -> bool {
    numbers.iter().copied().eq(0..count)
}

#[test]
fn frames_between_ports_with_equal_queues_stay_on_their_worker() {
    let group = Group::new(3, switch);
    let (_, a) = group.add(3, Some(mac(1)));
    let (_, b) = group.add(3, Some(mac(2)));
    for number in 0..100 {
        for (queue, peer) in (0..).zip(&a) {
            peer.send(&segment(mac(2), mac(1), queue, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&b, 300);
    for (queue, flows) in (0..).zip(&arrived) {
        assert!(flows.len() == 1 && in_order(&flows[&queue], 100), "{flows:?}");
    }
    assert_eq!(group.handed_over(), (0, 0));
}

#[test]
fn flows_of_sender_with_fewer_queues_are_spread_in_order() {
    let group = Group::new(4, switch);
    let (_, one) = group.add(1, Some(mac(1)));
    let (_, many) = group.add(4, Some(mac(2)));
    let (flows, each) = (64, 50);
    for number in 0..each {
        for flow in 0..flows {
            one[0].send(&segment(mac(2), mac(1), flow, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&many, usize::from(flows) * each as usize);
    let mut seen = BTreeSet::new();
    for queue in &arrived {
        assert!(!queue.is_empty(), "each queue gets some of 64 flows");
        for (flow, numbers) in queue {
            assert!(in_order(numbers, each), "flow {flow}: {numbers:?}");
            assert!(seen.insert(*flow), "each flow uses one queue");
        }
    }
    // The reverse direction: only the first of the four queues has a counterpart.
    for (queue, peer) in (0..).zip(&many) {
        for number in 0..each {
            peer.send(&segment(mac(1), mac(2), queue, number), OffloadMeta::PLAIN);
        }
    }
    let back = collect(&one, 4 * each as usize);
    assert!(back[0].len() == 4 && back[0].values().all(|numbers| in_order(numbers, each)));
    assert_eq!(group.handed_over().1, 0);
}

#[test]
fn frames_to_guest_with_hashing_arrive_at_hashed_queue() {
    let group = Group::new(2, switch);
    let (_, from) = group.add(2, Some(mac(1)));
    let (id, to) = group.add(2, Some(mac(2)));
    // The mapping selects the second queue for every hash.
    let steering = Steering::new(&[7; 40], FlowFieldSet::ALL, vec![1], 2);
    let command = PortCommand::Hash(Some(Arc::new(steering)));
    // The ports of this test ignore the command; the workers use it.
    assert!(group.handle().execute(id, 0, command).is_some());
    for number in 0..20 {
        for (queue, peer) in (0..).zip(&from) {
            peer.send(&segment(mac(2), mac(1), queue, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&to, 40);
    assert!(arrived[0].is_empty() && arrived[1].len() == 2, "{arrived:?}");
    assert!(arrived[1].values().all(|numbers| in_order(numbers, 20)));
    assert_eq!(group.handed_over(), (20, 0));
}

#[test]
fn broadcast_from_any_queue_reaches_each_port_once() {
    let group = Group::new(3, switch);
    let ports: Vec<_> = [3, 1, 2, 1].map(|queues| group.add(queues, None).1).into();
    for (queue, peer) in (0..).zip(&ports[0]) {
        peer.send(&segment(BROADCAST, mac(1), queue, 0), OffloadMeta::PLAIN);
    }
    for port in &ports[1..] {
        let arrived = collect(port, 3);
        let flows: usize = arrived.iter().map(BTreeMap::len).sum();
        assert_eq!(flows, 3, "{arrived:?}");
    }
    assert!(ports[0].iter().all(|peer| peer.take().is_none()));
}

#[test]
fn address_learned_by_one_worker_is_known_to_others() {
    let group = Group::new(2, switch);
    let (_, a) = group.add(2, None);
    let (_, b) = group.add(2, None);
    let (_, other) = group.add(2, None);
    // Worker 1 learns the address from the second queue; worker 0 forwards the answer.
    b[1].send(&segment(BROADCAST, mac(2), 0, 0), OffloadMeta::PLAIN);
    collect(&a, 1);
    collect(&other, 1);
    a[0].send(&segment(mac(2), mac(1), 0, 1), OffloadMeta::PLAIN);
    assert_eq!(collect(&b, 1)[0][&0], [1]);
    a[1].send(&segment(BROADCAST, mac(1), 0, 2), OffloadMeta::PLAIN);
    assert_eq!(collect(&other, 1)[1][&0], [2], "no flooded frame before it");
}

#[test]
fn lent_frame_for_other_worker_is_copied() {
    let group = Group::new(2, switch);
    let (first, one) = large_port();
    let (second, two) = large_port();
    group.add_ports(vec![first.lending(), second.lending()], Some(mac(1)));
    let (_, to) = group.add(1, Some(mac(2)));
    let long = frame(mac(2), mac(1), 1514);
    for peer in [&one, &two] {
        peer.send(&long, OffloadMeta::PLAIN);
        let (bytes, _) = to[0].take_within(SOON).unwrap();
        assert!(bytes == long);
    }
    assert_eq!(group.handed_over(), (1, 0));
}

#[test]
fn fault_of_one_part_removes_port_and_frees_its_address() {
    let group = Group::new(2, switch);
    let (_, others) = group.add(2, Some(mac(2)));
    for part in 0..2 {
        let (id, peers) = group.add(2, Some(mac(1)));
        peers[part].misbehave();
        let mut gone = group.gone.recv_timeout(SOON).unwrap();
        assert_eq!((gone.id, gone.ports.len()), (id, 1));
        gone.collect_parts();
        assert_eq!(gone.ports.len(), 2);
        assert!(group.handle().remove_port(id).is_empty());
    }
    // The address is free again, on both workers.
    let (again, peers) = group.add(2, Some(mac(1)));
    for (queue, peer) in (0..).zip(&others) {
        peer.send(&segment(mac(1), mac(2), queue, 0), OffloadMeta::PLAIN);
    }
    assert!(collect(&peers, 2).iter().all(|flows| flows.len() == 1));
    assert_eq!(group.handle().remove_port(again).len(), 2);
}

#[test]
fn faults_of_two_parts_are_reported_as_one_port() {
    let group = Group::new(2, switch);
    let (id, peers) = group.add(2, Some(mac(1)));
    peers.iter().for_each(MemoryPeer::misbehave);
    let mut first = group.gone.recv_timeout(SOON).unwrap();
    first.collect_parts();
    // A report of the other part was sent before `collect_parts` returned.
    let second = group.gone.try_recv().ok();
    let parts = first.ports.len() + second.as_ref().map_or(0, |gone| gone.ports.len());
    assert_eq!((first.id, parts), (id, 2));
    assert!(second.is_none_or(|gone| gone.is_same_port(&first)));
}

/// Returns a flow whose frames go to the second of two parts.
fn flow_of_second(worker: &mut DataplaneWorker, to: PortIndex) -> u16 {
    let peers = worker.peers.as_mut().unwrap();
    let second = |flow: &u16| {
        let mut batch = Batch::default();
        let bytes = segment(BROADCAST, mac(1), *flow, 0);
        let at = batch.reserve(60).unwrap();
        batch.scratch_mut(at..at + 60).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, 60, OffloadMeta::PLAIN).unwrap();
        peers.worker_of_flow(to, &batch, 0) == 1
    };
    (0..).find(second).unwrap()
}

#[test]
fn frames_for_stalled_worker_are_bounded_and_counted() {
    let (mut workers, group) = workers(2, switch);
    let policy = |n| PortPolicy { mac: Some(mac(n)), ..PortPolicy::default() };
    let mut add = |parts: Vec<MemoryPort>, mac: u8| {
        let (count, mut parts, mut key) = (parts.len(), parts.into_iter(), None);
        for worker in &mut workers {
            let port = parts.next().map(|port| Box::new(port) as Box<dyn Port>);
            key = worker.add(port, count, key, policy(mac), "port".into()).ok();
        }
        key.unwrap().index
    };
    let ((one, peer), (first, _first), (second, second_peer)) =
        (large_port(), large_port(), large_port());
    add(vec![one], 1);
    let to = add(vec![first, second], 2);
    // A third port makes the broadcast frames go to two ports, so the sender does not wait.
    let (third, _third) = large_port();
    add(vec![third], 3);
    let flow = flow_of_second(&mut workers[0], PortIndex(u16::try_from(to).unwrap()));
    let sent = 64 * (BATCHES_MAX + 5);
    for number in 0..sent {
        let number = u32::try_from(number).unwrap();
        peer.send(&segment(BROADCAST, mac(1), flow, number), OffloadMeta::PLAIN);
        workers[0].round();
    }
    while workers[0].round() {}
    let counters = Arc::clone(&workers[0].peers.as_ref().unwrap().counters);
    let accepted = counters.tx_frames.get();
    assert_eq!(accepted + counters.drops(DropReason::HandoffFull), sent as u64);
    assert!((1..=64 * BATCHES_MAX as u64).contains(&accepted), "{accepted}");
    // When worker 1 runs, all accepted frames arrive in order, and all handoff batches are free again.
    while workers[1].round() {}
    let arrived: Vec<u32> =
        core::iter::from_fn(|| second_peer.take()).map(|(bytes, _)| numbers(&bytes).1).collect();
    assert_eq!(arrived.len() as u64, accepted);
    assert!(arrived.is_sorted());
    workers[0].round();
    assert_eq!(workers[0].peers.as_ref().unwrap().free_batches(1), BATCHES_MAX);
    drop(group);
}

#[test]
fn sender_to_one_port_waits_without_loss_while_no_handoff_batch_is_free() {
    let (workers, mut group) = workers(2, || Fabric::Patch(Patch::new()));
    let (begin, wait) = channel();
    let mut workers = workers.into_iter();
    let (mut first, second) = (workers.next().unwrap(), workers.next().unwrap());
    group.threads.push(std::thread::spawn(move || second.run()));
    group.threads.push(std::thread::spawn(move || {
        // Worker 0 executes commands, but runs no round until the test begins it.
        while wait.try_recv().is_err() {
            let _ = first.run_commands();
        }
        first.run();
    }));
    let (_, tap) = group.add(2, None);
    let (_, vif) = group.add(1, None);
    let count = 64 * 3 * BATCHES_MAX;
    for number in 0..count {
        let number = u32::try_from(number).unwrap();
        tap[1].send(&segment(mac(2), mac(1), 1, number), OffloadMeta::PLAIN);
    }
    // Worker 1 fills all handoff batches and then sleeps.
    let end = std::time::Instant::now() + SOON;
    while tap[1].completed() < BATCHES_MAX as u64 && std::time::Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    let accepted = tap[1].completed();
    assert!(accepted < count as u64, "{accepted} of {count}");
    begin.send(()).unwrap();
    let arrived = collect(&vif, count);
    assert!(in_order(&arrived[0][&1], u32::try_from(count).unwrap()));
    assert_eq!(group.handed_over(), (count as u64, 0));
}

#[test]
fn port_of_single_worker_has_one_part_and_no_handoff() {
    let group = Group::new(1, switch);
    let (id, peers) = group.add(1, None);
    let (_, other) = group.add(1, None);
    other[0].send(&segment(BROADCAST, mac(1), 0, 0), OffloadMeta::PLAIN);
    assert!(peers[0].take_within(SOON).is_some());
    let stats = group.handle().stats().unwrap();
    let names: Vec<_> = stats.ports.into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["port", "port"]);
    assert_eq!(group.handle().remove_port(id).len(), 1);
}
