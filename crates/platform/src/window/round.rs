//! Rounds of uses of a window's pages: begun one by one, settled together, ended together.
//!
//! A single-threaded grantee with many short uses saves fences this way: one fence settles all uses of a
//! round. A status word is 1 during a use and 0 otherwise; words are not counted.

use std::cell::{Cell, RefCell};

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_ring::sync::{Ordering, fence};
use ringfence_wire::grant::{Access, GrantStatus, Gref};

use super::view::WindowView;
use crate::table::{TableWords, look};

/// Index of a page among those of a [`WindowRound`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundPlace(u32);

/// Grantee's end of a window for uses in rounds: begun one by one, settled together, ended together.
///
/// Between [`WindowRound::page`] and [`WindowRound::settle`] the caller may read a page but must not
/// write it, and must not act on what it read. `settle` confirms that all pages are still granted.
pub struct WindowRound {
    view: WindowView,
    /// Every page of the window, writable ones first.
    pages: Vec<LentSlice>,
    /// Uses of this round, with the entries that they began with.
    begun: RefCell<Vec<(Gref, u64)>>,
    /// Number of settled uses.
    settled: Cell<usize>,
}

impl WindowRound {
    /// Creates rounds over `view`.
    ///
    /// # Errors
    ///
    /// Fails if the window's memory is smaller than its shape, which opening it has excluded.
    pub fn new(view: WindowView) -> Result<WindowRound, ringfence_memory::OutOfRange> {
        let WindowView { shape, memory: [writable, read_only], .. } = &view;
        let part =
            |memory: &LentSlice, page: u32| memory.slice(page as usize * PAGE_SIZE, PAGE_SIZE);
        let all = (0..shape.writable)
            .map(|page| part(writable, page))
            .chain((0..shape.read_only).map(|page| part(read_only, page)));
        let pages = all.collect::<Result<Vec<_>, _>>()?;
        Ok(WindowRound { view, pages, begun: RefCell::default(), settled: Cell::new(0) })
    }

    /// Lowers every status word that a previous grantee, which has ended, left raised.
    #[must_use]
    pub fn taking_over(self) -> WindowRound {
        self.view.lower_all();
        self
    }

    /// Begins a use of the page of `gref`, until the end of the round.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`WindowView::begin`], except those that only [`WindowRound::settle`] finds.
    #[inline]
    pub fn page(&self, gref: Gref, access: Access) -> Result<&LentSlice, GrantStatus> {
        self.begin(gref, access).map(|place| &self.pages[place.0 as usize])
    }

    /// Returns the page at that index.
    #[inline]
    pub fn at(&self, place: RoundPlace) -> Option<&LentSlice> {
        self.pages.get(place.0 as usize)
    }

    #[inline]
    fn begin(&self, gref: Gref, access: Access) -> Result<RoundPlace, GrantStatus> {
        let WindowView { table, shape, me, .. } = &self.view;
        let (word, found) = look(table, gref, *me, access)?;
        let (first, count) =
            if found.read_only { (shape.writable, shape.read_only) } else { (0, shape.writable) };
        // The window has a page for each number below this count.
        if found.frame >= count {
            return Err(GrantStatus::BadPage);
        }
        table.set_status(gref, 1);
        self.begun.borrow_mut().push((gref, word));
        Ok(RoundPlace(first + found.frame))
    }

    /// Begins a use of each of `pages` until the end of the round, and settles them together. Appends the
    /// index of each page, or the error, to `out`.
    pub fn begin_settled(
        &self,
        pages: impl Iterator<Item = (Gref, Access)>,
        out: &mut Vec<Result<RoundPlace, GrantStatus>>,
    ) {
        let (base, earlier) = (out.len(), self.begun.borrow().len());
        out.extend(pages.map(|(gref, access)| self.begin(gref, access)));
        fence(Ordering::SeqCst);
        let begun = self.begun.borrow();
        let mut new = begun.iter().skip(earlier);
        let mut all = true;
        for found in out.iter_mut().skip(base).filter(|found| found.is_ok()) {
            let Some((gref, word)) = new.next() else { break };
            if self.view.table.entry(*gref) != *word {
                *found = Err(GrantStatus::Again);
                all = false;
            }
        }
        if all && self.settled.get() == earlier {
            self.settled.set(begun.len());
        }
    }

    /// Returns `true` if every page of the round is still granted as it was found. If not, the round is
    /// invalid; [`WindowRound::begin_settled`] finds the pages that were revoked.
    #[inline]
    pub fn settle(&self) -> bool {
        let begun = self.begun.borrow();
        let new = begun.get(self.settled.get()..).unwrap_or_default();
        if new.is_empty() {
            return true;
        }
        fence(Ordering::SeqCst);
        let table = &self.view.table;
        let all = new.iter().all(|(gref, word)| table.entry(*gref) == *word);
        if all {
            self.settled.set(begun.len());
        }
        all
    }

    /// Ends every use of the round. The caller reports the end of its I/O to the granter only after this.
    #[inline]
    pub fn end(&mut self) {
        for (gref, _) in self.begun.get_mut().drain(..) {
            self.view.table.set_status(gref, 0);
        }
        self.settled.set(0);
    }
}

impl Drop for WindowRound {
    fn drop(&mut self) {
        self.end();
    }
}
