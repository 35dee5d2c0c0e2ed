//! The uplink of a guest: its way to the host's network, through sockets of a process that has no
//! right but to open them.
//!
//! * `host`: what the guest copies of the host's network.
//! * [`forward`]: ports of the host that lead to the guest.
//! * [`link`]: what carries the guest's packets.
//! * [`local`]: addresses of the host itself that a guest may reach.
//! * `plan`: what guest and uplink are told.
//! * [`process`]: the process.

pub mod forward;
pub(crate) mod host;
pub mod link;
pub mod local;
pub(crate) mod plan;
pub mod process;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::guest::Address;
use forward::Forward;
use link::LinkOrder;
use local::LocalPrefix;

/// What the uplink's interface in the guest is called.
pub const INTERFACE: &str = "up0";

/// The MTU where none is asked for: the longest packet that a TAP takes, in whole words. Between the
/// guest's kernel and the uplink there is no wire that needs packets to be short.
pub const MTU_DEFAULT: u16 = 65520;

/// Descriptors that go with one message to the uplink.
pub const BATCH: usize = 16;

/// An address in the guest's network that stands for one of the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// What the guest sends to.
    pub guest: IpAddr,
    /// Who gets it.
    pub host: IpAddr,
}

/// The first order to the uplink's process: with the queues of the TAP, and behind them the devices
/// of the link, if it has some; then `forwards`' sockets follow in messages of [`UplinkSockets`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkConfig {
    /// Octets behind the Ethernet header.
    pub mtu: u16,
    /// What the kernel leaves to the reader of the TAP.
    pub offloads: u32,
    /// What carries packets.
    pub link: LinkOrder,
    /// The Ethernet address that everything outside of the guest seems to have.
    pub mac: [u8; 6],
    /// The guest's.
    pub guest_mac: [u8; 6],
    /// The guest's addresses.
    pub addresses: Vec<Address>,
    /// Routers that the guest was told of: packets of the host's own come from there.
    pub gateways: Vec<IpAddr>,
    /// Addresses that nobody has and the uplink answers for itself.
    pub own: Vec<IpAddr>,
    /// Where the guest's DNS queries go that it cannot send by itself.
    pub resolvers: Vec<Alias>,
    /// Name servers, for guests that ask by DHCP.
    pub name_servers: Vec<IpAddr>,
    /// Domains, likewise.
    pub search: Vec<String>,
    /// Loopback addresses of the host that the guest may reach.
    pub loopback: Vec<Alias>,
    /// Addresses of the host itself, or of its link, that the guest may reach.
    pub allow_local: Vec<LocalPrefix>,
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Say more on standard error.
    pub verbose: bool,
}

/// The next sockets of the list of forwards, in its order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkSockets;

/// What the uplink's process reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromUplink {
    /// It carries packets.
    Up {
        /// How, in a few words.
        link: String,
        /// What it cannot do here, and why.
        remarks: Vec<String>,
    },
    /// It cannot go on.
    Failed(String),
}
