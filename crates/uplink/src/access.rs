//! Who may reach whom: which address of the host's network a destination of the guest stands for.

use core::net::{IpAddr, SocketAddr};

/// Rules for addresses.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Addresses that the guest may send from; any, when there are none.
    pub guest: Vec<IpAddr>,
    /// Destinations that stand for the host's loopback address: none, unless that was asked for.
    pub host_loopback: Vec<IpAddr>,
    /// Destinations that stand for name servers of the host's, and those. Queries alone go there.
    pub resolvers: Vec<(IpAddr, IpAddr)>,
}

/// The port of name servers.
const DNS: u16 = 53;

impl Access {
    /// Whether the guest may send from this address.
    pub fn source_is_allowed(&self, source: IpAddr) -> bool {
        let sane = !source.is_unspecified() && !source.is_multicast() && !source.is_loopback();
        sane && source != IpAddr::from([255; 4])
            && (self.guest.is_empty() || self.guest.contains(&source))
    }

    /// The same as [`outward`](Self::outward), with the port: a query to a stand-in goes to the name
    /// server.
    pub fn outward_to(&self, destination: SocketAddr) -> Option<SocketAddr> {
        let stands_for = self.resolvers.iter().find(|(guest, _)| *guest == destination.ip());
        let ip = match stands_for {
            Some((_, host)) => (destination.port() == DNS).then_some(*host),
            None => self.outward(destination.ip()),
        };
        Some(SocketAddr::new(ip?, destination.port()))
    }

    /// The host's address for a destination of the guest; `None` when there is no way.
    pub fn outward(&self, destination: IpAddr) -> Option<IpAddr> {
        if self.host_loopback.contains(&destination) {
            return Some(match destination {
                IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
            });
        }
        let embedded = match destination {
            IpAddr::V6(address) => address.to_ipv4_mapped().map(IpAddr::V4),
            IpAddr::V4(_) => None,
        };
        let reachable = !destination.is_loopback()
            && !destination.is_unspecified()
            && !destination.is_multicast()
            && destination != IpAddr::from([255; 4])
            && embedded.is_none();
        reachable.then_some(destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_hosts_loopback_is_out_of_reach_unless_asked_for() {
        let mut access = Access::default();
        for address in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
            assert_eq!(access.outward(ip(address)), None, "{address}");
        }
        access.host_loopback.push(ip("192.0.2.1"));
        assert_eq!(access.outward(ip("192.0.2.1")), Some(ip("127.0.0.1")));
        assert_eq!(access.outward(ip("192.0.2.2")), Some(ip("192.0.2.2")));
    }

    #[test]
    fn a_stand_in_for_a_name_server_is_asked_for_names_alone() {
        let (guest, host) = (ip("169.254.53.1"), ip("127.0.0.53"));
        let access = Access { resolvers: vec![(guest, host)], ..Access::default() };
        assert_eq!(access.outward_to((guest, 53).into()), Some((host, 53).into()));
        assert_eq!(access.outward_to((guest, 80).into()), None);
        assert_eq!(
            access.outward_to((ip("192.0.2.2"), 80).into()),
            Some((ip("192.0.2.2"), 80).into())
        );
        assert_eq!(access.outward_to((host, 53).into()), None);
    }

    #[test]
    fn forged_sources_are_refused() {
        let mut access = Access::default();
        assert!(access.source_is_allowed(ip("10.0.0.2")));
        for address in ["127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::1", "ff02::1"] {
            assert!(!access.source_is_allowed(ip(address)), "{address}");
        }
        access.guest.push(ip("10.0.0.2"));
        assert!(access.source_is_allowed(ip("10.0.0.2")));
        assert!(!access.source_is_allowed(ip("10.0.0.3")));
    }
}
