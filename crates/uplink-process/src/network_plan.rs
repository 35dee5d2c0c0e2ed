//! Network plan of a guest's uplink: addresses, routes, name servers, and substitute addresses for the
//! host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::config::{Alias, INTERFACE};
use crate::forward::Families;
use ringfence_base::address::without_zone;
use ringfence_hostnet::address::Address;
use ringfence_hostnet::address::AddressError;
use ringfence_hostnet::host::{HostNetwork, Resolver};
use ringfence_hostnet::interface::{InterfaceConfig, ResolverConfig, UplinkInterface};
use ringfence_hostnet::netlink::Route;
use ringfence_policy::substitutes::NAME_SERVERS;

/// Router addresses if the host has none to copy. Link-local, so that they conflict with no other
/// host.
const ROUTER_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 53, 254);
const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x5266, 1);
/// Base of the substitute addresses of name servers that the guest cannot query itself; the n-th
/// for the n-th.
const RESOLVER_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 53, 0);
const RESOLVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd72, 0x6672, 0x6663, 0, 0, 0, 0x5266, 0);

/// Addresses of a private network, and its routers: those of slirp4netns.
const PRIVATE_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 0, 2, 100), 24);
const PRIVATE_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x100), 64);
const PRIVATE_ROUTERS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 2, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
];

/// Ethernet addresses of the uplink's end and of the guest's: locally administered.
const MAC: [u8; 6] = [0x02, 0x72, 0x66, 0, 0x53, 0x01];
const GUEST_MAC: [u8; 6] = [0x02, 0x72, 0x66, 0, 0x53, 0x02];

/// Settings of the user that replace those of the host.
#[derive(Clone, Debug, Default)]
pub struct Wishes {
    pub addresses: Vec<Address>,
    /// Addresses of a private network, whatever the host has.
    pub private: bool,
    /// Router of each family.
    pub gateways: Vec<IpAddr>,
    pub name_servers: Vec<IpAddr>,
    /// Substitute addresses for the host's loopback.
    pub loopback: Vec<IpAddr>,
    /// Names are looked up by an upstream proxy: the host's name servers and search domains are not the guest's.
    pub proxied: bool,
}

/// Value of the option `--uplink-address`: an address, or a private network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UplinkAddress {
    Given(Address),
    Private,
}

impl UplinkAddress {
    /// Returns the given address.
    pub fn given(&self) -> Option<Address> {
        match self {
            UplinkAddress::Given(address) => Some(*address),
            UplinkAddress::Private => None,
        }
    }
}

impl FromStr for UplinkAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<UplinkAddress, AddressError> {
        match text {
            "private" => Ok(UplinkAddress::Private),
            _ => text.parse().map(UplinkAddress::Given),
        }
    }
}

/// Network configuration of a guest with an uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPlan {
    pub addresses: Vec<Address>,
    pub routes: Vec<Route>,
    pub gateways: Vec<IpAddr>,
    pub name_servers: Vec<IpAddr>,
    pub search: Vec<String>,
    pub resolvers: Vec<Alias>,
    pub loopback: Vec<Alias>,
    /// Origin of the addresses, for messages.
    pub origin: String,
}

/// Reasons for which an uplink is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("--uplink-gateway {0}: the guest has no address of that family")]
    Gateway(IpAddr),
    #[error("--uplink-gateway {0}: no router can have this address")]
    NoGateway(IpAddr),
    #[error("--dns {0}: no name server can be asked at this address: {1}")]
    NameServer(IpAddr, &'static str),
    #[error("--host-loopback {0}: the guest has no address of that family")]
    Loopback(IpAddr),
    #[error(
        "--host-loopback {0}: this must be an address of one host that nobody else has: not the guest's own"
    )]
    LoopbackTaken(IpAddr),
}

impl NetworkPlan {
    pub fn new(
        host: HostNetwork,
        resolver: Resolver,
        wishes: &Wishes,
    ) -> Result<NetworkPlan, PlanError> {
        let (mut addresses, mut routes) = (wishes.addresses.clone(), Vec::new());
        let mut wanted = wishes.gateways.clone();
        let origin = if !addresses.is_empty() {
            "as given".to_owned()
        } else if wishes.private || host.addresses.is_empty() {
            addresses = private_addresses();
            let has = |v4| wishes.gateways.iter().any(|ip| ip.is_ipv4() == v4);
            wanted.extend(PRIVATE_ROUTERS.into_iter().filter(|router| !has(router.is_ipv4())));
            if wishes.private { "private" } else { "private: the host has no network now" }
                .to_owned()
        } else {
            (addresses, routes) = (host.addresses, host.routes);
            format!("copied from {}", host.interfaces.join(" and "))
        };
        let mut plan = NetworkPlan {
            addresses,
            routes,
            gateways: Vec::new(),
            name_servers: Vec::new(),
            search: resolver.search,
            resolvers: Vec::new(),
            loopback: Vec::new(),
            origin,
        };
        let is_lost = |ip: &&IpAddr| ip.is_loopback() || not_one_host(**ip).is_some();
        if let Some(lost) = wishes.gateways.iter().find(is_lost) {
            return Err(PlanError::NoGateway(*lost));
        }
        plan.route(&wanted)?;
        let servers = if wishes.name_servers.is_empty() {
            resolver.name_servers.into_iter().filter(|ip| not_asked(*ip).is_none()).collect()
        } else {
            wishes.name_servers.clone()
        };
        if let Some((ip, why)) = servers.iter().find_map(|ip| Some((*ip, not_asked(*ip)?))) {
            return Err(PlanError::NameServer(ip, why));
        }
        if wishes.proxied {
            // A name that is too short is completed by the proxy, if at all.
            (plan.name_servers, plan.search) = (plan.name_servers_by_proxy(), Vec::new());
        } else {
            (plan.name_servers, plan.resolvers) = plan.resolve(&servers);
        }
        plan.reach_loopback(&wishes.loopback)?;
        Ok(plan)
    }

    /// Returns the addresses of the uplink itself: its substitute addresses.
    pub fn own(&self) -> Vec<IpAddr> {
        let routers = [IpAddr::from(ROUTER_V4), IpAddr::from(ROUTER_V6)];
        let used = routers.into_iter().filter(|router| self.gateways.contains(router));
        used.chain(self.resolvers.iter().map(|alias| alias.guest)).collect()
    }

    /// Returns the families of the guest's addresses.
    pub fn families(&self) -> Families {
        let any = |v4| self.addresses.iter().any(|address| address.ip().is_ipv4() == v4);
        Families { v4: any(true), v6: any(false) }
    }

    fn has_family_of(&self, ip: IpAddr) -> bool {
        self.families().have(&ip)
    }

    pub fn has(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|address| address.ip() == ip)
    }

    /// Chooses a default route for each family.
    fn route(&mut self, wanted: &[IpAddr]) -> Result<(), PlanError> {
        if let Some(lost) = wanted.iter().find(|ip| !self.has_family_of(**ip)) {
            return Err(PlanError::Gateway(*lost));
        }
        let Families { v4, v6 } = self.families();
        for (is_there, is_v4) in [(v4, true), (v6, false)] {
            let everything: IpAddr =
                if is_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            let router: IpAddr = if is_v4 { ROUTER_V4.into() } else { ROUTER_V6.into() };
            let wanted = wanted.iter().copied().find(|ip| ip.is_ipv4() == is_v4);
            let is_default = |route: &Route| route.prefix == 0 && route.destination == everything;
            if wanted.is_some() {
                self.routes.retain(|route| !is_default(route));
            }
            self.routes.retain(|route| is_there || route.destination.is_ipv4() != is_v4);
            for route in self.routes.iter_mut().filter(|route| route.destination.is_ipv4() == is_v4)
            {
                // Without a router the guest would resolve each host on the link. It may not
                // support a router of the other family (RFC 5549).
                let own = route.gateway.filter(|gateway| gateway.is_ipv4() == is_v4);
                route.gateway = Some(own.unwrap_or(router));
            }
            if is_there && !self.routes.iter().any(is_default) {
                let gateway = Some(wanted.unwrap_or(router));
                let destination = everything;
                self.routes.push(Route { destination, prefix: 0, gateway, metric: None });
            }
            let default = self.routes.iter().find(|route| is_default(route));
            self.gateways.extend(default.and_then(|route| route.gateway));
        }
        let mut seen = Vec::new();
        self.routes.retain(|route| {
            let key = (route.destination, route.prefix, route.metric);
            let is_new = !seen.contains(&key);
            seen.push(key);
            is_new
        });
        Ok(())
    }

    /// Follows the host's name servers of now. Without any that can be asked, those of before stay. Returns `true` if
    /// the guest's are others than before.
    pub fn follow_name_servers(&mut self, servers: &[IpAddr]) -> bool {
        let servers: Vec<_> =
            servers.iter().copied().filter(|ip| not_asked(*ip).is_none()).collect();
        let new = self.resolve(&servers);
        if servers.is_empty() || new == (self.name_servers.clone(), self.resolvers.clone()) {
            return false;
        }
        (self.name_servers, self.resolvers) = new;
        true
    }

    /// Returns the addresses at which the uplink itself answers queries, behind an upstream proxy.
    fn name_servers_by_proxy(&self) -> Vec<IpAddr> {
        NAME_SERVERS.into_iter().filter(|ip| self.has_family_of(*ip)).collect()
    }

    /// Returns addresses of the host's name servers to which the guest can send, and the stand-ins among them.
    fn resolve(&self, servers: &[IpAddr]) -> (Vec<IpAddr>, Vec<Alias>) {
        let (mut name_servers, mut resolvers) = (Vec::new(), Vec::new());
        let v4 = self.families().v4;
        for (&host, number) in servers.iter().zip(1..) {
            let is_remote = !host.is_loopback() && !self.has(host) && !is_of_a_link(host);
            if self.has_family_of(host) && is_remote {
                name_servers.push(host);
                continue;
            }
            let guest: IpAddr = if v4 {
                Ipv4Addr::from_bits(RESOLVER_V4.to_bits() | number).into()
            } else {
                Ipv6Addr::from_bits(RESOLVER_V6.to_bits() | u128::from(number)).into()
            };
            name_servers.push(guest);
            resolvers.push(Alias { guest, host });
        }
        (name_servers, resolvers)
    }

    fn reach_loopback(&mut self, wanted: &[IpAddr]) -> Result<(), PlanError> {
        for &guest in wanted {
            if !self.has_family_of(guest) {
                return Err(PlanError::Loopback(guest));
            }
            if self.has(guest) || guest.is_loopback() || not_one_host(guest).is_some() {
                return Err(PlanError::LoopbackTaken(guest));
            }
            let host: IpAddr = if guest.is_ipv4() {
                Ipv4Addr::LOCALHOST.into()
            } else {
                Ipv6Addr::LOCALHOST.into()
            };
            self.loopback.push(Alias { guest, host });
        }
        Ok(())
    }

    /// Returns the interface's configuration for the guest's init.
    pub fn interface(&self, mtu: u16, offloads: u32, queues: u32) -> UplinkInterface {
        UplinkInterface {
            interface: InterfaceConfig {
                name: INTERFACE.to_owned(),
                mac: GUEST_MAC,
                mtu: mtu.into(),
                offloads,
                addresses: self.addresses.clone(),
                queues,
            },
            routes: self.routes.clone(),
        }
    }

    /// Returns the guest's resolver configuration at its start.
    pub fn resolver(&self) -> ResolverConfig {
        let (name_servers, search) = (self.name_servers.clone(), self.search.clone());
        ResolverConfig { name_servers, search, options: Vec::new() }
    }

    /// Returns the Ethernet addresses of the uplink and of the guest.
    pub fn macs() -> ([u8; 6], [u8; 6]) {
        (MAC, GUEST_MAC)
    }
}

fn private_addresses() -> Vec<Address> {
    let addresses = [(PRIVATE_V4.0.into(), PRIVATE_V4.1), (PRIVATE_V6.0.into(), PRIVATE_V6.1)];
    let made = addresses.into_iter().map(|(ip, prefix): (IpAddr, u8)| Address::new(ip, prefix));
    made.map(|address| address.expect("a constant address is valid")).collect()
}

/// Returns the reason why an address is not that of one host; `None` if it can be.
fn not_one_host(ip: IpAddr) -> Option<&'static str> {
    let is_mapped = matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
    match ip {
        _ if ip.is_unspecified() => Some("it stands for all addresses"),
        _ if ip.is_multicast() => Some("it is a multicast address"),
        IpAddr::V4(Ipv4Addr::BROADCAST) => Some("it is the broadcast address"),
        _ if is_mapped => Some("write it as an IPv4 address"),
        _ => None,
    }
}

/// Returns the reason why no name server can be queried at an address; `None` if one can.
fn not_asked(ip: IpAddr) -> Option<&'static str> {
    let has_no_zone =
        matches!(ip, IpAddr::V6(ip) if is_of_a_link(ip.into()) && without_zone(ip).1 == 0);
    let of_a_link = has_no_zone.then_some("it is of one link, and names no interface");
    not_one_host(ip).or(of_a_link)
}

/// Returns `true` for a link-local IPv6 address, whose interface the guest does not have.
fn is_of_a_link(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(addresses: &[&str], gateways: &[&str]) -> HostNetwork {
        let route = |gateway: &&str| {
            let gateway: IpAddr = gateway.parse().unwrap();
            let destination =
                if gateway.is_ipv4() { "0.0.0.0" } else { "::" }.parse::<IpAddr>().unwrap();
            Route { destination, prefix: 0, gateway: Some(gateway), metric: Some(100) }
        };
        HostNetwork {
            interfaces: vec!["eth0".into()],
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            routes: gateways.iter().map(route).collect(),
            links: Default::default(),
        }
    }

    fn servers(list: &[&str]) -> Resolver {
        let name_servers = list.iter().map(|ip| ip.parse().unwrap()).collect();
        Resolver { name_servers, search: vec!["example".into()], ..Resolver::default() }
    }

    fn plan(host: HostNetwork, resolver: Resolver) -> NetworkPlan {
        NetworkPlan::new(host, resolver, &Wishes::default()).unwrap()
    }

    #[test]
    fn name_servers_of_now_replace_those_of_the_start() {
        let mut plan = plan(host(&["192.0.2.7/24"], &["192.0.2.1"]), servers(&["127.0.0.53"]));
        let ips =
            |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let stand_in = plan.resolvers[0].guest;
        assert!(!plan.follow_name_servers(&ips(&["127.0.0.53"])));
        assert!(!plan.follow_name_servers(&ips(&["ff02::1"])) && plan.name_servers == [stand_in]);
        assert!(plan.follow_name_servers(&ips(&["192.0.2.7", "192.0.2.9", "2001:db8::1"])));
        assert_eq!(plan.name_servers[..2], [stand_in, "192.0.2.9".parse().unwrap()]);
        let hosts: Vec<_> = plan.resolvers.iter().map(|alias| alias.host).collect();
        assert_eq!(hosts, ips(&["192.0.2.7", "2001:db8::1"]));
    }

    #[test]
    fn proxied_guest_asks_the_uplink_for_names_and_has_no_search_domain() {
        let wishes = Wishes { proxied: true, ..Wishes::default() };
        let host = host(&["192.0.2.7/24"], &["192.0.2.1"]);
        let plan = NetworkPlan::new(host, servers(&["127.0.0.53"]), &wishes).unwrap();
        assert_eq!(plan.name_servers, [NAME_SERVERS[0]], "the guest has no IPv6");
        assert!(plan.resolvers.is_empty() && plan.search.is_empty());
    }

    #[test]
    fn host_without_network_gives_a_private_one() {
        for (host, private) in
            [(HostNetwork::default(), false), (host(&["192.0.2.7/24"], &[]), true)]
        {
            let wishes = Wishes { private, ..Wishes::default() };
            let plan = NetworkPlan::new(host, servers(&["2001:db8::53"]), &wishes).unwrap();
            assert_eq!(plan.families(), Families { v4: true, v6: true });
            assert_eq!(plan.gateways, PRIVATE_ROUTERS);
            assert!(plan.origin.starts_with("private") && plan.resolvers.is_empty());
        }
    }

    #[test]
    fn host_with_both_families_is_copied() {
        let plan = plan(
            host(&["192.0.2.7/24", "2001:db8::7/64"], &["192.0.2.1", "fe80::1"]),
            servers(&["192.0.2.1", "127.0.0.53"]),
        );
        assert_eq!(plan.families(), Families { v4: true, v6: true });
        assert_eq!(
            plan.gateways,
            ["192.0.2.1".parse::<IpAddr>().unwrap(), "fe80::1".parse().unwrap()]
        );
        assert_eq!(plan.routes.len(), 2);
        // The server that only the host can query has a substitute address.
        let alias: IpAddr = "169.254.53.2".parse().unwrap();
        assert_eq!(plan.name_servers, ["192.0.2.1".parse().unwrap(), alias]);
        assert_eq!(plan.resolvers, [Alias { guest: alias, host: "127.0.0.53".parse().unwrap() }]);
    }

    #[test]
    fn host_with_one_family_gives_guest_one_family() {
        let v6 = plan(host(&["2001:db8::7/64"], &["fe80::1"]), servers(&["192.0.2.1"]));
        assert_eq!(v6.families(), Families { v4: false, v6: true });
        assert_eq!(v6.name_servers, ["fd72:6672:6663::5266:1".parse::<IpAddr>().unwrap()]);
        let v4 = plan(host(&["192.0.2.7/32"], &[]), servers(&["192.0.2.7"]));
        assert_eq!(v4.gateways, [IpAddr::from(ROUTER_V4)]);
        assert_eq!(v4.resolvers.len(), 1, "the guest has this address itself");
        assert_eq!(v4.routes.len(), 1);
    }

    #[test]
    fn user_settings_replace_those_of_the_host() {
        let wishes = Wishes {
            addresses: vec!["10.9.0.2/24".parse().unwrap()],
            private: false,
            gateways: vec!["10.9.0.1".parse().unwrap()],
            name_servers: vec!["9.9.9.9".parse().unwrap()],
            loopback: vec!["10.9.0.9".parse().unwrap()],
            proxied: false,
        };
        let host = host(&["192.0.2.7/24", "2001:db8::7/64"], &["192.0.2.1"]);
        let plan = NetworkPlan::new(host, servers(&["192.0.2.1"]), &wishes).unwrap();
        assert_eq!(plan.addresses, wishes.addresses);
        assert_eq!(plan.gateways, wishes.gateways);
        assert_eq!(plan.name_servers, wishes.name_servers);
        assert_eq!(plan.loopback[0].host, IpAddr::from(Ipv4Addr::LOCALHOST));
        assert_eq!(plan.routes.len(), 1);
    }

    #[test]
    fn address_that_is_not_of_one_host_is_refused() {
        let with = |wishes| {
            NetworkPlan::new(host(&["192.0.2.7/24", "2001:db8::7/64"], &[]), servers(&[]), &wishes)
        };
        for text in [
            "::",
            "0.0.0.0",
            "ff02::1",
            "224.0.0.1",
            "255.255.255.255",
            "::ffff:9.9.9.9",
            "fe80::1",
        ] {
            let ip: IpAddr = text.parse().unwrap();
            let error = with(Wishes { name_servers: vec![ip], ..Wishes::default() }).unwrap_err();
            assert!(matches!(error, PlanError::NameServer(refused, _) if refused == ip), "{error}");
            if text != "fe80::1" {
                let wishes = Wishes { gateways: vec![ip], ..Wishes::default() };
                assert_eq!(with(wishes).unwrap_err(), PlanError::NoGateway(ip));
                let wishes = Wishes { loopback: vec![ip], ..Wishes::default() };
                assert_eq!(with(wishes).unwrap_err(), PlanError::LoopbackTaken(ip));
            }
        }
        // Entries of a host's own list that cannot be used are skipped.
        let plan = plan(host(&["192.0.2.7/24"], &[]), servers(&["ff02::1", "9.9.9.9"]));
        assert_eq!(plan.name_servers, ["9.9.9.9".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn impossible_settings_are_reported() {
        let six: IpAddr = "fe80::1".parse().unwrap();
        let wishes = Wishes { gateways: vec![six], ..Wishes::default() };
        let refused = NetworkPlan::new(host(&["192.0.2.7/24"], &[]), servers(&[]), &wishes);
        assert_eq!(refused.unwrap_err(), PlanError::Gateway(six));
        let own: IpAddr = "192.0.2.7".parse().unwrap();
        let wishes = Wishes { loopback: vec![own], ..Wishes::default() };
        let refused = NetworkPlan::new(host(&["192.0.2.7/24"], &[]), servers(&[]), &wishes);
        assert_eq!(refused.unwrap_err(), PlanError::LoopbackTaken(own));
    }
}
