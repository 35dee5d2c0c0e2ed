use allocation_counter::measure;
use proptest::prelude::*;
use ringfence_memory::{DeviceAccess, DeviceRange, PAGE_SIZE};
use ringfence_ring::split::backend::DriverFault;
use ringfence_ring::split::{QueueFault, QueueFeatures};
use ringfence_wire::virtio::{Descriptor, SplitLayout, flag};

use super::fuzzing::{BUFFERS, ENTRIES, Rig, at};
use super::shadow::{STATUS_MAX, ShadowQueue, ShadowShape};
use super::*;
use crate::ClientFault;
use crate::testing::PageMarks;

mod messages;

const ALL: QueueFeatures = QueueFeatures { indirect: true, event_idx: true, in_order: false };
const NONE: QueueFeatures = QueueFeatures { indirect: false, event_idx: false, in_order: false };
use DeviceAccess::{Read, Write};

/// Byte with which the driver fills its buffers.
const FILL: u8 = 0xaa;

fn rig() -> Rig {
    rig_with(ALL, ALL)
}

fn rig_with(front: QueueFeatures, back: QueueFeatures) -> Rig {
    let rig = Rig::new(front, back, 16 << 20).unwrap();
    rig.front.memory.copy_from(rig.front.buffers_at(), &vec![FILL; BUFFERS]).unwrap();
    rig
}

/// Returns ranges of these lengths, one behind the other from `at` in the buffers.
fn ranges(rig: &Rig, at: usize, parts: &[(usize, DeviceAccess)]) -> Vec<DeviceRange> {
    let mut at = rig.front.buffers_at() + at;
    let part = |(len, access): &(usize, DeviceAccess)| {
        at += len;
        rig.front.range(at - len, *len, *access)
    };
    parts.iter().map(part).collect()
}

/// Makes a chain available.
fn push(rig: &mut Rig, at: usize, parts: &[(usize, DeviceAccess)], token: u32) {
    let ranges = ranges(rig, at, parts);
    rig.driver().push(&ranges, token).unwrap();
    let _ = rig.driver().publish();
}

/// Returns bytes of the driver's buffers.
fn buffer(rig: &Rig, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rig.front.memory.copy_to(rig.front.buffers_at() + at, &mut bytes).unwrap();
    bytes
}

/// Returns the bytes of a backend's descriptor.
fn bytes(rig: &Rig, link: &Descriptor) -> Vec<u8> {
    let memory = at(&rig.pool, link.address, link.len as usize).unwrap();
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes).unwrap();
    bytes
}

/// Writes bytes to a backend's descriptor.
fn fill(rig: &Rig, link: &Descriptor, offset: usize, content: &[u8]) {
    let memory = at(&rig.pool, link.address, link.len as usize).unwrap();
    memory.copy_from(offset, content).unwrap();
}

/// Uses a chain as the backend, and passes it to the driver.
fn finish(rig: &mut Rig, head: u16, len: u32) -> Result<bool, ShieldFault> {
    rig.backend.finish(head, len);
    let _ = rig.backend.publish();
    rig.complete()
}

#[test]
fn write_reaches_the_backend_in_a_copy_and_its_status_the_driver() {
    for (front, back) in [(ALL, ALL), (NONE, ALL), (ALL, NONE), (NONE, NONE)] {
        let mut rig = rig_with(front, back);
        let start = rig.front.buffers_at();
        rig.front.memory.copy_from(start, b"header-of-16-byt").unwrap();
        rig.front.memory.copy_from(start + 16, &[7; 8192]).unwrap();
        push(&mut rig, 0, &[(16, Read), (8192, Read), (1, Write)], 3);
        assert!(rig.forward().unwrap());
        let (head, chain) = rig.take().unwrap();
        let parts: Vec<_> = chain.iter().map(|link| (link.len, link.flags & flag::WRITE)).collect();
        assert_eq!(parts, [(16, 0), (8192, 0), (1, flag::WRITE)]);
        assert_eq!(bytes(&rig, &chain[0]), b"header-of-16-byt");
        assert_eq!(bytes(&rig, &chain[1]), [7; 8192]);
        fill(&rig, &chain[2], 0, &[9]);
        assert!(finish(&mut rig, head, 1).unwrap());
        let used = rig.driver().pop().unwrap().unwrap();
        assert_eq!((used.token, used.len), (3, 1));
        assert_eq!(buffer(&rig, 16 + 8192, 1), [9]);
        assert_eq!(rig.driver().pop(), Ok(None));
    }
}

#[test]
fn read_returns_as_many_bytes_as_the_backend_reports_and_the_status() {
    let mut rig = rig();
    push(&mut rig, 0, &[(16, Read), (4096, Write), (1, Write)], 0);
    rig.forward().unwrap();
    let (head, chain) = rig.take().unwrap();
    fill(&rig, &chain[1], 0, &[1; 4096]);
    fill(&rig, &chain[2], 0, &[2]);
    finish(&mut rig, head, 100).unwrap();
    assert_eq!(rig.driver().pop().unwrap().unwrap().len, 100);
    let found = buffer(&rig, 16, 4097);
    assert_eq!(found[..100], [1; 100]);
    // Of the last bytes all are copied, because a disk puts its status there.
    let status = 4097 - STATUS_MAX;
    assert_eq!(found[100..status], vec![FILL; status - 100]);
    assert_eq!((found[4095], found[4096]), (1, 2));
}

/// Passes as many chains of each shape as the vring takes, there and back. Returns the number of allocations.
fn pass_chains(rig: &mut Rig) -> u64 {
    // Those of a disk and of a card: write, read, frame to be sent, room for a frame.
    let shapes: [&[_]; 4] = [
        &[(16, Read), (8192, Read), (1, Write)],
        &[(16, Read), (4096, Write), (4096, Write), (1, Write)],
        &[(12, Read), (1500, Read)],
        &[(2048, Write)],
    ];
    let mut allocations = 0;
    for shape in shapes {
        for (token, at) in (0..).zip((0..BUFFERS).step_by(64 << 10)) {
            let ranges = ranges(rig, at, shape);
            if rig.driver().push(&ranges, token).is_err() {
                break;
            }
        }
        let _ = rig.driver().publish();
        let mut passes = false;
        allocations += measure(|| passes = rig.forward().unwrap()).count_total;
        while let Some((head, _)) = rig.take() {
            rig.backend.finish(head, 1);
        }
        let _ = rig.backend.publish();
        allocations += measure(|| passes &= rig.complete().unwrap()).count_total;
        assert!(passes);
        while rig.driver().pop().unwrap().is_some() {}
    }
    allocations
}

#[test]
fn chains_that_pass_in_the_steady_state_cost_no_allocation() {
    for (front, back) in [(ALL, ALL), (NONE, ALL), (ALL, NONE), (NONE, NONE)] {
        let mut rig = rig_with(front, back);
        // Lists of chains grow to their lengths.
        let first: u64 = (0..ENTRIES).map(|_| pass_chains(&mut rig)).sum();
        assert!(first > 0, "the counter counts");
        let later: u64 = (0..100).map(|_| pass_chains(&mut rig)).sum();
        assert_eq!(later, 0, "{front:?} {back:?}");
    }
}

#[test]
fn status_behind_data_in_one_segment_is_copied_back() {
    let mut rig = rig();
    push(&mut rig, 0, &[(16, Read), (4097, Write)], 0);
    rig.forward().unwrap();
    let (head, chain) = rig.take().unwrap();
    fill(&rig, &chain[1], 4096, &[2]);
    finish(&mut rig, head, 1).unwrap();
    assert_eq!(buffer(&rig, 16 + 4096, 1), [2]);
}

#[test]
fn room_for_writing_has_no_bytes_that_were_in_the_pool_before() {
    let mut rig = rig();
    for round in 0..3 {
        push(&mut rig, 0, &[(4096, Read), (4096, Write), (3, Write)], round);
        rig.forward().unwrap();
        let (head, chain) = rig.take().unwrap();
        assert_eq!(bytes(&rig, &chain[0]), [FILL; 4096]);
        assert_eq!(bytes(&rig, &chain[1]), [0; 4096], "round {round}");
        assert_eq!(bytes(&rig, &chain[2]), [0; 3], "round {round}");
        // The next chain gets the same block: its room lies where this one's bytes do.
        for link in &chain {
            fill(&rig, link, 0, &vec![0x55; link.len as usize]);
        }
        finish(&mut rig, head, 0).unwrap();
        rig.driver().pop().unwrap().unwrap();
    }
}

#[test]
fn length_beyond_the_room_is_clamped() {
    let mut rig = rig();
    push(&mut rig, 0, &[(16, Read), (512, Write), (1, Write)], 0);
    rig.forward().unwrap();
    let (head, _) = rig.take().unwrap();
    finish(&mut rig, head, u32::MAX).unwrap();
    assert_eq!(rig.driver().pop().unwrap().unwrap().len, 513);
    assert_eq!(buffer(&rig, 16 + 513, 1), [FILL], "no byte behind the room");
}

#[test]
fn used_element_for_no_chain_in_flight_is_a_fault_of_the_backend() {
    // An id beyond the vring, one that was never given, and one that was used before.
    let mut rig = rig();
    let fault = |fault: Result<bool, ShieldFault>| match fault {
        Err(ShieldFault::Used { index: 0, fault }) => fault,
        other => panic!("{other:?}"),
    };
    push(&mut rig, 0, &[(16, Read), (1, Write)], 0);
    rig.forward().unwrap();
    let (head, _) = rig.take().unwrap();
    let unknown = fault(finish(&mut rig, 99, 0));
    assert_eq!(unknown, QueueFault::UnknownId { id: 99, size: ENTRIES });
    let mut rig = self::rig();
    push(&mut rig, 0, &[(16, Read), (1, Write)], 0);
    rig.forward().unwrap();
    let never = fault(finish(&mut rig, head + 1, 0));
    assert_eq!(never, QueueFault::NotInFlight { id: head + 1 });
    let mut rig = self::rig();
    push(&mut rig, 0, &[(16, Read), (1, Write)], 0);
    push(&mut rig, 64, &[(16, Read), (1, Write)], 1);
    rig.forward().unwrap();
    rig.backend.finish(head, 0);
    let twice = fault(finish(&mut rig, head, 0));
    assert_eq!(twice, QueueFault::NotInFlight { id: head });
    // The driver got the first one, once.
    assert_eq!(rig.driver().pop().unwrap().unwrap().token, 0);
    assert_eq!(rig.driver().pop(), Ok(None));
}

#[test]
fn used_index_ahead_of_the_chains_is_a_fault_of_the_backend() {
    let mut rig = rig();
    push(&mut rig, 0, &[(16, Read), (1, Write)], 0);
    rig.forward().unwrap();
    let (head, _) = rig.take().unwrap();
    rig.backend.finish(head, 0);
    rig.backend.finish(head, 0);
    let _ = rig.backend.publish();
    let overrun = rig.complete();
    let announced = QueueFault::Overrun { announced: 2, in_flight: 1 };
    assert!(matches!(overrun, Err(ShieldFault::Used { fault, .. }) if fault == announced));
    assert_eq!(rig.driver().pop(), Ok(None));
}

/// Writes descriptors into the driver's table, and makes heads available.
fn write_chain(rig: &Rig, links: &[(u16, Descriptor)], heads: &[u16]) {
    let layout = SplitLayout::new(ENTRIES).unwrap();
    let (tables, memory) = (rig.front.tables_at(0), &rig.front.memory);
    for (number, link) in links {
        memory.copy_from(tables + layout.descriptor(*number), &link.to_bytes()).unwrap();
    }
    for (index, head) in (0_u16..).zip(heads) {
        let entry = tables + layout.avail_entry(index);
        memory.copy_from(entry, &head.to_le_bytes()).unwrap();
    }
    let count = u16::try_from(heads.len()).unwrap();
    memory.copy_from(tables + layout.avail_idx(), &count.to_le_bytes()).unwrap();
}

#[test]
fn chain_that_breaks_a_rule_is_a_fault_of_the_driver() {
    let fault = |links: &[(u16, u64, u32, u16, u16)], heads: &[u16]| {
        let mut rig = rig();
        let base = rig.front.base() + rig.front.buffers_at() as u64;
        let link = |&(number, offset, len, flags, next): &(u16, u64, u32, u16, u16)| {
            (number, Descriptor { address: base.wrapping_add(offset), len, flags, next })
        };
        write_chain(&rig, &links.iter().map(link).collect::<Vec<_>>(), heads);
        match rig.forward() {
            Err(ShieldFault::Client(fault)) => fault,
            other => panic!("{other:?}"),
        }
    };
    let is = |fault: &ClientFault, expected: DriverFault| match fault {
        ClientFault::Driver(found) => assert_eq!(*found, expected),
        other => panic!("{other}"),
    };
    let looped = fault(&[(0, 0, 16, flag::NEXT, 1), (1, 0, 16, flag::NEXT, 0)], &[0]);
    is(&looped, DriverFault::Links { limit: ENTRIES.into() });
    let order = fault(&[(0, 0, 16, flag::NEXT | flag::WRITE, 1), (1, 0, 16, 0, 0)], &[0]);
    is(&order, DriverFault::Order);
    let index = fault(&[(0, 0, 16, flag::NEXT, ENTRIES)], &[0]);
    is(&index, DriverFault::Index { index: ENTRIES, len: ENTRIES });
    let indirect = fault(&[(0, 0, 17, flag::INDIRECT, 0)], &[0]);
    is(&indirect, DriverFault::Indirect { len: 17 });
    let far = fault(&[(0, 1 << 40, 16, 0, 0)], &[0]);
    assert!(matches!(far, ClientFault::Unmapped { len: 16, .. }), "{far}");
    let long = fault(&[(0, BUFFERS as u64 - 15, 16, 0, 0)], &[0]);
    assert!(matches!(long, ClientFault::Unmapped { len: 16, .. }), "{long}");
    let table = fault(&[(0, 1 << 40, 16, flag::INDIRECT, 0)], &[0]);
    assert!(matches!(table, ClientFault::Driver(DriverFault::Unmapped { .. })), "{table}");
    let twice = fault(&[(0, 0, 16, 0, 0)], &[0, 0]);
    assert!(matches!(twice, ClientFault::Repeated { head: 0 }), "{twice}");
    let many = fault(&[], &[0; ENTRIES as usize + 1]);
    assert!(matches!(many, ClientFault::Driver(DriverFault::Overrun { .. })), "{many}");
}

#[test]
fn chain_without_bytes_is_a_fault() {
    let mut rig = rig();
    let empty = Descriptor { address: 0, len: 0, flags: 0, next: 0 };
    write_chain(&rig, &[(0, empty)], &[0]);
    assert!(matches!(rig.forward(), Err(ShieldFault::Empty { index: 0 })));
}

#[test]
fn descriptor_that_changes_after_it_was_fetched_has_no_effect() {
    let mut rig = rig();
    let base = rig.front.base() + rig.front.buffers_at() as u64;
    let link =
        |offset| Descriptor { address: base + offset, len: 512, flags: flag::WRITE, next: 0 };
    write_chain(&rig, &[(0, link(0))], &[0]);
    rig.forward().unwrap();
    write_chain(&rig, &[(0, link(4096))], &[0]);
    let (head, chain) = rig.take().unwrap();
    fill(&rig, &chain[0], 0, &[1; 512]);
    finish(&mut rig, head, 512).unwrap();
    assert_eq!(buffer(&rig, 0, 512), [1; 512]);
    assert_eq!(buffer(&rig, 4096, 512), [FILL; 512]);
}

#[test]
fn chains_wait_while_the_pool_is_full_and_none_is_lost() {
    let mut rig = Rig::new(ALL, ALL, POOL_MIN).unwrap();
    // A half of the part for data each. The reserve is too short for one.
    let len = 200 << 10;
    for token in 0..6 {
        push(&mut rig, 0, &[(len, Read), (1, Write)], token);
    }
    let mut seen = Vec::new();
    for _ in 0..4 {
        rig.forward().unwrap();
        let given: Vec<_> = std::iter::from_fn(|| rig.take()).map(|(head, _)| head).collect();
        assert!(!given.is_empty() && given.len() < 4, "{given:?}");
        let taken = rig.shadow.in_flight();
        assert!(
            taken.len() <= given.len() + 1,
            "one waits, and the others stay in the ring: {taken:?}"
        );
        // Nothing can be done before the backend has used one, so the thread sleeps.
        assert!(!rig.forward().unwrap());
        assert!(!rig.shadow.arm(&mut rig.queue).unwrap());
        for head in given {
            finish(&mut rig, head, 1).unwrap();
        }
        while let Some(used) = rig.driver().pop().unwrap() {
            seen.push(used.token);
        }
        if seen.len() == 6 {
            break;
        }
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn chain_longer_than_the_pool_is_a_fault() {
    let mut rig = Rig::new(ALL, ALL, POOL_MIN).unwrap();
    push(&mut rig, 0, &[(900 << 10, Read)], 0);
    let fault = rig.forward().unwrap_err();
    assert!(matches!(fault, ShieldFault::TooLong { len: 921_600, limit: 524_288, .. }), "{fault}");
    assert!(fault.to_string().contains("use a larger --pool"), "{fault}");
}

#[test]
fn vring_has_a_reserve_where_others_fill_the_pool() {
    let mut rig = Rig::new(ALL, ALL, POOL_MIN).unwrap();
    let longest = rig.pool.data.longest();
    let mut taken = Vec::new();
    while let Some(block) = rig.pool.data.allocate(2048) {
        taken.push(block);
    }
    assert!(taken.len() * 2048 > longest, "others have all of it");
    push(&mut rig, 0, &[(12, Read), (65_550, Read), (1, Write)], 0);
    assert!(rig.forward().unwrap());
    let (head, _) = rig.take().unwrap();
    finish(&mut rig, head, 1).unwrap();
    // The block went back to the reserve.
    push(&mut rig, 0, &[(12, Read), (65_550, Read), (1, Write)], 1);
    assert!(rig.forward().unwrap());
    assert!(rig.pool.data.allocate(1).is_none());
}

#[test]
fn vring_without_room_is_a_fault() {
    let mut rig = rig();
    let shape = ShadowShape { index: 1, size: 1 << 15, features: ALL, vrings: 16 };
    let fault = ShadowQueue::new(&mut rig.pool, shape).unwrap_err();
    assert!(matches!(fault, ShieldFault::Crowded { index: 1, .. }), "{fault}");
    // Its parts went back.
    for index in 0..3 {
        ShadowQueue::new(&mut rig.pool, ShadowShape { index, size: 256, ..shape }).unwrap();
    }
}

#[test]
fn next_backend_gets_the_chains_in_flight_in_their_order() {
    let mut rig = rig();
    for token in 0..4 {
        let at = token as usize * 8192;
        let start = rig.front.buffers_at() + at;
        rig.front.memory.copy_from(start, &[u8::try_from(token).unwrap(); 4096]).unwrap();
        push(&mut rig, at, &[(4096, Read), (1, Write)], token);
    }
    rig.forward().unwrap();
    let heads: Vec<_> = (0..4).map(|_| rig.take().unwrap().0).collect();
    finish(&mut rig, heads[1], 1).unwrap();
    let earlier = rig.pool.memory().clone();
    rig.replace_backend(16 << 20).unwrap();
    earlier.copy_from(0, &vec![0xee; earlier.len()]).unwrap();
    rig.forward().unwrap();
    for token in [0, 2, 3] {
        let (head, chain) = rig.take().unwrap();
        assert_eq!(bytes(&rig, &chain[0]), [token; 4096], "{token}");
        finish(&mut rig, head, 1).unwrap();
    }
    assert!(rig.take().is_none());
    let tokens: Vec<_> = std::iter::from_fn(|| rig.driver().pop().unwrap()).collect();
    assert_eq!(tokens.iter().map(|used| used.token).collect::<Vec<_>>(), [1, 0, 2, 3]);
}

#[test]
fn stopped_vring_leaves_unused_chains_available() {
    let mut rig = rig();
    for token in 0..4 {
        push(&mut rig, 0, &[(16, Read), (1, Write)], token);
    }
    rig.forward().unwrap();
    let (head, _) = rig.take().unwrap();
    rig.backend.finish(head, 1);
    let _ = rig.backend.publish();
    let Rig { shadow, queue, pool, dirty, .. } = &mut rig;
    let shape = ShadowShape { index: 0, size: ENTRIES, features: ALL, vrings: 1 };
    let other = ShadowQueue::new(pool, shape).unwrap();
    std::mem::replace(shadow, other).stop(Some(queue), pool, dirty).unwrap();
    assert_eq!(queue.next_available(), 1, "the used one was returned");
    let _ = queue.publish();
    assert_eq!(rig.driver().pop().unwrap().unwrap().token, 0);
    assert_eq!(rig.driver().pop(), Ok(None));
}

#[test]
fn stopped_vring_returns_unused_chains_among_used_ones_without_data() {
    let mut rig = rig();
    for token in 0..3 {
        push(&mut rig, 0, &[(16, Read), (1, Write)], token);
    }
    rig.forward().unwrap();
    let heads: Vec<_> = (0..3).map(|_| rig.take().unwrap().0).collect();
    rig.backend.finish(heads[1], 1);
    let _ = rig.backend.publish();
    let Rig { shadow, queue, pool, dirty, .. } = &mut rig;
    let shape = ShadowShape { index: 0, size: ENTRIES, features: ALL, vrings: 1 };
    let other = ShadowQueue::new(pool, shape).unwrap();
    std::mem::replace(shadow, other).stop(Some(queue), pool, dirty).unwrap();
    assert_eq!(queue.next_available(), 2, "the last one is available again");
    let _ = queue.publish();
    let used: Vec<_> = std::iter::from_fn(|| rig.driver().pop().unwrap()).collect();
    assert_eq!(
        used.iter().map(|used| (used.token, used.len)).collect::<Vec<_>>(),
        [(1, 1), (0, 0)]
    );
}

proptest! {
    #[test]
    fn machine_is_written_in_writable_segments_alone(
        lens in proptest::collection::vec(1_usize..9000, 1..=4),
        readable in 0_usize..4,
        len: u32,
        fills: bool,
    ) {
        let mut rig = rig();
        let access = |part| if part < readable { Read } else { Write };
        let parts: Vec<_> = lens.iter().enumerate().map(|(n, len)| (*len, access(n))).collect();
        push(&mut rig, 1000, &parts, 5);
        rig.forward().unwrap();
        let (head, chain) = rig.take().unwrap();
        prop_assert!(chain.len() <= 4);
        let marks = PageMarks::new().unwrap();
        rig.keep_log(&marks).unwrap();
        let sum = |flag| chain.iter().filter(|l| l.flags & flag::WRITE == flag).map(|l| l.len as usize).sum::<usize>();
        let ins: usize = parts.iter().filter(|(_, a)| *a == Read).map(|(len, _)| len).sum();
        let outs: usize = parts.iter().filter(|(_, a)| *a == Write).map(|(len, _)| len).sum();
        prop_assert_eq!((sum(0), sum(flag::WRITE)), (ins, outs));
        if fills {
            // All of the pool's data.
            for link in &chain {
                fill(&rig, link, 0, &vec![0x11; link.len as usize]);
            }
        }
        finish(&mut rig, head, len).unwrap();
        let used = rig.driver().pop().unwrap().unwrap();
        let reported = outs.min(len as usize);
        prop_assert_eq!(used.len as usize, reported);
        let found = buffer(&rig, 0, 64 << 10);
        let first = 1000 + ins;
        let status = outs.saturating_sub(STATUS_MAX).max(reported);
        let mut written = vec![false; 16];
        for (at, byte) in found.into_iter().enumerate() {
            let is_written = at >= first
                && (at - first < reported || (status..outs).contains(&(at - first)));
            let expected = if !is_written { FILL } else if fills { 0x11 } else { 0 };
            prop_assert_eq!(byte, expected, "{}", at);
            written[at / PAGE_SIZE] |= is_written;
        }
        let start = rig.front.base() + rig.front.buffers_at() as u64;
        prop_assert_eq!(marks.take(start, 16).unwrap(), written);
    }

    #[test]
    fn arbitrary_drivers_and_backends_get_no_other_memory(
        settings: u8,
        steps in proptest::collection::vec(any::<u8>(), 0..1600),
    ) {
        let data = [&[settings][..], &steps].concat();
        super::fuzzing::shield(&data);
    }
}
