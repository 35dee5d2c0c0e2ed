//! Listening sockets of a host: connections from outside, to forwarded ports.

use core::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::owner::Owner;

/// Host operation that adopts listening sockets.
pub trait ListenHost {
    /// Adopts a listening socket that was created elsewhere. Unlike other sockets, it is reported as long as connections
    /// wait at it.
    ///
    /// # Errors
    ///
    /// Returns the host's error.
    fn listen(&mut self, owner: Owner, socket: OwnedFd) -> Result<Box<dyn Listener>, Errno>;
}

/// Listening socket. It is closed by dropping it.
pub trait Listener: Send {
    /// Accepts the next connection. Returns its socket and the client's address.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if there is none. Other errors mean a connection that was aborted, or that no
    /// descriptor is free.
    fn accept(&mut self) -> Result<(OwnedFd, SocketAddr), Errno>;

    /// Sets whether events of the socket are reported, as they are at first.
    fn watch(&mut self, is_watched: bool);
}
