//! Guests of a user: `ringfence ps`, `exec`, `stop` and `policy set`.
//!
//! ```text
//!  ringfence exec ──Request, descriptors──> launcher ──ToGuest──> init ──> command
//!                 <────────Reply──────────          <─FromGuest──
//! ```
//!
//! Each launcher listens at an abstract Unix socket while its command runs. Guests are in network namespaces of their own
//! and cannot reach it. Other users of the host can, so launcher and client compare user ids. A client has one
//! connection for one guest; if it closes the connection, the command that it started gets SIGHUP.

pub mod exec;
pub(crate) mod find;
pub mod policy;
pub mod ps;
mod pty;
pub mod stop;

use std::ffi::OsString;

use ringfence_sandbox::Ending;
use serde::{Deserialize, Serialize};

use crate::uplink::totals::EgressTotals;

/// Orders of a client to the launcher of a guest.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Describes the guest.
    Describe,
    /// Starts another command in the guest, at most one for each connection. Comes with the descriptors of its
    /// standard input, output and error.
    Exec {
        command: Vec<OsString>,
        /// Environment variables besides those of the guest's own command.
        environment: Vec<(String, String)>,
    },
    /// Sends a signal to the command that this client started.
    Signal(i32),
    /// Sends a signal to the guest's own command.
    Stop(i32),
    /// Replaces the egress policy by that in the descriptor ([`document`](crate::egress::document)).
    SetPolicy,
    /// Requests the totals of the egress policy.
    EgressTotals,
}

/// Answers of a launcher.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Guest(Box<Description>),
    /// The command that the client asked for has ended.
    Ended(Ending),
    /// The uplink applies the policy that the client sent.
    PolicySet,
    /// Totals of the egress policy, if there is one.
    EgressTotals(Option<EgressTotals>),
    /// The request failed: for example, the command that the client asked for was not started.
    Failed {
        /// Exit status for the client.
        status: u8,
        /// Reason, for the user.
        why: String,
    },
}

/// Description of a guest. The field names are those of `ringfence ps --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) name: String,
    /// Name of its switch, if it is on one.
    pub(crate) switch: Option<String>,
    /// Command and arguments.
    pub(crate) command: Vec<String>,
    /// Addresses on the switch.
    pub(crate) addresses: Vec<String>,
    /// Addresses on the host's network.
    pub(crate) uplink: Vec<String>,
    /// Published ports, as in `-p`.
    pub(crate) ports: Vec<String>,
    /// Disks, as in `--disk`.
    pub(crate) disks: Vec<String>,
    /// Start of the command in seconds since 1970.
    pub(crate) since: u64,
}
