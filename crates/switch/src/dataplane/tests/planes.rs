//! Several threads.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_frame::commands::PortCommand;
use ringfence_frame::steer::Steering;
use ringfence_wire::netif::ctrl::HashTypes;

use super::*;
use crate::dataplane::relay::PARCELS_MAX;

/// A data plane of several threads.
struct Several {
    handle: Option<DataplaneHandle>,
    gone: Receiver<PortGone>,
    threads: Vec<JoinHandle<()>>,
}

fn planes(threads: usize, fabric: fn() -> Fabric) -> (Vec<Dataplane>, Several) {
    let (sender, gone) = channel();
    let on_gone = move |port| drop(sender.send(port));
    let config = DataplaneConfig::default();
    let (planes, handle) =
        Dataplane::several(threads, fabric, config, &Arc::default(), on_gone).unwrap();
    (planes, Several { handle: Some(handle), gone, threads: Vec::new() })
}

impl Several {
    fn new(threads: usize, fabric: fn() -> Fabric) -> Several {
        let (planes, mut several) = planes(threads, fabric);
        let run = |plane: Dataplane| std::thread::spawn(move || plane.run());
        several.threads = planes.into_iter().map(run).collect();
        several
    }

    fn handle(&self) -> &DataplaneHandle {
        self.handle.as_ref().unwrap()
    }

    /// A port of so many queues.
    fn add(&self, queues: usize, mac: Option<Mac>) -> (PortId, Vec<MemoryPeer>) {
        let (ports, peers): (Vec<_>, Vec<_>) = (0..queues).map(|_| large_port()).unzip();
        (self.add_ports(ports, mac), peers)
    }

    fn add_ports(&self, ports: Vec<MemoryPort>, mac: Option<Mac>) -> PortId {
        let ports = ports.into_iter().map(|port| Box::new(port) as Box<dyn Port>).collect();
        let policy = PortPolicy { mac, ..PortPolicy::default() };
        self.handle().add_queues(ports, policy, "port").unwrap()
    }

    /// Frames that one thread handed to another one, and those that it could not.
    fn relayed(&self) -> (u64, u64) {
        let stats = self.handle().stats().unwrap();
        let Some(relay) = stats.ports.iter().find(|port| port.name == "relay") else {
            return (0, 0);
        };
        let of = |wanted| relay.counters.iter().find(|(name, _)| *name == wanted).unwrap().1;
        (of("tx_frames"), of("drop_relay_full"))
    }
}

impl Drop for Several {
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

/// A TCP segment of a flow.
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

/// Flow and number.
fn numbers(bytes: &[u8]) -> (u16, u32) {
    let flow = u16::from_be_bytes(bytes[34..36].try_into().unwrap());
    (flow, u32::from_be_bytes(bytes[54..58].try_into().unwrap()))
}

/// What arrived of each flow at each queue, until there were so many at all queues.
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
fn ports_of_as_many_queues_do_not_concern_other_threads() {
    let several = Several::new(3, switch);
    let (_, a) = several.add(3, Some(mac(1)));
    let (_, b) = several.add(3, Some(mac(2)));
    for number in 0..100 {
        for (queue, peer) in (0..).zip(&a) {
            peer.send(&segment(mac(2), mac(1), queue, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&b, 300);
    for (queue, flows) in (0..).zip(&arrived) {
        assert!(flows.len() == 1 && in_order(&flows[&queue], 100), "{flows:?}");
    }
    assert_eq!(several.relayed(), (0, 0));
}

#[test]
fn the_flows_of_a_sender_with_fewer_queues_are_spread_and_stay_in_order() {
    let several = Several::new(4, switch);
    let (_, one) = several.add(1, Some(mac(1)));
    let (_, many) = several.add(4, Some(mac(2)));
    let (flows, each) = (64, 50);
    for number in 0..each {
        for flow in 0..flows {
            one[0].send(&segment(mac(2), mac(1), flow, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&many, usize::from(flows) * each as usize);
    let mut seen = BTreeSet::new();
    for queue in &arrived {
        assert!(!queue.is_empty(), "each queue has some of 64 flows");
        for (flow, numbers) in queue {
            assert!(in_order(numbers, each), "flow {flow}: {numbers:?}");
            assert!(seen.insert(*flow), "a flow takes one queue");
        }
    }
    // And back, from queues of which only the first has a counterpart.
    for (queue, peer) in (0..).zip(&many) {
        for number in 0..each {
            peer.send(&segment(mac(1), mac(2), queue, number), OffloadMeta::PLAIN);
        }
    }
    let back = collect(&one, 4 * each as usize);
    assert!(back[0].len() == 4 && back[0].values().all(|numbers| in_order(numbers, each)));
    assert_eq!(several.relayed().1, 0);
}

#[test]
fn a_guest_that_set_up_hashing_gets_its_packets_where_it_wants_them() {
    let several = Several::new(2, switch);
    let (_, from) = several.add(2, Some(mac(1)));
    let (id, to) = several.add(2, Some(mac(2)));
    // Everything to the second queue.
    let steering = Steering::new(&[7; 40], HashTypes::ALL, vec![1], 2);
    let order = PortCommand::Hash(Some(Arc::new(steering)));
    // The ports of this test have no use for it, the planes do.
    assert!(several.handle().order(id, 0, order).is_some());
    for number in 0..20 {
        for (queue, peer) in (0..).zip(&from) {
            peer.send(&segment(mac(2), mac(1), queue, number), OffloadMeta::PLAIN);
        }
    }
    let arrived = collect(&to, 40);
    assert!(arrived[0].is_empty() && arrived[1].len() == 2, "{arrived:?}");
    assert!(arrived[1].values().all(|numbers| in_order(numbers, 20)));
    assert_eq!(several.relayed(), (20, 0));
}

#[test]
fn a_frame_to_everybody_reaches_each_port_once_whatever_queue_it_came_by() {
    let several = Several::new(3, switch);
    let ports: Vec<_> = [3, 1, 2, 1].map(|queues| several.add(queues, None).1).into();
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
fn what_one_thread_learned_the_others_know() {
    let several = Several::new(2, switch);
    let (_, a) = several.add(2, None);
    let (_, b) = several.add(2, None);
    let (_, other) = several.add(2, None);
    // By its second queue the switch learns where it is; the answer comes by the first of the other.
    b[1].send(&segment(BROADCAST, mac(2), 0, 0), OffloadMeta::PLAIN);
    collect(&a, 1);
    collect(&other, 1);
    a[0].send(&segment(mac(2), mac(1), 0, 1), OffloadMeta::PLAIN);
    assert_eq!(collect(&b, 1)[0][&0], [1]);
    a[1].send(&segment(BROADCAST, mac(1), 0, 2), OffloadMeta::PLAIN);
    assert_eq!(collect(&other, 1)[1][&0], [2], "and nothing before it");
}

#[test]
fn frames_in_lent_memory_are_copied_for_another_thread() {
    let several = Several::new(2, switch);
    let (first, one) = large_port();
    let (second, two) = large_port();
    several.add_ports(vec![first.lending(), second.lending()], Some(mac(1)));
    let (_, to) = several.add(1, Some(mac(2)));
    let long = frame(mac(2), mac(1), 1514);
    for peer in [&one, &two] {
        peer.send(&long, OffloadMeta::PLAIN);
        let (bytes, _) = to[0].take_within(SOON).unwrap();
        assert!(bytes == long);
    }
    assert_eq!(several.relayed(), (1, 0));
}

#[test]
fn a_part_that_ends_takes_the_others_along_and_the_place_is_used_again() {
    let several = Several::new(2, switch);
    let (_, others) = several.add(2, Some(mac(2)));
    for part in 0..2 {
        let (id, peers) = several.add(2, Some(mac(1)));
        peers[part].misbehave();
        let mut gone = several.gone.recv_timeout(SOON).unwrap();
        assert_eq!((gone.id, gone.ports.len()), (id, 1));
        gone.gather();
        assert_eq!(gone.ports.len(), 2);
        assert!(several.handle().remove_port(id).is_empty());
    }
    // The address is free again, on both threads.
    let (again, peers) = several.add(2, Some(mac(1)));
    for (queue, peer) in (0..).zip(&others) {
        peer.send(&segment(mac(1), mac(2), queue, 0), OffloadMeta::PLAIN);
    }
    assert!(collect(&peers, 2).iter().all(|flows| flows.len() == 1));
    assert_eq!(several.handle().remove_port(again).len(), 2);
}

#[test]
fn two_parts_that_end_are_one_port() {
    let several = Several::new(2, switch);
    let (id, peers) = several.add(2, Some(mac(1)));
    peers.iter().for_each(MemoryPeer::misbehave);
    let mut first = several.gone.recv_timeout(SOON).unwrap();
    first.gather();
    // Whatever ended itself meanwhile was said before that.
    let second = several.gone.try_recv().ok();
    let parts = first.ports.len() + second.as_ref().map_or(0, |gone| gone.ports.len());
    assert_eq!((first.id, parts), (id, 2));
    assert!(second.is_none_or(|gone| gone.is_of_one_port(&first)));
}

/// A flow of which the second of two parts gets the frames.
fn flow_of_second(plane: &mut Dataplane, to: PortIndex) -> u16 {
    let relay = plane.relay.as_mut().unwrap();
    let second = |flow: &u16| {
        let mut batch = Batch::default();
        let bytes = segment(BROADCAST, mac(1), *flow, 0);
        let at = batch.reserve(60).unwrap();
        batch.scratch_mut(at..at + 60).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, 60, OffloadMeta::PLAIN).unwrap();
        relay.by_flow(to, &batch, 0) == 1
    };
    (0..).find(second).unwrap()
}

#[test]
fn what_is_under_way_to_a_thread_that_does_not_come_is_bounded_and_counted() {
    let (mut planes, several) = planes(2, switch);
    let policy = |n| PortPolicy { mac: Some(mac(n)), ..PortPolicy::default() };
    let mut put = |parts: Vec<MemoryPort>, mac: u8| {
        let (count, mut parts, mut entry) = (parts.len(), parts.into_iter(), None);
        for plane in &mut planes {
            let port = parts.next().map(|port| Box::new(port) as Box<dyn Port>);
            entry = plane.add(port, count, entry, policy(mac), "port".into()).ok();
        }
        entry.unwrap().place
    };
    let ((one, peer), (first, _first), (second, second_peer)) =
        (large_port(), large_port(), large_port());
    put(vec![one], 1);
    let to = put(vec![first, second], 2);
    // Who sends to several ports waits for none of them.
    let (third, _third) = large_port();
    put(vec![third], 3);
    let flow = flow_of_second(&mut planes[0], PortIndex(u16::try_from(to).unwrap()));
    let sent = 64 * (PARCELS_MAX + 5);
    for number in 0..sent {
        let number = u32::try_from(number).unwrap();
        peer.send(&segment(BROADCAST, mac(1), flow, number), OffloadMeta::PLAIN);
        planes[0].round();
    }
    while planes[0].round() {}
    let counters = Arc::clone(&planes[0].relay.as_ref().unwrap().counters);
    let taken = counters.tx_frames.get();
    assert_eq!(taken + counters.drops(DropReason::RelayFull), sent as u64);
    assert!((1..=64 * PARCELS_MAX as u64).contains(&taken), "{taken}");
    // When the other one comes everything that was taken arrives, in order, and there is room again.
    while planes[1].round() {}
    let arrived: Vec<u32> =
        core::iter::from_fn(|| second_peer.take()).map(|(bytes, _)| numbers(&bytes).1).collect();
    assert_eq!(arrived.len() as u64, taken);
    assert!(arrived.is_sorted());
    planes[0].round();
    assert_eq!(planes[0].relay.as_ref().unwrap().parcels(1), PARCELS_MAX);
    drop(several);
}

#[test]
fn who_sends_to_one_port_alone_is_held_up_while_no_parcel_is_free() {
    let (planes, mut several) = planes(2, || Fabric::Patch(Patch::new()));
    let (begin, wait) = channel();
    let mut planes = planes.into_iter();
    let (mut first, second) = (planes.next().unwrap(), planes.next().unwrap());
    several.threads.push(std::thread::spawn(move || second.run()));
    several.threads.push(std::thread::spawn(move || {
        // It carries out commands and nothing else until the test says so.
        while wait.try_recv().is_err() {
            first.obey();
        }
        first.run();
    }));
    let (_, tap) = several.add(2, None);
    let (_, vif) = several.add(1, None);
    let count = 64 * 3 * PARCELS_MAX;
    for number in 0..count {
        let number = u32::try_from(number).unwrap();
        tap[1].send(&segment(mac(2), mac(1), 1, number), OffloadMeta::PLAIN);
    }
    // The second thread takes what fits the parcels, and then sleeps.
    let end = std::time::Instant::now() + SOON;
    while tap[1].completed() < PARCELS_MAX as u64 && std::time::Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    let taken = tap[1].completed();
    assert!(taken < count as u64, "{taken} of {count}");
    begin.send(()).unwrap();
    let arrived = collect(&vif, count);
    assert!(in_order(&arrived[0][&1], u32::try_from(count).unwrap()));
    assert_eq!(several.relayed(), (count as u64, 0));
}

#[test]
fn with_one_thread_nothing_is_relayed_and_other_parts_are_refused() {
    let several = Several::new(1, switch);
    let (id, peers) = several.add(1, None);
    let (_, other) = several.add(1, None);
    other[0].send(&segment(BROADCAST, mac(1), 0, 0), OffloadMeta::PLAIN);
    assert!(peers[0].take_within(SOON).is_some());
    let stats = several.handle().stats().unwrap();
    let names: Vec<_> = stats.ports.into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["port", "port"]);
    assert_eq!(several.handle().remove_port(id).len(), 1);
}
