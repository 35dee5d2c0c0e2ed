//! Datagram sockets of a host: UDP and echo requests.
//!
//! # Contract
//!
//! As for all sockets of a [`Host`](super::Host), no call blocks. An event is raised once per change and
//! names the [`Owner`]. A socket is closed by dropping it. Calls are batched in both directions: one block
//! of bytes that is cut into equal segments out, a list in a [`ReceiveBuffer`] in.

use core::net::{IpAddr, SocketAddr};
use core::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::owner::Owner;
use crate::packet::Marks;
use crate::udp::multicast::service::Group;

/// Maximum payload of a datagram in bytes; also the maximum of one send call.
pub const DATAGRAM_MAX: usize = 65_507;
/// Maximum of datagrams of equal length in one block: `UDP_MAX_SEGMENTS` of kernels before 6.9.
pub const SEGMENTS_MAX: usize = 64;
/// Maximum of datagrams, or blocks of them, in one receive call.
pub const RECEIVE_MAX: usize = 32;

/// Host operations that open datagram sockets.
pub trait DatagramHost {
    /// Opens a UDP socket and connects it to `to`. It is bound to the port `from` if that is available.
    ///
    /// # Errors
    ///
    /// Returns the host's error: no route to `to`, or no more sockets.
    fn open_udp(
        &mut self,
        owner: Owner,
        from: u16,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// Disconnects a socket of [`open_udp`](Self::open_udp) from its peer. It keeps its port, belongs to `owner` from then on,
    /// and accepts datagrams from any sender. Its hop limit may be the default.
    ///
    /// # Errors
    ///
    /// Returns the host's error, after which the socket is not usable. `EOPNOTSUPP`: it is as before.
    fn share_udp(&mut self, owner: Owner, socket: &mut dyn DatagramSocket) -> Result<(), Errno>;

    /// Returns `true` if `to` is another host, and the routing table alone chooses the source of datagrams to it.
    fn routes_freely(&self, to: IpAddr) -> bool;

    /// Connects a UDP socket of the guest's network, which was created elsewhere, to `to`.
    ///
    /// # Errors
    ///
    /// Returns the host's error: no route to `to`.
    fn connect_udp(
        &mut self,
        owner: Owner,
        socket: OwnedFd,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// Opens a socket for echo requests (ICMP or ICMPv6) to `to`. It has the identifier `id` if that is
    /// available. Messages sent and received begin with the ICMP header.
    ///
    /// # Errors
    ///
    /// Returns the host's error; `EACCES` if ping sockets are not permitted (`ping_group_range`).
    fn open_echo(
        &mut self,
        owner: Owner,
        id: u16,
        to: IpAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// Opens a UDP socket for questions to a multicast group, and for answers from any host on the group's interface.
    /// The port is `from` if that is available.
    ///
    /// # Errors
    ///
    /// Returns the host's error: no such interface, or no more sockets.
    fn open_question(
        &mut self,
        owner: Owner,
        from: u16,
        group: &Group,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// Adopts a bound UDP socket that was created elsewhere. It accepts datagrams from any sender.
    ///
    /// # Errors
    ///
    /// Returns the host's error.
    fn adopt_udp(
        &mut self,
        owner: Owner,
        socket: OwnedFd,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;
}

/// Destination and source address of a datagram on an unconnected socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Via {
    pub to: SocketAddr,
    /// Source address of the host, if it is fixed.
    pub from: Option<IpAddr>,
}

/// Datagram socket of a host.
pub trait DatagramSocket: Send {
    /// Sends `bytes` as one datagram, or as several of `segment` bytes, the last of which may be shorter.
    /// `via` is required on an unconnected socket.
    ///
    /// # Errors
    ///
    /// Returns the host's error; nothing was sent, except that earlier segments of a block which the host
    /// cannot segment may have been.
    fn send(&mut self, bytes: &[u8], segment: Option<u16>, via: Option<Via>) -> Result<(), Errno>;

    /// Replaces the content of `buffer` by received datagrams. Returns `false` if more may be waiting.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if there is none. Other errors concern an earlier datagram; [`error`](Self::error)
    /// reports which.
    fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Result<bool, Errno>;

    /// Returns the next report of an undelivered datagram, if there is one. `bytes` receives the part of the
    /// datagram that the report quotes.
    fn error(&mut self, bytes: &mut [u8]) -> Option<Failure>;

    /// Sets hop limit, traffic class and fragmentation of datagrams sent from now on.
    fn set_marks(&mut self, marks: Marks);

    /// Returns the MTU of the path to the peer as far as the host knows it, in bytes; `None` on an unconnected socket.
    fn path_mtu(&self) -> Option<u32> {
        None
    }

    /// Returns the address to which the socket is bound, if it is one of the kernel's.
    fn local_address(&self) -> Option<SocketAddr> {
        None
    }

    /// Disconnects the socket from its peer. It keeps its port and accepts datagrams from any sender. Returns its descriptor.
    ///
    /// # Errors
    ///
    /// Returns the host's error, after which the socket is not usable. `EOPNOTSUPP`: it cannot do without a peer, and is as
    /// before.
    fn disconnect(&mut self) -> Result<BorrowedFd<'_>, Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

/// Report of a datagram that was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Address of the reporter; `None` if the host itself found the error.
    pub reporter: Option<IpAddr>,
    /// Type of the ICMP or ICMPv6 message.
    pub kind: u8,
    /// Code of the ICMP or ICMPv6 message.
    pub code: u8,
    /// Additional value of the message, such as an MTU.
    pub info: u32,
    pub to: Option<SocketAddr>,
    /// Number of quoted bytes.
    pub len: usize,
}

impl Failure {
    /// Returns `true` if the host itself has found a datagram longer than the MTU, while it was sent.
    pub(crate) fn is_too_long(&self) -> bool {
        self.reporter.is_none() && matches!((self.kind, self.code), (3, 4) | (2, 0))
    }
}

/// Buffer of received datagrams.
#[derive(Debug)]
pub struct ReceiveBuffer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) datagrams: Vec<Datagram>,
    /// Number of datagrams to ask for: adapts to the number that came.
    pub(crate) batch_size: usize,
}

/// Datagram in a [`ReceiveBuffer`], or several of equal length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Position of the bytes in the buffer.
    pub bytes: Range<usize>,
    /// Length of each datagram if there are several; the last may be shorter.
    pub segment: Option<u16>,
    /// Address of the sender, if known.
    pub from: Option<SocketAddr>,
    /// Address of the host that received it, if known.
    pub to: Option<IpAddr>,
    /// Type of service or traffic class, if known, else 0.
    pub class: u8,
    /// TTL or hop limit, if known.
    pub hops: Option<u8>,
}

/// Datagrams that follow each other in a [`ReceiveBuffer`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramRun<'a> {
    buffer: &'a ReceiveBuffer,
    datagrams: &'a [Datagram],
}

impl<'a> DatagramRun<'a> {
    /// Returns all datagrams of a buffer.
    pub(crate) fn all(buffer: &'a ReceiveBuffer) -> DatagramRun<'a> {
        DatagramRun { buffer, datagrams: &buffer.datagrams }
    }

    /// Splits a buffer where sender or receiver changes.
    pub(crate) fn by_ends(buffer: &'a ReceiveBuffer) -> impl Iterator<Item = DatagramRun<'a>> {
        let same = |a: &Datagram, b: &Datagram| a.from == b.from && a.to == b.to;
        buffer.datagrams.chunk_by(same).map(move |datagrams| DatagramRun { buffer, datagrams })
    }

    pub(crate) fn len(&self) -> usize {
        self.datagrams.len()
    }

    /// Returns the number of bytes of all datagrams.
    pub(crate) fn bytes(&self) -> usize {
        self.datagrams.iter().map(|datagram| datagram.bytes.len()).sum()
    }

    pub(crate) fn first(&self) -> Option<&'a Datagram> {
        self.datagrams.first()
    }

    /// Returns the datagrams with their bytes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'a Datagram, &'a [u8])> {
        let buffer = self.buffer;
        self.datagrams.iter().map(move |datagram| (datagram, buffer.bytes(datagram)))
    }
}

/// Buffer space for one datagram or one block, in bytes.
pub(crate) const ROOM: usize = 1 << 16;

impl Default for ReceiveBuffer {
    fn default() -> ReceiveBuffer {
        ReceiveBuffer { bytes: Vec::new(), datagrams: Vec::new(), batch_size: 1 }
    }
}

impl ReceiveBuffer {
    /// Returns the received datagrams.
    pub fn datagrams(&self) -> &[Datagram] {
        &self.datagrams
    }

    /// Returns the bytes of a datagram.
    pub fn bytes(&self, datagram: &Datagram) -> &[u8] {
        self.bytes.get(datagram.bytes.clone()).unwrap_or_default()
    }

    /// Makes room for `count` datagrams of [`ROOM`] bytes each.
    pub(crate) fn prepare(&mut self, count: usize) {
        self.datagrams.clear();
        let wanted = count.min(RECEIVE_MAX) * ROOM;
        if self.bytes.len() < wanted {
            // Allocated once: pages that are never written use no memory.
            self.bytes = vec![0; RECEIVE_MAX * ROOM];
        }
    }

    /// Adapts the number of datagrams to ask for to the number received. Never more than the buffer has room for: fewer
    /// datagrams than asked for mean an empty socket, of which no further event may come.
    pub(crate) fn adapt(&mut self, asked: usize, came: usize) {
        let next = if came >= asked { asked * 4 } else { came * 2 };
        self.batch_size = next.clamp(1, RECEIVE_MAX);
    }
}
