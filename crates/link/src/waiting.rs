//! Links whose committed frames wait in a [`FrameRing`] until they are sent: what they have in common.

use ringfence_frame::{Batch, DropReason, Fault, PortCounters, Transmitted};
use ringfence_offload::OffloadMeta;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use super::frame_ring::FrameRing;

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

/// Copies frames of a batch into a link, and counts those without room.
pub(super) fn copy_in(
    link: &mut impl GuestLink,
    counters: &PortCounters,
    batch: &Batch,
    frames: &[u32],
) -> Transmitted {
    let mut done = Transmitted::default();
    for frame in batch.select(frames) {
        let mut slots = Slots::new();
        link.reserve(1, frame.len(), &mut slots);
        let room = slots.first_mut().and_then(|slot| slot.get_mut(..frame.len()));
        let has_room = room.map(|room| frame.copy_to(room)).is_some();
        drop(slots);
        if has_room {
            link.commit(&[Committed { len: frame.len(), meta: frame.meta() }]);
            done.sent += 1;
        } else {
            counters.dropped(DropReason::PortFull);
            done.dropped += 1;
        }
    }
    done
}

/// Copies a frame to the batch. Returns `None` if it has no room.
pub(super) fn push(batch: &mut Batch, frame: &[u8]) -> Option<()> {
    let offset = batch.reserve(frame.len())?;
    batch.scratch_mut(offset..offset + frame.len()).ok()?.copy_from_slice(frame);
    batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).ok().map(drop)
}
