//! Messages between the parent of a disk benchmark and its domains.

use std::time::Duration;

use ringfence_block::storage::file::{CacheMode, Engine};
use ringfence_driver::switchboard::DiskFrontend;
use serde::{Deserialize, Serialize};

use super::args::{Rw, Storage};
use super::latency::Latencies;
use crate::usage::Usage;

/// Bytes of all guests' disks together: the same for any number of guests, so that the working set
/// does not depend on it.
const TOTAL: u64 = 128 << 20;

/// Handle of each guest's disk.
pub(super) const HANDLE: u32 = 51712;

/// Returns the size of each guest's disk in bytes.
pub(super) fn span(guests: u16) -> u64 {
    (TOTAL / u64::from(guests.max(1))).next_multiple_of(1 << 20)
}

/// First message to a domain; its connection to the hub comes with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum DiskSetup {
    Backend {
        /// Name of the access mode.
        mode: String,
        storage: Storage,
        cache: CacheMode,
        /// I/O engine of a file.
        engine: Engine,
        /// Domain numbers of the guests.
        guests: Vec<u16>,
        queues: u16,
        /// Bytes of each guest's disk.
        span: u64,
    },
    Guest(GuestSetup),
}

/// Workload of a guest.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct GuestSetup {
    pub(crate) domain: u16,
    pub(crate) handle: u32,
    /// CPU core to pin the guest to.
    pub(crate) core: Option<usize>,
    pub(crate) frontend: DiskFrontend,
    pub(crate) block: u32,
    pub(crate) rw: Rw,
    pub(crate) depth: u16,
    pub(crate) queues: u16,
    /// First byte of its part of the disk.
    pub(crate) base: u64,
    /// Length of its part in bytes.
    pub(crate) span: u64,
}

/// Command to a domain that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum DiskCommand {
    /// To a guest: issue requests for this time.
    Work(Duration),
    /// To the driver domain: report the resources used so far.
    Usage,
}

/// Message of a domain to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum DiskAnswer {
    /// The driver domain has created the devices: guests may connect.
    DevicesMade,
    /// The disk is connected and holds the data to be read.
    Ready,
    /// Result of a guest's work.
    Worked(Worked),
    /// Resources used so far.
    Usage(Usage),
    /// The domain failed, with the reason.
    Failed(String),
}

/// Result of a guest's work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Worked {
    pub(crate) requests: u64,
    pub(crate) nanos: u64,
    pub(crate) latencies: Latencies,
    pub(super) usage: Usage,
}
