//! Batched grant copies between a peer's pages and memory of this domain.
//!
//! [`CopyOps`] owns the storage of a batch and the statuses of the last one. [`CopyOps::begin`] starts
//! a [`CopyList`], which borrows the private memory of its elements until
//! [`Grantee::copy`](crate::Grantee::copy) has executed it.
//! Ranges are checked when a copy is added, so a platform's engine sees only copies inside one page.

use core::marker::PhantomData;

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_wire::grant::{GrantStatus, Gref};

/// Local end of one copy. Only the platform's engines use the pointers.
#[derive(Clone)]
pub(crate) enum CopyLocal {
    /// Private memory, written. The peer's page is the source.
    Into(*mut u8),
    /// Private memory, read. The peer's page is the destination.
    From(*const u8),
    /// Lent memory, read: exactly the bytes to copy. The peer's page is the destination.
    FromLent(LentSlice),
}

/// Copy inside one page of the peer.
#[derive(Clone)]
pub(crate) struct CopyOp {
    pub(crate) gref: Gref,
    pub(crate) offset: u16,
    pub(crate) len: u16,
    pub(crate) local: CopyLocal,
}

/// Reusable storage for batches of copies, with the statuses of the last batch.
#[derive(Default)]
pub struct CopyOps {
    ops: Vec<CopyOp>,
    statuses: Vec<GrantStatus>,
}

// SAFETY: an engine dereferences the pointers in `ops` only while the CopyList that borrows their
// targets exists. Dropping the list clears `ops`, so no stale pointer remains.
unsafe impl Send for CopyOps {}

impl CopyOps {
    /// Creates storage without copies.
    pub fn new() -> CopyOps {
        CopyOps::default()
    }

    /// Begins a batch. Clears the statuses of the last one.
    pub fn begin<'ops, 'bytes>(&'ops mut self) -> CopyList<'ops, 'bytes> {
        self.ops.clear();
        self.statuses.clear();
        CopyList { storage: self, life: PhantomData }
    }

    /// Returns the status of each copy of the last batch, in the order of addition.
    pub fn statuses(&self) -> &[GrantStatus] {
        &self.statuses
    }
}

/// Batch of copies under construction. It borrows the private memory of its elements.
pub struct CopyList<'ops, 'bytes> {
    storage: &'ops mut CopyOps,
    life: PhantomData<&'bytes mut [u8]>,
}

/// Range of a copy that is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadRange {
    /// Range that crosses the end of the peer's page.
    #[error("{len} bytes at {offset} do not lie inside one page")]
    CrossesPage { offset: u16, len: usize },
    /// Range that is not inside the lent source.
    #[error(transparent)]
    Source(#[from] OutOfRange),
}

fn checked_len(offset: u16, len: usize) -> Result<u16, BadRange> {
    let inside = usize::from(offset) <= PAGE_SIZE && len <= PAGE_SIZE - usize::from(offset);
    match u16::try_from(len) {
        Ok(short) if inside => Ok(short),
        _ => Err(BadRange::CrossesPage { offset, len }),
    }
}

impl<'bytes> CopyList<'_, 'bytes> {
    /// Adds a copy from the peer's page into private memory.
    ///
    /// # Errors
    ///
    /// Returns [`BadRange::CrossesPage`]; nothing is added.
    pub fn read(
        &mut self,
        gref: Gref,
        offset: u16,
        into: &'bytes mut [u8],
    ) -> Result<(), BadRange> {
        let len = checked_len(offset, into.len())?;
        self.push(gref, offset, len, CopyLocal::Into(into.as_mut_ptr()));
        Ok(())
    }

    /// Adds a copy from private memory into the peer's page.
    ///
    /// # Errors
    ///
    /// Returns [`BadRange::CrossesPage`]; nothing is added.
    pub fn write(&mut self, gref: Gref, offset: u16, from: &'bytes [u8]) -> Result<(), BadRange> {
        let len = checked_len(offset, from.len())?;
        self.push(gref, offset, len, CopyLocal::From(from.as_ptr()));
        Ok(())
    }

    /// Adds a copy from lent memory, of any peer, into this peer's page.
    ///
    /// # Errors
    ///
    /// Returns [`BadRange`]; nothing is added.
    pub fn write_lent(
        &mut self,
        gref: Gref,
        offset: u16,
        from: &LentSlice,
        from_offset: usize,
        len: usize,
    ) -> Result<(), BadRange> {
        let short = checked_len(offset, len)?;
        // Checked here: in the engine a bad range would fail the copies that are joined with it.
        let from = from.slice(from_offset, len)?;
        self.push(gref, offset, short, CopyLocal::FromLent(from));
        Ok(())
    }

    /// Returns the number of copies in the batch.
    pub fn len(&self) -> usize {
        self.storage.ops.len()
    }

    /// Returns `true` if the batch has no copies.
    pub fn is_empty(&self) -> bool {
        self.storage.ops.is_empty()
    }

    fn push(&mut self, gref: Gref, offset: u16, len: u16, local: CopyLocal) {
        self.storage.ops.push(CopyOp { gref, offset, len, local });
    }

    /// Returns the copies and the status vector, for an engine.
    pub(crate) fn parts(&mut self) -> (&[CopyOp], &mut Vec<GrantStatus>) {
        (&self.storage.ops, &mut self.storage.statuses)
    }
}

impl Drop for CopyList<'_, '_> {
    fn drop(&mut self) {
        self.storage.ops.clear();
    }
}
