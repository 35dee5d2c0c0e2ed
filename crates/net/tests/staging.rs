//! Staging grants between two domains of one process. `docs/staging-grants.md` has the decisions that the
//! interface leaves open; each has its test here.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod pair;

use ringfence_access::Mode;
use ringfence_net::features::OffloadKeys;
use ringfence_net::netfront::QUEUE_PAGES;
use ringfence_platform::Platform;
use ringfence_sys::counters::CounterValues;

use pair::{Pair, carry, frame};

fn operations(pair: &Pair) -> CounterValues {
    pair.back_platform.counters().values()
}

#[test]
fn staged_pages_need_no_grant_operation() {
    let mut pair = Pair::new(Mode::Staging);
    pair.connect();
    let progress = pair.stage();
    assert_eq!((progress.staged, progress.refused), (QUEUE_PAGES, 0));
    assert_eq!(pair.back.staged() as usize, QUEUE_PAGES);
    let before = operations(&pair);
    let (front, back) = pair.ports();
    for round in 0..20 {
        let sizes = [60, 64, 256, 257, 1514, 4096, 9000, 65_535];
        let frames: Vec<_> = (1..).zip(sizes).map(|(s, len)| frame(s + round, len)).collect();
        assert!(carry(front, back, &frames) == frames);
        assert!(carry(back, front, &frames) == frames);
    }
    let spent = operations(&pair).since(&before);
    assert_eq!((spent.grant_maps, spent.grant_unmaps, spent.grant_copies), (0, 0, 0), "{spent:?}");
    assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
    assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
}

#[test]
fn packets_without_staging_are_copied() {
    let mut pair = Pair::new(Mode::Staging);
    pair.connect();
    let before = operations(&pair);
    let (front, back) = pair.ports();
    let frames = [frame(1, 1514), frame(2, 5000)];
    assert_eq!(carry(front, back, &frames), frames);
    assert_eq!(carry(back, front, &frames), frames);
    let spent = operations(&pair).since(&before);
    assert_eq!(spent.grant_copies, 6);
    assert_eq!(spent.grant_maps, 0);
}

#[test]
fn backend_without_staging_refuses_it() {
    let mut pair = Pair::wishing(Mode::Copy, OffloadKeys::ALL, OffloadKeys::ALL, true);
    pair.connect();
    let progress = pair.stage();
    assert_eq!((progress.staged, progress.refused), (0, QUEUE_PAGES));
    let (front, back) = pair.ports();
    let frames = [frame(1, 1514), frame(2, 5000)];
    assert_eq!(carry(front, back, &frames), frames);
}

#[test]
fn removed_device_leaves_no_page_mapped() {
    let mut pair = Pair::new(Mode::Staging);
    for _ in 0..3 {
        pair.connect();
        pair.stage();
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        let counts = operations(&pair);
        assert_eq!(counts.grant_maps, counts.grant_unmaps);
        let state = format!("{}/state", pair.device.frontend_path());
        use ringfence_xenstore::StoreAccess as _;
        pair.front_store.write(&state, "1").unwrap();
    }
}

#[test]
fn header_staging_splits_packets_longer_than_header() {
    use ringfence_net::netfront::HEADER_STAGED_PAGES;
    use ringfence_net::staging::TxStaging;
    let mut pair = Pair::new(Mode::Staging);
    pair.with_staging(TxStaging::Heads);
    pair.connect();
    let progress = pair.stage();
    assert_eq!((progress.staged, progress.refused), (HEADER_STAGED_PAGES, 0));
    assert_eq!(pair.back.staged() as usize, HEADER_STAGED_PAGES);
    let before = operations(&pair);
    let (front, back) = pair.ports();
    // A short packet costs no grant operation in either direction. Several times the ring's length is sent.
    for round in 0..20 {
        let short: Vec<_> =
            (0..50u16).map(|n| frame(1 + u32::from(n) + round, 60 + usize::from(n))).collect();
        assert!(carry(front, back, &short) == short);
        assert!(carry(back, front, &short) == short);
    }
    let spent = operations(&pair).since(&before);
    assert_eq!((spent.grant_maps, spent.grant_unmaps, spent.grant_copies), (0, 0, 0), "{spent:?}");
    // A longer packet has its first bytes in a staged page; each page of the rest is copied.
    for (len, copies) in [(257, 1), (1514, 1), (256 + 4096, 1), (256 + 4097, 2), (65_535, 16)] {
        let before = operations(&pair);
        let (front, back) = pair.ports();
        let frames = [frame(3, len)];
        assert!(carry(front, back, &frames) == frames, "{len}");
        assert!(carry(back, front, &frames) == frames, "{len}");
        let spent = operations(&pair).since(&before);
        assert_eq!(spent.grant_copies, copies, "{len}");
    }
    assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
}
