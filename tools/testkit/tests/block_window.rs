//! Disks whose requests use pages of grant windows.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_access::window::mark;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::Disk;
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, conformance, image};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::toolstack::VbdConfig;
use ringfence_platform::{Access, DomId, Gref, Platform, WindowShape};
use ringfence_sys::pressure::Share;
use ringfence_testkit::block::frontend::RawFront;
use ringfence_testkit::block::{Guest, Stage};
use ringfence_wire::blkif::{Abi, Operation, SegmentRange, Status, keys};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

fn disk() -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(16 << 20, 512).unwrap())
}

fn back(mode: Mode) -> BlkbackOptions {
    BlkbackOptions { mode, queues: 2, ..BlkbackOptions::default() }
}

fn front(window: u32) -> BlkfrontOptions {
    BlkfrontOptions { window, ..BlkfrontOptions::default() }
}

/// Returns a workload that keeps a queue full.
fn workload(seed: u64) -> Workload {
    Workload { depth: 32, ..Workload::new(seed) }
}

#[test]
fn disk_over_grant_windows_of_any_size_conforms() {
    for (window, queues) in [(1024, 1), (256, 2), (5, 1)] {
        let mut stage = Stage::new();
        let options = BlkfrontOptions { queues, ..front(window) };
        let guest = Guest::join(&mut stage, disk(), back(Mode::Window), options);
        let connection = *stage.vbds[guest.vbd].connection().unwrap();
        assert!(connection.windows && connection.persistent);
        conformance::check(&*guest.disk(), 1);
        assert!(stage.rules(guest.vbd).all().is_empty(), "{:?}", stage.rules(guest.vbd).all());
        assert!(guest.front.rules().all().is_empty(), "{:?}", guest.front.rules().all());
        // Every page came from the grant window.
        assert_eq!(guest.disk().lent_pages(), 0);
        let levels = guest.disk().window_levels().unwrap();
        assert_eq!((levels.in_use, levels.held), (0, 0));
        assert!(levels.present <= window * queues, "{levels:?}");
    }
}

#[test]
fn steady_state_over_grant_window_needs_no_grant_operation() {
    let mut stage = Stage::new();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Window), front(1024));
    let disk = guest.disk();
    workload(1).exercise(&*disk, 500);
    let (before, reused) = (stage.platform.counters().values(), disk.window_levels().unwrap());
    let ours = guest.platform.counters().values();
    // The checker compares each read with the write before it.
    let mut driver = Driver::new(disk.queue(32).unwrap());
    for round in 0..200u64 {
        driver.write(round * 4096, &[u8::try_from(round).unwrap(); 4096]).unwrap();
    }
    let spent = stage.platform.counters().values().since(&before);
    assert_eq!((spent.grant_maps, spent.grant_unmaps, spent.grant_copies), (0, 0, 0));
    let spent = guest.platform.counters().values().since(&ours);
    assert_eq!((spent.window_issues, spent.window_revokes, spent.window_scrubs), (0, 0, 0));
    let levels = disk.window_levels().unwrap();
    assert!(levels.reuse.hits >= reused.reuse.hits + 200, "{levels:?}");
    assert_eq!(levels.reuse.misses, reused.reuse.misses);
}

#[test]
fn disk_with_grant_windows_on_one_end_uses_ordinary_grants() {
    for (mode, window) in [(Mode::Persistent, 64), (Mode::Map, 64), (Mode::Window, 0)] {
        let mut stage = Stage::new();
        let guest = Guest::join(&mut stage, disk(), back(mode), front(window));
        let connection = *stage.vbds[guest.vbd].connection().unwrap();
        assert!(!connection.windows, "{mode}");
        assert_eq!(connection.persistent, mode != Mode::Map);
        workload(2).exercise(&*guest.disk(), 500);
        assert!(guest.disk().window_levels().is_none());
        assert!(stage.rules(guest.vbd).all().is_empty());
    }
}

#[test]
fn grant_windows_shrink_and_grow_under_load() {
    let mut stage = Stage::new();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Window), front(1024));
    let disk = guest.disk();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut seed = 0;
            while !done.load(Ordering::SeqCst) {
                // The disk has old content, so the load only writes.
                let mut driver = Driver::new(disk.queue(32).unwrap());
                for block in 0..64u64 {
                    seed += 1;
                    let byte = u8::try_from(seed % 251).unwrap();
                    driver.write(block << 18, &vec![byte; 1 << 18]).unwrap();
                }
            }
            seed
        });
        let until = |most: u32| {
            let begun = Instant::now();
            loop {
                let levels = disk.window_levels().unwrap();
                if levels.present <= most && (most < 1024 || levels.present > 64) {
                    return levels;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "{levels:?}, at most {most}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        until(1024);
        disk.set_share(Share::WHOLE.halved().halved());
        until(64);
        disk.set_share(Share::WHOLE);
        until(1024);
        done.store(true, Ordering::SeqCst);
        assert!(load.join().unwrap() > 0);
    });
    let mut driver = Driver::new(disk.queue(1).unwrap());
    driver.write(0, &[7; 512]).unwrap();
    // Pages that no request uses are released on request.
    disk.release_pages();
    assert_eq!(disk.window_levels().unwrap().present, 0);
    assert_eq!(image(&*disk)[..512], [7; 512]);
    assert!(stage.rules(guest.vbd).all().is_empty());
}

#[test]
fn backend_restart_under_load_reopens_grant_window_without_loss() {
    let mut stage = Stage::new();
    let (disk, served) = (disk(), back(Mode::Window));
    let options = BlkfrontOptions { queues: 2, ..front(256) };
    let mut guest = Guest::join(&mut stage, disk.clone(), served, options);
    let front = guest.disk();
    let load = std::thread::spawn(move || workload(11).exercise(&*front, 500));
    for mode in [Mode::Window, Mode::Persistent, Mode::Window, Mode::Window] {
        let vbd = &mut stage.vbds[guest.vbd];
        let device = *vbd.device();
        let path = format!("{}/state", device.backend_path());
        let next = VbdBackend::new(device, back(mode), disk.clone(), Arc::new(|| {}));
        drop(std::mem::replace(vbd, next));
        // The backend announces its features, with which the frontend starts again.
        stage.store.write(&path, "5").unwrap();
        guest.look();
        stage.look(guest.vbd);
        stage.store.write(&path, "1").unwrap();
        guest.connect(&mut stage);
        let connection = stage.vbds[guest.vbd].connection().unwrap();
        assert_eq!(connection.windows, mode == Mode::Window, "{connection:?}");
        std::thread::sleep(Duration::from_millis(3));
    }
    load.join().unwrap();
    assert!(stage.rules(guest.vbd).all().is_empty(), "{:?}", stage.rules(guest.vbd).all());
}

/// Adds a vbd whose frontend writes its keys by hand.
fn raw(stage: &mut Stage) -> RawFront {
    let platform = stage.join(64);
    let config = VbdConfig::default();
    let vbd = stage.add_vbd(platform.domid(), disk(), back(Mode::Window), config);
    RawFront::new(stage, platform, vbd, Abi::X86_64, 1)
}

#[test]
fn missing_grant_window_closes_device() {
    for (handle, rule) in [("7", "connect_no_such_window"), ("x", "connect_not_a_number")] {
        let mut stage = Stage::new();
        let mut front = raw(&mut stage);
        front.set(keys::RINGFENCE_WINDOW, handle);
        stage.look(front.vbd);
        front.write_keys(true);
        front.enter(XenbusState::Initialised);
        stage.look(front.vbd);
        assert_eq!(stage.state(front.vbd), XenbusState::Closing);
        assert_eq!(stage.rules(front.vbd).get(rule), 1);
    }
}

#[test]
fn oversized_grant_window_closes_device() {
    let mut stage = Stage::new();
    let mut front = raw(&mut stage);
    let shape = WindowShape { writable: 8, read_only: 0, entries: 5000 };
    let table = front.platform.window(DomId(0), shape).unwrap();
    front.set(keys::RINGFENCE_WINDOW, &table.handle().0.to_string());
    stage.look(front.vbd);
    front.write_keys(true);
    front.enter(XenbusState::Initialised);
    stage.look(front.vbd);
    assert_eq!(stage.rules(front.vbd).get("connect_window_too_large"), 1);
}

#[test]
fn request_with_gref_not_issued_fails_alone() {
    let mut stage = Stage::new();
    let mut front = raw(&mut stage);
    let shape = WindowShape { writable: 4, read_only: 4, entries: 4 };
    let mut table = front.platform.window(DomId(0), shape).unwrap();
    front.set(keys::RINGFENCE_WINDOW, &table.handle().0.to_string());
    front.connect(&mut stage, true);
    assert!(stage.vbds[front.vbd].connection().unwrap().windows);
    let gref = |n| Gref(Gref::FIRST_FREE.0 + n);
    let pages: Vec<_> = shape.pages_for(Access::ReadWrite).collect();
    let read_only = shape.pages_for(Access::ReadOnly).next().unwrap();
    table.issue(gref(0), pages[0], Access::ReadWrite).unwrap();
    table.memory(pages[0]).unwrap().copy_from(0, &[5; 4096]).unwrap();
    table.issue(gref(1), read_only, Access::ReadOnly).unwrap();
    let ordinary = front.lend(Access::ReadWrite, 6);
    let whole = |gref| SegmentRange::new(gref, 0, 7).unwrap();
    let good = [whole(mark(gref(0))), whole(ordinary.gref()), whole(mark(gref(0)))];
    for (bad, rule) in [
        (mark(gref(2)), "blk_gref_not_granted"),
        (mark(gref(4)), "blk_gref_not_granted"),
        (mark(Gref(0)), "blk_gref_not_granted"),
        (mark(Gref(u32::MAX)), "blk_gref_not_granted"),
        (mark(gref(1)), "blk_grant_denied"),
    ] {
        let before = stage.rules(front.vbd).get(rule);
        let slot = front.direct(Operation::Read, 1, 0, &[good[0], whole(bad), good[1]]);
        assert_eq!(front.ask(&slot), Status::Error, "{bad}: {rule}");
        assert_eq!(stage.rules(front.vbd).get(rule), before + 1, "{bad}: {rule}");
        // No use of the other grants is left.
        let slot = front.direct(Operation::Write, 2, 0, &good);
        assert_eq!(front.ask(&slot), Status::Okay);
    }
    // A write may use a read-only page.
    let slot = front.direct(Operation::Write, 3, 8, &[whole(mark(gref(1)))]);
    assert_eq!(front.ask(&slot), Status::Okay);
    assert_eq!(table.revoke(gref(0)), Ok(pages[0]));
    assert_eq!(table.revoke(gref(1)), Ok(read_only));
    // A revoked page is not used, neither for data nor for descriptors.
    let slot = front.direct(Operation::Write, 4, 0, &[whole(mark(gref(0)))]);
    assert_eq!(front.ask(&slot), Status::Error);
    let direction = ringfence_wire::blkif::Direction::Write;
    let slot = front.indirect(direction, 5, 0, 12, &[mark(gref(0))]);
    assert_eq!(front.ask(&slot), Status::Error);
}
