//! Grants that are missing, belong to another guest, or exceed the limits.

use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_block::blkback::{BlkbackOptions, PersistentLimits};
use ringfence_platform::{Access, Granter, Gref, Platform};
use ringfence_sys::pressure::Share;
use ringfence_testkit::block::Stage;
use ringfence_testkit::block::frontend::whole;
use ringfence_wire::blkif::{Operation, SegmentRange, Status};

use super::*;

#[test]
fn xsa_361_request_with_invalid_grant_fails_alone() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let good = front.lend(Access::ReadWrite, 3);
        let read_only = front.lend(Access::ReadOnly, 4);
        let whole_of = |gref| SegmentRange::new(gref, 0, 7).unwrap();
        for (gref, rule) in [
            (Gref(3000), "blk_gref_not_granted"),
            (Gref(0), "blk_gref_not_granted"),
            (Gref(u32::MAX), "blk_gref_not_granted"),
            (read_only.gref(), "blk_grant_denied"),
        ] {
            let before = stage.rules(front.vbd).get(rule);
            let slot = front.direct(Operation::Read, 1, 0, &[whole(&good), whole_of(gref)]);
            assert_eq!(front.ask(&slot), Status::Error, "{mode}: {rule}");
            assert_eq!(stage.rules(front.vbd).get(rule), before + 1, "{mode}: {rule}");
            let slot = front.direct(Operation::Read, 2, 0, &[whole(&good)]);
            assert_eq!(front.ask(&slot), Status::Okay);
        }
        // A write may use a read-only grant, together with a persistent one.
        let slot = front.direct(Operation::Write, 3, 0, &[whole(&good), whole(&read_only)]);
        assert_eq!(front.ask(&slot), Status::Okay, "{mode}");
    }
}

#[test]
fn request_with_gref_of_another_guest_is_refused() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let guest = other_guest(&mut stage);
        let mut front = connected(&mut stage, mode);
        exercise(&guest);
        // The other guest keeps hundreds of pages lent, from the first references on. This guest has lent its
        // ring and one page.
        let page = front.lend(Access::ReadWrite, 1);
        let (mut refused, mut tried) = (0, 0);
        for gref in 8..600 {
            if gref == page.gref().0 || gref == front.ring[0].gref().0 {
                continue;
            }
            let range = SegmentRange::new(Gref(gref), 0, 7).unwrap();
            let slot = front.direct(Operation::Write, 1, 0, &[range]);
            refused += u32::from(front.ask(&slot) == Status::Error);
            tried += 1;
        }
        assert_eq!(refused, tried, "{mode}");
        check_other_guest_is_served(&stage, &guest);
    }
}

#[test]
fn xsa_300_unlimited_fresh_grants_stay_within_persistent_limit() {
    let mut stage = Stage::new();
    let guest = other_guest(&mut stage);
    let limits = PersistentLimits { pages: 64, ..PersistentLimits::default() };
    let back = BlkbackOptions { persistent: limits, ..options(Mode::Persistent) };
    let mut front = raw(&mut stage, back, Abi::X86_64, 1);
    front.connect(&mut stage, true);
    let pages: Vec<_> = (0..2000).map(|_| front.lend(Access::ReadWrite, 1)).collect();
    let begun = Instant::now();
    let mut id = 0;
    while begun.elapsed() < Duration::from_millis(700) {
        for page in &pages {
            id += 1;
            let slot = front.direct(Operation::Read, id, 0, &[whole(page)]);
            assert_eq!(front.ask(&slot), Status::Okay);
        }
    }
    let served = stage.vbds[front.vbd].served().unwrap();
    let (_, persistent) = served.counters().next().unwrap();
    let kept = persistent.misses.get() - persistent.purged.get() - persistent.expired.get();
    assert!(kept <= 64, "{persistent:?}");
    assert!(persistent.over.get() > 0 && persistent.purged.get() > 0, "{persistent:?}");
    // The kernel side counts the pages in use, so the check does not rely on the table's own counters.
    let in_use = pages.into_iter().filter_map(|page| front.granter.take_back(page).err()).count();
    assert!(in_use <= 64, "{in_use} of 2000 pages are still in use by the backend");
    assert_eq!(in_use as u64, kept, "{persistent:?}");
    check_other_guest_works(&stage, &guest);
}

#[test]
fn penalty_close_of_device_unmaps_every_page() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let mut front = connected(&mut stage, mode);
        let pages: Vec<_> = (0..500).map(|_| front.lend(Access::ReadWrite, 1)).collect();
        for page in &pages {
            let slot = front.direct(Operation::Read, 1, 0, &[whole(page)]);
            assert_eq!(front.ask(&slot), Status::Okay);
        }
        front.publish_as(9999);
        stage.wait_for_penalty_close(front.vbd);
        stage.look(front.vbd);
        let values = stage.platform.counters().values();
        assert_eq!(values.grant_maps, values.grant_unmaps, "{mode}: {values:?}");
        // No page is in use, so the guest may end each grant.
        for page in pages.into_iter().chain(std::mem::take(&mut front.ring)) {
            front.granter.take_back(page).unwrap();
        }
    }
}

#[test]
fn xsa_396_persistent_page_is_in_use_until_memory_pressure_evicts_it() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    // A sixteenth of the limit leaves 66 pages.
    let mut pages: Vec<_> = (0..67).map(|_| front.lend(Access::ReadWrite, 1)).collect();
    for page in &pages {
        let slot = front.direct(Operation::Read, 1, 0, &[whole(page)]);
        assert_eq!(front.ask(&slot), Status::Okay);
    }
    let page = front.granter.take_back(pages.remove(0)).unwrap_err().lease;
    let share = (0..4).fold(Share::WHOLE, |share, _| share.halved());
    stage.vbds[front.vbd].set_share(share);
    let begun = Instant::now();
    let mut page = Some(page);
    while let Some(lease) = page.take() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is still mapped");
        page = front.granter.take_back(lease).err().map(|still| still.lease);
    }
}

#[test]
fn page_revoked_during_request_fails_at_most_that_request() {
    for mode in Mode::DISK {
        let mut stage = Stage::new();
        let guest = other_guest(&mut stage);
        let mut front = connected(&mut stage, mode);
        for id in 0..300 {
            let page = front.lend(Access::ReadWrite, 1);
            let slot = front.direct(Operation::Read, id, 0, &[whole(&page)]);
            front.post(&[slot]);
            front.granter.revoke_forced(vec![page]).unwrap();
            front.answers(1);
        }
        let all = stage.rules(front.vbd).all();
        let allowed = ["blk_gref_not_granted", "blk_grant_revoked", "blk_too_many_mapped"];
        assert!(all.keys().all(|rule| allowed.contains(rule)), "{mode}: {all:?}");
        check_other_guest_works(&stage, &guest);
    }
}

#[test]
fn requests_over_mapping_limit_are_served_in_sequence() {
    let mut stage = Stage::new();
    let mut front = raw(&mut stage, options(Mode::Map), Abi::X86_64, 16);
    front.connect(&mut stage, false);
    let page = front.lend(Access::ReadWrite, 1);
    let ranges = [whole(&page); 11];
    let slots: Vec<_> =
        (0..512).map(|id| front.direct(Operation::Read, id, id * 8 % 4096, &ranges)).collect();
    front.post(&slots);
    let answers = front.answers(512);
    assert!(answers.iter().all(|answer| answer.status == Status::Okay));
    assert!(stage.rules(front.vbd).all().is_empty());
}
