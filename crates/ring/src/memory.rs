//! Memory of a ring: the accesses that both ends need, and their implementation on lent memory.

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_wire::numbers::bounded;

use crate::layout::RingLayout;
use crate::sync::Ordering;

/// Shared words of a ring header, by byte offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Word {
    /// Request producer index, written by the frontend.
    ReqProd = 0,
    /// Request index at which the backend wants an event.
    ReqEvent = 4,
    /// Response producer index, written by the backend.
    RspProd = 8,
    /// Response index at which the frontend wants an event.
    RspEvent = 12,
}

/// Memory that holds one ring.
pub trait RingMemory {
    /// Loads a shared word of the header.
    fn load(&self, word: Word, order: Ordering) -> u32;
    /// Stores a shared word of the header.
    fn store(&self, word: Word, value: u32, order: Ordering);
    /// Fetches `into.len()` bytes at `offset`, each once.
    fn fetch(&self, offset: usize, into: &mut [u8]);
    /// Stores bytes at `offset`.
    fn put(&self, offset: usize, bytes: &[u8]);
}

/// Fetches entries from index `first` on, each once. If `N` is the entry size, one fetch covers adjacent
/// entries.
#[inline]
pub(crate) fn fetch_entries<M: RingMemory, const N: usize>(
    memory: &M,
    layout: RingLayout,
    first: u32,
    into: &mut [[u8; N]],
) {
    let (mut at, mut rest) = (first, into);
    if N != layout.entry_bytes() {
        for (index, entry) in (0u32..).zip(rest) {
            memory.fetch(layout.offset(at.wrapping_add(index)), entry);
        }
        return;
    }
    while !rest.is_empty() {
        let now = rest.len().min(layout.until_end(at) as usize);
        let (entries, left) = rest.split_at_mut(now);
        memory.fetch(layout.offset(at), entries.as_flattened_mut());
        at = at.wrapping_add(bounded(now, layout.count()));
        rest = left;
    }
}

/// Stores entries, or their first `N` bytes, from index `first` on.
#[inline]
pub(crate) fn put_entries<M: RingMemory, const N: usize>(
    memory: &M,
    layout: RingLayout,
    first: u32,
    entries: &[[u8; N]],
) {
    let (mut at, mut rest) = (first, entries);
    if N != layout.entry_bytes() {
        for (index, entry) in (0u32..).zip(rest) {
            memory.put(layout.offset(at.wrapping_add(index)), entry);
        }
        return;
    }
    while !rest.is_empty() {
        let now = rest.len().min(layout.until_end(at) as usize);
        let (entries, left) = rest.split_at(now);
        memory.put(layout.offset(at), entries.as_flattened());
        at = at.wrapping_add(bounded(now, layout.count()));
        rest = left;
    }
}

/// Lent memory that was checked to hold a whole ring, so that no later access is out of range.
#[derive(Clone, Debug)]
pub struct RingPages {
    /// Header, and all entries of a contiguous ring.
    first: LentSlice,
    /// Further pages of a ring in pages. Entries may cross page boundaries.
    rest: Vec<LentSlice>,
}

impl RingPages {
    /// Uses `lent` as a contiguous ring of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if `lent` is too short, read-only, or not aligned to 4.
    pub fn new(lent: LentSlice, bytes: usize) -> Result<RingPages, OutOfRange> {
        if !lent.is_writable() {
            return Err(OutOfRange::ReadOnly);
        }
        let first = lent.slice(0, bytes)?;
        first.load_u32(0, Ordering::Relaxed)?;
        Ok(RingPages { first, rest: Vec::new() })
    }

    /// Uses `pages` of 4096 bytes each as one ring, in that order.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if there is no page, or one is too short, read-only, or not aligned to 4.
    pub fn paged(pages: Vec<LentSlice>) -> Result<RingPages, OutOfRange> {
        let mut whole = Vec::with_capacity(pages.len());
        for page in pages {
            whole.push(RingPages::new(page, PAGE_SIZE)?.first);
        }
        if whole.is_empty() {
            return Err(OutOfRange::Bounds { offset: 0, len: PAGE_SIZE, size: 0 });
        }
        let rest = whole.split_off(1);
        whole.pop().map(|first| RingPages { first, rest }).ok_or(OutOfRange::ReadOnly)
    }

    /// Splits `len` bytes at `offset` by page: position in the range, page, position in the page, length. Only for
    /// rings in pages.
    fn parts(
        &self,
        offset: usize,
        len: usize,
    ) -> impl Iterator<Item = (usize, Option<&LentSlice>, usize, usize)> {
        let mut done = 0;
        core::iter::from_fn(move || {
            if done >= len {
                return None;
            }
            let (page, at) = ((offset + done) / PAGE_SIZE, (offset + done) % PAGE_SIZE);
            let bytes = (PAGE_SIZE - at).min(len - done);
            let lent = match page {
                0 => Some(&self.first),
                page => self.rest.get(page - 1),
            };
            let part = (done, lent, at, bytes);
            done += bytes;
            Some(part)
        })
    }

    fn fetch_parts(&self, offset: usize, into: &mut [u8]) {
        for (at, page, from, len) in self.parts(offset, into.len()) {
            let fetched = page.map(|page| page.copy_to(from, &mut into[at..at + len]));
            debug_assert!(matches!(fetched, Some(Ok(()))), "a ring's slots lie inside its pages");
        }
    }

    fn put_parts(&self, offset: usize, bytes: &[u8]) {
        for (at, page, from, len) in self.parts(offset, bytes.len()) {
            let stored = page.map(|page| page.copy_from(from, &bytes[at..at + len]));
            debug_assert!(matches!(stored, Some(Ok(()))), "a ring's slots lie inside its pages");
        }
    }
}

impl RingMemory for RingPages {
    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.first.load_u32(word as usize, order).unwrap_or_default()
    }

    #[inline]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        let stored = self.first.store_u32(word as usize, value, order);
        debug_assert!(stored.is_ok(), "a ring's header lies inside its pages");
    }

    #[inline]
    fn fetch(&self, offset: usize, into: &mut [u8]) {
        if self.first.copy_to(offset, into).is_err() {
            self.fetch_parts(offset, into);
        }
    }

    #[inline]
    fn put(&self, offset: usize, bytes: &[u8]) {
        if self.first.copy_from(offset, bytes).is_err() {
            self.put_parts(offset, bytes);
        }
    }
}
