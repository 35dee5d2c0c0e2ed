//! Reply queue: frames for the guest that need no socket, such as resets, ICMP errors, ARP and DHCP replies.
//!
//! Replies are few and short. When the queue is full they are dropped and counted; the guest repeats its
//! request.

use std::collections::VecDeque;

use ringfence_offload::OffloadMeta;

/// Maximum of frames in the queue.
pub const WAITING_MAX: usize = 512;

/// Maximum length of a frame, in bytes.
pub const LEN_MAX: usize = 2048;

/// Queue of frames for the guest, with complete checksums.
#[derive(Debug, Default)]
pub struct Replies {
    waiting: VecDeque<(Vec<u8>, OffloadMeta)>,
    free: Vec<Vec<u8>>,
    dropped: u64,
}

impl Replies {
    /// Adds a frame that `write` appends to an empty buffer. Adds nothing if `write` returns `None`, the frame
    /// is too long, or the queue is full.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Option<()>) {
        if self.waiting.len() >= WAITING_MAX {
            self.dropped += 1;
            return;
        }
        let mut frame = self.free.pop().unwrap_or_default();
        frame.clear();
        if write(&mut frame).is_some() && frame.len() <= LEN_MAX {
            self.waiting.push_back((frame, OffloadMeta::PLAIN));
        } else {
            self.free.push(frame);
        }
    }

    /// Returns the next frame.
    pub fn front(&self) -> Option<(&[u8], OffloadMeta)> {
        self.waiting.front().map(|(frame, meta)| (&frame[..], *meta))
    }

    /// Removes the next frame after it was sent.
    pub fn pop(&mut self) {
        if let Some((frame, _)) = self.waiting.pop_front() {
            self.free.push(frame);
        }
    }

    /// Returns the number of frames.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns `true` if the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of frames dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        core::mem::take(&mut self.dropped)
    }
}
