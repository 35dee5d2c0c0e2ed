//! Frames for the guest that need no socket: resets, errors, answers of the link's own protocols.
//!
//! They are few and short. Those for which there is no room are dropped and counted: whoever misses
//! one asks again.

use std::collections::VecDeque;

use ringfence_offload::OffloadMeta;

/// Frames that wait, at most.
pub const WAITING_MAX: usize = 512;

/// Octets of a frame, at most.
pub const LEN_MAX: usize = 2048;

/// Frames that wait to be sent to the guest. Their checksums are finished.
#[derive(Debug, Default)]
pub struct Replies {
    waiting: VecDeque<(Vec<u8>, OffloadMeta)>,
    free: Vec<Vec<u8>>,
    dropped: u64,
}

impl Replies {
    /// Adds a frame that `write` appends to an empty buffer. Nothing is added if it returns `None`, or
    /// if there is no room.
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

    /// The next frame.
    pub fn front(&self) -> Option<(&[u8], OffloadMeta)> {
        self.waiting.front().map(|(frame, meta)| (&frame[..], *meta))
    }

    /// The next frame was sent.
    pub fn pop(&mut self) {
        if let Some((frame, _)) = self.waiting.pop_front() {
            self.free.push(frame);
        }
    }

    /// Frames that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How many were dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        core::mem::take(&mut self.dropped)
    }
}
