//! Vifs of several queues between two domains of one process.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod pair;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pair::{Pair, carry};
use ringfence_access::Mode;
use ringfence_frame::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_frame::steer::Steering;
use ringfence_net::commands::{VifReply, VifSettings};
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_offload::OffloadMeta;
use ringfence_offload::flow_hash::FlowFieldSet;
use ringfence_sys::clock::Clock;
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

/// Returns a TCP segment of a flow, with its number in the payload.
fn segment(flow: u16, number: u32) -> Vec<u8> {
    let mut frame = vec![0u8; 200];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
    frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&186u16.to_be_bytes());
    frame[23] = 6;
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..36].copy_from_slice(&flow.to_be_bytes());
    frame[36..38].copy_from_slice(&80u16.to_be_bytes());
    frame[46] = 0x50;
    frame[54..58].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Returns the numbers of each flow's segments, in the order of arrival.
fn flows(frames: &[Vec<u8>]) -> BTreeMap<u16, Vec<u32>> {
    let mut flows = BTreeMap::<_, Vec<u32>>::new();
    for frame in frames {
        let flow = u16::from_be_bytes([frame[34], frame[35]]);
        let number = u32::from_be_bytes(frame[54..58].try_into().unwrap());
        flows.entry(flow).or_default().push(number);
    }
    flows
}

fn many() -> Vec<Vec<u8>> {
    (0..40).flat_map(|number| (1000..1032).map(move |flow| segment(flow, number))).collect()
}

fn both_ways(front: &mut dyn Port, back: &mut dyn Port) {
    let sent = many();
    for (from, to) in [(0, 1), (1, 0)] {
        let arrived = match (from, to) {
            (0, _) => carry(front, back, &sent),
            _ => carry(back, front, &sent),
        };
        assert_eq!(arrived.len(), sent.len());
        assert_eq!(flows(&arrived), flows(&sent), "nothing of a flow overtakes");
    }
}

#[test]
fn flows_use_several_queues_and_stay_in_order() {
    for mode in Mode::NETWORK {
        let mut pair = Pair::new(mode);
        pair.with_queues(8, 3, mode);
        pair.connect();
        assert_eq!(pair.front.queues(), 3);
        assert_eq!(pair.back.connection().unwrap().queues, 3);
        if mode == Mode::Staging {
            assert_eq!(pair.stage().refused, 0);
            assert_eq!(
                pair.back.staged(),
                3 * u32::try_from(ringfence_net::netfront::QUEUE_PAGES).unwrap()
            );
        }
        let (front, back) = pair.ports();
        assert_eq!(front.wait_fds().len(), 6, "each has two channels of its own");
        both_ways(front, back);
        // Each queue has work: the frames of one call are on several rings.
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty());
    }
}

#[test]
fn number_of_queues_is_negotiated_at_each_connection() {
    let mut pair = Pair::new(Mode::Copy);
    for (offered, wanted, got) in [(4, 1, 1), (4, 3, 3), (2, 3, 2), (1, 3, 1), (4, 2, 2)] {
        pair.with_queues(offered, wanted, Mode::Copy);
        pair.connect();
        assert_eq!(pair.front.queues(), got);
        let front = pair.device.frontend_path();
        let key = |pair: &mut Pair, key: &str| {
            pair.back_store.read_opt(&format!("{front}/{key}")).unwrap().is_some()
        };
        // Keys of both forms never exist together.
        assert_eq!(key(&mut pair, "tx-ring-ref"), got == 1);
        assert_eq!(key(&mut pair, "event-channel-tx"), got == 1);
        assert_eq!(key(&mut pair, "multi-queue-num-queues"), got > 1);
        for queue in 0..4 {
            assert_eq!(key(&mut pair, &format!("queue-{queue}")), got > 1 && queue < got);
        }
        let (ahead, behind) = pair.ports();
        both_ways(ahead, behind);
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        let counts = ringfence_platform::Platform::counters(&pair.back_platform).values();
        assert_eq!(counts.grant_maps, counts.grant_unmaps, "nothing stays mapped");
        pair.front_store.write(&format!("{front}/state"), "1").unwrap();
    }
}

#[test]
fn queue_count_beyond_offer_or_zero_is_refused() {
    for queues in ["0", "3", "4294967295", "-1", "two"] {
        let mut pair = Pair::new(Mode::Copy);
        pair.with_queues(2, 1, Mode::Copy);
        pair.look();
        let front = pair.device.frontend_path();
        pair.front_store.write(&format!("{front}/multi-queue-num-queues"), queues).unwrap();
        pair.front_store.write(&format!("{front}/request-rx-copy"), "1").unwrap();
        pair.front_store.write(&format!("{front}/state"), "4").unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        assert_eq!(pair.state(true), XenbusState::Closing, "{queues}");
        let rules = pair.back.rules();
        let broken = rules.get("connect_too_many_queues") + rules.get("connect_not_a_number");
        assert_eq!(broken, 1, "{queues}: {:?}", rules.all());
    }
}

#[test]
fn missing_queue_directory_ends_device() {
    let mut pair = Pair::new(Mode::Copy);
    pair.with_queues(2, 2, Mode::Copy);
    pair.look();
    // Before the backend reads the keys, the second queue's ring is removed.
    let ring = format!("{}/queue-1/rx-ring-ref", pair.device.frontend_path());
    pair.front_store.rm(&ring).unwrap();
    pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(pair.state(true), XenbusState::Closing);
    assert_eq!(pair.back.rules().get("connect_missing_key"), 1);
    let counts = ringfence_platform::Platform::counters(&pair.back_platform).values();
    assert_eq!(counts.grant_maps, counts.grant_unmaps);
}

/// Checks that the guest's hash configuration selects the queue, and that the hash is passed on, in every mode:
/// the frontend refuses a hash without its flag, and a flag without a hash.
#[test]
fn guest_hash_configuration_selects_queue() {
    for mode in Mode::NETWORK {
        let mut pair = Pair::new(mode);
        pair.with_queues(3, 3, mode);
        pair.connect();
        if mode == Mode::Staging {
            assert_eq!(pair.stage().refused, 0);
        }
        let (front, back) = pair.ports();
        let steering = Arc::new(Steering::new(&[7; 40], FlowFieldSet::ALL, vec![2], 3));
        for queue in 0..3 {
            let reply = back.execute(queue, PortCommand::Hash(Some(Arc::clone(&steering))));
            assert!(matches!(reply, PortReply::Hashing));
        }
        assert!(matches!(back.execute(3, PortCommand::Hash(None)), PortReply::Unsupported));
        let sent = many();
        // All packets take one ring, so that even packets of different flows stay in order.
        assert!(carry(back, front, &sent) == sent, "{mode:?}");
        let rules = pair.front.rules().all();
        assert!(rules.is_empty(), "{mode:?}: {rules:?}");
    }
}

/// Checks that the rate limit applies to the guest, not to each queue.
#[test]
fn rate_limit_is_independent_of_queue_count() {
    let mut pair = Pair::new(Mode::Copy);
    pair.with_queues(3, 3, Mode::Copy);
    let clock = Clock::standing();
    let options = BackendOptions { mode: Mode::Copy, mtu: 1500 };
    pair.back = VifBackend::new(pair.device, options).with_queues(3).with_clock(clock.clone());
    let rate = format!("{}/rate", pair.device.backend_path());
    pair.back_store.write(&rate, "1000,50000").unwrap();
    pair.connect();
    assert_eq!(pair.back.connection().unwrap().queues, 3);
    let (front, back) = pair.ports();
    let mut batch = Batch::default();
    for flow in 1000..1032 {
        let bytes = segment(flow, 0);
        let at = batch.reserve(bytes.len()).unwrap();
        batch.scratch_mut(at..at + bytes.len()).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, bytes.len(), OffloadMeta::PLAIN).unwrap();
    }
    let all: Vec<u32> = (0..32).collect();
    assert_eq!(front.transmit(&batch, &all).unwrap().sent, 32);
    front.flush().unwrap();
    let mut came = Vec::new();
    for _ in 0..8 {
        batch.clear();
        // In these rounds, each queue is served first once.
        let rounds = (0..4).map(|_| back.receive(&mut batch, 64).unwrap().frames);
        came.push(rounds.sum::<usize>());
        batch.clear();
        back.complete().unwrap();
        clock.advance(Duration::from_millis(50));
    }
    assert_eq!(came, [5, 5, 5, 5, 5, 5, 2, 0], "1000 bytes an interval, of 200 each");
}

/// Checks that each part has every other queue, and works on a thread of its own.
#[test]
fn parts_of_vif_work_on_threads_of_their_own() {
    for mode in Mode::NETWORK {
        let mut pair = Pair::new(mode);
        pair.with_queues(4, 4, mode);
        pair.connect();
        if mode == Mode::Staging {
            assert_eq!(pair.stage().refused, 0);
        }
        let (front, back) = pair.ports();
        let (mut front_other, mut back_other) = (front.split_off(2), back.split_off(2));
        assert_eq!((front_other.len(), back_other.len()), (1, 1));
        assert_eq!((front.wait_fds().len(), back_other[0].wait_fds().len()), (4, 4));
        // Queues keep their numbers.
        let steering = Arc::new(Steering::new(&[7; 40], FlowFieldSet::ALL, vec![2, 3], 4));
        for queue in 0..4u16 {
            let part = if queue % 2 == 0 { &mut *back } else { &mut *back_other[0] };
            let command = PortCommand::Hash(Some(Arc::clone(&steering)));
            assert!(matches!(part.execute(queue, command), PortReply::Hashing));
        }
        assert!(matches!(back.execute(4, PortCommand::Hash(None)), PortReply::Unsupported));
        std::thread::scope(|scope| {
            scope.spawn(|| both_ways(front, back));
            scope.spawn(|| both_ways(&mut *front_other[0], &mut *back_other[0]));
        });
        let sent = many().len() as u64;
        for part in [&*back, &*back_other[0], &*front, &*front_other[0]] {
            let counters = part.counters();
            assert_eq!((counters.rx_frames.get(), counters.tx_frames.get()), (sent, sent));
        }
        drop((front_other, back_other));
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty());
    }
}

/// Checks that all parts of a port share the guest's credit, and a change of its rate.
#[test]
fn parts_of_vif_share_rate_limit() {
    let mut pair = Pair::new(Mode::Copy);
    pair.with_queues(2, 2, Mode::Copy);
    let clock = Clock::standing();
    let options = BackendOptions { mode: Mode::Copy, mtu: 1500 };
    pair.back = VifBackend::new(pair.device, options).with_queues(2).with_clock(clock.clone());
    let rate = format!("{}/rate", pair.device.backend_path());
    pair.back_store.write(&rate, "1000,50000").unwrap();
    pair.connect();
    let (front, back) = pair.ports();
    let (mut front_other, mut back_other) = (front.split_off(2), back.split_off(2));
    let mut batch = Batch::default();
    for number in 0..16 {
        let bytes = segment(1000, number);
        let at = batch.reserve(bytes.len()).unwrap();
        batch.scratch_mut(at..at + bytes.len()).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, bytes.len(), OffloadMeta::PLAIN).unwrap();
    }
    let all: Vec<u32> = (0..16).collect();
    for part in [front, &mut *front_other[0]] {
        assert_eq!(part.transmit(&batch, &all).unwrap().sent, 16);
        part.flush().unwrap();
    }
    let mut receive = |part: &mut dyn Port| {
        batch.clear();
        let came = part.receive(&mut batch, 64).unwrap().frames;
        batch.clear();
        part.complete().unwrap();
        came
    };
    let mut round = |back: &mut dyn Port, other: &mut dyn Port| {
        let came = receive(back) + receive(other);
        clock.advance(Duration::from_millis(50));
        came
    };
    let came: Vec<_> = (0..4).map(|_| round(back, &mut *back_other[0])).collect();
    assert_eq!(came, [5, 5, 5, 5], "1000 bytes an interval for both, of 200 each");
    let none = VifSettings::default();
    for part in [back, &mut *back_other[0]] {
        let reply = VifReply::of(part.execute(0, none.into()));
        assert!(matches!(reply, Some(VifReply::PolicySet)));
    }
    let (_, back) = pair.ports();
    assert_eq!(round(back, &mut *back_other[0]), 12);
}
