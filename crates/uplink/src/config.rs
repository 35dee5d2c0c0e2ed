//! What an uplink is told when it is made.

use core::net::SocketAddr;

use crate::access::Access;
use crate::guest::GuestNetwork;
use crate::share::Share;
use crate::tcp::TcpConfig;

/// Hardware address of the router that a guest sees, where none is given: locally administered.
pub const MAC_DEFAULT: [u8; 6] = [0x52, 0x46, 0x00, 0x00, 0x00, 0x01];

/// What an uplink is told when it is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// The uplink's own hardware address on the link.
    pub mac: [u8; 6],
    /// Octets behind the Ethernet header that a packet has at most, both ways.
    pub mtu: u16,
    /// Who may reach whom.
    pub access: Access,
    /// TCP.
    pub tcp: TcpConfig,
    /// The guest's side.
    pub guest: GuestNetwork,
    /// Which of the guest's engines this one is.
    pub share: Share,
}

impl Config {
    /// What a client from outside is called in the guest's network: as it is called outside, but for
    /// those addresses that in the guest mean the guest itself. The host is the router then.
    pub fn inward(&self, client: SocketAddr) -> SocketAddr {
        let ip = client.ip().to_canonical();
        let means_guest = ip.is_loopback() || self.guest.has(ip);
        let router = self.guest.gateways.iter().find(|gateway| gateway.is_ipv4() == ip.is_ipv4());
        let known_as = router.copied().filter(|_| means_guest).unwrap_or(ip);
        SocketAddr::new(known_as, client.port())
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            mac: MAC_DEFAULT,
            mtu: 65_520,
            access: Access::default(),
            tcp: TcpConfig::default(),
            guest: GuestNetwork::default(),
            share: Share::default(),
        }
    }
}
