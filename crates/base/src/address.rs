//! Addresses of the link and IP layers.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Hardware address (MAC-48), in the order of the bytes on the wire.
pub type Mac = [u8; 6];

/// IP prefix: the addresses that begin with the first `len` bits of `ip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IpPrefix {
    pub ip: IpAddr,
    /// Length of the prefix in bits. Lengths beyond that of the address mean all of its bits.
    pub len: u8,
}

impl IpPrefix {
    /// Creates the prefix of this length that contains `ip`.
    pub fn new(ip: impl Into<IpAddr>, len: u8) -> IpPrefix {
        IpPrefix { ip: ip.into(), len }
    }

    /// Returns the number of bits of addresses of the same family.
    pub fn full_len(&self) -> u8 {
        if self.ip.is_ipv4() { 32 } else { 128 }
    }

    /// Returns `true` if the prefix contains the address; `false` if the families differ.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let len = u32::from(self.len);
        match (ip, self.ip) {
            (IpAddr::V4(ip), IpAddr::V4(prefix)) => {
                let differing = ip.to_bits() ^ prefix.to_bits();
                differing.checked_shr(32_u32.saturating_sub(len)).unwrap_or(0) == 0
            }
            (IpAddr::V6(ip), IpAddr::V6(prefix)) => {
                let differing = ip.to_bits() ^ prefix.to_bits();
                differing.checked_shr(128_u32.saturating_sub(len)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }

    /// Returns the prefix with the bits behind its length set to zero.
    #[must_use]
    pub fn masked(self) -> IpPrefix {
        let ip = match self.ip {
            IpAddr::V4(ip) => {
                let behind = u32::MAX.checked_shr(self.len.into()).unwrap_or(0);
                Ipv4Addr::from_bits(ip.to_bits() & !behind).into()
            }
            IpAddr::V6(ip) => {
                let behind = u128::MAX.checked_shr(self.len.into()).unwrap_or(0);
                Ipv6Addr::from_bits(ip.to_bits() & !behind).into()
            }
        };
        IpPrefix { ip, ..self }
    }
}

/// Link-local IPv6 address together with the index of an interface, its zone (RFC 4007). The index is in bytes 4 to 7, which
/// are zero in such an address (RFC 4291, 2.5.6). Never sent; [`without_zone`] separates them.
pub fn with_zone(ip: Ipv6Addr, index: u32) -> Ipv6Addr {
    let mut octets = ip.octets();
    octets[4..8].copy_from_slice(&index.to_be_bytes());
    octets.into()
}

/// Returns the address and the index of an address from [`with_zone`]. The index of all other addresses is 0.
pub fn without_zone(ip: Ipv6Addr) -> (Ipv6Addr, u32) {
    let mut octets = ip.octets();
    let [0xfe, 0x80, _, _, a, b, c, d, ..] = octets else { return (ip, 0) };
    octets[4..8].fill(0);
    (octets.into(), u32::from_be_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn zone_of_a_link_local_address_is_separated_again() {
        let ip: Ipv6Addr = "fe80::53".parse().unwrap();
        assert_eq!(without_zone(with_zone(ip, 0x0102_0304)), (ip, 0x0102_0304));
        assert_eq!(without_zone(ip), (ip, 0));
        let other: Ipv6Addr = "2001:db8:1:2:3::4".parse().unwrap();
        assert_eq!(without_zone(other), (other, 0));
    }

    #[test]
    fn prefix_contains_addresses_of_its_family_only() {
        let prefix = |text: &str, len| IpPrefix::new(ip(text), len);
        assert!(prefix("10.1.0.0", 16).contains(ip("10.1.2.3")));
        assert!(!prefix("10.1.0.0", 16).contains(ip("10.2.2.3")));
        assert!(prefix("0.0.0.0", 0).contains(ip("10.2.2.3")));
        assert!(!prefix("0.0.0.0", 0).contains(ip("::1")));
        assert!(prefix("::", 0).contains(ip("::1")) && !prefix("::", 128).contains(ip("::1")));
    }

    #[test]
    fn masked_prefix_has_no_bits_behind_its_length() {
        let masked = |text: &str, len| IpPrefix::new(ip(text), len).masked().ip;
        assert_eq!(masked("10.1.2.3", 16), ip("10.1.0.0"));
        assert_eq!(masked("10.1.2.3", 32), ip("10.1.2.3"));
        assert_eq!(masked("10.1.2.3", 0), ip("0.0.0.0"));
        assert_eq!(masked("2001:db8::1", 32), ip("2001:db8::"));
    }
}
