//! Frontend's end of a ring: produces requests, consumes responses.

use ringfence_memory::Raw;
use ringfence_wire::numbers::{bounded, usize_from};

use crate::layout::{ProducerOverflow, RingLayout, passes_event};
use crate::memory::{RingMemory, Word, fetch_entries, put_entries};
use crate::sync::{Ordering, full_fence};

/// Frontend's end of a ring. It initialises the shared header and trusts nothing that the backend writes
/// later. A hostile backend costs the frontend its device only.
#[derive(Debug)]
pub struct FrontRing<M> {
    memory: M,
    layout: RingLayout,
    req_prod_pvt: u32,
    req_prod_published: u32,
    rsp_cons: u32,
}

impl<M: RingMemory> FrontRing<M> {
    /// Initialises the ring's header in `memory` and attaches to it.
    pub fn init(memory: M, layout: RingLayout) -> FrontRing<M> {
        memory.store(Word::ReqProd, 0, Ordering::Relaxed);
        memory.store(Word::RspProd, 0, Ordering::Relaxed);
        memory.store(Word::ReqEvent, 1, Ordering::Relaxed);
        memory.store(Word::RspEvent, 1, Ordering::Release);
        FrontRing { memory, layout, req_prod_pvt: 0, req_prod_published: 0, rsp_cons: 0 }
    }

    /// Returns the number of entries.
    pub fn count(&self) -> u32 {
        self.layout.count()
    }

    /// Returns the number of free request slots.
    #[inline]
    pub fn free(&self) -> u32 {
        self.layout.count() - self.req_prod_pvt.wrapping_sub(self.rsp_cons)
    }

    /// Returns the free-running index of the next request.
    pub fn produced_index(&self) -> u32 {
        self.req_prod_pvt
    }

    /// Returns the free-running index of the next response.
    pub fn consumed_index(&self) -> u32 {
        self.rsp_cons
    }

    /// Writes the next request, which [`FrontRing::publish`] makes visible. Returns `false` without writing if no
    /// slot is free.
    #[inline]
    pub fn request(&mut self, request: &[u8]) -> bool {
        if self.free() == 0 || request.len() > self.layout.entry_bytes() {
            return false;
        }
        self.memory.put(self.layout.offset(self.req_prod_pvt), request);
        self.req_prod_pvt = self.req_prod_pvt.wrapping_add(1);
        true
    }

    /// Writes several requests as [`FrontRing::request`] does. Returns their number, at most the number of free
    /// slots. `N` is at most the entry size.
    #[inline]
    pub fn request_all<const N: usize>(&mut self, requests: &[[u8; N]]) -> usize {
        let free = self.free();
        let fits = if N <= self.layout.entry_bytes() { usize_from(free) } else { 0 };
        let Some(written) = requests.get(..requests.len().min(fits)) else { return 0 };
        put_entries(&self.memory, self.layout, self.req_prod_pvt, written);
        let count = bounded(written.len(), free);
        self.req_prod_pvt = self.req_prod_pvt.wrapping_add(count);
        written.len()
    }

    /// Publishes all written requests. Returns `true` if the backend wants a notification.
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

    /// Returns the number of published, unconsumed responses.
    ///
    /// # Errors
    ///
    /// Returns [`ProducerOverflow`] if the backend announces more responses than there are unanswered published
    /// requests.
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

    /// Fetches `into.len()` responses from the `ahead`-th unconsumed one on, each once. If `N` is the entry size,
    /// the bytes behind a shorter response are those of the slot before.
    #[inline]
    pub fn responses<const N: usize>(&self, ahead: u32, into: &mut [[u8; N]]) {
        fetch_entries(&self.memory, self.layout, self.rsp_cons.wrapping_add(ahead), into);
    }

    /// Marks `n` responses as consumed. The caller consumes only responses that [`FrontRing::unconsumed`]
    /// announced.
    #[inline]
    pub fn consume(&mut self, n: u32) {
        self.rsp_cons = self.rsp_cons.wrapping_add(n);
    }

    /// Checks for work before sleeping: requests a notification of the next response, then returns `true` if there
    /// is one already.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`FrontRing::unconsumed`].
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        if self.unconsumed()? > 0 {
            return Ok(true);
        }
        self.memory.store(Word::RspEvent, self.rsp_cons.wrapping_add(1), Ordering::Relaxed);
        full_fence();
        Ok(self.unconsumed()? > 0)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
impl<M: RingMemory> FrontRing<M> {
    /// Moves an empty ring to any index, to test the wrap-around of indices.
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
