//! Backend's end of a ring: consumes requests, produces responses.

use core::sync::atomic::compiler_fence;

use ringfence_memory::Raw;
use ringfence_wire::numbers::{bounded, usize_from};

use crate::layout::{ProducerOverflow, RingLayout, passes_event};
use crate::memory::{RingMemory, Word, fetch_entries, put_entries};
use crate::sync::{Ordering, full_fence};

/// Largest entry size that a crash journal supports: a block request has 112 bytes.
const ENTRY_MAX: usize = 128;

/// Magic number in the first word of an initialised journal (in a ring, that word is the request index).
const JOURNAL_MAGIC: u32 = 0x5246_0001;

/// Reasons for which a backend cannot resume a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ResumeError {
    /// Response index in the ring that the previous backend cannot have left.
    #[error(
        "the ring's response index is {shared}, but the backend before had come to {recorded} \
         (in a ring of {count})"
    )]
    Responses {
        /// Index in the ring, which the frontend can change.
        shared: u32,
        /// Index in the crash journal.
        recorded: u32,
        /// Entries of the ring.
        count: u32,
    },
    /// Impossible request index of the frontend.
    #[error(transparent)]
    Requests(#[from] ProducerOverflow),
}

/// Backend's end of a ring.
///
/// ```text
/// loop {
///     while unconsumed()? > 0 { request(i) ...; consume(n); respond(...) }
///     if publish() { notify }
///     if !final_check()? { sleep until notified }
/// }
/// ```
///
/// # Crash journal
///
/// A response overwrites the slot of a request. If a backend dies between writing responses and publishing
/// them, its successor would parse those responses as requests. A *journal* prevents that. It is a page of
/// the backend's own in the format of a ring, and it outlives the process. With a journal, the backend
/// changes the shared ring only after it decided to publish:
///
/// 1. Responses gather in the journal's entries.
/// 2. The journal's `rsp_prod` marks them as complete.
/// 3. They are copied to the ring, and the ring's `rsp_prod` is set.
///
/// [`BackRing::resume`] repeats step 3 if step 2 was done. Otherwise every slot behind the ring's `rsp_prod`
/// is as the frontend wrote it. Only a process that dies at some instruction observes the order of these
/// stores, so a compiler fence is enough.
#[derive(Debug)]
pub struct BackRing<M> {
    pub(crate) memory: M,
    journal: Option<M>,
    pub(crate) layout: RingLayout,
    req_cons: u32,
    pub(crate) rsp_prod_pvt: u32,
}

impl<M: RingMemory> BackRing<M> {
    /// Attaches to a ring that the frontend has initialised. Consumption starts at the published response
    /// index: 0 on a fresh ring. On a ring that an earlier backend left, that is the first unanswered request.
    pub fn attach(memory: M, layout: RingLayout) -> BackRing<M> {
        let start = memory.load(Word::RspProd, Ordering::Relaxed);
        BackRing { memory, journal: None, layout, req_cons: start, rsp_prod_pvt: start }
    }

    /// Attaches as [`BackRing::attach`] does, with a newly initialised crash journal.
    pub fn attach_recorded(memory: M, journal: M, layout: RingLayout) -> BackRing<M> {
        let ring = BackRing::attach(memory, layout);
        journal.store(Word::RspProd, ring.rsp_prod_pvt, Ordering::Release);
        journal.store(Word::ReqProd, JOURNAL_MAGIC, Ordering::Release);
        BackRing { journal: Some(journal), ..ring }
    }

    /// Resumes a ring whose previous backend kept `journal` and died. Publishes the responses that
    /// the journal marks as complete, and continues at the first unanswered request. Requests that the previous
    /// backend consumed without answering are found again. The caller must notify the frontend once, because
    /// the previous backend may have died before it did. An uninitialised journal is initialised.
    ///
    /// # Errors
    ///
    /// Returns [`ResumeError`] if the shared indices are impossible; the ring is unchanged.
    pub fn resume(memory: M, journal: M, layout: RingLayout) -> Result<BackRing<M>, ResumeError> {
        let count = layout.count();
        if journal.load(Word::ReqProd, Ordering::Acquire) != JOURNAL_MAGIC {
            let ring = BackRing::attach_recorded(memory, journal, layout);
            ring.unconsumed()?;
            return Ok(ring);
        }
        let shared = memory.load(Word::RspProd, Ordering::Acquire);
        let recorded = journal.load(Word::RspProd, Ordering::Acquire);
        let behind = recorded.wrapping_sub(shared);
        if behind > count {
            return Err(ResumeError::Responses { shared, recorded, count });
        }
        let announced = memory.load(Word::ReqProd, Ordering::Acquire).wrapping_sub(recorded);
        if announced > count {
            return Err(ProducerOverflow { announced, count }.into());
        }
        copy_entries(&journal, &memory, layout, shared, behind);
        memory.store(Word::RspProd, recorded, Ordering::Release);
        let journal = Some(journal);
        Ok(BackRing { memory, journal, layout, req_cons: recorded, rsp_prod_pvt: recorded })
    }

    /// Returns the number of entries.
    pub fn count(&self) -> u32 {
        self.layout.count()
    }

    /// Returns the number of published, unconsumed requests, never more than can be answered.
    ///
    /// # Errors
    ///
    /// Returns [`ProducerOverflow`] if the frontend's index is impossible (XSA-39).
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, ProducerOverflow> {
        let prod = self.memory.load(Word::ReqProd, Ordering::Acquire);
        let count = self.layout.count();
        let announced = prod.wrapping_sub(self.rsp_prod_pvt);
        if announced > count {
            return Err(ProducerOverflow { announced, count });
        }
        let held = self.req_cons.wrapping_sub(self.rsp_prod_pvt);
        // A frontend that decrements its producer index must not wrap the difference.
        Ok(announced.saturating_sub(held))
    }

    /// Fetches the `ahead`-th unconsumed request, once. The caller fetches only requests that
    /// [`BackRing::unconsumed`] announced, and each of them once.
    #[inline]
    pub fn request<const N: usize>(&self, ahead: u32) -> Raw<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.fetch(self.layout.offset(self.req_cons.wrapping_add(ahead)), &mut bytes);
        Raw::new(bytes)
    }

    /// Fetches `into.len()` requests from the `ahead`-th unconsumed one on, each once, in as few copies as the
    /// ring's end allows. `N` is the entry size. The caller fetches only requests that
    /// [`BackRing::unconsumed`] announced.
    #[inline]
    pub fn requests<const N: usize>(&self, ahead: u32, into: &mut [[u8; N]]) {
        fetch_entries(&self.memory, self.layout, self.req_cons.wrapping_add(ahead), into);
    }

    /// Marks `n` requests as consumed.
    #[inline]
    pub fn consume(&mut self, n: u32) {
        self.req_cons = self.req_cons.wrapping_add(n);
    }

    /// Returns the number of consumed, unanswered requests.
    #[inline]
    pub fn owed(&self) -> u32 {
        self.req_cons.wrapping_sub(self.rsp_prod_pvt)
    }

    /// Returns the free-running index of the next request.
    pub fn consumed_index(&self) -> u32 {
        self.req_cons
    }

    /// Writes the next response, which [`BackRing::publish`] makes visible. Returns `false` without writing if
    /// no request is unanswered.
    #[inline]
    pub fn respond(&mut self, response: &[u8]) -> bool {
        if self.owed() == 0 || response.len() > self.layout.entry_bytes() {
            return false;
        }
        let target = self.journal.as_ref().unwrap_or(&self.memory);
        target.put(self.layout.offset(self.rsp_prod_pvt), response);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(1);
        true
    }

    /// Writes several responses as [`BackRing::respond`] does. Returns their number, at most the number of
    /// unanswered requests.
    #[inline]
    pub fn respond_all<const N: usize>(&mut self, responses: &[[u8; N]]) -> usize {
        let owed = self.owed();
        let fits = if N <= self.layout.entry_bytes() { usize_from(owed) } else { 0 };
        let Some(written) = responses.get(..responses.len().min(fits)) else { return 0 };
        let target = self.journal.as_ref().unwrap_or(&self.memory);
        put_entries(target, self.layout, self.rsp_prod_pvt, written);
        let count = bounded(written.len(), owed);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(count);
        written.len()
    }

    /// Publishes all written responses. Returns `true` if the frontend wants a notification.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = self.memory.load(Word::RspProd, Ordering::Relaxed);
        let new = self.rsp_prod_pvt;
        if old == new {
            return false;
        }
        if let Some(journal) = &self.journal {
            journal.store(Word::RspProd, new, Ordering::Release);
            compiler_fence(core::sync::atomic::Ordering::SeqCst);
            // At most the responses since `old`, unless the frontend changed the index itself.
            let fresh = new.wrapping_sub(old).min(self.layout.count());
            copy_entries(journal, &self.memory, self.layout, new.wrapping_sub(fresh), fresh);
        }
        self.memory.store(Word::RspProd, new, Ordering::Release);
        full_fence();
        passes_event(old, new, self.memory.load(Word::RspEvent, Ordering::Relaxed))
    }

    /// Checks for work before sleeping: requests a notification of the next request, then returns `true` if
    /// there is one already.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`BackRing::unconsumed`].
    pub fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        self.final_check_for(1)
    }

    /// Checks as [`BackRing::final_check`] does, but for `ahead` requests. A receive ring with too few buffers
    /// for the next packet waits for more this way.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`BackRing::unconsumed`].
    pub fn final_check_for(&mut self, ahead: u32) -> Result<bool, ProducerOverflow> {
        if self.unconsumed()? >= ahead {
            return Ok(true);
        }
        self.memory.store(Word::ReqEvent, self.req_cons.wrapping_add(ahead), Ordering::Relaxed);
        full_fence();
        Ok(self.unconsumed()? >= ahead)
    }
}

/// Bytes per copy from the journal to the ring.
const COPY_BYTES: usize = 1024;

/// Copies `n` entries, starting at index `first`.
fn copy_entries<M: RingMemory>(from: &M, to: &M, layout: RingLayout, first: u32, n: u32) {
    let mut entries = [0; COPY_BYTES];
    let bytes = layout.entry_bytes();
    let most = bounded(COPY_BYTES / bytes.clamp(1, ENTRY_MAX), u32::MAX);
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
