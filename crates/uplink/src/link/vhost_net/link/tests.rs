use proptest::prelude::*;
use ringfence_frame::DropReason;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};
use ringfence_ring::split::QueueFeatures;
use ringfence_sys::vhost::VhostEvents;
use ringfence_wire::virtio::{UsedElement, flag};

use super::mock::{Ends, Mock, lock, pair};
use super::receive::BUFFER;
use super::*;

const ALL: QueueFeatures = QueueFeatures { indirect: true, event_idx: true, in_order: false };
const NONE: QueueFeatures = QueueFeatures { indirect: false, event_idx: false, in_order: false };
const IN_ORDER: QueueFeatures = QueueFeatures { in_order: true, ..ALL };
const SHAPE: FrameShape = FrameShape { frames: 16, long: 4 };

type Pair = (VhostLink<Mock>, Arc<std::sync::Mutex<Ends>>);

fn link(features: QueueFeatures) -> Pair {
    pair([16, 32], features, SHAPE).unwrap()
}

/// A frame of `len` octets that asks for nothing, behind a virtio-net header.
fn frame(len: usize, value: u8) -> Vec<u8> {
    let mut octets = vec![0; MODERN_LEN];
    octets.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    octets.resize(MODERN_LEN + len, value);
    octets
}

fn octets_of(frame: ringfence_frame::FrameView<'_>) -> Vec<u8> {
    let mut octets = vec![0; frame.len()];
    assert_eq!(frame.copy_to(&mut octets), frame.len());
    octets
}

/// Whether all octets are the same; large vectors are not printed.
fn same(a: &[u8], b: &[u8]) -> bool {
    a == b
}

#[test]
fn frames_arrive_from_buffers_that_go_round() {
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
                assert!(same(&octets_of(got), &frame(len, round)[MODERN_LEN..]));
                assert_eq!(got.header().len(), len.min(256), "headers are private");
            }
            // Until it is complete, no buffer is the device's again.
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
fn buffers_in_order_are_left_to_kernels_that_have_them_right() {
    for (release, kept) in [("6.1.0-51-amd64", false), ("6.18.44", false), ("", false)] {
        assert_eq!(keeps_order(release), kept, "{release}");
    }
    assert!(keeps_order("6.19.0") && keeps_order("7.0-rc1") && keeps_order("10.1"));
}

#[test]
fn a_batch_is_not_overfilled() {
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

/// A TCP segment over IPv4 with a blank checksum, `payload` octets behind 54 of headers.
fn super_packet(payload: usize) -> (Vec<u8>, OffloadMeta) {
    let mut octets = frame(54 + payload, 7).split_off(MODERN_LEN);
    octets[12..14].copy_from_slice(&[8, 0]);
    octets[14..54].fill(0);
    octets[14] = 0x45;
    let total = u16::try_from(40 + payload).unwrap();
    octets[16..18].copy_from_slice(&total.to_be_bytes());
    octets[22..24].copy_from_slice(&[64, 6]);
    octets[46] = 0x50;
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1448 });
    (octets, OffloadMeta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso })
}

fn commit(link: &mut VhostLink<Mock>, octets: &[u8], meta: OffloadMeta) -> usize {
    let mut slots = Slots::new();
    GuestSide::reserve(link, 1, octets.len(), &mut slots);
    let room = slots.pop().map(|slot| slot[..octets.len()].copy_from_slice(octets));
    if room.is_none() {
        return 0;
    }
    drop(slots);
    GuestSide::commit(link, &[Committed { len: octets.len(), meta }]);
    1
}

#[test]
fn headers_and_payload_leave_as_separate_descriptors_with_one_kick() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let (octets, meta) = super_packet(30_000);
        assert!(!lock(&ends).transmit.arm());
        for _ in 0..3 {
            assert_eq!(commit(&mut link, &octets, meta), 1);
        }
        let short = &frame(60, 1)[MODERN_LEN..];
        assert_eq!(commit(&mut link, short, OffloadMeta::PLAIN), 1);
        assert!(lock(&ends).transmit.take().is_none(), "not flushed");
        GuestSide::flush(&mut link);
        let mut ends = lock(&ends);
        assert_eq!(ends.kicks[1], 1);
        for _ in 0..3 {
            let request = ends.transmit.take().unwrap();
            let lens: Vec<u32> = request.chain.iter().map(|part| part.len).collect();
            assert_eq!(lens, [12 + 54, 30_000]);
            assert!(request.chain.iter().all(|part| part.flags & flag::WRITE == 0));
            let payload = link.sender.frames().bytes_at(request.chain[1].address, 30_000).unwrap();
            assert!(payload.iter().all(|octet| *octet == 7));
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
fn completions_are_reclaimed_when_room_is_needed_and_announced_only_to_who_waits() {
    let (mut link, ends) = link(ALL);
    let (octets, meta) = super_packet(30_000);
    for _ in 0..4 {
        assert_eq!(commit(&mut link, &octets, meta), 1);
        GuestSide::flush(&mut link);
    }
    // Nobody waits for room.
    assert!(!Port::arm(&mut link).unwrap());
    finish_all(&mut lock(&ends), 1);
    assert!(!lock(&ends).transmit.publish(), "no event is wanted");
    assert_eq!(commit(&mut link, &octets, meta), 1, "one is free again");
    GuestSide::flush(&mut link);
    assert_eq!(commit(&mut link, &octets, meta), 0, "none is");
    assert!(!Port::arm(&mut link).unwrap());
    finish_all(&mut lock(&ends), 1);
    assert!(!lock(&ends).transmit.publish(), "not yet half");
    finish_all(&mut lock(&ends), 1);
    assert!(lock(&ends).transmit.publish(), "half of them are done");
    link.clear_events().unwrap();
    assert_eq!(commit(&mut link, &octets, meta), 1);
}

/// Each rule by which a link that sleeps is woken, for want of which it would sleep for ever.
#[test]
fn who_waits_for_room_is_woken_when_the_last_frames_were_short_or_nothing_is_under_way() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let (long, meta) = super_packet(30_000);
        for _ in 0..4 {
            assert_eq!(commit(&mut link, &long, meta), 1);
        }
        GuestSide::flush(&mut link);
        assert!(!GuestSide::is_full(&link), "nobody was refused");
        assert_eq!(commit(&mut link, &long, meta), 0, "no long room");
        // An acknowledgement still goes: who waits for a long room goes on waiting.
        assert_eq!(commit(&mut link, &frame(60, 1)[MODERN_LEN..], OffloadMeta::PLAIN), 1);
        GuestSide::flush(&mut link);
        assert!(GuestSide::is_full(&link));
        assert!(!Port::arm(&mut link).unwrap());
        let asks = if features.event_idx { 3 } else { 1 };
        for done in 1..=asks {
            finish_all(&mut lock(&ends), 1);
            assert_eq!(lock(&ends).transmit.publish(), done == asks, "{done} of {asks}");
        }
        link.clear_events().unwrap();
        assert!(!GuestSide::is_full(&link));
        assert_eq!(commit(&mut link, &long, meta), 1, "whoever waits asks again");
    }
    // The device is done between the refusal and the sleep, and looks at nothing any more.
    let (mut link, ends) = link(ALL);
    let (long, meta) = super_packet(30_000);
    for _ in 0..4 {
        assert_eq!(commit(&mut link, &long, meta), 1);
    }
    GuestSide::flush(&mut link);
    assert_eq!(commit(&mut link, &long, meta), 0);
    finish_all(&mut lock(&ends), 4);
    assert!(!lock(&ends).transmit.publish(), "not asked for yet");
    assert!(Port::arm(&mut link).unwrap(), "it does not sleep");
    // All came back before anybody asked again: no event is to be waited for.
    link.sender.reclaim().unwrap();
    assert!(!GuestSide::is_full(&link), "there is room");
    assert!(Port::arm(&mut link).unwrap(), "it does not sleep");
}

#[test]
fn frames_that_come_while_it_falls_asleep_keep_it_awake_and_later_ones_wake_it() {
    for features in [ALL, NONE, IN_ORDER] {
        let (mut link, ends) = link(features);
        let mut batch = Batch::default();
        // Before it asks for an event.
        assert!(lock(&ends).deliver(&frame(60, 1)));
        assert!(!lock(&ends).receive.publish(), "no event is wanted while it is awake");
        assert!(Port::arm(&mut link).unwrap());
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
        batch.clear();
        link.complete().unwrap();
        // Afterwards: the next one, in whatever number of buffers.
        assert!(!Port::arm(&mut link).unwrap());
        assert!(lock(&ends).deliver(&frame(50_000, 2)));
        assert!(lock(&ends).receive.publish(), "it is woken");
        link.clear_events().unwrap();
        assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
    }
}

#[test]
fn a_device_that_sleeps_is_kicked_with_what_comes_next_and_one_at_work_is_not() {
    for features in [ALL, NONE] {
        let (mut link, ends) = link(features);
        let octets = &frame(60, 1)[MODERN_LEN..];
        let kicks = |ends: &std::sync::Mutex<Ends>| lock(ends).kicks;
        let mut due = 0;
        for _ in 0..3 {
            // It found nothing, asks for a kick, and looks once more.
            assert!(!lock(&ends).transmit.arm());
            for count in [1, 2] {
                assert_eq!(commit(&mut link, octets, OffloadMeta::PLAIN), 1);
                GuestSide::flush(&mut link);
                due += u32::from(count == 1);
                if count == 1 {
                    lock(&ends).transmit.suppress();
                }
                assert_eq!(kicks(&ends)[1], due, "{count}");
            }
            // What came while it was at work it sees before it sleeps.
            assert!(lock(&ends).transmit.arm());
            finish_all(&mut lock(&ends), 2);
            let _ = lock(&ends).transmit.publish();
        }
        // It ran out of buffers: the first that are posted again wake it.
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
fn long_frames_that_are_whole_say_how_long_their_headers_are() {
    // Otherwise the kernel keeps each in one piece of memory.
    let (mut link, ends) = link(ALL);
    let (octets, meta) = super_packet(50_000);
    let meta = OffloadMeta { gso: None, ..meta };
    assert_eq!(commit(&mut link, &octets, meta), 1);
    GuestSide::flush(&mut link);
    let request = lock(&ends).transmit.take().unwrap();
    let lens: Vec<u32> = request.chain.iter().map(|part| part.len).collect();
    assert_eq!(lens, [12 + 54, 50_000]);
    let head = link.sender.frames().bytes_at(request.chain[0].address, 66).unwrap();
    let header = VnetHeader::from_modern(head.first_chunk().unwrap());
    assert_eq!((header.hdr_len, header.gso_size), (54, 0));
}

/// The device is done with so many frames.
fn finish_all(ends: &mut Ends, count: usize) {
    for _ in 0..count {
        let request = ends.transmit.take().unwrap();
        ends.transmit.finish(request.head, 0);
    }
}

#[test]
fn frames_of_a_batch_are_copied_and_a_full_ring_drops() {
    let (mut link, ends) = link(NONE);
    let mut batch = Batch::default();
    let len = 500;
    for value in 0..20u8 {
        let at = batch.reserve(len).unwrap();
        let octets = &frame(len, value)[MODERN_LEN..];
        batch.scratch_mut(at..at + len).unwrap().copy_from_slice(octets);
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
        let octets = link.sender.frames().bytes_at(part.address, part.len).unwrap();
        assert!(same(octets, &frame(len, value)));
    }
}

#[test]
fn the_end_of_the_worker_or_of_the_interface_is_told() {
    let (mut link, ends) = link(ALL);
    link.clear_events().unwrap();
    lock(&ends).events = VhostEvents { failed: Some(QueueName::Receive), ..Default::default() };
    let said = link.clear_events().unwrap_err().to_string();
    assert!(said.starts_with("the receive queue: the kernel's worker"), "{said}");
    lock(&ends).events = VhostEvents { backend_gone: true, ..Default::default() };
    assert!(matches!(link.clear_events(), Err(Fault::Gone)));
}

/// Frames both ways, again and again, over a link that lends so much: how much is lent after each round.
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
        assert!(same(&octets_of(batch.iter().next().unwrap()), &frame(20_000, round)[12..]));
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
            let mut octets = Vec::new();
            for part in &request.chain {
                let own = ends.find(part.address, part.len).expect("what is under way is lent");
                octets.extend(link.sender.frames().bytes_at(own, part.len).unwrap());
            }
            assert!(same(&octets[12..], &frame(len, round)[12..]));
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
fn what_is_not_under_way_is_not_lent_or_only_to_be_used_again() {
    // 16 buffers wait for frames at all times.
    assert!(lent_in_use(Protection::FineWithoutReuse).iter().all(|lent| *lent == 16));
    let reused = lent_in_use(Protection::Fine);
    // Two short frames lie in a page of the eight, and there are four rooms for long ones.
    assert_eq!((reused[0], reused.last()), (16, Some(&(16 + 8 + 4))));
    assert!(reused.is_sorted());
}

#[test]
fn frames_that_the_system_does_not_lend_are_lost_and_hold_up_no_others() {
    let (mut link, ends) = super::mock::lent_pair([16, 32], ALL, SHAPE, Protection::Fine).unwrap();
    let lent = lock(&ends).lent.clone().unwrap();
    let (long, meta) = super_packet(30_000);
    // The 16 receive buffers, and a page of short frames.
    *lent.1.lock().unwrap() = Some(17);
    for _ in 0..40 {
        assert_eq!(commit(&mut link, &long, meta), 1);
        assert_eq!(commit(&mut link, &frame(60, 1)[MODERN_LEN..], OffloadMeta::PLAIN), 1);
        GuestSide::flush(&mut link);
        assert!(!GuestSide::is_full(&link));
        let mut ends = lock(&ends);
        while let Some(request) = ends.transmit.take() {
            ends.transmit.finish(request.head, 0);
        }
        let _ = ends.transmit.publish();
    }
    *lent.1.lock().unwrap() = None;
    assert_eq!(commit(&mut link, &long, meta), 1);
    GuestSide::flush(&mut link);
    assert_eq!(lock(&ends).transmit.take().unwrap().chain.len(), 2);
}

#[test]
fn an_address_that_was_not_granted_ends_the_link_that_wanted_it() {
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
fn an_interface_that_goes_while_nothing_is_sent_is_missed() {
    let (mut link, ends) = link(ALL);
    link.clear_events().unwrap();
    // It is not asked at every turn.
    assert!(Port::deadline(&link).unwrap() > link.clock.now());
    lock(&ends).is_gone = true;
    link.clear_events().unwrap();
    link.next_look = Duration::ZERO;
    assert!(matches!(link.clear_events().unwrap_err(), Fault::Gone));
}

/// What becomes of a frame whose buffers the device describes wrongly: the counter of the rule.
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
fn forged_frames_in_impossible_buffers_are_refused_and_counted() {
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
    let (octets, meta) = super_packet(1000);
    commit(&mut link, &octets, meta);
    GuestSide::flush(&mut link);
    let head = lock(&ends).transmit.take().unwrap().head;
    // A frame that was sent once is used twice.
    for _ in 0..2 {
        lock(&ends).transmit.finish(head, 0);
    }
    let _ = lock(&ends).transmit.publish();
    GuestSide::reserve(&mut link, 16, 1000, &mut Slots::new());
    // It is told with the next look at the link.
    assert!(matches!(link.receive(&mut Batch::default(), 1), Err(Fault::Misbehaved(_))));
    assert_eq!(link.rules().get("virtqueue_used_overrun"), 1);
}

#[test]
fn frames_that_cannot_be_are_dropped_and_counted() {
    let (mut link, ends) = link(ALL);
    let mut unknown = frame(60, 1);
    unknown[1] = 0x11;
    let mut beyond = frame(60, 1);
    beyond[0] = 1;
    beyond[6..8].copy_from_slice(&500u16.to_le_bytes());
    for octets in [&frame(13, 1)[..], &frame(13, 1)[..25], &frame(70_000, 1), &unknown, &beyond] {
        assert!(lock(&ends).deliver(octets));
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
    fn forged_virtqueues_of_any_content_are_survived(
        data in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        crate::link::vhost_net::fuzzing::virtqueues(&data);
    }
}
