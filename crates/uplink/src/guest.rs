//! What is known of the guest: its addresses, and what it is told by DHCP and router advertisements.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::packet::Mac;

/// The guest's side of the network.
#[derive(Clone, Debug, Default)]
pub struct GuestNetwork {
    /// Its hardware address, where that is known: packets of strangers go there.
    pub mac: Option<Mac>,
    /// Its addresses and the lengths of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Its routers, one for each family at most.
    pub gateways: Vec<IpAddr>,
    /// Those of them, and other addresses, that nobody has: they stand for the uplink itself.
    pub own: Vec<IpAddr>,
    /// Whom it asks for names.
    pub name_servers: Vec<IpAddr>,
    /// Domains that it looks in.
    pub search: Vec<String>,
}

impl GuestNetwork {
    /// Whether an address stands for the uplink.
    pub fn is_virtual(&self, address: IpAddr) -> bool {
        self.own.contains(&address)
    }

    /// Whether an address is one of the guest's.
    pub fn has(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, _)| *own == address)
    }

    /// Whether it has IPv6.
    pub fn has_ipv6(&self) -> bool {
        self.addresses.iter().any(|(address, _)| address.is_ipv6())
    }

    /// Its first IPv4 address, and the length of the prefix.
    pub fn ipv4(&self) -> Option<(Ipv4Addr, u8)> {
        self.addresses.iter().find_map(|(address, prefix)| match address {
            IpAddr::V4(address) => Some((*address, *prefix)),
            IpAddr::V6(_) => None,
        })
    }

    /// Its IPv6 addresses.
    pub fn ipv6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.addresses.iter().filter_map(|(address, _)| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }

    /// Its first address of the same family as `like`.
    pub fn address_like(&self, like: IpAddr) -> Option<IpAddr> {
        let same = |address: &&(IpAddr, u8)| address.0.is_ipv4() == like.is_ipv4();
        self.addresses.iter().find(same).map(|(address, _)| *address)
    }

    /// Its IPv4 name servers.
    pub fn name_servers_v4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.name_servers.iter().filter_map(|server| match server {
            IpAddr::V4(server) => Some(*server),
            IpAddr::V6(_) => None,
        })
    }

    /// Its IPv6 name servers.
    pub fn name_servers_v6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.name_servers.iter().filter_map(|server| match server {
            IpAddr::V6(server) => Some(*server),
            IpAddr::V4(_) => None,
        })
    }
}
