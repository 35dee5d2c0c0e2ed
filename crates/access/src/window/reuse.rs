//! Reuse cache: the issued pages of a grant window, and their uses. It is the hash table of the redesigned
//! grant mechanism, with pages as keys. Pages of a grant window are numbered, so two arrays suffice.

use ringfence_platform::{Gref, PageId, RevokeError, TranslationTable, WindowShape};
use ringfence_sys::numbers::bounded;

use super::{GrantError, Revocation};

/// Statistics of a reuse cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReuseStats {
    /// Grants of a page that was issued already.
    pub hits: u64,
    /// Grants that issued the page.
    pub misses: u64,
    /// Grants revoked to free their entry for another page.
    pub evictions: u64,
    /// Revocations that failed because the grantee claims to use the page.
    pub busy: u64,
}

impl ReuseStats {
    /// Returns the share of grants that cost nothing; 1 if there were none.
    pub fn reused_share(&self) -> f64 {
        let all = self.hits + self.misses;
        if all == 0 {
            return 1.0;
        }
        // The counts are far below 2^52.
        #[allow(clippy::cast_precision_loss, reason = "a share for people")]
        let share = self.hits as f64 / all as f64;
        share
    }
}

#[derive(Clone, Copy)]
struct Slot {
    page: PageId,
    /// Number of I/O operations in progress.
    uses: u32,
    /// Reference bit of the clock algorithm: set by each use.
    recent: bool,
}

/// Marker for "no entry".
const NONE: u32 = u32::MAX;

/// Cache of the grants of one grant window, with clock eviction.
pub struct ReuseCache {
    /// Index into `slots` of each page.
    by_page: Vec<u32>,
    /// Page of each reference.
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    hand: usize,
    first: Gref,
    revocation: Revocation,
    stats: ReuseStats,
}

impl ReuseCache {
    /// Makes a cache without grants.
    pub fn new(shape: WindowShape) -> ReuseCache {
        ReuseCache {
            by_page: vec![NONE; shape.pages() as usize],
            slots: vec![None; shape.entries as usize],
            free: (0..shape.entries).rev().collect(),
            hand: 0,
            first: Gref::FIRST_FREE,
            revocation: Revocation::Plain,
            stats: ReuseStats::default(),
        }
    }

    /// Sets the time at which the content of a revoked page leaves the grantee's reach.
    pub fn with_revocation(self, revocation: Revocation) -> ReuseCache {
        ReuseCache { revocation, ..self }
    }

    /// Returns the statistics of all grants.
    pub fn stats(&self) -> ReuseStats {
        self.stats
    }

    fn gref(&self, place: u32) -> Gref {
        Gref(self.first.0 + place)
    }

    /// Returns the slot of an issued page.
    #[inline]
    fn slot(&mut self, page: PageId) -> Option<(u32, &mut Slot)> {
        let place = *self.by_page.get(page.0 as usize)?;
        let slot = self.slots.get_mut(place as usize)?.as_mut()?;
        Some((place, slot))
    }

    /// Begins another use of an issued page; returns its reference.
    #[inline]
    pub fn again(&mut self, page: PageId) -> Option<Gref> {
        let (place, slot) = self.slot(page)?;
        slot.uses += 1;
        slot.recent = true;
        self.stats.hits += 1;
        Some(self.gref(place))
    }

    /// Begins the first use of a page that is not issued: prepares and issues it. If no entry is free, it evicts
    /// a page that is not in use.
    ///
    /// # Errors
    ///
    /// Returns [`GrantError`] if no entry can be freed, or the table refuses the page.
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
            // The grantee may hold the entry, so it is tried last.
            self.free.insert(0, place);
            return Err(why.into());
        }
        self.slots[place as usize] = Some(Slot { page, uses: 1, recent: true });
        self.by_page[page.0 as usize] = place;
        Ok(gref)
    }

    /// Revokes a grant that is not in use and was not used recently (clock algorithm).
    fn evict(&mut self, table: &mut dyn TranslationTable) -> Option<u32> {
        // Two rounds: the first one may only clear reference bits.
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
            if self.revoke(table, place).is_err() {
                continue;
            }
            self.slots[at] = None;
            self.by_page[page.0 as usize] = NONE;
            self.stats.evictions += 1;
            return Some(place);
        }
        None
    }

    /// Ends a use of a page.
    #[inline]
    pub fn over(&mut self, page: PageId) {
        if let Some((_, slot)) = self.slot(page) {
            slot.uses = slot.uses.saturating_sub(1);
        }
    }

    /// Revokes the grant of a page that gets another purpose. A page without a grant is unchanged.
    ///
    /// # Errors
    ///
    /// Returns [`RevokeError::Busy`] if the granter or the grantee uses the page.
    pub fn purge(
        &mut self,
        table: &mut dyn TranslationTable,
        page: PageId,
    ) -> Result<(), RevokeError> {
        let Some((place, slot)) = self.slot(page) else { return Ok(()) };
        if slot.uses > 0 {
            return Err(RevokeError::Busy);
        }
        self.revoke(table, place)?;
        self.forget(page);
        Ok(())
    }

    /// Revokes the grant of an entry.
    fn revoke(&mut self, table: &mut dyn TranslationTable, place: u32) -> Result<(), RevokeError> {
        if let Err(why) = table.revoke(self.gref(place)) {
            self.stats.busy += 1;
            return Err(why);
        }
        if self.revocation == Revocation::Strict {
            // If the system refuses, the page is not used again before it accepts.
            let _ = table.scrub();
        }
        Ok(())
    }

    /// Removes the record of a page that the caller revokes itself; returns its reference.
    pub fn forget(&mut self, page: PageId) -> Option<Gref> {
        let (place, _) = self.slot(page)?;
        self.slots[place as usize] = None;
        self.by_page[page.0 as usize] = NONE;
        // The grantee may hold a page that is revoked by force, so its entry is tried last.
        self.free.insert(0, place);
        Some(self.gref(place))
    }

    /// Removes the records of all grants that are not in use, which the caller revokes; returns their references.
    pub fn forget_idle(&mut self) -> Vec<Gref> {
        let idle =
            |slot: &Option<Slot>| slot.as_ref().filter(|slot| slot.uses == 0).map(|s| s.page);
        let pages: Vec<PageId> = self.slots.iter().filter_map(idle).collect();
        pages.into_iter().filter_map(|page| self.forget(page)).collect()
    }

    /// Removes the records of all grants.
    pub fn clear(&mut self) {
        self.by_page.fill(NONE);
        self.slots.fill(None);
        self.free = (0..bounded(self.slots.len(), u32::MAX)).rev().collect();
    }
}
