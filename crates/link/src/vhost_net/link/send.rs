//! Send side of a vhost-net link: the frame ring, and the queue that the device reads.

use ringfence_memory::DeviceRange;
use ringfence_platform::vhost::QueueName;
use ringfence_ring::split::{DriverQueue, QueueFault};

use super::lending::FrameBlocks;
use crate::frame_ring::{FrameRing, PendingFrame};
use crate::vhost_net::fault::LinkFault;

/// Maximum of descriptors of a frame: headers and payload.
const DESCRIPTORS: u16 = 2;

/// Transmit queue with its frame ring.
#[derive(Debug)]
pub(super) struct Sender {
    queue: DriverQueue,
    frames: FrameRing,
    /// Mappings of frames, if they are mapped one by one.
    lent: Option<FrameBlocks>,
    /// Frame length for which room was refused; the sender waits for it.
    waiting_for: Option<usize>,
}

impl Sender {
    pub(super) fn new(queue: DriverQueue, frames: FrameRing, lent: Option<FrameBlocks>) -> Sender {
        Sender { queue, frames, lent, waiting_for: None }
    }

    pub(super) fn frames(&mut self) -> &mut FrameRing {
        &mut self.frames
    }

    /// Returns the room for frames of `len` bytes, at most `count`. Completions are reclaimed only if there is
    /// less.
    pub(super) fn room(&mut self, count: usize, len: usize) -> Result<usize, LinkFault> {
        if self.frames.free(len) < count {
            self.reclaim()?;
        }
        let free = self.frames.free(len);
        // A later request for less that succeeds does not end this wait.
        if free < count {
            self.waiting_for = Some(len);
        }
        Ok(free.min(count))
    }

    /// Offers committed frames to the device as far as the queue has room. Calls `count` for each. Returns
    /// `true` if the device needs a kick.
    pub(super) fn offer(
        &mut self,
        mut count: impl FnMut(&PendingFrame),
    ) -> Result<bool, LinkFault> {
        if self.frames.waiting() == 0 {
            return Ok(false);
        }
        if usize::from(self.queue.free()) < self.frames.waiting() * usize::from(DESCRIPTORS) {
            self.reclaim()?;
        }
        while let Some(frame) = self.frames.next_waiting() {
            if self.queue.free() < DESCRIPTORS {
                self.waiting_for = Some(frame.frame_len());
                break;
            }
            let ranges = self.ranges(&frame);
            let Some(number) = self.frames.hand_over() else { break };
            let Some(ranges) = ranges else {
                // The frame cannot be mapped. It is dropped so that later ones need not wait.
                self.frames.finish(number)?;
                continue;
            };
            let pushed = match ranges {
                (head, Some(payload)) => self.queue.push(&[head, payload], number),
                (whole, None) => self.queue.push(&[whole], number),
            };
            if pushed.is_err() {
                // Unreachable: the queue had room. The frame is dropped.
                self.finish(number)?;
                continue;
            }
            count(&frame);
        }
        Ok(self.queue.publish())
    }

    /// Returns headers and payload of a long frame, or the whole of a short one, as ranges for the device.
    fn ranges(&mut self, frame: &PendingFrame) -> Option<(DeviceRange, Option<DeviceRange>)> {
        let whole = match &mut self.lent {
            Some(blocks) => blocks.lend(frame.offset, frame.len)?,
            None => self.frames.device_range(frame)?,
        };
        let headers = u32::try_from(frame.headers).ok()?;
        if headers == 0 || headers >= whole.len() {
            return Some((whole, None));
        }
        whole.split_at(headers).map(|(head, payload)| (head, Some(payload)))
    }

    /// Reclaims the rooms of completed frames.
    pub(super) fn reclaim(&mut self) -> Result<(), LinkFault> {
        while let Some(used) = self.queue.pop().map_err(fault)? {
            self.finish(used.token)?;
        }
        Ok(())
    }

    /// Releases a frame that the device completed.
    fn finish(&mut self, number: u32) -> Result<(), LinkFault> {
        let place = self.lent.as_ref().and_then(|_| self.frames.offered_at(number));
        self.frames.finish(number)?;
        if let (Some(blocks), Some(offset)) = (&mut self.lent, place) {
            blocks.release(offset);
        }
        Ok(())
    }

    /// Suppresses events. A sender that waits for room requests them again.
    pub(super) fn suppress(&mut self) {
        self.waiting_for = None;
        self.queue.suppress();
    }

    /// Returns `true` if room was refused, there still is none, and a completion will make some.
    pub(super) fn is_full(&self) -> bool {
        let has_none = |len| self.frames.waiting() > 0 || self.frames.free(len) == 0;
        self.waiting_for.is_some_and(has_none) && self.queue.in_flight() > 0
    }

    /// Requests an event for when half of the frames in flight are complete, if room was refused. Returns
    /// `true` if the caller must not sleep: half are complete, or no completion will come.
    pub(super) fn arm(&mut self) -> Result<bool, LinkFault> {
        if self.waiting_for.is_none() {
            return Ok(false);
        }
        if self.queue.in_flight() == 0 {
            return Ok(self.frames.waiting() == 0);
        }
        self.queue.arm(self.queue.in_flight().div_ceil(2)).map_err(fault)
    }
}

fn fault(fault: QueueFault) -> LinkFault {
    LinkFault::Queue { queue: QueueName::Transmit, fault }
}
