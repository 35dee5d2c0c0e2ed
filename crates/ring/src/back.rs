//! The backend's end of a ring: consumes requests, produces responses.

use ringfence_memory::Raw;

use crate::sync::{Ordering, fence};
use crate::{ProducerOverflow, RingLayout, RingMemory, Word, passes_event};

/// The backend's end.
///
/// ```text
/// loop {
///     while unconsumed()? > 0 { request(i) ...; consume(n); respond(...) }
///     if publish() { notify }
///     if !final_check()? { sleep until notified }
/// }
/// ```
#[derive(Debug)]
pub struct BackRing<M> {
    memory: M,
    layout: RingLayout,
    req_cons: u32,
    rsp_prod_pvt: u32,
}

impl<M: RingMemory> BackRing<M> {
    /// Attaches to a ring that the frontend has initialised. Consumption starts at the published
    /// response index: 0 on a fresh ring, and on one that an earlier backend left, the first
    /// request it has not answered.
    pub fn attach(memory: M, layout: RingLayout) -> BackRing<M> {
        let start = memory.load(Word::RspProd, Ordering::Relaxed);
        BackRing { memory, layout, req_cons: start, rsp_prod_pvt: start }
    }

    /// Entries of the ring.
    pub fn count(&self) -> u32 {
        self.layout.count()
    }

    /// Requests published and not consumed, never more than may be answered.
    ///
    /// # Errors
    ///
    /// [`ProducerOverflow`] when the frontend's index is impossible (XSA-39).
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, ProducerOverflow> {
        let prod = self.memory.load(Word::ReqProd, Ordering::Acquire);
        let count = self.layout.count();
        let announced = prod.wrapping_sub(self.rsp_prod_pvt);
        if announced > count {
            return Err(ProducerOverflow { announced, count });
        }
        let held = self.req_cons.wrapping_sub(self.rsp_prod_pvt);
        // A frontend that takes its producer index back must not make the difference wrap.
        Ok(announced.saturating_sub(held))
    }

    /// Fetches the `ahead`-th unconsumed request, once. The caller asks only for requests that
    /// [`BackRing::unconsumed`] announced, and for each of them once.
    #[inline]
    pub fn request<const N: usize>(&self, ahead: u32) -> Raw<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.fetch(self.layout.offset(self.req_cons.wrapping_add(ahead)), &mut bytes);
        Raw::new(bytes)
    }

    /// Marks `n` requests as consumed.
    #[inline]
    pub fn consume(&mut self, n: u32) {
        self.req_cons = self.req_cons.wrapping_add(n);
    }

    /// Requests consumed and not answered.
    #[inline]
    pub fn owed(&self) -> u32 {
        self.req_cons.wrapping_sub(self.rsp_prod_pvt)
    }

    /// Free-running index of the next request to consume.
    pub fn consumed_index(&self) -> u32 {
        self.req_cons
    }

    /// Writes the next response; it becomes visible with [`BackRing::publish`]. Refused, with
    /// `false`, when no request is owed one.
    #[inline]
    pub fn respond(&mut self, response: &[u8]) -> bool {
        if self.owed() == 0 || response.len() > self.layout.entry_bytes() {
            return false;
        }
        self.memory.put(self.layout.offset(self.rsp_prod_pvt), response);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(1);
        true
    }

    /// Publishes the responses written so far; `true` when the frontend wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = self.memory.load(Word::RspProd, Ordering::Relaxed);
        let new = self.rsp_prod_pvt;
        if old == new {
            return false;
        }
        self.memory.store(Word::RspProd, new, Ordering::Release);
        fence(Ordering::SeqCst);
        passes_event(old, new, self.memory.load(Word::RspEvent, Ordering::Relaxed))
    }

    /// The last look before sleeping: asks for a notification of the next request and says
    /// whether there is work already.
    ///
    /// # Errors
    ///
    /// As [`BackRing::unconsumed`].
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        self.final_check_for(1)
    }

    /// As [`BackRing::final_check`], asking to be told only when `ahead` requests have come: a
    /// receive ring with some buffers left but too few for the packet at hand waits for more.
    ///
    /// # Errors
    ///
    /// As [`BackRing::unconsumed`].
    pub fn final_check_for(&mut self, ahead: u32) -> Result<bool, ProducerOverflow> {
        if self.unconsumed()? >= ahead {
            return Ok(true);
        }
        self.memory.store(Word::ReqEvent, self.req_cons.wrapping_add(ahead), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.unconsumed()? >= ahead)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
impl<M> BackRing<M> {
    pub(crate) fn into_memory(self) -> M {
        self.memory
    }
}
