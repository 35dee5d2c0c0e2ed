//! What the parent of a disk benchmark and its domains say to each other.

use std::time::Duration;

use ringfence::switchboard::DiskFrontend;
use ringfence_block::storage::file::{CacheMode, Engine};
use serde::{Deserialize, Serialize};

use super::args::{Rw, Storage};
use super::latency::Latencies;
use crate::usage::Usage;

/// Bytes of all guests' disks together: the same for any number of guests, so that caches are asked the
/// same.
const TOTAL: u64 = 128 << 20;

/// The handle of each guest's disk.
pub(super) const HANDLE: u32 = 51712;

/// Bytes of each guest's disk.
pub(super) fn span(guests: u16) -> u64 {
    (TOTAL / u64::from(guests.max(1))).next_multiple_of(1 << 20)
}

/// The first message to a domain; its connection to the hub comes with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Setup {
    /// The driver domain.
    Backend {
        /// The mode's name.
        mode: String,
        storage: Storage,
        /// How a file is used.
        cache: CacheMode,
        /// What does the I/O of a file.
        engine: Engine,
        /// The guests' numbers.
        guests: Vec<u16>,
        queues: u16,
        /// Bytes of each guest's disk.
        span: u64,
    },
    /// A guest.
    Guest(GuestSetup),
}

/// What a guest does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct GuestSetup {
    /// Its domain number.
    pub(crate) domain: u16,
    /// Its disk's.
    pub(crate) handle: u32,
    /// The core to stay on.
    pub(crate) core: Option<usize>,
    /// How its frontend uses the disk.
    pub(crate) frontend: DiskFrontend,
    pub(crate) block: u32,
    pub(crate) rw: Rw,
    pub(crate) depth: u16,
    pub(crate) queues: u16,
    /// First byte of its part of the disk.
    pub(crate) base: u64,
    /// Bytes of it.
    pub(crate) span: u64,
}

/// Orders to a domain that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// To a guest: be at work for so long.
    Work(Duration),
    /// To the driver domain: say what was used up so far.
    Usage,
}

/// What a domain says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The driver domain's part of a toolstack is done: guests may come.
    DevicesMade,
    /// The disk is there, and holds what is to be read.
    Ready,
    /// What was done.
    Worked(Worked),
    /// What was used up.
    Usage(Usage),
    /// It could not go on.
    Failed(String),
}

/// What a guest did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Worked {
    pub(crate) requests: u64,
    pub(crate) nanos: u64,
    pub(crate) latencies: Latencies,
    pub(super) usage: Usage,
}
