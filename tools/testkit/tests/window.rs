//! Grant windows: operations that the granter performs alone, and operations that the grantee cannot perform.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::SeqCst;

use common::Machine;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use ringfence_access::window::{PageSource, Revocation, SourcePolicy};
use ringfence_platform::local::raw::pin::PinnedPage;
use ringfence_platform::local::raw::{RawArena, RawDomain, memfd};
use ringfence_platform::local::{ArenaFault, ArenaShape, LocalPlatform};
use ringfence_platform::window::IssueError;
use ringfence_platform::{
    Access, DomId, GrantStatus, Gref, PageId, Platform, PlatformError, RevokeError,
    TranslationTable, WindowError, WindowHandle, WindowPlace, WindowRound, WindowShape, WindowView,
};
use ringfence_wire::grant::RawGrantEntry;
use rustix::fs::SealFlags;

const SHAPE: WindowShape = WindowShape { writable: 4, read_only: 4, entries: 3 };
const FIRST: Gref = Gref::FIRST_FREE;

struct Pair {
    machine: Machine,
    guest: LocalPlatform,
    table: Box<dyn TranslationTable>,
    view: WindowView,
}

impl Pair {
    fn new(shape: WindowShape) -> Pair {
        let machine = Machine::new();
        let guest = machine.guest();
        let table = guest.window(DomId(0), shape).unwrap();
        let view = machine.toolstack.open_window(guest.domid(), table.handle(), 4096).unwrap();
        Pair { machine, guest, table, view }
    }

    fn begin(&mut self, gref: Gref, access: Access) -> Result<WindowPlace, GrantStatus> {
        let mut out = Vec::new();
        self.view.begin([(gref, access)].into_iter(), &mut out);
        out.pop().unwrap()
    }

    fn seen(&self, place: WindowPlace) -> u64 {
        let (memory, offset) = self.view.memory(place);
        memory.load_u64(offset, SeqCst).unwrap()
    }

    fn put(&self, page: PageId, tag: u64) {
        self.table.memory(page).unwrap().store_u64(0, tag, SeqCst).unwrap();
    }

    fn tag(&self, page: PageId) -> u64 {
        self.table.memory(page).unwrap().load_u64(0, SeqCst).unwrap()
    }
}

/// A grantee that collapses the window and pins a part of the huge page would see what is issued there next.
#[test]
fn page_pinned_in_huge_page_is_not_fresh_until_pin_ends() {
    for forced in [false, true] {
        let mut pair = Pair::new(WindowShape { writable: 512, read_only: 1, entries: 3 });
        (0..512).for_each(|page| pair.put(PageId(page), 1));
        pair.table.issue(FIRST, PageId(3), Access::ReadWrite).unwrap();
        let pin = match PinnedPage::in_huge_page(&pair.table.descriptors()[0], 3) {
            Ok(pin) => pin,
            Err(error) => return eprintln!("SKIPPED: MADV_COLLAPSE is refused ({error})"),
        };
        if forced {
            pair.table.revoke_forced(&[FIRST]).unwrap();
        } else {
            pair.table.revoke(FIRST).unwrap();
            assert_eq!(pair.table.scrub(), Ok(0));
        }
        assert_eq!(pair.table.prepare(PageId(3)), Err(RevokeError::Busy), "forced: {forced}");
        let refused = pair.table.issue(FIRST, PageId(3), Access::ReadWrite);
        assert_eq!(refused, Err(IssueError::NotFresh { page: PageId(3) }));
        assert_eq!(pin.read().unwrap(), 0);
        assert_eq!(pair.table.prepare(PageId(3)), Ok(()), "forced: {forced}");
        pair.table.issue(FIRST, PageId(3), Access::ReadWrite).unwrap();
        assert_eq!((pair.tag(PageId(2)), pair.tag(PageId(3)), pair.tag(PageId(4))), (1, 0, 1));
    }
}

/// A grantee that kept a mapping of the window reads what a page held when it was revoked, until the page is punched.
#[test]
fn strict_revocation_takes_content_out_of_mapping_of_grantee() {
    for (revocation, seen) in [(Revocation::Plain, 7), (Revocation::Strict, 0)] {
        let Pair { guest: _guest, machine: _machine, table, mut view } = Pair::new(SHAPE);
        // Each page that is given back is revoked and exchanged for another.
        let policy = SourcePolicy { churn: 1, revocation, ..SourcePolicy::default() };
        let mut source = PageSource::new(table, 4, policy);
        let page = source.take(Access::ReadOnly).unwrap();
        let gref = source.lend(page).unwrap();
        source.memory(page).unwrap().store_u64(0, 7, SeqCst).unwrap();
        let mut places = Vec::new();
        view.begin([(gref, Access::ReadOnly)].into_iter(), &mut places);
        let place = places.pop().unwrap().unwrap();
        view.end(gref);
        source.give_back(page);
        let (memory, offset) = view.memory(place);
        assert_eq!(memory.load_u64(offset, SeqCst).unwrap(), seen, "{revocation:?}");
    }
}

#[test]
fn window_page_is_usable_from_issue_to_revocation() {
    let mut pair = Pair::new(SHAPE);
    pair.put(PageId(5), 7);
    assert_eq!(pair.begin(FIRST, Access::ReadOnly), Err(GrantStatus::BadGref));
    pair.table.issue(FIRST, PageId(5), Access::ReadOnly).unwrap();
    let place = pair.begin(FIRST, Access::ReadOnly).unwrap();
    assert_eq!(pair.seen(place), 7);
    assert_eq!(pair.begin(FIRST, Access::ReadWrite), Err(GrantStatus::PermissionDenied));
    let (memory, offset) = pair.view.memory(place);
    assert!(memory.store_u64(offset, 1, SeqCst).is_err(), "the kernel mapped it for reading");
    // A refused revocation changes nothing.
    assert_eq!(pair.table.revoke(FIRST), Err(RevokeError::Busy));
    assert_eq!(pair.table.prepare(PageId(5)), Err(RevokeError::Busy));
    assert!(pair.begin(FIRST, Access::ReadOnly).is_ok());
    pair.view.end(FIRST);
    assert_eq!(pair.table.revoke(FIRST), Err(RevokeError::Busy));
    pair.view.end(FIRST);
    assert_eq!(pair.table.revoke(FIRST), Ok(PageId(5)));
    assert_eq!(pair.table.revoke(FIRST), Err(RevokeError::NotIssued));
    assert_eq!(pair.begin(FIRST, Access::ReadOnly), Err(GrantStatus::BadGref));
    assert_eq!(pair.tag(PageId(5)), 7, "the granter cannot read the page");
}

#[test]
fn issue_of_page_not_prepared_is_refused_and_old_place_reads_zeros() {
    let mut pair = Pair::new(SHAPE);
    pair.put(PageId(0), 7);
    pair.table.issue(FIRST, PageId(0), Access::ReadWrite).unwrap();
    let place = pair.begin(FIRST, Access::ReadWrite).unwrap();
    pair.view.end(FIRST);
    pair.table.revoke(FIRST).unwrap();
    let stale = Err(IssueError::NotFresh { page: PageId(0) });
    assert_eq!(pair.table.issue(FIRST, PageId(0), Access::ReadWrite), stale);
    assert_eq!(pair.seen(place), 7, "the page is readable until it is prepared");
    let generation = pair.table.generation(PageId(0));
    pair.table.prepare(PageId(0)).unwrap();
    assert_eq!(pair.table.generation(PageId(0)), generation + 1);
    assert_eq!(pair.seen(place), 0);
    pair.table.prepare(PageId(0)).unwrap();
    assert_eq!(pair.table.generation(PageId(0)), generation + 1, "a fresh page was prepared again");
    // Another page under the same reference: the grantee's old place does not reach it.
    pair.put(PageId(1), 8);
    pair.table.issue(FIRST, PageId(1), Access::ReadWrite).unwrap();
    assert_eq!(pair.seen(place), 0);
    let new = pair.begin(FIRST, Access::ReadOnly).unwrap();
    assert_eq!(pair.seen(new), 8);
}

#[test]
fn forced_window_revocation_holds_pages_in_use_until_use_ends() {
    let mut pair = Pair::new(SHAPE);
    for (n, page) in [PageId(0), PageId(1), PageId(6)].into_iter().enumerate() {
        pair.put(page, 7);
        let gref = Gref(FIRST.0 + u32::try_from(n).unwrap());
        let access = SHAPE.access_of(page).unwrap();
        pair.table.issue(gref, page, access).unwrap();
    }
    let place = pair.begin(FIRST, Access::ReadWrite).unwrap();
    let all: Vec<Gref> = SHAPE.grefs().chain(SHAPE.grefs()).collect();
    pair.table.revoke_forced(&all).unwrap();
    assert_eq!(pair.table.held().pages, 1);
    assert_eq!(pair.seen(place), 0);
    assert_eq!([PageId(0), PageId(1), PageId(6)].map(|page| pair.tag(page)), [0; 3]);
    let held = Err(IssueError::Held { gref: FIRST });
    assert_eq!(pair.table.issue(FIRST, PageId(2), Access::ReadWrite), held);
    assert_eq!(pair.table.prepare(PageId(0)), Err(RevokeError::Busy));
    pair.table.issue(Gref(FIRST.0 + 1), PageId(1), Access::ReadWrite).unwrap();
    // The peer, correct but late, writes once more and ends its use: the write reaches no later use.
    let (memory, offset) = pair.view.memory(place);
    memory.store_u64(offset, 99, SeqCst).unwrap();
    pair.view.end(FIRST);
    assert_eq!(pair.table.held().pages, 0);
    pair.table.prepare(PageId(0)).unwrap();
    assert_eq!(pair.tag(PageId(0)), 0);
    pair.table.issue(FIRST, PageId(0), Access::ReadWrite).unwrap();
}

#[test]
fn dropped_view_ends_its_uses() {
    let mut pair = Pair::new(SHAPE);
    pair.table.issue(FIRST, PageId(0), Access::ReadWrite).unwrap();
    pair.begin(FIRST, Access::ReadOnly).unwrap();
    pair.view = pair.view.another();
    assert_eq!(pair.table.revoke(FIRST), Ok(PageId(0)));
}

#[test]
fn invalid_issue_and_revoke_are_refused() {
    let mut pair = Pair::new(SHAPE);
    let table = &mut pair.table;
    for gref in [Gref(0), Gref(7), Gref(FIRST.0 + 3), Gref(u32::MAX)] {
        let no_entry = Err(IssueError::NoEntry { gref, entries: 3 });
        assert_eq!(table.issue(gref, PageId(0), Access::ReadWrite), no_entry);
        assert_eq!(table.revoke(gref), Err(RevokeError::NotIssued));
    }
    let (read_only, read_write) = (Access::ReadOnly, Access::ReadWrite);
    let beyond = Err(IssueError::NoPage { page: PageId(8), pages: 8 });
    assert_eq!(table.issue(FIRST, PageId(8), read_only), beyond);
    let kind = |page, kind| Err(IssueError::Access { page, kind });
    assert_eq!(table.issue(FIRST, PageId(7), read_write), kind(PageId(7), read_only));
    assert_eq!(table.issue(FIRST, PageId(0), read_only), kind(PageId(0), read_write));
    table.issue(FIRST, PageId(0), read_write).unwrap();
    let again = Err(IssueError::Taken { gref: FIRST });
    assert_eq!(table.issue(FIRST, PageId(1), read_write), again);
    let twice = Err(IssueError::NotFresh { page: PageId(0) });
    assert_eq!(table.issue(Gref(FIRST.0 + 1), PageId(0), read_write), twice);
    assert_eq!(table.prepare(PageId(8)), Err(RevokeError::NotIssued));
    assert!(table.memory(PageId(8)).is_none());
}

fn refused(outcome: Result<WindowView, WindowError>) -> WindowError {
    match outcome {
        Ok(_) => panic!("the window was opened"),
        Err(error) => error,
    }
}

#[test]
fn open_of_missing_or_foreign_window_is_refused() {
    let pair = Pair::new(SHAPE);
    let (toolstack, guest) = (&pair.machine.toolstack, pair.guest.domid());
    let handle = pair.table.handle();
    for wrong in [0, handle.0 + 1, u32::MAX] {
        let error = refused(toolstack.open_window(guest, WindowHandle(wrong), 4096));
        assert!(matches!(error, WindowError::NoSuchWindow { .. }), "{error}");
    }
    let error = refused(toolstack.open_window(DomId(77), handle, 4096));
    assert!(matches!(error, WindowError::NoSuchWindow { .. }), "{error}");
    let error = refused(toolstack.open_window(guest, handle, 2));
    assert!(matches!(error, WindowError::TooLarge { found: 3, limit: 2 }), "{error}");
    // A third domain cannot open it.
    let third = pair.machine.guest();
    let error = refused(third.open_window(guest, handle, 4096));
    assert!(matches!(error, WindowError::NoSuchWindow { .. }), "{error}");
}

#[test]
fn windows_over_count_or_byte_limit_are_refused() {
    let machine = Machine::new();
    let guest = machine.guest();
    let small = WindowShape { writable: 1, read_only: 1, entries: 1 };
    let made = (0..100).take_while(|_| guest.window(DomId(0), small).is_ok()).count();
    assert_eq!(made, 32);
    let guest = machine.guest();
    let large = WindowShape { writable: 16000, read_only: 1000, entries: 1000 };
    assert!(guest.window(DomId(0), large).is_err(), "more than the domain's quota");
    let larger = WindowShape { writable: 20000, ..small };
    let error = guest.window(DomId(0), larger).err().unwrap();
    let too_large = matches!(
        error,
        WindowError::Platform(PlatformError::BadArena { ref source, .. })
            if matches!(source.downcast_ref(), Some(ArenaFault::TooLarge { .. }))
    );
    assert!(too_large, "{error}");
}

/// Lends a window of a raw domain, whose table the test writes by hand.
fn raw_window(machine: &Machine, arena: &RawArena, handle: u32) -> (DomId, RawDomain) {
    let (id, socket) = machine.guest_socket();
    let mut domain = RawDomain::join(socket).unwrap();
    domain.lend_window(DomId(0), arena, handle).unwrap();
    (id, domain)
}

#[test]
fn use_of_invalid_window_entry_is_refused() {
    let machine = Machine::new();
    let shape = ArenaShape { writable: 2, read_only: 2, references: 16 };
    let arena = RawArena::new(shape).unwrap();
    let (id, _domain) = raw_window(&machine, &arena, 5);
    let mut view = machine.toolstack.open_window(id, WindowHandle(5), 4096).unwrap();
    let mut begin = |word: u64, access| {
        arena.set_entry(FIRST.0, RawGrantEntry(word));
        let mut out = Vec::new();
        view.begin([(FIRST, access)].into_iter(), &mut out);
        if out[0].is_ok() {
            view.end(FIRST);
        }
        out.pop().unwrap()
    };
    let entry = |flags: u64, domain: u64, frame: u64| flags | domain << 16 | frame << 32;
    let (permit, read_only) = (1, 1 | 1 << 2);
    assert!(begin(entry(permit, 0, 1), Access::ReadWrite).is_ok());
    assert_eq!(begin(entry(permit, 0, 2), Access::ReadWrite), Err(GrantStatus::BadPage));
    assert_eq!(
        begin(entry(permit, 0, u64::from(u32::MAX)), Access::ReadOnly),
        Err(GrantStatus::BadPage)
    );
    assert_eq!(begin(entry(read_only, 0, 2), Access::ReadOnly), Err(GrantStatus::BadPage));
    assert_eq!(
        begin(entry(read_only, 0, 0), Access::ReadWrite),
        Err(GrantStatus::PermissionDenied)
    );
    assert_eq!(begin(entry(permit, 9, 0), Access::ReadOnly), Err(GrantStatus::PermissionDenied));
    assert_eq!(begin(entry(0, 0, 0), Access::ReadOnly), Err(GrantStatus::BadGref));
    let mut out = Vec::new();
    let outside = [Gref(0), Gref(7), Gref(16), Gref(u32::MAX)];
    view.begin(outside.into_iter().map(|gref| (gref, Access::ReadOnly)), &mut out);
    assert_eq!(out, [Err(GrantStatus::BadGref); 4]);
}

#[test]
fn window_without_seals_is_refused() {
    let machine = Machine::new();
    let (id, socket) = machine.guest_socket();
    let mut domain = RawDomain::join(socket).unwrap();
    let mut arena =
        RawArena::new(ArenaShape { writable: 2, read_only: 2, references: 16 }).unwrap();
    arena.handed_over[0] = memfd(2 * 4096, SealFlags::SHRINK).unwrap();
    assert!(domain.lend_window(DomId(0), &arena, 5).is_err(), "the hub accepted the arena");
    let error = refused(machine.toolstack.open_window(id, WindowHandle(5), 4096));
    assert!(matches!(error, WindowError::NoSuchWindow { .. }), "{error}");
}

/// Model of both ends. Each page's content is its generation and number.
#[derive(Default)]
struct Model {
    issued: BTreeMap<Gref, PageId>,
    uses: BTreeMap<Gref, u32>,
    held: BTreeSet<Gref>,
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        cases: 64,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_window_operations_match_model(
        steps in prop::collection::vec((0u8..6, 0u32..3, 0u32..8), 1..120),
    ) {
        let mut pair = Pair::new(SHAPE);
        let mut model = Model::default();
        for (kind, entry, page) in steps {
            let (gref, page) = (Gref(FIRST.0 + entry), PageId(page));
            let access = SHAPE.access_of(page).unwrap();
            match kind {
                0 => {
                    let free = !model.issued.contains_key(&gref) && !model.held.contains(&gref);
                    if pair.table.prepare(page).is_ok() {
                        let tag = u64::from(pair.table.generation(page)) << 8 | u64::from(page.0);
                        pair.put(page, tag);
                        let issued = pair.table.issue(gref, page, access);
                        prop_assert_eq!(issued.is_ok(), free);
                        if free {
                            model.issued.insert(gref, page);
                        }
                    } else {
                        let taken = model.issued.values().any(|known| *known == page);
                        prop_assert!(taken || !model.held.is_empty());
                    }
                }
                1 => {
                    let begun = pair.begin(gref, Access::ReadOnly);
                    prop_assert_eq!(begun.is_ok(), model.issued.contains_key(&gref));
                    if let Ok(place) = begun {
                        let page = model.issued[&gref];
                        let tag = u64::from(pair.table.generation(page)) << 8 | u64::from(page.0);
                        prop_assert_eq!(pair.seen(place), tag);
                        *model.uses.entry(gref).or_default() += 1;
                    }
                }
                2 => {
                    if model.uses.get(&gref).is_some_and(|uses| *uses > 0) {
                        pair.view.end(gref);
                        let uses = model.uses.entry(gref).or_default();
                        *uses -= 1;
                        if *uses == 0 {
                            model.held.remove(&gref);
                        }
                    }
                }
                3 => {
                    let busy = model.uses.get(&gref).is_some_and(|uses| *uses > 0);
                    let expected = match model.issued.get(&gref) {
                        None => Err(RevokeError::NotIssued),
                        Some(_) if busy => Err(RevokeError::Busy),
                        Some(page) => Ok(*page),
                    };
                    prop_assert_eq!(pair.table.revoke(gref), expected);
                    if expected.is_ok() {
                        model.issued.remove(&gref);
                    }
                }
                4 => {
                    pair.table.revoke_forced(&[gref]).unwrap();
                    if model.issued.remove(&gref).is_some()
                        && model.uses.get(&gref).is_some_and(|uses| *uses > 0)
                    {
                        model.held.insert(gref);
                    }
                }
                _ => {
                    pair.table.scrub().unwrap();
                }
            }
            prop_assert_eq!(pair.table.held().pages as usize, model.held.len());
        }
    }
}

#[test]
fn window_round_ends_all_its_uses_together() {
    let mut pair = Pair::new(SHAPE);
    let view = pair.view.another();
    let mut round = WindowRound::new(view).unwrap();
    let (second, third) = (Gref(FIRST.0 + 1), Gref(FIRST.0 + 2));
    pair.put(PageId(0), 5);
    pair.put(PageId(7), 6);
    pair.table.issue(FIRST, PageId(0), Access::ReadWrite).unwrap();
    pair.table.issue(second, PageId(7), Access::ReadOnly).unwrap();
    assert_eq!(round.page(FIRST, Access::ReadWrite).unwrap().load_u64(0, SeqCst), Ok(5));
    assert_eq!(round.page(second, Access::ReadOnly).unwrap().load_u64(0, SeqCst), Ok(6));
    assert_eq!(round.page(second, Access::ReadWrite).err(), Some(GrantStatus::PermissionDenied));
    assert_eq!(round.page(third, Access::ReadOnly).err(), Some(GrantStatus::BadGref));
    assert!(round.settle());
    assert_eq!(pair.table.revoke(FIRST), Err(RevokeError::Busy));
    round.end();
    assert_eq!(pair.table.revoke(FIRST), Ok(PageId(0)));
    // A forced revocation in the middle of a round.
    assert!(round.page(second, Access::ReadOnly).is_ok());
    pair.table.revoke_forced(&[second]).unwrap();
    assert!(!round.settle());
    let mut found = Vec::new();
    let wanted = [(second, Access::ReadOnly), (third, Access::ReadOnly)];
    round.begin_settled(wanted.into_iter(), &mut found);
    assert_eq!(found, [Err(GrantStatus::BadGref); 2]);
    assert_eq!(pair.table.held().pages, 1);
    round.end();
    assert_eq!(pair.table.held().pages, 0);
    // A batch: each entry has its own status.
    pair.put(PageId(1), 9);
    pair.table.issue(FIRST, PageId(1), Access::ReadWrite).unwrap();
    let wanted = [(third, Access::ReadOnly), (FIRST, Access::ReadWrite)];
    round.begin_settled(wanted.into_iter(), &mut found);
    assert_eq!(found[2], Err(GrantStatus::BadGref));
    let page = round.at(found[3].unwrap()).unwrap();
    assert_eq!(page.load_u64(0, SeqCst), Ok(9));
    assert!(round.settle(), "the uses are not settled");
    assert_eq!(pair.table.revoke(FIRST), Err(RevokeError::Busy));
    // The successor of a round lowers the status words that the round left raised.
    let round = round.taking_over();
    assert_eq!(pair.table.revoke(FIRST), Ok(PageId(1)));
    drop(round);
}
