//! Block frontends that break the rules: each attack gets the right answer and increments its counter, and
//! other guests are not affected.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod adoption;
mod bound;
mod completions;
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

/// Returns backend options with the given access mode.
pub(crate) fn options(mode: Mode) -> BlkbackOptions {
    BlkbackOptions { mode, ..BlkbackOptions::default() }
}

/// Creates a disk of [`SECTORS`] sectors of 512 bytes.
pub(crate) fn disk(sector_size: u32) -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(SECTORS * 512, sector_size).unwrap())
}

/// Adds a vbd with a hostile frontend, not connected.
pub(crate) fn raw(stage: &mut Stage, back: BlkbackOptions, abi: Abi, pages: usize) -> RawFront {
    let platform = stage.join(4096);
    let vbd = stage.add_vbd(platform.domid(), disk(512), back, VbdConfig::default());
    RawFront::new(stage, platform, vbd, abi, pages)
}

/// Adds a vbd with a hostile frontend and connects it.
pub(crate) fn connected(stage: &mut Stage, mode: Mode) -> RawFront {
    let mut front = raw(stage, options(mode), Abi::X86_64, 1);
    front.connect(stage, true);
    front
}

/// Adds a correct guest with a device of its own.
pub(crate) fn other_guest(stage: &mut Stage) -> Guest {
    let disk = Arc::new(MemoryDisk::new(4 << 20, 512).unwrap());
    Guest::join(stage, disk, BlkbackOptions::default(), BlkfrontOptions::default())
}

/// Checks random I/O of a correct guest. Call it once for each guest: it assumes that the disk holds
/// zeros.
pub(crate) fn exercise(guest: &Guest) {
    Workload::new(7).exercise(&*guest.disk(), 300);
}

/// Checks that the other guest's disk works and that it has no penalty.
pub(crate) fn check_other_guest_works(stage: &Stage, guest: &Guest) {
    exercise(guest);
    check_other_guest_is_served(stage, guest);
}

/// Checks that the other guest broke no rule and that its device is served.
pub(crate) fn check_other_guest_is_served(stage: &Stage, guest: &Guest) {
    assert!(stage.rules(guest.vbd).all().is_empty());
    assert!(stage.vbds[guest.vbd].served().unwrap().is_alive());
}
