//! Port forwarding (`-p`): ports of the host that lead to the guest.
//!
//! The launcher creates the sockets with the user's rights. A port that is in use or not permitted
//! is therefore reported before any process starts. The process that handles a guest's packets
//! needs no right to it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::str::FromStr;

use ringfence_sys::prerequisite::{LOW_PORTS, with_doctor};
use ringfence_uplink::udp::multicast::service::Service;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

/// Maximum number of forwarded ports of one guest. Each needs one or two sockets.
pub const PORTS_MAX: usize = 1024;
/// Maximum number of connections not accepted yet. The kernel has its own limit
/// (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// Address families of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Families {
    pub v4: bool,
    pub v6: bool,
}

impl Families {
    /// Returns `true` if the address is of one of the families.
    pub fn have(self, ip: &IpAddr) -> bool {
        if ip.is_ipv4() { self.v4 } else { self.v6 }
    }
}

/// Transport protocol of a forwarded port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ForwardProtocol {
    /// TCP (RFC 9293).
    Tcp,
    /// UDP (RFC 768).
    Udp,
}

impl fmt::Display for ForwardProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ForwardProtocol::Tcp => "tcp",
            ForwardProtocol::Udp => "udp",
        })
    }
}

/// Argument of `-p`: `[ADDRESS:]PORT[-LAST][:GUESTPORT[-LAST]][/udp]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardSpec {
    /// Address to listen at. `None`: the default addresses.
    pub bind: Option<IpAddr>,
    /// First port of the host.
    pub first: u16,
    /// Last port of the host.
    pub last: u16,
    /// Port of the guest to which the first port leads.
    pub guest: u16,
    pub protocol: ForwardProtocol,
}

/// Reasons for which an argument of `-p` is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A port is not a number from 1 to 65535.
    #[error("`{0}` is not a port: 1 to 65535")]
    Port(String),
    /// The first port is greater than the last.
    #[error("`{0}` runs backwards")]
    Backwards(String),
    /// The ranges of host and guest differ in length.
    #[error("{host} ports of the host cannot lead to {guest} ports of the guest")]
    Lengths {
        /// Length of the host's range.
        host: usize,
        /// Length of the guest's range.
        guest: usize,
    },
    /// The text is not an IP address.
    #[error("`{0}` is not an address to listen at; an IPv6 address is written in brackets")]
    Address(String),
    /// The protocol is neither `tcp` nor `udp`.
    #[error("`/{0}` is neither /tcp nor /udp")]
    Protocol(String),
    /// The range has too many ports.
    #[error("{0} ports are more than {PORTS_MAX}")]
    TooMany(usize),
}

impl FromStr for ForwardSpec {
    type Err = ForwardError;

    fn from_str(text: &str) -> Result<ForwardSpec, ForwardError> {
        let (rest, protocol) = match text.rsplit_once('/') {
            Some((rest, "tcp")) => (rest, ForwardProtocol::Tcp),
            Some((rest, "udp")) => (rest, ForwardProtocol::Udp),
            Some((_, other)) => return Err(ForwardError::Protocol(other.to_owned())),
            None => (text, ForwardProtocol::Tcp),
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

/// Splits off the address, if there is one: the text before the last two fields, or a text in
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

/// Destination of one listening socket. Its serialized form is one number, so that a message has room for
/// thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct Forward {
    pub protocol: ForwardProtocol,
    /// Set if its clients have IPv6 addresses.
    pub ipv6: bool,
    pub guest_port: u16,
    /// Set if the socket is one of the guest's network and leads to the host's loopback.
    pub to_host: bool,
}

/// Bits of a serialized [`Forward`] above the port.
const UDP_BIT: u32 = 1 << 16;
const IPV6_BIT: u32 = 1 << 17;
const TO_HOST_BIT: u32 = 1 << 18;

impl From<Forward> for u32 {
    fn from(forward: Forward) -> u32 {
        let protocol = if forward.protocol == ForwardProtocol::Udp { UDP_BIT } else { 0 };
        let family = if forward.ipv6 { IPV6_BIT } else { 0 };
        let direction = if forward.to_host { TO_HOST_BIT } else { 0 };
        u32::from(forward.guest_port) | protocol | family | direction
    }
}

impl From<u32> for Forward {
    fn from(number: u32) -> Forward {
        let [low, high, ..] = number.to_le_bytes();
        let protocol =
            if number & UDP_BIT == 0 { ForwardProtocol::Tcp } else { ForwardProtocol::Udp };
        let guest_port = u16::from_le_bytes([low, high]);
        let (ipv6, to_host) = (number & IPV6_BIT != 0, number & TO_HOST_BIT != 0);
        Forward { protocol, ipv6, guest_port, to_host }
    }
}

/// Error of a port at which listening failed.
#[derive(Debug, thiserror::Error)]
#[error("-p {spec}: cannot listen at {at}/{protocol}: {source}{advice}", advice = advice(source, *protocol, *at))]
pub struct ListenError {
    spec: ForwardSpec,
    at: SocketAddr,
    protocol: ForwardProtocol,
    source: io::Error,
}

fn advice(error: &io::Error, protocol: ForwardProtocol, at: SocketAddr) -> String {
    let text = match error.kind() {
        io::ErrorKind::PermissionDenied if at.port() < 1024 => {
            return with_doctor(&format!("; choose a port from 1024 on, or {}", LOW_PORTS.enable));
        }
        _ if error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
            let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
            return format!(
                "; the limit of open files is {limit}, and each port needs one for each address: raise it (`ulimit -Hn`), \
                 publish fewer ports, or listen at one address (`-p IP:PORT`, `--publish-default IP`)"
            );
        }
        io::ErrorKind::AddrInUse
            if at.ip().is_unspecified() && is_group_port(protocol, at.port()) =>
        {
            return format!(
                "; --multicast, or a program such as avahi, has it at a group's address: `-p IP:{}/udp` listens at one \
                 address beside that",
                at.port()
            );
        }
        io::ErrorKind::AddrInUse => "; another program has it: choose another port",
        io::ErrorKind::AddrNotAvailable => "; the host does not have this address",
        _ => "",
    };
    text.to_owned()
}

/// Returns `true` for the port of a service that `--multicast` carries.
fn is_group_port(protocol: ForwardProtocol, port: u16) -> bool {
    protocol == ForwardProtocol::Udp && Service::ALL.iter().any(|service| service.port() == port)
}

/// Creates the sockets of one `-p` for the address families of the guest. Without its own address
/// it listens at `defaults`; without those, at every address of the host.
///
/// # Errors
///
/// Returns [`ListenError`] for the first socket that fails.
pub fn listen(
    spec: &ForwardSpec,
    families: Families,
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
            let ipv6 = at.is_ipv6();
            made.push((Forward { protocol, ipv6, guest_port, to_host: false }, socket));
        }
    }
    Ok(made)
}

/// Returns the addresses at which one `-p` listens.
pub fn addresses(spec: &ForwardSpec, families: Families, defaults: &[IpAddr]) -> Vec<IpAddr> {
    let everywhere = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let chosen = if defaults.is_empty() { &everywhere[..] } else { defaults };
    match spec.bind {
        Some(ip) => vec![ip],
        None => chosen.iter().copied().filter(|ip| families.have(ip)).collect(),
    }
}

/// Creates a bound socket, which listens if it is of TCP.
pub fn bind(protocol: ForwardProtocol, at: SocketAddr) -> io::Result<OwnedFd> {
    bind_with(protocol, at, |_| Ok(()))
}

/// Creates a socket as [`bind`] does, and lets `prepare` set options before it is bound.
pub fn bind_with(
    protocol: ForwardProtocol,
    at: SocketAddr,
    prepare: impl FnOnce(&OwnedFd) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let (kind, number) = match protocol {
        ForwardProtocol::Tcp => (SocketType::STREAM, ipproto::TCP),
        ForwardProtocol::Udp => (SocketType::DGRAM, ipproto::UDP),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, Some(number))?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if protocol == ForwardProtocol::Tcp {
        // Allows reuse while connections of an earlier process linger.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    prepare(&socket)?;
    rustix::net::bind(&socket, &at)?;
    if protocol == ForwardProtocol::Tcp {
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
    fn forward_spec_forms_are_parsed() {
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
    fn malformed_forward_returns_its_own_error() {
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
    fn port_in_use_is_reported() {
        let (v4, both) = (Families { v4: true, v6: false }, Families { v4: true, v6: true });
        let made = listen(&spec("127.0.0.1:0001:1").unwrap(), v4, &[]);
        if let Err(error) = made {
            // An ordinary user has no right to the port.
            assert!(error.to_string().contains("ip_unprivileged_port_start"), "{error}");
        }
        let first = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let taken = spec(&format!("127.0.0.1:{port}")).unwrap();
        let error = listen(&taken, both, &[]).unwrap_err();
        assert!(error.to_string().contains("another program has it"), "{error}");
    }

    #[test]
    fn port_without_address_listens_at_defaults_of_the_guests_families() {
        let families = |v4, v6| Families { v4, v6 };
        let (bare, bound) = (spec("8080").unwrap(), spec("192.0.2.2:8080").unwrap());
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let loopback = [ip("127.0.0.1"), ip("::1")];
        assert_eq!(addresses(&bare, families(true, true), &[]), [ip("0.0.0.0"), ip("::")]);
        assert_eq!(addresses(&bare, families(false, true), &[]), [ip("::")]);
        assert_eq!(addresses(&bare, families(true, true), &loopback), loopback);
        assert_eq!(addresses(&bare, families(true, false), &loopback), [ip("127.0.0.1")]);
        assert_eq!(addresses(&bound, families(true, true), &loopback), [ip("192.0.2.2")]);
    }

    #[test]
    fn message_has_room_for_every_forward_of_a_guest() {
        let forward = Forward {
            protocol: ForwardProtocol::Udp,
            ipv6: true,
            guest_port: u16::MAX,
            to_host: true,
        };
        let text = serde_json::to_string(&vec![forward; 2 * PORTS_MAX]).unwrap();
        assert!(text.len() < ringfence_sandbox::channel::MESSAGE_MAX / 2, "{}", text.len());
    }

    proptest! {
        #[test]
        fn forward_survives_serialization(udp: bool, ipv6: bool, guest_port: u16, to_host: bool) {
            let protocol = if udp { ForwardProtocol::Udp } else { ForwardProtocol::Tcp };
            let forward = Forward { protocol, ipv6, guest_port, to_host };
            prop_assert_eq!(Forward::from(u32::from(forward)), forward);
        }

        #[test]
        fn arbitrary_text_is_parsed_or_rejected(text in "[0-9a-z.:/\\[\\]-]{0,24}") {
            if let Ok(spec) = text.parse::<ForwardSpec>() {
                prop_assert_eq!(spec.to_string().parse::<ForwardSpec>().unwrap(), spec);
            }
        }
    }
}
