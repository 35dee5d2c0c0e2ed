//! Page source: the granter's side of a grant window, for the thread that fills a ring.
//!
//! # Theory of operation
//!
//! A grant window ([`TranslationTable`]) lets a granter issue and revoke pages without its peer, at the cost
//! of a few stores. The [reuse cache](reuse::ReuseCache) avoids even these: an issued page stays issued and
//! is granted again at no cost, until another page needs its entry or the page gets another purpose. The
//! [pool](pool::WindowPool) hands out the most recently used pages first. A pool grows with the load and returns
//! memory to the system on request. A page leaves the pool only after its grant was revoked and the grantee
//! has no access to it.
//!
//! [`PageSource`] combines the table, the cache and the pools. A frontend has one for each ring, in a
//! [`WindowStock`].

pub mod pool;
pub mod reuse;
mod stock;

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use ringfence_memory::LentSlice;
pub use ringfence_platform::window::{EngineFacts, Held, IssueError};
use ringfence_platform::{
    Access, Gref, PageId, RevokeError, TranslationTable, WindowError, WindowName,
};
use ringfence_sys::numbers::bounded;
use ringfence_sys::pressure::Share;

use pool::WindowPool;
use reuse::ReuseCache;
pub use reuse::ReuseStats;
pub use stock::{RECLAIM_INTERVAL, RingWindow, WindowStock};

/// Bit of a reference in a ring that marks a page of the ring's grant window. No ordinary grant table has so
/// many entries.
const MARK: u32 = 1 << 31;

/// Number of slots of a ring of vifs. Pages beyond it are a reserve for pages in transit.
const RING_SLOTS: u32 = 256;
/// Minimum number of pages of a window: three packets of maximum length. With pages for one
/// alone, a stream of such packets stalled until more were available.
const PAGES_LEAST: u32 = 64;

/// Returns the number of pages that a window of `full` pages keeps under memory pressure. The reserve goes first.
pub fn pages_under_pressure(share: Share, full: u32) -> u32 {
    if share.is_whole() { full } else { share.of(full.min(RING_SLOTS), PAGES_LEAST) }
}

/// Returns the ring's form of a reference to a page of a grant window.
#[inline]
pub fn mark(gref: Gref) -> Gref {
    Gref(gref.0 | MARK)
}

/// Returns the grant window's reference of a [marked](mark) one; `None` for ordinary grants.
#[inline]
pub fn unmark(gref: Gref) -> Option<Gref> {
    (gref.0 & MARK != 0).then_some(Gref(gref.0 & !MARK))
}

/// Rules for pages that enter and leave a [`PageSource`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SourcePolicy {
    /// Time for which a grantee may claim to use a page after its I/O. After it, the page is revoked by force
    /// and reported as a rule violation.
    pub hold_limit: Duration,
    /// Number of returned pages after which one page is exchanged for another, to simulate a guest that also
    /// uses its memory for other purposes. 0 disables it.
    pub churn: u32,
    /// Time at which the content of a revoked page leaves the grantee's reach.
    pub revocation: Revocation,
}

/// Time at which the content of a revoked page leaves the reach of a grantee that kept a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Revocation {
    /// When the page is used again, together with other pages.
    #[default]
    Plain,
    /// Before the revocation ends, which costs a system call for each page.
    Strict,
}

impl Revocation {
    pub const ALL: [Revocation; 2] = [Revocation::Plain, Revocation::Strict];

    /// Returns the meaning, for a list of the choices.
    pub fn meaning(self) -> &'static str {
        match self {
            Revocation::Plain => {
                "when the page is used again; a driver domain that kept a mapping reads it until then"
            }
            Revocation::Strict => "at once, which costs a system call for each revoked page",
        }
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Revocation::Plain => "plain",
            Revocation::Strict => "strict",
        }
    }
}

impl Default for SourcePolicy {
    fn default() -> SourcePolicy {
        SourcePolicy { hold_limit: Duration::from_secs(5), churn: 0, revocation: Revocation::Plain }
    }
}

/// Rule violation: the grantee holds pages whose I/O is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the peer held on to {pages} pages for longer than {hold_limit:?}; they were taken by force"
)]
pub struct HeldTooLong {
    pub pages: u32,
    /// Time limit that passed.
    pub hold_limit: Duration,
}

/// Reasons for which a page is not granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantError {
    /// Every entry is in use.
    #[error("all {entries} entries of the window are in use")]
    Full { entries: u32 },
    #[error(transparent)]
    Issue(#[from] IssueError),
}

/// Page counts of a [`PageSource`] at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SourceLevels {
    /// Number of pages with memory: free or in use.
    pub present: u32,
    /// Number of pages in use.
    pub in_use: u32,
    /// Number of revoked pages that the grantee still holds.
    pub held: u32,
    /// Statistics of the reuse cache.
    pub reuse: ReuseStats,
}

impl SourceLevels {
    /// Adds the levels of another source.
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

/// Grant window with its cache and its pools. The owner [takes](PageSource::take) a page,
/// [lends](PageSource::lend) it for an I/O, and gives it back.
pub struct PageSource {
    table: Box<dyn TranslationTable>,
    memory: Vec<LentSlice>,
    cache: ReuseCache,
    pools: [WindowPool; 2],
    policy: SourcePolicy,
    since_churn: u32,
    /// Pages that left the pool while the grantee claims to use them, with the time.
    lingering: Vec<(PageId, Instant)>,
    /// Time since which no entry is free because the grantee claims to use pages whose I/O is over.
    starved: Option<Instant>,
    /// Number of pages lent for I/O.
    lent: u32,
    /// Number of pages that left one by one and still have memory.
    unscrubbed: u32,
}

/// Number of pages that leave one by one before their memory is returned to the system together.
const SCRUB_AFTER: u32 = 64;

fn pool_of(access: Access) -> usize {
    match access {
        Access::ReadWrite => 0,
        Access::ReadOnly => 1,
    }
}

impl PageSource {
    /// Makes a source of all pages of `table`, none of them granted. `ready` pages of each kind are in the
    /// pools; others enter on demand.
    pub fn new(table: Box<dyn TranslationTable>, ready: u32, policy: SourcePolicy) -> PageSource {
        let shape = table.shape();
        let memory = (0..shape.pages()).filter_map(|page| table.memory(PageId(page))).collect();
        let pool = |access| WindowPool::new(shape.pages_for(access), ready);
        PageSource {
            memory,
            cache: ReuseCache::new(shape).with_revocation(policy.revocation),
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

    /// Returns the grant window's name for the grantee.
    pub fn name(&self) -> WindowName {
        WindowName {
            handle: self.table.handle(),
            references: Some(self.table.shape().references()),
        }
    }

    /// Prepares the grant window for another program of the grantee. Nothing may be lent.
    ///
    /// # Errors
    ///
    /// Returns the platform's error if the window cannot be used any more.
    pub fn renew(&mut self) -> Result<(), WindowError> {
        self.table.renew()
    }

    /// Returns the number of pages of both kinds, in the pools or not.
    pub fn pages(&self) -> usize {
        self.memory.len()
    }

    /// Returns the facts about the table's engine.
    pub fn engine(&self) -> EngineFacts {
        self.table.engine()
    }

    /// Returns the file descriptors that the table uses, for a sandbox that closes all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.table.descriptors()
    }

    /// Returns the number of pages that could be taken and lent now.
    pub fn available(&self, access: Access) -> usize {
        let entries = self.table.shape().entries.saturating_sub(self.lent) as usize;
        self.pools[pool_of(access)].available().min(entries)
    }

    /// Takes the most recently returned page of this kind. If none is free, another page enters the pool,
    /// within the bound.
    #[inline]
    pub fn take(&mut self, access: Access) -> Option<PageId> {
        self.pools[pool_of(access)].take()
    }

    /// Returns the memory of a page.
    ///
    /// [`PageSource::lend`] zeroes a page that is not granted yet. So the owner writes only after it has lent
    /// the page.
    #[inline]
    pub fn memory(&self, page: PageId) -> Option<&LentSlice> {
        self.memory.get(page.0 as usize)
    }

    /// Grants `page` for one more I/O, and returns its reference.
    ///
    /// # Errors
    ///
    /// Returns [`GrantError`]; the page is not lent.
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

    /// Ends the I/O of `page`, which stays granted and is on top of the pool.
    #[inline]
    pub fn give_back(&mut self, page: PageId) {
        self.cache.over(page);
        self.lent = self.lent.saturating_sub(1);
        self.put(page);
    }

    /// Returns a page that was taken but not lent.
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
                self.exchange_page(access);
            }
        }
    }

    /// Removes a page from a pool above its bound. Its memory is returned to the system together with that of
    /// other pages.
    #[cold]
    fn put_beyond(&mut self, page: PageId, access: Access) {
        self.expel(page);
        self.unscrubbed += 1;
        if self.unscrubbed >= SCRUB_AFTER || !self.pools[pool_of(access)].is_over() {
            self.unscrubbed = 0;
            // If the system refuses, the next page tries again.
            let _ = self.table.scrub();
        }
    }

    /// Exchanges the page on top of the pool for another one.
    fn exchange_page(&mut self, access: Access) {
        let pool = &mut self.pools[pool_of(access)];
        let Some(leaving) = pool.take() else { return };
        let _ = pool.admit_one();
        self.expel(leaving);
    }

    /// Removes a page from the pool after its revocation.
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

    /// Limits the pages of each kind to `most`, pages in use included. Free pages above the limit leave at
    /// once, the least recently used first, and their memory is returned to the system. Pages in use leave
    /// when they are given back. Returns the number of pages that left.
    ///
    /// # Errors
    ///
    /// Returns the system's error if it does not accept the memory.
    pub fn resize(&mut self, most: u32) -> Result<u32, RevokeError> {
        let mut leaving = Vec::new();
        for pool in &mut self.pools {
            pool.set_bound(most, &mut leaving);
        }
        let count = leaving.len();
        leaving.into_iter().for_each(|page| self.expel(page));
        self.table.scrub()?;
        Ok(bounded(count, u32::MAX))
    }

    /// Returns true if the grantee holds pages whose I/O is over. Then the owner must
    /// [reclaim](PageSource::reclaim) them regularly.
    #[inline]
    pub fn has_held_pages(&self) -> bool {
        !self.lingering.is_empty() || self.starved.is_some()
    }

    /// Retries to reclaim pages and entries that the grantee holds. The owner calls it regularly.
    ///
    /// # Errors
    ///
    /// Returns [`HeldTooLong`] if the time limit of the policy has passed. Those pages were revoked by force,
    /// and the owner must close the device.
    pub fn reclaim(&mut self) -> Result<(), HeldTooLong> {
        if !self.has_held_pages() {
            return Ok(());
        }
        let (now, hold_limit) = (Instant::now(), self.policy.hold_limit);
        let mut overdue = Vec::new();
        for (page, since) in core::mem::take(&mut self.lingering) {
            if self.cache.purge(&mut *self.table, page).is_ok() {
                self.gone(page);
            } else if now.duration_since(since) < hold_limit {
                self.lingering.push((page, since));
            } else {
                overdue.push(page);
            }
        }
        let mut grefs: Vec<Gref> =
            overdue.iter().filter_map(|page| self.cache.forget(*page)).collect();
        let mut pages = bounded(overdue.len(), u32::MAX);
        overdue.into_iter().for_each(|page| self.gone(page));
        if self.starved.is_some_and(|since| now.duration_since(since) >= hold_limit) {
            self.starved = None;
            let idle = self.cache.forget_idle();
            pages = pages.saturating_add(bounded(idle.len(), u32::MAX));
            grefs.extend(idle);
        }
        if grefs.is_empty() {
            return Ok(());
        }
        // Even if the system refuses, the grantee can begin no new use.
        let _ = self.table.revoke_forced(&grefs);
        Err(HeldTooLong { pages, hold_limit })
    }

    /// Revokes every grant, by force where the grantee claims to use the page, and returns every page to the
    /// pools. A held page becomes available only if the grantee releases it.
    pub fn reset(&mut self) {
        let grefs: Vec<Gref> = self.table.shape().grefs().collect();
        let _ = self.table.revoke_forced(&grefs);
        let _ = self.table.scrub();
        self.cache.clear();
        self.lingering.clear();
        (self.starved, self.lent) = (None, 0);
        self.pools.iter_mut().for_each(WindowPool::put_all);
    }

    /// Returns the present levels.
    pub fn levels(&mut self) -> SourceLevels {
        let sum = |of: fn(&WindowPool) -> u32| self.pools.iter().map(of).sum();
        let lingering = bounded(self.lingering.len(), u32::MAX);
        SourceLevels {
            present: sum(WindowPool::present),
            in_use: sum(WindowPool::in_use),
            held: self.table.held().pages.saturating_add(lingering),
            reuse: self.cache.stats(),
        }
    }
}

#[cfg(test)]
mod tests;
