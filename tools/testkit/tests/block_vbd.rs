//! A vbd between two domains of one process, with the real handshake, rings, grants and event channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::powercut::PowerCutDisk;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, conformance, image};
use ringfence_block::storage::{Disk, DiskQueue, Geometry, Op, Segment};
use ringfence_memory::LentSlice;
use ringfence_platform::Platform;
use ringfence_sys::pressure::Share;
use ringfence_testkit::block::{Guest, Stage};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

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
}

/// Reads 32 ranges of 64 KiB at a time, none of which may fail.
fn read_many(driver: &mut Driver) {
    const LENGTH: u64 = 65_536;
    for n in 0..32 {
        let segments = vec![Segment::from(LentSlice::anonymous(65_536))];
        driver.submit(Op::Read, n * LENGTH, LENGTH, segments);
    }
    while driver.in_flight() > 0 {
        for done in driver.wait().unwrap() {
            assert_eq!(done.result, Ok(()));
        }
    }
}

#[test]
fn memory_pressure_leaves_a_share_of_the_pages_at_both_ends_and_io_goes_on() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    let front = guest.disk();
    let mut driver = Driver::new(front.queue(32).unwrap());
    let mut io = || read_many(&mut driver);
    let begun = Instant::now();
    while front.lent_pages() <= 256 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} pages", front.lent_pages());
        io();
    }
    let share = (0..4).fold(Share::WHOLE, |share, _| share.halved());
    stage.vbds[guest.vbd].set_share(share);
    front.set_share(share);
    let mapped = |stage: &Stage| -> u64 {
        let served = stage.vbds[guest.vbd].served().unwrap();
        served.counters().map(|(queue, _)| queue.kept.get()).sum()
    };
    while mapped(&stage) > 66 || front.lent_pages() > 256 {
        let levels = (mapped(&stage), front.lent_pages());
        assert!(begun.elapsed() < Duration::from_secs(60), "mapped and lent: {levels:?}");
        io();
    }
    let served = stage.vbds[guest.vbd].served().unwrap();
    let (_, persistent) = served.counters().next().unwrap();
    assert_eq!((persistent.limit.get(), persistent.shrunk.get() > 0), (66, true));
    // The pools grow again with the next requests.
    stage.vbds[guest.vbd].set_share(Share::WHOLE);
    front.set_share(Share::WHOLE);
    while mapped(&stage) <= 256 || front.lent_pages() <= 256 {
        let levels = (mapped(&stage), front.lent_pages());
        assert!(begun.elapsed() < Duration::from_secs(60), "mapped and lent: {levels:?}");
        io();
    }
}

#[test]
fn memory_pressure_at_a_frontend_whose_backend_keeps_all_pages_mapped_fails_no_request() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    let front = guest.disk();
    let mut driver = Driver::new(front.queue(32).unwrap());
    let share = Share::WHOLE.halved().halved();
    // Enough that each page is returned under pressure, and stays mapped.
    for round in 0..100 {
        if round == 20 {
            front.set_share(share);
        }
        read_many(&mut driver);
    }
    assert!(front.lent_pages() <= options.pages, "{}", front.lent_pages());
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

/// Lets the backend of a guest's disk act until no request is in flight, after a replacement has begun.
fn look_until_paused(stage: &mut Stage, vbd: usize) {
    let begun = Instant::now();
    while !stage.vbds[vbd].is_paused() {
        assert!(begun.elapsed() < Duration::from_secs(60), "requests stay in flight");
        stage.look(vbd);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Block that a writer writes in a round, and its content.
fn block_of(round: u64) -> (u64, [u8; 4096]) {
    let mut content = [0; 4096];
    content[..8].copy_from_slice(&round.to_le_bytes());
    (round % 512 * 4096, content)
}

#[test]
fn disk_replaced_under_load_has_each_acknowledged_write_in_one_of_both() {
    for mode in [Mode::Persistent, Mode::Map, Mode::Copy, Mode::Window] {
        let mut stage = Stage::new();
        let old: Arc<dyn Disk> = Arc::new(MemoryDisk::new(2 << 20, 512).unwrap());
        let new: Arc<dyn Disk> = Arc::new(MemoryDisk::new(4 << 20, 512).unwrap());
        let options = BlkfrontOptions { queues: 2, ..BlkfrontOptions::default() };
        let back = BlkbackOptions { queues: 2, ..back(mode) };
        let mut guest = Guest::join(&mut stage, Arc::clone(&old), back, options);
        let (stop, front) = (Arc::new(AtomicBool::new(false)), guest.disk());
        let writers: Vec<_> = (0..2u64)
            .map(|user| {
                let mut driver = Driver::new(front.queue(16).unwrap());
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || {
                    let mut round = user;
                    loop {
                        let (at, content) = block_of(round);
                        driver.write(at, &content).unwrap();
                        if stop.load(Ordering::Relaxed) {
                            return round;
                        }
                        round += 2;
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        stage.vbds[guest.vbd].begin_replacement();
        look_until_paused(&mut stage, guest.vbd);
        let content = image(&*old);
        // Writers wait meanwhile, so the content is that of one moment.
        std::thread::sleep(Duration::from_millis(50));
        assert!(image(&*old) == content, "{mode}: written during the pause");
        Driver::new(new.queue(1).unwrap()).write(0, &content).unwrap();
        stage.vbds[guest.vbd].end_replacement(Some(Arc::clone(&new))).unwrap();
        stage.look(guest.vbd);
        std::thread::sleep(Duration::from_millis(50));
        stop.store(true, Ordering::Relaxed);
        let last: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        assert!(image(&*old) == content, "{mode}: the old disk is written no more");
        // Each writer's last round of each of its blocks.
        let rounds = last.iter().flat_map(|last| (0..256).filter_map(|n| last.checked_sub(2 * n)));
        for round in rounds {
            let (at, content) = block_of(round);
            assert_eq!(Driver::new(new.queue(1).unwrap()).read(at, 4096).unwrap(), content);
        }
        // The frontend learns the size by the state, which is written again.
        assert_eq!(guest.disk().geometry().bytes, 2 << 20);
        guest.look();
        assert_eq!(guest.disk().geometry().bytes, 4 << 20, "{mode}");
        let mut driver = Driver::new(guest.disk().queue(1).unwrap());
        driver.write(3 << 20, &[9; 4096]).unwrap();
        assert_eq!(Driver::new(new.queue(1).unwrap()).read(3 << 20, 4096).unwrap(), [9; 4096]);
        assert!(stage.rules(guest.vbd).all().is_empty(), "{mode}");
        assert_eq!(stage.state(guest.vbd), XenbusState::Connected);
    }
}

#[test]
fn user_of_a_grown_disk_writes_beyond_the_old_end_and_a_smaller_size_changes_nothing() {
    let mut stage = Stage::new();
    let (small, large) = (MemoryDisk::new(1 << 20, 512), MemoryDisk::new(2 << 20, 512));
    let large: Arc<dyn Disk> = Arc::new(large.unwrap());
    let small: Arc<dyn Disk> = Arc::new(small.unwrap());
    let options = BlkfrontOptions::default();
    let mut guest = Guest::join(&mut stage, small, back(Mode::Persistent), options);
    let mut driver = Driver::new(guest.disk().queue(4).unwrap());
    assert_eq!(driver.write(1 << 20, &[1; 512]), Err(libc::ENOSPC));
    stage.vbds[guest.vbd].begin_replacement();
    look_until_paused(&mut stage, guest.vbd);
    stage.vbds[guest.vbd].end_replacement(Some(large)).unwrap();
    stage.look(guest.vbd);
    guest.look();
    assert_eq!(driver.write(1 << 20, &[1; 512]), Ok(()), "its queue was opened before");
    // A hostile backend announces other sizes.
    let key = format!("{}/sectors", stage.vbds[guest.vbd].device().backend_path());
    for sectors in ["1", "0", "4096", "18446744073709551615", "x", "-1"] {
        stage.store.write(&key, sectors).unwrap();
        guest.look();
        assert_eq!(guest.disk().geometry().bytes, 2 << 20, "{sectors}");
    }
    assert_eq!(driver.write(0, &[1; 512]), Ok(()));
}

#[test]
fn frontend_that_leaves_during_a_replacement_connects_to_the_other_disk() {
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let mut guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    stage.vbds[guest.vbd].begin_replacement();
    guest.front.close(&mut guest.store).unwrap();
    look_until_paused(&mut stage, guest.vbd);
    let state = format!("{}/state", stage.vbds[guest.vbd].device().frontend_path());
    guest.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    for _ in 0..3 {
        stage.look(guest.vbd);
        guest.look();
        assert!(stage.vbds[guest.vbd].connection().is_none(), "the disk is not decided yet");
    }
    let new: Arc<dyn Disk> = Arc::new(MemoryDisk::new(32 << 20, 512).unwrap());
    stage.vbds[guest.vbd].end_replacement(Some(new)).unwrap();
    guest.connect(&mut stage);
    assert_eq!(guest.disk().geometry().bytes, 32 << 20);
}

#[test]
fn disk_that_cannot_be_opened_leaves_the_old_one() {
    /// Disk whose queues cannot be opened.
    struct Unopened;
    impl Disk for Unopened {
        fn geometry(&self) -> Geometry {
            disk().geometry()
        }

        fn queue(&self, _: u32) -> std::io::Result<Box<dyn DiskQueue>> {
            Err(std::io::Error::from_raw_os_error(libc::EMFILE))
        }
    }
    let mut stage = Stage::new();
    let options = BlkfrontOptions::default();
    let guest = Guest::join(&mut stage, disk(), back(Mode::Persistent), options);
    let mut driver = Driver::new(guest.disk().queue(4).unwrap());
    driver.write(512, &[5; 512]).unwrap();
    stage.vbds[guest.vbd].begin_replacement();
    look_until_paused(&mut stage, guest.vbd);
    let replaced = stage.vbds[guest.vbd].end_replacement(Some(Arc::new(Unopened)));
    assert_eq!(replaced.unwrap_err().raw_os_error(), Some(libc::EMFILE));
    assert_eq!(driver.read(512, 512).unwrap(), [5; 512]);
    assert!(stage.vbds[guest.vbd].penalized().is_none());
}
