#![forbid(unsafe_code)]
//! The guest's link: how the packets of a network namespace reach the uplink, and come back.
//!
//! * [`frames`]: the ring in which frames for the guest are put together, where they are read from sockets.
//! * [`tap`]: the link by a TAP interface: a system call for each frame.
//!
//! A link is a [`Port`](ringfence_net::Port), which is how frames come from the guest, and a
//! [`GuestSide`](ringfence_uplink::GuestSide), which is how the uplink puts frames for it together. It has
//! one queue, and belongs to one thread; an interface of several queues has a link for each.

pub mod frames;
mod header;
pub mod tap;

use ringfence_net::{DropReason, PortCapabilities, PortCounters};
use ringfence_uplink::link::Committed;

use frames::{CommitError, FrameRing};

/// Frames that the kernel holds between the guest and the reader of a TAP interface (its default
/// `txqueuelen`).
const TAP_QUEUE: usize = 1000;

/// Commits frames, and counts those that cannot be.
fn commit_all(ring: &mut FrameRing, frames: &[Committed], counters: &PortCounters) {
    for frame in frames {
        match ring.commit(frame.len, frame.meta) {
            Ok(()) => {}
            Err(CommitError::NotReserved) => counters.dropped(DropReason::PortFull),
            Err(CommitError::TooLong { .. }) => counters.dropped(DropReason::TooLong),
            Err(CommitError::Meta(_)) => counters.dropped(DropReason::GsoUnsupported),
        }
    }
}

/// What the kernel holds for the reader before it drops, in octets: nothing to speak of where TCP comes in
/// super-packets, as each takes only one of the places.
fn inbound_queue(capabilities: &PortCapabilities) -> Option<usize> {
    let whole = capabilities.gso.tcp_v4 && capabilities.gso.tcp_v6;
    (!whole).then(|| TAP_QUEUE * usize::from(capabilities.mtu))
}
