//! Disk process of `ringfence vhost-user blk`: a virtual machine's disk, in a sandbox.
//!
//! The session process opens the storage and the socket, and passes both ([`DiskConfig`]). This process serves the
//! hypervisors that connect, and nobody else:
//!
//! ```text
//! session ── ToDisk, descriptors ──> disk process ──> VhostUserDisk <── socket ──> hypervisor
//!         <───── FromDisk ──────────      └──> file, or connection to an NBD server
//! ```
//!
//! The process can neither open files nor connect. Connections to an NBD server, and the files of in-flight logs, come
//! from the session on request. Whoever ends the session ends this process. Requests in flight stay in the hypervisor's
//! log for the next one.

mod process;

use ringfence_vhost_user::{MachineState, PoolRule};
use serde::{Deserialize, Serialize};

use crate::switchboard::Medium;

pub use process::main;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub use process::main_taken_over;

/// Number of files for in-flight logs that the process holds.
pub const LOG_FILES: usize = 4;

/// Configuration of a disk process. It comes with the listening socket, [`LOG_FILES`] files for in-flight logs, and the
/// descriptor of the medium if it has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    pub medium: Medium,
    /// Rule for the memory of clients.
    pub pool: PoolRule,
    /// Each step is logged.
    pub verbose: bool,
}

/// Messages to a disk process after its configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDisk {
    /// Answers [`FromDisk::Dial`]; with the connection's descriptor, unless `problem` is set.
    Dialled {
        /// Reason for which no connection could be made.
        problem: Option<String>,
    },
    /// Answers [`FromDisk::LogFile`]; with the file.
    LogFile,
    /// Accepts the size that the session measured of the storage.
    Resize { bytes: u64 },
}

/// Reports of a disk process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDisk {
    /// Hypervisors are served.
    Ready,
    /// Requests a connection to the NBD server.
    Dial,
    /// Requests a file for an in-flight log, in place of one that was used.
    LogFile,
    /// Answers [`ToDisk::Resize`].
    Resized {
        /// Reason for which the disk is as it was.
        problem: Option<String>,
    },
    /// State of the client, after each change.
    Machine(MachineState),
    /// The process cannot continue, for this reason.
    Failed(String),
}
