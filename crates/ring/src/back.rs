//! The backend's end of a ring: consumes requests, produces responses.

use core::sync::atomic::compiler_fence;

use ringfence_memory::Raw;

use crate::memory::{fetch_entries, put_entries};
use crate::sync::{Ordering, full_fence};
use crate::{ProducerOverflow, RingLayout, RingMemory, Word, passes_event};

/// Bytes of the largest entry of which a record can be kept: a block request has 112.
const ENTRY_MAX: usize = 128;

/// What stands in the first word of a record in use (a ring of the frontend's has its index there).
const BEGUN: u32 = 0x5246_0001;

/// Why a ring cannot be taken over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ResumeError {
    /// The ring's response index is not one that the record's owner can have left.
    #[error(
        "the ring's response index is {shared}, but the backend before had come to {recorded} \
         (in a ring of {count})"
    )]
    Responses {
        /// The ring's, which the frontend can change.
        shared: u32,
        /// The record's.
        recorded: u32,
        /// Entries of the ring.
        count: u32,
    },
    /// The frontend's index is impossible.
    #[error(transparent)]
    Requests(#[from] ProducerOverflow),
}

/// The backend's end.
///
/// ```text
/// loop {
///     while unconsumed()? > 0 { request(i) ...; consume(n); respond(...) }
///     if publish() { notify }
///     if !final_check()? { sleep until notified }
/// }
/// ```
///
/// # A record that outlives the process
///
/// A response lies where a request lay, so whoever dies between writing some and publishing them
/// leaves slots in which a successor would read responses as requests, with grant references made of
/// identifiers. With a *record*, a page of the backend's own in the form of a ring, nothing is
/// written to the shared ring before its publication is decided:
///
/// 1. responses gather in the record's entries;
/// 2. the record's `rsp_prod` says that they are complete;
/// 3. they are copied to the ring, and the ring's `rsp_prod` is set.
///
/// [`BackRing::resume`] repeats step 3 if step 2 was done, and otherwise finds every slot behind the
/// ring's `rsp_prod` as the frontend wrote it. The order matters only to a process that is cut off at
/// some instruction, so the compiler alone is kept from changing it.
#[derive(Debug)]
pub struct BackRing<M> {
    pub(crate) memory: M,
    record: Option<M>,
    pub(crate) layout: RingLayout,
    req_cons: u32,
    pub(crate) rsp_prod_pvt: u32,
}

impl<M: RingMemory> BackRing<M> {
    /// Attaches to a ring that the frontend has initialised. Consumption starts at the published
    /// response index: 0 on a fresh ring, and on one that an earlier backend left, the first
    /// request it has not answered.
    pub fn attach(memory: M, layout: RingLayout) -> BackRing<M> {
        let start = memory.load(Word::RspProd, Ordering::Relaxed);
        BackRing { memory, record: None, layout, req_cons: start, rsp_prod_pvt: start }
    }

    /// As [`BackRing::attach`], with a record that is begun anew.
    pub fn attach_recorded(memory: M, record: M, layout: RingLayout) -> BackRing<M> {
        let ring = BackRing::attach(memory, layout);
        record.store(Word::RspProd, ring.rsp_prod_pvt, Ordering::Release);
        record.store(Word::ReqProd, BEGUN, Ordering::Release);
        BackRing { record: Some(record), ..ring }
    }

    /// Takes over a ring from a backend that kept `record` and is no more: publishes what it had
    /// decided to publish, and goes on with the first request that has no answer. What that backend
    /// had consumed without answering is found again. The frontend is to be notified once: that
    /// backend may have died before it did so. A record that nobody has begun is begun.
    ///
    /// # Errors
    ///
    /// [`ResumeError`] when the shared indices are impossible; the ring is left as it is.
    pub fn resume(memory: M, record: M, layout: RingLayout) -> Result<BackRing<M>, ResumeError> {
        let count = layout.count();
        if record.load(Word::ReqProd, Ordering::Acquire) != BEGUN {
            let ring = BackRing::attach_recorded(memory, record, layout);
            ring.unconsumed()?;
            return Ok(ring);
        }
        let shared = memory.load(Word::RspProd, Ordering::Acquire);
        let recorded = record.load(Word::RspProd, Ordering::Acquire);
        let behind = recorded.wrapping_sub(shared);
        if behind > count {
            return Err(ResumeError::Responses { shared, recorded, count });
        }
        let announced = memory.load(Word::ReqProd, Ordering::Acquire).wrapping_sub(recorded);
        if announced > count {
            return Err(ProducerOverflow { announced, count }.into());
        }
        copy_entries(&record, &memory, layout, shared, behind);
        memory.store(Word::RspProd, recorded, Ordering::Release);
        let record = Some(record);
        Ok(BackRing { memory, record, layout, req_cons: recorded, rsp_prod_pvt: recorded })
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

    /// Fetches `into.len()` requests from the `ahead`-th unconsumed one on, each once, by as few copies
    /// as the ring's end allows. `N` is the size of an entry, and the caller asks only for requests
    /// that [`BackRing::unconsumed`] announced.
    #[inline]
    pub fn requests<const N: usize>(&self, ahead: u32, into: &mut [[u8; N]]) {
        fetch_entries(&self.memory, self.layout, self.req_cons.wrapping_add(ahead), into);
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
        let place = self.record.as_ref().unwrap_or(&self.memory);
        place.put(self.layout.offset(self.rsp_prod_pvt), response);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(1);
        true
    }

    /// Writes responses as [`BackRing::respond`] does, one behind the other; how many, which is fewer
    /// than there are if no more are owed.
    #[inline]
    pub fn respond_all<const N: usize>(&mut self, responses: &[[u8; N]]) -> usize {
        let owed = usize::try_from(self.owed()).unwrap_or(usize::MAX);
        let fits = if N <= self.layout.entry_bytes() { owed } else { 0 };
        let Some(written) = responses.get(..responses.len().min(fits)) else { return 0 };
        let place = self.record.as_ref().unwrap_or(&self.memory);
        put_entries(place, self.layout, self.rsp_prod_pvt, written);
        // At most as many as are owed.
        let count = u32::try_from(written.len()).unwrap_or(0);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(count);
        written.len()
    }

    /// Publishes the responses written so far; `true` when the frontend wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = self.memory.load(Word::RspProd, Ordering::Relaxed);
        let new = self.rsp_prod_pvt;
        if old == new {
            return false;
        }
        if let Some(record) = &self.record {
            record.store(Word::RspProd, new, Ordering::Release);
            compiler_fence(core::sync::atomic::Ordering::SeqCst);
            // No more than were answered since `old`, unless the frontend wrote that itself.
            let fresh = new.wrapping_sub(old).min(self.layout.count());
            copy_entries(record, &self.memory, self.layout, new.wrapping_sub(fresh), fresh);
        }
        self.memory.store(Word::RspProd, new, Ordering::Release);
        full_fence();
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
        full_fence();
        Ok(self.unconsumed()? >= ahead)
    }
}

/// Bytes that are copied from a record to the ring at a time.
const COPIED_AT_ONCE: usize = 1024;

/// Copies `n` entries, from the one that `first` names on.
fn copy_entries<M: RingMemory>(from: &M, to: &M, layout: RingLayout, first: u32, n: u32) {
    let mut entries = [0; COPIED_AT_ONCE];
    let bytes = layout.entry_bytes();
    // Both are bounded by what a record can keep and by the ring.
    let most = u32::try_from(COPIED_AT_ONCE / bytes.clamp(1, ENTRY_MAX)).unwrap_or(1);
    let (mut at, mut left) = (first, n);
    while left > 0 {
        let now = left.min(most).min(layout.until_end(at));
        let Some(entries) = entries.get_mut(..now as usize * bytes) else { return };
        from.fetch(layout.offset(at), entries);
        to.put(layout.offset(at), entries);
        (at, left) = (at.wrapping_add(now), left - now);
    }
}

#[cfg(not(loom))]
#[cfg(test)]
impl<M> BackRing<M> {
    pub(crate) fn into_memory(self) -> M {
        self.memory
    }
}
