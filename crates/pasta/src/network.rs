//! Network of a namespace: the plan that follows from options and host, and the sockets of its ports.

mod name_servers;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_sandbox::channel::Channel;
use ringfence_uplink::config::LeftOut;
use ringfence_uplink::upstream::ProxySettings;

use super::args::PastaArgs;
use super::auto_forwards::{self, AutoForwards, without_none};
use super::outbound;
use super::values::{AddressArg, OrNone};
use crate::forward_spec::Listen;
use name_servers::{NameServerWishes, last_of_each_family};
use ringfence_hostnet::address::Address;
use ringfence_hostnet::host::{HostNetwork, Resolver, resolver_of_host};
use ringfence_hostnet::interface::UplinkInterface;
use ringfence_uplink_process::forward::{self, Forward, ForwardProtocol, PORTS_MAX};
use ringfence_uplink_process::link::LinkOrder;
use ringfence_uplink_process::multicast::{self, Memberships};
use ringfence_uplink_process::multicast_groups::MulticastConfig;
use ringfence_uplink_process::network_plan::{NetworkPlan, Wishes};
use ringfence_uplink_process::orders::UplinkOrder;
use ringfence_uplink_process::queues::queues_of_uplink;
use ringfence_uplink_process::{
    Alias, BATCH, Outbound, PolicyHead, RelayTo, UplinkConfig, UplinkSockets,
};

/// Address and router of a namespace if the host has no address.
const LONE_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(169, 254, 2, 1), 16);
const LONE_ROUTER_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 2, 2);
/// Time for which ports may be taken at the start. A container that is started again has a new namespace at once, while
/// the session of the one before still ends.
const TAKEN_PATIENCE: Duration = Duration::from_millis(500);
const TAKEN_INTERVAL: Duration = Duration::from_millis(5);
/// Name of the interface if the host has none to copy.
const INTERFACE_DEFAULT: &str = "tap0";

#[derive(Debug)]
pub(crate) struct PlannedNetwork {
    plan: NetworkPlan,
    interface: String,
    macs: ([u8; 6], [u8; 6]),
    mtu: u16,
    /// Number of queues of the interface.
    queues: u32,
    /// Stand-ins of `--dns-forward`.
    forwarded: Vec<Alias>,
    /// Name servers that the namespace knows otherwise.
    unoffered: Vec<IpAddr>,
    search: Vec<String>,
    aliases: Vec<Alias>,
    /// Name servers that the options ask for, before those of the host are known.
    wishes: NameServerWishes,
    /// Proxy that carries connections to other hosts.
    upstream: Option<ProxySettings>,
    /// Sources of the host's sockets, IPv4 first.
    outbound: [Outbound; 2],
    /// Groups of `--multicast`, and their sockets until the uplink has them.
    multicast: MulticastConfig,
    /// Memberships that follow the host's links.
    pub(super) memberships: Option<Memberships>,
    groups: Vec<OwnedFd>,
}

/// Listening sockets and their destinations.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    pub(crate) forwards: Vec<Forward>,
    pub(crate) sockets: Vec<OwnedFd>,
}

impl PlannedNetwork {
    /// Plans the network from the options and the host's network.
    pub(crate) fn new(args: &PastaArgs) -> anyhow::Result<PlannedNetwork> {
        let mut network =
            PlannedNetwork::of(args, outbound::host_network(args)?, resolver_of_host())?;
        network.outbound = outbound::sources(args)?;
        network.upstream = args.egress.proxy.resolve()?;
        network.join(args)?;
        Ok(network)
    }

    fn of(
        args: &PastaArgs,
        host: HostNetwork,
        resolver: Resolver,
    ) -> anyhow::Result<PlannedNetwork> {
        let interface = args.ns_ifname.clone().or_else(|| host.interfaces.first().cloned());
        let interface = interface.unwrap_or_else(|| INTERFACE_DEFAULT.to_owned());
        let (host, lone_router) = chosen(args, host)?;
        if host.addresses.is_empty() {
            bail!("the host has no IPv6 address: give one with --address");
        }
        let gateways: Vec<IpAddr> = args.gateway.iter().copied().chain(lone_router).collect();
        let wishes = Wishes { gateways, ..Wishes::default() };
        let name_server_wishes = NameServerWishes::of(args)?;
        let servers = name_server_wishes.servers(&resolver.name_servers);
        let forwarded = name_server_wishes.stand_ins(&servers, &resolver.name_servers);
        // The plan has stand-ins for servers that the guest cannot reach by their own addresses.
        let name_servers = if name_server_wishes.offers { servers } else { Vec::new() };
        let offered = Resolver { name_servers, ..Resolver::default() };
        let plan = NetworkPlan::new(host, offered, &wishes);
        let plan = plan
            .map_err(|error| anyhow::anyhow!("{}", error.to_string().replace("--uplink-", "--")))?;
        let unoffered = name_server_wishes.unoffered(&resolver.name_servers, &plan);
        let search = match args.search.as_deref() {
            Some("none") => Vec::new(),
            Some(list) => list.split_ascii_whitespace().map(str::to_owned).collect(),
            // The proxy completes names, if at all.
            None if name_server_wishes.proxied => Vec::new(),
            None => resolver.search,
        };
        let (mac, guest_mac) = NetworkPlan::macs();
        let macs = (
            args.mac_addr.map_or(mac, |given| given.0),
            args.ns_mac_addr.map_or(guest_mac, |given| given.0),
        );
        let aliases = aliases(args, &plan)?;
        let network = PlannedNetwork {
            plan,
            interface,
            macs,
            mtu: args.mtu,
            queues: queues_of_uplink(args.queues),
            forwarded,
            unoffered,
            search,
            aliases,
            wishes: name_server_wishes,
            outbound: Default::default(),
            upstream: None,
            multicast: MulticastConfig::default(),
            memberships: None,
            groups: Vec::new(),
        };
        network.check_stand_ins()?;
        Ok(network)
    }

    /// Rejects an address that would stand for two things, or that the namespace has itself.
    fn check_stand_ins(&self) -> anyhow::Result<()> {
        let mut seen: Vec<IpAddr> =
            self.plan.addresses.iter().map(|address| address.ip()).collect();
        for ip in self.resolvers().iter().chain(&self.aliases).map(|alias| alias.guest) {
            if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
                bail!("{ip} cannot lead to the host: it has a meaning of its own in the namespace");
            }
            if seen.contains(&ip) {
                bail!(
                    "{ip} cannot lead to the host: the namespace has this address, or it leads elsewhere"
                );
            }
            seen.push(ip);
        }
        Ok(())
    }

    /// Returns the configuration of the interface in the namespace.
    pub(crate) fn interface(&self) -> UplinkInterface {
        let mut made = self.plan.interface(self.mtu, u32::MAX, self.queues);
        made.interface.name.clone_from(&self.interface);
        made.interface.mac = self.macs.1;
        made
    }

    /// Returns the configuration of the uplink process, whose link has `offloads`. `policy` is its egress policy.
    pub(crate) fn config(
        &self,
        args: &PastaArgs,
        link: LinkOrder,
        offloads: u32,
        forwards: Vec<Forward>,
        policy: Option<PolicyHead>,
    ) -> UplinkConfig {
        UplinkConfig {
            mtu: self.mtu,
            offloads,
            mac: self.macs.0,
            guest_mac: (!link.is_machine()).then_some(self.macs.1),
            chooses_address: link.is_machine() || !args.config_net,
            link,
            addresses: self.plan.addresses.clone(),
            gateways: self.plan.gateways.clone(),
            own: self.plan.own(),
            resolvers: self.resolvers(),
            name_servers: self.plan.name_servers.clone(),
            unoffered: self.unoffered.clone(),
            search: if args.dhcp_search { self.search.clone() } else { Vec::new() },
            loopback: Vec::new(),
            aliases: self.aliases.clone(),
            allow_local: args.allow_local.clone(),
            policy,
            upstream: self.upstream.clone(),
            outbound: self.outbound.clone(),
            multicast: self.multicast.clone(),
            left_out: left_out(args).0,
            forwards,
            more_ports: true,
            more_to_host: auto_forwards::has_ports_to_host(args),
            relay: relay(args),
            captures: args.pcap.is_some(),
            verbose: args.debug || args.trace,
        }
    }

    /// Returns the addresses that lead to name servers of the host.
    fn resolvers(&self) -> Vec<Alias> {
        self.forwarded.iter().chain(&self.plan.resolvers).copied().collect()
    }

    /// Follows the name servers that the host has now. Without any, those of before stay. Returns the order for the uplink
    /// if something changes for the namespace.
    pub(crate) fn follow_name_servers(&mut self, of_host: &[IpAddr]) -> Option<UplinkOrder> {
        if of_host.is_empty() {
            return None;
        }
        let now = |own: &PlannedNetwork| {
            (own.plan.name_servers.clone(), own.resolvers(), own.unoffered.clone())
        };
        let before = now(self);
        let servers = self.wishes.servers(of_host);
        self.forwarded = self.wishes.stand_ins(&servers, of_host);
        if self.wishes.offers {
            self.plan.follow_name_servers(&servers);
        }
        self.unoffered = self.wishes.unoffered(of_host, &self.plan);
        let after = now(self);
        let is_new = before != after;
        let (offered, resolvers, unoffered) = after;
        is_new.then_some(UplinkOrder::NameServers { resolvers, offered, unoffered })
    }

    /// Creates the sockets of all ports of `-t` and `-u`.
    pub(crate) fn listen(&self, args: &PastaArgs) -> anyhow::Result<Listeners> {
        let mut made: Vec<(Forward, OwnedFd)> = Vec::new();
        let until = Instant::now() + TAKEN_PATIENCE;
        for (option, protocol, specs, is_off) in [
            ("-t", ForwardProtocol::Tcp, &args.tcp_ports, args.no_tcp),
            ("-u", ForwardProtocol::Udp, &args.udp_ports, args.no_udp),
        ] {
            for listen in without_none(specs) {
                if is_off {
                    bail!("{option} {listen}: the protocol is switched off");
                }
                check_ports(option, listen)?;
                if listen.auto && listen.mappings.is_empty() {
                    self.addresses_of(protocol, listen)
                        .with_context(|| format!("{option} {listen}"))?;
                    continue;
                }
                self.open(args, protocol, listen, until, &mut made)
                    .with_context(|| format!("{option} {listen}"))?;
            }
        }
        let (forwards, sockets) = made.into_iter().unzip();
        Ok(Listeners { forwards, sockets })
    }

    /// Joins the groups of `--multicast`, on the interfaces by which the namespace's datagrams leave.
    fn join(&mut self, args: &PastaArgs) -> anyhow::Result<()> {
        multicast::check(&args.multicast, args.no_udp)?;
        if !args.multicast.is_empty() {
            let (chosen, families) = (outbound::chosen(args), self.plan.families());
            (self.memberships, self.multicast, self.groups) =
                Memberships::start(&args.multicast, chosen, families)?;
        }
        Ok(())
    }

    /// Appends the sockets of joined groups to those of forwarded ports.
    pub(super) fn joined(&mut self, mut sockets: Vec<OwnedFd>) -> Vec<OwnedFd> {
        sockets.append(&mut self.groups);
        sockets
    }

    /// Returns the ports that follow the listeners of the namespace.
    pub(super) fn auto_forwards(&self, args: &PastaArgs) -> anyhow::Result<Vec<AutoForwards>> {
        let mut found = Vec::new();
        for (protocol, specs) in
            [(ForwardProtocol::Tcp, &args.tcp_ports), (ForwardProtocol::Udp, &args.udp_ports)]
        {
            let mapped = without_none(specs).flat_map(Listen::ports);
            let mut taken: BTreeSet<u16> = mapped.map(|(port, ..)| port).collect();
            // Listeners of ours, in the namespace.
            let to_host = match protocol {
                ForwardProtocol::Tcp => &args.tcp_ns,
                ForwardProtocol::Udp => &args.udp_ns,
            };
            taken.extend(without_none(to_host).flat_map(Listen::ports).map(|(port, ..)| port));
            for listen in without_none(specs).filter(|listen| listen.auto) {
                let addresses = self.addresses_of(protocol, listen)?;
                let (listen, taken) = (listen.clone(), taken.clone());
                found.push(AutoForwards { protocol, listen, addresses, taken });
            }
        }
        Ok(found)
    }

    /// Returns the addresses of the host at which an entry listens.
    fn addresses_of(
        &self,
        protocol: ForwardProtocol,
        listen: &Listen,
    ) -> anyhow::Result<Vec<IpAddr>> {
        let families = self.plan.families();
        let has = |ip: &IpAddr| families.have(ip);
        let spec =
            forward::ForwardSpec { bind: listen.address, first: 1, last: 1, guest: 1, protocol };
        let addresses = forward::addresses(&spec, families, &[]);
        if let Some(ip) = addresses.iter().find(|ip| !has(ip)) {
            bail!("the namespace has no address of the family of {ip}");
        }
        Ok(addresses)
    }

    fn open(
        &self,
        args: &PastaArgs,
        protocol: ForwardProtocol,
        listen: &Listen,
        until: Instant,
        made: &mut Vec<(Forward, OwnedFd)>,
    ) -> anyhow::Result<()> {
        let addresses = self.addresses_of(protocol, listen)?;
        for (port, guest_port, _) in listen.ports() {
            for &ip in &addresses {
                let prepare = |socket: &OwnedFd| {
                    if let Some(interface) = &listen.interface {
                        ringfence_sys::socket::bind_to_interface(socket, interface)?;
                    }
                    match (args.freebind, ip.is_ipv4()) {
                        (false, _) => Ok(()),
                        (true, true) => Ok(rustix::net::sockopt::set_ip_freebind(socket, true)?),
                        (true, false) => Ok(rustix::net::sockopt::set_ipv6_freebind(socket, true)?),
                    }
                };
                let at = std::net::SocketAddr::from((ip, port));
                let bind = || forward::bind_with(protocol, at, prepare);
                let socket = bind_once_free(until, bind)
                    .with_context(|| format!("cannot listen at {at}/{protocol}"))?;
                let ipv6 = ip.is_ipv6();
                made.push((Forward { protocol, ipv6, guest_port, to_host: false }, socket));
            }
            if made.len() > 2 * PORTS_MAX {
                bail!("more than {PORTS_MAX} ports cannot be forwarded");
            }
        }
        Ok(())
    }

    /// Returns the addresses of the namespace.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.plan.addresses.iter().map(|address| address.ip()).collect()
    }

    /// Returns a line that describes the network.
    pub(crate) fn summary(&self) -> String {
        let texts: Vec<String> = self.plan.addresses.iter().map(Address::to_string).collect();
        let PlannedNetwork { interface, mtu, plan, .. } = self;
        let remark = if self.multicast.joins_nothing() { multicast::NO_LINK } else { "" };
        let separator = if remark.is_empty() { "" } else { "; " };
        format!(
            "{interface}: {}, MTU {mtu}, router {}{separator}{remark}",
            texts.join(", "),
            list(&plan.gateways)
        )
    }
}

/// Listens, and tries again until `until` if the port is taken.
fn bind_once_free(
    until: Instant,
    bind: impl Fn() -> std::io::Result<OwnedFd>,
) -> std::io::Result<OwnedFd> {
    loop {
        match bind() {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(TAKEN_INTERVAL);
            }
            bound => return bound,
        }
    }
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    texts.join(" and ")
}

/// Sends the configuration, the descriptors of the link and the listening sockets to the uplink process.
pub(crate) fn hand_over(
    channel: &Channel,
    config: &UplinkConfig,
    link: &[OwnedFd],
    sockets: Vec<OwnedFd>,
) -> anyhow::Result<()> {
    use std::os::fd::AsFd;
    let fds: Vec<_> = link.iter().map(AsFd::as_fd).collect();
    channel.send(config, &fds)?;
    for batch in sockets.chunks(BATCH) {
        let fds: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
        channel.send(&UplinkSockets, &fds)?;
    }
    Ok(())
}

/// Rejects ports that cannot be forwarded.
fn check_ports(option: &str, listen: &Listen) -> anyhow::Result<()> {
    if listen.auto && listen.interface.is_some() {
        bail!("{option} {listen}: `auto` listens at addresses only, not at an interface");
    }
    if listen.all {
        bail!(
            "{option} {listen}: each port needs a socket, and at most {PORTS_MAX} ports are possible: name them"
        );
    }
    if listen.mappings.iter().any(|mapping| mapping.address.is_some()) {
        bail!("{option} {listen}: ports lead to the namespace's own address only");
    }
    Ok(())
}

/// Returns the host's network with the addresses and routes that the options choose, and a router if it has none.
fn chosen(args: &PastaArgs, host: HostNetwork) -> anyhow::Result<(HostNetwork, Option<IpAddr>)> {
    let mut network = HostNetwork { interfaces: host.interfaces, ..HostNetwork::default() };
    let mut router = None;
    for (is_v4, is_off) in [(true, args.ipv6_only), (false, args.ipv4_only)] {
        if is_off {
            continue;
        }
        let of_family = |ip: IpAddr| ip.is_ipv4() == is_v4;
        let own: Vec<Address> =
            host.addresses.iter().copied().filter(|address| of_family(address.ip())).collect();
        let given = args.address.iter().rev().find(|given| of_family(given.ip));
        match given {
            Some(given) => network.addresses.push(assigned(args, given, &own)?),
            None => {
                let most = if args.no_copy_addrs { 1 } else { usize::MAX };
                network.addresses.extend(own.iter().take(most));
            }
        }
        let only_default = args.no_copy_routes || args.gateway.iter().any(|ip| of_family(*ip));
        let is_copied = |route: &&ringfence_hostnet::netlink::Route| {
            of_family(route.destination) && (!only_default || route.prefix == 0)
        };
        network.routes.extend(host.routes.iter().filter(is_copied));
    }
    if network.addresses.is_empty() && !args.ipv6_only {
        let (ip, prefix) = LONE_V4;
        network.addresses.push(Address::new(ip.into(), prefix)?);
        let is_given = args.gateway.iter().any(IpAddr::is_ipv4);
        router = (!is_given).then_some(LONE_ROUTER_V4.into());
    }
    Ok((network, router))
}

/// Returns a given address with its prefix length: its own, that of --netmask, that of the host's network, or
/// that of its class.
fn assigned(args: &PastaArgs, given: &AddressArg, own: &[Address]) -> anyhow::Result<Address> {
    let AddressArg { ip, prefix } = *given;
    let prefix = match (ip, prefix, args.netmask) {
        (IpAddr::V4(_), Some(_), Some(_)) => {
            bail!("--address {ip} has a prefix length of its own: leave out --netmask")
        }
        (_, Some(prefix), _) => prefix,
        (IpAddr::V4(_), None, Some(mask)) => mask.0,
        (IpAddr::V6(_), None, _) => 64,
        (IpAddr::V4(ip), None, None) => {
            let same = own.iter().find(|address| address.ip() == IpAddr::V4(ip));
            same.map_or_else(|| class_prefix(ip), |address| address.prefix())
        }
    };
    Address::new(ip, prefix).with_context(|| format!("--address {ip}"))
}

/// Returns the prefix length of an address's class (RFC 791, section 3.2).
fn class_prefix(ip: Ipv4Addr) -> u8 {
    match ip.octets()[0] {
        0..=127 => 8,
        128..=191 => 16,
        _ => 24,
    }
}

/// Returns the addresses that lead to the host's loopback or to its own address.
fn aliases(args: &PastaArgs, plan: &NetworkPlan) -> anyhow::Result<Vec<Alias>> {
    let mut found = Vec::new();
    let (mut loopback, _) = OrNone::list(&args.map_host_loopback);
    if args.map_gw {
        loopback.extend(&plan.gateways);
    }
    let localhost = |ip: IpAddr| match ip {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::from(std::net::Ipv6Addr::LOCALHOST),
    };
    for ip in last_of_each_family(&loopback) {
        found.push(Alias { guest: ip, host: localhost(ip) });
    }
    let (own, _) = OrNone::list(&args.map_guest_addr);
    for ip in last_of_each_family(&own) {
        let same = plan.addresses.iter().map(|address| address.ip());
        // A namespace without this family cannot send to the address.
        if let Some(host) = same.into_iter().find(|own| own.is_ipv4() == ip.is_ipv4()) {
            found.push(Alias { guest: ip, host });
        }
    }
    Ok(found)
}

/// Returns the address to which connections from the host's loopback are relayed.
pub(crate) fn relay(args: &PastaArgs) -> Option<RelayTo> {
    let to = if args.host_lo_to_ns_lo { RelayTo::Loopback } else { RelayTo::Own };
    let has_udp = args.host_lo_to_ns_lo && without_none(&args.udp_ports).next().is_some();
    let has_tcp = without_none(&args.tcp_ports).next().is_some();
    let has_ports = has_tcp || has_udp || args.conf_path.is_some();
    (has_ports && !args.no_splice).then_some(to)
}

/// Returns the protocols that the options switch off.
fn left_out(args: &PastaArgs) -> LeftOut {
    let choices = [
        (args.no_tcp, LeftOut::TCP),
        (args.no_udp, LeftOut::UDP),
        (args.no_icmp, LeftOut::ICMP),
        (args.no_dhcp, LeftOut::DHCP),
        (args.no_dhcpv6, LeftOut::DHCPV6),
        (args.no_ndp, LeftOut::NDP),
        (args.no_ra, LeftOut::ROUTER_ADVERTISEMENTS),
    ];
    let chosen = choices.into_iter().filter(|(is_given, _)| *is_given);
    chosen.fold(LeftOut::default(), |all, (_, one)| all.union(one))
}

#[cfg(test)]
mod tests;
