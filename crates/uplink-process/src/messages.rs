//! Messages that follow the configuration of the uplink process, and its reports.

pub use ringfence_link::vhost_user::{MachineMemory, MachineState};
use ringfence_policy::RuleSource;
use serde::{Deserialize, Serialize};

use crate::totals::UplinkTotals;

/// Maximum number of descriptors in one message to the uplink.
pub const BATCH: usize = 16;

/// Maximum number of rules in one message. Each has at most 512 bytes, and the name of its file.
pub const RULES_IN_MESSAGE: usize = 6;

/// Next rules of the egress policy, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkRules(pub Vec<RuleSource>);

/// Next sockets of the list of forwards, in its order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkSockets;

/// Reports of the uplink process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromUplink {
    /// The uplink carries packets.
    Up {
        link: String,
        /// Functions that are unavailable on this system, with reasons.
        remarks: Vec<String>,
    },
    /// Result of the [`ForwardedPortOrder`](crate::forwarded_ports::ForwardedPortOrder) with this number.
    Port {
        id: u32,
        /// Reason for which the order failed.
        error: Option<String>,
    },
    /// Result of [`UplinkOrder::Policy`](crate::orders::UplinkOrder::Policy).
    Policy {
        /// Reason for which the old policy stays.
        error: Option<String>,
    },
    /// Totals: the answer to [`UplinkOrder::Totals`](crate::orders::UplinkOrder::Totals), and the last message
    /// of an uplink with a policy.
    Totals(Box<UplinkTotals>),
    /// State of a virtual machine's client, after each change.
    Machine(MachineState),
    /// The uplink needs more sockets of the guest's network.
    Sockets,
    /// Lines for `--egress-log`, `policy watch` and the list of denials.
    Records(String),
    /// Rules for `--egress-learn`.
    Learned(Vec<String>),
    /// The uplink cannot continue, for this reason.
    Failed(String),
}
