//! Which page is granted under which reference, and how often it is in use: the hash table of the
//! redesigned grant mechanism, with the pages as its keys. Pages of a window are numbered, so it is two
//! arrays.

use ringfence_platform::{Gref, PageId, RevokeError, TranslationTable, WindowShape};

use super::GrantError;

/// How often pages were granted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReuseStats {
    /// The page was granted already.
    pub hits: u64,
    /// The page had to be issued.
    pub misses: u64,
    /// Grants revoked because their entry was wanted for another page.
    pub evictions: u64,
    /// Times that an entry could not be had because the grantee says it uses the page.
    pub busy: u64,
}

impl ReuseStats {
    /// The share of grants that cost nothing; 1 where there were none.
    pub fn reused_share(&self) -> f64 {
        let all = self.hits + self.misses;
        if all == 0 {
            return 1.0;
        }
        // Counts far below 2^52.
        #[allow(clippy::cast_precision_loss, reason = "a share for people")]
        let share = self.hits as f64 / all as f64;
        share
    }
}

#[derive(Clone, Copy)]
struct Slot {
    page: PageId,
    /// I/O that is going on.
    uses: u32,
    /// Used since the hand passed.
    recent: bool,
}

/// No entry.
const NONE: u32 = u32::MAX;

/// The cache of one window.
pub struct ReuseCache {
    /// For each page, its place in `slots`.
    by_page: Vec<u32>,
    /// For each reference, its page.
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    hand: usize,
    first: Gref,
    stats: ReuseStats,
}

impl ReuseCache {
    /// Nothing is granted.
    pub fn new(shape: WindowShape) -> ReuseCache {
        ReuseCache {
            by_page: vec![NONE; shape.pages() as usize],
            slots: vec![None; shape.entries as usize],
            free: (0..shape.entries).rev().collect(),
            hand: 0,
            first: Gref::FIRST_FREE,
            stats: ReuseStats::default(),
        }
    }

    /// The counts.
    pub fn stats(&self) -> ReuseStats {
        self.stats
    }

    fn gref(&self, place: u32) -> Gref {
        Gref(self.first.0 + place)
    }

    /// The slot of a page that is granted.
    #[inline]
    fn slot(&mut self, page: PageId) -> Option<(u32, &mut Slot)> {
        let place = *self.by_page.get(page.0 as usize)?;
        let slot = self.slots.get_mut(place as usize)?.as_mut()?;
        Some((place, slot))
    }

    /// One more use of a page that is granted: its reference.
    #[inline]
    pub fn again(&mut self, page: PageId) -> Option<Gref> {
        let (place, slot) = self.slot(page)?;
        slot.uses += 1;
        slot.recent = true;
        self.stats.hits += 1;
        Some(self.gref(place))
    }

    /// The first use of a page that is not granted: issues it, in place of one that is not in use if
    /// there is no entry left. The page is made fresh before.
    ///
    /// # Errors
    ///
    /// [`GrantError`]
    #[cold]
    pub fn first(
        &mut self,
        table: &mut dyn TranslationTable,
        page: PageId,
    ) -> Result<Gref, GrantError> {
        self.stats.misses += 1;
        let shape = table.shape();
        let pages = shape.pages();
        let access = shape.access_of(page).ok_or(super::IssueError::NoPage { page, pages })?;
        let entries = shape.entries;
        let place = match self.free.pop() {
            Some(place) => place,
            None => self.evict(table).ok_or(GrantError::Full { entries })?,
        };
        let gref = self.gref(place);
        let issued = match table.prepare(page) {
            Ok(()) => table.issue(gref, page, access),
            Err(_) => Err(super::IssueError::NotFresh { page }),
        };
        if let Err(why) = issued {
            // An entry that is held comes last again.
            self.free.insert(0, place);
            return Err(why.into());
        }
        self.slots[place as usize] = Some(Slot { page, uses: 1, recent: true });
        self.by_page[page.0 as usize] = place;
        Ok(gref)
    }

    /// Revokes a grant that is not in use and was not used for longest, about.
    fn evict(&mut self, table: &mut dyn TranslationTable) -> Option<u32> {
        // Twice around: in the first round marks are taken away.
        for _ in 0..self.slots.len() * 2 {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let Some(slot) = self.slots[at].as_mut().filter(|slot| slot.uses == 0) else {
                continue;
            };
            if core::mem::take(&mut slot.recent) {
                continue;
            }
            let page = slot.page;
            let place = u32::try_from(at).ok()?;
            if table.revoke(self.gref(place)).is_err() {
                self.stats.busy += 1;
                continue;
            }
            self.slots[at] = None;
            self.by_page[page.0 as usize] = NONE;
            self.stats.evictions += 1;
            return Some(place);
        }
        None
    }

    /// A use of a page is over.
    #[inline]
    pub fn over(&mut self, page: PageId) {
        if let Some((_, slot)) = self.slot(page) {
            slot.uses = slot.uses.saturating_sub(1);
        }
    }

    /// Revokes the grant of a page that goes to another purpose. Nothing happens if there is none.
    ///
    /// # Errors
    ///
    /// [`RevokeError::Busy`]: it is in use, on this side or the other.
    pub fn purge(
        &mut self,
        table: &mut dyn TranslationTable,
        page: PageId,
    ) -> Result<(), RevokeError> {
        let Some((place, slot)) = self.slot(page) else { return Ok(()) };
        if slot.uses > 0 {
            return Err(RevokeError::Busy);
        }
        if let Err(why) = table.revoke(self.gref(place)) {
            self.stats.busy += 1;
            return Err(why);
        }
        self.forget(page);
        Ok(())
    }

    /// Forgets the grant of a page that is revoked otherwise; its reference, if it had one.
    pub fn forget(&mut self, page: PageId) -> Option<Gref> {
        let (place, _) = self.slot(page)?;
        self.slots[place as usize] = None;
        self.by_page[page.0 as usize] = NONE;
        // What was revoked by force may be held: it is tried last.
        self.free.insert(0, place);
        Some(self.gref(place))
    }

    /// Forgets every grant that is not in use and is revoked otherwise; their references.
    pub fn forget_idle(&mut self) -> Vec<Gref> {
        let idle =
            |slot: &Option<Slot>| slot.as_ref().filter(|slot| slot.uses == 0).map(|s| s.page);
        let pages: Vec<PageId> = self.slots.iter().filter_map(idle).collect();
        pages.into_iter().filter_map(|page| self.forget(page)).collect()
    }

    /// Forgets every grant.
    pub fn clear(&mut self) {
        self.by_page.fill(NONE);
        self.slots.fill(None);
        self.free = (0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)).rev().collect();
    }
}
