//! Sockets that wait for connections from outside.

use core::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::Owner;

/// Sockets that wait for connections.
pub trait ListenHost {
    /// A listening socket that was made elsewhere.
    ///
    /// # Errors
    ///
    /// The host's.
    fn listen(&mut self, owner: Owner, socket: OwnedFd) -> Result<Box<dyn Listener>, Errno>;
}

/// A socket that waits for connections. It is closed by dropping it.
pub trait Listener: Send {
    /// The next connection that was made, and who made it.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when there is none; others are of a connection that is gone, or of want of descriptors.
    fn accept(&mut self) -> Result<(OwnedFd, SocketAddr), Errno>;
}
