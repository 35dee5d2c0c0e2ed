//! Requests that break a rule: each fails alone.

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::storage;
use ringfence_block::vbd::toolstack::VbdConfig;
use ringfence_platform::{Access, Gref, Platform};
use ringfence_testkit::block::Stage;
use ringfence_testkit::block::frontend::{describe, whole};
use ringfence_wire::blkif::{
    Abi, Direction, ExtentState, Operation, RequestName, SEGMENTS_MAX, SegmentRange, Slot, Status,
    extents, write_zeroes,
};

use super::*;

/// Returns the slot with the bytes at `at` replaced.
fn with(mut slot: Slot, at: usize, bytes: &[u8]) -> Slot {
    slot[at..at + bytes.len()].copy_from_slice(bytes);
    slot
}

#[test]
fn request_that_breaks_rule_fails_under_named_rule() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let guest = other_guest(&mut stage);
        let mut front = connected(&mut stage, mode);
        let page = front.lend(Access::ReadWrite, 1);
        let deaf = front.lend(Access::ReadOnly, 1);
        let query = |sector, sectors, gref| {
            extents(Abi::X86_64, RequestName { id: 9, handle: 0 }, sector, sectors, gref)
        };
        let zeros = |sector, sectors| {
            write_zeroes(Abi::X86_64, RequestName { id: 9, handle: 0 }, sector, sectors, true)
        };
        let read = |sector| front.direct(Operation::Read, 9, sector, &[whole(&page)]);
        let last = SECTORS - 8;
        let good = read(last);
        let (error, unsupported) = (Status::Error, Status::NotSupported);
        let cases: Vec<(Slot, Status, &str)> = vec![
            (with(read(0), 28, &[5, 4]), error, "blk_sectors_reversed"),
            (with(read(0), 28, &[0, 8]), error, "blk_crosses_page"),
            (with(read(0), 28, &[0, 255]), error, "blk_crosses_page"),
            (read(last + 1), error, "blk_beyond_disk"),
            (read(u64::MAX / 512), error, "blk_beyond_disk"),
            (read(u64::MAX - 7), error, "blk_sector_overflow"),
            (read(u64::MAX), error, "blk_sector_overflow"),
            (with(read(0), 0, &[4]), unsupported, "blk_unknown_operation"),
            (with(read(0), 0, &[255]), unsupported, "blk_unknown_operation"),
            (with(read(0), 1, &[0]), error, "blk_no_sectors"),
            (with(read(0), 1, &[12]), error, "blk_too_many_segments"),
            (with(read(0), 1, &[255]), error, "blk_too_many_segments"),
            (front.discard(9, u64::MAX, u64::MAX), error, "blk_sector_overflow"),
            (front.discard(9, 0, SECTORS + 1), error, "blk_beyond_disk"),
            (front.discard(9, 0, 0), error, "blk_no_sectors"),
            (zeros(1, SECTORS), error, "blk_beyond_disk"),
            (zeros(u64::MAX, 2), error, "blk_sector_overflow"),
            (zeros(0, 0), error, "blk_no_sectors"),
            (query(0, SECTORS + 1, page.gref()), error, "blk_beyond_disk"),
            (query(u64::MAX, 2, page.gref()), error, "blk_sector_overflow"),
            (query(0, 0, page.gref()), error, "blk_no_sectors"),
            (query(0, 8, Gref(4000)), error, "blk_gref_not_granted"),
            (query(0, 8, deaf.gref()), error, "blk_grant_denied"),
            (front.indirect(Direction::Read, 9, 0, u16::MAX, &[]), error, "blk_too_many_segments"),
            (front.indirect(Direction::Read, 9, 0, 257, &[]), error, "blk_too_many_segments"),
            (front.indirect(Direction::Read, 9, 0, 0, &[]), error, "blk_no_sectors"),
            (
                with(front.indirect(Direction::Read, 9, 0, 1, &[]), 1, &[6]),
                error,
                "blk_bad_indirect_operation",
            ),
        ];
        for (slot, status, rule) in cases {
            let before = stage.rules(front.vbd).get(rule);
            assert_eq!(front.ask(&slot), status, "{mode}: {rule}");
            assert_eq!(stage.rules(front.vbd).get(rule), before + 1, "{mode}: {rule}");
            assert_eq!(front.ask(&good), Status::Okay, "{mode}: after {rule}");
        }
        assert_eq!(stage.look(front.vbd), ringfence_xenbus::end::Life::Alive);
        assert!(stage.vbds[front.vbd].penalized().is_none());
        check_other_guest_works(&stage, &guest);
    }
}

#[test]
fn query_of_extents_writes_list_to_its_page() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let data = front.lend(Access::ReadWrite, 0xA5);
        let slot = front.direct(Operation::Write, 1, 64, &[whole(&data)]);
        assert_eq!(front.ask(&slot), Status::Okay);
        let list = front.lend(Access::ReadWrite, 0xEE);
        let slot = extents(Abi::X86_64, RequestName { id: 2, handle: 0 }, 0, SECTORS, list.gref());
        assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
        let found = storage::extents::load(list.memory()).unwrap();
        let (hole, data) = (ExtentState::HOLE, ExtentState::DATA);
        let rest = (SECTORS - 72) * 512;
        assert_eq!(found, [(32768, hole), (4096, data), (rest, hole)], "{mode}");
        assert!(stage.rules(front.vbd).all().is_empty());
    }
}

#[test]
fn write_of_zeros_frees_range_unless_request_keeps_its_storage() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let data = front.lend(Access::ReadWrite, 0xA5);
        let list = front.lend(Access::ReadWrite, 0xEE);
        let name = RequestName { id: 2, handle: 0 };
        for (allocate, expected) in [
            (false, vec![(SECTORS * 512, ExtentState::HOLE)]),
            (
                true,
                vec![
                    (32768, ExtentState::HOLE),
                    (4096, ExtentState::DATA),
                    ((SECTORS - 72) * 512, ExtentState::HOLE),
                ],
            ),
        ] {
            let slot = front.direct(Operation::Write, 1, 64, &[whole(&data)]);
            assert_eq!(front.ask(&slot), Status::Okay);
            let slot = write_zeroes(Abi::X86_64, name, 64, 8, allocate);
            assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
            let slot = extents(Abi::X86_64, name, 0, SECTORS, list.gref());
            assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
            assert_eq!(storage::extents::load(list.memory()).unwrap(), expected, "{mode}");
            let slot = front.direct(Operation::Read, 3, 64, &[whole(&list)]);
            assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
            let mut content = [1; 4096];
            list.memory().copy_to(0, &mut content).unwrap();
            assert_eq!(content, [0; 4096], "{mode}");
        }
        assert!(stage.rules(front.vbd).all().is_empty());
    }
}

#[test]
fn xsa_270_access_beyond_last_sector_is_refused() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let page = front.lend(Access::ReadWrite, 7);
    for (sector, count, status) in [
        (SECTORS - 1, 1, Status::Okay),
        (SECTORS, 1, Status::Error),
        (SECTORS - 7, 8, Status::Error),
        (SECTORS - 8, 8, Status::Okay),
    ] {
        let range = SegmentRange::new(page.gref(), 0, count - 1).unwrap();
        for operation in [Operation::Write, Operation::Read] {
            let slot = front.direct(operation, 1, sector, &[range]);
            assert_eq!(front.ask(&slot), status, "{count} sectors from {sector} on");
        }
    }
}

#[test]
fn xsa_216_response_is_written_with_its_padding() {
    for abi in Abi::ALL {
        let mut stage = Stage::new();
        let mut front = raw(&mut stage, BlkbackOptions::default(), abi, 1);
        front.connect(&mut stage, true);
        let slot = [0xFF; 112];
        assert_eq!(front.ask(&slot), Status::NotSupported);
        let entry = front.entry(0);
        let expected = [255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 254, 255];
        assert_eq!(entry[..12], expected);
        if abi == Abi::X86_64 {
            assert_eq!(entry[12..16], [0; 4], "the padding too");
        }
        assert!(entry[abi.response_bytes()..].iter().all(|byte| *byte == 255), "and no more");
    }
}

#[test]
fn data_over_every_abi_and_ring_size_is_intact() {
    for abi in Abi::ALL {
        for pages in [1, 2, 4, 8, 16] {
            let mut stage = Stage::new();
            let mut front = raw(&mut stage, BlkbackOptions::default(), abi, pages);
            front.connect(&mut stage, false);
            let data = front.lend(Access::ReadWrite, 0xA5);
            let back = front.lend(Access::ReadWrite, 0);
            for n in 0..1200u64 {
                let sector = n % (SECTORS / 8) * 8;
                data.memory().copy_from(8, &n.to_le_bytes()).unwrap();
                let write = front.direct(Operation::Write, n, sector, &[whole(&data)]);
                assert_eq!(front.ask(&write), Status::Okay);
                let read = front.direct(Operation::Read, n, sector, &[whole(&back)]);
                assert_eq!(front.ask(&read), Status::Okay);
                let found: [u8; 24] = back.memory().fetch(0).unwrap().into_unchecked();
                assert_eq!(found[8..16], n.to_le_bytes());
                assert_eq!((found[0], found[23]), (0xA5, 0xA5));
            }
            assert!(stage.rules(front.vbd).all().is_empty());
        }
    }
}

#[test]
fn segments_of_partial_pages_move_only_named_sectors() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let pattern: Vec<u8> = (1..=8).flat_map(|sector| [sector; 512]).collect();
        let source = front.lend(Access::ReadWrite, 0);
        source.memory().copy_from(0, &pattern).unwrap();
        let part = |first, last| SegmentRange::new(source.gref(), first, last).unwrap();
        let slot = front.direct(Operation::Write, 1, 100, &[part(6, 7), part(0, 0), part(3, 4)]);
        assert_eq!(front.ask(&slot), Status::Okay);
        let target = front.lend(Access::ReadWrite, 0xEE);
        let range = SegmentRange::new(target.gref(), 1, 6).unwrap();
        let slot = front.direct(Operation::Read, 2, 99, &[range]);
        assert_eq!(front.ask(&slot), Status::Okay);
        let mut found = vec![0; 4096];
        target.memory().copy_to(0, &mut found).unwrap();
        let sectors: Vec<u8> = found.chunks(512).map(|sector| sector[0]).collect();
        assert_eq!(sectors, [0xEE, 0, 7, 8, 1, 4, 5, 0xEE], "{mode}");
    }
}

#[test]
fn write_to_read_only_disk_is_refused() {
    let mut stage = Stage::new();
    let platform = stage.join(64);
    let config = VbdConfig { read_only: true, ..VbdConfig::default() };
    let vbd = stage.add_vbd(platform.domid(), disk(512), options(Mode::Persistent), config);
    let mut front = ringfence_testkit::block::RawFront::new(&stage, platform, vbd, Abi::X86_64, 1);
    front.connect(&mut stage, true);
    let page = front.lend(Access::ReadWrite, 7);
    let list = front.lend(Access::ReadWrite, 0);
    describe(&list, &[whole(&page)]);
    let write = front.direct(Operation::Write, 1, 0, &[whole(&page)]);
    assert_eq!(front.ask(&write), Status::Error);
    let flush = front.direct(Operation::Flush, 1, 0, &[whole(&page)]);
    assert_eq!(front.ask(&flush), Status::Error, "it would write");
    let indirect = front.indirect(Direction::Write, 1, 0, 1, &[list.gref()]);
    assert_eq!(front.ask(&indirect), Status::Error);
    assert_eq!(stage.rules(vbd).get("blk_read_only"), 3);
    let discard = front.discard(1, 0, 8);
    assert_eq!(front.ask(&discard), Status::NotSupported);
    let barrier = front.direct(Operation::Barrier, 1, 0, &[]);
    assert_eq!(front.ask(&barrier), Status::NotSupported);
    let read = front.direct(Operation::Read, 1, 0, &[whole(&page)]);
    assert_eq!(front.ask(&read), Status::Okay);
    let found: [u8; 8] = page.memory().fetch(0).unwrap().into_unchecked();
    assert_eq!(found, [0; 8], "it was not written");
}

#[test]
fn request_for_part_of_4096_byte_sector_is_refused() {
    let mut stage = Stage::new();
    let platform = stage.join(64);
    let config = VbdConfig::default();
    let vbd = stage.add_vbd(platform.domid(), disk(4096), options(Mode::Map), config);
    let mut front = ringfence_testkit::block::RawFront::new(&stage, platform, vbd, Abi::X86_64, 1);
    front.connect(&mut stage, false);
    let page = front.lend(Access::ReadWrite, 7);
    let half = |first, last| SegmentRange::new(page.gref(), first, last).unwrap();
    for (sector, segments, status) in [
        (0, vec![half(0, 7)], Status::Okay),
        (8, vec![half(0, 3), half(4, 7)], Status::Okay),
        (8, vec![half(0, 3)], Status::Error),
        (1, vec![half(0, 7)], Status::Error),
    ] {
        let slot = front.direct(Operation::Read, 1, sector, &segments);
        assert_eq!(front.ask(&slot), status);
    }
    assert_eq!(stage.rules(vbd).get("blk_unaligned"), 2);
}

#[test]
fn largest_indirect_request_succeeds_and_invalid_ones_fail() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let pages: Vec<_> = (0..=255).map(|n| front.lend(Access::ReadWrite, n)).collect();
        let list = front.lend(Access::ReadWrite, 0);
        let ranges: Vec<_> = pages.iter().map(whole).collect();
        describe(&list, &ranges);
        let slot = front.indirect(Direction::Write, 3, 0, SEGMENTS_MAX, &[list.gref()]);
        assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
        for page in &pages {
            page.memory().zero(0, 4096).unwrap();
        }
        let slot = front.indirect(Direction::Read, 4, 0, SEGMENTS_MAX, &[list.gref()]);
        assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
        for (n, page) in (0..=255u8).zip(&pages) {
            let found: [u8; 4] = page.memory().fetch(4092).unwrap().into_unchecked();
            assert_eq!(found, [n; 4]);
        }
        let nowhere = front.indirect(Direction::Read, 5, 0, 4, &[Gref(4000)]);
        assert_eq!(front.ask(&nowhere), Status::Error);
        assert!(stage.rules(front.vbd).get("blk_gref_not_granted") == 1);
        list.memory().copy_from(0, &[0xFF; 4096]).unwrap();
        let nonsense = front.indirect(Direction::Read, 6, 0, 256, &[list.gref()]);
        assert_eq!(front.ask(&nonsense), Status::Error);
        assert_eq!(stage.rules(front.vbd).get("blk_crosses_page"), 1);
        let served = stage.vbds[front.vbd].served().unwrap();
        let indirect: u64 = served.counters().map(|(queue, _)| queue.indirect.get()).sum();
        assert_eq!(indirect, 2, "those that were done");
    }
}

#[test]
fn xsa_155_indirect_list_changed_during_read_succeeds_or_fails_cleanly() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let guest = other_guest(&mut stage);
        let mut front = connected(&mut stage, mode);
        let page = front.lend(Access::ReadWrite, 1);
        let list = front.lend(Access::ReadWrite, 0);
        let good = SegmentRange::new(page.gref(), 0, 0).unwrap();
        describe(&list, &[good; 256]);
        // Another thread changes a gref and the sectors of one descriptor all the time.
        let memory = list.memory().clone();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let gref = page.gref().0.to_le_bytes();
        let flipper = std::thread::spawn(move || {
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                memory.copy_from(255 * 8, &[0xFF, 0xFF, 0xFF, 0xFF, 9, 255, 0, 0]).unwrap();
                let [a, b, c, d] = gref;
                memory.copy_from(255 * 8, &[a, b, c, d, 0, 0, 0, 0]).unwrap();
            }
        });
        let mut seen = std::collections::BTreeSet::new();
        for id in 0..3000 {
            let slot = front.indirect(Direction::Read, id, 0, 256, &[list.gref()]);
            seen.insert(format!("{:?}", front.ask(&slot)));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        flipper.join().unwrap();
        // A torn descriptor breaks one of these rules.
        let allowed = ["blk_sectors_reversed", "blk_crosses_page", "blk_gref_not_granted"];
        let all = stage.rules(front.vbd).all();
        assert!(all.keys().all(|rule| allowed.contains(rule)), "{mode}: {all:?}");
        assert!(seen.iter().all(|answer| answer == "Okay" || answer == "Error"), "{seen:?}");
        // Without the race the request succeeds.
        describe(&list, &[good; 256]);
        let slot = front.indirect(Direction::Read, 3000, 0, 256, &[list.gref()]);
        assert_eq!(format!("{:?}", front.ask(&slot)), "Okay");
        check_other_guest_works(&stage, &guest);
    }
}
