//! What is to be run, and how.

use std::ffi::OsString;
use std::net::IpAddr;

use ringfence_access::Mode;
use ringfence_frame::commands::TxStaging;
use ringfence_net::features::OffloadKeys;

use super::report::Loudness;
use super::view::ViewOptions;
use crate::disk::DiskSpec;
use crate::guest::Address;
use crate::uplink::MTU_DEFAULT;
use crate::uplink::forward::ForwardSpec;
use crate::uplink::local::LocalPrefix;

/// The MTU of a switch where none is asked for: that of an Ethernet.
const SWITCH_MTU_DEFAULT: u16 = 1500;

/// What connects a guest to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Link {
    /// To the host's network by a TAP (vhost only if asked for, so far), netif to the switch
    #[default]
    Auto,
    /// To the host's network by kernel vhost-net; needs /dev/vhost-net
    Vhost,
    /// To the host's network by reading and writing a TAP
    Tap,
    /// To the switch alone, by a Xen network frontend and backend over shared rings
    Netif,
}

/// How much of the uplink's memory the worker of vhost-net reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Protect {
    /// All receive buffers and the ring of frames to send, once and for all
    #[default]
    Coarse,
    /// Only the pages of frames that are under way, or were and are kept to be used again
    Fine,
}

impl Link {
    /// What connects it to its switch.
    pub(super) fn on_switch(self) -> &'static str {
        "netif"
    }
}

/// Where a guest's uplink leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UplinkChoice {
    /// To the host's network, through sockets of the host
    Host,
    /// Nowhere: the guest has the switch alone
    None,
}

/// What is to be run, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The switch; `None` to be on none.
    pub switch: Option<String>,
    /// The name that others find the guest by, in lower case.
    pub name: Option<String>,
    /// Its addresses on the switch; none to be given some.
    pub addresses: Vec<Address>,
    /// It may send packets from any IP address to the switch.
    pub forwarding: bool,
    /// It may send messages of routers and of DHCP servers to the switch.
    pub advertise: bool,
    /// Where its uplink leads; `None`: to the host, if that has a network.
    pub uplink: Option<UplinkChoice>,
    /// Its addresses on the host's network; none to copy the host's.
    pub uplink_addresses: Vec<Address>,
    /// Routers; none to copy the host's.
    pub uplink_gateways: Vec<IpAddr>,
    /// Name servers; none to copy the host's.
    pub name_servers: Vec<IpAddr>,
    /// Addresses that stand for the host's loopback.
    pub host_loopback: Vec<IpAddr>,
    /// Addresses of the host itself, or of its link, that the guest may reach.
    pub allow_local: Vec<LocalPrefix>,
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<ForwardSpec>,
    /// Addresses at which ports listen that name none; none: every address of the host.
    pub publish_default: Vec<IpAddr>,
    /// What connects it.
    pub link: Link,
    /// How much of the uplink's memory vhost-net reaches.
    pub protect: Protect,
    /// How pages are shared.
    pub mode: Mode,
    /// In mode `staging`: which of its pages stay mapped.
    pub staging: TxStaging,
    /// Queues of its interface.
    pub queues: u32,
    /// The longest IP packet, in bytes; `None`: what suits each interface.
    pub mtu: Option<u16>,
    /// What the guest takes unfinished.
    pub offload: OffloadKeys,
    /// What the driver domain takes unfinished from the guest.
    pub backend_offload: OffloadKeys,
    /// Join small packets on their way to the guest.
    pub coalesce: bool,
    /// What the host's leg takes unfinished.
    pub host_offload: OffloadKeys,
    /// The interface that gives the host a leg on the switch.
    pub host_tap: Option<String>,
    /// Its disks.
    pub disks: Vec<DiskSpec>,
    /// The files that the guest sees.
    pub view: ViewOptions,
    /// How much is said.
    pub loudness: Loudness,
    /// The command and its arguments; empty for a shell.
    pub command: Vec<OsString>,
}

impl Options {
    /// The longest IP packet on the switch.
    pub(super) fn switch_mtu(&self) -> u16 {
        self.mtu.unwrap_or(SWITCH_MTU_DEFAULT)
    }

    /// The longest IP packet to the host.
    pub(super) fn uplink_mtu(&self) -> u16 {
        self.mtu.unwrap_or(MTU_DEFAULT)
    }
}
