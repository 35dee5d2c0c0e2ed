//! The link to a guest by kernel vhost-net, in memory that both sides see.
//!
//! * [`frames`]: the ring in which frames for the guest are put together, where they are read from sockets.
//! * [`link`]: the link by kernel vhost-net: virtqueues in memory that both sides see.
//!
//! A link is a [`Port`](ringfence_frame::Port), which is how frames come from the guest, and a
//! [`GuestSide`](crate::GuestSide), which is how the uplink puts frames for it together. It has
//! one queue, and belongs to one thread; an interface of several queues has a link for each.

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

/// Frames that the kernel holds between the guest and the reader of a TAP interface (its default
/// `txqueuelen`).
const TAP_QUEUE: usize = 1000;

/// Commits frames, and counts those that cannot be; how many could.
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

/// What the kernel holds for the reader before it drops, in octets: nothing to speak of where TCP comes in
/// super-packets, as each takes only one of the places.
pub(super) fn inbound_queue(capabilities: &PortCapabilities) -> Option<usize> {
    let whole = capabilities.gso.tcp_v4 && capabilities.gso.tcp_v6;
    (!whole).then(|| TAP_QUEUE * usize::from(capabilities.mtu))
}
