//! Limits of pages that stay mapped: staged pages of the vifs of one guest and of all guests, and pages of disks.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_access::staging::StagingPool;
use ringfence_platform::DomId;
use ringfence_sys::pressure::Share;

/// Maximum number of pages that all rings together keep mapped. Each page is one mapping, and a process
/// can have 65530.
pub(super) const KEPT_PAGES_MAX: u32 = 49_152;
/// Pages that all vifs of one guest may have staged together.
const STAGED_PAGES_OF_GUEST: u32 = 4096;
/// Pages that all vifs together may have staged. With [`KEPT_PAGES_MAX`] this
/// leaves mappings for rings and stacks.
const STAGED_PAGES_MAX: u32 = 10_240;

/// Pages that a guest may stage under memory pressure: those of both rings of a queue.
const STAGED_PAGES_LEAST: u32 = 512;

/// Returns the number of pages that a guest may stage.
fn limit(share: Share) -> u32 {
    share.of(STAGED_PAGES_OF_GUEST, STAGED_PAGES_LEAST)
}

/// Pools of staged pages: one for each guest, and one for all.
pub(super) struct Staging {
    all: Arc<StagingPool>,
    guests: BTreeMap<DomId, Arc<StagingPool>>,
    /// Share of a guest's pages that memory pressure leaves.
    share: Share,
}

impl Staging {
    pub(super) fn new() -> Staging {
        let all = StagingPool::new(STAGED_PAGES_MAX);
        Staging { all, guests: BTreeMap::new(), share: Share::WHOLE }
    }

    /// Sets the share of its pages that each guest may stage. The pool of all guests has its full size, so no guest takes the
    /// part of another one. Staged pages stay.
    pub(super) fn set_share(&mut self, share: Share) {
        self.share = share;
        self.guests.values().for_each(|pool| pool.set_limit(limit(share)));
    }

    /// Returns the pools that a vif of `guest` counts in.
    pub(super) fn of(&mut self, guest: DomId) -> [Arc<StagingPool>; 2] {
        // Nobody counts in the pools of guests that are gone.
        self.guests.retain(|other, pool| *other == guest || Arc::strong_count(pool) > 1);
        let limit = limit(self.share);
        let own = self.guests.entry(guest).or_insert_with(|| StagingPool::new(limit));
        [Arc::clone(own), Arc::clone(&self.all)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_limits_each_guest_and_not_the_pool_of_all() {
        let mut staging = Staging::new();
        let [before, all] = staging.of(DomId(1));
        staging.set_share(Share::WHOLE.halved());
        let [later, _] = staging.of(DomId(2));
        assert_eq!([before.limit(), later.limit()], [STAGED_PAGES_OF_GUEST / 2; 2]);
        assert_eq!(all.limit(), STAGED_PAGES_MAX);
        staging.set_share(Share::WHOLE);
        assert_eq!([before.limit(), later.limit()], [STAGED_PAGES_OF_GUEST; 2]);
    }
}
