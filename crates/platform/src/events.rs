//! Event channels: the trait, its errors and port numbers.

use std::os::fd::AsFd;

/// Number of an event channel in the domain that owns this end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EventPort(pub u32);

/// One end of an event channel. Its descriptor is readable while the end is pending.
pub trait Channel: Send + AsFd {
    /// Returns the number of this end in its domain.
    fn port(&self) -> EventPort;

    /// Makes the other end pending. Never blocks. No effect if the other end is already pending.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::PeerGone`] if the other end is closed.
    fn notify(&self) -> Result<(), ChannelError>;

    /// Clears the pending state. Returns `true` if this end was pending. Takes bounded time, whatever the
    /// peer sent.
    ///
    /// An event without work is always possible: on Xen, an event that arrived while an earlier one was
    /// waiting makes the end pending once more. Callers therefore clear, then look for work, then wait.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::PeerGone`] if the other end is closed.
    fn clear(&self) -> Result<bool, ChannelError>;
}

/// Reasons for which a notification cannot be sent or cleared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    #[error("the other end of the event channel was closed")]
    PeerGone,
    /// Error of a system call (errno).
    #[error("event channel: errno {0}")]
    System(i32),
}
