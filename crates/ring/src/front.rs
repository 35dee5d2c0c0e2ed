//! The frontend's end of a ring: produces requests, consumes responses.

use ringfence_memory::Raw;

use crate::memory::{fetch_entries, put_entries};
use crate::sync::{Ordering, full_fence};
use crate::{ProducerOverflow, RingLayout, RingMemory, Word, passes_event};

/// The frontend's end. It initialises the shared header and must not trust what the backend
/// writes later: a frontend of a hostile backend loses its device, nothing more.
#[derive(Debug)]
pub struct FrontRing<M> {
    memory: M,
    layout: RingLayout,
    req_prod_pvt: u32,
    req_prod_published: u32,
    rsp_cons: u32,
}

impl<M: RingMemory> FrontRing<M> {
    /// Initialises the ring's header in `memory`.
    pub fn init(memory: M, layout: RingLayout) -> FrontRing<M> {
        memory.store(Word::ReqProd, 0, Ordering::Relaxed);
        memory.store(Word::RspProd, 0, Ordering::Relaxed);
        memory.store(Word::ReqEvent, 1, Ordering::Relaxed);
        memory.store(Word::RspEvent, 1, Ordering::Release);
        FrontRing { memory, layout, req_prod_pvt: 0, req_prod_published: 0, rsp_cons: 0 }
    }

    /// Entries of the ring.
    pub fn count(&self) -> u32 {
        self.layout.count()
    }

    /// Request slots that may be filled.
    #[inline]
    pub fn free(&self) -> u32 {
        self.layout.count() - self.req_prod_pvt.wrapping_sub(self.rsp_cons)
    }

    /// Free-running index of the next request.
    pub fn produced_index(&self) -> u32 {
        self.req_prod_pvt
    }

    /// Free-running index of the next response.
    pub fn consumed_index(&self) -> u32 {
        self.rsp_cons
    }

    /// Writes the next request; visible with [`FrontRing::publish`]. Refused, with `false`, when
    /// no slot is free.
    #[inline]
    pub fn request(&mut self, request: &[u8]) -> bool {
        if self.free() == 0 || request.len() > self.layout.entry_bytes() {
            return false;
        }
        self.memory.put(self.layout.offset(self.req_prod_pvt), request);
        self.req_prod_pvt = self.req_prod_pvt.wrapping_add(1);
        true
    }

    /// Writes requests as [`FrontRing::request`] does, one behind the other; how many, which is fewer
    /// than there are if no more slots are free. `N` is at most the size of an entry.
    #[inline]
    pub fn request_all<const N: usize>(&mut self, requests: &[[u8; N]]) -> usize {
        let fits = if N <= self.layout.entry_bytes() { self.free() as usize } else { 0 };
        let Some(written) = requests.get(..requests.len().min(fits)) else { return 0 };
        put_entries(&self.memory, self.layout, self.req_prod_pvt, written);
        // At most the free slots.
        let count = u32::try_from(written.len()).unwrap_or(0);
        self.req_prod_pvt = self.req_prod_pvt.wrapping_add(count);
        written.len()
    }

    /// Publishes the requests written so far; `true` when the backend wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.req_prod_published, self.req_prod_pvt);
        if old == new {
            return false;
        }
        self.memory.store(Word::ReqProd, new, Ordering::Release);
        self.req_prod_published = new;
        full_fence();
        passes_event(old, new, self.memory.load(Word::ReqEvent, Ordering::Relaxed))
    }

    /// Responses published and not consumed.
    ///
    /// # Errors
    ///
    /// [`ProducerOverflow`] when the backend announces more responses than there are published
    /// requests without one.
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, ProducerOverflow> {
        let prod = self.memory.load(Word::RspProd, Ordering::Acquire);
        let announced = prod.wrapping_sub(self.rsp_cons);
        let outstanding = self.req_prod_published.wrapping_sub(self.rsp_cons);
        if announced > outstanding {
            return Err(ProducerOverflow { announced, count: outstanding });
        }
        Ok(announced)
    }

    /// Fetches the `ahead`-th unconsumed response, once.
    #[inline]
    pub fn response<const N: usize>(&self, ahead: u32) -> Raw<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.fetch(self.layout.offset(self.rsp_cons.wrapping_add(ahead)), &mut bytes);
        Raw::new(bytes)
    }

    /// Fetches `into.len()` responses from the `ahead`-th unconsumed one on, each once. Where `N` is the
    /// size of an entry, what lies behind a shorter response is whatever the slot held.
    #[inline]
    pub fn responses<const N: usize>(&self, ahead: u32, into: &mut [[u8; N]]) {
        fetch_entries(&self.memory, self.layout, self.rsp_cons.wrapping_add(ahead), into);
    }

    /// Marks `n` responses as consumed. The caller consumes only what
    /// [`FrontRing::unconsumed`] announced.
    #[inline]
    pub fn consume(&mut self, n: u32) {
        self.rsp_cons = self.rsp_cons.wrapping_add(n);
    }

    /// The last look before sleeping: asks for a notification of the next response and says
    /// whether there is one already.
    ///
    /// # Errors
    ///
    /// As [`FrontRing::unconsumed`].
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        if self.unconsumed()? > 0 {
            return Ok(true);
        }
        self.memory.store(Word::RspEvent, self.rsp_cons.wrapping_add(1), Ordering::Relaxed);
        full_fence();
        Ok(self.unconsumed()? > 0)
    }

    /// Asks to be told only when `ahead` more responses have come, without a check: for a
    /// transmit ring whose completions are reclaimed while producing.
    #[inline]
    pub fn ask_for_response(&self, ahead: u32) {
        self.memory.store(
            Word::RspEvent,
            self.rsp_cons.wrapping_add(ahead.max(1)),
            Ordering::Relaxed,
        );
    }
}

#[cfg(not(loom))]
#[cfg(test)]
impl<M: RingMemory> FrontRing<M> {
    /// Starts an empty ring at any index, to test what happens when the indices wrap.
    pub(crate) fn set_indices(&mut self, index: u32) {
        self.req_prod_pvt = index;
        self.req_prod_published = index;
        self.rsp_cons = index;
        self.memory.store(Word::ReqProd, index, Ordering::Relaxed);
        self.memory.store(Word::RspProd, index, Ordering::Relaxed);
        self.memory.store(Word::ReqEvent, index.wrapping_add(1), Ordering::Relaxed);
        self.memory.store(Word::RspEvent, index.wrapping_add(1), Ordering::Relaxed);
    }
}
