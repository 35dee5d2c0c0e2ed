//! `--multicast`: sockets that join the groups of services on the host's link, for the uplink, which cannot make them.
//!
//! A socket is bound to the group's address and port, which it shares with other programs of the host such as avahi. It
//! receives nothing that was sent to the host alone, so it takes nothing from them. It is restricted to one interface:
//! that of the default route, or of the options that choose one. `Memberships` joins again when that is another
//! interface than before, and when the host has a network at last.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_sandbox::channel::Channel;
use ringfence_sys::socket;
use ringfence_uplink::udp::multicast::service::Service;
use rustix::net::sockopt;

use crate::forward::{self, Families, ForwardProtocol};
use crate::multicast_groups::{JoinedGroup, MulticastConfig};
use crate::orders::UplinkOrder;
use ringfence_hostnet::host::{HostInterface, HostNetwork};
use ringfence_hostnet::netlink::Notices;

/// Time from a change of the network to the next look at its links. More changes in this time cost nothing.
const SETTLES_WITHIN: Duration = Duration::from_millis(200);

/// Message about a host without a network.
pub const NO_LINK: &str = "--multicast joins no group yet: the host has no network now";

/// Names of the interfaces that options choose, IPv4 first. Without one, that of the default route is meant.
pub type Chosen = [Option<String>; 2];

/// Returns the interfaces by which multicast leaves, IPv4 first.
fn links([v4, v6]: &Chosen) -> anyhow::Result<[Option<HostInterface>; 2]> {
    let read = |name: &Option<String>| {
        HostNetwork::read_only(name.as_deref()).context("looking at the host's network")
    };
    let links = read(v4)?.links;
    if v4 == v6 {
        return Ok(links);
    }
    let ([v4, _], [_, v6]) = (links, read(v6)?.links);
    Ok([v4, v6])
}

/// Memberships of a running uplink, which follow the host's links.
#[derive(Debug)]
pub struct Memberships {
    services: Vec<Service>,
    families: Families,
    chosen: Chosen,
    /// Links on which the groups were joined, IPv4 first.
    links: [Option<HostInterface>; 2],
    notices: Notices,
    /// Time of the next look at the links.
    due: Option<Instant>,
}

impl Memberships {
    /// Begins to watch the network, and joins the groups of `services`. Returns no memberships without a
    /// service.
    pub fn start(
        services: &[Service],
        chosen: Chosen,
        families: Families,
    ) -> anyhow::Result<(Option<Memberships>, MulticastConfig, Vec<OwnedFd>)> {
        if services.is_empty() {
            return Ok(Default::default());
        }
        let notices = Notices::of_network().context("--multicast: watching the network")?;
        let links = links(&chosen)?;
        let (config, sockets) = join(services, &links, families)?;
        let services = config.services.clone();
        let own = Memberships { services, families, chosen, links, notices, due: None };
        Ok((Some(own), config, sockets))
    }

    /// Returns the time at which [`Memberships::follow`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Joins the groups on the links that the host has now, if they are others than before. The uplink behind `channel`
    /// gets the new sockets in place of the old ones. Returns a message about a change.
    pub fn follow(&mut self, channel: &Channel) -> anyhow::Result<Option<String>> {
        if self.notices.clear() && self.due.is_none() {
            self.due = Some(Instant::now() + SETTLES_WITHIN);
        }
        if self.due.take_if(|due| *due <= Instant::now()).is_none() {
            return Ok(None);
        }
        let links = links(&self.chosen)?;
        if links == self.links {
            return Ok(None);
        }
        let (config, sockets) = join(&self.services, &links, self.families)?;
        let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        channel.send_now(&UplinkOrder::Multicast(config.joined), &fds)?;
        self.links = links;
        let names: Vec<_> = self.links.iter().flatten().map(|link| link.name.as_str()).collect();
        Ok(Some(match names.as_slice() {
            [] => "--multicast: the host has no network, and the groups are left".to_owned(),
            names => format!("--multicast: the groups are joined on {}", names.join(" and ")),
        }))
    }
}

impl AsFd for Memberships {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }
}

/// Joins the groups of `services` on the links of the guest's families.
///
/// # Errors
///
/// Returns the first group that cannot be joined. Without a link, there is none to join.
fn join(
    services: &[Service],
    links: &[Option<HostInterface>; 2],
    families: Families,
) -> anyhow::Result<(MulticastConfig, Vec<OwnedFd>)> {
    let mut config = MulticastConfig::default();
    let mut sockets = Vec::new();
    for &service in services {
        if config.services.contains(&service) {
            continue;
        }
        config.services.push(service);
        for &address in service.groups() {
            let (link, has_family) = match address {
                IpAddr::V4(_) => (&links[0], families.v4),
                IpAddr::V6(_) => (&links[1], families.v6),
            };
            let Some(link) = link.as_ref().filter(|_| has_family) else { continue };
            let interface = link.name.clone();
            let joined = JoinedGroup { service, address, interface };
            sockets.push(open(service, address, link).with_context(|| joined.to_string())?);
            config.joined.push(joined);
        }
    }
    Ok((config, sockets))
}

fn open(service: Service, group: IpAddr, link: &HostInterface) -> io::Result<OwnedFd> {
    let at = match group {
        IpAddr::V4(_) => SocketAddr::new(group, service.port()),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, service.port(), 0, link.index).into(),
    };
    let hops = u32::from(service.hops());
    forward::bind_with(ForwardProtocol::Udp, at, |socket| {
        // Both: programs that share the port set one or the other.
        sockopt::set_socket_reuseaddr(socket, true)?;
        sockopt::set_socket_reuseport(socket, true)?;
        socket::bind_to_interface(socket, &link.name)?;
        match group {
            IpAddr::V4(ip) => {
                // A host that has asked is answered on the link, not by way of a router.
                socket::send_on_link_only(socket)?;
                let any = std::net::Ipv4Addr::UNSPECIFIED;
                sockopt::set_ip_add_membership_with_ifindex(socket, &ip, &any, link.index)?;
                sockopt::set_ip_multicast_ttl(socket, hops)?;
                sockopt::set_ip_ttl(socket, u8::MAX.into())?;
            }
            IpAddr::V6(ip) => {
                sockopt::set_ipv6_add_membership(socket, &ip, link.index)?;
                sockopt::set_ipv6_multicast_hops(socket, hops)?;
                sockopt::set_ipv6_unicast_hops(socket, Some(u8::MAX))?;
            }
        }
        Ok(())
    })
}

/// Rejects options that leave nothing to carry.
pub fn check(services: &[Service], without_udp: bool) -> anyhow::Result<()> {
    if !services.is_empty() && without_udp {
        bail!("--multicast is about UDP, and --no-udp leaves it out");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_of_a_family_without_link_or_address_is_left_out() {
        let link = || Some(HostInterface { index: 1, name: "lo".to_owned() });
        let groups = |links: &[Option<HostInterface>; 2], v4, v6| {
            let (config, sockets) = join(&Service::ALL, links, Families { v4, v6 }).unwrap();
            assert_eq!(config.services, Service::ALL);
            assert_eq!(config.joined.len(), sockets.len());
            config.joined.iter().map(|joined| joined.address.is_ipv4()).collect::<Vec<_>>()
        };
        assert_eq!(groups(&[link(), None], true, true), [true, true]);
        assert_eq!(groups(&[link(), link()], true, false), [true, true]);
        assert!(groups(&[None, None], true, true).is_empty());
        let none = [Some(HostInterface { index: 1, name: "none0".to_owned() }), None];
        let error = join(&[Service::Mdns], &none, Families { v4: true, v6: true }).unwrap_err();
        assert_eq!(error.to_string(), "--multicast mdns: 224.0.0.251 on none0");
    }

    #[test]
    fn services_are_named_and_others_are_refused_with_the_list() {
        assert_eq!("ssdp".parse(), Ok(Service::Ssdp));
        for text in ["", "MDNS", "llmnr"] {
            let error = text.parse::<Service>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("mdns and ssdp"), "{error}");
        }
        assert!(check(&[Service::Mdns], true).is_err() && check(&[], true).is_ok());
    }
}
