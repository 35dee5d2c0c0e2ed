//! Grantee's end of a window whose table and memory are mapped whole.
//!
//! The platform opens the window, verifies its files and maps them. A view then resolves references in
//! the table, raises the status word of each entry that it uses, and finds the page's place in the memory.

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};

use super::translation::WindowShape;
use crate::table::{LentTable, TableWords, Use, UseCounts};

/// Location of a page in a mapped window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowPlace {
    read_only: bool,
    offset: usize,
}

/// Grantee's end of a window, mapped whole, for one thread. Views of the same window count their uses
/// separately: a page with overlapping uses in two views can be taken back when either use ends.
pub struct WindowView {
    pub(super) me: DomId,
    pub(super) shape: WindowShape,
    pub(super) table: LentTable,
    /// Writable pages, and pages that can only be read.
    pub(super) memory: [LentSlice; 2],
    uses: UseCounts,
    found: Vec<Result<Use, GrantStatus>>,
}

impl WindowView {
    /// Creates the view of a table and of the window's memory, writable pages first.
    pub(crate) fn new(
        me: DomId,
        shape: WindowShape,
        table: LentTable,
        memory: [LentSlice; 2],
    ) -> WindowView {
        let uses = UseCounts::new(table.references());
        WindowView { me, shape, table, memory, uses, found: Vec::new() }
    }

    /// Returns the number of entries of the table.
    pub fn entries(&self) -> u32 {
        self.shape.entries
    }

    /// Creates another view of the same window, for another thread.
    #[must_use]
    pub fn another(&self) -> WindowView {
        WindowView {
            me: self.me,
            shape: self.shape,
            table: self.table.clone(),
            memory: self.memory.clone(),
            uses: UseCounts::new(self.table.references()),
            found: Vec::new(),
        }
    }

    /// Lowers every status word that a previous grantee, which has ended, left raised. Only for the only
    /// view of a window.
    #[must_use]
    pub fn taking_over(self) -> WindowView {
        self.lower_all();
        self
    }

    pub(super) fn lower_all(&self) {
        let references = self.table.references();
        (Gref::FIRST_FREE.0..references).for_each(|number| self.table.set_status(Gref(number), 0));
    }

    /// Begins a use of each of `pages` and appends its location or an error to `out`. The errors are
    /// [`GrantStatus::BadGref`] (no such entry, or nothing issued there),
    /// [`GrantStatus::PermissionDenied`] (issued for less), [`GrantStatus::Again`] (revoked meanwhile) and
    /// [`GrantStatus::BadPage`] (the granter's frame number is beyond the window). The caller must call
    /// [`WindowView::end`] for each success.
    #[inline]
    pub fn begin(
        &mut self,
        pages: impl Iterator<Item = (Gref, Access)> + Clone,
        out: &mut Vec<Result<WindowPlace, GrantStatus>>,
    ) {
        self.found.clear();
        self.uses.begin(&self.table, self.me, pages.clone(), &mut self.found);
        for ((gref, _), found) in pages.zip(&self.found) {
            let place = found.and_then(|Use { frame, read_only }| {
                let pages = if read_only { self.shape.read_only } else { self.shape.writable };
                if frame < pages {
                    return Ok(WindowPlace { read_only, offset: frame as usize * PAGE_SIZE });
                }
                self.uses.end(&self.table, gref);
                Err(GrantStatus::BadPage)
            });
            out.push(place);
        }
    }

    /// Ends a use of `gref`.
    #[inline]
    pub fn end(&mut self, gref: Gref) {
        self.uses.end(&self.table, gref);
    }

    /// Returns the memory that a place is in, and its offset there.
    #[inline]
    pub fn memory(&self, place: WindowPlace) -> (&LentSlice, usize) {
        (&self.memory[usize::from(place.read_only)], place.offset)
    }
}

impl Drop for WindowView {
    fn drop(&mut self) {
        self.uses.end_all(&self.table);
    }
}
