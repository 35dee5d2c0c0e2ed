//! IP address with prefix length, as users write it: `10.0.0.2/24`, `fd00::2/64`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// IP address and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    ip: IpAddr,
    prefix: u8,
}

/// Reasons for which a text or address is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The prefix length is missing.
    #[error("`{0}` has no prefix length; write for example `{0}/{example}`", example = if .0.is_ipv4() { 24 } else { 64 })]
    NoLength(IpAddr),
    /// The text before the `/` is not an IP address.
    #[error("`{0}` is not an IPv4 or IPv6 address")]
    NoAddress(String),
    /// The prefix length is not a number, or out of range.
    #[error("`/{length}` is not a prefix length of 1 to {max}")]
    Length {
        /// Length as it was written.
        length: String,
        /// Maximum length for this address family.
        max: u8,
    },
    /// The address cannot belong to one host.
    #[error("{0} cannot be the address of one host; give for example 10.0.0.2/24 or fd00::2/64")]
    NotUnicast(IpAddr),
    /// All bits of the host part are 0.
    #[error("{0} is the address of the network itself; give an address of one host in it")]
    Network(Address),
    /// All bits of the host part are 1.
    #[error("{0} is the broadcast address of its network; give an address of one host in it")]
    Broadcast(Address),
    /// The address is link-local, which every interface has automatically.
    #[error(
        "{0} is link-local; give an address of a network, for example 10.0.0.2/24 or fd00::2/64"
    )]
    LinkLocal(IpAddr),
    /// The address is an IPv4 address in IPv6 notation.
    #[error("{0} is an IPv4 address in IPv6 notation; write {1}/24, with its own prefix length")]
    Mapped(Ipv6Addr, Ipv4Addr),
}

impl Address {
    /// Creates an address with a prefix length in bits.
    ///
    /// # Errors
    ///
    /// Returns [`AddressError`] if the length is 0 or exceeds the address's length, or no host can
    /// have the address.
    pub fn new(ip: IpAddr, prefix: u8) -> Result<Address, AddressError> {
        let max = max_prefix(ip);
        if !(1..=max).contains(&prefix) {
            return Err(AddressError::Length { length: prefix.to_string(), max });
        }
        let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast() || ip.octets()[0] == 0);
        if ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || broadcast {
            return Err(AddressError::NotUnicast(ip));
        }
        Ok(Address { ip, prefix })
    }

    /// Parses an address that a guest on a switch can have.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Address::new`] and [`Address::check_assignable`].
    pub fn parse_assignable(text: &str) -> Result<Address, AddressError> {
        let address: Address = text.parse()?;
        address.check_assignable().map(|()| address)
    }

    /// Checks that a guest on a switch can have the address.
    ///
    /// # Errors
    ///
    /// Returns [`AddressError`] for network and broadcast addresses, link-local addresses and IPv4
    /// addresses in IPv6 notation. Networks of one or two addresses (RFC 3021, RFC 6164) have only
    /// host addresses.
    pub fn check_assignable(self) -> Result<(), AddressError> {
        let hosts = u32::from(max_prefix(self.ip)) - u32::from(self.prefix);
        let (link_local, zeros, ones) = match self.ip {
            IpAddr::V4(ip) => {
                let bits = ip.to_bits();
                (ip.is_link_local(), bits.trailing_zeros(), bits.trailing_ones())
            }
            IpAddr::V6(ip) => {
                if let Some(v4) = ip.to_ipv4_mapped() {
                    return Err(AddressError::Mapped(ip, v4));
                }
                (ip.is_unicast_link_local(), ip.to_bits().trailing_zeros(), 0)
            }
        };
        match hosts {
            _ if link_local => Err(AddressError::LinkLocal(self.ip)),
            2.. if zeros >= hosts => Err(AddressError::Network(self)),
            2.. if ones >= hosts => Err(AddressError::Broadcast(self)),
            _ => Ok(()),
        }
    }

    /// Returns the IP address.
    pub fn ip(self) -> IpAddr {
        self.ip
    }

    /// Returns the prefix length in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Returns `true` if the two networks have an address in common.
    pub fn overlaps(self, other: Address) -> bool {
        let common = u32::from(self.prefix.min(other.prefix));
        match (self.ip, other.ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= common,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= common,
            _ => false,
        }
    }
}

fn max_prefix(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let Some((ip, length)) = text.split_once('/') else {
            let ip: IpAddr = text.parse().map_err(|_| AddressError::NoAddress(text.to_owned()))?;
            return Err(AddressError::NoLength(ip));
        };
        let ip: IpAddr = ip.parse().map_err(|_| AddressError::NoAddress(ip.to_owned()))?;
        let digits = !length.is_empty() && length.bytes().all(|b| b.is_ascii_digit());
        let prefix = length.parse().ok().filter(|_| digits).ok_or_else(|| {
            AddressError::Length { length: length.to_owned(), max: max_prefix(ip) }
        })?;
        Address::new(ip, prefix)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

/// Formats addresses for messages.
pub fn list(addresses: &[Address]) -> String {
    let texts: Vec<String> = addresses.iter().map(Address::to_string).collect();
    if texts.is_empty() { "no address".to_owned() } else { texts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn networks_overlap_when_one_holds_the_other() {
        let overlap = |a: &str, b: &str| {
            let (a, b): (Address, Address) = (a.parse().unwrap(), b.parse().unwrap());
            assert_eq!(a.overlaps(b), b.overlaps(a));
            a.overlaps(b)
        };
        assert!(overlap("10.1.2.3/16", "10.1.9.9/24"));
        assert!(!overlap("10.1.2.3/16", "10.2.2.3/24"));
        assert!(overlap("192.0.2.1/32", "192.0.2.1/32"));
        assert!(!overlap("192.0.2.1/24", "2001:db8::1/64"));
        assert!(overlap("2001:db8::1/64", "2001:db8::2/64"));
        assert!(!overlap("2001:db8:1::1/64", "2001:db8::2/64"));
    }

    #[test]
    fn displayed_address_parses_to_the_same_value() {
        for text in ["10.0.0.2/24", "fd00::2/64", "192.0.2.1/32", "2001:db8::1/128"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn malformed_address_returns_its_own_error() {
        let fault = |text: &str| text.parse::<Address>().unwrap_err();
        assert_eq!(
            fault("10.0.0.2").to_string(),
            "`10.0.0.2` has no prefix length; write for example `10.0.0.2/24`"
        );
        assert_eq!(
            fault("fd00::2").to_string(),
            "`fd00::2` has no prefix length; write for example `fd00::2/64`"
        );
        assert_eq!(fault("web"), AddressError::NoAddress("web".into()));
        assert_eq!(fault("10.0.0/24"), AddressError::NoAddress("10.0.0".into()));
        assert!(matches!(fault("10.0.0.2/33"), AddressError::Length { max: 32, .. }));
        assert!(matches!(fault("fd00::2/129"), AddressError::Length { max: 128, .. }));
        assert!(matches!(fault("10.0.0.2/+8"), AddressError::Length { .. }));
        assert!(matches!(fault("10.0.0.2/0"), AddressError::Length { .. }));
        assert!(matches!(fault("224.0.0.1/4"), AddressError::NotUnicast(_)));
        assert!(matches!(fault("127.0.0.1/8"), AddressError::NotUnicast(_)));
    }

    #[test]
    fn address_that_no_guest_can_have_is_refused() {
        use AddressError::{Broadcast, LinkLocal, Mapped, Network, NotUnicast};
        let fault = |text: &str| Address::parse_assignable(text).unwrap_err();
        assert!(matches!(fault("10.0.0.0/24"), Network(_)));
        assert!(matches!(fault("10.0.128.0/17"), Network(_)));
        assert!(matches!(fault("fd00::/64"), Network(_)));
        assert!(matches!(fault("10.0.0.255/24"), Broadcast(_)));
        assert!(matches!(fault("10.0.255.255/16"), Broadcast(_)));
        assert!(matches!(fault("169.254.1.2/16"), LinkLocal(_)));
        assert!(matches!(fault("fe80::2/64"), LinkLocal(_)));
        assert!(matches!(fault("::ffff:10.0.0.2/120"), Mapped(..)));
        assert!(fault("::ffff:10.0.0.2/120").to_string().contains("write 10.0.0.2/24"));
        for text in ["0.0.0.0/8", "0.1.2.3/8", "255.255.255.255/8", "224.0.0.1/4", "::/64"] {
            assert!(matches!(fault(text), NotUnicast(_)), "{text}");
        }
        for text in ["127.0.0.2/8", "ff02::1/64", "::1/64"] {
            assert!(matches!(fault(text), NotUnicast(_)), "{text}");
        }
        for text in ["10.0.0.0/31", "10.0.0.1/31", "10.0.0.255/32", "10.0.1.0/16", "fd00::/127"] {
            assert!(Address::parse_assignable(text).is_ok(), "{text}");
        }
        for text in ["10.0.0.254/24", "fd00::ffff:ffff:ffff:ffff/64", "fd00::1:0/64"] {
            assert!(Address::parse_assignable(text).is_ok(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_or_rejected(text in ".{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
            }
        }
    }
}
