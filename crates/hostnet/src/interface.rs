//! Interfaces and resolver of a guest: their configuration, and names of interfaces on the command line.

use ringfence_sys::tap;
use serde::{Deserialize, Serialize};

use crate::address::Address;
use crate::netlink::Route;

/// Interface as it is made in a namespace: addresses, MTU, offloads and queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceConfig {
    pub name: String,
    pub mac: [u8; 6],
    /// Maximum length of an IP packet in bytes.
    pub mtu: u32,
    /// Work that the kernel may leave to the reader of the TAP (`carried` of the guest).
    pub offloads: u32,
    pub addresses: Vec<Address>,
    /// Number of queues of the TAP.
    pub queues: u32,
}

/// Configuration of the interface to the host's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkInterface {
    pub interface: InterfaceConfig,
    /// Destinations that are reached through the interface.
    pub routes: Vec<Route>,
}

/// Configuration of the name service for names outside of the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolverConfig {
    pub name_servers: Vec<std::net::IpAddr>,
    /// Search domains.
    pub search: Vec<String>,
    /// Options of `resolv.conf(5)`, one word each.
    pub options: Vec<String>,
}

/// Validates the name of a network interface.
///
/// # Errors
///
/// Returns a text with the rule that the name breaks.
pub fn parse_interface(text: &str) -> Result<String, String> {
    let valid = (1..=tap::NAME_MAX).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !matches!(text, "." | "..");
    if valid {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "an interface's name has 1 to {} letters, digits, `-`, `_`, `.`",
            tap::NAME_MAX
        ))
    }
}
