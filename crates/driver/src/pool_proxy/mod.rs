//! Proxy process of `ringfence pool-proxy`: it stands between hypervisors and a foreign backend, in a sandbox.
//!
//! The session process creates the socket for hypervisors and connects to the backend. This process has connected sockets
//! alone, and decides on the messages ([`ringfence_vhost_user::proxy`]):
//!
//! ```text
//! session ── ToProxy, sockets ──> proxy process ──> Relay <── socket ──> hypervisor
//!         <───── FromProxy ──────                     └────── socket ──> backend
//! ```
//!
//! One hypervisor at a time is served; others are accepted and closed. Each gets a connection of its own to the backend.
//! When one of both ends, or breaks a rule, the process closes both and waits for the next hypervisor. Whoever ends the
//! session ends this process.

mod process;

use ringfence_vhost_user::MachineState;
use ringfence_vhost_user::proxy::PoolChoice;
use serde::{Deserialize, Serialize};

pub use process::main;

/// Configuration of a proxy process. It comes with the listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyConfig {
    /// Pool of the device.
    pub pool: PoolChoice,
    /// Each step is logged.
    pub verbose: bool,
}

/// Messages to a proxy process after its configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToProxy {
    /// Answers [`FromProxy::Connect`]. With the connection, and a pair of connected sockets, unless `problem` is set.
    Connected {
        /// Reason for which the backend cannot be reached.
        problem: Option<String>,
    },
}

/// Reports of a proxy process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromProxy {
    /// Hypervisors are served.
    Ready,
    /// Requests a connection to the backend.
    Connect,
    /// State of the hypervisor of now, after each change.
    Machine(MachineState),
    /// The process cannot continue, for this reason.
    Failed(String),
}
