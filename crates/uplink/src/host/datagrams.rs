//! Sockets of datagrams: UDP and echo requests.
//!
//! # Contract
//!
//! As for all sockets of a [`Host`](super::Host): no call blocks, events come once per change with the
//! [`Owner`] named. A socket is closed by dropping it. Many datagrams go by one call both ways: out as
//! one block of octets cut into equal segments, in as a list in an [`Inbox`].

use core::net::{IpAddr, SocketAddr};
use core::ops::Range;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::Owner;

/// Octets of the longest datagram, header not counted; also of what is sent at a time.
pub const DATAGRAM_MAX: usize = 65_507;
/// Datagrams of equal length that can be sent or come in as one block, at most: `UDP_MAX_SEGMENTS` of
/// kernels before 6.9.
pub const SEGMENTS_MAX: usize = 64;
/// Datagrams, or blocks of them, that are received at a time at most.
pub const RECEIVE_MAX: usize = 32;

/// Sockets of datagrams.
pub trait DatagramHost {
    /// A UDP socket that is connected to `to`. It has the port `from` if that can be had.
    ///
    /// # Errors
    ///
    /// The host's: there is no way to `to`, or there are no more sockets.
    fn open_udp(
        &mut self,
        owner: Owner,
        from: u16,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// A socket for echo requests (ICMP or ICMPv6) to `to`, with the identifier `id` if that can be
    /// had. What is sent and received begins with the ICMP header.
    ///
    /// # Errors
    ///
    /// The host's; `EACCES` where such sockets are not allowed (`ping_group_range`).
    fn open_echo(
        &mut self,
        owner: Owner,
        id: u16,
        to: IpAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;

    /// A bound UDP socket that was made elsewhere, for datagrams from anybody.
    ///
    /// # Errors
    ///
    /// The host's.
    fn adopt_udp(
        &mut self,
        owner: Owner,
        socket: OwnedFd,
    ) -> Result<Box<dyn DatagramSocket>, Errno>;
}

/// To whom a datagram goes that leaves by a socket which is not connected, and as whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Via {
    /// To.
    pub to: SocketAddr,
    /// From this address of the host, where that is known.
    pub from: Option<IpAddr>,
}

/// A socket of datagrams.
pub trait DatagramSocket: Send {
    /// Sends octets as one datagram, or as several of `segment` octets, the last of which may be
    /// shorter. `via` is for a socket that is not connected.
    ///
    /// # Errors
    ///
    /// The host's; nothing was sent. `EMSGSIZE`, `EINVAL` and `EIO` also when the host does not cut.
    fn send(&mut self, octets: &[u8], segment: Option<u16>, via: Option<Via>) -> Result<(), Errno>;

    /// Replaces what is in the inbox by what has come; `false` when more may be there.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when there is nothing; others are of an earlier datagram
    /// ([`error`](Self::error) tells of which).
    fn receive(&mut self, inbox: &mut Inbox) -> Result<bool, Errno>;

    /// The next report of a datagram that did not arrive; `None` when there is none. `octets` gets what
    /// is left of the datagram.
    fn error(&mut self, octets: &mut [u8]) -> Option<Failure>;

    /// Hops that a datagram may go from here on.
    fn set_hops(&mut self, hops: u8);
}

/// A datagram that did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who says so; `None`: the host itself.
    pub reporter: Option<IpAddr>,
    /// Type and code of the ICMP or ICMPv6 message.
    pub kind: u8,
    /// The same.
    pub code: u8,
    /// What the message says beside: an MTU.
    pub info: u32,
    /// Whom the datagram was for, where the socket is not connected.
    pub to: Option<SocketAddr>,
    /// Octets of it that are left.
    pub len: usize,
}

/// Datagrams that have come.
#[derive(Debug)]
pub struct Inbox {
    pub(crate) octets: Vec<u8>,
    pub(crate) datagrams: Vec<Datagram>,
    /// How many are asked for at a time: as many as came, and more.
    pub(crate) appetite: usize,
}

/// A datagram in an [`Inbox`], or several of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Where its octets are.
    pub octets: Range<usize>,
    /// The length of each, where they are several; the last may be shorter.
    pub segment: Option<u16>,
    /// Who sent it, where the socket is not connected.
    pub from: Option<SocketAddr>,
    /// The host's address that it was sent to, where that is known.
    pub to: Option<IpAddr>,
}

/// Room for one datagram, or one block of them.
pub(crate) const ROOM: usize = 1 << 16;

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox { octets: Vec::new(), datagrams: Vec::new(), appetite: 1 }
    }
}

impl Inbox {
    /// What is there.
    pub fn datagrams(&self) -> &[Datagram] {
        &self.datagrams
    }

    /// The octets of one.
    pub fn octets(&self, datagram: &Datagram) -> &[u8] {
        self.octets.get(datagram.octets.clone()).unwrap_or_default()
    }

    /// Room for `count` datagrams, each in a slot of [`ROOM`] octets.
    pub(crate) fn prepare(&mut self, count: usize) {
        self.datagrams.clear();
        let wanted = count.min(RECEIVE_MAX) * ROOM;
        if self.octets.len() < wanted {
            // Once: the pages that are never written to cost nothing.
            self.octets = vec![0; RECEIVE_MAX * ROOM];
        }
    }

    /// Learns from how many came of how many asked for.
    pub(crate) fn learn(&mut self, asked: usize, came: usize) {
        self.appetite =
            if came >= asked { (asked * 4).min(RECEIVE_MAX) } else { (came * 2).max(1) };
    }
}
