//! Network of the guest: its addresses, and the settings it receives by DHCP and router advertisements.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::packet::Mac;

/// Network configuration of the guest.
#[derive(Clone, Debug, Default)]
pub struct GuestNetwork {
    /// Hardware address of the guest, if known. Forwarded ports need it.
    pub mac: Option<Mac>,
    /// Addresses of the guest with their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Routers, at most one of each family.
    pub gateways: Vec<IpAddr>,
    /// Addresses that stand for the uplink itself, gateways among them, and that no host has.
    pub own: Vec<IpAddr>,
    /// Name servers of the guest.
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
