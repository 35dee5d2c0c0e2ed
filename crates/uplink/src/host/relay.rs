//! Relays of a host: connections whose bytes pass from one socket to another without the guest's link.

use core::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::owner::{Owner, OwnerKind};
use super::{Readiness, Ready};

/// Host operations of relays.
pub trait RelayHost {
    /// Starts to connect a non-blocking socket of the guest's network. An event for the owner reports the result, which
    /// [`connected`](Self::connected) returns.
    ///
    /// # Errors
    ///
    /// Returns the host's error; no connection was started.
    fn connect_inner(&mut self, owner: Owner, inner: &OwnedFd, to: SocketAddr)
    -> Result<(), Errno>;

    /// Opens an unconnected TCP socket of the host.
    ///
    /// # Errors
    ///
    /// Returns the host's error.
    fn open_inner(&mut self, is_v4: bool) -> Result<OwnedFd, Errno>;

    /// Closes an accepted connection by a reset.
    fn reset(&mut self, client: OwnedFd);

    /// Returns `false` if the connection is not established yet. `events` are those of the socket so far.
    ///
    /// # Errors
    ///
    /// Returns the reason for which it was refused.
    fn connected(&mut self, inner: &OwnedFd, events: Readiness) -> Result<bool, Errno>;

    /// Joins two connected sockets. Events of the inner one are reported for the owner, those of the client's for the owner
    /// with the kind [`OwnerKind::RelayOuter`].
    ///
    /// # Errors
    ///
    /// Returns the client's socket and the host's error.
    fn join(
        &mut self,
        owner: Owner,
        client: OwnedFd,
        inner: OwnedFd,
    ) -> Result<Box<dyn Relay>, (OwnedFd, Errno)>;

    /// Closes the sockets of a relay, and keeps what the next one can use.
    fn recycle(&mut self, relay: Box<dyn Relay>);
}

/// Pipe of a relay: its reader and its writer.
pub type Pipe = (OwnedFd, OwnedFd);

/// Progress of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The next event continues it. So many bytes were carried to the guest, and from it.
    Waiting(u64, u64),
    /// More can be carried now. So many bytes were carried to the guest, and from it.
    More(u64, u64),
    /// Both directions have ended, or the connection failed.
    Ended,
}

/// Events of the two sockets of a relay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayEvents {
    pub client: Readiness,
    pub inner: Readiness,
}

impl RelayEvents {
    /// Adds an event of one of the sockets.
    pub(crate) fn add(&mut self, ready: Ready) {
        let of = match ready.owner.kind {
            OwnerKind::RelayOuter => &mut self.client,
            _ => &mut self.inner,
        };
        of.readable |= ready.what.readable;
        of.writable |= ready.what.writable;
        of.read_closed |= ready.what.read_closed;
        of.failed |= ready.what.failed;
    }
}

/// Two joined sockets. They are closed by [`RelayHost::recycle`], or by dropping the relay.
pub trait Relay: Send {
    /// Carries a bounded number of bytes in each direction that can go on after `events`, or after
    /// [`Progress::More`].
    fn advance(&mut self, events: RelayEvents) -> Progress;

    /// Returns `true` for the client's stream, and for the inner socket's, if it has ended and the other socket has all of it.
    fn ended_streams(&self) -> (bool, bool);

    /// Closes the sockets. Returns the pipes that hold no bytes.
    fn into_pipes(self: Box<Self>) -> Vec<Pipe>;
}
