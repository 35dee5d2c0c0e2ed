//! What an uplink is told when it is made.

use crate::access::Access;
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
}

impl Default for Config {
    fn default() -> Self {
        Config {
            mac: MAC_DEFAULT,
            mtu: 65_520,
            access: Access::default(),
            tcp: TcpConfig::default(),
        }
    }
}
