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

    /// Returns `true` if `text` is an address of a server, right or wrong, and no path: its scheme is `nbd` or `nbds`, in
    /// any letters and with any transport, or it has QEMU's older form `nbd:…`.
    pub fn is_meant(text: &str) -> bool {
        let Some((scheme, rest)) = text.split_once(':') else { return false };
        let scheme = scheme.to_ascii_lowercase();
        let (protocol, transport) = scheme.split_once('+').unwrap_or((&scheme, ""));
        let is_nbd = matches!(protocol, "nbd" | "nbds");
        is_nbd && (transport.is_empty() || rest.starts_with("//"))
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
    why: String,
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

/// Scheme of an address.
#[derive(Clone, Copy)]
struct Scheme {
    encrypted: bool,
    unix: bool,
}

impl Scheme {
    fn parse(scheme: &str) -> Result<Scheme, String> {
        let (encrypted, unix) = match scheme {
            "nbd" => (false, false),
            "nbd+unix" => (false, true),
            "nbds" => (true, false),
            "nbds+unix" => (true, true),
            _ => return Err(Scheme::refusal(scheme)),
        };
        Ok(Scheme { encrypted, unix })
    }

    fn refusal(scheme: &str) -> String {
        let small = scheme.to_ascii_lowercase();
        match small.split_once('+') {
            _ if small != scheme => format!("the scheme has small letters: {small}://"),
            Some(("nbd" | "nbds", "vsock")) => "servers at vsock are not supported".to_owned(),
            Some(("nbd" | "nbds", "ssh")) => {
                "servers behind ssh are not supported: forward a port (ssh -L)".to_owned()
            }
            _ => "the scheme is not known".to_owned(),
        }
    }
}

/// Parameters of an address.
#[derive(Default)]
struct Parameters {
    socket: Option<String>,
    certificates: Option<String>,
    hostname: Option<String>,
}

impl Parameters {
    fn parse(query: &str, scheme: Scheme) -> Result<Parameters, String> {
        let mut parameters = Parameters::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let place = match key {
                "socket" if !scheme.unix => {
                    return Err("socket= is for nbd+unix:// and nbds+unix://".to_owned());
                }
                "socket" => &mut parameters.socket,
                "tls-psk-file" | "tls-username" => return Err(format!("{key}: {NO_PSK}")),
                "tls-verify-peer" => {
                    return Err(format!("{key}: the server's certificate is always verified"));
                }
                "tls-certificates" | "tls-hostname" if !scheme.encrypted => {
                    return Err(format!("{key}= is for nbds:// and nbds+unix://"));
                }
                "tls-certificates" => &mut parameters.certificates,
                "tls-hostname" => &mut parameters.hostname,
                _ => {
                    return Err(format!(
                        "the parameter {key} is not known: there are socket, tls-certificates and \
                         tls-hostname"
                    ));
                }
            };
            let value = decode(value).ok_or_else(|| format!("{key} is not well encoded"))?;
            if value.is_empty() {
                return Err(format!("{key} has no value"));
            }
            if place.replace(value).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        Ok(parameters)
    }
}

/// Advice for addresses with pre-shared keys.
const NO_PSK: &str = "pre-shared keys (PSK) are not supported: a server needs a certificate (tls-certificates=DIRECTORY)";

/// Returns the reason for which QEMU's older form `nbd:…` is refused, with the address in the present form.
fn older_form(rest: &str) -> String {
    let (place, name) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    match place.strip_prefix("unix:") {
        Some(path) => format!("that is QEMU's older form: nbd+unix:///{name}?socket={path}"),
        None => format!("that is QEMU's older form: nbd://{place}/{name}"),
    }
}

fn parse(text: &str) -> Result<NbdAddress, String> {
    let Some((scheme, rest)) = text.split_once("://") else {
        let older = text.strip_prefix("nbd:").map(older_form);
        return Err(older.unwrap_or_else(|| "it has no ://".to_owned()));
    };
    let scheme = Scheme::parse(scheme)?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
    let name = decode(name).ok_or("the name is not well encoded")?;
    let Parameters { socket, certificates, hostname } = Parameters::parse(query, scheme)?;
    let tls = |host: &str| {
        scheme.encrypted.then(|| TlsFiles {
            directory: certificates.map_or_else(|| DIRECTORY_DEFAULT.into(), Into::into),
            hostname: hostname.unwrap_or_else(|| host.to_owned()),
        })
    };
    if place.contains('@') {
        return Err(format!("it has a user, as for PSK: {NO_PSK}"));
    }
    if scheme.unix {
        let path = socket.ok_or("the socket is missing")?.into();
        if !place.is_empty() {
            return Err("a Unix socket has no host".to_owned());
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
        assert_eq!(parse("nbd+unix://?&socket=%2Ftmp&"), "nbd+unix:///?socket=/tmp");
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

    #[test]
    fn text_in_any_form_of_address_is_no_path() {
        for text in [
            "nbd://x",
            "NBD://x",
            "Nbds+Unix:///x",
            "nbd+vsock://2",
            "nbd:unix:/s",
            "nbd:x:1",
            "nbd:",
        ] {
            assert!(NbdAddress::is_meant(text), "{text}");
        }
        for text in ["nbd", "nbd.img", "/nbd://x", "./nbd:x", "nbd+x:y", "x:nbd", "nbdx://", ""] {
            assert!(!NbdAddress::is_meant(text), "{text}");
        }
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
            ("nbd+unix:///x?socket=", "socket has no value"),
            ("nbd+unix:///x?socket=/a&socket=/b", "socket is given twice"),
            ("nbd+unix:///x?socket=/a&export=y", "the parameter export is not known"),
            ("nbd://x?Socket=/a", "the parameter Socket is not known"),
            ("nbd://x?socket=/a", "socket= is for nbd+unix://"),
            ("nbd://x?tls-hostname=y", "tls-hostname= is for nbds://"),
            ("nbds://x?tls-psk-file=/keys", "pre-shared keys (PSK) are not supported"),
            ("nbds://alice@x", "pre-shared keys (PSK) are not supported"),
            ("nbds://x?tls-verify-peer=0", "always verified"),
            ("NBD://x", "small letters: nbd://"),
            ("nbd+vsock://2:10809", "vsock are not supported"),
            ("nbds+vsock://2:10809", "vsock are not supported"),
            ("nbd+ssh://x", "ssh -L"),
            ("nbd:unix:/run/s:exportname=a", "nbd+unix:///a?socket=/run/s"),
            ("nbd:unix:/run/s", "nbd+unix:///?socket=/run/s"),
            ("nbd:example.org:10809:exportname=a", "nbd://example.org:10809/a"),
        ] {
            let error = text.parse::<NbdAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
