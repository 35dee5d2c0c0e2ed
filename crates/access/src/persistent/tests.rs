//! Tests of the persistent table with a granter that refuses some references.

use std::collections::HashMap;

use proptest::prelude::*;
use ringfence_platform::{CopyList, DomId, GrantStatus};

use super::*;

/// Granter of every reference below 5000; those that end in 7 are read-only.
#[derive(Default)]
struct Peer;

impl Grantee for Peer {
    fn granter(&self) -> DomId {
        DomId(1)
    }
    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>) {
        for (gref, access) in pages {
            out.push(if gref.0 >= 5000 {
                Err(GrantStatus::BadGref)
            } else if gref.0 % 10 == 7 && *access == Access::ReadWrite {
                Err(GrantStatus::PermissionDenied)
            } else {
                Ok(LentSlice::anonymous(4096))
            });
        }
    }
    fn copy(&mut self, _: CopyList<'_, '_>) {}
}

fn limits(pages: u16) -> PersistentLimits {
    PersistentLimits { pages, ..PersistentLimits::default() }
}

const MS: Duration = Duration::from_millis(1);

fn use_once(table: &mut PersistentTable, peer: &mut Peer, gref: u32, now: Duration) -> bool {
    match table.look_up(peer, Gref(gref), now) {
        Found::Kept { hold, .. } => {
            table.release(hold);
            true
        }
        Found::Over => false,
    }
}

#[test]
fn repeated_lookup_of_page_maps_it_once() {
    let (mut table, mut peer) = (PersistentTable::new(limits(1056)), Peer);
    for round in 0..100 {
        for gref in 8..1000 {
            let kept = use_once(&mut table, &mut peer, gref, round * MS);
            assert_eq!(kept, gref % 10 != 7, "what is lent read-only is not kept");
        }
    }
    let kept = (8..1000).filter(|gref| gref % 10 != 7).count();
    assert_eq!(table.len(), kept);
    let counters = table.counters();
    assert_eq!(counters.misses.get(), kept as u64);
    assert_eq!(counters.hits.get(), 99 * kept as u64);
    assert!(!use_once(&mut table, &mut peer, 6000, MS));
}

#[test]
fn xsa_300_endless_fresh_references_stay_within_limit() {
    let (mut table, mut peer) = (PersistentTable::new(limits(100)), Peer);
    let mut leaving = vec![];
    let fresh = (8..4000).filter(|gref| gref % 10 != 7);
    for (n, gref) in (0u32..).zip(fresh) {
        let now = n * 10 * MS;
        use_once(&mut table, &mut peer, gref, now);
        table.tidy(now, &mut leaving);
        assert!(table.len() <= 100);
    }
    let counters = table.counters();
    // Every 100 ms the table frees five positions.
    assert!(counters.purged.get() > 1500 && counters.over.get() > 1500, "{counters:?}");
    assert_eq!(leaving.len() as u64, counters.purged.get());
    let names: std::collections::HashSet<u64> = leaving.iter().map(|l| l.name).collect();
    assert_eq!(names.len(), leaving.len(), "no name is used twice");
}

#[test]
fn least_recently_used_page_is_evicted_and_page_in_use_stays() {
    let (mut table, mut peer) = (PersistentTable::new(limits(20)), Peer);
    let grefs: Vec<u32> = (10..40).filter(|gref| gref % 10 != 7).take(20).collect();
    for (n, gref) in (0u32..).zip(&grefs) {
        use_once(&mut table, &mut peer, *gref, n * MS);
    }
    let Found::Kept { hold, name: oldest, .. } = table.look_up(&mut peer, Gref(grefs[0]), MS)
    else {
        panic!()
    };
    assert!(!use_once(&mut table, &mut peer, 100, 30 * MS), "it is full");
    let mut leaving = vec![];
    table.tidy(30 * MS, &mut leaving);
    assert!(leaving.is_empty(), "not every time: {leaving:?}");
    table.tidy(130 * MS, &mut leaving);
    assert_eq!(leaving.len(), 1, "the twentieth part");
    assert_ne!(leaving[0].name, oldest);
    assert!(table.index.get(Gref(grefs[1])).is_none());
    table.shrink(&mut leaving);
    assert_eq!(table.len(), 1, "what is in use stays");
    table.release(hold);
    table.shrink(&mut leaving);
    assert_eq!((table.len(), leaving.len()), (0, 20));
}

#[test]
fn page_idle_for_a_minute_is_evicted() {
    let (mut table, mut peer) = (PersistentTable::new(limits(20)), Peer);
    let second = Duration::from_secs(1);
    use_once(&mut table, &mut peer, 8, Duration::ZERO);
    use_once(&mut table, &mut peer, 9, 30 * second);
    let mut leaving = vec![];
    table.tidy(59 * second, &mut leaving);
    assert!(leaving.is_empty());
    table.tidy(68 * second, &mut leaving);
    assert_eq!((leaving.len(), table.len()), (1, 1));
    table.tidy(99 * second, &mut leaving);
    assert_eq!((leaving.len(), table.len()), (2, 0));
    assert_eq!(table.counters().expired.get(), 2);
}

#[test]
fn lower_limit_evicts_the_least_recently_used_pages_and_those_in_use_later() {
    let (mut table, mut peer) = (PersistentTable::new(limits(20)), Peer);
    let Found::Kept { hold, name, .. } = table.look_up(&mut peer, Gref(8), Duration::ZERO) else {
        panic!()
    };
    for gref in (18..27).chain(28..30) {
        assert!(use_once(&mut table, &mut peer, gref, gref * MS));
    }
    let mut leaving = vec![];
    table.limit(1, &mut leaving);
    assert_eq!((table.len(), leaving.len()), (1, 11), "what is in use stays");
    assert_eq!(table.counters().limit.get(), 1);
    assert!(!use_once(&mut table, &mut peer, 30, 30 * MS), "there is no room");
    table.release(hold);
    table.limit(0, &mut leaving);
    assert_eq!((table.len(), leaving[11].name, table.counters().shrunk.get()), (0, name, 12));
    // No more than at the beginning.
    table.limit(100, &mut leaving);
    assert_eq!(table.counters().limit.get(), 20);
    assert!(use_once(&mut table, &mut peer, 30, 31 * MS));
    assert_eq!(leaving.len(), 12);
}

proptest! {
    #[test]
    fn table_stays_within_limit_and_keeps_pages_in_use(
        steps in prop::collection::vec((0u8..7, 8u32..60, 0u32..200), 0..400),
    ) {
        let (mut table, mut peer) = (PersistentTable::new(limits(16)), Peer);
        let mut held: HashMap<u32, Vec<(Use, u64)>> = HashMap::new();
        let mut leaving = vec![];
        let (mut now, mut most) = (Duration::ZERO, 16);
        for (what, gref, wait) in steps {
            now += wait * MS;
            let before = table.len();
            match what {
                0..3 => {
                    if let Found::Kept { hold, name, .. } = table.look_up(&mut peer, Gref(gref), now) {
                        let holders = held.entry(gref).or_default();
                        prop_assert!(holders.iter().all(|(_, other)| *other == name));
                        holders.push((hold, name));
                    }
                }
                3 => {
                    let holder = held.get_mut(&gref).and_then(Vec::pop);
                    holder.into_iter().for_each(|(hold, _)| table.release(hold));
                }
                4 => table.tidy(now, &mut leaving),
                5 => {
                    most = u16::try_from(wait % 17).unwrap();
                    table.limit(most, &mut leaving);
                }
                _ => table.shrink(&mut leaving),
            }
            prop_assert!(table.len() <= before.max(most.into()), "a page is entered below the limit only");
            if matches!(what, 4 | 5) {
                let in_use = held.values().filter(|holders| !holders.is_empty()).count();
                prop_assert!(table.len() <= in_use.max(most.into()), "a page beyond the limit is in use");
            }
            for (_, name) in held.values().flatten() {
                prop_assert!(leaving.iter().all(|left| left.name != *name));
            }
        }
    }
}
