//! The pages that packets are sent from, however they are lent.

use ringfence_memory::LentSlice;
use ringfence_platform::Gref;

use super::pool::Pool;
use super::windows::WindowPages;

/// Pages by number, which is also their id on the ring.
pub(super) enum TxPages {
    /// Lent as long as the connection lasts.
    Lent(Pool),
    /// Of a window: issued for the first I/O, and again after they were taken back.
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

    /// Pages there are, free or not.
    pub(super) fn len(&self) -> usize {
        match self {
            TxPages::Lent(pool) => pool.len(),
            TxPages::Window(pages) => pages.len(),
        }
    }

    /// Takes `count` pages; `put` is called with each. Fewer if there are no more.
    pub(super) fn take(&mut self, count: usize, mut put: impl FnMut(u16)) {
        match self {
            TxPages::Lent(pool) => pool.take(count, put),
            TxPages::Window(pages) => (0..count).map_while(|_| pages.take()).for_each(&mut put),
        }
    }

    /// Takes a page.
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
