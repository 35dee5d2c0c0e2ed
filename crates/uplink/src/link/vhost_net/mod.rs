//! Vhost-net link: virtqueues in memory that the uplink shares with the kernel.
//!
//! * [`frames`]: the ring in which frames for the guest are assembled.
//! * [`link`]: the link itself, with its receive and send side.
//! * `device`: the kernel's device, or a mock device in tests.
//!
//! A link is a [`Port`](ringfence_frame::Port), by which frames come from the guest, and a
//! [`GuestLink`](crate::GuestLink), by which the engine assembles frames for it. It has one queue and belongs
//! to one thread; an interface with several queues has a link for each.

mod device;
mod fault;
pub mod frames;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
mod header;
pub mod link;

pub use device::Device;
pub use fault::LinkFault;
pub use link::{Protection, VhostLink};

use ringfence_frame::{DropReason, PortCapabilities, PortCounters};

use crate::link::Committed;

use frames::{CommitError, FrameRing};

/// Number of frames that the kernel queues for the reader of a TAP interface (its default `txqueuelen`).
const TAP_QUEUE: usize = 1000;

/// Commits frames. Counts those that cannot be committed, and returns the number of those that were.
pub(super) fn commit_all(
    ring: &mut FrameRing,
    frames: &[Committed],
    counters: &PortCounters,
) -> usize {
    let mut done = 0;
    for frame in frames {
        match ring.commit(frame.len, frame.meta) {
            Ok(()) => done += 1,
            Err(CommitError::NotReserved) => counters.dropped(DropReason::PortFull),
            Err(CommitError::TooLong { .. }) => counters.dropped(DropReason::TooLong),
            Err(CommitError::Meta(_)) => counters.dropped(DropReason::GsoUnsupported),
        }
    }
    done
}

/// Returns the bytes that the kernel queues for the reader before it drops. Returns `None` for a link with TCP
/// super-packets, since each takes only one entry of the queue.
pub(super) fn inbound_queue(capabilities: &PortCapabilities) -> Option<usize> {
    let whole = capabilities.gso.tcp_v4 && capabilities.gso.tcp_v6;
    (!whole).then(|| TAP_QUEUE * usize::from(capabilities.mtu))
}
