//! The way to the guest.
//!
//! # Contract
//!
//! The engine asks for the buffers of the next frames ([`GuestSide::reserve`]), fills some of them
//! from the front, headers and payload one behind the other, and hands those over
//! ([`GuestSide::commit`]) in order. Buffers that were not committed are the link's again. Several
//! buffers at a time let one system call fill several frames from a socket.
//!
//! A frame that was committed is either delivered or lost, like on any network; nothing is reported.
//! A link without room gives no buffer, and says by its own means when it has room again.
//!
//! # Links
//!
//! * [`tap`]: a TAP interface; a system call for each frame.
//! * [`vhost_net`]: kernel vhost-net; virtqueues in memory that both sides see.

pub mod tap;
pub mod vhost_net;

use ringfence_frame::PortCapabilities;
use ringfence_offload::OffloadMeta;

use arrayvec::ArrayVec;

/// Buffers that are reserved at a time, at most.
pub const RESERVE_MAX: usize = 16;

/// Buffers of the next frames, in order.
pub type Slots<'a> = ArrayVec<&'a mut [u8], RESERVE_MAX>;

/// A frame that was put into a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Octets of the frame, from the Ethernet header on.
    pub len: usize,
    /// What is left to be done to it: within what [`GuestSide::capabilities`] allow.
    pub meta: OffloadMeta,
}

/// A link to the guest, as seen from the uplink. See the [module](self) for the contract.
pub trait GuestSide {
    /// What the link takes. It does not change.
    fn capabilities(&self) -> PortCapabilities;

    /// Adds to `slots` the buffers of at most `count` frames, each of `len` octets or more. Fewer, or
    /// none, when there is no room. What was reserved before and not committed is void.
    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>);

    /// The first `frames.len()` buffers of the last reservation hold frames: they go out, in order.
    fn commit(&mut self, frames: &[Committed]);

    /// The turn is over: publish what was committed, with at most one notification.
    fn flush(&mut self) {}

    /// Whether a buffer was refused since the link was last waited for, for want of room that will be told of:
    /// turns are of no use until then.
    fn is_full(&self) -> bool {
        false
    }

    /// Octets that the link holds towards the *uplink* before it drops: what all windows together
    /// should not exceed. `None` where the sender is held up instead, or frames are whole.
    fn inbound_queue(&self) -> Option<usize> {
        None
    }
}
