//! Lent pages by number, and which of them are free.

use ringfence_memory::LentSlice;
use ringfence_platform::{Gref, Lease};

/// Pages of one kind. A page is named by its place, which is also its id on the ring.
pub(super) struct Pool {
    pages: Vec<(Gref, LentSlice)>,
    free: Vec<u16>,
}

impl Pool {
    pub(super) fn new(leases: &[Lease]) -> Pool {
        let pages: Vec<_> = leases.iter().map(|l| (l.gref(), l.memory().clone())).collect();
        // Last in, first out, from the first page on.
        let free = (0..u16::try_from(pages.len()).unwrap_or(u16::MAX)).rev().collect();
        Pool { pages, free }
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    pub(super) fn give_back(&mut self, page: u16) {
        self.free.push(page);
    }

    pub(super) fn gref(&self, page: u16) -> Gref {
        self.pages[usize::from(page)].0
    }

    pub(super) fn memory(&self, page: u16) -> &LentSlice {
        &self.pages[usize::from(page)].1
    }
}
