//! Access rules: destinations that the guest may reach, and the host addresses they stand for.

use core::net::{IpAddr, SocketAddr, SocketAddrV6};

pub use ringfence_base::address::IpPrefix;
use ringfence_base::address::without_zone;

/// Address rules of one guest.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Addresses that the guest may send from; any if empty.
    pub guest: Vec<IpAddr>,
    /// IPv6 prefixes of which the guest may choose addresses itself (SLAAC), beside `guest`. They are announced by
    /// router advertisements.
    pub guest_prefixes: Vec<IpPrefix>,
    /// Destinations that stand for the host's loopback address; none by default.
    pub host_loopback: Vec<IpAddr>,
    /// Destinations that stand for another address, of the host itself or of another host: guest-side address
    /// and real address, on every port.
    pub aliases: Vec<(IpAddr, IpAddr)>,
    /// Stand-ins for name servers of the host: guest-side address and real address, which may have a zone
    /// ([`ringfence_base::address::with_zone`]). Only port 53 is reachable.
    pub resolvers: Vec<(IpAddr, IpAddr)>,
    /// Name servers that the guest reaches by their own address, on port 53, even if the address is the host's
    /// own or link-local.
    pub name_servers: Vec<IpAddr>,
    /// Prefixes that the guest may reach although their addresses are the host's own or link-local.
    pub allow_local: Vec<IpPrefix>,
}

/// Reasons for which a destination is out of reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The address has no meaning outside the guest: loopback, multicast, unspecified.
    Unreachable,
    /// The address is the host's own, or link-local.
    Local,
    /// The destination is behind the upstream proxy, which carries TCP alone.
    NotProxied,
    /// The destination is the upstream proxy itself.
    Proxy,
    /// The substitute address stands for no name, or no more.
    NoName,
}

impl Refusal {
    /// Returns the reason for the egress record.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Refusal::Unreachable => "no other host has this address",
            Refusal::Local => {
                "the address is the host's own or link-local, and not allowed by an option"
            }
            Refusal::NotProxied => "the upstream proxy carries TCP alone",
            Refusal::Proxy => "only the uplink itself connects to the upstream proxy",
            Refusal::NoName => "no name has this substitute address now: ask for the name again",
        }
    }
}

/// Port of name servers.
const DNS: u16 = 53;

impl Access {
    /// Returns `true` if the guest may send from this address.
    pub fn source_is_allowed(&self, source: IpAddr) -> bool {
        let sane = !source.is_unspecified() && !source.is_multicast() && !source.is_loopback();
        sane && source != IpAddr::from([255; 4])
            && (self.guest.is_empty() || self.guest.contains(&source) || self.is_chosen(source))
    }

    /// Returns `true` for an address that the guest may choose itself.
    fn is_chosen(&self, source: IpAddr) -> bool {
        self.guest_prefixes.iter().any(|prefix| prefix.contains(source))
    }

    /// Returns the host's address for a destination of the guest. `is_own` returns `true` for the host's own
    /// addresses. A query to a stand-in is redirected to the name server. Protocols without ports use port 0.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the guest cannot, or must not, reach the destination.
    pub fn outward_to(
        &self,
        destination: SocketAddr,
        is_own: impl FnOnce(IpAddr) -> bool,
    ) -> Result<SocketAddr, Refusal> {
        let (ip, port) = (destination.ip(), destination.port());
        let stands_for = self.resolvers.iter().find(|(guest, _)| *guest == ip);
        if let Some((_, host)) = stands_for {
            return (port == DNS).then_some(with_zone(*host, port)).ok_or(Refusal::Unreachable);
        }
        if let Some((_, host)) = self.aliases.iter().find(|(guest, _)| *guest == ip) {
            return Ok((*host, port).into());
        }
        if self.host_loopback.contains(&ip) {
            let loopback = match ip {
                IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
            };
            return Ok((loopback, port).into());
        }
        if !Access::is_sane(ip) {
            return Err(Refusal::Unreachable);
        }
        let is_allowed = self.allow_local.iter().any(|prefix| prefix.contains(ip))
            || port == DNS && self.name_servers.contains(&ip);
        if !is_allowed && (is_link_local(ip) || is_own(ip)) {
            return Err(Refusal::Local);
        }
        Ok(destination)
    }

    /// Returns `true` for the DNS port of the guest's name servers.
    pub fn is_name_server(&self, to: SocketAddr) -> bool {
        let is_alias = self.resolvers.iter().any(|(guest, _)| *guest == to.ip());
        to.port() == DNS && (is_alias || self.name_servers.contains(&to.ip()))
    }

    /// Returns `true` if the address can belong to another host.
    fn is_sane(destination: IpAddr) -> bool {
        let embedded = match destination {
            IpAddr::V6(address) => address.to_ipv4_mapped().map(IpAddr::V4),
            IpAddr::V4(_) => None,
        };
        !destination.is_loopback()
            && !destination.is_unspecified()
            && !destination.is_multicast()
            && destination != IpAddr::from([255; 4])
            && embedded.is_none()
    }
}

/// Returns the socket address of a name server, with the zone that its address may have.
fn with_zone(host: IpAddr, port: u16) -> SocketAddr {
    match host {
        IpAddr::V4(_) => (host, port).into(),
        IpAddr::V6(ip) => {
            let (ip, zone) = without_zone(ip);
            SocketAddrV6::new(ip, port, 0, zone).into()
        }
    }
}

/// Returns `true` for 169.254.0.0/16 and fe80::/10: hosts of one link, and metadata services of clouds.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn nobody(_: IpAddr) -> bool {
        false
    }

    fn to(address: &str, port: u16) -> SocketAddr {
        (ip(address), port).into()
    }

    #[test]
    fn host_loopback_is_unreachable_unless_configured() {
        let mut access = Access::default();
        for address in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
            let refused = access.outward_to(to(address, 80), nobody);
            assert_eq!(refused, Err(Refusal::Unreachable), "{address}");
        }
        access.host_loopback.push(ip("192.0.2.1"));
        let own = |address| address == ip("192.0.2.1");
        assert_eq!(access.outward_to(to("192.0.2.1", 80), own), Ok(to("127.0.0.1", 80)));
        assert_eq!(access.outward_to(to("192.0.2.2", 80), own), Ok(to("192.0.2.2", 80)));
    }

    #[test]
    fn alias_leads_to_its_own_host_address_alone() {
        let own = |address: IpAddr| address == ip("192.0.2.2");
        let aliases = vec![(ip("169.254.1.2"), ip("192.0.2.2"))];
        let access = Access { aliases, ..Access::default() };
        assert_eq!(access.outward_to(to("169.254.1.2", 80), own), Ok(to("192.0.2.2", 80)));
        assert_eq!(access.outward_to(to("169.254.1.3", 80), own), Err(Refusal::Local));
        assert_eq!(access.outward_to(to("192.0.2.2", 80), own), Err(Refusal::Local));
    }

    #[test]
    fn own_and_link_local_destinations_are_refused_unless_allowed() {
        let own = |address: IpAddr| [ip("192.0.2.2"), ip("2001:db8::2")].contains(&address);
        let mut access = Access::default();
        let local = ["192.0.2.2", "2001:db8::2", "169.254.169.254", "fe80::1", "febf::1"];
        for address in local {
            for port in [0, 53, 80] {
                let refused = access.outward_to(to(address, port), own);
                assert_eq!(refused, Err(Refusal::Local), "{address} {port}");
            }
        }
        // Name servers are reachable on port 53 only.
        access.name_servers.extend(local.map(ip));
        for address in local {
            assert!(access.outward_to(to(address, 53), own).is_ok(), "{address}");
            assert!(access.outward_to(to(address, 80), own).is_err(), "{address}");
        }
        access.allow_local.extend([
            IpPrefix::new(ip("169.254.169.0"), 24),
            IpPrefix::new(ip("2001:db8::2"), 128),
        ]);
        assert!(access.outward_to(to("169.254.169.254", 80), own).is_ok());
        assert!(access.outward_to(to("2001:db8::2", 80), own).is_ok());
        assert!(access.outward_to(to("192.0.2.2", 80), own).is_err());
        assert!(access.outward_to(to("fe80::1", 80), own).is_err());
    }

    #[test]
    fn name_server_stand_in_is_reachable_on_port_53_only() {
        let (guest, host) = (ip("169.254.53.1"), ip("127.0.0.53"));
        let access = Access { resolvers: vec![(guest, host)], ..Access::default() };
        assert_eq!(access.outward_to((guest, 53).into(), nobody), Ok((host, 53).into()));
        assert!(access.outward_to((guest, 80).into(), nobody).is_err());
        assert_eq!(access.outward_to(to("192.0.2.2", 80), nobody), Ok(to("192.0.2.2", 80)));
        assert!(access.outward_to((host, 53).into(), nobody).is_err());
    }

    #[test]
    fn forged_source_is_refused() {
        let mut access = Access::default();
        assert!(access.source_is_allowed(ip("10.0.0.2")));
        for address in ["127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::1", "ff02::1"] {
            assert!(!access.source_is_allowed(ip(address)), "{address}");
        }
        access.guest.push(ip("10.0.0.2"));
        assert!(access.source_is_allowed(ip("10.0.0.2")));
        assert!(!access.source_is_allowed(ip("10.0.0.3")));
        access.guest_prefixes.push(IpPrefix::new(ip("2001:db8:1:2::"), 64));
        assert!(access.source_is_allowed(ip("2001:db8:1:2:a:b:c:d")));
        for address in ["2001:db8:1:3::1", "fe80::1", "::", "10.0.0.3"] {
            assert!(!access.source_is_allowed(ip(address)), "{address}");
        }
    }
}
