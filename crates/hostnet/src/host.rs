//! Host network as a guest copies it: addresses and routes of the interface of the default route,
//! and the host's name servers.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};

use crate::name_files::FILE_MAX;

use crate::address::Address;
use crate::netlink::{Netlink, Route};

/// File with the host's name servers.
pub const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Maximum number of copied routes. A guest needs the default route, not a whole routing table.
const ROUTES_MAX: usize = 32;
/// Maximum number of copied addresses of each family.
const ADDRESSES_MAX: usize = 8;

/// Properties of the host's network that a guest copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNetwork {
    /// Names of the copied interfaces, for messages.
    pub interfaces: Vec<String>,
    /// Addresses, IPv4 first.
    pub addresses: Vec<Address>,
    /// Routes over the copied interfaces.
    pub routes: Vec<Route>,
    /// Interface of each family, IPv4 first.
    pub links: [Option<HostInterface>; 2],
}

/// Interface of the host by which a guest's packets leave, and whose addresses the guest copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInterface {
    pub index: u32,
    pub name: String,
}

/// Relevant contents of `resolv.conf(5)`.
pub type Resolver = crate::name_files::ResolvConf;

impl HostNetwork {
    /// Reads the network of this process's network namespace.
    pub fn read() -> io::Result<HostNetwork> {
        HostNetwork::read_only(None)
    }

    /// Reads the network of this process's network namespace, of the interface `name` alone if there is one.
    pub fn read_only(name: Option<&str>) -> io::Result<HostNetwork> {
        let mut netlink = Netlink::open()?;
        let mut links = usable(&netlink.links()?);
        links.retain(|_, link| name.is_none_or(|name| link == name));
        let addresses = netlink.addresses()?;
        let mut network = HostNetwork::default();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            // A kernel without IPv6 is no error.
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
        let of_family = &mut self.links[usize::from(family != AddressFamily::Inet)];
        *of_family = Some(HostInterface { index, name: name.clone() });
        if !self.interfaces.contains(name) {
            self.interfaces.push(name.clone());
        }
        let own = addresses.iter().filter(|(of, _)| *of == index).map(|(_, address)| *address);
        self.addresses.extend(own.take(ADDRESSES_MAX));
        let own = routes.iter().filter(|(of, _)| *of == index).map(|(_, route)| *route);
        self.routes.extend(own.take(ROUTES_MAX));
    }
}

/// Returns the interfaces, by index, that are up and not loopback.
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

/// Returns a permanent address at which other hosts reach the host. A tentative one is included: the host can use it a second
/// or two later, and a guest keeps the addresses of its start.
fn copied_address(message: &AddressMessage) -> Option<Address> {
    let passing = AddressHeaderFlags::Secondary // In IPv6: temporary.
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Dadfailed;
    let is_v6 = message.header.family == AddressFamily::Inet6;
    if message.header.scope != AddressScope::Universe
        || is_v6 && message.header.flags.intersects(passing)
    {
        return None;
    }
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point link this address is the host's own.
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

/// Returns a route to copy. The kernel of the guest creates those of its addresses itself.
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
            // One of several next hops suffices: the host chooses again for each connection.
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

/// Reads a file of the host about names. Returns `None` if it is not there.
pub fn read_name_file(path: &str) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(FILE_MAX).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Reads the host's resolver configuration. Without a search list, the domain of the host's name is searched, as the C
/// library does.
pub fn resolver_of_host() -> Resolver {
    let text = read_name_file(RESOLV_CONF).unwrap_or_default();
    let mut resolver =
        Resolver::parse_with(&text, |name| Netlink::open().ok()?.index_of(name).ok());
    if resolver.search.is_empty() {
        let uname = rustix::system::uname();
        let name = uname.nodename().to_str().unwrap_or_default();
        let domain = name.split_once('.').map(|(_, domain)| domain.to_owned());
        resolver.search.extend(domain.filter(|domain| !domain.is_empty()));
    }
    resolver
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn interface_of_best_default_route_is_copied() {
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
    fn tentative_address_is_copied_and_a_duplicate_one_is_not() {
        let links = BTreeMap::from([(2, "eth0".to_owned())]);
        let with_flags = |ip: &str, flags| {
            let mut message = address_of(2, ip, 64);
            message.header.family = AddressFamily::Inet6;
            message.header.flags = flags;
            message
        };
        let tentative = AddressHeaderFlags::Tentative | AddressHeaderFlags::Permanent;
        let addresses = [
            with_flags("2001:db8::1", tentative),
            with_flags("2001:db8::2", tentative | AddressHeaderFlags::Dadfailed),
            with_flags("2001:db8::3", AddressHeaderFlags::Secondary),
        ];
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet6, &links, &addresses, &[]);
        assert_eq!(network.addresses, ["2001:db8::1/64".parse().unwrap()]);
    }

    #[test]
    fn first_interface_with_address_is_copied_without_default_route() {
        let links = BTreeMap::from([(2, "dummy".to_owned()), (3, "eth0".to_owned())]);
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet, &links, &[address_of(3, "192.0.2.7", 24)], &[]);
        assert_eq!((network.interfaces, network.routes.len()), (vec!["eth0".to_owned()], 0));
        let mut network = HostNetwork::default();
        network.copy(AddressFamily::Inet, &links, &[], &[]);
        assert_eq!(network, HostNetwork::default());
    }
}
