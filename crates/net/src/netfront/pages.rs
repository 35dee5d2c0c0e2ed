//! TX pages: the pages for sending, granted permanently or in a grant window.

use ringfence_memory::LentSlice;
use ringfence_platform::Gref;

use super::pool::Pool;
use super::windows::WindowPages;

/// Pages by number, which is also their id on the ring.
pub(super) enum TxPages {
    /// Pages granted as long as the connection lasts.
    Lent(Pool),
    /// Pages of a grant window, issued for their first I/O, and again after a revocation.
    Window(WindowPages),
}

impl TxPages {
    #[inline]
    pub(super) fn free(&self) -> usize {
        match self {
            TxPages::Lent(pool) => pool.free(),
            TxPages::Window(pages) => pages.free(),
        }
    }

    /// Returns the number of pages, free or not.
    pub(super) fn len(&self) -> usize {
        match self {
            TxPages::Lent(pool) => pool.len(),
            TxPages::Window(pages) => pages.len(),
        }
    }

    /// Takes `count` pages, or fewer if there are no more; calls `put` with each.
    pub(super) fn take(&mut self, count: usize, mut put: impl FnMut(u16)) {
        match self {
            TxPages::Lent(pool) => pool.take(count, put),
            TxPages::Window(pages) => (0..count).map_while(|_| pages.take()).for_each(&mut put),
        }
    }

    /// Takes one page, if there is one.
    #[inline]
    pub(super) fn take_one(&mut self) -> Option<u16> {
        match self {
            TxPages::Lent(pool) => pool.take_one(),
            TxPages::Window(pages) => pages.take(),
        }
    }

    #[inline]
    pub(super) fn give_back(&mut self, page: u16) {
        match self {
            TxPages::Lent(pool) => pool.give_back(page),
            TxPages::Window(pages) => pages.give_back(page),
        }
    }

    #[inline]
    pub(super) fn gref(&self, page: u16) -> Gref {
        match self {
            TxPages::Lent(pool) => pool.gref(page),
            TxPages::Window(pages) => pages.gref(page),
        }
    }

    #[inline]
    pub(super) fn memory(&self, page: u16) -> Option<&LentSlice> {
        match self {
            TxPages::Lent(pool) => Some(pool.memory(page)),
            TxPages::Window(pages) => pages.memory(page),
        }
    }
}
