//! Faults that end a queue.

use std::io;

use ringfence_platform::ChannelError;
use ringfence_ring::ProducerOverflow;

/// Reasons for which a queue ends on its own.
#[derive(Debug, thiserror::Error)]
pub enum QueueFault {
    /// Producer index of the frontend's ring is beyond what the ring holds.
    #[error(transparent)]
    Ring(#[from] ProducerOverflow),
    /// Frontend closed its end of the event channel.
    #[error("the other end of the event channel was closed")]
    Gone,
    /// System call that failed.
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// Completion of the disk for a request that it does not have. The disk is at fault.
    #[error("the disk completed request {token}, which it did not have")]
    UnknownCompletion { token: u64 },
    /// Ring slot without the unanswered request that should be there. A defect of blkback.
    #[error("ring slot {index} has no unanswered request")]
    UnknownSlot { index: u32 },
    /// Thread of the queue panicked.
    #[error("the thread of a queue panicked")]
    Panicked,
}

impl QueueFault {
    /// Returns a constant name of the fault, for counters.
    pub fn rule(&self) -> &'static str {
        match self {
            QueueFault::Ring(_) => "blk_producer_overflow",
            QueueFault::Gone => "channel_closed",
            QueueFault::System { .. } => "channel_failed",
            QueueFault::UnknownCompletion { .. } => "blk_unknown_completion",
            QueueFault::UnknownSlot { .. } => "blk_unknown_slot",
            QueueFault::Panicked => "queue_panicked",
        }
    }
}

impl From<ChannelError> for QueueFault {
    fn from(error: ChannelError) -> QueueFault {
        match error {
            ChannelError::PeerGone => QueueFault::Gone,
            ChannelError::System(errno) => QueueFault::System {
                what: "event channel",
                source: io::Error::from_raw_os_error(errno),
            },
        }
    }
}
