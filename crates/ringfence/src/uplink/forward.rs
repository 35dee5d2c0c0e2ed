//! `-p`: ports of the host that lead to the guest.
//!
//! The sockets are made by the launcher, in the user's name: so a port that is taken, or that the
//! user may not have, is told before anything is started, and the process that handles a guest's
//! packets needs no right to it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::str::FromStr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use serde::{Deserialize, Serialize};

/// The most ports that one guest can have forwarded: each is a socket or two.
pub const PORTS_MAX: usize = 1024;
/// Connections that wait to be taken; the kernel has a limit of its own (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// RFC 9293.
    Tcp,
    /// RFC 768.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

/// What is written after `-p`: `[ADDRESS:]PORT[-LAST][:GUESTPORT[-LAST]][/udp]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardSpec {
    /// Where to listen; `None`: at every address.
    pub bind: Option<IpAddr>,
    /// The first port of the host.
    pub first: u16,
    /// The last one.
    pub last: u16,
    /// The port of the guest that the first leads to.
    pub guest: u16,
    /// Which.
    pub protocol: Protocol,
}

/// Why a text after `-p` is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A port is none.
    #[error("`{0}` is not a port: 1 to 65535")]
    Port(String),
    /// The first port comes after the last.
    #[error("`{0}` runs backwards")]
    Backwards(String),
    /// Both ranges have a length, and they differ.
    #[error("{host} ports of the host cannot lead to {guest} ports of the guest")]
    Lengths {
        /// Of the host.
        host: usize,
        /// Of the guest.
        guest: usize,
    },
    /// The address is none.
    #[error("`{0}` is not an address to listen at; an IPv6 address is written in brackets")]
    Address(String),
    /// Neither `tcp` nor `udp`.
    #[error("`/{0}` is neither /tcp nor /udp")]
    Protocol(String),
    /// Too many ports.
    #[error("{0} ports are more than {PORTS_MAX}")]
    TooMany(usize),
}

impl FromStr for ForwardSpec {
    type Err = ForwardError;

    fn from_str(text: &str) -> Result<ForwardSpec, ForwardError> {
        let (rest, protocol) = match text.rsplit_once('/') {
            Some((rest, "tcp")) => (rest, Protocol::Tcp),
            Some((rest, "udp")) => (rest, Protocol::Udp),
            Some((_, other)) => return Err(ForwardError::Protocol(other.to_owned())),
            None => (text, Protocol::Tcp),
        };
        let (bind, ports) = split_address(rest)?;
        let (host, guest) = match ports.split_once(':') {
            Some((host, guest)) => (range(host)?, range(guest)?),
            None => (range(ports)?, range(ports)?),
        };
        let length = |(first, last): (u16, u16)| usize::from(last - first) + 1;
        if length(guest) != 1 && length(guest) != length(host) {
            return Err(ForwardError::Lengths { host: length(host), guest: length(guest) });
        }
        if length(guest) == 1 && length(host) > 1 && usize::from(guest.0) + length(host) > 65536 {
            return Err(ForwardError::Port((usize::from(guest.0) + length(host)).to_string()));
        }
        if length(host) > PORTS_MAX {
            return Err(ForwardError::TooMany(length(host)));
        }
        Ok(ForwardSpec { bind, first: host.0, last: host.1, guest: guest.0, protocol })
    }
}

/// Takes the address off, where there is one: what comes before the last two fields, or one in
/// brackets.
fn split_address(text: &str) -> Result<(Option<IpAddr>, &str), ForwardError> {
    let wrong = |text: &str| ForwardError::Address(text.to_owned());
    if let Some(rest) = text.strip_prefix('[') {
        let (ip, ports) = rest.split_once("]:").ok_or_else(|| wrong(text))?;
        let ip: Ipv6Addr = ip.parse().map_err(|_| wrong(ip))?;
        return Ok((Some(ip.into()), ports));
    }
    match text.split_once(':') {
        Some((ip, ports)) if ip.contains('.') => {
            let ip: Ipv4Addr = ip.parse().map_err(|_| wrong(ip))?;
            Ok((Some(ip.into()), ports))
        }
        _ => Ok((None, text)),
    }
}

fn range(text: &str) -> Result<(u16, u16), ForwardError> {
    let port = |text: &str| {
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse::<u16>().ok().filter(|port| *port > 0 && digits);
        number.ok_or_else(|| ForwardError::Port(text.to_owned()))
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if first > last { Err(ForwardError::Backwards(text.to_owned())) } else { Ok((first, last)) }
}

impl fmt::Display for ForwardSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bind {
            Some(IpAddr::V4(ip)) => write!(f, "{ip}:")?,
            Some(IpAddr::V6(ip)) => write!(f, "[{ip}]:")?,
            None => {}
        }
        let guest_last = self.guest + (self.last - self.first);
        if self.first == self.last {
            write!(f, "{}:{}/{}", self.first, self.guest, self.protocol)
        } else {
            let ForwardSpec { first, last, guest, protocol, .. } = self;
            write!(f, "{first}-{last}:{guest}-{guest_last}/{protocol}")
        }
    }
}

/// One socket of the host, and where it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// Which.
    pub protocol: Protocol,
    /// Whether its clients have IPv6 addresses.
    pub ipv6: bool,
    /// The port of the guest.
    pub guest_port: u16,
}

/// A port that could not be had.
#[derive(Debug, thiserror::Error)]
#[error("-p {spec}: cannot listen at {at}/{protocol}: {source}{advice}", advice = advice(source, *at))]
pub struct ListenError {
    spec: ForwardSpec,
    at: SocketAddr,
    protocol: Protocol,
    source: io::Error,
}

fn advice(error: &io::Error, at: SocketAddr) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied if at.port() < 1024 => {
            "; choose a port from 1024 on, or lower sysctl net.ipv4.ip_unprivileged_port_start"
        }
        io::ErrorKind::AddrInUse => "; another program has it: choose another port",
        io::ErrorKind::AddrNotAvailable => "; the host does not have this address",
        _ => "",
    }
}

/// Makes the sockets of one `-p`, for the families of address that the guest has. Without an address of
/// its own it listens at `defaults`, and without those at every address of the host.
///
/// # Errors
///
/// [`ListenError`] for the first that cannot be had.
pub fn listen(
    spec: &ForwardSpec,
    families: (bool, bool),
    defaults: &[IpAddr],
) -> Result<Vec<(Forward, OwnedFd)>, ListenError> {
    let addresses = addresses(spec, families, defaults);
    let mut made = Vec::new();
    for port in spec.first..=spec.last {
        for &ip in &addresses {
            let at = SocketAddr::new(ip, port);
            let protocol = spec.protocol;
            let socket = bind(protocol, at).map_err(|source| ListenError {
                spec: spec.clone(),
                at,
                protocol,
                source,
            })?;
            let guest_port = spec.guest + (port - spec.first);
            made.push((Forward { protocol, ipv6: at.is_ipv6(), guest_port }, socket));
        }
    }
    Ok(made)
}

/// The addresses that one `-p` listens at.
pub fn addresses(spec: &ForwardSpec, families: (bool, bool), defaults: &[IpAddr]) -> Vec<IpAddr> {
    let everywhere = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let chosen = if defaults.is_empty() { &everywhere[..] } else { defaults };
    let has = |ip: &IpAddr| if ip.is_ipv4() { families.0 } else { families.1 };
    match spec.bind {
        Some(ip) => vec![ip],
        None => chosen.iter().copied().filter(has).collect(),
    }
}

fn bind(protocol: Protocol, at: SocketAddr) -> io::Result<OwnedFd> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let (kind, number) = match protocol {
        Protocol::Tcp => (SocketType::STREAM, ipproto::TCP),
        Protocol::Udp => (SocketType::DGRAM, ipproto::UDP),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, Some(number))?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if protocol == Protocol::Tcp {
        // Connections of an earlier run that linger do not stand in the way.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    rustix::net::bind(&socket, &at)?;
    if protocol == Protocol::Tcp {
        rustix::net::listen(&socket, BACKLOG)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(text: &str) -> Result<ForwardSpec, ForwardError> {
        text.parse()
    }

    #[test]
    fn what_is_written_is_understood() {
        for (text, full) in [
            ("8080:80", "8080:80/tcp"),
            ("8080", "8080:8080/tcp"),
            ("53:5353/udp", "53:5353/udp"),
            ("127.0.0.1:8080:80", "127.0.0.1:8080:80/tcp"),
            ("127.0.0.1:8080", "127.0.0.1:8080:8080/tcp"),
            ("[::1]:8080:80", "[::1]:8080:80/tcp"),
            ("8000-8010", "8000-8010:8000-8010/tcp"),
            ("8000-8010:9000", "8000-8010:9000-9010/tcp"),
            ("8000-8010:9000-9010/udp", "8000-8010:9000-9010/udp"),
        ] {
            assert_eq!(spec(text).unwrap().to_string(), full, "{text}");
        }
    }

    #[test]
    fn each_mistake_is_named() {
        assert_eq!(spec("80:0"), Err(ForwardError::Port("0".into())));
        assert_eq!(spec("http:80"), Err(ForwardError::Port("http".into())));
        assert_eq!(spec("9-8"), Err(ForwardError::Backwards("9-8".into())));
        assert_eq!(spec("1-5:1-3"), Err(ForwardError::Lengths { host: 5, guest: 3 }));
        assert_eq!(spec("1/sctp"), Err(ForwardError::Protocol("sctp".into())));
        assert_eq!(spec("[::1:80"), Err(ForwardError::Address("[::1:80".into())));
        assert_eq!(spec("1.2.3:80"), Err(ForwardError::Address("1.2.3".into())));
        assert_eq!(spec("1-2000"), Err(ForwardError::TooMany(2000)));
        assert_eq!(spec("1-3:65534"), Err(ForwardError::Port("65537".into())));
    }

    #[test]
    fn a_port_that_is_taken_is_told() {
        let made = listen(&spec("127.0.0.1:0001:1").unwrap(), (true, false), &[]);
        if let Err(error) = made {
            // As an ordinary user.
            assert!(error.to_string().contains("ip_unprivileged_port_start"), "{error}");
        }
        let first = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let taken = spec(&format!("127.0.0.1:{port}")).unwrap();
        let error = listen(&taken, (true, true), &[]).unwrap_err();
        assert!(error.to_string().contains("another program has it"), "{error}");
    }

    #[test]
    fn port_without_address_listens_at_defaults_of_the_guests_families() {
        let (bare, bound) = (spec("8080").unwrap(), spec("192.0.2.2:8080").unwrap());
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let loopback = [ip("127.0.0.1"), ip("::1")];
        assert_eq!(addresses(&bare, (true, true), &[]), [ip("0.0.0.0"), ip("::")]);
        assert_eq!(addresses(&bare, (false, true), &[]), [ip("::")]);
        assert_eq!(addresses(&bare, (true, true), &loopback), loopback);
        assert_eq!(addresses(&bare, (true, false), &loopback), [ip("127.0.0.1")]);
        assert_eq!(addresses(&bound, (true, true), &loopback), [ip("192.0.2.2")]);
    }

    proptest! {
        #[test]
        fn any_text_is_understood_or_refused(text in "[0-9a-z.:/\\[\\]-]{0,24}") {
            if let Ok(spec) = text.parse::<ForwardSpec>() {
                prop_assert_eq!(spec.to_string().parse::<ForwardSpec>().unwrap(), spec);
            }
        }
    }
}
