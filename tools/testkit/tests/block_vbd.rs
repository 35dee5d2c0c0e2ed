//! A vbd between two domains of one process, with the real handshake, rings, grants and event channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::powercut::PowerCutDisk;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, conformance, image};
use ringfence_block::storage::{Disk, Op, Segment};
use ringfence_memory::LentSlice;
use ringfence_platform::Platform;
use ringfence_testkit::block::{Guest, Stage};

fn disk() -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(16 << 20, 512).unwrap())
}

fn back(mode: Mode) -> BlkbackOptions {
    BlkbackOptions { mode, ..BlkbackOptions::default() }
}

/// Returns a workload that keeps a queue full.
fn workload(seed: u64) -> Workload {
    Workload { depth: 32, ..Workload::new(seed) }
}

#[test]
fn disk_over_ring_conforms_in_each_mode_and_pairing() {
    for mode in Mode::DISK {
        for persistent in [true, false] {
            let mut stage = Stage::new();
            let options = BlkfrontOptions { persistent, ..BlkfrontOptions::default() };
            let guest = Guest::join(&mut stage, disk(), back(mode), options);
            let agreed = stage.vbds[guest.vbd].connection().unwrap().persistent;
            assert_eq!(agreed, persistent && matches!(mode, Mode::Persistent | Mode::Window));
            conformance::check(&*guest.disk(), 1);
            let all = stage.rules(guest.vbd).all();
            assert!(all.is_empty(), "{mode}, {persistent}: {all:?}");
            assert!(guest.front.rules().all().is_empty(), "{:?}", guest.front.rules().all());
        }
    }
}

#[test]
fn multiple_queues_with_large_rings_serve_concurrent_users() {
    let mut stage = Stage::new();
    let back = BlkbackOptions { queues: 4, ..back(Mode::Persistent) };
    let options = BlkfrontOptions { queues: 3, ring_order: 4, ..BlkfrontOptions::default() };
    let guest = Guest::join(&mut stage, disk(), back, options);
    let connection = stage.vbds[guest.vbd].connection().unwrap();
    assert_eq!((connection.queues, connection.ring_pages), (3, 16));
    // More users than rings; each uses its own part of the disk.
    let front = guest.disk();
    let users: Vec<_> = (0..7u64)
        .map(|user| {
            let front = Arc::clone(&front);
            std::thread::spawn(move || {
                let mut driver = Driver::new(front.queue(64).unwrap());
                let base = user * (1 << 20);
                let mut random = Random::new(user);
                for round in 0..60 {
                    let len = 512 * (1 + random.below(200));
                    let memory = LentSlice::anonymous(usize::try_from(len).unwrap());
                    let byte = u8::try_from(user * 30 + round % 30).unwrap();
                    memory.copy_from(0, &vec![byte; memory.len()]).unwrap();
                    let segments = vec![Segment::from(memory)];
                    driver.submit(Op::Write { fua: false }, base, len, segments);
                    assert_eq!(driver.wait().unwrap()[0].result, Ok(()));
                    let memory = LentSlice::anonymous(usize::try_from(len).unwrap());
                    driver.submit(Op::Read, base, len, vec![Segment::from(memory.clone())]);
                    assert_eq!(driver.wait().unwrap()[0].result, Ok(()));
                    let mut found = vec![0; memory.len()];
                    memory.copy_to(0, &mut found).unwrap();
                    assert!(found.iter().all(|found| *found == byte), "user {user}");
                }
            })
        })
        .collect();
    users.into_iter().for_each(|user| user.join().unwrap());
    let served = stage.vbds[guest.vbd].served().unwrap();
    let busy = served.counters().filter(|(queue, _)| queue.writes.get() > 0).count();
    assert_eq!(busy, 3);
}

#[test]
fn steady_state_with_persistent_grants_needs_no_grant_operation() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    let front = guest.disk();
    let mut driver = Driver::new(front.queue(32).unwrap());
    let mut io = |count: u64| {
        for n in 0..count {
            let segments = vec![Segment::from(LentSlice::anonymous(4096))];
            driver.submit(Op::Read, n % 4000 * 4096, 4096, segments);
            if n % 32 == 31 {
                while driver.in_flight() > 0 {
                    driver.wait().unwrap();
                }
            }
        }
    };
    io(320);
    let before = stage.platform.counters().values();
    let lent = front.lent_pages();
    io(3200);
    let spent = stage.platform.counters().values().since(&before);
    assert_eq!((spent.grant_maps, spent.grant_unmaps, spent.grant_copies), (0, 0, 0));
    assert_eq!(front.lent_pages(), lent, "the same pages, again and again");
    assert!(lent <= 32, "{lent} pages for 32 requests");
    // The pages are released on request.
    stage.vbds[guest.vbd].served().unwrap().shrink();
    let begun = Instant::now();
    while front.lent_pages() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} pages", front.lent_pages());
        std::thread::yield_now();
        front.release_pages();
    }
    io(32);
}

#[test]
fn frontend_with_three_pages_completes_all_requests() {
    for persistent in [true, false] {
        let mut stage = Stage::new();
        let options = BlkfrontOptions { pages: 3, persistent, ..BlkfrontOptions::default() };
        let guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
        workload(3).exercise(&*guest.disk(), 500);
        assert!(guest.disk().lent_pages() <= 3);
    }
}

#[test]
fn frontend_that_closes_and_reconnects_keeps_data_and_pending_requests() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let mut guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    let front = guest.disk();
    let mut driver = Driver::new(front.queue(8).unwrap());
    driver.write(0, &[9; 4096]).unwrap();
    guest.front.close(&mut guest.store).unwrap();
    stage.look_until_released(guest.vbd);
    let values = stage.platform.counters().values();
    assert_eq!(values.grant_maps, values.grant_unmaps, "nothing is left mapped");
    // A request without a backend waits.
    driver.submit(Op::Write { fua: true }, 4096, 4096, {
        let memory = LentSlice::anonymous(4096);
        memory.copy_from(0, &[8; 4096]).unwrap();
        vec![Segment::from(memory)]
    });
    driver.queue().kick();
    let path = format!("{}/state", stage.vbds[guest.vbd].device().frontend_path());
    ringfence_xenstore::StoreAccess::write(&mut guest.store, &path, "1").unwrap();
    guest.connect(&mut stage);
    assert_eq!(driver.wait().unwrap()[0].result, Ok(()));
    let found = image(&*front);
    assert_eq!((&found[..4096], &found[4096..8192]), (&[9; 4096][..], &[8; 4096][..]));
}

#[test]
fn backend_restart_under_load_loses_no_request() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions { queues: 2, ..BlkfrontOptions::default() };
    let served = BlkbackOptions { queues: 2, ..back(Mode::Persistent) };
    let disk = disk();
    let mut guest = Guest::join(&mut stage, disk.clone(), served, options);
    let front = guest.disk();
    let load = std::thread::spawn(move || workload(11).exercise(&*front, 500));
    loop {
        // A new backend for the same device, as after an upgrade.
        let vbd = &mut stage.vbds[guest.vbd];
        let device = *vbd.device();
        let path = format!("{}/state", device.backend_path());
        let shared: Arc<dyn Disk> = disk.clone();
        let next =
            ringfence_block::vbd::backend::VbdBackend::new(device, served, shared, Arc::new(|| {}));
        drop(std::mem::replace(vbd, next));
        // The store has the backend's features; the backend waits for the frontend to begin.
        ringfence_xenstore::StoreAccess::write(&mut stage.store, &path, "2").unwrap();
        guest.look();
        guest.connect(&mut stage);
        // The number of restarts depends on the machine's speed.
        if load.is_finished() {
            break;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    load.join().unwrap();
}

#[test]
fn requests_after_frontend_gave_up_fail() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let mut guest = Guest::join(&mut stage, disk(), back(Mode::Map), options);
    let front = guest.disk();
    let mut driver = Driver::new(front.queue(8).unwrap());
    guest.front.close(&mut guest.store).unwrap();
    let read = || vec![Segment::from(LentSlice::anonymous(512))];
    driver.submit(Op::Read, 0, 512, read());
    driver.queue().kick();
    front.give_up();
    assert!(driver.wait().unwrap()[0].result.is_err());
    driver.submit(Op::Read, 0, 512, read());
    assert!(driver.wait().unwrap()[0].result.is_err());
}

#[test]
fn flush_acknowledged_over_ring_survives_power_cut() {
    for seed in 0..12 {
        let medium = PowerCutDisk::new(2048, seed);
        let mut checker = Checker::new();
        let mut random = Random::new(seed);
        for round in 0..3 {
            let mut stage = Stage::new();
            let drain_limit = Duration::from_millis(1);
            let served = BlkbackOptions { drain_limit, ..back(Mode::Persistent) };
            let options = BlkfrontOptions::default();
            let guest = Guest::join(&mut stage, Arc::new(medium.clone()), served, options);
            let front = guest.disk();
            let mut driver = Driver::new(front.queue(16).unwrap());
            let mut running = Workload::new(seed * 100 + round).start(&*front);
            running.steps(&mut driver, &mut checker, 20 + random.index(200)).unwrap();
            // Power failure: the disk gets no more requests.
            drop(stage);
            medium.cut();
            running.crashed(&mut checker);
            checker
                .check_after_crash(0, &image(&medium))
                .unwrap_or_else(|violation| panic!("seed {seed}, round {round}: {violation}"));
            front.detach();
        }
    }
}
