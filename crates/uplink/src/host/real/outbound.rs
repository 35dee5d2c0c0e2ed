//! Source addresses and interfaces of the sockets by which the guest's traffic leaves, where they are not the routing
//! table's choice.
//!
//! They apply to connections, datagrams and echo requests to other hosts. Destinations at the host itself are reached
//! as without them. An address or interface that the host lacks fails the socket: nothing leaves by another one.

// #syscall uplink bind: source address of the guest's connections
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_BINDTODEVICE: interface of the guest's connections
// #syscall uplink setsockopt 1=IPPROTO_IP: a port that is chosen by the connection

use core::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use ringfence_sys::socket;
use rustix::io::Errno;

use super::errors::errno;

/// Source of one address family's sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub address: Option<IpAddr>,
    /// Name of an interface of the host.
    pub interface: Option<String>,
}

impl Source {
    /// Restricts a socket to the interface.
    pub(super) fn restrict(&self, file: impl AsFd) -> Result<(), Errno> {
        let Some(name) = &self.interface else { return Ok(()) };
        socket::bind_to_interface(file, name).map_err(errno)
    }

    /// Restricts a socket to the interface, and gives it the address. A connection chooses the port.
    pub(super) fn apply(&self, file: impl AsFd) -> Result<(), Errno> {
        self.restrict(&file)?;
        let Some(ip) = self.address else { return Ok(()) };
        // Without it, each connection would use up a port of this host alone.
        socket::set_bind_without_port(&file).map_err(errno)?;
        rustix::net::bind(file, &SocketAddr::new(ip, 0))
    }
}

/// Sources of both address families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outbound {
    /// Source of IPv4 sockets.
    pub v4: Source,
    /// Source of IPv6 sockets.
    pub v6: Source,
}

impl Outbound {
    /// Returns the source of sockets to `ip`, an address of another host.
    pub(super) fn to(&self, ip: IpAddr) -> &Source {
        if ip.is_ipv4() { &self.v4 } else { &self.v6 }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::sync::Arc;

    use super::*;
    use crate::counters::UplinkCounters;
    use crate::host::datagrams::DatagramHost;
    use crate::host::real::RealHost;
    use crate::host::{Owner, OwnerKind, TcpHost};

    const OWNER: Owner = Owner { kind: OwnerKind::Tcp, index: 0, generation: 0 };

    /// Returns a host whose loopback addresses count as those of another one.
    fn host(address: Option<&str>, interface: Option<&str>) -> RealHost {
        let address = address.map(|text| text.parse().unwrap());
        let v4 = Source { address, interface: interface.map(str::to_owned) };
        let mut host = RealHost::new(Arc::<UplinkCounters>::default()).unwrap();
        host.set_outbound(Outbound { v4, ..Outbound::default() });
        host.loopback_is_elsewhere = true;
        host
    }

    #[test]
    fn connection_and_datagrams_have_the_source_address() {
        let (tcp, udp) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut host = host(Some("127.0.0.9"), Some("lo"));
        let _connection = host.connect(OWNER, tcp.local_addr().unwrap()).unwrap();
        assert_eq!(tcp.accept().unwrap().1.ip().to_string(), "127.0.0.9");
        let to = udp.local_addr().unwrap();
        let free = UdpSocket::bind("127.0.0.9:0").unwrap().local_addr().unwrap().port();
        let mut socket = host.open_udp(OWNER, free, to).unwrap();
        socket.send(b"x", None, None).unwrap();
        let from = udp.recv_from(&mut [0; 8]).unwrap().1;
        assert_eq!(from.to_string(), format!("127.0.0.9:{free}"));
        // A port that is taken is replaced, the address is not.
        let mut second = host.open_udp(OWNER, free, to).unwrap();
        second.send(b"y", None, None).unwrap();
        let from = udp.recv_from(&mut [0; 8]).unwrap().1;
        assert!(from.ip().to_string() == "127.0.0.9" && from.port() != free, "{from}");
    }

    #[test]
    fn address_or_interface_that_the_host_lacks_fails_the_socket() {
        let to = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for (address, interface, errno) in
            [(Some("198.51.100.9"), None, Errno::ADDRNOTAVAIL), (None, Some("none0"), Errno::NODEV)]
        {
            let mut host = host(address, interface);
            assert_eq!(host.connect(OWNER, to).err(), Some(errno));
            assert_eq!(host.open_udp(OWNER, 0, to).err(), Some(errno));
        }
    }

    #[test]
    fn destination_at_the_host_itself_is_reached_without_the_source() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut host = host(Some("198.51.100.9"), Some("none0"));
        host.loopback_is_elsewhere = false;
        let _connection = host.connect(OWNER, listener.local_addr().unwrap()).unwrap();
        assert_eq!(listener.accept().unwrap().1.ip().to_string(), "127.0.0.1");
    }
}
