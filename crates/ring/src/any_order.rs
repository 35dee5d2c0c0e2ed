//! Backend's end of a ring that answers requests in any order and loses none if the backend dies.
//!
//! # Theory of operation
//!
//! A response takes the slot after the last response, whatever request it answers. An out-of-order response
//! would overwrite a request that is still in progress. Then only the backend would know that request, and a
//! crash would leave the frontend waiting forever. In-order responses avoid that, but a slow request delays
//! all later ones.
//!
//! This end avoids both. The backend owns the slots between the last response and the last request, and a
//! frontend identifies responses by their ids. So unanswered requests may change slots. To answer a request
//! that is not the oldest, the backend *moves the oldest request into its slot* and writes the response into
//! the oldest one's slot:
//!
//! ```text
//!          rsp_prod                          rsp_prod+1
//!             v                                  v
//!  ... resp | A | B | C | D         ... resp | resp C | B | A | D
//! ```
//!
//! At every instant the slots from `rsp_prod` on hold each unanswered request once. A successor that attaches
//! to the ring ([`AnyOrderRing::attach`]) finds them there.
//!
//! # Crash journal
//!
//! A response overwrites the slot of a request, and the producer index is stored afterwards. A process killed
//! in between leaves a slot that is neither. So the backend first writes a journal entry into the unused part
//! of the ring's header (bytes 20 to 64). The entry holds the response, the response's slot, the slot that the
//! oldest request moves to, and the stage of progress. A successor completes the answer. The frontend can
//! change the journal, as it can change its own requests; that harms only its own disk. Only a process that
//! dies at some instruction observes the order of these stores, so a compiler fence is enough.

use core::sync::atomic::compiler_fence;

use ringfence_memory::Raw;

use crate::back::BackRing;
use crate::layout::{ProducerOverflow, RingLayout, passes_event};
use crate::memory::{RingMemory, Word};
use crate::sync::{Ordering, full_fence};

/// Header offset of the journal's stage.
const STAGE: usize = 20;
/// Header offset of the journal's entry.
const JOURNAL: usize = 24;
/// Length of the entry: index of the oldest request, index of the answered request, response.
const JOURNAL_BYTES: usize = 8 + RESPONSE_MAX;

/// Maximum bytes of a response.
pub const RESPONSE_MAX: usize = 16;
/// Maximum bytes of a request.
const REQUEST_MAX: usize = 128;

/// Stage: no answer in progress.
const IDLE: [u8; 4] = [0; 4];
/// Stage: the oldest request is being copied to the vacated slot and is whole in its own slot.
const MOVING: [u8; 4] = *b"RFm1";
/// Stage: the response is being written. If the oldest request moved, it is whole in the vacated slot.
const ANSWERING: [u8; 4] = *b"RFa1";

/// Backend's end of a ring that answers requests in any order.
#[derive(Debug)]
pub struct AnyOrderRing<M> {
    ring: BackRing<M>,
    response: usize,
    /// Response index at the last check of the frontend's event index.
    event_checked: u32,
}

/// State of a ring after attaching.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachState {
    /// Number of unanswered requests, which [`AnyOrderRing::unconsumed`] reports again.
    pub unanswered: u32,
    /// Set if the previous backend died while writing an answer, which is now complete.
    pub finished: bool,
}

impl<M: RingMemory> AnyOrderRing<M> {
    /// Attaches to a ring, fresh or left by a previous backend. `response` is the size of a response in bytes, at
    /// most [`RESPONSE_MAX`]. The caller must notify the frontend of a left ring once.
    ///
    /// # Errors
    ///
    /// Returns [`ProducerOverflow`] if the frontend's index is impossible.
    pub fn attach(
        memory: M,
        layout: RingLayout,
        response: usize,
    ) -> Result<(AnyOrderRing<M>, AttachState), ProducerOverflow> {
        let response = response.min(RESPONSE_MAX).min(layout.entry_bytes());
        let finished = complete_answer(&memory, layout, response);
        let ring = BackRing::attach(memory, layout);
        let unanswered = ring.unconsumed()?;
        let event_checked = ring.consumed_index();
        Ok((AnyOrderRing { ring, response, event_checked }, AttachState { unanswered, finished }))
    }

    /// Returns the number of entries.
    pub fn count(&self) -> u32 {
        self.ring.count()
    }

    /// Returns the number of published, unconsumed requests, as [`BackRing::unconsumed`].
    ///
    /// # Errors
    ///
    /// Returns [`ProducerOverflow`] if the frontend's index is impossible.
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, ProducerOverflow> {
        self.ring.unconsumed()
    }

    /// Fetches and consumes the next request, once. Returns it with the index by which it is answered.
    #[inline]
    pub fn take<const N: usize>(&mut self) -> (u32, Raw<[u8; N]>) {
        let index = self.ring.consumed_index();
        let request = self.ring.request(0);
        self.ring.consume(1);
        (index, request)
    }

    /// Returns the index of the oldest unanswered request.
    #[inline]
    pub fn oldest(&self) -> u32 {
        self.ring.rsp_prod_pvt
    }

    /// Returns the number of consumed, unanswered requests.
    #[inline]
    pub fn owed(&self) -> u32 {
        self.ring.owed()
    }

    /// Answers the request at `index` and publishes the response. If it was not the oldest request, the oldest
    /// one is at `index` afterwards. Returns `false` without writing if no unanswered request is at `index`.
    pub fn answer(&mut self, index: u32, response: &[u8]) -> bool {
        let oldest = self.ring.rsp_prod_pvt;
        if index.wrapping_sub(oldest) >= self.ring.owed() || response.len() < self.response {
            return false;
        }
        let (memory, layout) = (&self.ring.memory, self.ring.layout);
        let mut journal = [0; JOURNAL_BYTES];
        journal[..4].copy_from_slice(&oldest.to_le_bytes());
        journal[4..8].copy_from_slice(&index.to_le_bytes());
        journal[8..8 + self.response].copy_from_slice(&response[..self.response]);
        memory.put(STAGE, &IDLE);
        journal_fence();
        memory.put(JOURNAL, &journal);
        journal_fence();
        if index != oldest {
            memory.put(STAGE, &MOVING);
            journal_fence();
            move_request(memory, layout, oldest, index);
            journal_fence();
        }
        memory.put(STAGE, &ANSWERING);
        journal_fence();
        memory.put(layout.offset(oldest), &response[..self.response]);
        self.ring.rsp_prod_pvt = oldest.wrapping_add(1);
        memory.store(Word::RspProd, self.ring.rsp_prod_pvt, Ordering::Release);
        true
    }

    /// Returns `true` if the frontend wants a notification of the answers since the last call.
    pub fn notify_due(&mut self) -> bool {
        let (old, new) = (self.event_checked, self.ring.rsp_prod_pvt);
        if old == new {
            return false;
        }
        self.event_checked = new;
        full_fence();
        passes_event(old, new, self.ring.memory.load(Word::RspEvent, Ordering::Relaxed))
    }

    /// Checks for work before sleeping, as [`BackRing::final_check`].
    ///
    /// # Errors
    ///
    /// Returns [`ProducerOverflow`] if the frontend's index is impossible.
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        self.ring.final_check()
    }
}

/// Compiler fence: orders the journal before the slot update, for a process that dies and its successor.
fn journal_fence() {
    compiler_fence(core::sync::atomic::Ordering::SeqCst);
}

fn move_request<M: RingMemory>(memory: &M, layout: RingLayout, from: u32, to: u32) {
    let mut entry = [0; REQUEST_MAX];
    let len = layout.entry_bytes().min(REQUEST_MAX);
    memory.fetch(layout.offset(from), &mut entry[..len]);
    memory.put(layout.offset(to), &entry[..len]);
}

/// Completes the answer that a previous backend was writing. Returns `true` if there was one.
fn complete_answer<M: RingMemory>(memory: &M, layout: RingLayout, response: usize) -> bool {
    let (mut stage, mut journal) = ([0; 4], [0; JOURNAL_BYTES]);
    memory.fetch(STAGE, &mut stage);
    memory.fetch(JOURNAL, &mut journal);
    let number = |at: usize| {
        u32::from_le_bytes([journal[at], journal[at + 1], journal[at + 2], journal[at + 3]])
    };
    let (oldest, index) = (number(0), number(4));
    let published = memory.load(Word::RspProd, Ordering::Acquire);
    let requests = memory.load(Word::ReqProd, Ordering::Acquire).wrapping_sub(published);
    let in_progress = stage == MOVING || stage == ANSWERING;
    // The index of a completed answer is older. An entry that names no published request was not written by a
    // backend.
    let is_valid = oldest == published && index.wrapping_sub(oldest) < requests;
    if !in_progress || !is_valid || requests > layout.count() {
        return false;
    }
    if stage == MOVING {
        move_request(memory, layout, oldest, index);
        journal_fence();
        memory.put(STAGE, &ANSWERING);
        journal_fence();
    }
    memory.put(layout.offset(oldest), &journal[8..8 + response]);
    memory.store(Word::RspProd, oldest.wrapping_add(1), Ordering::Release);
    true
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
