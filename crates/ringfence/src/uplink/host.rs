//! The host's network, as far as a guest is to see it: the addresses and routes of the interface
//! that the host's own traffic leaves by, and whom the host asks for names.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};

use crate::guest::Address;
use crate::netlink::{Netlink, Route};

/// The most routes that are copied: a guest needs the way out, not a whole routing table.
const ROUTES_MAX: usize = 32;
/// The most addresses that are copied, of each family.
const ADDRESSES_MAX: usize = 8;
/// The most name servers that are of use (`MAXNS` of resolv.h).
const NAME_SERVERS_MAX: usize = 3;

/// What a guest copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostNetwork {
    /// The interfaces that it is copied from, for messages.
    pub(crate) interfaces: Vec<String>,
    /// Addresses, IPv4 first.
    pub(crate) addresses: Vec<Address>,
    /// Routes by way of those interfaces.
    pub(crate) routes: Vec<Route>,
}

/// `resolv.conf(5)`, as far as it matters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolver {
    /// Whom to ask.
    pub(crate) name_servers: Vec<IpAddr>,
    /// Domains to look in.
    pub(crate) search: Vec<String>,
}

impl HostNetwork {
    /// Looks at the network namespace that this process is in.
    pub(crate) fn look() -> io::Result<HostNetwork> {
        let mut netlink = Netlink::open()?;
        let links = usable(&netlink.links()?);
        let addresses = netlink.addresses()?;
        let mut network = HostNetwork::default();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            // No IPv6 at all is no error.
            let routes = netlink.routes(family).unwrap_or_default();
            network.copy(family, &links, &addresses, &routes);
        }
        Ok(network)
    }

    fn copy(
        &mut self,
        family: AddressFamily,
        links: &BTreeMap<u32, String>,
        addresses: &[AddressMessage],
        routes: &[RouteMessage],
    ) {
        let addresses: Vec<(u32, Address)> = addresses
            .iter()
            .filter(|message| message.header.family == family)
            .filter_map(|message| Some((message.header.index, copied_address(message)?)))
            .collect();
        let mut routes: Vec<(u32, Route)> = routes.iter().filter_map(copied_route).collect();
        routes.sort_by_key(|(_, route)| route.metric.unwrap_or(0));
        let has_address = |index: &u32| addresses.iter().any(|(of, _)| of == index);
        let by_default = routes.iter().filter(|(_, route)| route.prefix == 0).map(|(of, _)| *of);
        let chosen = by_default.chain(links.keys().copied());
        let Some(index) = chosen.into_iter().find(|i| links.contains_key(i) && has_address(i))
        else {
            return;
        };
        let name = &links[&index];
        if !self.interfaces.contains(name) {
            self.interfaces.push(name.clone());
        }
        let own = addresses.iter().filter(|(of, _)| *of == index).map(|(_, address)| *address);
        self.addresses.extend(own.take(ADDRESSES_MAX));
        let own = routes.iter().filter(|(of, _)| *of == index).map(|(_, route)| *route);
        self.routes.extend(own.take(ROUTES_MAX));
    }
}

/// Interfaces that are up and lead elsewhere, by number.
fn usable(links: &[LinkMessage]) -> BTreeMap<u32, String> {
    let leads_elsewhere = |link: &&LinkMessage| {
        link.header.flags.contains(LinkFlags::Up)
            && !link.header.flags.contains(LinkFlags::Loopback)
    };
    let named = |link: &LinkMessage| {
        let name = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        });
        Some((link.header.index, name?))
    };
    links.iter().filter(leads_elsewhere).filter_map(named).collect()
}

/// An address that others reach the host at, for as long as can be foreseen.
fn copied_address(message: &AddressMessage) -> Option<Address> {
    let passing = AddressHeaderFlags::Secondary // In IPv6: temporary.
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Tentative;
    let is_v6 = message.header.family == AddressFamily::Inet6;
    if message.header.scope != AddressScope::Universe
        || is_v6 && message.header.flags.intersects(passing)
    {
        return None;
    }
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            // Of a point-to-point link this one is the host's own.
            AddressAttribute::Local(ip) => found = Some(*ip),
            AddressAttribute::Address(ip) => found = found.or(Some(*ip)),
            AddressAttribute::Flags(flags)
                if is_v6
                    && flags.intersects(AddressFlags::Secondary | AddressFlags::Deprecated) =>
            {
                return None;
            }
            _ => {}
        }
    }
    Address::new(found?, message.header.prefix_len).ok()
}

/// A route that somebody made: those that come with an address, the guest's kernel makes itself.
fn copied_route(message: &RouteMessage) -> Option<(u32, Route)> {
    let header = &message.header;
    if header.kind != RouteType::Unicast
        || header.protocol == RouteProtocol::Kernel
        || header.table != RouteHeader::RT_TABLE_MAIN
    {
        return None;
    }
    let unspecified = if header.address_family == AddressFamily::Inet {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    let (prefix, metric) = (header.destination_prefix_length, None);
    let mut route = Route { destination: unspecified, prefix, gateway: None, metric };
    let mut interface = None;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(ip) => route.destination = address(ip)?,
            RouteAttribute::Gateway(ip) => route.gateway = address(ip),
            RouteAttribute::Oif(index) => interface = Some(*index),
            RouteAttribute::Priority(metric) => route.metric = Some(*metric),
            // Of several ways one will do: the host chooses again for each connection.
            RouteAttribute::MultiPath(hops) => {
                let hop = hops.first()?;
                interface = Some(hop.interface_index);
                route.gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                    RouteAttribute::Gateway(ip) => address(ip),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    if route.destination.is_multicast() {
        return None;
    }
    Some((interface?, route))
}

fn address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

/// The address that the kernel asks where a resolver names 0.0.0.0 or `::`.
fn loopback_if_unspecified(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        other => other,
    }
}

impl Resolver {
    /// Whom this host asks.
    pub(crate) fn of_host() -> Resolver {
        Resolver::parse(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
    }

    fn parse(text: &str) -> Resolver {
        let mut resolver = Resolver::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("nameserver") if resolver.name_servers.len() < NAME_SERVERS_MAX => {
                    // A zone (`fe80::1%eth0`) means an interface that the guest has not.
                    let server = words.next().and_then(|word| word.parse::<IpAddr>().ok());
                    resolver.name_servers.extend(server.map(loopback_if_unspecified));
                }
                Some("search" | "domain") => resolver.search = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
        // What glibc asks when it is told nothing.
        if resolver.name_servers.is_empty() {
            resolver.name_servers.push(Ipv4Addr::LOCALHOST.into());
        }
        resolver
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_and_domains_are_read_as_the_c_library_reads_them() {
        let text = "# a\nnameserver 192.0.2.1\nsearch a.example b.example\nnameserver ::1\n\
                    options edns0\nnameserver nonsense\nnameserver 1.1.1.1\nnameserver 2.2.2.2\n";
        let resolver = Resolver::parse(text);
        assert_eq!(resolver.search, ["a.example", "b.example"]);
        let servers: Vec<IpAddr> =
            ["192.0.2.1", "::1", "1.1.1.1"].iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(resolver.name_servers, servers);
        assert_eq!(Resolver::parse("").name_servers, [IpAddr::from([127, 0, 0, 1])]);
        let unspecified = Resolver::parse("nameserver 0.0.0.0\n");
        assert_eq!(unspecified.name_servers, [IpAddr::from([127, 0, 0, 1])]);
    }

    fn address_of(index: u32, ip: &str, prefix: u8) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.prefix_len = prefix;
        message.header.family = AddressFamily::Inet;
        message.attributes.push(AddressAttribute::Address(ip.parse().unwrap()));
        message
    }

    fn route(index: u32, prefix: u8, gateway: &str, metric: u32) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = prefix;
        message.header.kind = RouteType::Unicast;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        let gateway: IpAddr = gateway.parse().unwrap();
        message.attributes.extend([
            RouteAttribute::Gateway(gateway.into()),
            RouteAttribute::Oif(index),
            RouteAttribute::Priority(metric),
        ]);
        message
    }

    #[test]
    fn the_interface_of_the_best_default_route_is_copied() {
        let links = BTreeMap::from([(2, "wlan0".to_owned()), (3, "eth0".to_owned())]);
        let addresses = [address_of(2, "198.51.100.7", 24), address_of(3, "192.0.2.7", 24)];
        let routes = [route(2, 0, "198.51.100.1", 600), route(3, 0, "192.0.2.1", 100)];
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet, &links, &addresses, &routes);
        assert_eq!(network.interfaces, ["eth0"]);
        assert_eq!(network.addresses, ["192.0.2.7/24".parse().unwrap()]);
        assert_eq!(network.routes.len(), 1);
        assert_eq!(network.routes[0].gateway, Some("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn without_a_default_route_the_first_interface_with_an_address_is_copied() {
        let links = BTreeMap::from([(2, "dummy".to_owned()), (3, "eth0".to_owned())]);
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet, &links, &[address_of(3, "192.0.2.7", 24)], &[]);
        assert_eq!((network.interfaces, network.routes.len()), (vec!["eth0".to_owned()], 0));
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet, &links, &[], &[]);
        assert_eq!(network, HostNetwork::default());
    }
}
