//! Host sockets: the interface between the protocols and the host's network stack.
//!
//! [`Host`] joins the traits for TCP ([`TcpHost`]), datagrams ([`DatagramHost`]) and listening sockets
//! ([`ListenHost`]), and pairs of sockets ([`RelayHost`]). [`real::RealHost`] implements it with sockets of Linux; tests and fuzz targets use a
//! scripted host without a kernel.
//!
//! # Contract
//!
//! No call blocks, except [`Host::poll`] with a time limit. A [`Socket`] is a handle, which [`TcpHost::close`] consumes. [`Host::poll`] reports each
//! change of readiness once (edge-triggered), with the [`Owner`] that was named when the socket was opened. Listening
//! sockets are reported as long as connections wait ([`listen::Listener`]).
//! An event may arrive after its owner is gone. Owners carry a generation, so late events are ignored.

pub mod datagrams;
pub mod listen;
mod owner;
pub mod real;
pub mod relay;
#[cfg(any(test, feature = "test-utils"))]
pub mod scripted;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::io::IoSliceMut;
use std::os::fd::{BorrowedFd, OwnedFd};

use ringfence_frame::FrameView;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

pub use datagrams::DatagramHost;
pub use listen::ListenHost;
pub use owner::{Owner, OwnerKind, RunnerFile};
pub use relay::RelayHost;

/// Handle of a TCP socket of a [`Host`].
#[derive(Debug, PartialEq, Eq)]
pub struct Socket(pub(crate) u32);

/// Events that the kernel reports for a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readiness {
    /// Data to read, or the end of the stream.
    pub readable: bool,
    /// Room to write, or an established connection.
    pub writable: bool,
    /// Set after the other end has closed its direction.
    pub read_closed: bool,
    /// Urgent data has arrived.
    pub urgent: bool,
    /// Set if the socket failed: [`TcpHost::error`] returns the error.
    pub failed: bool,
}

/// Events of one socket, and the flow that owns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    pub owner: Owner,
    /// Readiness of the socket.
    pub what: Readiness,
}

/// Ways to close a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close {
    /// Sent data is still delivered.
    Orderly,
    /// The other end receives a reset; undelivered data is lost.
    Reset,
}

/// Part of a frame of the guest that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Frame that holds the bytes.
    pub frame: FrameView<'a>,
    /// Offset of the first byte.
    pub start: usize,
    /// Number of bytes; they lie inside the frame.
    pub len: usize,
}

/// Memory of a socket's send queue, in bytes. Payload needs more memory than its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendRoom {
    /// Memory in use.
    pub used: u32,
    /// Maximum of memory. The socket accepts payload while less is in use.
    pub limit: u32,
}

impl SendRoom {
    /// Returns the memory that is not in use.
    pub fn free(&self) -> u32 {
        self.limit.saturating_sub(self.used)
    }

    /// Returns `true` if the queue is so full that the caller should ask for an event ([`TcpHost::await_room`]). The
    /// kernel's own rule (`sk_stream_is_writeable`): it reports room when a third of the queue is free, and enlarges
    /// the queue of a socket that waits for that.
    pub fn is_nearly_full(&self) -> bool {
        self.free() < self.used / 2
    }
}

/// Positions of the urgent mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UrgentMark {
    /// No urgent data is queued.
    None,
    /// The mark is behind other bytes.
    Ahead,
    /// The next byte is the urgent one.
    Here,
}

/// Host operations on TCP sockets.
pub trait TcpHost {
    /// Starts a connection to `to`. An event for the owner reports success or failure.
    ///
    /// # Errors
    ///
    /// Returns the host's error; no connection was started.
    fn connect(&mut self, owner: Owner, to: SocketAddr) -> Result<Socket, Errno>;

    /// Adopts a connection of a [`Listener`](listen::Listener), perhaps one of another host of this process.
    ///
    /// # Errors
    ///
    /// Returns the host's error; the socket is closed.
    fn adopt(&mut self, owner: Owner, file: OwnedFd) -> Result<Socket, Errno>;

    /// Returns the maximum offset at which [`peek`](Self::peek) can read.
    fn peek_limit(&self) -> u32;

    /// Copies bytes from the receive queue, from `offset` on, without removing them. Returns zero at the end
    /// of the stream.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if there is no data at the offset yet. Other errors end the connection.
    fn peek(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno>;

    /// Removes up to `len` bytes from the front of the receive queue. Returns the number removed.
    ///
    /// # Errors
    ///
    /// Returns the host's error.
    fn discard(&mut self, socket: &Socket, len: usize) -> Result<usize, Errno>;

    /// Returns the position of the urgent mark relative to the front of the receive queue.
    fn urgent_mark(&mut self, socket: &Socket) -> UrgentMark;

    /// Sends as many bytes as the socket accepts, and returns their number. With `urgent`, the last byte is
    /// urgent.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if the queue is full. Other errors end the connection.
    fn send(&mut self, socket: &Socket, pieces: &[Piece<'_>], urgent: bool)
    -> Result<usize, Errno>;

    /// Sends as many of these bytes as the socket accepts, and returns their number.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if the queue is full. Other errors end the connection.
    fn send_bytes(&mut self, socket: &Socket, bytes: &[u8]) -> Result<usize, Errno>;

    /// Returns the memory of the send queue.
    fn send_room(&mut self, socket: &Socket) -> SendRoom;

    /// Returns the number of payload bytes in the send queue.
    fn unacknowledged(&mut self, socket: &Socket) -> u32;

    /// Sets the type of service or traffic class of all later segments. The kernel manages the bits of ECN itself.
    fn set_class(&mut self, socket: &Socket, class: u8);

    /// Requests a `writable` event for when there is room again.
    fn await_room(&mut self, socket: &Socket);

    /// Closes the direction to the other end.
    fn shut_down(&mut self, socket: &Socket);

    /// Returns the socket's pending error and clears it.
    fn error(&mut self, socket: &Socket) -> Option<Errno>;

    /// Closes a socket in the given way.
    fn close(&mut self, socket: Socket, how: Close);
}

/// Host: sockets of all protocols and their events.
pub trait Host: TcpHost + DatagramHost + ListenHost + RelayHost + Send {
    /// Appends a bounded number of events since the last call. Blocks for at most `within` while there are none; `None` is
    /// no limit.
    ///
    /// # Errors
    ///
    /// Returns the host's error, after which the host cannot be used.
    fn poll(&mut self, ready: &mut Vec<Ready>, within: Option<Duration>) -> Result<(), Errno>;

    /// Adds a file of the runner, whose events [`poll`](Self::poll) reports from then on. `flags` of the epoll select them.
    ///
    /// # Errors
    ///
    /// Returns the host's error, among them `EOPNOTSUPP`; [`poll`](Self::poll) reports no events of the file.
    fn watch_runner(
        &mut self,
        file: RunnerFile,
        fd: BorrowedFd<'_>,
        flags: EventFlags,
    ) -> Result<(), Errno>;

    /// Returns `true` if the host itself receives packets to this address. When these addresses change,
    /// [`poll`](Self::poll) reports an owner of the kind [`OwnerKind::Addresses`].
    fn is_own(&self, ip: IpAddr) -> bool;

    /// Prepares resources for later calls, such as spare sockets. Called at the end of a round.
    fn prepare(&mut self) {}

    /// Returns a descriptor that is readable when [`poll`](Self::poll) has events.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
