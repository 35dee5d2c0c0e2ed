use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_platform::{DomId, WindowHandle, WindowShape};

use super::*;

const SHAPE: WindowShape = WindowShape { writable: 8, read_only: 16, entries: 6 };

/// State of a table whose grantee claims to use the references in `claimed`.
#[derive(Default)]
struct Shared {
    issued: BTreeMap<Gref, PageId>,
    claimed: Vec<Gref>,
    stale: Vec<PageId>,
    scrubs: u32,
    forced: Vec<Gref>,
}

#[derive(Clone, Default)]
struct Fake(std::sync::Arc<std::sync::Mutex<Shared>>);

impl Fake {
    fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.0.lock().unwrap()
    }
}

impl TranslationTable for Fake {
    fn engine(&self) -> EngineFacts {
        EngineFacts { name: "fake", one_sided: true, in_flight: "none", cost: "none" }
    }
    fn grantee(&self) -> DomId {
        DomId(0)
    }
    fn handle(&self) -> WindowHandle {
        WindowHandle(1)
    }
    fn shape(&self) -> WindowShape {
        SHAPE
    }
    fn memory(&self, _: PageId) -> Option<LentSlice> {
        Some(LentSlice::anonymous(64))
    }
    fn generation(&self, _: PageId) -> u32 {
        0
    }
    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError> {
        let mut shared = self.shared();
        assert!(!shared.issued.values().any(|known| *known == page));
        shared.stale.retain(|stale| *stale != page);
        Ok(())
    }
    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError> {
        let mut shared = self.shared();
        assert_eq!(SHAPE.access_of(page), Some(access));
        assert!(SHAPE.grefs().any(|known| known == gref));
        assert!(!shared.stale.contains(&page), "a stale page is issued");
        assert!(!shared.issued.values().any(|known| *known == page), "a page is issued twice");
        assert!(shared.issued.insert(gref, page).is_none(), "an entry is issued twice");
        Ok(())
    }
    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        let mut shared = self.shared();
        if shared.claimed.contains(&gref) {
            return Err(RevokeError::Busy);
        }
        let page = shared.issued.remove(&gref).ok_or(RevokeError::NotIssued)?;
        shared.stale.push(page);
        Ok(page)
    }
    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        let mut shared = self.shared();
        for gref in grefs {
            if shared.issued.remove(gref).is_some() {
                shared.forced.push(*gref);
            }
        }
        Ok(())
    }
    fn scrub(&mut self) -> Result<u32, RevokeError> {
        let mut shared = self.shared();
        shared.scrubs += 1;
        let count = shared.stale.drain(..).count();
        Ok(u32::try_from(count).unwrap())
    }
    fn held(&mut self) -> Held {
        Held::default()
    }
}

fn source(ready: u32, policy: SourcePolicy) -> (PageSource, Fake) {
    let fake = Fake::default();
    (PageSource::new(Box::new(fake.clone()), ready, policy), fake)
}

#[test]
fn last_used_page_is_granted_again_without_issue() {
    let (mut source, _fake) = source(4, SourcePolicy::default());
    let page = source.take(Access::ReadOnly).unwrap();
    let gref = source.lend(page).unwrap();
    source.give_back(page);
    for _ in 0..99 {
        let again = source.take(Access::ReadOnly).unwrap();
        assert_eq!(again, page);
        assert_eq!(source.lend(again), Ok(gref));
        source.give_back(again);
    }
    let levels = source.levels();
    assert_eq!((levels.reuse.hits, levels.reuse.misses), (99, 1));
    assert_eq!((levels.present, levels.in_use), (8, 0));
    assert!((levels.reuse.reused_share() - 0.99).abs() < 1e-9);
}

#[test]
fn issue_beyond_entries_evicts_unused_page() {
    let (mut source, fake) = source(0, SourcePolicy::default());
    let mut pages: Vec<PageId> = (0..16).map(|_| source.take(Access::ReadOnly).unwrap()).collect();
    for page in pages.drain(..) {
        source.lend(page).unwrap();
        source.give_back(page);
    }
    let stats = source.levels().reuse;
    assert_eq!((stats.misses, stats.evictions), (16, 10));
    assert_eq!(fake.shared().issued.len(), 6);
    // All entries are in use.
    let used: Vec<PageId> = (0..6).map(|_| source.take(Access::ReadOnly).unwrap()).collect();
    assert!(used.iter().all(|page| source.lend(*page).is_ok()));
    let one_more = source.take(Access::ReadWrite).unwrap();
    assert_eq!(source.lend(one_more), Err(GrantError::Full { entries: 6 }));
    source.give_back(used[0]);
    assert!(source.lend(one_more).is_ok());
}

#[test]
fn page_claimed_by_grantee_is_not_evicted() {
    let (mut source, fake) = source(0, SourcePolicy::default());
    let pages: Vec<PageId> = (0..7).map(|_| source.take(Access::ReadOnly).unwrap()).collect();
    let grefs: Vec<Gref> = pages[..6].iter().map(|page| source.lend(*page).unwrap()).collect();
    pages[..6].iter().for_each(|page| source.give_back(*page));
    fake.shared().claimed = grefs[..5].to_vec();
    assert_eq!(source.lend(pages[6]), Ok(grefs[5]), "the only one that is free");
    assert!(source.levels().reuse.busy <= 12, "each is asked at most twice");
}

#[test]
fn resized_pool_returns_memory_and_grows_on_demand() {
    let (mut source, fake) = source(8, SourcePolicy::default());
    let pages: Vec<PageId> = (0..6).map(|_| source.take(Access::ReadOnly).unwrap()).collect();
    assert!(pages.iter().all(|page| source.lend(*page).is_ok()));
    pages[2..].iter().for_each(|page| source.give_back(*page));
    assert_eq!(source.resize(3), Ok(5 + 5), "5 of 8 of each kind");
    assert_eq!(fake.shared().scrubs, 1);
    assert_eq!(fake.shared().issued.len(), 3, "two in use, and the hottest");
    assert_eq!(source.levels().present, 6);
    assert_eq!(source.available(Access::ReadOnly), 1);
    // A page in use leaves when it is given back.
    source.resize(1).unwrap();
    pages[..2].iter().for_each(|page| source.give_back(*page));
    assert_eq!((source.levels().present, fake.shared().issued.len()), (2, 1));
    assert!(fake.shared().stale.is_empty());
    source.resize(100).unwrap();
    assert_eq!(source.available(Access::ReadOnly), 6, "as many as there are entries");
    assert_eq!(source.levels().present, 2, "it grows when it is needed");
    while source.take(Access::ReadOnly).is_some() {}
    assert_eq!(source.levels().in_use, 16);
}

#[test]
fn page_held_beyond_limit_is_revoked_and_reported() {
    let policy = SourcePolicy { hold_limit: Duration::ZERO, ..SourcePolicy::default() };
    let (mut source, fake) = source(8, policy);
    let page = source.take(Access::ReadOnly).unwrap();
    let gref = source.lend(page).unwrap();
    source.give_back(page);
    fake.shared().claimed = vec![gref];
    source.resize(0).unwrap();
    assert_eq!(source.levels().held, 1);
    let report = source.reclaim().unwrap_err();
    assert_eq!(report, HeldTooLong { pages: 1, hold_limit: Duration::ZERO });
    assert_eq!(fake.shared().forced, [gref]);
    assert_eq!(source.levels().held, 0);
    assert_eq!(source.reclaim(), Ok(()));
}

#[test]
fn page_released_within_limit_is_reclaimed() {
    let (mut source, fake) = source(8, SourcePolicy::default());
    let page = source.take(Access::ReadOnly).unwrap();
    let gref = source.lend(page).unwrap();
    source.give_back(page);
    fake.shared().claimed = vec![gref];
    source.resize(0).unwrap();
    assert_eq!(source.reclaim(), Ok(()));
    fake.shared().claimed.clear();
    assert_eq!(source.reclaim(), Ok(()));
    assert_eq!((source.levels().held, source.levels().present), (0, 0));
    assert!(fake.shared().issued.is_empty() && fake.shared().forced.is_empty());
}

#[test]
fn churn_exchanges_pages_and_keeps_reuse_high() {
    let policy = SourcePolicy { churn: 200, ..SourcePolicy::default() };
    let (mut source, _fake) = source(4, policy);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..10_000 {
        let page = source.take(Access::ReadOnly).unwrap();
        source.lend(page).unwrap();
        source.give_back(page);
        seen.insert(page);
    }
    assert_eq!(seen.len(), 13, "all pages but the three at the bottom of the pool");
    assert!(source.levels().reuse.reused_share() >= 0.99);
}

#[test]
fn revoked_page_is_fresh_at_once_with_strict_revocation_alone() {
    for (revocation, stale) in [(Revocation::Plain, 1), (Revocation::Strict, 0)] {
        // Each page that is given back is exchanged for another.
        let policy = SourcePolicy { churn: 1, revocation, ..SourcePolicy::default() };
        let (mut source, fake) = source(4, policy);
        let page = source.take(Access::ReadOnly).unwrap();
        source.lend(page).unwrap();
        source.give_back(page);
        assert!(fake.shared().issued.is_empty(), "the page was revoked");
        assert_eq!(fake.shared().stale.len(), stale, "{revocation:?}");
    }
}

#[test]
fn evicted_page_is_fresh_at_once_with_strict_revocation() {
    let policy = SourcePolicy { revocation: Revocation::Strict, ..SourcePolicy::default() };
    let (mut source, fake) = source(8, policy);
    let entries = SHAPE.entries as usize;
    let pages: Vec<PageId> = (0..=entries).map_while(|_| source.take(Access::ReadOnly)).collect();
    assert!(pages.len() > entries, "there are more pages than entries");
    for page in pages {
        source.lend(page).unwrap();
        source.give_back(page);
    }
    assert_eq!(source.levels().reuse.evictions, 1);
    assert!(fake.shared().stale.is_empty());
}

#[test]
fn reset_revokes_every_grant() {
    let (mut source, fake) = source(4, SourcePolicy::default());
    let pages: Vec<PageId> = (0..5).map(|_| source.take(Access::ReadOnly).unwrap()).collect();
    let grefs: Vec<Gref> = pages.iter().map(|page| source.lend(*page).unwrap()).collect();
    fake.shared().claimed = grefs;
    source.reset();
    assert!(fake.shared().issued.is_empty());
    assert_eq!((source.levels().in_use, source.available(Access::ReadOnly)), (0, 6));
}

proptest! {
    #[test]
    fn page_is_never_issued_or_taken_twice(
        steps in prop::collection::vec((0u8..6, any::<bool>(), 0u32..24), 0..300),
    ) {
        // The fake asserts that no page is issued twice or without preparation.
        let policy = SourcePolicy {
            churn: 3,
            hold_limit: Duration::from_secs(60),
            ..SourcePolicy::default()
        };
        let (mut source, fake) = source(2, policy);
        let mut taken: Vec<(PageId, bool)> = Vec::new();
        for (kind, writable, number) in steps {
            let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
            match kind {
                0 => if let Some(page) = source.take(access) {
                    prop_assert!(!taken.iter().any(|(known, _)| *known == page));
                    prop_assert_eq!(SHAPE.access_of(page), Some(access));
                    taken.push((page, false));
                },
                1 => if let Some((page, lent)) = taken.last_mut() {
                    *lent |= !*lent && source.lend(*page).is_ok();
                },
                2 => if !taken.is_empty() {
                    let (page, lent) = taken.remove(number as usize % taken.len());
                    if lent { source.give_back(page) } else { source.put(page) }
                },
                3 => drop(source.resize(number)),
                4 => {
                    let grefs: Vec<Gref> = fake.shared().issued.keys().copied().collect();
                    fake.shared().claimed = grefs.into_iter().take(number as usize % 3).collect();
                },
                _ => prop_assert!(source.reclaim().is_ok()),
            }
            let levels = source.levels();
            prop_assert!(levels.present <= 24);
            prop_assert!(levels.in_use as usize >= taken.len());
            prop_assert!(fake.shared().issued.len() <= 6);
            for (page, _) in taken.iter().filter(|(_, lent)| *lent) {
                prop_assert!(fake.shared().issued.values().any(|known| known == page));
            }
        }
    }
}

#[test]
fn window_under_pressure_keeps_half_a_ring_first_and_three_packets_at_least() {
    let mut share = Share::WHOLE;
    let kept = [(); 4].map(|()| {
        let kept = pages_under_pressure(share, 1024);
        share = share.halved();
        kept
    });
    assert_eq!(kept, [1024, 128, 64, 64]);
    // A window below the minimum stays as it is.
    assert_eq!(pages_under_pressure(share, 20), 20);
}
