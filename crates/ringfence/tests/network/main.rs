//! Network interfaces of guests: switches, uplinks, names, ports and changing host networks.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod last_data;
mod multicast;
mod names;
mod networks;
mod ports;
mod soak;
#[path = "../support/mod.rs"]
mod support;
mod switches;
mod traffic;
mod uplink;
mod uplink_flows;
mod uplink_programs;
mod uplink_slow_peers;
