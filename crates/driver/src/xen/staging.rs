//! Limits of pages that stay mapped: staged pages of the vifs of one guest and of all guests, and pages of disks.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_access::staging::StagingPool;
use ringfence_platform::DomId;

/// Maximum number of pages that all rings together keep mapped. Each page is one mapping, and a process
/// can have 65530.
pub(super) const KEPT_PAGES_MAX: u32 = 49_152;
/// Pages that all vifs of one guest may have staged together.
const STAGED_PAGES_OF_GUEST: u32 = 4096;
/// Pages that all vifs together may have staged. With [`KEPT_PAGES_MAX`] this
/// leaves mappings for rings and stacks.
const STAGED_PAGES_MAX: u32 = 10_240;

/// Pools of staged pages: one for each guest, and one for all.
pub(super) struct Staging {
    all: Arc<StagingPool>,
    guests: BTreeMap<DomId, Arc<StagingPool>>,
}

impl Staging {
    pub(super) fn new() -> Staging {
        Staging { all: StagingPool::new(STAGED_PAGES_MAX), guests: BTreeMap::new() }
    }

    /// Returns the pools that a vif of `guest` counts in.
    pub(super) fn of(&mut self, guest: DomId) -> [Arc<StagingPool>; 2] {
        // Nobody counts in the pools of guests that are gone.
        self.guests.retain(|other, pool| *other == guest || Arc::strong_count(pool) > 1);
        let own =
            self.guests.entry(guest).or_insert_with(|| StagingPool::new(STAGED_PAGES_OF_GUEST));
        [Arc::clone(own), Arc::clone(&self.all)]
    }
}
