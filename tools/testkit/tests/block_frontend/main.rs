//! Frontends that break the rules: the right answer each, a counter each, and neighbours that notice
//! nothing.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod adoption;
mod bound;
mod grants;
mod keys;
mod requests;
mod rings;

use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::vbd::toolstack::VbdConfig;
use ringfence_platform::Platform;
use ringfence_testkit::block::{Guest, RawFront, Stage};
use ringfence_wire::blkif::Abi;

/// Sectors of the hostile guest's disk.
pub(crate) const SECTORS: u64 = 8192;

/// Options of a backend.
pub(crate) fn options(mode: Mode) -> BlkbackOptions {
    BlkbackOptions { mode, ..BlkbackOptions::default() }
}

/// A disk of [`SECTORS`].
pub(crate) fn disk(sector_size: u32) -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(SECTORS * 512, sector_size).unwrap())
}

/// A hostile frontend at a vbd of its own, not connected.
pub(crate) fn raw(stage: &mut Stage, back: BlkbackOptions, abi: Abi, pages: usize) -> RawFront {
    let platform = stage.join(4096);
    let vbd = stage.add_vbd(platform.domid(), disk(512), back, VbdConfig::default());
    RawFront::new(stage, platform, vbd, abi, pages)
}

/// The same, connected.
pub(crate) fn connected(stage: &mut Stage, mode: Mode) -> RawFront {
    let mut front = raw(stage, options(mode), Abi::X86_64, 1);
    front.connect(stage, true);
    front
}

/// A guest with manners beside it.
pub(crate) fn neighbour(stage: &mut Stage) -> Guest {
    let disk = Arc::new(MemoryDisk::new(4 << 20, 512).unwrap());
    Guest::join(stage, disk, BlkbackOptions::default(), BlkfrontOptions::default())
}

/// Random I/O of a guest with manners, every answer of which is checked. Once for each guest: its disk
/// is taken to hold zeros.
pub(crate) fn exercise(guest: &Guest) {
    Workload::new(7).exercise(&*guest.disk(), 300);
}

/// The neighbour's disk works, and nothing is held against it.
pub(crate) fn unharmed(stage: &Stage, guest: &Guest) {
    exercise(guest);
    still_served(stage, guest);
}

/// Nothing is held against the neighbour.
pub(crate) fn still_served(stage: &Stage, guest: &Guest) {
    assert!(stage.rules(guest.vbd).all().is_empty());
    assert!(stage.vbds[guest.vbd].served().unwrap().is_alive());
}
