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
// #syscall uplink recvmmsg,sendmmsg: datagrams, many at a time
// #syscall uplink recvmsg,sendmsg: errors, and datagrams one at a time
// #syscall uplink setsockopt 1=IPPROTO_UDP: segmentation of datagrams
// #syscall uplink setsockopt 1=IPPROTO_IP: errors, hop limit, destination of a datagram
// #syscall uplink setsockopt 1=IPPROTO_IPV6: errors, hop limit, destination of a datagram
// #syscall uplink setsockopt 1=IPPROTO_ICMPV6: message filter
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_RCVBUF: bounding a socket's queue
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_SNDBUF: bounding a socket's queue
// #syscall uplink getsockopt 1=SOL_SOCKET: errors
// #syscall uplink getsockopt 1=IPPROTO_IP: options in force
// #syscall uplink getsockopt 1=IPPROTO_IPV6: options in force

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockFlag,
    SockProtocol, SockType, SockaddrStorage, setsockopt, sockopt,
};
use ringfence_sys::counters::Counter;
use rustix::io::Errno;

use crate::host::datagrams::{Datagram, DatagramSocket, Failure, ROOM, ReceiveBuffer, Via};

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
}

fn errno(error: nix::Error) -> Errno {
    Errno::from_raw_os_error(error as i32)
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn any(of: IpAddr, port: u16) -> SocketAddr {
    let ip: IpAddr =
        if of.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(ip, port)
}

impl RealDatagrams {
    /// Opens a connected UDP socket.
    pub(crate) fn udp(from: u16, to: SocketAddr) -> Result<RealDatagrams, Errno> {
        let mut socket = RealDatagrams::open(to.ip(), SockProtocol::Udp)?;
        socket.peer = Some(SocketAddr::new(to.ip(), to.port()));
        // Without SO_REUSEADDR and SO_REUSEPORT: sockets that share a port would steal datagrams, across
        // uplinks and users. If the port is in use or privileged, `connect` selects another one.
        let _ = socket.bind(any(to.ip(), from));
        socket.tune();
        let address = SockaddrStorage::from(to);
        nix::sys::socket::connect(socket.fd.as_raw_fd(), &address).map_err(errno)?;
        Ok(socket)
    }

    /// Opens a connected ping socket.
    pub(crate) fn echo(id: u16, to: IpAddr) -> Result<RealDatagrams, Errno> {
        let protocol = if to.is_ipv4() { SockProtocol::Icmp } else { SockProtocol::IcmpV6 };
        let mut socket = RealDatagrams::open(to, protocol)?;
        // Reports and replies of echo sockets have port 0.
        socket.peer = Some(SocketAddr::new(to, 0));
        let _ = socket.bind(any(to, id));
        socket.enable_errors();
        let address = SockaddrStorage::from(SocketAddr::new(to, 0));
        nix::sys::socket::connect(socket.fd.as_raw_fd(), &address).map_err(errno)?;
        Ok(socket)
    }

    /// Adopts a UDP socket that was bound elsewhere.
    pub(crate) fn adopted(fd: OwnedFd) -> Result<RealDatagrams, Errno> {
        let name = nix::sys::socket::getsockname::<SockaddrStorage>(fd.as_raw_fd());
        let is_v6 = name.map_err(errno)?.as_sockaddr_in6().is_some();
        let socket = RealDatagrams { fd, is_v6, peer: None, can_segment: true };
        // An answer must leave from the address that the client contacted.
        if is_v6 {
            let _ = setsockopt(&socket.fd, sockopt::Ipv6RecvPacketInfo, &true);
        } else {
            let _ = setsockopt(&socket.fd, sockopt::Ipv4PacketInfo, &true);
        }
        socket.tune();
        Ok(socket)
    }

    fn open(to: IpAddr, protocol: SockProtocol) -> Result<RealDatagrams, Errno> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = nix::sys::socket::socket(family(to), SockType::Datagram, flags, protocol)
            .map_err(errno)?;
        Ok(RealDatagrams { fd, is_v6: to.is_ipv6(), peer: None, can_segment: true })
    }

    fn bind(&self, at: SocketAddr) -> Result<(), Errno> {
        let address = SockaddrStorage::from(at);
        nix::sys::socket::bind(self.fd.as_raw_fd(), &address).map_err(errno)
    }

    /// Sets options that are useful but not required.
    fn tune(&self) {
        self.enable_errors();
        let _ = setsockopt(&self.fd, sockopt::UdpGroSegment, &true);
        let _ = setsockopt(&self.fd, sockopt::RcvBuf, &BUFFER);
        let _ = setsockopt(&self.fd, sockopt::SndBuf, &BUFFER);
    }

    fn enable_errors(&self) {
        if self.is_v6 {
            let _ = setsockopt(&self.fd, sockopt::Ipv6RecvErr, &true);
        } else {
            let _ = setsockopt(&self.fd, sockopt::Ipv4RecvErr, &true);
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
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let to = via.map(|via| SockaddrStorage::from(via.to));
        if segment.is_none() && to.is_none() {
            return nix::sys::socket::send(self.fd.as_raw_fd(), bytes, flags)
                .map(drop)
                .map_err(errno);
        }
        let (v4, v6);
        let mut control: [Option<ControlMessage<'_>>; 2] = [None, None];
        control[0] = segment.as_ref().map(ControlMessage::UdpGsoSegments);
        control[1] = match via.and_then(|via| via.from) {
            Some(IpAddr::V4(ip)) => {
                let zero = nix::libc::in_addr { s_addr: 0 };
                let ipi_spec_dst = nix::libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) };
                v4 = nix::libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst, ipi_addr: zero };
                Some(ControlMessage::Ipv4PacketInfo(&v4))
            }
            Some(IpAddr::V6(ip)) => {
                let ipi6_addr = nix::libc::in6_addr { s6_addr: ip.octets() };
                v6 = nix::libc::in6_pktinfo { ipi6_addr, ipi6_ifindex: 0 };
                Some(ControlMessage::Ipv6PacketInfo(&v6))
            }
            None => None,
        };
        let control: arrayvec::ArrayVec<ControlMessage<'_>, 2> =
            control.into_iter().flatten().collect();
        let parts = [IoSlice::new(bytes)];
        let fd = self.fd.as_raw_fd();
        nix::sys::socket::sendmsg(fd, &parts, &control, flags, to.as_ref()).map(drop).map_err(errno)
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
                Err(Errno::INVAL | Errno::MSGSIZE | Errno::IO | Errno::OPNOTSUPP) => {
                    self.socket.can_segment = false;
                }
                done => return done,
            }
        }
        for piece in bytes.chunks(usize::from(segment).max(1)) {
            self.calls().add(1);
            self.socket.send_block(piece, None, via)?;
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Result<bool, Errno> {
        self.calls().add(1);
        let asked = buffer.batch_size;
        buffer.prepare(asked);
        let mut datagrams = core::mem::take(&mut buffer.datagrams);
        let space = nix::cmsg_space!([i32; 1], nix::libc::in6_pktinfo);
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(asked, Some(space));
        let rooms = buffer.bytes.chunks_mut(ROOM).take(asked);
        let mut rooms: Vec<[IoSliceMut<'_>; 1]> =
            rooms.map(|room| [IoSliceMut::new(room)]).collect();
        let flags = MsgFlags::MSG_DONTWAIT;
        let fd = self.socket.fd.as_raw_fd();
        let came = nix::sys::socket::recvmmsg(fd, &mut headers, rooms.iter_mut(), flags, None);
        let came = came.map_err(errno)?;
        let mut count = 0;
        for (message, at) in came.zip(0..) {
            count += 1;
            let start = at * ROOM;
            let from = message.address.and_then(|address| address_of(&address));
            if !self.socket.accepts(from) {
                self.counters.drop_stranger.add(1);
                continue;
            }
            let bytes = start..start + message.bytes.min(ROOM);
            let mut datagram = Datagram { bytes, segment: None, from, to: None };
            for control in message.cmsgs().into_iter().flatten() {
                match control {
                    ControlMessageOwned::UdpGroSegments(size) => {
                        datagram.segment = u16::try_from(size).ok().filter(|size| *size > 0);
                    }
                    ControlMessageOwned::Ipv4PacketInfo(info) => {
                        let ip = Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes());
                        datagram.to = Some(ip.into());
                    }
                    ControlMessageOwned::Ipv6PacketInfo(info) => {
                        datagram.to = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
                    }
                    _ => {}
                }
            }
            datagrams.push(datagram);
        }
        buffer.datagrams = datagrams;
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

    fn set_hops(&mut self, hops: u8) {
        self.calls().add(1);
        let hops = i32::from(hops);
        if self.socket.is_v6 {
            let _ = setsockopt(&self.socket.fd, sockopt::Ipv6Ttl, &hops);
        } else {
            let _ = setsockopt(&self.socket.fd, sockopt::Ipv4Ttl, &hops);
        }
    }
}

impl Counted {
    /// Reads the next report from the socket's error queue.
    fn next_error(&self, bytes: &mut [u8]) -> Option<Failure> {
        self.calls().add(1);
        let mut space = nix::cmsg_space!(nix::libc::sock_extended_err, nix::libc::sockaddr_in6);
        let mut parts = [IoSliceMut::new(bytes)];
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let fd = self.socket.fd.as_raw_fd();
        let message =
            nix::sys::socket::recvmsg::<SockaddrStorage>(fd, &mut parts, Some(&mut space), flags)
                .ok()?;
        let to = message.address.and_then(|address| address_of(&address));
        let len = message.bytes;
        for control in message.cmsgs().ok()? {
            let (error, reporter) = match control {
                ControlMessageOwned::Ipv4RecvErr(error, from) => (
                    error,
                    from.map(|from| Ipv4Addr::from(from.sin_addr.s_addr.to_ne_bytes()).into()),
                ),
                ControlMessageOwned::Ipv6RecvErr(error, from) => {
                    (error, from.map(|from| Ipv6Addr::from(from.sin6_addr.s6_addr).into()))
                }
                _ => continue,
            };
            let is_local = error.ee_origin == ORIGIN_LOCAL;
            let (kind, code) = if is_local {
                local_error(self.socket.is_v6, error.ee_errno)
            } else {
                (error.ee_type, error.ee_code)
            };
            let reporter = reporter.filter(|_| !is_local);
            return Some(Failure { reporter, kind, code, info: error.ee_info, to, len });
        }
        None
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

fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddr::new(v4.ip().into(), v4.port()));
    }
    address.as_sockaddr_in6().map(|v6| SocketAddr::new(v6.ip().into(), v6.port()))
}

/// Returns `true` if this process may not open ping sockets.
pub(crate) fn echo_is_denied() -> bool {
    let denied = RealDatagrams::open(Ipv4Addr::LOCALHOST.into(), SockProtocol::Icmp);
    matches!(denied, Err(Errno::ACCESS | Errno::PERM))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::Arc;

    use super::*;
    use crate::counters::UplinkCounters;

    fn local(socket: &RealDatagrams) -> SocketAddr {
        let name = nix::sys::socket::getsockname::<SockaddrStorage>(socket.fd.as_raw_fd());
        address_of(&name.unwrap()).unwrap()
    }

    #[test]
    fn datagram_of_stranger_queued_before_connect_is_dropped() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = peer.local_addr().unwrap();
        // As in `udp`, but another socket sends before this one is connected.
        let mut socket = RealDatagrams::open(to.ip(), SockProtocol::Udp).unwrap();
        socket.peer = RealDatagrams::udp(0, to).unwrap().peer;
        socket.bind(any(to.ip(), 0)).unwrap();
        let own = SocketAddr::new(to.ip(), local(&socket).port());
        stranger.send_to(b"forged", own).unwrap();
        let address = SockaddrStorage::from(to);
        nix::sys::socket::connect(socket.fd.as_raw_fd(), &address).unwrap();
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
    fn busy_port_gets_another_one_and_is_shared_with_nobody() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = peer.local_addr().unwrap();
        let first = RealDatagrams::udp(0, to).unwrap();
        let port = local(&first).port();
        let second = RealDatagrams::udp(port, to).unwrap();
        assert_ne!(local(&second).port(), port);
        let program = RealDatagrams::open(to.ip(), SockProtocol::Udp).unwrap();
        setsockopt(&program.fd, sockopt::ReuseAddr, &true).unwrap();
        assert_eq!(program.bind(any(to.ip(), port)), Err(Errno::ADDRINUSE));
    }
}
