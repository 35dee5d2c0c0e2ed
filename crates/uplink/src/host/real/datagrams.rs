//! UDP and ping sockets of Linux.
//!
//! A connected socket delivers datagrams of its peer only. Blocks of datagrams are sent by `UDP_SEGMENT`,
//! received by `recvmmsg` with `UDP_GRO`. Delivery errors are read from the error queue (`IP_RECVERR`).

// #syscall uplink socket 0=AF_INET 1&0xf=SOCK_DGRAM: UDP, echo
// #syscall uplink socket 0=AF_INET6 1&0xf=SOCK_DGRAM: UDP, echo
// #syscall uplink connect: peer of a flow
// #syscall uplink bind: the guest's port, if it is free
// #syscall uplink getsockname: port of the socket
// #syscall uplink getpeername: address of the peer
// #syscall uplink sendto: datagrams to the peer of the socket
// #syscall uplink setsockopt 1=IPPROTO_IP: hop limit, traffic class and DF of a datagram
// #syscall uplink setsockopt 1=IPPROTO_IPV6: hop limit, traffic class and fragmentation of a datagram
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_BINDTODEVICE: interface of questions to multicast groups
// #syscall uplink setsockopt 1=IPPROTO_ICMPV6: message filter
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_RCVBUF: bounding a socket's queue
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_SNDBUF: bounding a socket's queue
// #syscall uplink getsockopt 1=SOL_SOCKET: errors
// #syscall uplink getsockopt 1=IPPROTO_IP: options in force
// #syscall uplink getsockopt 1=IPPROTO_IPV6: options in force

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_sys::counters::Counter;
use ringfence_sys::datagrams::{self, SendOptions, Wait};
use rustix::io::Errno;
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, ipproto, sockopt};

use super::errors::errno;
use super::outbound::Source;
use crate::host::datagrams::{Datagram, DatagramSocket, Failure, ROOM, ReceiveBuffer, Via};
use crate::packet::{Marks, PathDiscovery};
use crate::udp::multicast::service::Group;

/// Size of a socket's buffer in each direction, in bytes.
const BUFFER: usize = 1 << 21;

/// Maximum of reports about other peers that one call skips.
const FOREIGN_REPORTS_MAX: usize = 16;

/// Origin of an error report that this host itself raised (`linux/errqueue.h`).
const ORIGIN_LOCAL: u8 = 1;

/// Datagram socket of Linux.
#[derive(Debug)]
pub(crate) struct RealDatagrams {
    fd: OwnedFd,
    is_v6: bool,
    /// Only address whose datagrams are delivered; `None` if any sender is accepted.
    ///
    /// The kernel filters by address only after `connect`, and never for echo replies. So the source of each
    /// datagram and the destination of each reported one are compared here.
    peer: Option<SocketAddr>,
    /// Set until the kernel has refused to segment a block.
    can_segment: bool,
    /// Options in force.
    marks: Marks,
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn any(of: IpAddr, port: u16) -> SocketAddr {
    let ip: IpAddr =
        if of.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(ip, port)
}

impl RealDatagrams {
    /// Opens a connected UDP socket.
    pub(crate) fn udp(
        from: u16,
        to: SocketAddr,
        source: Option<&Source>,
    ) -> Result<RealDatagrams, Errno> {
        let mut socket = RealDatagrams::open(to.ip(), ipproto::UDP)?;
        socket.peer = Some(SocketAddr::new(to.ip(), to.port()));
        // Without SO_REUSEADDR and SO_REUSEPORT: sockets that share a port would steal datagrams, across
        // uplinks and users. If the port is in use or privileged, `connect` selects another one.
        socket.bind_from(to.ip(), from, source)?;
        socket.tune();
        rustix::net::connect(&socket.fd, &to)?;
        Ok(socket)
    }

    /// Opens a connected ping socket.
    pub(crate) fn echo(
        id: u16,
        to: IpAddr,
        source: Option<&Source>,
    ) -> Result<RealDatagrams, Errno> {
        let protocol = if to.is_ipv4() { ipproto::ICMP } else { ipproto::ICMPV6 };
        let mut socket = RealDatagrams::open(to, protocol)?;
        // Reports and replies of echo sockets have port 0.
        socket.peer = Some(SocketAddr::new(to, 0));
        socket.bind_from(to, id, source)?;
        socket.enable_errors();
        let _ = datagrams::report_class(&socket.fd, socket.is_v6);
        let _ = datagrams::report_hops(&socket.fd, socket.is_v6);
        rustix::net::connect(&socket.fd, &SocketAddr::new(to, 0))?;
        Ok(socket)
    }

    /// Opens a UDP socket for questions to a multicast group, restricted to its interface.
    pub(crate) fn question(from: u16, group: &Group) -> Result<RealDatagrams, Errno> {
        let (ip, hops) = (group.address, group.service.hops());
        let socket = RealDatagrams::open(ip, ipproto::UDP)?;
        ringfence_sys::socket::bind_to_interface(&socket.fd, &group.interface).map_err(errno)?;
        if socket.is_v6 {
            sockopt::set_ipv6_multicast_hops(&socket.fd, hops.into())?;
        } else {
            sockopt::set_ip_multicast_ttl(&socket.fd, hops.into())?;
        }
        // A port in use is replaced, as in `udp`.
        socket.bind(any(ip, from)).or_else(|_| socket.bind(any(ip, 0)))?;
        socket.tune();
        Ok(socket)
    }

    /// Connects a UDP socket that was created elsewhere.
    pub(crate) fn connected(fd: OwnedFd, to: SocketAddr) -> Result<RealDatagrams, Errno> {
        let (is_v6, peer) = (to.is_ipv6(), Some(to));
        let socket = RealDatagrams { fd, is_v6, peer, can_segment: true, marks: Marks::default() };
        socket.tune();
        rustix::net::connect(&socket.fd, &to)?;
        Ok(socket)
    }

    /// Adopts a UDP socket that was bound elsewhere.
    pub(crate) fn adopted(fd: OwnedFd) -> Result<RealDatagrams, Errno> {
        let is_v6 = rustix::net::getsockname(&fd)?.address_family() == AddressFamily::INET6;
        let socket =
            RealDatagrams { fd, is_v6, peer: None, can_segment: true, marks: Marks::default() };
        // An answer must leave from the address that the client contacted.
        let _ = datagrams::report_destinations(&socket.fd, is_v6);
        socket.tune();
        Ok(socket)
    }

    fn open(to: IpAddr, protocol: Protocol) -> Result<RealDatagrams, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family(to), SocketType::DGRAM, flags, Some(protocol))?;
        if to.is_ipv6() && protocol == ipproto::UDP {
            // The guest may use the same port for IPv4.
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        Ok(RealDatagrams {
            fd,
            is_v6: to.is_ipv6(),
            peer: None,
            can_segment: true,
            marks: Marks::default(),
        })
    }

    fn bind(&self, at: SocketAddr) -> Result<(), Errno> {
        rustix::net::bind(&self.fd, &at)
    }

    /// Binds to the port `from` if it is free, and to the source, without which the socket is not usable.
    fn bind_from(&self, to: IpAddr, from: u16, source: Option<&Source>) -> Result<(), Errno> {
        source.map_or(Ok(()), |source| source.restrict(&self.fd))?;
        let Some(ip) = source.and_then(|source| source.address) else {
            // Without the port, `connect` selects another one.
            let _ = self.bind(any(to, from));
            return Ok(());
        };
        match self.bind(SocketAddr::new(ip, from)) {
            Err(Errno::ADDRINUSE | Errno::ACCESS) => self.bind(SocketAddr::new(ip, 0)),
            bound => bound,
        }
    }

    /// Returns the address to which the socket is bound.
    fn local_address(&self) -> Result<SocketAddr, Errno> {
        SocketAddr::try_from(rustix::net::getsockname(&self.fd)?)
    }

    /// Disconnects the socket from its peer. It keeps its port. After an error it is not usable.
    fn disconnect(&mut self) -> Result<(), Errno> {
        let before = self.local_address()?;
        if self.peer.take().is_none() {
            return Ok(());
        }
        if self.is_v6 {
            // Linux keeps the peer's IPv6 address of a disconnected socket, and delivers datagrams of this address alone.
            let fresh = RealDatagrams::open(before.ip(), ipproto::UDP)?;
            // The old socket must be closed first: both cannot have the port.
            self.fd = fresh.fd;
            self.marks = Marks::default();
            self.bind(any(before.ip(), before.port()))?;
            self.tune();
            return Ok(());
        }
        rustix::net::connect_unspec(&self.fd)?;
        // The kernel gives up a port that it has chosen itself.
        if self.local_address()?.port() != before.port() {
            self.bind(any(before.ip(), before.port()))?;
        }
        Ok(())
    }

    /// Sets options that are useful but not required.
    fn tune(&self) {
        self.enable_errors();
        let _ = datagrams::join_received(&self.fd);
        let _ = datagrams::report_class(&self.fd, self.is_v6);
        let _ = sockopt::set_socket_recv_buffer_size(&self.fd, BUFFER);
        let _ = sockopt::set_socket_send_buffer_size(&self.fd, BUFFER);
    }

    fn enable_errors(&self) {
        let _ = datagrams::queue_errors(&self.fd, self.is_v6);
    }

    fn set_discovery(&self, discovery: PathDiscovery) -> Result<(), Errno> {
        let v4 = match discovery {
            PathDiscovery::Host => Ipv4PathMtuDiscovery::WANT,
            PathDiscovery::Guest => Ipv4PathMtuDiscovery::PROBE,
            PathDiscovery::Off => Ipv4PathMtuDiscovery::DONT,
        };
        let v6 = match discovery {
            PathDiscovery::Host => Ipv6PathMtuDiscovery::WANT,
            PathDiscovery::Guest => Ipv6PathMtuDiscovery::PROBE,
            PathDiscovery::Off => Ipv6PathMtuDiscovery::DONT,
        };
        match self.is_v6 {
            true => sockopt::set_ipv6_mtu_discover(&self.fd, v6),
            false => sockopt::set_ip_mtu_discover(&self.fd, v4),
        }
    }

    /// Returns `true` if the socket may deliver datagrams of `address`.
    fn accepts(&self, address: Option<SocketAddr>) -> bool {
        self.peer.is_none() || self.peer == address
    }

    fn send_block(
        &self,
        bytes: &[u8],
        segment: Option<u16>,
        via: Option<Via>,
    ) -> Result<(), Errno> {
        if segment.is_none() && via.is_none() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            return rustix::net::send(&self.fd, bytes, flags).map(drop);
        }
        let (to, from) = (via.map(|via| via.to), via.and_then(|via| via.from));
        datagrams::send(&self.fd, bytes, &SendOptions { to, from, segment }).map_err(errno)
    }
}

impl AsFd for RealDatagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Datagram socket whose system calls are counted.
pub(crate) struct Counted {
    pub(crate) socket: RealDatagrams,
    pub(crate) counters: std::sync::Arc<crate::counters::UplinkCounters>,
}

impl Counted {
    fn calls(&self) -> &Counter {
        &self.counters.syscalls
    }
}

impl DatagramSocket for Counted {
    fn send(&mut self, bytes: &[u8], segment: Option<u16>, via: Option<Via>) -> Result<(), Errno> {
        self.calls().add(1);
        let several = segment.filter(|&segment| bytes.len() > usize::from(segment));
        let Some(segment) = several else { return self.socket.send_block(bytes, None, via) };
        if self.socket.can_segment {
            match self.socket.send_block(bytes, Some(segment), via) {
                // The route's MTU is too small for the segments, or the device does not support segmentation.
                Err(Errno::INVAL | Errno::MSGSIZE | Errno::IO | Errno::OPNOTSUPP) => {}
                done => return done,
            }
        }
        for piece in bytes.chunks(usize::from(segment).max(1)) {
            self.calls().add(1);
            self.socket.send_block(piece, None, via)?;
        }
        // The segments alone are not too long.
        self.socket.can_segment = false;
        Ok(())
    }

    fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Result<bool, Errno> {
        self.calls().add(1);
        let asked = buffer.batch_size;
        buffer.prepare(asked);
        let mut found = core::mem::take(&mut buffer.datagrams);
        let rooms = buffer.bytes.chunks_mut(ROOM).take(asked);
        let count = datagrams::receive(&self.socket.fd, rooms, Wait::Never, |index, one| {
            if !self.socket.accepts(one.from) {
                self.counters.drop_stranger.add(1);
                return;
            }
            let start = index * ROOM;
            let bytes = start..start + one.len.min(ROOM);
            let (class, hops) = (one.class, one.hops);
            let (segment, from, to) = (one.segment, one.from, one.to);
            found.push(Datagram { bytes, segment, from, to, class, hops });
        });
        buffer.datagrams = found;
        let count = count.map_err(errno)?;
        buffer.adapt(asked, count);
        Ok(count < asked)
    }

    fn error(&mut self, bytes: &mut [u8]) -> Option<Failure> {
        for _ in 0..FOREIGN_REPORTS_MAX {
            let failure = self.next_error(bytes)?;
            if self.socket.accepts(failure.to) {
                return Some(failure);
            }
            self.counters.drop_stranger.add(1);
        }
        None
    }

    fn set_marks(&mut self, marks: Marks) {
        let socket = &mut self.socket;
        let before = core::mem::replace(&mut socket.marks, marks);
        // A guest that uses reserved bits loses them alone.
        if before.hops != marks.hops {
            self.counters.syscalls.add(1);
            let _ = match socket.is_v6 {
                true => sockopt::set_ipv6_unicast_hops(&socket.fd, Some(marks.hops)),
                false => sockopt::set_ip_ttl(&socket.fd, marks.hops.into()),
            };
        }
        if before.class != marks.class {
            self.counters.syscalls.add(1);
            let _ = match socket.is_v6 {
                true => sockopt::set_ipv6_tclass(&socket.fd, marks.class.into()),
                false => sockopt::set_ip_tos(&socket.fd, marks.class),
            };
        }
        if before.discovery != marks.discovery {
            self.counters.syscalls.add(1);
            let _ = socket.set_discovery(marks.discovery);
        }
    }

    fn path_mtu(&self) -> Option<u32> {
        self.calls().add(1);
        let fd = &self.socket.fd;
        if self.socket.is_v6 { sockopt::ipv6_mtu(fd) } else { sockopt::ip_mtu(fd) }.ok()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.calls().add(1);
        self.socket.local_address().ok()
    }

    fn disconnect(&mut self) -> Result<BorrowedFd<'_>, Errno> {
        self.socket.disconnect()?;
        Ok(self.socket.as_fd())
    }
}

impl Counted {
    /// Reads the next report from the socket's error queue.
    fn next_error(&self, bytes: &mut [u8]) -> Option<Failure> {
        self.calls().add(1);
        let report = datagrams::receive_error(&self.socket.fd, bytes).ok()??;
        let is_local = report.origin == ORIGIN_LOCAL;
        let (kind, code) = if is_local {
            local_error(self.socket.is_v6, report.error)
        } else {
            (report.kind, report.code)
        };
        let reporter = report.reporter.filter(|_| !is_local);
        Some(Failure { reporter, kind, code, info: report.info, to: report.to, len: report.len })
    }
}

/// Returns type and code of the ICMP message for an error that the host itself found.
fn local_error(is_v6: bool, error: u32) -> (u8, u8) {
    let too_big = i32::try_from(error) == Ok(Errno::MSGSIZE.raw_os_error());
    match (is_v6, too_big) {
        (false, true) => (3, 4),
        (false, false) => (3, 1),
        (true, true) => (2, 0),
        (true, false) => (1, 3),
    }
}

/// Returns `true` if this process may not open ping sockets.
pub(crate) fn echo_is_denied() -> bool {
    let denied = RealDatagrams::open(Ipv4Addr::LOCALHOST.into(), ipproto::ICMP);
    matches!(denied, Err(Errno::ACCESS | Errno::PERM))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::Arc;

    use super::*;
    use crate::counters::UplinkCounters;
    use crate::host::datagrams::RECEIVE_MAX;

    fn local(socket: &RealDatagrams) -> SocketAddr {
        rustix::net::getsockname(&socket.fd).unwrap().try_into().unwrap()
    }

    #[test]
    fn datagram_of_stranger_queued_before_connect_is_dropped() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = peer.local_addr().unwrap();
        // As in `udp`, but another socket sends before this one is connected.
        let mut socket = RealDatagrams::open(to.ip(), ipproto::UDP).unwrap();
        socket.peer = RealDatagrams::udp(0, to, None).unwrap().peer;
        socket.bind(any(to.ip(), 0)).unwrap();
        let own = SocketAddr::new(to.ip(), local(&socket).port());
        stranger.send_to(b"forged", own).unwrap();
        rustix::net::connect(&socket.fd, &to).unwrap();
        peer.send_to(b"honest", own).unwrap();
        let counters = Arc::<UplinkCounters>::default();
        let mut socket = Counted { socket, counters: Arc::clone(&counters) };
        let mut buffer = ReceiveBuffer { batch_size: 8, ..ReceiveBuffer::default() };
        socket.receive(&mut buffer).unwrap();
        let came: Vec<&[u8]> = buffer.datagrams().iter().map(|one| buffer.bytes(one)).collect();
        assert_eq!(came, [b"honest"]);
        assert_eq!(counters.drop_stranger.get(), 1);
    }

    #[test]
    fn socket_is_reported_empty_only_when_nothing_is_left() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = RealDatagrams::udp(0, peer.local_addr().unwrap(), None).unwrap();
        let to = local(&socket);
        let mut socket = Counted { socket, counters: Arc::default() };
        let mut buffer = ReceiveBuffer::default();
        // Bursts between half the maximum of a call and the maximum make the next call ask for most.
        for burst in (1..=3 * RECEIVE_MAX).chain([41, 64]) {
            for _ in 0..burst {
                peer.send_to(b"x", to).unwrap();
            }
            let mut came = 0;
            loop {
                let is_empty = match socket.receive(&mut buffer) {
                    Err(Errno::AGAIN) => break,
                    received => received.unwrap(),
                };
                came += buffer.datagrams().len();
                if is_empty {
                    break;
                }
            }
            assert_eq!(came, burst);
        }
    }

    #[test]
    fn disconnected_socket_keeps_its_port_and_hears_everybody() {
        let (peer, other) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // One port is the guest's own, the other is the kernel's choice.
        for from in [free, 0] {
            let mut socket = RealDatagrams::udp(from, peer.local_addr().unwrap(), None).unwrap();
            let port = local(&socket).port();
            socket.disconnect().unwrap();
            assert_eq!(local(&socket).port(), port);
            let mut socket = Counted { socket, counters: Arc::default() };
            let mut buffer = ReceiveBuffer { batch_size: 8, ..ReceiveBuffer::default() };
            for sender in [&peer, &other] {
                sender.send_to(b"x", (Ipv4Addr::LOCALHOST, port)).unwrap();
                socket.receive(&mut buffer).unwrap();
                assert_eq!(buffer.datagrams()[0].from, sender.local_addr().ok());
                let via = Via { to: sender.local_addr().unwrap(), from: None };
                socket.send(b"y", None, Some(via)).unwrap();
                assert_eq!(sender.recv_from(&mut [0; 8]).unwrap().1.port(), port);
            }
        }
    }

    #[test]
    fn busy_port_gets_another_one_and_is_shared_with_nobody() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = peer.local_addr().unwrap();
        let first = RealDatagrams::udp(0, to, None).unwrap();
        let port = local(&first).port();
        let second = RealDatagrams::udp(port, to, None).unwrap();
        assert_ne!(local(&second).port(), port);
        let program = RealDatagrams::open(to.ip(), ipproto::UDP).unwrap();
        sockopt::set_socket_reuseaddr(&program.fd, true).unwrap();
        assert_eq!(program.bind(any(to.ip(), port)), Err(Errno::ADDRINUSE));
    }
}
