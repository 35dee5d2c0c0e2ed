//! Pages set aside for I/O, the one used last on top.

use std::collections::VecDeque;

use ringfence_platform::PageId;

/// Pages of one kind. Each is *absent* (its memory is the system's), *free* in the pool, *in use*, or on
/// its way out.
pub struct Pool {
    /// The one used last comes last.
    free: Vec<PageId>,
    /// The one that left last comes last.
    absent: VecDeque<PageId>,
    in_use: u32,
    /// Most pages free and in use together.
    bound: u32,
    all: Vec<PageId>,
}

impl Pool {
    /// `ready` of `pages` are free, the others absent; no bound but their number.
    pub fn new(pages: impl Iterator<Item = PageId>, ready: u32) -> Pool {
        let all: Vec<PageId> = pages.collect();
        let bound = u32::try_from(all.len()).unwrap_or(u32::MAX);
        let (first, rest) = all.split_at(all.len().min(ready as usize));
        // Low numbers are used first.
        let free = first.iter().copied().rev().collect();
        let absent = rest.iter().copied().collect();
        Pool { free, absent, in_use: 0, bound, all }
    }

    /// Pages free and in use.
    pub fn present(&self) -> u32 {
        u32::try_from(self.free.len()).unwrap_or(u32::MAX).saturating_add(self.in_use)
    }

    /// Whether there are more pages than the bound allows.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.present() > self.bound
    }

    /// Pages in use.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Pages that could be taken one after the other.
    pub fn available(&self) -> usize {
        let growth = self.bound.saturating_sub(self.present()) as usize;
        self.free.len() + growth.min(self.absent.len())
    }

    /// Takes the page on top, or one that was absent.
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

    /// Brings in a page that was absent, if the bound allows it.
    pub fn admit_one(&mut self) -> Option<PageId> {
        if self.present() >= self.bound {
            return None;
        }
        // The one that has been away longest: what left a moment ago may be busy elsewhere.
        let page = self.absent.pop_front()?;
        self.free.push(page);
        Some(page)
    }

    /// Changes the bound; pages that are too many and free are added to `leaving`, the coldest first. They
    /// count as in use until they [left](Pool::left).
    pub fn set_bound(&mut self, bound: u32, leaving: &mut Vec<PageId>) {
        self.bound = bound;
        let surplus = self.present().saturating_sub(bound) as usize;
        let going = self.free.drain(..surplus.min(self.free.len()));
        let before = leaving.len();
        leaving.extend(going);
        self.in_use += u32::try_from(leaving.len() - before).unwrap_or(0);
    }

    /// A page that was taken is gone.
    pub fn left(&mut self, page: PageId) {
        self.in_use = self.in_use.saturating_sub(1);
        self.absent.push_back(page);
    }

    /// Every page is absent, or free as far as the bound goes: none is in use.
    pub fn put_all(&mut self) {
        let ready = self.present().min(self.bound);
        *self = Pool { bound: self.bound, ..Pool::new(self.all.iter().copied(), ready) };
    }
}
