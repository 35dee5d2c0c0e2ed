//! Where a server is.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port that was assigned to NBD.
const PORT: u16 = 10809;

/// Where a server is, and which of its disks is meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdAddress {
    /// `nbd://HOST[:PORT][/NAME]`.
    Tcp {
        /// A name, or an address.
        host: String,
        /// The port.
        port: u16,
        /// The export; empty for the server's choice.
        name: String,
    },
    /// `nbd+unix:///[NAME]?socket=PATH`.
    Unix {
        /// The socket.
        path: PathBuf,
        /// The export; empty for the server's choice.
        name: String,
    },
}

impl NbdAddress {
    /// The export.
    pub fn name(&self) -> &str {
        match self {
            NbdAddress::Tcp { name, .. } | NbdAddress::Unix { name, .. } => name,
        }
    }
}

/// What is no address of a server.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{text} is no NBD address ({why}): write nbd://HOST[:PORT][/NAME] or \
     nbd+unix:///[NAME]?socket=PATH"
)]
pub struct BadAddress {
    text: String,
    why: &'static str,
}

/// Undoes `%41`.
fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = vec![];
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(decoded).ok().filter(|text| !text.contains('\0'))
}

fn parse(text: &str) -> Result<NbdAddress, &'static str> {
    let (scheme, rest) = text.split_once("://").ok_or("it has no ://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
    let name = decode(name).ok_or("the name is not well encoded")?;
    match scheme {
        "nbd" => {
            let (host, port) = match place.strip_prefix('[') {
                // An IPv6 address has colons of its own.
                Some(rest) => {
                    let (host, port) = rest.split_once(']').ok_or("a ] is missing")?;
                    (host, port.strip_prefix(':'))
                }
                None => match place.split_once(':') {
                    Some((host, port)) => (host, Some(port)),
                    None => (place, None),
                },
            };
            let port = port.map_or(Ok(PORT), str::parse).map_err(|_| "the port is no number")?;
            if host.is_empty() {
                return Err("the host is missing");
            }
            Ok(NbdAddress::Tcp { host: host.to_owned(), port, name })
        }
        "nbd+unix" => {
            let path = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
            let path = path.and_then(decode).filter(|path| !path.is_empty());
            let path = path.ok_or("the socket is missing")?;
            if !place.is_empty() {
                return Err("a Unix socket has no host");
            }
            Ok(NbdAddress::Unix { path: path.into(), name })
        }
        "nbds" | "nbds+unix" => Err("TLS is not supported"),
        _ => Err("the scheme is not known"),
    }
}

impl FromStr for NbdAddress {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<NbdAddress, BadAddress> {
        parse(text).map_err(|why| BadAddress { text: text.to_owned(), why })
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddress::Tcp { host, port, name } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{name}")
            }
            NbdAddress::Tcp { host, port, name } => write!(f, "nbd://{host}:{port}/{name}"),
            NbdAddress::Unix { path, name } => {
                write!(f, "nbd+unix:///{name}?socket={}", path.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_others_write_them() {
        let parse = |text: &str| text.parse::<NbdAddress>().unwrap().to_string();
        assert_eq!(parse("nbd://example.org"), "nbd://example.org:10809/");
        assert_eq!(parse("nbd://[::1]:99/a%20disk"), "nbd://[::1]:99/a disk");
        assert_eq!(parse("nbd+unix:///x?socket=/tmp/s"), "nbd+unix:///x?socket=/tmp/s");
        assert_eq!(parse("nbd+unix://?a=b&socket=%2Ftmp"), "nbd+unix:///?socket=/tmp");
    }

    #[test]
    fn what_is_no_address_is_refused_with_a_reason() {
        for (text, why) in [
            ("example.org", "no ://"),
            ("http://x", "scheme"),
            ("nbds://x", "TLS"),
            ("nbd://", "host"),
            ("nbd://x:y", "port"),
            ("nbd://x/%zz", "encoded"),
            ("nbd+unix:///x", "socket"),
            ("nbd+unix://host/x?socket=/s", "no host"),
        ] {
            let error = text.parse::<NbdAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
