//! Network of the guest: its addresses, and the settings it receives by DHCP and router advertisements.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::packet::Mac;

/// Addresses and settings that the guest has, and that DHCP, DHCPv6 and router advertisements offer.
#[derive(Clone, Debug, Default)]
pub struct GuestNetwork {
    /// Hardware address of the guest, if known. Forwarded ports need it.
    pub mac: Option<Mac>,
    /// Set for a guest that may choose its hardware address itself, and its IPv6 address within a prefix
    /// ([`Access::guest_prefixes`](crate::Access)). Both are learned from its packets.
    pub learns: bool,
    /// Last global IPv6 address of the guest, if it is learned.
    pub seen: Option<Ipv6Addr>,
    /// Addresses of the guest with their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Routers, at most one of each family.
    pub gateways: Vec<IpAddr>,
    /// Addresses that stand for the uplink itself, gateways among them, and that no host has.
    pub own: Vec<IpAddr>,
    pub name_servers: Vec<IpAddr>,
    /// Search domains of the guest.
    pub search: Vec<String>,
}

impl GuestNetwork {
    /// Returns `true` if an address stands for the uplink.
    pub fn is_virtual(&self, address: IpAddr) -> bool {
        self.own.contains(&address)
    }

    /// Returns `true` if an address is one of the guest's.
    pub fn has(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, _)| *own == address)
    }

    /// Returns `true` if the guest has an IPv6 address.
    pub fn has_ipv6(&self) -> bool {
        self.addresses.iter().any(|(address, _)| address.is_ipv6())
    }

    /// Returns the guest's first IPv4 address with its prefix length.
    pub fn ipv4(&self) -> Option<(Ipv4Addr, u8)> {
        self.addresses.iter().find_map(|(address, prefix)| match address {
            IpAddr::V4(address) => Some((*address, *prefix)),
            IpAddr::V6(_) => None,
        })
    }

    /// Iterates over the guest's IPv6 addresses.
    pub fn ipv6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.addresses.iter().filter_map(|(address, _)| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }

    /// Learns the guest's addresses from a packet that it may send. Returns `true` if they are others than before.
    pub(crate) fn learn(&mut self, mac: Mac, source: IpAddr) -> bool {
        let before = (self.mac, self.seen);
        if mac[0] & 1 == 0 && mac != [0; 6] {
            self.mac = Some(mac);
        }
        match source {
            IpAddr::V6(source) if !source.is_unicast_link_local() => self.seen = Some(source),
            _ => {}
        }
        (self.mac, self.seen) != before
    }

    /// Returns the guest's end of a forwarded port. For an IPv6 address, it is the one that the guest last used.
    pub(crate) fn reached_at(&self, configured: SocketAddr) -> SocketAddr {
        match (configured, self.seen) {
            (SocketAddr::V6(_), Some(seen)) => SocketAddr::new(seen.into(), configured.port()),
            _ => configured,
        }
    }

    /// Returns the guest's first address of the same family as `like`.
    pub fn address_like(&self, like: IpAddr) -> Option<IpAddr> {
        let same = |address: &&(IpAddr, u8)| address.0.is_ipv4() == like.is_ipv4();
        self.addresses.iter().find(same).map(|(address, _)| *address)
    }

    /// Iterates over the guest's IPv4 name servers.
    pub fn name_servers_v4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.name_servers.iter().filter_map(|server| match server {
            IpAddr::V4(server) => Some(*server),
            IpAddr::V6(_) => None,
        })
    }

    /// Iterates over the guest's IPv6 name servers.
    pub fn name_servers_v6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.name_servers.iter().filter_map(|server| match server {
            IpAddr::V6(server) => Some(*server),
            IpAddr::V4(_) => None,
        })
    }
}
