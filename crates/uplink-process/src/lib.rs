#![forbid(unsafe_code)]
//! Uplink of a guest: its connection to the host's network, through sockets of a process that has
//! no other right than to open them.
//!
//! * [`asking`]: whoever answers questions about destinations that no rule covers.
//! * [`config`], [`messages`]: configuration and messages of the process.
//! * [`egress`]: options, presets and records of an egress policy.
//! * [`forward`]: ports of the host that lead to the guest.
//! * [`link`]: the link that carries the guest's packets.
//! * [`local`]: addresses of the host itself that a guest may reach.
//! * [`multicast_groups`]: groups of an uplink; [`multicast`]: sockets that join the groups of services.
//! * [`network_plan`]: addresses and routes of guest and uplink.
//! * [`orders`]: orders to a running uplink.
//! * [`forwarded_ports`]: ports that are added and removed while the uplink runs.
//! * [`process`]: the uplink's process; `recorder`: its thread for records of egress.
//! * [`queues`]: number of queues of the guest's interface.
//! * [`totals`]: counts of egress verdicts, and of each queue.
//! * [`upstream`]: the proxy that carries a guest's connections.

pub mod asking;
pub mod config;
pub mod egress;
pub mod forward;
pub mod forwarded_ports;
pub mod link;
pub mod local;
pub mod messages;
pub mod multicast;
pub mod multicast_groups;
pub mod network_plan;
pub mod orders;
pub mod process;
pub mod queues;
mod recorder;
pub mod totals;
pub mod upstream;

pub use config::{Alias, INTERFACE, MTU_DEFAULT, Outbound, PolicyHead, RelayTo, UplinkConfig};
pub use messages::{BATCH, FromUplink, RULES_IN_MESSAGE, UplinkRules, UplinkSockets};
