//! Addresses of NBD servers, as URIs.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::tls::DIRECTORY_DEFAULT;

/// Port number assigned to NBD.
const PORT: u16 = 10809;

/// Address of a server, name of the export, and TLS settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdAddress {
    /// `nbd://HOST[:PORT][/NAME]`.
    Tcp {
        /// Host name or IP address.
        host: String,
        /// TCP port number.
        port: u16,
        /// Name of the export; empty for the server's default.
        name: String,
        /// TLS settings, for `nbds://`.
        tls: Option<TlsFiles>,
    },
    /// `nbd+unix:///[NAME]?socket=PATH`.
    Unix {
        path: PathBuf,
        /// Name of the export; empty for the server's default.
        name: String,
        /// TLS settings, for `nbds+unix://`.
        tls: Option<TlsFiles>,
    },
}

/// Certificates and server name of an encrypted connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Directory of `ca-cert.pem`, and optionally `client-cert.pem` and `client-key.pem`
    /// (`tls-certificates=DIRECTORY`).
    pub directory: PathBuf,
    /// Name in the server's certificate (`tls-hostname=NAME`).
    pub hostname: String,
}

impl NbdAddress {
    /// Returns the name of the export.
    pub fn name(&self) -> &str {
        match self {
            NbdAddress::Tcp { name, .. } | NbdAddress::Unix { name, .. } => name,
        }
    }

    /// Returns the TLS settings, if the connection is encrypted.
    pub fn tls(&self) -> Option<&TlsFiles> {
        match self {
            NbdAddress::Tcp { tls, .. } | NbdAddress::Unix { tls, .. } => tls.as_ref(),
        }
    }

    /// Returns `true` if `text` has the scheme of a server address, not a path.
    pub fn is_meant(text: &str) -> bool {
        ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"]
            .iter()
            .any(|scheme| text.starts_with(scheme))
    }
}

/// Error of a text that is no server address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{text} is no NBD address ({why}): write nbd://HOST[:PORT][/NAME] or \
     nbd+unix:///[NAME]?socket=PATH; with TLS nbds:// or nbds+unix://, and \
     ?tls-certificates=DIRECTORY&tls-hostname=NAME"
)]
pub struct BadAddress {
    text: String,
    why: &'static str,
}

/// Decodes the percent-encoded bytes of a URI.
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

/// Parses a host and an optional port.
fn parse_host_and_port(place: &str) -> Result<(String, u16), &'static str> {
    let (host, port) = match place.strip_prefix('[') {
        // An IPv6 address contains colons.
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
    if host.is_empty() { Err("the host is missing") } else { Ok((host.to_owned(), port)) }
}

fn parse(text: &str) -> Result<NbdAddress, &'static str> {
    let (scheme, rest) = text.split_once("://").ok_or("it has no ://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
    let name = decode(name).ok_or("the name is not well encoded")?;
    let asked = |key: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        found.and_then(decode).filter(|value| !value.is_empty())
    };
    let encrypted = match scheme {
        "nbd" | "nbd+unix" => false,
        "nbds" | "nbds+unix" => true,
        _ => return Err("the scheme is not known"),
    };
    let tls = |host: &str| {
        encrypted.then(|| TlsFiles {
            directory: asked("tls-certificates")
                .map_or_else(|| DIRECTORY_DEFAULT.into(), Into::into),
            hostname: asked("tls-hostname").unwrap_or_else(|| host.to_owned()),
        })
    };
    if scheme.ends_with("+unix") {
        let path = asked("socket").ok_or("the socket is missing")?.into();
        if !place.is_empty() {
            return Err("a Unix socket has no host");
        }
        return Ok(NbdAddress::Unix { path, name, tls: tls("localhost") });
    }
    let (host, port) = parse_host_and_port(place)?;
    let tls = tls(&host);
    Ok(NbdAddress::Tcp { host, port, name, tls })
}

impl FromStr for NbdAddress {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<NbdAddress, BadAddress> {
        parse(text).map_err(|why| BadAddress { text: text.to_owned(), why })
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.tls().is_some() { "s" } else { "" };
        match self {
            NbdAddress::Tcp { host, port, name, .. } if host.contains(':') => {
                write!(f, "nbd{s}://[{host}]:{port}/{name}")
            }
            NbdAddress::Tcp { host, port, name, .. } => write!(f, "nbd{s}://{host}:{port}/{name}"),
            NbdAddress::Unix { path, name, .. } => {
                write!(f, "nbd{s}+unix:///{name}?socket={}", path.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_in_each_form_is_parsed() {
        let parse = |text: &str| text.parse::<NbdAddress>().unwrap().to_string();
        assert_eq!(parse("nbd://example.org"), "nbd://example.org:10809/");
        assert_eq!(parse("nbd://[::1]:99/a%20disk"), "nbd://[::1]:99/a disk");
        assert_eq!(parse("nbd+unix:///x?socket=/tmp/s"), "nbd+unix:///x?socket=/tmp/s");
        assert_eq!(parse("nbd+unix://?a=b&socket=%2Ftmp"), "nbd+unix:///?socket=/tmp");
    }

    #[test]
    fn tls_address_has_certificate_directory_and_hostname() {
        let tls = |text: &str| text.parse::<NbdAddress>().unwrap().tls().cloned();
        assert_eq!(tls("nbd://x"), None);
        let default = tls("nbds://example.org/x").unwrap();
        assert_eq!(default.hostname, "example.org");
        assert_eq!(default.directory, PathBuf::from(DIRECTORY_DEFAULT));
        let text = "nbds+unix:///?socket=/s&tls-hostname=there&tls-certificates=/c";
        let given = tls(text).unwrap();
        assert_eq!((given.hostname.as_str(), given.directory), ("there", PathBuf::from("/c")));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,60}", scheme in 0usize..5) {
            let scheme = ["", "nbd://", "nbds://", "nbd+unix://", "nbds+unix://"][scheme];
            if let Ok(address) = format!("{scheme}{text}").parse::<NbdAddress>() {
                proptest::prop_assert!(!address.name().contains('\0'));
            }
        }
    }

    #[test]
    fn invalid_address_is_refused_with_reason() {
        for (text, why) in [
            ("example.org", "no ://"),
            ("http://x", "scheme"),
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
