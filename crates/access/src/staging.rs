//! Staging grants: pages that a frontend asks a backend to keep mapped.
//!
//! # Theory of operation
//!
//! The frontend names pages in lists over netif's control ring. The backend maps them once, and any
//! slot of either ring of that queue that names such a page costs a look-up and nothing else: no
//! mapping, no copy by the platform, no unmapping. What is not in the table is reached as before.
//!
//! Two sides of the backend have a part in this:
//!
//! * The control side judges lists and maps and unmaps, which takes system calls. Its
//!   [`StagingLedger`] knows what is staged, and holds queues and guest to their bounds.
//! * The data side looks up, in its [`StagingTable`]. It gets pages and gives them back between two
//!   rounds, when no frame refers to any page. So a page that leaves the table is in nobody's hands,
//!   and whoever dropped the last handle to it has unmapped it: nothing is ever unmapped under an I/O.
//!
//! Pages that leave the table go back to the control side. It drops them and only then answers the
//! frontend: when the frontend reads the response, nothing of the backend reaches the page.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Gref};

use crate::index::{EnterError, GREF_LIMIT, GrefIndex};

/// A page that is kept mapped.
#[derive(Clone, Debug)]
pub struct StagedPage {
    /// Its reference.
    pub gref: Gref,
    /// What it was mapped for.
    pub access: Access,
    /// The page.
    pub memory: LentSlice,
}

/// The pages of a queue that are kept mapped, for whoever works on its rings.
#[derive(Default)]
pub struct StagingTable {
    index: GrefIndex,
    pages: Vec<Option<StagedPage>>,
    free: Vec<u16>,
}

impl StagingTable {
    /// An empty table.
    pub fn new() -> StagingTable {
        StagingTable::default()
    }

    /// Pages in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether it has no page.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The page of `gref`, if it was staged for at least `access`. A page that was staged for
    /// reading is not written through the table, even if its grant would allow it.
    #[inline]
    pub fn get(&self, gref: Gref, access: Access) -> Option<&LentSlice> {
        let place = self.index.get(gref)?;
        let page = self.pages.get(usize::from(place))?.as_ref()?;
        let allowed = access == Access::ReadOnly || page.access == Access::ReadWrite;
        allowed.then_some(&page.memory)
    }

    /// Adds pages, all or none.
    ///
    /// # Errors
    ///
    /// The pages back, with the reason.
    pub fn add(&mut self, pages: Vec<StagedPage>) -> Result<(), (Vec<StagedPage>, EnterError)> {
        for (done, page) in pages.iter().enumerate() {
            let place = match self.free.pop() {
                Some(place) => place,
                // The index refuses what is no place.
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

    /// Takes the page of `gref` out.
    pub fn take(&mut self, gref: Gref) -> Option<StagedPage> {
        let place = self.index.remove(gref)?;
        self.free.push(place);
        self.pages.get_mut(usize::from(place))?.take()
    }
}

/// Bounds of what is kept mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingLimits {
    /// Pages of one queue.
    pub per_queue: u32,
    /// Pages of one guest, over all its queues.
    pub per_guest: u32,
}

impl Default for StagingLimits {
    /// A queue has 512 slots on its two rings; what it stages beyond twice as many is of no use to
    /// it.
    fn default() -> Self {
        StagingLimits { per_queue: 1024, per_guest: 4096 }
    }
}

/// Limit of staged pages over several vifs. Each page is a mapping, of which a process has a limited
/// number.
#[derive(Debug)]
pub struct StagingPool {
    used: Mutex<u32>,
    limit: u32,
}

impl StagingPool {
    /// Makes an empty pool for `limit` pages.
    pub fn new(limit: u32) -> Arc<StagingPool> {
        Arc::new(StagingPool { used: Mutex::new(0), limit })
    }

    /// Returns the number of pages that are staged.
    pub fn used(&self) -> u32 {
        *self.count()
    }

    fn count(&self) -> MutexGuard<'_, u32> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a list was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LedgerRefusal {
    /// There is no such queue.
    #[error("queue {queue} of {queues}")]
    Queue {
        /// The queue asked for.
        queue: u32,
        /// Queues there are.
        queues: u32,
    },
    /// It would be more than the queue may have.
    #[error("{wanted} pages more, beside {staged}; a queue may have {limit}")]
    QueueFull {
        /// Pages asked for.
        wanted: u32,
        /// Pages staged.
        staged: u32,
        /// Pages allowed.
        limit: u32,
    },
    /// It would be more than the guest may have.
    #[error("{wanted} pages more, beside {staged} of all queues; a guest may have {limit}")]
    GuestFull {
        /// Pages asked for.
        wanted: u32,
        /// Pages staged.
        staged: u32,
        /// Pages allowed.
        limit: u32,
    },
    /// It would be more than all vifs of a guest, or of this process, may have.
    #[error(
        "{wanted} pages more, beside {staged} of other vifs too; together they may have {limit}"
    )]
    PoolFull {
        /// Pages asked for.
        wanted: u32,
        /// Pages staged.
        staged: u32,
        /// Pages allowed.
        limit: u32,
    },
    /// The page is staged already, or comes twice in the list.
    #[error("{gref} is staged already")]
    Twice {
        /// The page.
        gref: Gref,
    },
    /// No table of grants is that long.
    #[error("{gref} is not below {GREF_LIMIT}")]
    TooLarge {
        /// The reference.
        gref: Gref,
    },
}

impl LedgerRefusal {
    /// A name for counters.
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

/// What is staged, by queue, for whoever judges lists.
pub struct StagingLedger {
    queues: Vec<HashMap<Gref, Access>>,
    limits: StagingLimits,
    /// Pools that every staged page counts in.
    pools: Vec<Arc<StagingPool>>,
}

impl StagingLedger {
    /// Nothing is staged.
    pub fn new(queues: u32, limits: StagingLimits) -> StagingLedger {
        let queues = (0..queues).map(|_| HashMap::new()).collect();
        StagingLedger { queues, limits, pools: Vec::new() }
    }

    /// Counts in these pools, too, from now on. One thread judges and notes for all ledgers of a pool.
    pub fn share(&mut self, pools: Vec<Arc<StagingPool>>) {
        self.release(self.staged());
        self.pools = pools;
        self.reserve(self.staged());
    }

    fn reserve(&self, pages: u32) {
        for pool in &self.pools {
            *pool.count() += pages;
        }
    }

    fn release(&self, pages: u32) {
        for pool in &self.pools {
            *pool.count() -= pages;
        }
    }

    /// Most pages that `queue` may have staged, whatever is staged now.
    ///
    /// # Errors
    ///
    /// [`LedgerRefusal::Queue`]
    pub fn limit(&self, queue: u32) -> Result<u32, LedgerRefusal> {
        self.place(queue)?;
        Ok(self.limits.per_queue.min(self.limits.per_guest))
    }

    /// Pages staged, over all queues.
    pub fn staged(&self) -> u32 {
        let all: usize = self.queues.iter().map(HashMap::len).sum();
        u32::try_from(all).unwrap_or(u32::MAX)
    }

    fn place(&self, queue: u32) -> Result<usize, LedgerRefusal> {
        let queues = u32::try_from(self.queues.len()).unwrap_or(u32::MAX);
        let found = usize::try_from(queue).ok().filter(|_| queue < queues);
        found.ok_or(LedgerRefusal::Queue { queue, queues })
    }

    /// Whether `list` may be staged for `queue`, as a whole. Nothing is noted yet.
    ///
    /// # Errors
    ///
    /// [`LedgerRefusal`]: the first rule that is broken.
    pub fn judge(&self, queue: u32, list: &[Gref]) -> Result<(), LedgerRefusal> {
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
        let full = |pool: &&Arc<StagingPool>| pool.used().saturating_add(wanted) > pool.limit;
        if let Some(pool) = self.pools.iter().find(full) {
            let (staged, limit) = (pool.used(), pool.limit);
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

    /// Notes that `list`, which was [judged](StagingLedger::judge), is staged.
    pub fn note(&mut self, queue: u32, list: impl IntoIterator<Item = (Gref, Access)>) {
        let before = self.staged();
        if let Ok(place) = self.place(queue) {
            self.queues[place].extend(list);
        }
        self.reserve(self.staged() - before);
    }

    /// What is staged for each queue, in no order.
    pub fn all(&self) -> impl Iterator<Item = impl Iterator<Item = (Gref, Access)> + '_> + '_ {
        self.queues.iter().map(|queue| queue.iter().map(|(gref, access)| (*gref, *access)))
    }

    /// Strikes those of `list` out that are staged, and says of each what it was staged for. A
    /// second mention of one finds it gone.
    ///
    /// # Errors
    ///
    /// [`LedgerRefusal::Queue`]
    pub fn strike(
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
    fn a_page_staged_for_reading_is_not_written_through_the_table() {
        let mut table = StagingTable::new();
        table.add(vec![page(8, Access::ReadOnly), page(9, Access::ReadWrite)]).unwrap();
        assert!(table.get(Gref(8), Access::ReadOnly).is_some());
        assert!(table.get(Gref(8), Access::ReadWrite).is_none());
        assert!(table.get(Gref(9), Access::ReadWrite).is_some());
        assert!(table.get(Gref(10), Access::ReadOnly).is_none());
    }

    #[test]
    fn adding_is_all_or_nothing() {
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
    fn ledgers_of_one_pool_stay_below_its_limit_together() {
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
        one.judge(0, &grefs(4)).unwrap();
        one.note(0, noted(4));
        let refused = two.judge(0, &grefs(3)).unwrap_err();
        assert_eq!(refused, LedgerRefusal::PoolFull { wanted: 3, staged: 4, limit: 6 });
        assert_eq!(refused.label(), "staging_pool_full");
        two.judge(0, &grefs(2)).unwrap();
        two.note(0, noted(2));
        // Another guest has what the process has left.
        assert!(matches!(other.judge(0, &grefs(3)), Err(LedgerRefusal::PoolFull { limit: 8, .. })));
        other.judge(0, &grefs(2)).unwrap();
        one.strike(0, &grefs(2)).unwrap();
        assert_eq!((guest.used(), process.used()), (4, 4));
        drop((one, two));
        assert_eq!((guest.used(), process.used()), (0, 0));
        other.judge(0, &grefs(5)).unwrap();
    }

    #[test]
    fn the_ledger_holds_queue_and_guest_to_their_bounds() {
        let limits = StagingLimits { per_queue: 4, per_guest: 6 };
        let mut ledger = StagingLedger::new(2, limits);
        let grefs = |range: core::ops::Range<u32>| range.map(Gref).collect::<Vec<_>>();
        assert!(matches!(ledger.judge(2, &grefs(0..1)), Err(LedgerRefusal::Queue { .. })));
        assert!(matches!(ledger.judge(0, &grefs(0..5)), Err(LedgerRefusal::QueueFull { .. })));
        ledger.judge(0, &grefs(0..4)).unwrap();
        ledger.note(0, grefs(0..4).into_iter().map(|gref| (gref, Access::ReadOnly)));
        assert!(matches!(ledger.judge(1, &grefs(0..3)), Err(LedgerRefusal::GuestFull { .. })));
        // The same page may serve two queues.
        ledger.judge(1, &grefs(0..2)).unwrap();
        let read = Some(Access::ReadOnly);
        assert_eq!(ledger.strike(0, &grefs(2..6)), Ok(vec![read, read, None, None]));
        assert_eq!(ledger.staged(), 2);
        let twice = [Gref(9), Gref(9)];
        assert_eq!(ledger.judge(0, &twice), Err(LedgerRefusal::Twice { gref: Gref(9) }));
        assert_eq!(ledger.strike(1, &twice), Ok(vec![None, None]));
        let large = [Gref(GREF_LIMIT)];
        assert!(matches!(ledger.judge(0, &large), Err(LedgerRefusal::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn what_the_ledger_lets_pass_the_table_takes(
            lists in prop::collection::vec((any::<bool>(), prop::collection::vec(0u32..40, 1..12)), 0..60),
        ) {
            let mut ledger = StagingLedger::new(1, StagingLimits { per_queue: 24, per_guest: 24 });
            let mut table = StagingTable::new();
            for (add, list) in lists {
                let grefs: Vec<Gref> = list.iter().copied().map(Gref).collect();
                if !add {
                    let known = ledger.strike(0, &grefs).unwrap();
                    for (gref, known) in grefs.iter().zip(known) {
                        prop_assert_eq!(table.take(*gref).map(|page| page.access), known);
                    }
                } else if ledger.judge(0, &grefs).is_ok() {
                    ledger.note(0, grefs.iter().map(|gref| (*gref, Access::ReadOnly)));
                    let pages = list.iter().map(|g| page(*g, Access::ReadOnly)).collect();
                    prop_assert!(table.add(pages).is_ok());
                }
                prop_assert_eq!(table.len(), ledger.staged() as usize);
                prop_assert!(table.len() <= 24);
            }
        }
    }
}
