//! Time of the kernel copies that mode `copy` consists of, without Ringfence.
//!
//! Each packet takes one `pread` (tx) or `pwrite` (rx) on the same kind of file, from the start of a page
//! of an arena that is made, sealed and filled like a vif's. Packets use the pages in rotation, as they
//! do in a ring. A packet of several pages lies in adjacent ones, which is the best case of the run. The
//! time is this thread's CPU time, which excludes preemption. No ring is read, no grant is looked up
//! and no packet is verified.

use std::time::Duration;

use anyhow::{Context, ensure};
use ringfence_memory::PAGE_SIZE;
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::time::ClockId;

use super::params::Direction;
use super::usage::clock;

/// Pages in use: those of a full ring.
const PAGES: usize = 256;
/// Packets for which there is private memory, as in a batch.
const PACKETS: usize = 64;
/// Number of measurements, of which the median is taken.
const ROUNDS: usize = 9;
/// Minimum length of one measurement.
const ROUND: Duration = Duration::from_millis(15);
/// Maximum calls of one measurement.
const CALLS_MAX: u64 = 1 << 22;

/// Returns the nanoseconds of one copy of `size` bytes.
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
    // Packets follow each other as in a batch, unless they are too long to stay in the cache.
    let packets = (arena.len() / room).clamp(1, PACKETS);
    let mut private = vec![0x5A; packets * room];
    let pages = size.div_ceil(PAGE_SIZE);
    let places = (PAGES / pages) as u64;
    let mut one = |call: u64, packet: usize| {
        let offset = call % places * (pages * PAGE_SIZE) as u64;
        let bytes = &mut private[packet * room..][..size];
        match direction {
            Direction::Tx => rustix::io::pread(&file, bytes, offset),
            Direction::Rx => rustix::io::pwrite(&file, bytes, offset),
        }
    };
    let mut round = |calls: u64| {
        let began = clock(ClockId::ThreadCPUTime);
        for (call, packet) in (0..calls).zip((0..packets).cycle()) {
            let n = one(call, packet).context("a bare copy")?;
            ensure!(n == size, "a bare copy of {size} bytes moved {n}");
        }
        Ok(Duration::from_nanos(clock(ClockId::ThreadCPUTime) - began))
    };
    // The number of calls grows until a measurement takes its minimum length.
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
    fn larger_copy_takes_longer() {
        for direction in [Direction::Tx, Direction::Rx] {
            let small = measure(direction, 64).unwrap();
            let large = measure(direction, 65_000).unwrap();
            assert!(small > 0.0 && large > small, "{direction}: {small} {large}");
        }
    }
}
