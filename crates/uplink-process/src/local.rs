//! `--allow-local`: addresses of the host itself, or of its link, that a guest may reach.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ringfence_base::address::IpPrefix;
use serde::{Deserialize, Serialize};

/// Address prefix: `IP` or `IP/LEN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPrefix(#[serde(with = "SerializedPrefix")] pub IpPrefix);

/// Fields of a prefix in messages.
#[derive(Serialize, Deserialize)]
#[serde(remote = "IpPrefix")]
struct SerializedPrefix {
    ip: IpAddr,
    len: u8,
}

/// Reasons for which an argument of `--allow-local` is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalPrefixError {
    /// The text is neither an address nor an address with a length.
    #[error("`{0}` is neither an address nor a prefix such as 192.0.2.0/24")]
    Prefix(String),
    /// The address is a loopback address.
    #[error("{0} is the loopback of the guest: --host-loopback IP leads to that of the host")]
    Loopback(IpAddr),
}

impl FromStr for LocalPrefix {
    type Err = LocalPrefixError;

    fn from_str(text: &str) -> Result<LocalPrefix, LocalPrefixError> {
        let wrong = || LocalPrefixError::Prefix(text.to_owned());
        let (ip, len) = match text.split_once('/') {
            Some((ip, len)) => (ip, Some(len)),
            None => (text, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| wrong())?;
        let full = IpPrefix::new(ip, 0).full_len();
        let is_number = |len: &&str| len.bytes().all(|byte| byte.is_ascii_digit());
        let len = match len {
            Some(len) => Some(len).filter(is_number).and_then(|len| len.parse().ok()),
            None => Some(full),
        };
        let len = len.filter(|len| *len <= full).ok_or_else(wrong)?;
        if ip.is_loopback() {
            return Err(LocalPrefixError::Loopback(ip));
        }
        Ok(LocalPrefix(IpPrefix::new(ip, len)))
    }
}

impl fmt::Display for LocalPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.ip, self.0.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_an_address_with_or_without_a_length() {
        let read = |text: &str| text.parse::<LocalPrefix>().map(|prefix| prefix.to_string());
        assert_eq!(read("169.254.169.254").unwrap(), "169.254.169.254/32");
        assert_eq!(read("192.168.0.0/16").unwrap(), "192.168.0.0/16");
        assert_eq!(read("fe80::/10").unwrap(), "fe80::/10");
        for text in ["", "host", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/", "127.0.0.1", "::1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn prefix_is_serialized_as_address_and_length() {
        let prefix: LocalPrefix = "192.168.0.0/16".parse().unwrap();
        let text = serde_json::to_string(&prefix).unwrap();
        assert_eq!(text, "{\"ip\":\"192.168.0.0\",\"len\":16}");
        assert_eq!(serde_json::from_str::<LocalPrefix>(&text).unwrap(), prefix);
    }
}
