use proptest::prelude::*;
use ringfence_frame::DropReason;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};
use ringfence_platform::vhost::VhostEvents;
use ringfence_ring::split::QueueFeatures;
use ringfence_wire::virtio::{UsedElement, flag};

use super::mock::{Mock, MockState, lock, pair};
use super::receive::BUFFER;
use super::*;

const ALL: QueueFeatures = QueueFeatures { indirect: true, event_idx: true, in_order: false };
const NONE: QueueFeatures = QueueFeatures { indirect: false, event_idx: false, in_order: false };
const IN_ORDER: QueueFeatures = QueueFeatures { in_order: true, ..ALL };
const SHAPE: FrameShape = FrameShape { frames: 16, long: 4 };

type Pair = (VhostLink<Mock>, Arc<std::sync::Mutex<MockState>>);

fn link(features: QueueFeatures) -> Pair {
    pair([16, 32], features, SHAPE).unwrap()
}

/// Builds a frame of `len` bytes without offloads, behind a virtio-net header.
fn frame(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = vec![0; MODERN_LEN];
    bytes.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    bytes.resize(MODERN_LEN + len, value);
    bytes
}

fn bytes_of(frame: ringfence_frame::FrameView<'_>) -> Vec<u8> {
    let mut bytes = vec![0; frame.len()];
    assert_eq!(frame.copy_to(&mut bytes), frame.len());
    bytes
}

/// Compares bytes without printing large vectors on failure.
fn same(a: &[u8], b: &[u8]) -> bool {
    a == b
}

#[test]
fn received_frames_arrive_and_buffers_are_posted_again() {
    for features in [ALL, NONE, IN_ORDER] {
        let (mut link, ends) = link(features);
        let mut batch = Batch::default();
        for round in 0..50u8 {
            let lens = [60, 300, 1514, 50_000];
            for len in lens {
                assert!(lock(&ends).deliver(&frame(len, round)), "{len} in round {round}");
            }
            let _ = lock(&ends).receive.publish();
            let received = link.receive(&mut batch, 64).unwrap();
            assert_eq!(received.frames, lens.len());
            for (got, len) in batch.iter().zip(lens) {
                assert!(same(&bytes_of(got), &frame(len, round)[MODERN_LEN..]));
                assert_eq!(got.header().len(), len.min(256), "headers are private");
            }
            // The buffers stay with the link until `complete`.
            let taken: u16 =
                lens.iter().map(|len| u16::try_from(len.div_ceil(BUFFER)).unwrap()).sum();
            assert_eq!(lock(&ends).receive.available(), 16 - taken);
            batch.clear();
            link.complete().unwrap();
            assert_eq!(lock(&ends).receive.available(), 16);
        }
        assert_eq!(link.counters().rx_frames.get(), 200);
    }
}

#[test]
fn in_order_is_used_from_kernel_6_19_on() {
    for (release, kept) in [("6.1.0-51-amd64", false), ("6.18.44", false), ("", false)] {
        assert_eq!(supports_in_order(release), kept, "{release}");
    }
    assert!(
        supports_in_order("6.19.0") && supports_in_order("7.0-rc1") && supports_in_order("10.1")
    );
}

#[test]
fn receive_stops_at_batch_capacity_and_budget() {
    let (mut link, ends) = link(ALL);
    for _ in 0..10 {
        assert!(lock(&ends).deliver(&frame(100, 1)));
    }
    let _ = lock(&ends).receive.publish();
    let mut batch = Batch::with_capacity(4, 4096);
    assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 4);
    batch.clear();
    assert_eq!(link.receive(&mut batch, 3).unwrap().frames, 3);
    batch.clear();
    assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 3);
}

/// Builds a TCP segment over IPv4 with a partial checksum: 54 bytes of headers and `payload` bytes.
fn super_packet(payload: usize) -> (Vec<u8>, OffloadMeta) {
    let mut bytes = frame(54 + payload, 7).split_off(MODERN_LEN);
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..54].fill(0);
    bytes[14] = 0x45;
    let total = u16::try_from(40 + payload).unwrap();
    bytes[16..18].copy_from_slice(&total.to_be_bytes());
    bytes[22..24].copy_from_slice(&[64, 6]);
    bytes[46] = 0x50;
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1448 });
    (bytes, OffloadMeta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso })
}

fn commit(link: &mut VhostLink<Mock>, bytes: &[u8], meta: OffloadMeta) -> usize {
    let mut slots = Slots::new();
    GuestLink::reserve(link, 1, bytes.len(), &mut slots);
    let room = slots.pop().map(|slot| slot[..bytes.len()].copy_from_slice(bytes));
    if room.is_none() {
        return 0;
    }
    drop(slots);
    GuestLink::commit(link, &[Committed { len: bytes.len(), meta }]);
    1
}

#[test]
fn long_frame_leaves_as_two_descriptors_with_one_kick() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let (bytes, meta) = super_packet(30_000);
        assert!(!lock(&ends).transmit.arm());
        for _ in 0..3 {
            assert_eq!(commit(&mut link, &bytes, meta), 1);
        }
        let short = &frame(60, 1)[MODERN_LEN..];
        assert_eq!(commit(&mut link, short, OffloadMeta::PLAIN), 1);
        assert!(lock(&ends).transmit.take().is_none(), "not flushed");
        GuestLink::flush(&mut link);
        let mut ends = lock(&ends);
        assert_eq!(ends.kicks[1], 1);
        for _ in 0..3 {
            let request = ends.transmit.take().unwrap();
            let lens: Vec<u32> = request.chain.iter().map(|part| part.len).collect();
            assert_eq!(lens, [12 + 54, 30_000]);
            assert!(request.chain.iter().all(|part| part.flags & flag::WRITE == 0));
            let payload = link.sender.frames().bytes_at(request.chain[1].address, 30_000).unwrap();
            assert!(payload.iter().all(|byte| *byte == 7));
            let head = link.sender.frames().bytes_at(request.chain[0].address, 66).unwrap();
            let header = VnetHeader::from_modern(head.first_chunk().unwrap());
            assert_eq!((header.hdr_len, header.gso_size, header.num_buffers), (54, 1448, 0));
            ends.transmit.finish(request.head, 0);
        }
        let request = ends.transmit.take().unwrap();
        assert_eq!(request.chain.len(), 1);
        assert_eq!(request.chain[0].len, 72);
    }
}

#[test]
fn completions_are_signalled_only_to_waiting_sender() {
    let (mut link, ends) = link(ALL);
    let (bytes, meta) = super_packet(30_000);
    for _ in 0..4 {
        assert_eq!(commit(&mut link, &bytes, meta), 1);
        GuestLink::flush(&mut link);
    }
    // No sender waits for room.
    assert!(!Port::arm(&mut link).unwrap());
    finish_all(&mut lock(&ends), 1);
    assert!(!lock(&ends).transmit.publish(), "no event is wanted");
    assert_eq!(commit(&mut link, &bytes, meta), 1, "one is free again");
    GuestLink::flush(&mut link);
    assert_eq!(commit(&mut link, &bytes, meta), 0, "none is");
    assert!(!Port::arm(&mut link).unwrap());
    finish_all(&mut lock(&ends), 1);
    assert!(!lock(&ends).transmit.publish(), "not yet half");
    finish_all(&mut lock(&ends), 1);
    assert!(lock(&ends).transmit.publish(), "half of them are done");
    link.clear_events().unwrap();
    assert_eq!(commit(&mut link, &bytes, meta), 1);
}

/// Covers each rule by which a sleeping link is woken; without one of them it would sleep for ever.
#[test]
fn sender_waiting_for_room_is_woken_or_stays_awake() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let (long, meta) = super_packet(30_000);
        for _ in 0..4 {
            assert_eq!(commit(&mut link, &long, meta), 1);
        }
        GuestLink::flush(&mut link);
        assert!(!GuestLink::is_full(&link), "nobody was refused");
        assert_eq!(commit(&mut link, &long, meta), 0, "no long room");
        // An acknowledgement still fits; the wait for a long room goes on.
        assert_eq!(commit(&mut link, &frame(60, 1)[MODERN_LEN..], OffloadMeta::PLAIN), 1);
        GuestLink::flush(&mut link);
        assert!(GuestLink::is_full(&link));
        assert!(!Port::arm(&mut link).unwrap());
        let asks = if features.event_idx { 3 } else { 1 };
        for done in 1..=asks {
            finish_all(&mut lock(&ends), 1);
            assert_eq!(lock(&ends).transmit.publish(), done == asks, "{done} of {asks}");
        }
        link.clear_events().unwrap();
        assert!(!GuestLink::is_full(&link));
        assert_eq!(commit(&mut link, &long, meta), 1, "whoever waits asks again");
    }
    // The device completes between refusal and sleep, and polls no more.
    let (mut link, ends) = link(ALL);
    let (long, meta) = super_packet(30_000);
    for _ in 0..4 {
        assert_eq!(commit(&mut link, &long, meta), 1);
    }
    GuestLink::flush(&mut link);
    assert_eq!(commit(&mut link, &long, meta), 0);
    finish_all(&mut lock(&ends), 4);
    assert!(!lock(&ends).transmit.publish(), "not asked for yet");
    assert!(Port::arm(&mut link).unwrap(), "it does not sleep");
    // All were reclaimed before the next request, so no event will come.
    link.sender.reclaim().unwrap();
    assert!(!GuestLink::is_full(&link), "there is room");
    assert!(Port::arm(&mut link).unwrap(), "it does not sleep");
}

#[test]
fn frame_before_arm_prevents_sleep_and_frame_after_arm_wakes() {
    for features in [ALL, NONE, IN_ORDER] {
        let (mut link, ends) = link(features);
        let mut batch = Batch::default();
        // Before the link requests an event.
        assert!(lock(&ends).deliver(&frame(60, 1)));
        assert!(!lock(&ends).receive.publish(), "no event is wanted while it is awake");
        assert!(Port::arm(&mut link).unwrap());
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
        batch.clear();
        link.complete().unwrap();
        // Afterwards: the next frame wakes it, in any number of buffers.
        assert!(!Port::arm(&mut link).unwrap());
        assert!(lock(&ends).deliver(&frame(50_000, 2)));
        assert!(lock(&ends).receive.publish(), "it is woken");
        link.clear_events().unwrap();
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
    }
}

#[test]
fn sleeping_device_is_kicked_and_working_device_is_not() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let bytes = &frame(60, 1)[MODERN_LEN..];
        let kicks = |ends: &std::sync::Mutex<MockState>| lock(ends).kicks;
        let mut due = 0;
        for _ in 0..3 {
            // The device found nothing, requests a kick, and polls once more.
            assert!(!lock(&ends).transmit.arm());
            for count in [1, 2] {
                assert_eq!(commit(&mut link, bytes, OffloadMeta::PLAIN), 1);
                GuestLink::flush(&mut link);
                due += u32::from(count == 1);
                if count == 1 {
                    lock(&ends).transmit.suppress();
                }
                assert_eq!(kicks(&ends)[1], due, "{count}");
            }
            // Frames added while the device works are seen before it sleeps.
            assert!(lock(&ends).transmit.arm());
            finish_all(&mut lock(&ends), 2);
            let _ = lock(&ends).transmit.publish();
        }
        // The device ran out of buffers: the first buffers posted again wake it.
        let mut batch = Batch::default();
        let first = kicks(&ends)[0];
        while lock(&ends).deliver(&frame(60, 1)) {}
        assert!(!lock(&ends).receive.arm());
        let _ = lock(&ends).receive.publish();
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 16);
        assert_eq!(kicks(&ends)[0], first, "they are not posted yet");
        batch.clear();
        link.complete().unwrap();
        assert_eq!(kicks(&ends)[0], first + 1);
    }
}

#[test]
fn long_frame_without_gso_has_header_length() {
    // Without the length, the kernel allocates each frame contiguously.
    let (mut link, ends) = link(ALL);
    let (bytes, meta) = super_packet(50_000);
    let meta = OffloadMeta { gso: None, ..meta };
    assert_eq!(commit(&mut link, &bytes, meta), 1);
    GuestLink::flush(&mut link);
    let request = lock(&ends).transmit.take().unwrap();
    let lens: Vec<u32> = request.chain.iter().map(|part| part.len).collect();
    assert_eq!(lens, [12 + 54, 50_000]);
    let head = link.sender.frames().bytes_at(request.chain[0].address, 66).unwrap();
    let header = VnetHeader::from_modern(head.first_chunk().unwrap());
    assert_eq!((header.hdr_len, header.gso_size), (54, 0));
}

/// Completes a number of frames on the device's side.
fn finish_all(ends: &mut MockState, count: usize) {
    for _ in 0..count {
        let request = ends.transmit.take().unwrap();
        ends.transmit.finish(request.head, 0);
    }
}

#[test]
fn transmit_copies_frames_and_full_ring_drops() {
    let (mut link, ends) = link(NONE);
    let mut batch = Batch::default();
    let len = 500;
    for value in 0..20u8 {
        let at = batch.reserve(len).unwrap();
        let bytes = &frame(len, value)[MODERN_LEN..];
        batch.scratch_mut(at..at + len).unwrap().copy_from_slice(bytes);
        batch.push_contiguous(at, len, OffloadMeta::PLAIN).unwrap();
    }
    let all: Vec<u32> = (0..20).collect();
    let done = link.transmit(&batch, &all).unwrap();
    assert_eq!((done.sent, done.dropped), (16, 4));
    assert_eq!(link.counters().drops(DropReason::PortFull), 4);
    Port::flush(&mut link).unwrap();
    for value in 0..16u8 {
        let request = lock(&ends).transmit.take().unwrap();
        let part = request.chain[0];
        let bytes = link.sender.frames().bytes_at(part.address, part.len).unwrap();
        assert!(same(bytes, &frame(len, value)));
    }
}

#[test]
fn worker_failure_and_interface_removal_end_link() {
    let (mut link, ends) = link(ALL);
    link.clear_events().unwrap();
    lock(&ends).events = VhostEvents { failed: Some(QueueName::Receive), ..Default::default() };
    let said = link.clear_events().unwrap_err().to_string();
    assert!(said.starts_with("the receive queue: the kernel's worker"), "{said}");
    lock(&ends).events = VhostEvents { backend_gone: true, ..Default::default() };
    assert!(matches!(link.clear_events(), Err(Fault::Gone)));
}

/// Sends frames in both directions for many rounds. Returns the number of mappings after each round.
fn lent_in_use(protection: Protection) -> Vec<usize> {
    let (mut link, ends) = super::mock::lent_pair([16, 32], ALL, SHAPE, protection).unwrap();
    let lent = lock(&ends).lent.clone().unwrap();
    let count = || lent.0.lock().unwrap().len();
    let mut batch = Batch::default();
    let mut after = vec![count()];
    for round in 0..20u8 {
        assert!(lock(&ends).deliver(&frame(20_000, round)));
        let _ = lock(&ends).receive.publish();
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
        assert!(same(&bytes_of(batch.iter().next().unwrap()), &frame(20_000, round)[12..]));
        for len in [60, 60, 30_000] {
            assert_eq!(link.sender.room(1, len).unwrap(), 1);
            let give = |room: &mut [u8]| room[..len].copy_from_slice(&frame(len, round)[12..]);
            link.frames().reserve(1, len, give);
            link.frames().commit(len, OffloadMeta::PLAIN).unwrap();
        }
        Port::flush(&mut link).unwrap();
        for len in [60, 60, 30_000] {
            let mut ends = lock(&ends);
            let request = ends.transmit.take().unwrap();
            let mut bytes = Vec::new();
            for part in &request.chain {
                let own = ends.find(part.address, part.len).expect("what is under way is lent");
                bytes.extend(link.sender.frames().bytes_at(own, part.len).unwrap());
            }
            assert!(same(&bytes[12..], &frame(len, round)[12..]));
            ends.transmit.finish(request.head, 0);
        }
        let _ = lock(&ends).transmit.publish();
        link.sender.reclaim().unwrap();
        batch.clear();
        link.complete().unwrap();
        after.push(count());
    }
    drop(link);
    assert_eq!(count(), 0, "nothing is lent by a link that is gone");
    after
}

#[test]
fn idle_blocks_are_unmapped_or_kept_for_reuse() {
    // 16 buffers are posted at all times.
    assert!(lent_in_use(Protection::FineWithoutReuse).iter().all(|lent| *lent == 16));
    let reused = lent_in_use(Protection::Fine);
    // Two short frames share one of eight pages, and there are four rooms for long ones.
    assert_eq!((reused[0], reused.last()), (16, Some(&(16 + 8 + 4))));
    assert!(reused.is_sorted());
}

#[test]
fn frames_that_cannot_be_mapped_are_dropped_without_blocking() {
    let (mut link, ends) = super::mock::lent_pair([16, 32], ALL, SHAPE, Protection::Fine).unwrap();
    let lent = lock(&ends).lent.clone().unwrap();
    let (long, meta) = super_packet(30_000);
    // The 16 receive buffers and one page of short frames.
    *lent.1.lock().unwrap() = Some(17);
    for _ in 0..40 {
        assert_eq!(commit(&mut link, &long, meta), 1);
        assert_eq!(commit(&mut link, &frame(60, 1)[MODERN_LEN..], OffloadMeta::PLAIN), 1);
        GuestLink::flush(&mut link);
        assert!(!GuestLink::is_full(&link));
        let mut ends = lock(&ends);
        while let Some(request) = ends.transmit.take() {
            ends.transmit.finish(request.head, 0);
        }
        let _ = ends.transmit.publish();
    }
    *lent.1.lock().unwrap() = None;
    assert_eq!(commit(&mut link, &long, meta), 1);
    GuestLink::flush(&mut link);
    assert_eq!(lock(&ends).transmit.take().unwrap().chain.len(), 2);
}

#[test]
fn access_to_unmapped_address_ends_link() {
    let (mut link, ends) = super::mock::lent_pair([16, 32], ALL, SHAPE, Protection::Fine).unwrap();
    lock(&ends).events = VhostEvents { missed: true, ..Default::default() };
    link.clear_events().unwrap();
    lock(&ends).events = VhostEvents { missed: true, ..Default::default() };
    lock(&ends).miss =
        Some(Miss { address: 0x1234_5000, access: ringfence_platform::Access::ReadOnly });
    let said = link.clear_events().unwrap_err().to_string();
    assert!(said.contains("0x12345000"), "{said}");
    assert!(lock(&ends).is_stopped);
    assert_eq!(link.rules().get("virtqueue_miss_refused"), 1);
}

#[test]
fn removal_of_idle_interface_is_detected() {
    let (mut link, ends) = link(ALL);
    link.clear_events().unwrap();
    // The check does not run in every round.
    assert!(Port::deadline(&link).unwrap() > link.clock.now());
    lock(&ends).is_gone = true;
    link.clear_events().unwrap();
    link.next_check = Duration::ZERO;
    assert!(matches!(link.clear_events().unwrap_err(), Fault::Gone));
}

/// Receives a frame whose buffers the device describes wrongly. Returns the error and the rule's counter.
fn broken(header: [u8; MODERN_LEN], used: &[u32]) -> (String, &'static str) {
    let (mut link, ends) = link(ALL);
    {
        let mut ends = lock(&ends);
        for (n, len) in used.iter().enumerate() {
            let buffer = ends.receive.take().unwrap();
            if n == 0 {
                ends.fill(&buffer, &header);
            }
            ends.receive.finish(buffer.head, *len);
        }
        let _ = ends.receive.publish();
    }
    let error = link.receive(&mut Batch::default(), 64).unwrap_err();
    let rules = link.rules().all();
    let (rule, count) = rules.first_key_value().expect("a rule is counted");
    assert_eq!((*count, rules.len()), (1, 1));
    (error.to_string(), rule)
}

fn buffers(count: u16) -> [u8; MODERN_LEN] {
    VnetHeader { num_buffers: count, ..VnetHeader::default() }.to_modern()
}

#[test]
fn forged_buffer_counts_are_refused_and_counted() {
    assert_eq!(broken(buffers(1), &[11]).1, "virtqueue_short_header");
    assert_eq!(broken(buffers(0), &[100]).1, "virtqueue_frame_buffers");
    assert_eq!(broken(buffers(17), &[100]).1, "virtqueue_frame_buffers");
    assert_eq!(broken(buffers(u16::MAX), &[100]).1, "virtqueue_frame_buffers");
    let (said, rule) = broken(buffers(3), &[100, 100]);
    assert_eq!(rule, "virtqueue_frame_incomplete");
    assert!(said.contains("3 buffers, of which only 2"), "{said}");
    assert_eq!(
        broken(buffers(1), &[u32::try_from(BUFFER).unwrap() + 1]).1,
        "virtqueue_used_length"
    );
}

#[test]
fn forged_used_ids_end_the_link_and_are_counted() {
    for (id, rule) in [(16, "virtqueue_used_unknown_id"), (u32::MAX, "virtqueue_used_unknown_id")] {
        let (mut link, ends) = link(ALL);
        lock(&ends).receive.put_used(UsedElement { id, len: 60 }, 1);
        let _ = lock(&ends).receive.publish();
        assert!(link.receive(&mut Batch::default(), 64).is_err());
        assert_eq!(link.rules().get(rule), 1);
    }
    let (mut link, ends) = link(ALL);
    let (bytes, meta) = super_packet(1000);
    commit(&mut link, &bytes, meta);
    GuestLink::flush(&mut link);
    let head = lock(&ends).transmit.take().unwrap().head;
    // A frame that was sent once is completed twice.
    for _ in 0..2 {
        lock(&ends).transmit.finish(head, 0);
    }
    let _ = lock(&ends).transmit.publish();
    GuestLink::reserve(&mut link, 16, 1000, &mut Slots::new());
    // The next receive returns the fault.
    assert!(matches!(link.receive(&mut Batch::default(), 1), Err(Fault::Misbehaved(_))));
    assert_eq!(link.rules().get("virtqueue_used_overrun"), 1);
}

#[test]
fn invalid_frames_are_dropped_and_counted() {
    let (mut link, ends) = link(ALL);
    let mut unknown = frame(60, 1);
    unknown[1] = 0x11;
    let mut beyond = frame(60, 1);
    beyond[0] = 1;
    beyond[6..8].copy_from_slice(&500u16.to_le_bytes());
    for bytes in [&frame(13, 1)[..], &frame(13, 1)[..25], &frame(70_000, 1), &unknown, &beyond] {
        assert!(lock(&ends).deliver(bytes));
    }
    let _ = lock(&ends).receive.publish();
    let received = link.receive(&mut Batch::default(), 64).unwrap();
    assert_eq!((received.frames, received.work), (0, 5));
    let drops = |reason| link.counters().drops(reason);
    assert_eq!((drops(DropReason::Runt), drops(DropReason::Oversize)), (2, 1));
    assert_eq!(drops(DropReason::BadOffload), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn forged_virtqueues_of_any_content_cause_no_panic(
        data in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        crate::vhost_net::fuzzing::virtqueues(&data);
    }
}
