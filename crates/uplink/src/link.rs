//! Link to the guest: the interface between the engine and a TAP, vhost-net, a socket or vhost-user.
//!
//! The links themselves are in the crate `ringfence-link`, which is above this one.
//!
//! # Contract
//!
//! The engine reserves buffers for the next frames ([`GuestLink::reserve`]) and fills some of them from the
//! front, each with headers and payload. It then commits those ([`GuestLink::commit`]) in order. Buffers that
//! are not committed belong to the link again. Several buffers at a time let one system call fill several
//! frames from a socket.
//!
//! A committed frame is delivered or lost, as in any network; the link does not report which. A link
//! without room returns no buffers, and signals room by its wait descriptor.

use arrayvec::ArrayVec;
use ringfence_frame::PortCapabilities;
use ringfence_offload::OffloadMeta;

/// Maximum of buffers in one reservation.
pub const RESERVE_MAX: usize = 16;

/// Buffers for the next frames, in order.
pub type Slots<'a> = ArrayVec<&'a mut [u8], RESERVE_MAX>;

/// Frame that was written into a reserved buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Length of the frame in bytes, from the Ethernet header on.
    pub len: usize,
    /// Offload work left to do, within [`GuestLink::capabilities`].
    pub meta: OffloadMeta,
}

/// Link to the guest, as the engine uses it. See the [module](self) for the contract.
pub trait GuestLink {
    /// Returns the link's capabilities of now. Those of a virtual machine change when its driver starts.
    fn capabilities(&self) -> PortCapabilities;

    /// Adds buffers for at most `count` frames of at least `len` bytes to `slots`; fewer or none if there is no
    /// room. Cancels an earlier reservation that was not committed.
    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>);

    /// Sends the frames in the first `frames.len()` buffers of the last reservation, in order.
    fn commit(&mut self, frames: &[Committed]);

    /// Returns `true` if each look for frames is a system call, and the only wait descriptor is readable as long as frames
    /// wait.
    fn is_polled_by_calls(&self) -> bool {
        false
    }

    /// Publishes committed frames at the end of a round, with at most one notification.
    fn flush(&mut self) {}

    /// Returns `true` if a reservation failed and the link will signal room. Polling is useless until then.
    fn is_full(&self) -> bool {
        false
    }

    /// Returns the bytes that the link queues towards the uplink before it drops. All TCP windows together
    /// should not exceed them. Returns `None` if the link slows the sender instead, or takes super-packets.
    fn inbound_queue(&self) -> Option<usize> {
        None
    }
}
