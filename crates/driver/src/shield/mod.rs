//! Shield process of `ringfence shield`: it stands between hypervisors and a foreign backend, in a sandbox, and alone maps
//! the machine's memory.
//!
//! ```text
//! session ── ToShield, descriptors ──> shield process ──> Shield <── socket ──> hypervisor
//!         <───── FromShield ────────                        └─────── socket ──> backend
//! ```
//!
//! The session process creates the sockets, the pools and the files of in-flight logs. This process can do none of it: it
//! serves one hypervisor at a time, with a connection and a pool of its own ([`ringfence_vhost_user::shield`]). Others wait
//! in the socket's queue, and are closed. Whoever ends the session ends this process. Requests in flight stay in the
//! hypervisor's log for the next one.

mod process;

use std::collections::BTreeMap;

use ringfence_vhost_user::MachineState;
use serde::{Deserialize, Serialize};

pub use process::main;

/// Number of files for in-flight logs that the process holds.
pub const LOG_FILES: usize = 2;

/// Configuration of a shield process. It comes with the listening socket and [`LOG_FILES`] files for in-flight logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShieldConfig {
    /// The end of a backend does not end the hypervisor's connection.
    pub reconnect: bool,
    /// Each step is logged.
    pub verbose: bool,
}

/// Messages to a shield process after its configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToShield {
    /// Answers [`FromShield::Connect`]. With the connection, a pool and a pair of sockets for the backend's requests, unless
    /// `problem` is set.
    Connected {
        /// Reason for which the backend cannot be reached.
        problem: Option<String>,
    },
    /// Answers [`FromShield::LogFile`]; with the file.
    LogFile,
    /// Requests [`FromShield::Traffic`].
    Traffic,
}

/// Reports of a shield process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromShield {
    /// Hypervisors are served.
    Ready,
    /// Requests a connection to the backend, and its further files.
    Connect,
    /// Requests a file for an in-flight log, in place of one that was used.
    LogFile,
    /// State of the hypervisor of now, after each change.
    Machine(MachineState),
    /// Counters that are not zero, since the start of the process.
    Traffic(BTreeMap<String, u64>),
    /// The process cannot continue, for this reason.
    Failed(String),
}
