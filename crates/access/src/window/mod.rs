//! The granter's side of a window: which of its pages are granted, and which are in use.
//!
//! # Theory of operation
//!
//! A window ([`TranslationTable`]) lets a granter issue and revoke alone, at the cost of a few stores. What
//! makes it fast is that it seldom has to: a page that was granted once stays granted, and is granted
//! again for nothing ([`reuse::ReuseCache`]), until its entry is wanted for another page or the page goes
//! to another purpose. A dedicated pool ([`pool::Pool`]) keeps it so that the pages that were used last
//! are used next. A pool grows with load, and gives memory back when it is told to: a page leaves it only
//! after its grant was revoked, and after nothing of the grantee reaches the page any more.
//!
//! [`PageSource`] is all three together, for one owner: the thread that fills a ring.

pub mod pool;
pub mod reuse;

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use ringfence_memory::LentSlice;
pub use ringfence_platform::window::{EngineFacts, Held, IssueError};
use ringfence_platform::{Access, Gref, PageId, RevokeError, TranslationTable, WindowHandle};

use pool::Pool;
use reuse::ReuseCache;
pub use reuse::ReuseStats;

/// In a ring, a reference with this bit names a page of the ring's window and not an ordinary grant: no
/// table of grants has so many entries.
const MARK: u32 = 1 << 31;

/// The reference of a page of a window as it is written into a ring.
#[inline]
pub fn mark(gref: Gref) -> Gref {
    Gref(gref.0 | MARK)
}

/// The reference in the window of what was [marked](mark); `None` for ordinary grants.
#[inline]
pub fn unmark(gref: Gref) -> Option<Gref> {
    (gref.0 & MARK != 0).then_some(Gref(gref.0 & !MARK))
}

/// How pages go in and out of a [`PageSource`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SourcePolicy {
    /// How long a grantee may say that it uses a page which ought to be free, before the page is taken
    /// by force and the grantee is said to misbehave.
    pub patience: Duration,
    /// Every so many pages that are given back, one leaves the pool for another purpose and another page
    /// comes in its place, as happens in a guest whose memory is used for other things too. 0: never.
    pub churn: u32,
}

impl Default for SourcePolicy {
    fn default() -> SourcePolicy {
        SourcePolicy { patience: Duration::from_secs(5), churn: 0 }
    }
}

/// The grantee does not let go of pages that it was given to use for an I/O that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer held on to {pages} pages for longer than {patience:?}; they were taken by force")]
pub struct HeldTooLong {
    /// Pages.
    pub pages: u32,
    /// The bound.
    pub patience: Duration,
}

/// Why a page was not granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantError {
    /// Every entry is in use.
    #[error("all {entries} entries of the window are in use")]
    Full {
        /// Entries there are.
        entries: u32,
    },
    /// The table refused.
    #[error(transparent)]
    Issue(#[from] IssueError),
}

/// What is in a [`PageSource`] now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SourceLevels {
    /// Pages that are free, or in use: memory that is taken.
    pub present: u32,
    /// Pages in use.
    pub in_use: u32,
    /// Pages that the grantee holds on to although they were revoked.
    pub held: u32,
    /// How often a page was granted, and how often that cost nothing.
    pub reuse: ReuseStats,
}

impl SourceLevels {
    /// Adds what is in another source.
    pub fn add(&mut self, other: SourceLevels) {
        self.present += other.present;
        self.in_use += other.in_use;
        self.held += other.held;
        self.reuse.hits += other.reuse.hits;
        self.reuse.misses += other.reuse.misses;
        self.reuse.evictions += other.reuse.evictions;
        self.reuse.busy += other.reuse.busy;
    }
}

/// A window with its cache and its pools. A page that was [taken](PageSource::take) is
/// [lent](PageSource::lend) for an I/O and given back after it.
pub struct PageSource {
    table: Box<dyn TranslationTable>,
    memory: Vec<LentSlice>,
    cache: ReuseCache,
    pools: [Pool; 2],
    policy: SourcePolicy,
    since_churn: u32,
    /// Pages that left the pool but are in use by the grantee, as it says, and since when.
    lingering: Vec<(PageId, Instant)>,
    /// Since when no page can be granted because the grantee says that it uses what it should not.
    starved: Option<Instant>,
    /// Pages lent for I/O that is not over.
    lent: u32,
    /// Pages that left one by one, and whose memory is still taken.
    unscrubbed: u32,
}

/// So many pages that leave one by one are given back to the system together.
const SCRUB_AFTER: u32 = 64;

fn pool_of(access: Access) -> usize {
    match access {
        Access::ReadWrite => 0,
        Access::ReadOnly => 1,
    }
}

impl PageSource {
    /// All of `table`'s pages, none of them granted. `ready` of each kind are in the pools at once; more
    /// come as they are wanted.
    pub fn new(table: Box<dyn TranslationTable>, ready: u32, policy: SourcePolicy) -> PageSource {
        let shape = table.shape();
        let memory = (0..shape.pages()).filter_map(|page| table.memory(PageId(page))).collect();
        let pool = |access| Pool::new(shape.pages_for(access), ready);
        PageSource {
            memory,
            cache: ReuseCache::new(shape),
            pools: [pool(Access::ReadWrite), pool(Access::ReadOnly)],
            table,
            policy,
            since_churn: 0,
            lingering: Vec::new(),
            starved: None,
            lent: 0,
            unscrubbed: 0,
        }
    }

    /// The window's name for the grantee.
    pub fn handle(&self) -> WindowHandle {
        self.table.handle()
    }

    /// Pages of both kinds, in the pools or not.
    pub fn pages(&self) -> usize {
        self.memory.len()
    }

    /// What the engine promises.
    pub fn engine(&self) -> EngineFacts {
        self.table.engine()
    }

    /// The files it holds, for a sandbox that closes or refuses all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.table.descriptors()
    }

    /// Pages that [`PageSource::take`] would give now, and that there are entries for.
    pub fn available(&self, access: Access) -> usize {
        let entries = self.table.shape().entries.saturating_sub(self.lent) as usize;
        self.pools[pool_of(access)].available().min(entries)
    }

    /// Takes the page of that kind that was given back last; one more comes into the pool if none is
    /// free and the bound allows it.
    #[inline]
    pub fn take(&mut self, access: Access) -> Option<PageId> {
        self.pools[pool_of(access)].take()
    }

    /// The bytes of a page, to be filled before it is lent.
    ///
    /// A page that is not granted yet is made fresh first: so ask for its memory only after
    /// [`PageSource::lend`] where what is put there must not get lost.
    #[inline]
    pub fn memory(&self, page: PageId) -> Option<&LentSlice> {
        self.memory.get(page.0 as usize)
    }

    /// The reference under which the grantee reaches `page`, for one more I/O.
    ///
    /// # Errors
    ///
    /// [`GrantError`]; the page is not lent.
    #[inline]
    pub fn lend(&mut self, page: PageId) -> Result<Gref, GrantError> {
        let gref = match self.cache.again(page) {
            Some(gref) => gref,
            None => self.first(page)?,
        };
        self.lent += 1;
        Ok(gref)
    }

    #[cold]
    fn first(&mut self, page: PageId) -> Result<Gref, GrantError> {
        let granted = self.cache.first(&mut *self.table, page);
        let entries = self.table.shape().entries;
        self.starved = match granted {
            Err(GrantError::Full { .. }) if self.lent < entries => {
                self.starved.or_else(|| Some(Instant::now()))
            }
            _ => None,
        };
        granted
    }

    /// The I/O for which `page` was lent is over; it stays granted, and is used again next.
    #[inline]
    pub fn give_back(&mut self, page: PageId) {
        self.cache.over(page);
        self.lent = self.lent.saturating_sub(1);
        self.put(page);
    }

    /// Puts back a page that was taken and not lent.
    pub fn put(&mut self, page: PageId) {
        let Some(access) = self.table.shape().access_of(page) else { return };
        let pool = &mut self.pools[pool_of(access)];
        if pool.is_over() {
            self.put_beyond(page, access);
            return;
        }
        pool.put(page);
        if self.policy.churn > 0 {
            self.since_churn += 1;
            if self.since_churn >= self.policy.churn {
                self.since_churn = 0;
                self.turn_over(access);
            }
        }
    }

    /// A page comes back to a pool that has too many: it leaves at once, and its memory goes back to the
    /// system with that of others.
    #[cold]
    fn put_beyond(&mut self, page: PageId, access: Access) {
        self.expel(page);
        self.unscrubbed += 1;
        if self.unscrubbed >= SCRUB_AFTER || !self.pools[pool_of(access)].is_over() {
            self.unscrubbed = 0;
            // Should the system refuse, it is asked again with the next ones.
            let _ = self.table.scrub();
        }
    }

    /// Lets the page on top of the pool go, and takes another in.
    fn turn_over(&mut self, access: Access) {
        let pool = &mut self.pools[pool_of(access)];
        let Some(leaving) = pool.take() else { return };
        let _ = pool.admit_one();
        self.expel(leaving);
    }

    /// A page leaves for another purpose: after its revocation.
    fn expel(&mut self, page: PageId) {
        match self.cache.purge(&mut *self.table, page) {
            Ok(()) => self.gone(page),
            Err(_) => self.lingering.push((page, Instant::now())),
        }
    }

    fn gone(&mut self, page: PageId) {
        if let Some(access) = self.table.shape().access_of(page) {
            self.pools[pool_of(access)].left(page);
        }
    }

    /// Keeps at most so many pages of each kind from now on, those in use included. What is too much and
    /// free leaves at once, the coldest first, and its memory goes back to the system; what is in use
    /// leaves when it is given back. Returns how many pages left.
    ///
    /// # Errors
    ///
    /// When the system refuses to take memory back.
    pub fn resize(&mut self, most: u32) -> Result<u32, RevokeError> {
        let mut leaving = Vec::new();
        for pool in &mut self.pools {
            pool.set_bound(most, &mut leaving);
        }
        let count = leaving.len();
        leaving.into_iter().for_each(|page| self.expel(page));
        self.table.scrub()?;
        Ok(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Whether the grantee holds on to what it ought to have let go of: then
    /// [tend](PageSource::tend) to it now and then.
    #[inline]
    pub fn is_troubled(&self) -> bool {
        !self.lingering.is_empty() || self.starved.is_some()
    }

    /// Looks after pages that ought to have left, and entries that ought to be free. Call it now and then.
    ///
    /// # Errors
    ///
    /// [`HeldTooLong`] when the grantee used up the patience of the policy: those pages were taken by
    /// force, and its device is to be closed.
    pub fn tend(&mut self) -> Result<(), HeldTooLong> {
        if !self.is_troubled() {
            return Ok(());
        }
        let (now, patience) = (Instant::now(), self.policy.patience);
        let mut overdue = Vec::new();
        for (page, since) in core::mem::take(&mut self.lingering) {
            if self.cache.purge(&mut *self.table, page).is_ok() {
                self.gone(page);
            } else if now.duration_since(since) < patience {
                self.lingering.push((page, since));
            } else {
                overdue.push(page);
            }
        }
        let mut grefs: Vec<Gref> =
            overdue.iter().filter_map(|page| self.cache.forget(*page)).collect();
        let mut pages = u32::try_from(overdue.len()).unwrap_or(u32::MAX);
        overdue.into_iter().for_each(|page| self.gone(page));
        if self.starved.is_some_and(|since| now.duration_since(since) >= patience) {
            self.starved = None;
            let idle = self.cache.forget_idle();
            pages = pages.saturating_add(u32::try_from(idle.len()).unwrap_or(u32::MAX));
            grefs.extend(idle);
        }
        if grefs.is_empty() {
            return Ok(());
        }
        // Should the system refuse, nothing new can begin all the same.
        let _ = self.table.revoke_forced(&grefs);
        Err(HeldTooLong { pages, patience })
    }

    /// Takes everything back, by force where the grantee claims to use it, and puts every page back. What
    /// is held then comes back when the grantee lets go, or never.
    pub fn reset(&mut self) {
        let grefs: Vec<Gref> = self.table.shape().grefs().collect();
        let _ = self.table.revoke_forced(&grefs);
        let _ = self.table.scrub();
        self.cache.clear();
        self.lingering.clear();
        (self.starved, self.lent) = (None, 0);
        self.pools.iter_mut().for_each(Pool::put_all);
    }

    /// What is in it.
    pub fn levels(&mut self) -> SourceLevels {
        let sum = |of: fn(&Pool) -> u32| self.pools.iter().map(of).sum();
        let lingering = u32::try_from(self.lingering.len()).unwrap_or(u32::MAX);
        SourceLevels {
            present: sum(Pool::present),
            in_use: sum(Pool::in_use),
            held: self.table.held().pages.saturating_add(lingering),
            reuse: self.cache.stats(),
        }
    }
}

#[cfg(test)]
mod tests;
