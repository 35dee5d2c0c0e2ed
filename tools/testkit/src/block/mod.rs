//! Adversary frontend of a disk, and both ends of correct disks in one process, for tests.
//!
//! * [`stage`]: a driver domain with any number of vbds, and correct guests.
//! * [`frontend`]: an adversary guest whose rings, pages, keys and channels a test writes word by word.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

pub mod frontend;
pub mod stage;

pub use frontend::RawFront;
pub use stage::{Guest, Stage};
