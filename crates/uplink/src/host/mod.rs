//! The host's sockets, as the protocols see them.
//!
//! # Contract
//!
//! No call blocks. A [`Socket`] is a handle, not a file: it is closed by giving it away. What a
//! socket is ready for is reported once per change (edge-triggered), with the [`Owner`] that was
//! named when the socket was made, by [`Host::poll`]. An event may come late, for an owner that no
//! longer exists: owners carry a generation, and whoever is asked for an old one ignores it.

pub mod datagrams;
pub mod listen;
mod owner;
pub mod real;
#[cfg(any(test, feature = "test-utils"))]
pub mod scripted;

use core::net::{IpAddr, SocketAddr};
use std::io::IoSliceMut;
use std::os::fd::{BorrowedFd, OwnedFd};

use ringfence_frame::FrameView;
use rustix::io::Errno;

pub use datagrams::DatagramHost;
pub use listen::ListenHost;
pub use owner::{Owner, OwnerKind};

/// A socket of a [`Host`].
#[derive(Debug, PartialEq, Eq)]
pub struct Socket(pub(crate) u32);

/// What a socket has become ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readiness {
    /// Something to read, or the end of the stream.
    pub readable: bool,
    /// Room to write, or a connection was made.
    pub writable: bool,
    /// The other end sends no more.
    pub read_closed: bool,
    /// Urgent data.
    pub urgent: bool,
    /// The socket failed: [`TcpHost::error`] tells how.
    pub failed: bool,
}

/// An event of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    /// Whose socket.
    pub owner: Owner,
    /// Ready for what.
    pub what: Readiness,
}

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close {
    /// What was sent is still delivered.
    Orderly,
    /// The other end is sent a reset; what was not yet delivered is gone.
    Reset,
}

/// A part of a guest's frame that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The frame.
    pub frame: FrameView<'a>,
    /// The first octet.
    pub start: usize,
    /// Octets; they lie inside the frame.
    pub len: usize,
}

/// Room in the queue of what a socket has to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendRoom {
    /// Octets that can be sent now without a part of them being refused.
    pub free: usize,
    /// The queue is so full that the host is to be asked for an event ([`TcpHost::await_room`]).
    pub crowded: bool,
}

/// Where the urgent octet is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UrgentMark {
    /// There is none.
    None,
    /// Behind others.
    Ahead,
    /// It is the next octet.
    Here,
}

/// Sockets of the TCP half.
pub trait TcpHost {
    /// Begins a connection to `to`. It is made, or has failed, when the owner gets an event.
    ///
    /// # Errors
    ///
    /// The host's: nothing was begun.
    fn connect(&mut self, owner: Owner, to: SocketAddr) -> Result<Socket, Errno>;

    /// Takes in a connected socket that was accepted elsewhere.
    ///
    /// # Errors
    ///
    /// The host's; the socket is closed then.
    fn adopt(&mut self, owner: Owner, file: OwnedFd) -> Result<Socket, Errno>;

    /// How far behind the front of a queue [`peek`](Self::peek) reaches.
    fn peek_reach(&self) -> u32;

    /// Copies octets into `into` that remain in the queue, from `offset` octets behind its front on.
    /// Zero: the stream ends there.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when there is nothing there (yet); others end the connection.
    fn peek(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno>;

    /// Drops octets from the front of the queue; returns how many.
    ///
    /// # Errors
    ///
    /// The host's.
    fn discard(&mut self, socket: &Socket, len: usize) -> Result<usize, Errno>;

    /// Where the urgent mark is, seen from the front of the queue.
    fn urgent_mark(&mut self, socket: &Socket) -> UrgentMark;

    /// Sends, as far as there is room; returns how many octets were taken. `urgent`: the last octet is
    /// urgent.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when nothing was taken for want of room; others end the connection.
    fn send(&mut self, socket: &Socket, pieces: &[Piece<'_>], urgent: bool)
    -> Result<usize, Errno>;

    /// Room for what is to be sent.
    fn send_room(&mut self, socket: &Socket) -> SendRoom;

    /// Asks for a `writable` event when there is room again.
    fn await_room(&mut self, socket: &Socket);

    /// Nothing more will be sent.
    fn shut_down(&mut self, socket: &Socket);

    /// The error a socket failed with, taken once.
    fn error(&mut self, socket: &Socket) -> Option<Errno>;

    /// Closes a socket.
    fn close(&mut self, socket: Socket, how: Close);
}

/// The host: sockets of all protocols, and their events.
pub trait Host: TcpHost + DatagramHost + ListenHost + Send {
    /// Appends what has happened since the last call, a bounded number of events.
    ///
    /// # Errors
    ///
    /// The host's: it is of no more use.
    fn poll(&mut self, ready: &mut Vec<Ready>) -> Result<(), Errno>;

    /// Returns `true` if the host takes packets to this address itself. When these addresses change,
    /// [`poll`](Self::poll) reports an owner of the kind [`OwnerKind::Addresses`].
    fn is_own(&self, ip: IpAddr) -> bool;

    /// There is a moment to spare: what will be needed can be made ready.
    fn stock_up(&mut self) {}

    /// Readable when [`poll`](Self::poll) would find something.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
