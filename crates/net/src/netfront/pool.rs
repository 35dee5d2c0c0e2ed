//! Page pool: permanently granted pages by number, and a bitmap of the free ones.

use ringfence_memory::LentSlice;
use ringfence_platform::{Gref, Lease};
use ringfence_wire::numbers::bounded;

/// Pages of one kind. A page's number is also its id on the ring.
///
/// The first free page is taken, so that few pages are hot. For several pages, the pool prefers adjacent
/// ones: the backend accesses adjacent pages with one system call.
pub(super) struct Pool {
    pages: Vec<(Gref, LentSlice)>,
    /// Bitmap of the free pages.
    free: Vec<u64>,
    count: usize,
    /// Lower bound of the free pages.
    first: usize,
}

impl Pool {
    pub(super) fn new(leases: &[Lease]) -> Pool {
        let pages: Vec<_> = leases.iter().map(|l| (l.gref(), l.memory().clone())).collect();
        // Page numbers have 16 bits.
        let count = pages.len().min(usize::from(u16::MAX));
        let mut pool = Pool { pages, free: vec![0; count.div_ceil(64)], count: 0, first: 0 };
        (0..count).for_each(|page| pool.give_back(bounded(page, u16::MAX)));
        pool
    }

    pub(super) fn free(&self) -> usize {
        self.count
    }

    /// Returns the number of pages, free or not.
    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Takes `count` pages, or fewer if there are no more; calls `put` with each.
    pub(super) fn take(&mut self, count: usize, mut put: impl FnMut(u16)) {
        let mut left = count.min(self.count);
        let mut from = self.find_adjacent(left).unwrap_or(self.first);
        while left > 0 {
            let Some(page) = self.next_free(from) else { return };
            self.free[page / 64] &= !(1 << (page % 64));
            self.count -= 1;
            left -= 1;
            if page == self.first {
                self.first += 1;
            }
            from = page + 1;
            put(bounded(page, u16::MAX));
        }
    }

    /// Takes the first free page.
    #[inline]
    pub(super) fn take_one(&mut self) -> Option<u16> {
        let page = self.next_free(self.first)?;
        self.free[page / 64] &= !(1 << (page % 64));
        self.count -= 1;
        self.first = page + 1;
        u16::try_from(page).ok()
    }

    /// Returns the first free page from `from` on.
    #[inline]
    fn next_free(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.free.get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.free.get(word)?;
        }
        // Below 64.
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Returns the first page from which on `count` pages are free.
    fn find_adjacent(&self, count: usize) -> Option<usize> {
        let mut start = self.next_free(self.first)?;
        loop {
            match self.next_taken(start + 1) {
                end if end - start >= count => return Some(start),
                end => start = self.next_free(end)?,
            }
        }
    }

    /// Returns the first page from `from` on that is in use, or the number of pages.
    fn next_taken(&self, from: usize) -> usize {
        let all = self.free.len() * 64;
        let mut word = from / 64;
        let mut mask = u64::MAX << (from % 64);
        while let Some(free) = self.free.get(word) {
            let taken = !free & mask;
            if taken != 0 {
                return word * 64 + taken.trailing_zeros() as usize;
            }
            (word, mask) = (word + 1, u64::MAX);
        }
        all
    }

    #[inline]
    pub(super) fn give_back(&mut self, page: u16) {
        let place = usize::from(page);
        let Some(word) = self.free.get_mut(place / 64) else { return };
        debug_assert_eq!(*word >> (place % 64) & 1, 0, "page {page} is free already");
        *word |= 1 << (place % 64);
        self.count += 1;
        self.first = self.first.min(place);
    }

    #[inline]
    pub(super) fn gref(&self, page: u16) -> Gref {
        self.pages[usize::from(page)].0
    }

    #[inline]
    pub(super) fn memory(&self, page: u16) -> &LentSlice {
        &self.pages[usize::from(page)].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool(count: u16) -> Pool {
        let free = vec![0; usize::from(count).div_ceil(64)];
        let mut pool = Pool { pages: Vec::new(), free, count: 0, first: 0 };
        (0..count).for_each(|page| pool.give_back(page));
        pool
    }

    fn take(pool: &mut Pool, count: usize) -> Vec<u16> {
        let mut taken = Vec::new();
        pool.take(count, |page| taken.push(page));
        taken
    }

    #[test]
    fn take_prefers_adjacent_pages() {
        let mut pool = pool(256);
        assert_eq!(take(&mut pool, 16), (0..16).collect::<Vec<_>>());
        assert_eq!(take(&mut pool, 1), [16]);
        (0..16).for_each(|page| pool.give_back(page));
        assert_eq!(take(&mut pool, 1), [0], "the first");
        assert_eq!(take(&mut pool, 16), (17..33).collect::<Vec<_>>(), "none of 15 in a row");
        assert_eq!(take(&mut pool, 15), (1..16).collect::<Vec<_>>());
        assert_eq!(pool.free(), 256 - 33);
    }

    #[test]
    fn take_returns_scattered_pages_without_adjacent_ones() {
        let mut pool = pool(100);
        assert_eq!(take(&mut pool, 200).len(), 100);
        assert_eq!(take(&mut pool, 1), []);
        for page in [7, 63, 64, 99] {
            pool.give_back(page);
        }
        assert_eq!(take(&mut pool, 3), [7, 63, 64]);
        assert_eq!(take(&mut pool, 3), [99]);
    }

    proptest! {
        #[test]
        fn page_is_never_taken_twice_or_lost(
            count in 1u16..300, steps in prop::collection::vec((0usize..20, any::<bool>()), 0..200),
        ) {
            let mut pool = pool(count);
            let mut out = Vec::new();
            for (n, give) in steps {
                if give {
                    let some = out.len().min(n);
                    out.drain(..some).for_each(|page| pool.give_back(page));
                } else {
                    let expected = n.min(pool.free());
                    let taken = take(&mut pool, n);
                    prop_assert_eq!(taken.len(), expected);
                    out.extend(taken);
                }
                prop_assert_eq!(out.len() + pool.free(), usize::from(count));
                let mut all = out.clone();
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), out.len());
                prop_assert!(all.iter().all(|&page| page < count));
            }
        }
    }
}
