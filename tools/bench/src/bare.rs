//! What the kernel alone takes for the copies that mode `copy` is made of.
//!
//! The same call on the same kind of file: one `pread` (tx) or `pwrite` (rx) for each packet, from
//! the start of a page of an arena made, sealed and filled like a vif's. Packets take the pages in
//! turn, as they do in a ring; a packet of several pages lies in neighbouring ones, which is the
//! best case of the run. Time is this thread's processor time, which does not run while something
//! else has the core. Nothing is fetched from rings, looked up in grant tables or verified.

use std::time::Duration;

use anyhow::{Context, ensure};
use ringfence_memory::PAGE_SIZE;
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::time::ClockId;

use super::args::Direction;
use super::usage::clock;

/// Pages in use: those of a full ring.
const PAGES: usize = 256;
/// Private room of so many packets, as in a batch.
const PACKETS: usize = 64;
/// The median of so many measurements...
const ROUNDS: usize = 9;
/// ... of at least this length each,
const ROUND: Duration = Duration::from_millis(15);
/// but no more calls than this.
const CALLS_MAX: u64 = 1 << 22;

/// Nanoseconds of one copy of `size` octets.
pub(super) fn measure(direction: Direction, size: u32) -> anyhow::Result<f64> {
    let size = size as usize;
    let file =
        rustix::fs::memfd_create("ringfence-bare", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .context("memfd_create")?;
    let arena = vec![0x5A; PAGES * PAGE_SIZE];
    rustix::fs::ftruncate(&file, arena.len() as u64).context("ftruncate")?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .context("sealing")?;
    rustix::fs::fcntl_setfl(&file, OFlags::NOATIME).context("O_NOATIME")?;
    rustix::io::pwrite(&file, &arena, 0).context("pwrite")?;
    let room = size.next_multiple_of(64);
    // One packet after the other, as in a batch, unless they are so long that they would not stay
    // in the cache.
    let packets = (arena.len() / room).clamp(1, PACKETS);
    let mut private = vec![0x5A; packets * room];
    let pages = size.div_ceil(PAGE_SIZE);
    let places = (PAGES / pages) as u64;
    let mut one = |i: u64| {
        let offset = i % places * (pages * PAGE_SIZE) as u64;
        let at = usize::try_from(i).unwrap_or(0) % packets * room;
        let bytes = &mut private[at..at + size];
        match direction {
            Direction::Tx => rustix::io::pread(&file, bytes, offset),
            Direction::Rx => rustix::io::pwrite(&file, bytes, offset),
        }
    };
    let mut round = |calls: u64| {
        let began = clock(ClockId::ThreadCPUTime);
        for i in 0..calls {
            let n = one(i).context("a bare copy")?;
            ensure!(n == size, "a bare copy of {size} octets moved {n}");
        }
        Ok(Duration::from_nanos(clock(ClockId::ThreadCPUTime) - began))
    };
    // So many calls that a round takes its time.
    let mut calls = 256;
    while round(calls)? < ROUND && calls < CALLS_MAX {
        calls *= 2;
    }
    let mut rounds = [0.0; ROUNDS];
    for nanos in &mut rounds {
        *nanos = round(calls)?.as_nanos() as f64 / calls as f64;
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_copy_takes_longer() {
        for direction in [Direction::Tx, Direction::Rx] {
            let small = measure(direction, 64).unwrap();
            let large = measure(direction, 65_000).unwrap();
            assert!(small > 0.0 && large > small, "{direction}: {small} {large}");
        }
    }
}
