//! Options of a remote disk, and the state that its queues share.

use std::sync::Mutex;
use std::time::Duration;

use ringfence_block::storage::Geometry;
use serde::{Deserialize, Serialize};

use super::link::{NbdLink, NbdTarget};
use crate::protocol::agree::Negotiated;

/// Time limits, journal and connections of a disk on a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NbdOptions {
    /// The disk is used read-only.
    pub read_only: bool,
    /// Maximum duration of each connection attempt, with its handshake.
    pub connect: Duration,
    /// Maximum time without a reply while requests are open.
    pub stall: Duration,
    /// Maximum age of a request.
    pub give_up: Duration,
    /// Size in bytes of the journal of acknowledged, unflushed writes. With 0 there is no journal, and a
    /// flush may fail instead.
    pub journal: usize,
    /// Number of queues, and so of connections, if the server allows more than one.
    pub connections: u32,
}

impl Default for NbdOptions {
    fn default() -> Self {
        NbdOptions {
            read_only: false,
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            give_up: Duration::from_secs(120),
            journal: 64 << 20,
            connections: 1,
        }
    }
}

/// State of unflushed writes, shared by the queues of a disk without a journal.
#[derive(Default)]
pub(super) struct Durability {
    /// Number of acknowledged writes.
    pub(super) written: u64,
    /// Number of acknowledged writes that a flush covered.
    pub(super) flushed: u64,
    /// Set if a connection broke and unflushed writes may be lost.
    pub(super) suspect: bool,
}

/// State shared by all queues of a disk.
pub(super) struct SharedDisk {
    pub(super) target: NbdTarget,
    pub(super) options: NbdOptions,
    pub(super) settled: Negotiated,
    pub(super) geometry: Geometry,
    pub(super) durability: Mutex<Durability>,
    /// Connection that negotiated the disk, for the first queue.
    pub(super) first: Mutex<Option<NbdLink>>,
}
