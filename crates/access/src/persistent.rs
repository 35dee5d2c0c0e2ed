//! Persistent grants: a table of pages that stay mapped between requests.
//!
//! # Theory of operation
//!
//! Unmapping a page flushes the TLBs of every processor that may have used it. That limits a backend with
//! many guests. If a frontend grants the same pages again and again, the backend keeps them mapped, by
//! reference. In the steady state a request costs a look-up.
//!
//! A table belongs to one ring and to the thread that serves it. Its size is limited, since the frontend
//! selects the references. A page that does not fit is mapped for its request only ([`Found::Over`]).
//! A request can mix both kinds.
//!
//! The table evicts a page
//!
//! * when other pages did not fit: every 100 ms, the least recently used 5 % of the limit;
//! * when no request used it for 60 s;
//! * when the owner lowers the limit under memory pressure ([`PersistentTable::limit`]): the least recently used ones, and those
//!   in use later;
//! * on request of the owner ([`PersistentTable::shrink`]), at the end.
//!
//! It never evicts a page in use: [`Use`] counts the uses. Each request also holds the mapping as an owned
//! value, so even an error here cannot unmap memory under an I/O.
//!
//! An owner that registered pages elsewhere (with an `io_uring`) must deregister them *before* they are
//! unmapped. So evicted pages are returned as [`Leaving`], which has the page's name and still holds it. A
//! name is never reused: a stale registration cannot match a later page with the same reference.

use core::time::Duration;
use std::sync::Arc;

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Grantee, Gref};
use ringfence_sys::counters::{Counter, Level};
use ringfence_sys::numbers::u64_from;

use crate::index::GrefIndex;

/// Bounds of the pages that one ring keeps mapped, and the pace of their eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PersistentLimits {
    /// Maximum number of pages of a ring. The default is that of Linux: 32 requests of 33 pages.
    pub pages: u16,
    /// Idle time after which a page is evicted.
    pub idle: Duration,
    /// Interval of evictions while pages do not fit.
    pub purge_every: Duration,
    /// Share of the present limit that is freed in one eviction, in percent.
    pub purge_percent: u8,
}

impl Default for PersistentLimits {
    fn default() -> PersistentLimits {
        PersistentLimits {
            pages: 1056,
            idle: Duration::from_secs(60),
            purge_every: Duration::from_millis(100),
            purge_percent: 5,
        }
    }
}

/// Running totals of one table.
#[derive(Default, Debug)]
pub struct PersistentCounters {
    /// Look-ups that found the page mapped.
    pub hits: Counter,
    /// Look-ups that mapped the page and kept it.
    pub misses: Counter,
    /// Look-ups of pages that did not fit, or could not be kept.
    pub over: Counter,
    /// Pages evicted to make room.
    pub purged: Counter,
    /// Pages evicted because they were idle.
    pub expired: Counter,
    /// Pages evicted by [`PersistentTable::shrink`], and for want of memory.
    pub shrunk: Counter,
    /// Maximum number of pages at present.
    pub limit: Level,
}

struct Kept {
    gref: Gref,
    page: LentSlice,
    name: u64,
    marked: bool,
    uses: u32,
    last: Duration,
}

/// Use of a page in the table. The user returns it to [`PersistentTable::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Use(u16);

/// Result of a look-up.
#[derive(Debug)]
pub enum Found {
    /// Page that the table keeps mapped.
    Kept {
        /// Use that the look-up began.
        hold: Use,
        /// Whole page, readable and writable.
        page: LentSlice,
        /// Unique name of the page.
        name: u64,
        /// Set if this look-up mapped the page.
        fresh: bool,
        /// Set if the page was marked.
        marked: bool,
    },
    /// Page that the caller must map for this request only.
    Over,
}

/// Page that was evicted. Dropping it unmaps the page, once no request uses it.
#[derive(Debug)]
pub struct Leaving {
    /// Unique name of the page.
    pub name: u64,
    /// Set if the page was marked.
    pub marked: bool,
    pub page: LentSlice,
}

/// Table of the pages of one ring that stay mapped.
pub struct PersistentTable {
    limits: PersistentLimits,
    /// Maximum number of pages at present: at most that of `limits`.
    most: u16,
    index: GrefIndex,
    places: Vec<Option<Kept>>,
    free: Vec<u16>,
    next_name: u64,
    overflowed: bool,
    tidied: Duration,
    looked: Duration,
    counters: Arc<PersistentCounters>,
}

impl PersistentTable {
    /// Makes an empty table.
    pub fn new(limits: PersistentLimits) -> PersistentTable {
        let counters = Arc::<PersistentCounters>::default();
        counters.limit.set(limits.pages.into());
        PersistentTable {
            limits,
            most: limits.pages,
            index: GrefIndex::new(),
            places: Vec::new(),
            free: Vec::new(),
            next_name: 1,
            overflowed: false,
            tidied: Duration::ZERO,
            looked: Duration::ZERO,
            counters,
        }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns true if there are no pages.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns the totals of the table.
    pub fn counters(&self) -> &Arc<PersistentCounters> {
        &self.counters
    }

    /// Looks up the page `gref`, and maps it if it is absent and there is room. `now` is the time of any
    /// monotonic clock.
    ///
    /// The table keeps writable pages only, as the protocol requires. A page that is granted read-only, or
    /// cannot be mapped, is not kept. The caller maps it for its request and receives the error.
    #[inline]
    pub fn look_up(&mut self, grantee: &mut impl Grantee, gref: Gref, now: Duration) -> Found {
        let kept = self.index.get(gref).and_then(|place| {
            let kept = self.places.get_mut(usize::from(place))?.as_mut()?;
            Some((place, kept))
        });
        let Some((place, kept)) = kept else { return self.enter(grantee, gref, now) };
        kept.uses += 1;
        kept.last = now;
        self.counters.hits.add(1);
        let Kept { name, marked, .. } = *kept;
        Found::Kept { hold: Use(place), page: kept.page.clone(), name, fresh: false, marked }
    }

    fn enter(&mut self, grantee: &mut impl Grantee, gref: Gref, now: Duration) -> Found {
        let Some(place) = self.place() else {
            self.overflowed = true;
            self.counters.over.add(1);
            return Found::Over;
        };
        let page = grantee.keep(gref, Access::ReadWrite);
        let entered = page.ok().filter(|_| self.index.enter(gref, place).is_ok());
        let (Some(page), Some(slot)) = (entered, self.places.get_mut(usize::from(place))) else {
            self.free.push(place);
            self.counters.over.add(1);
            return Found::Over;
        };
        let name = self.next_name;
        self.next_name += 1;
        let marked = false;
        *slot = Some(Kept { gref, page: page.clone(), name, marked, uses: 1, last: now });
        self.counters.misses.add(1);
        Found::Kept { hold: Use(place), page, name, fresh: true, marked }
    }

    /// Returns a free position below the limit.
    fn place(&mut self) -> Option<u16> {
        if self.room() == 0 {
            return None;
        }
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let place = u16::try_from(self.places.len()).ok().filter(|n| *n < self.limits.pages)?;
        self.places.push(None);
        Some(place)
    }

    /// Marks a page in use as registered elsewhere by the owner.
    pub fn mark(&mut self, hold: &Use) {
        if let Some(kept) = self.places.get_mut(usize::from(hold.0)).and_then(Option::as_mut) {
            kept.marked = true;
        }
    }

    /// Ends a use of a page.
    #[inline]
    pub fn release(&mut self, hold: Use) {
        let kept = self.places.get_mut(usize::from(hold.0)).and_then(Option::as_mut);
        debug_assert!(kept.is_some(), "a page in use does not leave the table");
        if let Some(kept) = kept {
            kept.uses = kept.uses.saturating_sub(1);
        }
    }

    /// Evicts the pages that are due, into `leaving`. The owner calls it regularly; it is cheap without work.
    pub fn tidy(&mut self, now: Duration, leaving: &mut Vec<Leaving>) {
        let purge = self.overflowed && now.saturating_sub(self.tidied) >= self.limits.purge_every;
        let look = now.saturating_sub(self.looked) >= self.limits.idle / 8;
        if look {
            self.looked = now;
            let idle = self.limits.idle;
            let before = leaving.len();
            self.evict(leaving, |kept| now.saturating_sub(kept.last) >= idle);
            self.counters.expired.add((leaving.len() - before) as u64);
        }
        if purge {
            self.tidied = now;
            self.overflowed = false;
            let share = usize::from(self.most) * usize::from(self.limits.purge_percent);
            let room = share.div_ceil(100);
            let purged = self.purge(room.saturating_sub(self.room()), leaving);
            self.counters.purged.add(purged);
        }
        self.evict_surplus(leaving);
    }

    /// Sets the maximum number of pages, up to that of the table's limits. Surplus pages are evicted: idle ones now, the
    /// least recently used first, and those in use by a later [`PersistentTable::tidy`].
    pub fn limit(&mut self, pages: u16, leaving: &mut Vec<Leaving>) {
        self.most = pages.min(self.limits.pages);
        self.counters.limit.set(self.most.into());
        self.evict_surplus(leaving);
    }

    fn evict_surplus(&mut self, leaving: &mut Vec<Leaving>) {
        let surplus = self.len().saturating_sub(self.most.into());
        let evicted = self.purge(surplus, leaving);
        self.counters.shrunk.add(evicted);
    }

    fn room(&self) -> usize {
        usize::from(self.most).saturating_sub(self.len())
    }

    /// Evicts the `count` least recently used pages, except pages in use. Returns the number of evicted pages.
    fn purge(&mut self, count: usize, leaving: &mut Vec<Leaving>) -> u64 {
        if count == 0 {
            return 0;
        }
        let unused = self.places.iter().flatten().filter(|kept| kept.uses == 0);
        let mut ages: Vec<Duration> = unused.map(|kept| kept.last).collect();
        let Some(last) = count.min(ages.len()).checked_sub(1) else { return 0 };
        let (_, limit, _) = ages.select_nth_unstable(last);
        let (limit, before) = (*limit, leaving.len());
        let mut left = last + 1;
        self.evict(leaving, |kept| {
            let goes = left > 0 && kept.last <= limit;
            left -= usize::from(goes);
            goes
        });
        u64_from(leaving.len() - before)
    }

    /// Evicts every page that is not in use: when the frontend disconnects.
    pub fn shrink(&mut self, leaving: &mut Vec<Leaving>) {
        let before = leaving.len();
        self.evict(leaving, |_| true);
        self.counters.shrunk.add((leaving.len() - before) as u64);
    }

    fn evict(&mut self, leaving: &mut Vec<Leaving>, mut goes: impl FnMut(&Kept) -> bool) {
        for (place, slot) in (0..).zip(&mut self.places) {
            let Some(kept) = slot.take_if(|kept| kept.uses == 0 && goes(kept)) else { continue };
            self.index.remove(kept.gref);
            self.free.push(place);
            leaving.push(Leaving { name: kept.name, marked: kept.marked, page: kept.page });
        }
    }
}

#[cfg(test)]
mod tests;
