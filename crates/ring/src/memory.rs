//! What a ring needs of the memory it lies in.

use ringfence_memory::{LentSlice, OutOfRange};

use crate::sync::Ordering;

/// The four shared words of a ring, by byte offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Word {
    /// Requests produced; the frontend writes.
    ReqProd = 0,
    /// Request index the backend wants to hear of.
    ReqEvent = 4,
    /// Responses produced; the backend writes.
    RspProd = 8,
    /// Response index the frontend wants to hear of.
    RspEvent = 12,
}

/// Memory that holds a ring.
pub trait RingMemory {
    /// Loads a shared word.
    fn load(&self, word: Word, order: Ordering) -> u32;
    /// Stores a shared word.
    fn store(&self, word: Word, value: u32, order: Ordering);
    /// Fetches `into.len()` bytes at `offset`, each once.
    fn fetch(&self, offset: usize, into: &mut [u8]);
    /// Stores bytes at `offset`.
    fn put(&self, offset: usize, bytes: &[u8]);
}

/// Lent memory that was checked to hold a whole ring, so that no later access can be out of range.
#[derive(Clone, Debug)]
pub struct RingPages(LentSlice);

impl RingPages {
    /// Takes `lent` as a ring of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] when it is shorter, read-only, or not aligned to 4.
    pub fn new(lent: LentSlice, bytes: usize) -> Result<RingPages, OutOfRange> {
        if !lent.is_writable() {
            return Err(OutOfRange::ReadOnly);
        }
        let lent = lent.slice(0, bytes)?;
        lent.load_u32(0, Ordering::Relaxed)?;
        Ok(RingPages(lent))
    }
}

impl RingMemory for RingPages {
    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.0.load_u32(word as usize, order).unwrap_or_default()
    }

    #[inline]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        let stored = self.0.store_u32(word as usize, value, order);
        debug_assert!(stored.is_ok(), "a ring's header lies inside its pages");
    }

    #[inline]
    fn fetch(&self, offset: usize, into: &mut [u8]) {
        let fetched = self.0.copy_to(offset, into);
        debug_assert!(fetched.is_ok(), "a ring's slots lie inside its pages");
    }

    #[inline]
    fn put(&self, offset: usize, bytes: &[u8]) {
        let stored = self.0.copy_from(offset, bytes);
        debug_assert!(stored.is_ok(), "a ring's slots lie inside its pages");
    }
}
