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

    fn each(&self) -> impl Iterator<Item = &C> {
        [&self.tx].into_iter().chain(&self.rx)
    }

    /// Returns the file descriptors to wait for.
    pub(crate) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.each().map(AsFd::as_fd)
    }
}

/// Clears the pending events of one channel. `file` counts the channels of all queues, in the order of
/// [`QueueChannels::wait_fds`].
pub(crate) fn clear_channel<'a, C: Channel + 'a>(
    queues: impl Iterator<Item = (&'a QueueChannels<C>, &'a RuleCounters)>,
    file: usize,
) -> Result<(), Fault> {
    let mut channels =
        queues.flat_map(|(channels, rules)| channels.each().map(move |channel| (channel, rules)));
    match channels.nth(file) {
        Some((channel, rules)) => channel.clear().map(drop).map_err(channel_fault(rules)),
        None => Ok(()),
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ringfence_platform::EventPort;

    use super::*;

    /// Channel that counts how often it is cleared.
    struct Counting {
        file: std::fs::File,
        cleared: Cell<u32>,
    }

    impl Counting {
        fn new() -> Counting {
            Counting { file: std::fs::File::open("/dev/null").unwrap(), cleared: Cell::new(0) }
        }
    }

    impl AsFd for Counting {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    impl Channel for Counting {
        fn port(&self) -> EventPort {
            EventPort(1)
        }

        fn notify(&self) -> Result<(), ChannelError> {
            Ok(())
        }

        fn clear(&self) -> Result<bool, ChannelError> {
            self.cleared.set(self.cleared.get() + 1);
            Ok(true)
        }
    }

    #[test]
    fn event_of_a_file_clears_the_channel_of_that_file_alone() {
        let rules = RuleCounters::default();
        let joint = QueueChannels { tx: Counting::new(), rx: None };
        let split = QueueChannels { tx: Counting::new(), rx: Some(Counting::new()) };
        let queues = [&joint, &split];
        let files = queues.iter().flat_map(|queue| queue.wait_fds()).count();
        for file in 0..=files {
            clear_channel(queues.into_iter().map(|queue| (queue, &rules)), file).unwrap();
            let cleared: Vec<_> =
                queues.iter().flat_map(|queue| queue.each()).map(|c| c.cleared.take()).collect();
            let wanted: Vec<_> = (0..files).map(|other| u32::from(other == file)).collect();
            assert_eq!(cleared, wanted, "file {file}");
        }
    }
}
