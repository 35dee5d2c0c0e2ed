//! Revocation on the local platform: quarantine, generations, limits, and no use after revocation.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::collections::HashMap;

use ringfence_memory::LentSlice;
use ringfence_platform::local::raw::pin::PinnedPage;
use ringfence_platform::local::raw::{RawArena, RawDomain};
use ringfence_platform::local::{
    ArenaFault, ArenaShape, LocalGrantee, LocalGranter, LocalPlatform,
};
use ringfence_platform::local::{MAPPED_MAX, Refusal};
use ringfence_platform::{
    Access, DomId, GrantStatus, Grantee, Granter, Gref, Lease, LendError, Platform, PlatformError,
    RevokeError,
};

use common::Machine;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Guest that lends to the toolstack, and the toolstack's end.
struct Pair {
    machine: Machine,
    guest: LocalPlatform,
    granter: LocalGranter,
    grantee: LocalGrantee,
}

impl Pair {
    fn new(shape: ArenaShape) -> Pair {
        let machine = Machine::new();
        let guest = machine.guest().with_arena(shape);
        let granter = guest.granter(DomId(0)).unwrap();
        let grantee = machine.toolstack.grantee(guest.domid()).unwrap();
        Pair { machine, guest, granter, grantee }
    }

    fn map(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let mut out = Vec::new();
        self.grantee.map(&[(gref, access)], &mut out);
        out.pop().unwrap()
    }

    fn lend_all(&mut self, access: Access) -> Vec<Lease> {
        std::iter::from_fn(|| self.granter.lend(access).ok()).collect()
    }

    fn take_back_all(&mut self, leases: Vec<Lease>) {
        for lease in leases {
            self.granter.take_back(lease).unwrap();
        }
    }
}

fn tag(page: &LentSlice) -> u64 {
    u64::from_le_bytes(page.fetch::<8>(0).unwrap().into_unchecked())
}

fn set_tag(page: &LentSlice, tag: u64) {
    page.copy_from(0, &tag.to_le_bytes()).unwrap();
}

fn refused(outcome: Result<LocalGranter, PlatformError>) -> Refusal {
    match outcome.err() {
        Some(PlatformError::Refused { source, .. }) => *source.downcast().unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Pins page 0 of an arena's file in a huge page. Returns `None` after a report if the kernel refuses that.
fn pin_first_page(file: std::os::fd::RawFd) -> Option<PinnedPage> {
    match PinnedPage::in_huge_page(&file, 0) {
        Ok(pin) => Some(pin),
        Err(error) => {
            eprintln!("SKIPPED: MADV_COLLAPSE is refused ({error})");
            None
        }
    }
}

/// A backend that collapses the arena and pins a part of the huge page would see what is lent there next. No Xen
/// counterpart: a hypervisor unmaps.
#[test]
fn page_pinned_in_huge_page_is_not_lent_again_until_pin_ends() {
    let mut pair = Pair::new(ArenaShape::of(512, 512));
    let mut leases = pair.lend_all(Access::ReadWrite);
    assert_eq!(leases.len(), 512);
    leases.iter().for_each(|lease| set_tag(lease.memory(), 1));
    // The first page of the file is lent first.
    let victim = leases.remove(0);
    let Some(pin) = pin_first_page(pair.granter.descriptors()[0]) else { return };
    pair.granter.revoke_forced(vec![victim]).unwrap();
    for _ in 0..3 {
        let refused = pair.granter.lend(Access::ReadWrite).err();
        assert_eq!(refused, Some(LendError::NoPage { limit: 512 }));
        assert_eq!(pair.granter.quarantined(), 1);
    }
    assert_eq!(pin.read().unwrap(), 0);
    let again = pair.granter.lend(Access::ReadWrite).unwrap();
    assert_eq!((again.generation(), tag(again.memory())), (1, 0));
    assert_eq!(pair.granter.quarantined(), 0);
    assert!(leases.iter().all(|lease| tag(lease.memory()) == 1));
}

#[test]
fn arena_lends_every_page_once_and_then_refuses() {
    let mut pair = Pair::new(ArenaShape::of(5, 3));
    for round in 0..3 {
        let writable = pair.lend_all(Access::ReadWrite);
        assert_eq!(writable.len(), 5, "round {round}");
        assert_eq!(
            pair.granter.lend(Access::ReadWrite).err(),
            Some(LendError::NoPage { limit: 5 })
        );
        let read_only = pair.lend_all(Access::ReadOnly);
        assert_eq!(read_only.len(), 3, "round {round}");
        let mut grefs: Vec<Gref> =
            writable.iter().chain(&read_only).map(ringfence_platform::Lease::gref).collect();
        grefs.sort();
        assert_eq!(grefs, (8..16).map(Gref).collect::<Vec<_>>(), "each once, none reserved");
        pair.take_back_all(writable);
        pair.take_back_all(read_only);
    }
}

#[test]
fn lend_without_free_reference_returns_no_reference() {
    let mut pair = Pair::new(ArenaShape { writable: 4, read_only: 4, references: 11 });
    let leases = pair.lend_all(Access::ReadOnly);
    assert_eq!(leases.len(), 3);
    let why = pair.granter.lend(Access::ReadWrite).err();
    assert_eq!(why, Some(LendError::NoReference { limit: 11 }));
    pair.take_back_all(leases);
    assert_eq!(pair.lend_all(Access::ReadWrite).len(), 3, "no page was lost by the refusal");
}

#[test]
fn arena_over_shape_limit_or_domain_quota_is_refused() {
    let machine = Machine::new();
    let [a, b] = [machine.guest(), machine.guest()];
    let with = |shape| machine.guest().with_arena(shape);
    let fault = |shape| match with(shape).granter(DomId(0)).err() {
        Some(PlatformError::BadArena { source, .. }) => *source.downcast::<ArenaFault>().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(fault(ArenaShape::of(0, 0)), ArenaFault::Empty);
    assert_eq!(fault(ArenaShape { references: 8, ..ArenaShape::of(1, 1) }), ArenaFault::Empty);
    for shape in [ArenaShape::of(16385, 0), ArenaShape::of(0, u32::MAX)] {
        assert!(matches!(fault(shape), ArenaFault::TooLarge { .. }), "{shape:?}");
    }
    // The quota is 64 MiB for each domain, over all of its peers.
    let greedy = with(ArenaShape::of(4000, 4000));
    greedy.granter(DomId(0)).unwrap();
    greedy.granter(a.domid()).unwrap();
    assert_eq!(refused(greedy.granter(b.domid())), Refusal::Quota);
    assert_eq!(refused(a.granter(DomId(999))), Refusal::NotFound);
    // A second call for the same peer returns the same arena.
    greedy.granter(DomId(0)).unwrap();
}

#[test]
fn map_of_reserved_gref_is_refused() {
    let mut pair = Pair::new(ArenaShape::of(2, 2));
    let _lease = pair.granter.lend(Access::ReadWrite).unwrap();
    for gref in 0..8 {
        assert_eq!(pair.map(Gref(gref), Access::ReadOnly).err(), Some(GrantStatus::BadGref));
    }
}

#[test]
fn take_back_of_page_in_use_returns_same_lease() {
    let mut pair = Pair::new(ArenaShape::of(2, 2));
    let lease = pair.granter.lend(Access::ReadWrite).unwrap();
    set_tag(lease.memory(), 5);
    let gref = lease.gref();
    let page = pair.map(gref, Access::ReadWrite).unwrap();
    let still = pair.granter.take_back(lease).unwrap_err();
    assert_eq!(
        (still.why, still.lease.gref(), tag(still.lease.memory())),
        (RevokeError::Busy, gref, 5)
    );
    // The grant stays valid: the peer may begin further uses.
    let again = pair.map(gref, Access::ReadWrite).unwrap();
    drop(page);
    let still = pair.granter.take_back(still.lease).unwrap_err();
    drop(again);
    pair.granter.take_back(still.lease).unwrap();
    assert_eq!(pair.map(gref, Access::ReadOnly).err(), Some(GrantStatus::BadGref));
}

#[test]
fn forced_revocation_quarantines_page_until_peer_unmaps_it() {
    let mut pair = Pair::new(ArenaShape::of(3, 0));
    let lease = pair.granter.lend(Access::ReadWrite).unwrap();
    let (gref, generation) = (lease.gref(), lease.generation());
    set_tag(lease.memory(), 5);
    let page = pair.map(gref, Access::ReadWrite).unwrap();
    pair.granter.revoke_forced(vec![lease]).unwrap();
    assert_eq!((tag(&page), pair.granter.quarantined()), (0, 1));
    for round in 0..3 {
        let leases = pair.lend_all(Access::ReadWrite);
        assert_eq!(leases.len(), 2, "round {round}: one page is in quarantine");
        for lease in &leases {
            assert_ne!(lease.gref(), gref);
            set_tag(lease.memory(), 6);
        }
        assert_eq!(tag(&page), 0, "no other page is under the old mapping");
        pair.take_back_all(leases);
    }
    drop(page);
    let leases = pair.lend_all(Access::ReadWrite);
    assert_eq!((leases.len(), pair.granter.quarantined()), (3, 0));
    let mut generations: Vec<u32> = leases.iter().map(Lease::generation).collect();
    generations.sort_unstable();
    assert_eq!(generations, [generation, generation, generation + 1]);
}

#[test]
fn forced_revocation_of_unused_page_returns_it_at_once() {
    let mut pair = Pair::new(ArenaShape::of(1, 1));
    for generation in 0..10 {
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let lease = pair.granter.lend(access).unwrap();
            assert_eq!((lease.generation(), tag(lease.memory())), (generation, 0));
            set_tag(lease.memory(), 5);
            pair.granter.revoke_forced(vec![lease]).unwrap();
        }
    }
    assert_eq!(pair.granter.quarantined(), 0);
}

#[test]
fn uses_of_exited_toolstack_end_with_it() {
    let mut pair = Pair::new(ArenaShape::of(4, 0));
    let leases = pair.lend_all(Access::ReadWrite);
    for lease in &leases {
        // No process lowers the status of these grants, as after a kill.
        std::mem::forget(pair.map(lease.gref(), Access::ReadWrite).unwrap());
    }
    pair.granter.revoke_forced(leases).unwrap();
    assert_eq!((pair.granter.quarantined(), pair.lend_all(Access::ReadWrite).len()), (4, 0));
    let Pair { mut machine, guest, mut granter, .. } = pair;
    machine.restart_toolstack();
    // The next domain 0 finds the same arena, without a use.
    let lease = granter.lend(Access::ReadWrite).unwrap();
    set_tag(lease.memory(), 9);
    let mut out = Vec::new();
    let mut grantee = machine.toolstack.grantee(guest.domid()).unwrap();
    grantee.map(&[(lease.gref(), Access::ReadOnly)], &mut out);
    assert_eq!(tag(out[0].as_ref().unwrap()), 9);
    assert_eq!(granter.quarantined(), 0);
}

/// Checks that a hostile user of the status words can only keep pages from being taken back, and, after a
/// forced revocation, from being lent to itself again.
#[test]
fn user_that_never_lowers_status_words_blocks_only_its_own_pages() {
    let machine = Machine::new();
    let (id, socket) = machine.hub.admit(None, false).unwrap();
    let mut hostile = RawDomain::join(socket).unwrap();
    let guest = machine.guest().with_arena(ArenaShape::of(4, 4));
    let mut granter = guest.granter(id).unwrap();
    let arena = hostile.fetch(guest.domid()).unwrap();
    for gref in 0..16 {
        arena.set_status(gref, 1);
    }
    let mut leases: Vec<Lease> =
        std::iter::from_fn(|| granter.lend(Access::ReadWrite).ok()).collect();
    assert_eq!(leases.len(), 4, "status words of grants never issued block a page");
    let busy = granter.take_back(leases.pop().unwrap()).unwrap_err();
    assert_eq!(busy.why, RevokeError::Busy);
    leases.push(busy.lease);
    granter.revoke_forced(leases).unwrap();
    assert_eq!(granter.quarantined(), 4);
    assert_eq!(granter.lend(Access::ReadWrite).err(), Some(LendError::NoPage { limit: 4 }));
    // Grants that it never claimed to use, and other peers, are not affected.
    assert!(granter.lend(Access::ReadOnly).is_ok());
    assert!(guest.granter(DomId(0)).unwrap().lend(Access::ReadWrite).is_ok());
    // Lowering a status that it never raised has no other effect.
    for gref in 0..16 {
        arena.set_status(gref, 0);
    }
    assert!(granter.lend(Access::ReadWrite).is_ok());
}

#[test]
fn user_that_punches_lent_pages_destroys_only_writable_ones() {
    let machine = Machine::new();
    let (id, socket) = machine.hub.admit(None, false).unwrap();
    let mut hostile = RawDomain::join(socket).unwrap();
    let guest = machine.guest().with_arena(ArenaShape::of(2, 2));
    let mut granter = guest.granter(id).unwrap();
    let (written, read) =
        (granter.lend(Access::ReadWrite).unwrap(), granter.lend(Access::ReadOnly).unwrap());
    set_tag(written.memory(), 1);
    set_tag(read.memory(), 2);
    let arena = hostile.fetch(guest.domid()).unwrap();
    arena.punch(false, 0, 2).unwrap();
    assert!(arena.punch(true, 0, 2).is_err(), "the pages lent for reading");
    assert_eq!((tag(written.memory()), tag(read.memory())), (0, 2));
    set_tag(written.memory(), 3);
    granter.take_back(written).unwrap();
    granter.take_back(read).unwrap();
}

/// Checks that an invalid entry in the granter's table reaches no page beyond the arena, none lent to
/// another domain, and none of another kind.
#[test]
fn map_of_invalid_table_entry_is_refused() {
    let machine = Machine::new();
    let (id, socket) = machine.hub.admit(None, false).unwrap();
    let mut hostile = RawDomain::join(socket).unwrap();
    let arena = RawArena::new(ArenaShape { writable: 2, read_only: 3, references: 32 }).unwrap();
    hostile.lend(DomId(0), &arena).unwrap();
    let mut grantee = machine.toolstack.grantee(id).unwrap();
    let (zero, other) = (DomId(0), DomId(7));
    let cases = [
        (zero, 2, false, GrantStatus::BadPage),
        (zero, 3, true, GrantStatus::BadPage),
        (zero, u32::MAX, false, GrantStatus::BadPage),
        (zero, u32::MAX, true, GrantStatus::BadPage),
        (other, 0, false, GrantStatus::PermissionDenied),
        (other, u32::MAX, true, GrantStatus::PermissionDenied),
    ];
    for (gref, (to, frame, read_only, status)) in (8..).zip(cases) {
        arena.grant(gref, to, frame, read_only);
        let mut out = Vec::new();
        grantee.map(&[(Gref(gref), Access::ReadOnly)], &mut out);
        assert_eq!(out[0].as_ref().err(), Some(&status), "domain {to}, frame {frame:#x}");
        assert_eq!(arena.status(gref), 0, "a use is left");
    }
    // The last page of each kind is valid.
    arena.grant(30, zero, 1, false);
    arena.grant(31, zero, 2, true);
    let mut out = Vec::new();
    grantee.map(&[(Gref(30), Access::ReadWrite), (Gref(31), Access::ReadOnly)], &mut out);
    assert!(out.iter().all(Result::is_ok), "{out:?}");
    assert_eq!((arena.status(30), arena.status(31)), (1, 1));
    drop(out);
    assert_eq!((arena.status(30), arena.status(31)), (0, 0));
}

#[test]
fn map_over_mapping_limit_returns_no_space_and_leaves_no_use() {
    let mut pair = Pair::new(ArenaShape::of(1, 0));
    let lease = pair.granter.lend(Access::ReadWrite).unwrap();
    let many = vec![(lease.gref(), Access::ReadOnly); MAPPED_MAX + 1];
    let mut out = Vec::new();
    pair.grantee.map(&many, &mut out);
    assert_eq!(out.len(), MAPPED_MAX + 1);
    assert!(out.iter().all(|page| page.as_ref().err() == Some(&GrantStatus::NoSpace)));
    out.clear();
    pair.grantee.map(&many[1..], &mut out);
    assert!(out.iter().all(Result::is_ok));
    out.clear();
    pair.granter.take_back(lease).unwrap();
    let done = pair.machine.toolstack.counters().values();
    let all = MAPPED_MAX as u64;
    assert_eq!((done.grant_maps, done.grant_unmaps), (all, all));
}

/// Step of the lender or of the user in the model.
#[derive(Clone, Debug)]
enum Step {
    Lend(bool),
    TakeBack(usize),
    Force(Vec<usize>),
    Map(usize, bool),
    Unmap(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<bool>().prop_map(Step::Lend),
        2 => any::<usize>().prop_map(Step::TakeBack),
        1 => proptest::collection::vec(any::<usize>(), 0..4).prop_map(Step::Force),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, write)| Step::Map(which, write)),
        2 => any::<usize>().prop_map(Step::Unmap),
    ]
}

/// Valid lease: the tag in its page, and the number of mappings.
struct Live {
    lease: Lease,
    tag: u64,
    maps: usize,
}

/// Mapping: the tag of its lease, and the access of the lease if it was revoked by force.
struct Held {
    page: LentSlice,
    tag: u64,
    ghost: Option<Access>,
}

struct Model {
    pair: Pair,
    live: Vec<Live>,
    held: Vec<Held>,
    next_tag: u64,
    generations: HashMap<u64, u32>,
}

const PAGES: [u32; 2] = [5, 4];

fn access(write: bool) -> Access {
    if write { Access::ReadWrite } else { Access::ReadOnly }
}

impl Model {
    fn new() -> Model {
        let shape = ArenaShape::of(PAGES[0], PAGES[1]);
        let (live, held) = (Vec::new(), Vec::new());
        let (next_tag, generations) = (1, HashMap::new());
        Model { pair: Pair::new(shape), live, held, next_tag, generations }
    }

    /// Returns the number of pages of a kind that are neither lent nor mapped under a revoked lease.
    fn count_free(&self, access: Access) -> usize {
        let live = self.live.iter().filter(|live| live.lease.access() == access).count();
        let mut ghosts: Vec<u64> =
            self.held.iter().filter(|h| h.ghost == Some(access)).map(|held| held.tag).collect();
        ghosts.sort_unstable();
        ghosts.dedup();
        let all = PAGES[usize::from(access == Access::ReadOnly)] as usize;
        all - live - ghosts.len()
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Lend(write) => self.lend(access(write)),
            Step::TakeBack(which) if !self.live.is_empty() => {
                let which = which % self.live.len();
                let Live { lease, tag, maps } = self.live.swap_remove(which);
                match self.pair.granter.take_back(lease) {
                    Ok(()) => assert_eq!(maps, 0, "a page in use was taken back"),
                    Err(still) => {
                        assert!(maps > 0, "a page that is not in use was not taken back");
                        self.live.push(Live { lease: still.lease, tag, maps });
                    }
                }
            }
            Step::Force(which) => self.force(&which),
            Step::Map(which, write) if !self.live.is_empty() => {
                let which = which % self.live.len();
                let Live { lease, tag, maps } = &mut self.live[which];
                let outcome = self.pair.map(lease.gref(), access(write));
                if write && lease.access() == Access::ReadOnly {
                    assert_eq!(outcome.err(), Some(GrantStatus::PermissionDenied));
                    return;
                }
                *maps += 1;
                self.held.push(Held { page: outcome.unwrap(), tag: *tag, ghost: None });
            }
            Step::Unmap(which) if !self.held.is_empty() => {
                let held = self.held.swap_remove(which % self.held.len());
                if let Some(live) = self.live.iter_mut().find(|live| live.tag == held.tag) {
                    live.maps -= 1;
                }
            }
            _ => {}
        }
    }

    fn lend(&mut self, access: Access) {
        let free = self.count_free(access);
        match self.pair.granter.lend(access) {
            Ok(lease) => {
                assert!(free > 0, "a page was lent that may be under an old mapping");
                let found = tag(lease.memory());
                if let Some(generation) = self.generations.get(&found) {
                    assert_eq!(*generation, lease.generation(), "the page of {found}");
                } else {
                    assert_eq!(found, 0, "unknown content");
                }
                let tag = self.next_tag;
                self.next_tag += 1;
                self.generations.insert(tag, lease.generation());
                set_tag(lease.memory(), tag);
                self.live.push(Live { lease, tag, maps: 0 });
            }
            Err(why) => {
                assert_eq!(free, 0, "{why}");
                assert!(matches!(why, LendError::NoPage { .. } | LendError::NoReference { .. }));
            }
        }
    }

    fn force(&mut self, which: &[usize]) {
        let mut doomed = Vec::new();
        for which in which {
            if self.live.is_empty() {
                break;
            }
            let live = self.live.swap_remove(which % self.live.len());
            for held in self.held.iter_mut().filter(|held| held.tag == live.tag) {
                held.ghost = Some(live.lease.access());
            }
            self.generations.remove(&live.tag);
            doomed.push(live.lease);
        }
        self.pair.granter.revoke_forced(doomed).unwrap();
    }

    fn check(&self) {
        for held in &self.held {
            let wanted = if held.ghost.is_some() { 0 } else { held.tag };
            assert_eq!(tag(&held.page), wanted, "under a mapping of lease {}", held.tag);
        }
        for live in &self.live {
            assert_eq!(tag(live.lease.memory()), live.tag);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/revoke.txt",
        ))),
        ..ProptestConfig::default()
    })]

    /// Compares random sequences of operations with the model: a mapping shows the content that was lent
    /// under it or zeros, a page is returned unless it is in use, and no page is lost.
    #[test]
    fn random_lease_operations_match_model(steps in proptest::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        for step in steps {
            model.apply(step);
            model.check();
        }
        // At the end every page is free again.
        model.held.clear();
        for Live { lease, .. } in std::mem::take(&mut model.live) {
            model.pair.granter.take_back(lease).unwrap();
        }
        let lent = [true, false].map(|write| model.pair.lend_all(access(write)).len());
        prop_assert_eq!(lent, PAGES.map(|count| count as usize));
    }
}
