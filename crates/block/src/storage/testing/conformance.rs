//! Conformance checks for every disk implementation. They overwrite the disk.

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::{bounded, usize_from};

use super::checker::Checker;
use super::workload::Workload;
use super::{Driver, Random, bytes_of, image, lent_with};
use crate::storage::{Disk, Op, Segment};

/// Length in bytes of the longest request tested.
const LONG: usize = 3 << 20;

/// Checks a writable disk of zeros of at least 4 MiB.
///
/// # Panics
///
/// Panics if a check fails; the message names the check and the seed.
pub fn check(disk: &dyn Disk, seed: u64) {
    let geometry = disk.geometry();
    assert!(geometry.bytes >= 4 << 20, "the disk is too small for this");
    assert!(matches!(geometry.sector_size, 512 | 4096));
    assert!(geometry.bytes.is_multiple_of(u64::from(geometry.sector_size)));
    load(disk, seed);
    long_and_odd(disk, seed);
    zeros_and_discards(disk);
    extents(disk);
    refusals(disk);
    many_at_once(disk);
    if disk.queues_max() > 1 {
        two_queues(disk);
    }
}

/// Checks random I/O at several queue depths.
fn load(disk: &dyn Disk, seed: u64) {
    let mut checker = Checker::new();
    for depth in [1, 4, 32] {
        let queue = disk.queue(bounded(depth, u32::MAX)).expect("a queue");
        let mut driver = Driver::new(queue);
        let workload = Workload { depth, ..Workload::new(seed + depth as u64) };
        let mut running = workload.start(disk);
        let done = running
            .steps(&mut driver, &mut checker, 200)
            .and_then(|()| running.finish(&mut driver, &mut checker));
        done.unwrap_or_else(|failure| panic!("seed {seed}, depth {depth}: {failure:?}"));
    }
    let found = checker.check_read(0, &image(disk));
    found.unwrap_or_else(|violation| panic!("seed {seed}, at the end: {violation}"));
}

/// Checks misaligned memory in odd pieces, longer than any buffer.
fn long_and_odd(disk: &dyn Disk, seed: u64) {
    let mut random = Random::new(seed);
    let mut driver = Driver::new(disk.queue(8).expect("a queue"));
    let bytes: Vec<u8> = (0..LONG / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    let odd = LentSlice::anonymous(LONG + 64);
    odd.copy_from(13, &bytes).expect("within the memory");
    let pieces = |random: &mut Random| {
        let (mut at, mut segments) = (0, vec![]);
        while at < LONG {
            let len = (1 + random.index(200_000)).min(LONG - at);
            segments.push(odd.slice(13 + at, len).expect("within the memory").into());
            at += len;
        }
        segments
    };
    let segments = pieces(&mut random);
    let count = segments.len();
    let done = driver.run(Op::Write { fua: true }, 4096, LONG as u64, segments);
    assert_eq!(done.result, Ok(()));
    assert_eq!(done.segments.len(), count, "the pieces come back");
    odd.zero(0, odd.len()).expect("within the memory");
    let done = driver.run(Op::Read, 4096, LONG as u64, pieces(&mut random));
    assert_eq!(done.result, Ok(()));
    let read = bytes_of(&odd);
    assert!(read[13..13 + LONG] == bytes, "seed {seed}: not what was written");
    assert!(read[..13].iter().chain(&read[13 + LONG..]).all(|byte| *byte == 0), "written beside");
}

fn zeros_and_discards(disk: &dyn Disk) {
    let geometry = disk.geometry();
    let sector = u64::from(geometry.sector_size);
    let mut driver = Driver::new(disk.queue(1).expect("a queue"));
    let whole = usize_from(16 * sector);
    driver.write(0, &vec![0xAA; whole]).expect("a write");
    let mut wanted = vec![0xAA; whole];
    let range = |from: u64, to: u64| usize_from(from * sector)..usize_from(to * sector);
    for (allocate, from, to) in [(false, 3, 8), (true, 6, 12)] {
        let len = (to - from) * sector;
        let done = driver.run(Op::WriteZeroes { allocate }, from * sector, len, vec![]);
        if geometry.write_zeroes {
            assert_eq!(done.result, Ok(()));
            wanted[range(from, to)].fill(0);
        } else {
            assert_eq!(done.result, Err(libc::EOPNOTSUPP));
        }
        let read = driver.read(0, whole);
        assert!(read == Ok(wanted.clone()), "zeros where there should be, no others");
    }
    let done = driver.run(Op::Discard { secure: false }, 13 * sector, 2 * sector, vec![]);
    let expected = geometry.discard.map_or(Err(libc::EOPNOTSUPP), |_| Ok(()));
    assert_eq!(done.result, expected);
    let read = driver.read(0, whole).expect("a read");
    assert!(read[range(0, 13)] == wanted[range(0, 13)], "what was not discarded stays");
    assert!(read[range(15, 16)] == wanted[range(15, 16)], "what was not discarded stays");
    let done = driver.run(Op::Discard { secure: true }, 0, sector, vec![]);
    if geometry.discard.is_none_or(|discard| !discard.secure) {
        assert_eq!(done.result, Err(libc::EOPNOTSUPP));
    }
}

/// Checks that extents cover the queried range, and that no written byte lies in a hole.
fn extents(disk: &dyn Disk) {
    let geometry = disk.geometry();
    let sector = u64::from(geometry.sector_size);
    let mut driver = Driver::new(disk.queue(1).expect("a queue"));
    let (start, end) = (sector, 2 << 20);
    driver.write(1 << 20, &vec![0xAB; geometry.sector_size as usize]).expect("a write");
    let content = driver.read(start, usize_from(end - start)).expect("a read");
    let memory = LentSlice::anonymous(usize_from(super::super::extents::LIST_BYTES));
    let mut at = start;
    while at < end {
        let done = driver.run(Op::Extents, at, end - at, vec![memory.clone().into()]);
        if !geometry.extents {
            assert_eq!(done.result, Err(libc::EOPNOTSUPP));
            return;
        }
        assert_eq!(done.result, Ok(()));
        let list = super::super::extents::load(&memory).expect("a page");
        assert!(!list.is_empty(), "no extent at {at}");
        for (len, state) in list {
            assert!(len.is_multiple_of(sector) && at + len <= end, "{len} bytes at {at}");
            let index = |at: u64| usize_from(at - start);
            let part = &content[index(at)..index(at + len)];
            assert!(!state.zero || part.iter().all(|byte| *byte == 0), "data in a hole at {at}");
            at += len;
        }
    }
    let refused = driver.run(Op::Extents, geometry.bytes, sector, vec![memory.into()]);
    assert!(refused.result.is_err());
    let refused = driver.run(Op::Extents, 0, sector, vec![]);
    assert!(refused.result.is_err(), "no memory for the list");
}

/// Checks that invalid requests return an error each and that the disk still works.
fn refusals(disk: &dyn Disk) {
    let geometry = disk.geometry();
    let sector = u64::from(geometry.sector_size);
    let mut driver = Driver::new(disk.queue(4).expect("a queue"));
    let memory = |len: u64| vec![lent_with(&vec![1; usize_from(len)]).into()];
    let write = Op::Write { fua: false };
    let refused = |driver: &mut Driver, op, offset, len, segments: Vec<Segment>| {
        let count = segments.len();
        let done = driver.run(op, offset, len, segments);
        assert!(done.result.is_err(), "{op:?} of {len} at {offset}");
        assert_eq!(done.segments.len(), count);
    };
    for op in [Op::Read, write] {
        refused(&mut driver, op, geometry.bytes, sector, memory(sector));
        refused(&mut driver, op, geometry.bytes - sector, 2 * sector, memory(2 * sector));
        refused(&mut driver, op, u64::MAX - sector + 1, sector, memory(sector));
        refused(&mut driver, op, sector / 2, sector, memory(sector));
        refused(&mut driver, op, 0, sector / 2, memory(sector / 2));
        refused(&mut driver, op, 0, sector, memory(2 * sector));
        refused(&mut driver, op, 0, 2 * sector, memory(sector));
        refused(&mut driver, op, 0, sector, vec![]);
    }
    refused(&mut driver, Op::WriteZeroes { allocate: false }, geometry.bytes, sector, vec![]);
    refused(&mut driver, Op::Discard { secure: false }, geometry.bytes, sector, vec![]);
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
    assert_eq!(driver.run(Op::Read, 0, 0, vec![]).result, Ok(()), "nothing of nothing");
    driver.write(geometry.bytes - sector, &vec![5; usize_from(sector)]).expect("the disk goes on");
}

/// Checks a full queue of all kinds of requests submitted before one kick.
fn many_at_once(disk: &dyn Disk) {
    let sector = u64::from(disk.geometry().sector_size);
    let len = usize_from(sector);
    let mut driver = Driver::new(disk.queue(64).expect("a queue"));
    let mut open = std::collections::HashSet::new();
    for n in 0..64 {
        let op = match n % 4 {
            0 => Op::Read,
            1 | 2 => Op::Write { fua: n % 8 == 1 },
            _ => Op::Flush,
        };
        let (len, segments) = match op {
            Op::Flush => (0, vec![]),
            _ => (sector, vec![LentSlice::anonymous(len).into()]),
        };
        open.insert(driver.submit(op, n * sector, len, segments));
    }
    while !open.is_empty() {
        for done in driver.wait().expect("answers") {
            assert_eq!(done.result, Ok(()));
            assert!(open.remove(&done.token), "one answer to each request");
        }
    }
}

fn two_queues(disk: &dyn Disk) {
    let sector = usize_from(disk.geometry().sector_size);
    let mut one = Driver::new(disk.queue(2).expect("a queue"));
    let mut two = Driver::new(disk.queue(2).expect("a second queue"));
    one.write(0, &vec![0x11; sector]).expect("a write");
    assert_eq!(two.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
    assert_eq!(two.read(0, sector), Ok(vec![0x11; sector]));
}
