//! Upstream proxy on the command line: its address, its credentials, and their look-up before the uplink's process starts.
//!
//! The proxy's name is looked up once, by the host's resolver and outside of any sandbox. After a change of its addresses the guest
//! must be started again.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv6Addr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail};
use ringfence_policy::HostName;
pub use ringfence_policy::substitutes::NAME_SERVERS;
use ringfence_uplink::upstream::{Credentials, ProxyKind, ProxySettings};

/// Heading of the options about the proxy.
const HEADING: &str = "Egress";
/// Maximum number of addresses of a proxy that are tried.
const ADDRESSES_MAX: usize = 8;
/// Maximum length of a file of credentials in bytes: user, password, colon and end of line.
const CREDENTIALS_MAX: u64 = 2 * Credentials::LENGTH_MAX as u64 + 3;

/// Options about the proxy that carries the guest's connections.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProxyArgs {
    /// Reach other hosts by this proxy alone, over TCP
    ///
    /// The rules decide before the proxy is asked, and it is asked for names: it looks them up. UDP (with QUIC) and `ping` to other
    /// hosts are refused. The guest cannot connect to the proxy itself.
    #[arg(long, value_name = "http://HOST:PORT|socks5h://HOST:PORT", help_heading = HEADING)]
    pub upstream_proxy: Option<ProxyUrl>,

    /// File with one line, USER:PASSWORD, for the proxy
    #[arg(long, value_name = "FILE", requires = "upstream_proxy", help_heading = HEADING)]
    pub upstream_proxy_credentials: Option<PathBuf>,
}

impl ProxyArgs {
    /// Reads the credentials, and looks the proxy's name up. Returns `None` if there is no proxy.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the file cannot be used, or the name has no address.
    pub fn resolve(&self) -> anyhow::Result<Option<ProxySettings>> {
        let Some(ProxyUrl { kind, host, port }) = self.upstream_proxy.clone() else {
            return Ok(None);
        };
        let path = self.upstream_proxy_credentials.as_deref();
        let credentials = path.map(read_credentials).transpose()?;
        let context = || format!("--upstream-proxy: the address of {host}");
        let found = (host.as_str(), port).to_socket_addrs().with_context(context)?;
        let mut addresses = Vec::new();
        for ip in found.map(|found| found.ip().to_canonical()) {
            if is_of_one_host(ip) && !addresses.contains(&ip) {
                addresses.push(ip);
            }
        }
        addresses.truncate(ADDRESSES_MAX);
        if addresses.is_empty() {
            bail!("--upstream-proxy: {host} has no address to which a connection can be opened");
        }
        Ok(Some(ProxySettings { kind, host, port, addresses, credentials }))
    }
}

/// Reads the file of credentials.
fn read_credentials(path: &Path) -> anyhow::Result<Credentials> {
    let context = || format!("--upstream-proxy-credentials {}", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(context)?;
    file.take(CREDENTIALS_MAX + 1).read_to_string(&mut text).with_context(context)?;
    Credentials::parse(&text).with_context(context)
}

/// Returns `true` for addresses to which one host can answer, without the name of an interface.
fn is_of_one_host(ip: IpAddr) -> bool {
    let is_of_a_link = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    !ip.is_unspecified() && !ip.is_multicast() && ip != IpAddr::from([255; 4]) && !is_of_a_link
}

/// Kind, host and port of a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyUrl {
    kind: ProxyKind,
    host: String,
    port: u16,
}

/// Reasons for which a text names no proxy that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyUrlError {
    #[error("write http://HOST:PORT or socks5h://HOST:PORT")]
    Form,
    #[error(
        "no proxy is spoken to over TLS: use its http:// port, or a TLS client on this host, such as stunnel, and \
         http://127.0.0.1:PORT"
    )]
    Tls,
    #[error("the proxy looks names up: write socks5h://")]
    Socks5,
    #[error("this version of SOCKS carries no names or no passwords: use socks5h:// or http://")]
    Socks4,
    #[error(
        "every user of this computer can read a command line: use --upstream-proxy-credentials FILE"
    )]
    Credentials,
    #[error("a port is needed: {0}://HOST:PORT")]
    Port(&'static str),
    #[error("`{0}` is no host: write a name, an IPv4 address, or an IPv6 address in brackets")]
    Host(String),
}

impl FromStr for ProxyUrl {
    type Err = ProxyUrlError;

    fn from_str(text: &str) -> Result<ProxyUrl, ProxyUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(ProxyUrlError::Form)?;
        let (kind, scheme) = match scheme.to_ascii_lowercase().as_str() {
            "http" => (ProxyKind::Http, "http"),
            "socks5h" => (ProxyKind::Socks5, "socks5h"),
            "https" => return Err(ProxyUrlError::Tls),
            "socks5" | "socks" => return Err(ProxyUrlError::Socks5),
            "socks4" | "socks4a" => return Err(ProxyUrlError::Socks4),
            _ => return Err(ProxyUrlError::Form),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains('@') {
            return Err(ProxyUrlError::Credentials);
        }
        if rest.contains(['/', '?', '#']) {
            return Err(ProxyUrlError::Form);
        }
        let (host, port) = rest.rsplit_once(':').ok_or(ProxyUrlError::Port(scheme))?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or(ProxyUrlError::Port(scheme))?;
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = match in_brackets {
            Some(ip) => ip.parse::<Ipv6Addr>().is_ok(),
            None => host.parse::<std::net::Ipv4Addr>().is_ok() || HostName::parse(host).is_ok(),
        };
        if !is_host {
            return Err(ProxyUrlError::Host(host.to_owned()));
        }
        Ok(ProxyUrl { kind, host: in_brackets.unwrap_or(host).to_owned(), port })
    }
}

impl fmt::Display for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.kind {
            ProxyKind::Http => "http",
            ProxyKind::Socks5 => "socks5h",
        };
        match self.host.parse::<Ipv6Addr>() {
            Ok(ip) => write!(f, "{scheme}://[{ip}]:{}", self.port),
            Err(_) => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_is_named_by_kind_host_and_port() {
        let proxies =
            ["http://proxy.corp:3128", "socks5h://192.0.2.1:1080", "http://[2001:db8::1]:80"];
        for text in proxies {
            assert_eq!(text.parse::<ProxyUrl>().unwrap().to_string(), text);
        }
        assert_eq!("HTTP://a.org:1/".parse::<ProxyUrl>().unwrap().to_string(), "http://a.org:1");
    }

    #[test]
    fn proxy_that_cannot_be_used_is_refused_with_advice() {
        for (text, advice) in [
            ("https://proxy.corp:443", "stunnel"),
            ("socks5://proxy.corp:1080", "socks5h://"),
            ("socks4a://proxy.corp:1080", "socks5h://"),
            ("http://user:secret@proxy.corp:80", "--upstream-proxy-credentials"),
            ("http://proxy.corp", "a port is needed: http://HOST:PORT"),
            ("socks5h://proxy.corp:0", "a port is needed: socks5h://HOST:PORT"),
            ("http://proxy.corp:99999", "a port is needed"),
            ("http://:3128", "is no host"),
            ("http://2001:db8::1:80", "in brackets"),
            ("http://[a.org]:80", "in brackets"),
            ("http://a b:80", "is no host"),
            ("http://proxy.corp:80/path", "write http://"),
            ("proxy.corp:3128", "write http://"),
            ("ftp://proxy.corp:3128", "write http://"),
        ] {
            let error = text.parse::<ProxyUrl>().unwrap_err().to_string();
            assert!(error.contains(advice), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn settings_hold_addresses_and_credentials() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut args = ProxyArgs {
            upstream_proxy: Some("http://[::ffff:192.0.2.1]:3128".parse().unwrap()),
            upstream_proxy_credentials: Some(file.path().to_owned()),
        };
        std::fs::write(file.path(), "user:password\n").unwrap();
        let settings = args.resolve().unwrap().unwrap();
        assert_eq!(settings.addresses, [IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(settings.credentials, Credentials::parse("user:password").ok());
        for (text, why) in
            [("user\n", "USER:PASSWORD"), (&format!("u:{}", "p".repeat(600)), "255 bytes")]
        {
            std::fs::write(file.path(), text).unwrap();
            let error = format!("{:#}", args.resolve().unwrap_err());
            assert!(
                error.contains(why) && error.contains("--upstream-proxy-credentials"),
                "{error}"
            );
        }
        args.upstream_proxy_credentials = None;
        for host in ["0.0.0.0", "224.0.0.1"] {
            args.upstream_proxy = Some(format!("http://{host}:3128").parse().unwrap());
            assert!(args.resolve().is_err(), "{host}");
        }
        assert_eq!(ProxyArgs::default().resolve().unwrap(), None);
    }
}
