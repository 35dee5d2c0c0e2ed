//! Batches of copies between a peer's pages and this domain's memory.

use core::marker::PhantomData;

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_wire::grant::{GrantStatus, Gref};

/// This domain's end of one copy. The pointers are private to the platform's engines.
#[derive(Clone)]
pub(crate) enum CopyLocal {
    /// Private memory that is written: the peer's page is the source.
    Into(*mut u8),
    /// Private memory that is read: the peer's page is the destination.
    From(*const u8),
    /// Lent memory that is read, exactly the bytes to copy: the peer's page is the destination.
    FromLent(LentSlice),
}

/// One copy inside one page of the peer.
#[derive(Clone)]
pub(crate) struct CopyOp {
    pub(crate) gref: Gref,
    pub(crate) offset: u16,
    pub(crate) len: u16,
    pub(crate) local: CopyLocal,
}

/// Storage for batches, kept from one to the next so that none allocates, and the statuses of the
/// last batch.
#[derive(Default)]
pub struct CopyOps {
    ops: Vec<CopyOp>,
    statuses: Vec<GrantStatus>,
}

// SAFETY: the raw pointers in `ops` are only used by an engine while the CopyList that borrowed
// what they point to is alive; between lists they are stale and never used (begin() clears them).
unsafe impl Send for CopyOps {}

impl CopyOps {
    /// Empty storage.
    pub fn new() -> CopyOps {
        CopyOps::default()
    }

    /// Begins a batch.
    pub fn begin<'ops, 'bytes>(&'ops mut self) -> CopyList<'ops, 'bytes> {
        self.ops.clear();
        self.statuses.clear();
        CopyList { storage: self, life: PhantomData }
    }

    /// The status of each copy of the last batch, in the order they were added.
    pub fn statuses(&self) -> &[GrantStatus] {
        &self.statuses
    }
}

/// A batch of copies being put together. It borrows the private memory of its elements.
pub struct CopyList<'ops, 'bytes> {
    storage: &'ops mut CopyOps,
    life: PhantomData<&'bytes mut [u8]>,
}

/// A copy that was not added to a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadRange {
    /// The range does not lie inside the peer's page.
    #[error("{len} bytes at {offset} do not lie inside one page")]
    CrossesPage {
        /// Offset in the page.
        offset: u16,
        /// Bytes.
        len: usize,
    },
    /// The range does not lie inside the lent memory to copy from.
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
    /// [`BadRange::CrossesPage`]; nothing is added.
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
    /// [`BadRange::CrossesPage`]; nothing is added.
    pub fn write(&mut self, gref: Gref, offset: u16, from: &'bytes [u8]) -> Result<(), BadRange> {
        let len = checked_len(offset, from.len())?;
        self.push(gref, offset, len, CopyLocal::From(from.as_ptr()));
        Ok(())
    }

    /// Adds a copy from lent memory (of any peer) into this peer's page.
    ///
    /// # Errors
    ///
    /// [`BadRange`]; nothing is added.
    pub fn write_lent(
        &mut self,
        gref: Gref,
        offset: u16,
        from: &LentSlice,
        from_offset: usize,
        len: usize,
    ) -> Result<(), BadRange> {
        let short = checked_len(offset, len)?;
        // Checked here and not by the engine, where it would spoil the copies joined with it.
        let from = from.slice(from_offset, len)?;
        self.push(gref, offset, short, CopyLocal::FromLent(from));
        Ok(())
    }

    /// Copies in the batch.
    pub fn len(&self) -> usize {
        self.storage.ops.len()
    }

    /// Whether the batch has no copies.
    pub fn is_empty(&self) -> bool {
        self.storage.ops.is_empty()
    }

    fn push(&mut self, gref: Gref, offset: u16, len: u16, local: CopyLocal) {
        self.storage.ops.push(CopyOp { gref, offset, len, local });
    }

    /// For an engine: the copies, and where their statuses go.
    pub(crate) fn parts(&mut self) -> (&[CopyOp], &mut Vec<GrantStatus>) {
        (&self.storage.ops, &mut self.storage.statuses)
    }
}

impl Drop for CopyList<'_, '_> {
    fn drop(&mut self) {
        self.storage.ops.clear();
    }
}
