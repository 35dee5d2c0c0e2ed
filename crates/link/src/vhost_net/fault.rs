//! Rule violations of a virtqueue device, each of which ends the link.

use ringfence_frame::Fault;
use ringfence_platform::vhost::QueueName;
use ringfence_ring::split::QueueFault;

use crate::frame_ring::NotOffered;

/// Rule violation of the device, after which its writes cannot be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LinkFault {
    /// Violation of the virtqueue protocol.
    #[error("{} queue: {fault}", name_of(*queue))]
    Queue {
        /// Queue in which it happened.
        queue: QueueName,
        fault: QueueFault,
    },
    /// First buffer of a frame is shorter than a virtio-net header.
    #[error("a frame begins with {len} bytes, less than a virtio-net header")]
    Header {
        /// Number of bytes that the device wrote to the first buffer.
        len: u32,
    },
    /// Number of buffers of a frame is impossible.
    #[error("a frame in {buffers} buffers, of which there are {posted}")]
    Buffers {
        /// Number of buffers in the frame's header.
        buffers: u16,
        /// Number of buffers that the device had.
        posted: u16,
    },
    /// Some buffers of a frame were not used together with the first (virtio 1.x, 5.1.6.4).
    #[error("a frame in {buffers} buffers, of which only {used} were used")]
    Incomplete {
        /// Number of buffers in the frame's header.
        buffers: u16,
        /// Number of buffers that were used.
        used: u16,
    },
    /// Device accessed memory that is not mapped for it.
    #[error("the device wanted {address:#x}, which it was not granted")]
    Miss {
        /// I/O address of the access.
        address: u64,
    },
    /// Device completed a frame that it was not offered.
    #[error(transparent)]
    NotOffered(#[from] NotOffered),
}

impl LinkFault {
    /// Returns the name of the rule's counter.
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

/// Returns the fault for a worker of the kernel that has stopped.
pub(crate) fn worker_failed(queue: QueueName) -> Fault {
    let what = match queue {
        QueueName::Receive => "the receive queue",
        QueueName::Transmit => "the transmit queue",
    };
    let why = "the kernel's worker of vhost-net reported an error and has stopped";
    Fault::system(what, std::io::Error::other(why))
}
