//! Page pool: the pages for I/O of one kind, most recently used first.

use std::collections::VecDeque;

use ringfence_platform::PageId;
use ringfence_sys::numbers::bounded;

/// Pages of one kind. Each is *absent* (its memory belongs to the system), *free* in the pool, *in use*, or
/// leaving.
pub struct WindowPool {
    /// Stack of free pages; the most recently used is last.
    free: Vec<PageId>,
    /// Queue of absent pages, in the order in which they left.
    absent: VecDeque<PageId>,
    in_use: u32,
    /// Maximum number of free and used pages together.
    bound: u32,
    all: Vec<PageId>,
}

impl WindowPool {
    /// Makes a pool in which the first `ready` of `pages` are free and the others absent. The bound is their
    /// number.
    pub fn new(pages: impl Iterator<Item = PageId>, ready: u32) -> WindowPool {
        let all: Vec<PageId> = pages.collect();
        let bound = bounded(all.len(), u32::MAX);
        let (first, rest) = all.split_at(all.len().min(ready as usize));
        // Pages with low numbers are used first.
        let free = first.iter().copied().rev().collect();
        let absent = rest.iter().copied().collect();
        WindowPool { free, absent, in_use: 0, bound, all }
    }

    /// Returns the number of free and used pages.
    #[inline]
    pub fn present(&self) -> u32 {
        bounded(self.free.len(), u32::MAX).saturating_add(self.in_use)
    }

    /// Returns true if there are more pages than the bound allows.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.present() > self.bound
    }

    /// Returns the number of pages in use.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Returns the number of pages that can be taken.
    pub fn available(&self) -> usize {
        let growth = self.bound.saturating_sub(self.present()) as usize;
        self.free.len() + growth.min(self.absent.len())
    }

    /// Takes the page on top, or an absent one.
    #[inline]
    pub fn take(&mut self) -> Option<PageId> {
        if self.free.is_empty() {
            self.admit_one();
        }
        let page = self.free.pop()?;
        self.in_use += 1;
        Some(page)
    }

    /// Puts a page that was taken on top.
    #[inline]
    pub fn put(&mut self, page: PageId) {
        debug_assert!(self.in_use > 0, "a page that was not taken");
        self.in_use = self.in_use.saturating_sub(1);
        self.free.push(page);
    }

    /// Makes an absent page free, within the bound.
    pub fn admit_one(&mut self) -> Option<PageId> {
        if self.present() >= self.bound {
            return None;
        }
        // The page that left first: a page that left recently may be busy elsewhere.
        let page = self.absent.pop_front()?;
        self.free.push(page);
        Some(page)
    }

    /// Changes the bound, and appends the free pages above it to `leaving`, the least recently used first. They
    /// count as in use until [`WindowPool::left`].
    pub fn set_bound(&mut self, bound: u32, leaving: &mut Vec<PageId>) {
        self.bound = bound;
        let surplus = self.present().saturating_sub(bound) as usize;
        let going = self.free.drain(..surplus.min(self.free.len()));
        let before = leaving.len();
        leaving.extend(going);
        self.in_use += bounded(leaving.len() - before, u32::MAX);
    }

    /// Makes a page that was taken absent.
    pub fn left(&mut self, page: PageId) {
        self.in_use = self.in_use.saturating_sub(1);
        self.absent.push_back(page);
    }

    /// Resets the pool: no page is in use, and as many are free as the bound allows.
    pub fn put_all(&mut self) {
        let ready = self.present().min(self.bound);
        *self =
            WindowPool { bound: self.bound, ..WindowPool::new(self.all.iter().copied(), ready) };
    }
}
