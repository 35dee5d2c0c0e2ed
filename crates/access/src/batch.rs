//! Batches of maps and copies at one grantee, with reusable storage and a status for each element.

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, CopyOps, GrantStatus, Grantee, Gref};

/// Grantee of one peer and the storage of its batches.
pub(crate) struct GrantBatches<G> {
    pub(crate) grantee: G,
    pub(crate) ops: CopyOps,
    /// Pages of the last batch.
    pub(crate) pages: Vec<(Gref, Access)>,
    /// Mapping or status of each page of the last batch of maps. A mapping ends when its last handle is dropped.
    pub(crate) mapped: Vec<Result<LentSlice, GrantStatus>>,
}

impl<G: Grantee> GrantBatches<G> {
    pub(crate) fn new(grantee: G) -> GrantBatches<G> {
        GrantBatches { grantee, ops: CopyOps::new(), pages: Vec::new(), mapped: Vec::new() }
    }

    /// Replaces the pages of the last batch by `pages` and maps nothing.
    pub(crate) fn list(&mut self, pages: impl Iterator<Item = (Gref, Access)>) {
        self.pages.clear();
        self.pages.extend(pages);
        self.mapped.clear();
    }

    /// Maps `pages` in one operation of the platform. `mapped` has one result for each afterwards.
    pub(crate) fn map(&mut self, pages: impl Iterator<Item = (Gref, Access)>) {
        self.list(pages);
        self.grantee.map(&self.pages, &mut self.mapped);
    }

    /// Returns the first error of the last batch of copies.
    pub(crate) fn copied(&self) -> Result<(), GrantStatus> {
        let failed = self.ops.statuses().iter().find(|status| **status != GrantStatus::Okay);
        failed.map_or(Ok(()), |status| Err(*status))
    }
}

/// Returns `len` bytes at `offset` of a page. The handle keeps the page mapped.
#[inline]
pub(crate) fn part_of(page: LentSlice, offset: u16, len: u16) -> Result<LentSlice, GrantStatus> {
    page.into_slice(offset.into(), len.into()).map_err(|_| GrantStatus::BadCopyArg)
}
