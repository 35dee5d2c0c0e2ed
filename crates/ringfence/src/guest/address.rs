//! An address on a network, as users write it: `10.0.0.2/24`, `fd00::2/64`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An address and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    ip: IpAddr,
    prefix: u8,
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// There is no length.
    #[error("`{0}` has no prefix length; write for example `{0}/24`")]
    NoLength(String),
    /// What comes before the `/` is no address.
    #[error("`{0}` is not an IPv4 or IPv6 address")]
    NoAddress(String),
    /// The length is no number, or too large.
    #[error("`/{length}` is not a prefix length of 1 to {max}")]
    Length {
        /// What was written.
        length: String,
        /// The most there is.
        max: u8,
    },
    /// No host can have it.
    #[error("{0} cannot be the address of one host")]
    NotUnicast(IpAddr),
}

impl Address {
    /// An address with the length of its prefix in bits.
    ///
    /// # Errors
    ///
    /// [`AddressError`] when the length is 0 or over that of the address, or no host can have the
    /// address.
    pub fn new(ip: IpAddr, prefix: u8) -> Result<Address, AddressError> {
        let max = max_prefix(ip);
        if !(1..=max).contains(&prefix) {
            return Err(AddressError::Length { length: prefix.to_string(), max });
        }
        let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        if ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || broadcast {
            return Err(AddressError::NotUnicast(ip));
        }
        Ok(Address { ip, prefix })
    }

    /// The address.
    pub fn ip(self) -> IpAddr {
        self.ip
    }

    /// The length of the network's prefix, in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the networks of both have an address in common.
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
            return Err(AddressError::NoLength(ip.to_string()));
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
    fn what_is_written_is_what_is_read() {
        for text in ["10.0.0.2/24", "fd00::2/64", "192.0.2.1/32", "2001:db8::1/128"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn each_mistake_is_named() {
        let fault = |text: &str| text.parse::<Address>().unwrap_err();
        assert_eq!(fault("10.0.0.2"), AddressError::NoLength("10.0.0.2".into()));
        assert_eq!(fault("web"), AddressError::NoAddress("web".into()));
        assert_eq!(fault("10.0.0/24"), AddressError::NoAddress("10.0.0".into()));
        assert!(matches!(fault("10.0.0.2/33"), AddressError::Length { max: 32, .. }));
        assert!(matches!(fault("fd00::2/129"), AddressError::Length { max: 128, .. }));
        assert!(matches!(fault("10.0.0.2/+8"), AddressError::Length { .. }));
        assert!(matches!(fault("10.0.0.2/0"), AddressError::Length { .. }));
        assert!(matches!(fault("224.0.0.1/4"), AddressError::NotUnicast(_)));
        assert!(matches!(fault("127.0.0.1/8"), AddressError::NotUnicast(_)));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
            }
        }
    }
}
