//! A backend's end whose requests are answered in any order, and none of which is lost with it.
//!
//! # Theory of operation
//!
//! A response takes the next slot behind the last response, whatever request it answers. Answered out
//! of order, it would therefore overwrite a request that is still being worked on, of which then only
//! the backend knows; and a backend that dies leaves a frontend waiting for ever. Answering in order
//! keeps every unanswered request in the ring, at the price that a slow one holds up all behind it.
//!
//! This end does neither. The slots between the last response and the last request belong to the
//! backend, and a frontend tells responses by their identifiers, so the unanswered requests may change
//! places. When a request is answered that is not the oldest one in the ring, the *oldest one moves to
//! its slot*, which is of no more use, and the response takes the slot that the oldest one had:
//!
//! ```text
//!          rsp_prod                          rsp_prod+1
//!             v                                  v
//!  ... resp | A | B | C | D         ... resp | resp C | B | A | D
//! ```
//!
//! At every instant the unanswered requests are those from `rsp_prod` on, each once, and whoever takes
//! the ring over ([`AnyOrderRing::attach`]) finds them there.
//!
//! # Dying between two instructions
//!
//! A response lies where a request lay, and the index that says so is written behind it. A process that
//! is killed in between leaves a slot that is neither. So what is about to be done is written down
//! first, in the part of the ring's header that the interface leaves unused (bytes 20 to 64): the
//! response, the slot it goes to, the slot that the oldest request moves to, and how far this has come.
//! A successor finishes it. It was written by this side, but the frontend can change it, as it can
//! change its own requests: that confuses its own disk, and nobody else's. The order of the stores
//! matters only to a process that is cut off at some instruction, so the compiler alone is kept from
//! changing it.

use core::sync::atomic::compiler_fence;

use ringfence_memory::Raw;

use crate::sync::{Ordering, full_fence};
use crate::{BackRing, ProducerOverflow, RingLayout, RingMemory, Word, passes_event};

/// Where in the header it says how far an answer has come.
const STAGE: usize = 20;
/// Where the note is.
const NOTE: usize = 24;
/// Its bytes: the oldest request's index, the answered one's, the response.
const NOTE_BYTES: usize = 8 + RESPONSE_MAX;

/// Most bytes of a response.
pub const RESPONSE_MAX: usize = 16;
/// Most bytes of a request.
const REQUEST_MAX: usize = 128;

/// Nothing is being done.
const IDLE: [u8; 4] = [0; 4];
/// The oldest request is being copied to the vacated slot; it is whole in its own.
const MOVING: [u8; 4] = *b"RFm1";
/// The response is being written; the oldest request is whole in the vacated slot, if there is one.
const ANSWERING: [u8; 4] = *b"RFa1";

/// A backend's end that answers in any order.
#[derive(Debug)]
pub struct AnyOrderRing<M> {
    ring: BackRing<M>,
    response: usize,
    /// The response index when the frontend was last asked whether it wants to be told.
    told: u32,
}

/// What a successor found to be finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attached {
    /// Requests without an answer, which will be found as unconsumed ones.
    pub unanswered: u32,
    /// Whether an answer was being written when the one before died, and is now given.
    pub finished: bool,
}

impl<M: RingMemory> AnyOrderRing<M> {
    /// Attaches to a ring, fresh or left behind. `response` is the size of a response in bytes, at most
    /// [`RESPONSE_MAX`]. The frontend of a ring that was left behind is to be notified once.
    ///
    /// # Errors
    ///
    /// [`ProducerOverflow`] when the frontend's index is impossible.
    pub fn attach(
        memory: M,
        layout: RingLayout,
        response: usize,
    ) -> Result<(AnyOrderRing<M>, Attached), ProducerOverflow> {
        let response = response.min(RESPONSE_MAX).min(layout.entry_bytes());
        let finished = finish(&memory, layout, response);
        let ring = BackRing::attach(memory, layout);
        let unanswered = ring.unconsumed()?;
        let told = ring.consumed_index();
        Ok((AnyOrderRing { ring, response, told }, Attached { unanswered, finished }))
    }

    /// Entries of the ring.
    pub fn count(&self) -> u32 {
        self.ring.count()
    }

    /// As [`BackRing::unconsumed`].
    ///
    /// # Errors
    ///
    /// [`ProducerOverflow`].
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, ProducerOverflow> {
        self.ring.unconsumed()
    }

    /// Fetches the next request, once, and consumes it; the index by which it is answered.
    #[inline]
    pub fn take<const N: usize>(&mut self) -> (u32, Raw<[u8; N]>) {
        let index = self.ring.consumed_index();
        let request = self.ring.request(0);
        self.ring.consume(1);
        (index, request)
    }

    /// The index of the oldest request without an answer.
    #[inline]
    pub fn oldest(&self) -> u32 {
        self.ring.rsp_prod_pvt
    }

    /// Requests consumed and not answered.
    #[inline]
    pub fn owed(&self) -> u32 {
        self.ring.owed()
    }

    /// Answers the request that is at `index`, and publishes that. The oldest request is at `index`
    /// afterwards, unless that was the oldest. Refused, with `false`, when no request is owed an answer
    /// there.
    pub fn answer(&mut self, index: u32, response: &[u8]) -> bool {
        let oldest = self.ring.rsp_prod_pvt;
        if index.wrapping_sub(oldest) >= self.ring.owed() || response.len() < self.response {
            return false;
        }
        let (memory, layout) = (&self.ring.memory, self.ring.layout);
        let mut note = [0; NOTE_BYTES];
        note[..4].copy_from_slice(&oldest.to_le_bytes());
        note[4..8].copy_from_slice(&index.to_le_bytes());
        note[8..8 + self.response].copy_from_slice(&response[..self.response]);
        memory.put(STAGE, &IDLE);
        then();
        memory.put(NOTE, &note);
        then();
        if index != oldest {
            memory.put(STAGE, &MOVING);
            then();
            move_request(memory, layout, oldest, index);
            then();
        }
        memory.put(STAGE, &ANSWERING);
        then();
        memory.put(layout.offset(oldest), &response[..self.response]);
        self.ring.rsp_prod_pvt = oldest.wrapping_add(1);
        memory.store(Word::RspProd, self.ring.rsp_prod_pvt, Ordering::Release);
        true
    }

    /// Whether the frontend wants to be told of the answers since this was asked last.
    pub fn notify_due(&mut self) -> bool {
        let (old, new) = (self.told, self.ring.rsp_prod_pvt);
        if old == new {
            return false;
        }
        self.told = new;
        full_fence();
        passes_event(old, new, self.ring.memory.load(Word::RspEvent, Ordering::Relaxed))
    }

    /// As [`BackRing::final_check`].
    ///
    /// # Errors
    ///
    /// [`ProducerOverflow`].
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        self.ring.final_check()
    }
}

/// What is written behind this is written later, for a process that dies and one that reads what it
/// left.
fn then() {
    compiler_fence(core::sync::atomic::Ordering::SeqCst);
}

fn move_request<M: RingMemory>(memory: &M, layout: RingLayout, from: u32, to: u32) {
    let mut entry = [0; REQUEST_MAX];
    let len = layout.entry_bytes().min(REQUEST_MAX);
    memory.fetch(layout.offset(from), &mut entry[..len]);
    memory.put(layout.offset(to), &entry[..len]);
}

/// Finishes the answer that whoever had the ring before was writing. Returns whether there was one.
fn finish<M: RingMemory>(memory: &M, layout: RingLayout, response: usize) -> bool {
    let (mut stage, mut note) = ([0; 4], [0; NOTE_BYTES]);
    memory.fetch(STAGE, &mut stage);
    memory.fetch(NOTE, &mut note);
    let number =
        |at: usize| u32::from_le_bytes([note[at], note[at + 1], note[at + 2], note[at + 3]]);
    let (oldest, index) = (number(0), number(4));
    let published = memory.load(Word::RspProd, Ordering::Acquire);
    let requests = memory.load(Word::ReqProd, Ordering::Acquire).wrapping_sub(published);
    let begun = stage == MOVING || stage == ANSWERING;
    // An answer that was given is older than the index; one that is not about requests that are there
    // was not written by a backend.
    let there = oldest == published && index.wrapping_sub(oldest) < requests;
    if !begun || !there || requests > layout.count() {
        return false;
    }
    if stage == MOVING {
        move_request(memory, layout, oldest, index);
        then();
        memory.put(STAGE, &ANSWERING);
        then();
    }
    memory.put(layout.offset(oldest), &note[8..8 + response]);
    memory.store(Word::RspProd, oldest.wrapping_add(1), Ordering::Release);
    true
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
