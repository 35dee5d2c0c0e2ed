//! Staging grants: pages that a frontend asks a backend to keep mapped.
//!
//! # Theory of operation
//!
//! The frontend lists pages over netif's control ring. The backend maps them once. A slot of either ring
//! of that queue that refers to a staged page costs one look-up: no map, no copy by the platform, no unmap.
//! Other pages are accessed as without staging.
//!
//! Two parts of the backend cooperate:
//!
//! * The control side validates lists and maps and unmaps pages, which takes system calls. Its
//!   [`StagingLedger`] records the staged pages and enforces the limits of queues and guests.
//! * The datapath worker looks pages up in its [`StagingTable`]. It adds and removes pages between two
//!   rounds, when no frame refers to a page. So a removed page has no other users, and nothing is ever
//!   unmapped under an I/O.
//!
//! Removed pages go back to the control side, which drops them and only then responds to the frontend.
//! When the frontend reads the response, the backend has no access to the page any more.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Gref};
use ringfence_sys::numbers::bounded;

use crate::index::{EnterError, GREF_LIMIT, GrefIndex};

/// Page that is kept mapped.
#[derive(Clone, Debug)]
pub struct StagedPage {
    /// Grant reference of the page.
    pub gref: Gref,
    /// Access that it was mapped with.
    pub access: Access,
    pub memory: LentSlice,
}

/// Table of the staged pages of a queue, for the datapath worker.
#[derive(Default)]
pub struct StagingTable {
    index: GrefIndex,
    pages: Vec<Option<StagedPage>>,
    free: Vec<u16>,
}

impl StagingTable {
    /// Makes an empty table.
    pub fn new() -> StagingTable {
        StagingTable::default()
    }

    /// Returns the number of pages.
    #[inline]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns true if there are no pages.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns the page of `gref` if it was staged for at least `access`. A page that was staged read-only
    /// is not written through the table, even if its grant would allow it.
    #[inline]
    pub fn get(&self, gref: Gref, access: Access) -> Option<&LentSlice> {
        let place = self.index.get(gref)?;
        let page = self.pages.get(usize::from(place))?.as_ref()?;
        let allowed = access == Access::ReadOnly || page.access == Access::ReadWrite;
        allowed.then_some(&page.memory)
    }

    /// Adds all pages or none.
    ///
    /// # Errors
    ///
    /// Returns the pages, with the reason.
    pub fn add(&mut self, pages: Vec<StagedPage>) -> Result<(), (Vec<StagedPage>, EnterError)> {
        for (done, page) in pages.iter().enumerate() {
            let place = match self.free.pop() {
                Some(place) => place,
                // The index refuses a position above its maximum.
                None => u16::try_from(self.pages.len()).unwrap_or(u16::MAX),
            };
            if let Err(why) = self.index.enter(page.gref, place) {
                if usize::from(place) < self.pages.len() {
                    self.free.push(place);
                }
                pages[..done].iter().for_each(|page| drop(self.take(page.gref)));
                return Err((pages, why));
            }
            let page = Some(page.clone());
            match self.pages.get_mut(usize::from(place)) {
                Some(slot) => *slot = page,
                None => self.pages.push(page),
            }
        }
        Ok(())
    }

    /// Removes the page of `gref` and returns it.
    pub fn take(&mut self, gref: Gref) -> Option<StagedPage> {
        let place = self.index.remove(gref)?;
        self.free.push(place);
        self.pages.get_mut(usize::from(place))?.take()
    }
}

/// Bounds of the pages that a frontend may register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingLimits {
    /// Maximum number of pages of one queue.
    pub per_queue: u32,
    /// Maximum number of pages of one guest, over all its queues.
    pub per_guest: u32,
}

impl Default for StagingLimits {
    /// Returns the default: twice the 512 slots of a queue's two rings; more is of no use to a queue.
    fn default() -> Self {
        StagingLimits { per_queue: 1024, per_guest: 4096 }
    }
}

/// Limit of staged pages over several vifs. Each page is a mapping, and the number of mappings of a
/// process is limited.
#[derive(Debug)]
pub struct StagingPool(Mutex<PoolState>);

#[derive(Debug)]
struct PoolState {
    used: u32,
    limit: u32,
}

impl StagingPool {
    /// Makes an empty pool for `limit` pages.
    pub fn new(limit: u32) -> Arc<StagingPool> {
        Arc::new(StagingPool(Mutex::new(PoolState { used: 0, limit })))
    }

    /// Sets the maximum number of pages. Pages that are staged beyond it stay, because only the frontend removes them.
    pub fn set_limit(&self, limit: u32) {
        self.state().limit = limit;
    }

    /// Returns the maximum number of pages.
    pub fn limit(&self) -> u32 {
        self.state().limit
    }

    /// Returns the number of pages that are staged.
    pub fn used(&self) -> u32 {
        self.state().used
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reasons for which a list is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LedgerRefusal {
    /// Number of a queue that does not exist.
    #[error("queue {queue} of {queues}")]
    Queue { queue: u32, queues: u32 },
    /// List that would exceed the limit of its queue.
    #[error("{wanted} pages more, beside {staged}; a queue may have {limit}")]
    QueueFull {
        /// Number of pages in the list.
        wanted: u32,
        staged: u32,
        /// Maximum number of pages.
        limit: u32,
    },
    /// List that would exceed the limit of its guest.
    #[error("{wanted} pages more, beside {staged} of all queues; a guest may have {limit}")]
    GuestFull {
        /// Number of pages in the list.
        wanted: u32,
        staged: u32,
        /// Maximum number of pages.
        limit: u32,
    },
    /// List that would exceed the limit of a guest's vifs together, or of the process.
    #[error(
        "{wanted} pages more, beside {staged} of other vifs too; together they may have {limit}"
    )]
    PoolFull {
        /// Number of pages in the list.
        wanted: u32,
        staged: u32,
        /// Maximum number of pages.
        limit: u32,
    },
    /// Page that is staged already, or is twice in the list.
    #[error("{gref} is staged already")]
    Twice { gref: Gref },
    /// Reference that is not below [`GREF_LIMIT`].
    #[error("{gref} is not below {GREF_LIMIT}")]
    TooLarge { gref: Gref },
}

impl LedgerRefusal {
    /// Returns the counter name of the refusal.
    pub fn label(&self) -> &'static str {
        match self {
            LedgerRefusal::Queue { .. } => "staging_no_such_queue",
            LedgerRefusal::QueueFull { .. } => "staging_queue_full",
            LedgerRefusal::GuestFull { .. } => "staging_guest_full",
            LedgerRefusal::PoolFull { .. } => "staging_pool_full",
            LedgerRefusal::Twice { .. } => "staging_gref_twice",
            LedgerRefusal::TooLarge { .. } => "staging_gref_too_large",
        }
    }
}

/// Record of the staged pages of each queue, for the validation of lists.
pub struct StagingLedger {
    queues: Vec<HashMap<Gref, Access>>,
    limits: StagingLimits,
    /// Pools that count every staged page.
    pools: Vec<Arc<StagingPool>>,
}

impl StagingLedger {
    /// Makes a ledger without staged pages.
    pub fn new(queues: u32, limits: StagingLimits) -> StagingLedger {
        let queues = (0..queues).map(|_| HashMap::new()).collect();
        StagingLedger { queues, limits, pools: Vec::new() }
    }

    /// Adds `pools`, which limit this ledger together with others. One thread must own all ledgers of a pool.
    pub fn share(&mut self, pools: Vec<Arc<StagingPool>>) {
        self.release(self.staged());
        self.pools = pools;
        self.reserve(self.staged());
    }

    fn reserve(&self, pages: u32) {
        for pool in &self.pools {
            pool.state().used += pages;
        }
    }

    fn release(&self, pages: u32) {
        for pool in &self.pools {
            pool.state().used -= pages;
        }
    }

    /// Returns the maximum number of staged pages of `queue`.
    ///
    /// # Errors
    ///
    /// Returns [`LedgerRefusal::Queue`] if the queue does not exist.
    pub fn limit(&self, queue: u32) -> Result<u32, LedgerRefusal> {
        self.place(queue)?;
        Ok(self.limits.per_queue.min(self.limits.per_guest))
    }

    /// Returns the number of staged pages of all queues.
    #[inline]
    pub fn staged(&self) -> u32 {
        let all: usize = self.queues.iter().map(HashMap::len).sum();
        bounded(all, u32::MAX)
    }

    #[inline]
    fn place(&self, queue: u32) -> Result<usize, LedgerRefusal> {
        let queues = bounded(self.queues.len(), u32::MAX);
        let found = usize::try_from(queue).ok().filter(|_| queue < queues);
        found.ok_or(LedgerRefusal::Queue { queue, queues })
    }

    /// Validates that all of `list` may be staged for `queue`. It records nothing.
    ///
    /// # Errors
    ///
    /// Returns a [`LedgerRefusal`] for the first rule that the list breaks.
    pub fn validate(&self, queue: u32, list: &[Gref]) -> Result<(), LedgerRefusal> {
        let staged = &self.queues[self.place(queue)?];
        let wanted = u32::try_from(list.len()).unwrap_or(u32::MAX);
        let here = u32::try_from(staged.len()).unwrap_or(u32::MAX);
        let StagingLimits { per_queue, per_guest } = self.limits;
        if here.saturating_add(wanted) > per_queue {
            return Err(LedgerRefusal::QueueFull { wanted, staged: here, limit: per_queue });
        }
        if self.staged().saturating_add(wanted) > per_guest {
            let staged = self.staged();
            return Err(LedgerRefusal::GuestFull { wanted, staged, limit: per_guest });
        }
        let full = |pool: &&Arc<StagingPool>| pool.used().saturating_add(wanted) > pool.limit();
        if let Some(pool) = self.pools.iter().find(full) {
            let (staged, limit) = (pool.used(), pool.limit());
            return Err(LedgerRefusal::PoolFull { wanted, staged, limit });
        }
        let mut seen = HashSet::with_capacity(list.len());
        for gref in list {
            if gref.0 >= GREF_LIMIT {
                return Err(LedgerRefusal::TooLarge { gref: *gref });
            }
            if staged.contains_key(gref) || !seen.insert(*gref) {
                return Err(LedgerRefusal::Twice { gref: *gref });
            }
        }
        Ok(())
    }

    /// Records `list`, which was [validated](StagingLedger::validate), as staged.
    pub fn record(&mut self, queue: u32, list: impl IntoIterator<Item = (Gref, Access)>) {
        let before = self.staged();
        if let Ok(place) = self.place(queue) {
            self.queues[place].extend(list);
        }
        self.reserve(self.staged() - before);
    }

    /// Iterates over the staged pages of each queue, in arbitrary order.
    pub fn all(&self) -> impl Iterator<Item = impl Iterator<Item = (Gref, Access)> + '_> + '_ {
        self.queues.iter().map(|queue| queue.iter().map(|(gref, access)| (*gref, *access)))
    }

    /// Removes the staged pages of `list`, and returns the access of each. The result is `None` for a page
    /// that is not staged, and for the second mention of a page.
    ///
    /// # Errors
    ///
    /// Returns [`LedgerRefusal::Queue`] if the queue does not exist.
    pub fn remove_all(
        &mut self,
        queue: u32,
        list: &[Gref],
    ) -> Result<Vec<Option<Access>>, LedgerRefusal> {
        let place = self.place(queue)?;
        let before = self.staged();
        let struck = list.iter().map(|gref| self.queues[place].remove(gref)).collect();
        self.release(before - self.staged());
        Ok(struck)
    }
}

impl Drop for StagingLedger {
    fn drop(&mut self) {
        self.release(self.staged());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(gref: u32, access: Access) -> StagedPage {
        StagedPage { gref: Gref(gref), access, memory: LentSlice::anonymous(64) }
    }

    #[test]
    fn page_staged_read_only_is_not_found_for_writing() {
        let mut table = StagingTable::new();
        table.add(vec![page(8, Access::ReadOnly), page(9, Access::ReadWrite)]).unwrap();
        assert!(table.get(Gref(8), Access::ReadOnly).is_some());
        assert!(table.get(Gref(8), Access::ReadWrite).is_none());
        assert!(table.get(Gref(9), Access::ReadWrite).is_some());
        assert!(table.get(Gref(10), Access::ReadOnly).is_none());
    }

    #[test]
    fn failed_add_leaves_table_unchanged() {
        let mut table = StagingTable::new();
        table.add(vec![page(8, Access::ReadOnly)]).unwrap();
        let list =
            vec![page(9, Access::ReadOnly), page(10, Access::ReadOnly), page(8, Access::ReadOnly)];
        let (back, why) = table.add(list).unwrap_err();
        assert_eq!((back.len(), why), (3, EnterError::Present { gref: Gref(8) }));
        assert_eq!(table.len(), 1);
        assert!(table.get(Gref(9), Access::ReadOnly).is_none());
        table.add(vec![page(9, Access::ReadOnly)]).unwrap();
        assert_eq!(table.pages.len(), 3, "places are used again");
    }

    #[test]
    fn ledgers_sharing_pool_stay_within_its_limit() {
        let (guest, process) = (StagingPool::new(6), StagingPool::new(8));
        let make = |pools: &[&Arc<StagingPool>]| {
            let mut ledger = StagingLedger::new(1, StagingLimits { per_queue: 5, per_guest: 5 });
            ledger.share(pools.iter().map(|pool| Arc::clone(pool)).collect());
            ledger
        };
        let grefs = |count: u32| (0..count).map(Gref).collect::<Vec<_>>();
        let noted = |count| grefs(count).into_iter().map(|gref| (gref, Access::ReadOnly));
        let (mut one, mut two) = (make(&[&guest, &process]), make(&[&guest, &process]));
        let other = make(&[&process]);
        one.validate(0, &grefs(4)).unwrap();
        one.record(0, noted(4));
        let refused = two.validate(0, &grefs(3)).unwrap_err();
        assert_eq!(refused, LedgerRefusal::PoolFull { wanted: 3, staged: 4, limit: 6 });
        assert_eq!(refused.label(), "staging_pool_full");
        two.validate(0, &grefs(2)).unwrap();
        two.record(0, noted(2));
        // The other guest gets the rest of the process's limit.
        assert!(matches!(
            other.validate(0, &grefs(3)),
            Err(LedgerRefusal::PoolFull { limit: 8, .. })
        ));
        other.validate(0, &grefs(2)).unwrap();
        one.remove_all(0, &grefs(2)).unwrap();
        assert_eq!((guest.used(), process.used()), (4, 4));
        drop((one, two));
        assert_eq!((guest.used(), process.used()), (0, 0));
        other.validate(0, &grefs(5)).unwrap();
    }

    #[test]
    fn list_beyond_queue_or_guest_limit_is_refused() {
        let limits = StagingLimits { per_queue: 4, per_guest: 6 };
        let mut ledger = StagingLedger::new(2, limits);
        let grefs = |range: core::ops::Range<u32>| range.map(Gref).collect::<Vec<_>>();
        assert!(matches!(ledger.validate(2, &grefs(0..1)), Err(LedgerRefusal::Queue { .. })));
        assert!(matches!(ledger.validate(0, &grefs(0..5)), Err(LedgerRefusal::QueueFull { .. })));
        ledger.validate(0, &grefs(0..4)).unwrap();
        ledger.record(0, grefs(0..4).into_iter().map(|gref| (gref, Access::ReadOnly)));
        assert!(matches!(ledger.validate(1, &grefs(0..3)), Err(LedgerRefusal::GuestFull { .. })));
        // One page can be staged for two queues.
        ledger.validate(1, &grefs(0..2)).unwrap();
        let read = Some(Access::ReadOnly);
        assert_eq!(ledger.remove_all(0, &grefs(2..6)), Ok(vec![read, read, None, None]));
        assert_eq!(ledger.staged(), 2);
        let twice = [Gref(9), Gref(9)];
        assert_eq!(ledger.validate(0, &twice), Err(LedgerRefusal::Twice { gref: Gref(9) }));
        assert_eq!(ledger.remove_all(1, &twice), Ok(vec![None, None]));
        let large = [Gref(GREF_LIMIT)];
        assert!(matches!(ledger.validate(0, &large), Err(LedgerRefusal::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn list_valid_in_ledger_is_accepted_by_table(
            lists in prop::collection::vec((any::<bool>(), prop::collection::vec(0u32..40, 1..12)), 0..60),
        ) {
            let mut ledger = StagingLedger::new(1, StagingLimits { per_queue: 24, per_guest: 24 });
            let mut table = StagingTable::new();
            for (add, list) in lists {
                let grefs: Vec<Gref> = list.iter().copied().map(Gref).collect();
                if !add {
                    let known = ledger.remove_all(0, &grefs).unwrap();
                    for (gref, known) in grefs.iter().zip(known) {
                        prop_assert_eq!(table.take(*gref).map(|page| page.access), known);
                    }
                } else if ledger.validate(0, &grefs).is_ok() {
                    ledger.record(0, grefs.iter().map(|gref| (*gref, Access::ReadOnly)));
                    let pages = list.iter().map(|g| page(*g, Access::ReadOnly)).collect();
                    prop_assert!(table.add(pages).is_ok());
                }
                prop_assert_eq!(table.len(), ledger.staged() as usize);
                prop_assert!(table.len() <= 24);
            }
        }
    }
}
