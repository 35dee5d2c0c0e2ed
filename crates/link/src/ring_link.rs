//! Ring link: a link whose committed frames wait in a [`FrameRing`] until its transport sends them.
//!
//! ```text
//!            reserve, commit              send_waiting
//! engine ---------------------> FrameRing -------------> transport -> guest
//!        <------------------------------------ receive --
//! ```
//!
//! [`RingLink`] is the interface to the engine, the same for every [`RingTransport`]. It keeps a failure of sending, which
//! the engine cannot handle, until the next [`Port::receive`] returns it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_frame::batch::HEADER_MAX;
use ringfence_frame::{
    Batch, DropReason, Fault, FrameView, Port, PortCapabilities, PortCounters, Received,
    Transmitted,
};
use ringfence_offload::OffloadMeta;
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_platform::Counters;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use crate::capture::Capture;
use crate::frame_ring::{FrameRing, FrameShape};

/// Frames that wait for a transport, and the accounts of its link.
#[derive(Debug)]
pub struct FrameQueue {
    pub(crate) frames: FrameRing,
    pub(crate) counters: Arc<PortCounters>,
    /// Counters of system calls.
    pub(crate) system: Arc<Counters>,
    /// File that gets a copy of each frame.
    capture: Option<Capture>,
}

/// Transport of a link: moves the frames of its queue to the guest, and those of the guest to a batch.
///
/// The methods are those of [`Port`] and [`GuestLink`] with the same names, with the link's queue in front.
pub trait RingTransport: Send {
    /// Moves frames of the guest to the batch.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn receive(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<Received, Fault>;

    /// Sends waiting frames until there are none, or the other side has no room.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn send_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), Fault>;

    /// Removes the waiting frames of a link that ends because [`RingTransport::send_waiting`] failed.
    fn abandon(&mut self, queue: &mut FrameQueue) {
        queue.frames.withdraw();
    }

    /// Returns the buffers of the last batch to the guest.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn complete(&mut self, queue: &FrameQueue) -> Result<(), Fault> {
        let _ = queue;
        Ok(())
    }

    /// Sends frames of a batch without the ring. Returns `None` if the transport sends only frames of its ring.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn transmit_directly(
        &mut self,
        queue: &mut FrameQueue,
        batch: &Batch,
        frames: &[u32],
    ) -> Result<Option<Transmitted>, Fault> {
        let _ = (queue, batch, frames);
        Ok(None)
    }

    /// Requests an event for new work. Returns `true` if there is work already.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn arm(&mut self) -> Result<bool, Fault>;

    /// Returns the files that become readable when there is work.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Clears the events that made a file of [`RingTransport::wait_fds`] readable.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the link.
    fn clear_events(&mut self, queue: &FrameQueue) -> Result<(), Fault> {
        let _ = queue;
        Ok(())
    }

    /// Returns the egress capabilities of now.
    fn capabilities(&self) -> PortCapabilities;

    /// Returns `true` if a look for frames is a system call, as [`GuestLink::is_polled_by_calls`] does.
    fn is_polled_by_calls(&self) -> bool {
        false
    }

    /// Returns `true` if the other side had no room, and will signal it.
    fn is_full(&self) -> bool {
        false
    }

    /// Returns the bytes that are queued towards the uplink before frames are dropped, as
    /// [`GuestLink::inbound_queue`] does.
    fn inbound_queue(&self) -> Option<usize> {
        None
    }
}

/// Link that sends the frames of its own ring by a transport. See the [module](self).
#[derive(Debug)]
pub struct RingLink<T> {
    pub(crate) transport: T,
    pub(crate) queue: FrameQueue,
    /// Failure to be returned by the next call that can return one.
    fault: Option<Fault>,
}

impl FrameQueue {
    /// Counts a frame that was received, and captures it: the last one of the batch.
    pub(crate) fn received(&mut self, batch: &Batch, len: usize) {
        self.record_received(batch, batch.len().saturating_sub(1));
        self.counters.received(1, len as u64);
    }

    /// Captures the frames of a batch from number `first` on.
    pub(crate) fn record_received(&mut self, batch: &Batch, first: usize) {
        if let Some(capture) = &mut self.capture {
            capture.record_received(batch, first);
        }
    }

    /// Removes the first waiting frame, which was sent. Counts and captures it.
    pub(crate) fn finish_sent(&mut self) {
        if let Some(frame) = self.frames.next_waiting() {
            if let Some(capture) = &mut self.capture {
                let bytes = self.frames.bytes(&frame).get(MODERN_LEN..).unwrap_or_default();
                capture.record(bytes.len(), |record| record.copy_from_slice(bytes));
            }
            self.counters.sent(1, frame.frame_len() as u64);
            self.counters.sent_with(frame.meta, 1);
        }
        self.finish();
    }

    /// Removes the first waiting frame, which was not sent. Counts it.
    pub(crate) fn finish_dropped(&mut self, reason: DropReason) {
        self.counters.dropped(reason);
        self.finish();
    }

    fn finish(&mut self) {
        let finished = self.frames.hand_over().map(|number| self.frames.finish(number));
        debug_assert!(matches!(finished, Some(Ok(()))), "it was waiting");
    }

    /// Drops the waiting frames: no guest is there to take them.
    pub(crate) fn drop_waiting(&mut self) {
        for _ in 0..self.frames.withdraw() {
            self.counters.dropped(DropReason::LinkDown);
        }
    }
}

impl<T: RingTransport> RingLink<T> {
    /// Creates a link with a ring of its own. System calls are counted in `system`, frames in `counters`.
    ///
    /// # Errors
    ///
    /// Returns an error if memory is exhausted, or `shape` is invalid.
    pub(crate) fn from_transport(
        transport: T,
        shape: FrameShape,
        counters: Arc<PortCounters>,
        system: Arc<Counters>,
    ) -> io::Result<RingLink<T>> {
        let queue = FrameQueue { frames: FrameRing::new(shape)?, counters, system, capture: None };
        Ok(RingLink { transport, queue, fault: None })
    }

    /// Captures the link's frames from now on.
    pub fn capture(&mut self, capture: Capture) {
        self.queue.capture = Some(capture);
    }

    /// Returns the ring of frames for the guest. Committed frames leave with the next [`flush`](Port::flush).
    pub fn frames(&mut self) -> &mut FrameRing {
        &mut self.queue.frames
    }

    /// Copies a frame into the ring. Returns `false` if there is no room.
    fn copy_in(&mut self, frame: FrameView<'_>) -> bool {
        let mut slots = Slots::new();
        self.reserve(1, frame.len(), &mut slots);
        let room = slots.first_mut().and_then(|slot| slot.get_mut(..frame.len()));
        let has_room = room.map(|room| frame.copy_to(room)).is_some();
        drop(slots);
        if has_room {
            self.commit(&[Committed { len: frame.len(), meta: frame.meta() }]);
        } else {
            self.queue.counters.dropped(DropReason::PortFull);
        }
        has_room
    }

    /// Sends committed frames. The next [`receive`](Port::receive) returns a failure.
    fn send_or_fail(&mut self) {
        if let Err(fault) = self.transport.send_waiting(&mut self.queue) {
            self.transport.abandon(&mut self.queue);
            self.fault = Some(fault);
        }
    }
}

impl<T: RingTransport> Port for RingLink<T> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.fault.take().map_or(Ok(()), Err)?;
        self.transport.receive(&mut self.queue, batch, budget)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.transport.complete(&self.queue)
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        if let Some(done) = self.transport.transmit_directly(&mut self.queue, batch, frames)? {
            return Ok(done);
        }
        let mut done = Transmitted::default();
        for frame in batch.select(frames) {
            if self.copy_in(frame) {
                done.sent += 1;
            } else {
                done.dropped += 1;
            }
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.transport.send_waiting(&mut self.queue)
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.fault.is_some() {
            return Ok(true);
        }
        self.transport.arm()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.transport.wait_fds()
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        self.transport.clear_events(&self.queue)
    }

    fn capabilities(&self) -> PortCapabilities {
        self.transport.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.queue.counters
    }
}

impl<T: RingTransport> GuestLink for RingLink<T> {
    fn capabilities(&self) -> PortCapabilities {
        self.transport.capabilities()
    }

    /// Offers rooms of the ring. Frames that wait are sent first if they take the rooms.
    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        let count = count.min(slots.remaining_capacity());
        if self.queue.frames.free(len) < count && !self.transport.is_full() {
            self.send_or_fail();
        }
        self.queue.frames.reserve(count, len, |room| slots.push(room));
    }

    fn commit(&mut self, frames: &[Committed]) {
        self.queue.frames.commit_all(frames, &self.queue.counters);
    }

    fn flush(&mut self) {
        self.send_or_fail();
    }

    fn is_polled_by_calls(&self) -> bool {
        self.transport.is_polled_by_calls()
    }

    fn is_full(&self) -> bool {
        self.transport.is_full()
    }

    fn inbound_queue(&self) -> Option<usize> {
        self.transport.inbound_queue()
    }
}

/// Returns `true` if the batch has room for another frame of at most `frame_max` bytes.
#[inline]
pub(crate) fn has_room(batch: &mut Batch, frame_max: usize) -> bool {
    batch.frames_left() > 0 && batch.has_place_for(HEADER_MAX) && batch.has_room_for(frame_max)
}

/// Copies a frame without offloads to the batch. Returns `None` if it has no room.
pub(crate) fn push(batch: &mut Batch, frame: &[u8]) -> Option<()> {
    let offset = batch.reserve(frame.len())?;
    batch.scratch_mut(offset..offset + frame.len()).ok()?.copy_from_slice(frame);
    batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).ok().map(drop)
}
