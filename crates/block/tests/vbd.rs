//! A vbd between two domains of one process: the real handshake, rings, grants and channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;

use ringfence_block::blkback::{BlkbackOptions, Mode};
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::hostile::{Guest, Stage};
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::conformance;

fn disk() -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(16 << 20, 512).unwrap())
}

#[test]
fn a_disk_behind_rings_is_a_disk_in_each_mode_and_pairing() {
    for mode in Mode::ALL {
        for persistent in [true, false] {
            let mut stage = Stage::new();
            let back = BlkbackOptions { mode, ..BlkbackOptions::default() };
            let options = BlkfrontOptions { persistent, ..BlkfrontOptions::default() };
            let guest = Guest::join(&mut stage, disk(), back, options);
            conformance::check(&*guest.disk(), 1);
            let all = stage.rules(guest.seat).all();
            assert!(all.is_empty(), "{mode}, {persistent}: {all:?}");
            assert!(guest.front.rules().all().is_empty(), "{:?}", guest.front.rules().all());
        }
    }
}
