//! Configuration of the uplink process, and of its parts that come with it.

use std::net::IpAddr;

use ringfence_hostnet::address::Address;
use ringfence_policy::{Action, PolicySource};
use ringfence_uplink::upstream::ProxySettings;
use serde::{Deserialize, Serialize};

use crate::forward::Forward;
use crate::link::LinkOrder;
use crate::local::LocalPrefix;
use crate::multicast_groups::MulticastConfig;

/// Name of the uplink's interface in the guest.
pub const INTERFACE: &str = "up0";

/// Default MTU: the longest packet that a TAP accepts, rounded down to whole words. No wire between
/// the guest's kernel and the uplink requires short packets.
pub const MTU_DEFAULT: u16 = 65520;

/// Address in the guest's network that is translated to one of the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// Address to which the guest sends.
    pub guest: IpAddr,
    /// Address of the host that receives.
    pub host: IpAddr,
}

/// Source of one address family's sockets to other hosts, where it is not the routing table's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outbound {
    /// Address of the host.
    pub address: Option<IpAddr>,
    /// Name of an interface of the host.
    pub interface: Option<String>,
}

/// Configuration of the uplink process. Comes with the queues of the TAP, or the socket of a virtual machine, and then
/// the devices of the link, if it needs some. The sockets of `forwards` follow in messages of [`UplinkSockets`](crate::messages::UplinkSockets).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkConfig {
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub mtu: u16,
    /// TAP offloads: work that the kernel leaves to the reader of frames.
    pub offloads: u32,
    /// Link that carries packets.
    pub link: LinkOrder,
    /// Ethernet address of the uplink, which all hosts outside of the guest share.
    pub mac: [u8; 6],
    /// Ethernet address of the guest. `None` for a virtual machine, which chooses it itself.
    pub guest_mac: Option<[u8; 6]>,
    /// Set for a guest that chooses its IPv6 address itself, within the prefixes of `addresses`. They are announced.
    pub chooses_address: bool,
    /// IP addresses of the guest.
    pub addresses: Vec<Address>,
    /// Routers of the guest. Packets of the host itself come from these addresses.
    pub gateways: Vec<IpAddr>,
    /// Addresses that belong to the uplink itself, which answers for them.
    pub own: Vec<IpAddr>,
    /// Servers for DNS queries that the guest cannot send itself.
    pub resolvers: Vec<Alias>,
    /// Name servers, for guests that use DHCP.
    pub name_servers: Vec<IpAddr>,
    /// Name servers that the guest reaches without being offered them.
    pub unoffered: Vec<IpAddr>,
    /// Search domains, for guests that use DHCP.
    pub search: Vec<String>,
    /// Loopback addresses of the host that the guest may reach.
    pub loopback: Vec<Alias>,
    /// Addresses in the guest's network that stand for another address, on every port.
    pub aliases: Vec<Alias>,
    /// Addresses of the host itself, or of its link, that the guest may reach.
    pub allow_local: Vec<LocalPrefix>,
    /// Egress policy, if there is one. Its rules follow in messages of [`UplinkRules`](crate::messages::UplinkRules).
    pub policy: Option<PolicyHead>,
    /// Proxy that carries connections to other hosts. There is a policy then.
    pub upstream: Option<ProxySettings>,
    /// Sources of sockets to other hosts, IPv4 first.
    pub outbound: [Outbound; 2],
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Connections from the host's loopback to forwarded ports bypass the link. The launcher sends sockets of the
    /// guest's network ([`ForwardedPortOrder::Sockets`](crate::forwarded_ports::ForwardedPortOrder::Sockets)).
    pub relay: Option<RelayTo>,
    /// Set if ports may be added while the uplink runs ([`ForwardedPortOrder`](crate::forwarded_ports::ForwardedPortOrder)).
    pub more_ports: bool,
    /// Set if ports that lead to the host's loopback may be added while the uplink runs.
    pub more_to_host: bool,
    /// Multicast that is carried. The sockets follow those of `forwards`.
    pub multicast: MulticastConfig,
    /// Protocols of the guest that are not carried or answered
    /// ([`LeftOut`](ringfence_uplink::config::LeftOut)).
    pub left_out: u8,
    /// Set if the last descriptor is a file into which the frames of the link are captured.
    pub captures: bool,
    /// Logs debug messages to standard error.
    pub verbose: bool,
}

/// Address of the guest to which connections from the host's loopback lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RelayTo {
    Own,
    Loopback,
}

/// Settings of an egress policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyHead {
    /// Number of rules that follow.
    pub rules: usize,
    /// Verdict on destinations that no rule covers.
    pub default: Option<Action>,
    /// Refuses TLS without a readable name.
    pub strict_sni: bool,
    /// Name of the guest in records. `None`: no records are wanted.
    pub recorded_as: Option<String>,
    /// Records all verdicts. Otherwise only denials.
    pub records_all: bool,
    /// Allows everything, and only records.
    pub learns: bool,
    /// Limits of questions about destinations that no rule covers. `None`: they are denied.
    pub asks: Option<AskHead>,
}

/// Limits of the questions of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskHead {
    /// Time limit for an answer in milliseconds.
    pub within: u64,
    /// Maximum number of questions that wait for an answer.
    pub at_a_time: usize,
}

impl PolicyHead {
    /// Returns the settings of a policy.
    pub fn of(
        policy: &PolicySource,
        recorded_as: Option<String>,
        records_all: bool,
        learns: bool,
    ) -> PolicyHead {
        let (rules, default, strict_sni) = (policy.rules.len(), policy.default, policy.strict_sni);
        PolicyHead { rules, default, strict_sni, recorded_as, records_all, learns, asks: None }
    }
}
