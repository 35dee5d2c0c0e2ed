//! Pages that stay mapped from one request to the next (persistent grants).
//!
//! # Theory of operation
//!
//! Unmapping a page costs a flush of the TLB on every processor that may have used it, which is what
//! keeps a backend of many guests from scaling. A frontend that lends the same pages again and again
//! makes it needless: the backend keeps what it mapped, by reference, and in the steady state a request
//! costs a look-up.
//!
//! The table is one ring's, used by the thread that serves it. It is bounded, since the references are
//! the frontend's choice: what does not fit is mapped for its request and unmapped behind it, as if
//! there were no table ([`Found::Over`]). Requests may mix both kinds.
//!
//! A page leaves the table
//!
//! * when there were pages that did not fit: every 100 ms the twentieth part that was used longest ago;
//! * when it was not used for 60 s;
//! * when the owner says so: under pressure ([`PersistentTable::squeeze`]), or at the end.
//!
//! Never while a request uses it: uses are counted, and [`Use`] is what the user gives back. The mapping
//! itself is an owned value besides, so that even a mistake here unmaps nothing under an I/O.
//!
//! Whoever registered a page elsewhere (with an `io_uring`) learns of its going *before* it is unmapped:
//! pages leave as [`Leaving`], which names them and still holds them. A name is never used twice, so
//! that what was registered under a reference is not taken for what is lent under it next.

use core::time::Duration;
use std::sync::Arc;

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Grantee, Gref};
use ringfence_sys::counters::Counter;

use crate::index::GrefIndex;

/// How much is kept, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PersistentLimits {
    /// Most pages of a ring. What Linux' backend keeps: 32 requests of 33 pages.
    pub pages: u16,
    /// Pages not used for so long are let go.
    pub idle: Duration,
    /// How often the table is tidied, when there were pages that did not fit.
    pub purge_every: Duration,
    /// The part of the table that is let go then, in percent.
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
    /// Look-ups that mapped it, to stay.
    pub misses: Counter,
    /// Look-ups of pages that did not fit, or cannot be kept.
    pub over: Counter,
    /// Pages let go to make room for others.
    pub purged: Counter,
    /// Pages let go because nobody used them.
    pub expired: Counter,
    /// Pages let go because the owner said so.
    pub squeezed: Counter,
}

struct Kept {
    gref: Gref,
    page: LentSlice,
    name: u64,
    marked: bool,
    uses: u32,
    last: Duration,
}

/// A use of a page in the table; to be given back to [`PersistentTable::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Use(u16);

/// What a look-up found.
#[derive(Debug)]
pub enum Found {
    /// The page.
    Kept {
        /// The use that was begun.
        hold: Use,
        /// All of the page, readable and writable.
        page: LentSlice,
        /// Its name, which no other page had or will have.
        name: u64,
        /// It was mapped just now.
        fresh: bool,
        /// It was marked.
        marked: bool,
    },
    /// Not kept: to be mapped for this request only.
    Over,
}

/// A page that leaves the table. Dropping it unmaps it, once no request uses it.
#[derive(Debug)]
pub struct Leaving {
    /// Its name.
    pub name: u64,
    /// It was marked.
    pub marked: bool,
    /// The page.
    pub page: LentSlice,
}

/// The pages of one ring that stay mapped.
pub struct PersistentTable {
    limits: PersistentLimits,
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
    /// An empty table.
    pub fn new(limits: PersistentLimits) -> PersistentTable {
        PersistentTable {
            limits,
            index: GrefIndex::new(),
            places: Vec::new(),
            free: Vec::new(),
            next_name: 1,
            overflowed: false,
            tidied: Duration::ZERO,
            looked: Duration::ZERO,
            counters: Arc::default(),
        }
    }

    /// Pages in it.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The totals.
    pub fn counters(&self) -> &Arc<PersistentCounters> {
        &self.counters
    }

    /// The page `gref`, mapped now if it was not and there is room. `now` is any clock that does not
    /// go back.
    ///
    /// Pages are kept writable, as the protocol has it; one that was lent read-only, or cannot be
    /// mapped, is not kept, and whoever maps it for its request learns why.
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

    /// A place that is free, of no more than the limit.
    fn place(&mut self) -> Option<u16> {
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let place = u16::try_from(self.places.len()).ok().filter(|n| *n < self.limits.pages)?;
        self.places.push(None);
        Some(place)
    }

    /// Marks a page that is in use, for the owner's own purpose: that it is registered somewhere.
    pub fn mark(&mut self, hold: &Use) {
        if let Some(kept) = self.places.get_mut(usize::from(hold.0)).and_then(Option::as_mut) {
            kept.marked = true;
        }
    }

    /// Ends a use.
    #[inline]
    pub fn release(&mut self, hold: Use) {
        let kept = self.places.get_mut(usize::from(hold.0)).and_then(Option::as_mut);
        debug_assert!(kept.is_some(), "a page in use does not leave the table");
        if let Some(kept) = kept {
            kept.uses = kept.uses.saturating_sub(1);
        }
    }

    /// Lets go of what is due, into `leaving`. To be called now and then; cheap when nothing is.
    pub fn tidy(&mut self, now: Duration, leaving: &mut Vec<Leaving>) {
        let purge = self.overflowed && now.saturating_sub(self.tidied) >= self.limits.purge_every;
        let look = now.saturating_sub(self.looked) >= self.limits.idle / 8;
        if look {
            self.looked = now;
            let idle = self.limits.idle;
            let before = leaving.len();
            self.let_go(leaving, |kept| now.saturating_sub(kept.last) >= idle);
            self.counters.expired.add((leaving.len() - before) as u64);
        }
        if purge {
            self.tidied = now;
            self.overflowed = false;
            let share = usize::from(self.limits.pages) * usize::from(self.limits.purge_percent);
            let room = share.div_ceil(100);
            self.purge(room.saturating_sub(self.room()), leaving);
        }
    }

    fn room(&self) -> usize {
        usize::from(self.limits.pages).saturating_sub(self.len())
    }

    /// Lets go of the `count` pages that were used longest ago, as far as they are not in use now.
    fn purge(&mut self, count: usize, leaving: &mut Vec<Leaving>) {
        let unused = self.places.iter().flatten().filter(|kept| kept.uses == 0);
        let mut ages: Vec<Duration> = unused.map(|kept| kept.last).collect();
        let Some(last) = count.min(ages.len()).checked_sub(1) else { return };
        let (_, limit, _) = ages.select_nth_unstable(last);
        let (limit, before) = (*limit, leaving.len());
        let mut left = last + 1;
        self.let_go(leaving, |kept| {
            let goes = left > 0 && kept.last <= limit;
            left -= usize::from(goes);
            goes
        });
        self.counters.purged.add((leaving.len() - before) as u64);
    }

    /// Lets go of everything that is not in use: memory is short, or the frontend goes.
    pub fn squeeze(&mut self, leaving: &mut Vec<Leaving>) {
        let before = leaving.len();
        self.let_go(leaving, |_| true);
        self.counters.squeezed.add((leaving.len() - before) as u64);
    }

    fn let_go(&mut self, leaving: &mut Vec<Leaving>, mut goes: impl FnMut(&Kept) -> bool) {
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
