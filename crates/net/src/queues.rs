//! Queues of a vif: their event channels, and their distribution to the parts of a port. Both ends use it.

use std::os::fd::{AsFd, BorrowedFd};

use ringfence_frame::port::Fault;
use ringfence_platform::{Channel, ChannelError};

use crate::rules::RuleCounters;

/// Event channels of a queue: one for both rings, or one for each.
pub struct QueueChannels<C> {
    /// Event channel of the TX ring, or of both.
    pub tx: C,
    /// Event channel of the RX ring, if it has its own (`feature-split-event-channels`).
    pub rx: Option<C>,
}

impl<C: Channel> QueueChannels<C> {
    pub(crate) fn rx(&self) -> &C {
        self.rx.as_ref().unwrap_or(&self.tx)
    }

    /// Returns the file descriptors to wait for.
    pub(crate) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.tx.as_fd()].into_iter().chain(self.rx.iter().map(AsFd::as_fd))
    }

    /// Clears the pending events of both channels.
    pub(crate) fn clear(&self) -> Result<(), ChannelError> {
        self.tx.clear()?;
        self.rx.as_ref().map_or(Ok(()), |rx| rx.clear().map(drop))
    }
}

/// Converts a failure of an event channel to a fault. A peer that disconnects may close the channel before
/// its state change is visible; a connected peer has no reason to.
pub(crate) fn channel_fault(rules: &RuleCounters) -> impl FnOnce(ChannelError) -> Fault {
    move |error| match error {
        ChannelError::PeerGone => {
            rules.count("channel_closed");
            Fault::Gone
        }
        ChannelError::System(errno) => {
            rules.count("channel_failed");
            Fault::system("event channel", std::io::Error::from_raw_os_error(errno))
        }
    }
}

/// Distributes queues round-robin to `parts` lists.
pub(crate) fn deal<Q>(queues: Vec<Q>, parts: usize) -> Vec<Vec<Q>> {
    let mut shares: Vec<Vec<Q>> = (0..parts).map(|_| Vec::new()).collect();
    for (number, queue) in queues.into_iter().enumerate() {
        shares[number % parts].push(queue);
    }
    shares
}
