//! Why a link by virtqueues ended.

use ringfence_frame::Fault;
use ringfence_ring::split::QueueFault;
use ringfence_sys::vhost::QueueName;

use crate::link::vhost_net::frames::NotOffered;

/// The device broke a rule, after which nothing it says can be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LinkFault {
    /// A rule of virtqueues.
    #[error("{} queue: {fault}", name_of(*queue))]
    Queue {
        /// In which queue.
        queue: QueueName,
        /// The rule.
        fault: QueueFault,
    },
    /// A frame begins in a buffer that has no room for its virtio-net header.
    #[error("a frame begins with {len} octets, less than a virtio-net header")]
    Header {
        /// Octets that the device wrote to the first buffer.
        len: u32,
    },
    /// A frame lies in a number of buffers that cannot be.
    #[error("a frame in {buffers} buffers, of which there are {posted}")]
    Buffers {
        /// Buffers that its header names.
        buffers: u16,
        /// Buffers that the device had.
        posted: u16,
    },
    /// Not all buffers of a frame were used at once (virtio 1.x, 5.1.6.4).
    #[error("a frame in {buffers} buffers, of which only {used} were used")]
    Incomplete {
        /// Buffers that its header names.
        buffers: u16,
        /// Buffers that came.
        used: u16,
    },
    /// The device wanted memory that it was not granted.
    #[error("the device wanted {address:#x}, which it was not granted")]
    Miss {
        /// The I/O address.
        address: u64,
    },
    /// A frame came back that was not sent.
    #[error(transparent)]
    NotOffered(#[from] NotOffered),
}

impl LinkFault {
    /// The name of the rule, to count by.
    pub fn rule(&self) -> &'static str {
        match self {
            LinkFault::Queue { fault, .. } => fault.rule(),
            LinkFault::Header { .. } => "virtqueue_short_header",
            LinkFault::Buffers { .. } => "virtqueue_frame_buffers",
            LinkFault::Incomplete { .. } => "virtqueue_frame_incomplete",
            LinkFault::Miss { .. } => "virtqueue_miss_refused",
            LinkFault::NotOffered(_) => "virtqueue_frame_not_offered",
        }
    }
}

fn name_of(queue: QueueName) -> &'static str {
    match queue {
        QueueName::Receive => "receive",
        QueueName::Transmit => "transmit",
    }
}

/// The kernel's worker has said that it cannot go on.
pub(crate) fn worker_failed(queue: QueueName) -> Fault {
    let what = match queue {
        QueueName::Receive => "the receive queue",
        QueueName::Transmit => "the transmit queue",
    };
    let why = "the kernel's worker of vhost-net reported an error and has stopped";
    Fault::system(what, std::io::Error::other(why))
}
