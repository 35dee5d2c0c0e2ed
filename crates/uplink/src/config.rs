//! Uplink configuration: addresses, limits, access rules.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::access::Access;
use crate::egress::PolicyInForce;
use crate::guest::GuestNetwork;
use crate::share::{Published, Share};
use crate::tcp::config::TcpConfig;
use crate::udp::multicast::service::Service;
use crate::upstream::UpstreamProxy;

/// Default hardware address of the router that the guest sees: locally administered.
pub const MAC_DEFAULT: [u8; 6] = [0x52, 0x46, 0x00, 0x00, 0x00, 0x01];

/// Default maximum of concurrent UDP associations. Each holds a descriptor.
pub const UDP_FLOWS_MAX: usize = 4096;
const RELAYS_MAX: usize = 1024;
/// Maximum of clients of one engine whose datagrams are relayed.
const DATAGRAM_RELAYS_MAX: usize = 256;
/// Default maximum of concurrent ICMP echo flows. Each holds a descriptor.
pub const ICMP_FLOWS_MAX: usize = 256;

/// Set of the guest's protocols that an uplink leaves out. It drops their packets without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut(pub u8);

impl LeftOut {
    pub const TCP: LeftOut = LeftOut(0x01);
    pub const UDP: LeftOut = LeftOut(0x02);
    /// Echo requests, and all other ICMP and ICMPv6 but neighbour discovery.
    pub const ICMP: LeftOut = LeftOut(0x04);
    pub const DHCP: LeftOut = LeftOut(0x08);
    pub const DHCPV6: LeftOut = LeftOut(0x10);
    /// Neighbour discovery, router advertisements among it.
    pub const NDP: LeftOut = LeftOut(0x20);
    pub const ROUTER_ADVERTISEMENTS: LeftOut = LeftOut(0x40);

    /// Returns `true` if this set contains all of `other`.
    pub const fn contains(self, other: LeftOut) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn union(self, other: LeftOut) -> LeftOut {
        LeftOut(self.0 | other.0)
    }
}

/// Name servers as the guest reaches them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameServers {
    /// Stand-ins ([`Access::resolvers`]).
    pub resolvers: Vec<(IpAddr, IpAddr)>,
    /// Addresses that the guest is offered ([`Access::name_servers`], and those of DHCP and router advertisements).
    pub offered: Vec<IpAddr>,
    /// Addresses that the guest knows otherwise ([`Access::name_servers`] alone).
    pub unoffered: Vec<IpAddr>,
}

/// Configuration of one uplink engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// Hardware address of the uplink on the link.
    pub mac: [u8; 6],
    /// Maximum length of an IP packet in both directions, in bytes.
    pub mtu: u16,
    /// Access rules for addresses.
    pub access: Access,
    /// Limits and timeouts of TCP.
    pub tcp: TcpConfig,
    /// Maximum of UDP associations with sockets; beyond it the one idle longest is evicted.
    pub udp_flows_max: usize,
    /// Maximum of echo flows; beyond it the one idle longest is evicted.
    pub icmp_flows_max: usize,
    /// Maximum of relays ([`crate::relay`]); more connections take the way through the link.
    pub relays_max: usize,
    /// Maximum of clients at the guest's loopback whose datagrams are relayed ([`crate::forward::Destination::Host`]);
    /// beyond it the one idle longest is evicted. Each holds a descriptor.
    pub datagram_relays_max: usize,
    /// Addresses and services of the guest's network.
    pub guest: GuestNetwork,
    /// Services whose multicast is carried; none by default.
    pub multicast: Vec<Service>,
    /// Protocols that are not carried or answered.
    pub left_out: LeftOut,
    /// Position of this engine among the guest's engines.
    pub share: Share,
    /// Name servers that replace those of `access` and `guest` since the start, shared by the guest's engines.
    pub name_servers: Arc<Published<NameServers>>,
    /// Egress policy in force, shared by the guest's engines.
    pub policy: Arc<PolicyInForce>,
    /// Proxy that carries connections to other hosts, shared by the guest's engines. It needs a policy in force, which
    /// answers queries for names.
    pub upstream: Option<Arc<UpstreamProxy>>,
}

impl Config {
    /// Lowers the limits of each of `engines` engines, so that all their sockets need at most `descriptors`.
    ///
    /// Each protocol keeps a part that others cannot use up: a guest that fills one table can still resolve
    /// names. Half-open connections have at most half of TCP's part, so a flood evicts only half-open ones.
    /// Connections from outside have at most half of TCP's part.
    pub fn fit(&mut self, descriptors: usize, engines: usize) {
        let each = |all: usize| (all / engines.max(1)).max(1);
        let sockets = each(descriptors);
        self.icmp_flows_max = each(self.icmp_flows_max).min(sockets / 16).max(1);
        self.udp_flows_max = each(self.udp_flows_max).min(sockets / 4).max(1);
        let left = sockets.saturating_sub(self.icmp_flows_max).saturating_sub(self.udp_flows_max);
        self.tcp.inbound_max = (self.tcp.inbound_max / engines.max(1)).min(left / 2);
        let left = left - self.tcp.inbound_max;
        self.tcp.flows_max = each(self.tcp.flows_max).min(left).max(1);
        self.tcp.half_open_max = each(self.tcp.half_open_max).min(self.tcp.flows_max / 2).max(1);
    }

    /// Returns the address by which the guest knows a client from outside: its own address, or the router's
    /// if that address means the guest itself.
    pub fn inward(&self, client: SocketAddr) -> SocketAddr {
        let ip = client.ip().to_canonical();
        let means_guest = ip.is_loopback() || self.guest.has(ip);
        let router = self.guest.gateways.iter().find(|gateway| gateway.is_ipv4() == ip.is_ipv4());
        let known_as = router.copied().filter(|_| means_guest).unwrap_or(ip);
        SocketAddr::new(known_as, client.port())
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            mac: MAC_DEFAULT,
            mtu: 65_520,
            access: Access::default(),
            tcp: TcpConfig::default(),
            udp_flows_max: UDP_FLOWS_MAX,
            icmp_flows_max: ICMP_FLOWS_MAX,
            relays_max: RELAYS_MAX,
            datagram_relays_max: DATAGRAM_RELAYS_MAX,
            guest: GuestNetwork::default(),
            multicast: Vec::new(),
            left_out: LeftOut::default(),
            share: Share::default(),
            name_servers: Arc::default(),
            policy: Arc::default(),
            upstream: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn fitted_limits_never_exceed_descriptors(descriptors in 3..1_000_000_usize, engines in 1..9_usize) {
            prop_assume!(descriptors / engines >= 3);
            let mut config = Config::default();
            config.fit(descriptors, engines);
            let tcp = config.tcp.flows_max + config.tcp.inbound_max;
            let of_one = config.icmp_flows_max + config.udp_flows_max + tcp;
            prop_assert!(of_one * engines <= descriptors, "{of_one} x {engines}");
            prop_assert!(config.tcp.half_open_max <= config.tcp.flows_max);
            prop_assert!(config.tcp.half_open_max > 0);
        }
    }

    #[test]
    fn ample_descriptors_leave_limits_unchanged() {
        let (mut config, default) = (Config::default(), Config::default());
        config.fit(1 << 20, 1);
        assert_eq!(config.tcp.flows_max, default.tcp.flows_max);
        assert_eq!(config.udp_flows_max, default.udp_flows_max);
        config.fit(1 << 20, 2);
        assert_eq!(config.tcp.flows_max, default.tcp.flows_max / 2);
        let mut ordinary = Config::default();
        ordinary.tcp.inbound_max = 0;
        ordinary.fit(4096, 1);
        assert_eq!(ordinary.tcp.flows_max, 4096 - 1024 - 256);
        let mut published = Config::default();
        published.fit(4096, 1);
        assert_eq!(published.tcp.flows_max, (4096 - 1024 - 256) / 2);
        assert_eq!(published.tcp.inbound_max, (4096 - 1024 - 256) / 2);
    }
}
