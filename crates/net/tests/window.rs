//! Buffers in grant windows: with correct peers, with peers without windows, and with a backend that holds
//! pages.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_access::window::{SourceLevels, SourcePolicy};
use ringfence_frame::port::{Fault, Port};
use ringfence_net::commands::{VifCommand, VifReply};
use ringfence_net::features::OffloadKeys;
use ringfence_net::netfront::{QUEUE_PAGES, WindowSizes};
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::WINDOW_ENTRIES_MAX;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_platform::{Access, Gref, Platform, WindowHandle};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

use pair::{Pair, carry, frame};

mod pair;

fn with_sizes(pair: &mut Pair, sizes: WindowSizes) {
    let front = VifFrontend::new(&pair.front_platform, pair.device, 1500).unwrap();
    pair.front = front.with_windows(&pair.front_platform, sizes);
}

fn resize(port: &mut dyn Port, most: u32) -> SourceLevels {
    match VifReply::of(port.execute(0, VifCommand::Resize(most).into())) {
        Some(VifReply::Levels(levels)) => levels,
        _ => panic!("the port has no windows"),
    }
}

fn both_ways(pair: &mut Pair, frames: &[Vec<u8>]) {
    let (front, back) = pair.ports();
    assert!(carry(front, back, frames) == frames, "from the guest");
    assert!(carry(back, front, frames) == frames, "to the guest");
}

/// Checks reuse with four times as many pages as entries, while pages are exchanged.
#[test]
fn packets_reuse_grants_without_grant_operation() {
    let mut pair = Pair::new(Mode::Window);
    let policy = SourcePolicy { churn: 200, ..SourcePolicy::default() };
    with_sizes(&mut pair, WindowSizes { pages: 1024, entries: 256, policy });
    pair.connect();
    assert!(pair.front.has_windows());
    let frames: Vec<_> = (0..2000).map(|i| frame(i, 60 + (i as usize * 37) % 9000)).collect();
    both_ways(&mut pair, &frames);
    let warm = resize(pair.ports().0, 1024).reuse;
    let before = [&pair.back_platform, &pair.front_platform].map(|p| p.counters().values());
    for _ in 0..5 {
        both_ways(&mut pair, &frames);
    }
    let after = [&pair.back_platform, &pair.front_platform].map(|p| p.counters().values());
    let [back, front] = [0, 1].map(|side| after[side].since(&before[side]));
    assert_eq!((back.grant_maps, back.grant_unmaps, back.grant_copies), (0, 0, 0));
    // Pages get other purposes all the time.
    assert!(front.window_revokes > 100, "{front:?}");
    assert!(front.syscalls < 20_000 / 20, "{front:?}");
    let levels = resize(pair.ports().0, 1024);
    let (hits, misses) = (levels.reuse.hits - warm.hits, levels.reuse.misses - warm.misses);
    assert!(misses > 100 && misses * 99 <= hits, "{hits} grants were reused, {misses} were not");
    assert_eq!(levels.held, 0);
}

#[test]
fn peers_without_windows_are_served() {
    let frames: Vec<_> = (0..200).map(|i| frame(i, 60 + i as usize * 40)).collect();
    // A frontend without windows.
    let mut pair = Pair::new(Mode::Window);
    pair.front = VifFrontend::new(&pair.front_platform, pair.device, 1500).unwrap();
    pair.connect();
    assert!(!pair.front.has_windows());
    both_ways(&mut pair, &frames);
    // The same, with staging.
    let mut pair = Pair::new(Mode::Window);
    let front = VifFrontend::new(&pair.front_platform, pair.device, 1500).unwrap();
    pair.front = front.with_staging(TxStaging::Full);
    pair.connect();
    assert_eq!(pair.stage().staged, QUEUE_PAGES);
    let before = pair.back_platform.counters().values();
    both_ways(&mut pair, &frames);
    assert_eq!(pair.back_platform.counters().values().since(&before).grant_copies, 0);
    // A backend without windows.
    let mut pair = Pair::wishing(Mode::Staging, OffloadKeys::ALL, OffloadKeys::ALL, true);
    let front = VifFrontend::new(&pair.front_platform, pair.device, 1500).unwrap();
    let front = front.with_staging(TxStaging::Full);
    pair.front = front.with_windows(&pair.front_platform, WindowSizes::default());
    pair.connect();
    assert!(!pair.front.has_windows());
    assert_eq!(pair.stage().refused, 0);
    both_ways(&mut pair, &frames);
}

#[test]
fn windows_are_reused_after_reconnection() {
    let mut pair = Pair::new(Mode::Window);
    let frames: Vec<_> = (0..300).map(|i| frame(i, 1500)).collect();
    for _ in 0..4 {
        pair.connect();
        assert!(pair.front.has_windows());
        both_ways(&mut pair, &frames);
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        let state = format!("{}/state", pair.device.frontend_path());
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        pair.front_store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    }
}

#[test]
fn pools_shrink_during_transfer_and_grow_again() {
    let mut pair = Pair::new(Mode::Window);
    pair.connect();
    let frames: Vec<_> = (0..1000).map(|i| frame(i, 1500)).collect();
    both_ways(&mut pair, &frames);
    let front = |pair: &mut Pair, most| resize(pair.ports().0, most);
    let full = front(&mut pair, 1024);
    assert!(full.present >= 256, "{full:?}");
    front(&mut pair, 64);
    both_ways(&mut pair, &frames);
    let less = front(&mut pair, 64);
    assert!(less.present <= 128, "{less:?}");
    both_ways(&mut pair, &frames);
    front(&mut pair, 1024);
    pair.ports().0.arm().unwrap();
    let (_, back) = pair.ports();
    assert_eq!(back.slots().unwrap(), 256, "each slot has a buffer again");
    both_ways(&mut pair, &frames);
    assert!(front(&mut pair, 1024).present >= 256);
}

/// Checks that a backend that keeps its status words set loses the pages after the time limit, and the
/// device.
#[test]
fn backend_holding_pages_beyond_limit_loses_pages_and_device() {
    let mut pair = Pair::new(Mode::Window);
    let hold_limit = Duration::from_millis(200);
    let policy = SourcePolicy { hold_limit, ..SourcePolicy::default() };
    with_sizes(&mut pair, WindowSizes { pages: 512, entries: 256, policy });
    pair.connect();
    let frames: Vec<_> = (0..400).map(|i| frame(i, 1500)).collect();
    both_ways(&mut pair, &frames);
    // A second mapping of the TX ring's grant window, which claims to use every page.
    let key = format!("{}/{}", pair.device.frontend_path(), keys::RINGFENCE_TX_WINDOW);
    let handle = WindowHandle(pair.back_store.read_u32(&key).unwrap());
    let granter = pair.front_platform.domid();
    let open =
        |pair: &Pair| pair.back_platform.open_window(granter, handle, WINDOW_ENTRIES_MAX).unwrap();
    let mut view = open(&pair);
    let mut found = Vec::new();
    view.begin((8..264).map(|gref| (Gref(gref), Access::ReadOnly)), &mut found);
    let claimed = found.iter().filter(|found| found.is_ok()).count();
    assert!(claimed > 0);
    let began = Instant::now();
    let front = pair.front_host.0.as_mut().unwrap();
    let levels = resize(&mut **front, 0);
    assert!(levels.held as usize >= claimed, "{levels:?}");
    let mut batch = ringfence_frame::batch::Batch::default();
    let fault = loop {
        assert!(front.deadline().is_some() || front.arm().is_ok());
        match front.receive(&mut batch, 64) {
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(fault) => break fault,
        }
        assert!(began.elapsed() < Duration::from_secs(30), "the backend was never found out");
    };
    assert!(began.elapsed() >= hold_limit);
    assert!(matches!(fault, Fault::Misbehaved(_)), "{fault}");
    assert_eq!(pair.front.rules().get("window_held_too_long"), 1);
    // As a datapath worker does.
    pair.front.broke();
    pair.front_host.0 = None;
    pair.front.look(&pair.front_platform, &mut pair.front_store, &mut pair.front_host).unwrap();
    assert!(matches!(pair.state(false), XenbusState::Closing | XenbusState::Closed));
    // The revoked pages are inaccessible, although the backend never released them.
    let mut again = open(&pair);
    found.clear();
    again.begin((8..264).map(|gref| (Gref(gref), Access::ReadOnly)), &mut found);
    assert!(found.iter().all(Result::is_err));
}
