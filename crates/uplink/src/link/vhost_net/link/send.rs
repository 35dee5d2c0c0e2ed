//! Frames to the guest: the ring in which they are put together, and the queue that the device reads.

use ringfence_memory::DeviceRange;
use ringfence_ring::split::{DriverQueue, QueueFault};
use ringfence_sys::vhost::QueueName;

use super::lending::FrameBlocks;
use crate::link::vhost_net::fault::LinkFault;
use crate::link::vhost_net::frames::{FrameRing, Waiting};

/// Descriptors that a frame takes at most: its headers, its payload.
const DESCRIPTORS: u16 = 2;

/// The frame ring with its queue.
#[derive(Debug)]
pub(super) struct Sender {
    queue: DriverQueue,
    frames: FrameRing,
    /// Where frames are lent one by one.
    lent: Option<FrameBlocks>,
    /// Somebody was refused room for frames of that length, and waits.
    short_of: Option<usize>,
}

impl Sender {
    pub(super) fn new(queue: DriverQueue, frames: FrameRing, lent: Option<FrameBlocks>) -> Sender {
        Sender { queue, frames, lent, short_of: None }
    }

    pub(super) fn frames(&mut self) -> &mut FrameRing {
        &mut self.frames
    }

    /// Room for frames of `len` octets, `count` if there is so much. The device's completions are looked
    /// at only where there is less.
    pub(super) fn room(&mut self, count: usize, len: usize) -> Result<usize, LinkFault> {
        if self.frames.free(len) < count {
            self.reclaim()?;
        }
        let free = self.frames.free(len);
        // Whoever asks next for less, and gets it, does not wait in place of this one.
        if free < count {
            self.short_of = Some(len);
        }
        Ok(free.min(count))
    }

    /// Offers the device what waits, as far as its queue has room; whether it wants a kick. What each
    /// frame was is shown to `count`.
    pub(super) fn offer(&mut self, mut count: impl FnMut(&Waiting)) -> Result<bool, LinkFault> {
        if self.frames.waiting() == 0 {
            return Ok(false);
        }
        if usize::from(self.queue.free()) < self.frames.waiting() * usize::from(DESCRIPTORS) {
            self.reclaim()?;
        }
        while let Some(frame) = self.frames.next_waiting() {
            if self.queue.free() < DESCRIPTORS {
                self.short_of = Some(frame.frame_len());
                break;
            }
            let ranges = self.ranges(&frame);
            let Some(number) = self.frames.hand_over() else { break };
            let Some(ranges) = ranges else {
                // The system does not lend its pages. Those behind it are not to wait for that.
                self.frames.finish(number)?;
                continue;
            };
            let pushed = match ranges {
                (head, Some(payload)) => self.queue.push(&[head, payload], number),
                (whole, None) => self.queue.push(&[whole], number),
            };
            if pushed.is_err() {
                // Cannot be: there was room. The frame is lost, like on any network.
                self.finish(number)?;
                continue;
            }
            count(&frame);
        }
        Ok(self.queue.publish())
    }

    /// Headers and payload of a long frame, or the whole of a short one.
    fn ranges(&mut self, frame: &Waiting) -> Option<(DeviceRange, Option<DeviceRange>)> {
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

    /// Takes back the rooms of frames that the device is done with.
    pub(super) fn reclaim(&mut self) -> Result<(), LinkFault> {
        while let Some(used) = self.queue.pop().map_err(fault)? {
            self.finish(used.token)?;
        }
        Ok(())
    }

    /// The device is done with a frame.
    fn finish(&mut self, number: u32) -> Result<(), LinkFault> {
        let place = self.lent.as_ref().and_then(|_| self.frames.offered_at(number));
        self.frames.finish(number)?;
        if let (Some(blocks), Some(offset)) = (&mut self.lent, place) {
            blocks.over(offset);
        }
        Ok(())
    }

    /// No events, please. Whoever waits for room asks again.
    pub(super) fn suppress(&mut self) {
        self.short_of = None;
        self.queue.suppress();
    }

    /// Whether somebody was refused room and there still is none, and the device has what will make some.
    pub(super) fn is_full(&self) -> bool {
        let has_none = |len| self.frames.waiting() > 0 || self.frames.free(len) == 0;
        self.short_of.is_some_and(has_none) && self.queue.in_flight() > 0
    }

    /// Where somebody waits for room: asks for an event when half of what the device has is done. `true`
    /// when it is already, or the device has nothing: of that comes no event.
    pub(super) fn arm(&mut self) -> Result<bool, LinkFault> {
        if self.short_of.is_none() {
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
