//! Links whose committed frames wait in a [`FrameRing`] until they are sent: what they have in common.

use ringfence_frame::Fault;

use super::vhost_net::frames::FrameRing;
use super::{GuestLink, Slots};

/// Link that sends the frames of its own ring.
pub(super) trait RingLink: GuestLink {
    /// Returns the ring of committed frames.
    fn ring(&mut self) -> &mut FrameRing;

    /// Sends waiting frames until there are none, or the other side has no room.
    fn send_waiting(&mut self) -> Result<(), Fault>;

    /// Drops the waiting frames. The next [`receive`](ringfence_frame::Port::receive) returns the failure.
    fn fail(&mut self, fault: Fault);
}

/// Offers rooms of the ring, as [`GuestLink::reserve`] does. Frames that wait are sent first if they take the rooms.
pub(super) fn reserve<'a>(
    link: &'a mut impl RingLink,
    count: usize,
    len: usize,
    slots: &mut Slots<'a>,
) {
    let count = count.min(slots.remaining_capacity());
    if link.ring().free(len) < count && !link.is_full() {
        flush(link);
    }
    link.ring().reserve(count, len, |room| slots.push(room));
}

/// Sends committed frames. The next [`receive`](ringfence_frame::Port::receive) returns a failure.
pub(super) fn flush(link: &mut impl RingLink) {
    if let Err(fault) = link.send_waiting() {
        link.fail(fault);
    }
}
