//! Disks on real devices and real file systems: a loop device, a device that shrinks, one with bad
//! sectors, full file systems, sparse files. Each fault reaches the guest as an error, no request hangs,
//! and the backend acknowledges only requests that were carried out.
//!
//! Only root may create devices and mount file systems.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

#[path = "../../../crates/nbd/tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::file::{CacheMode, Engine, FileDisk, FileOptions};
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::{Failure, Workload};
use ringfence_block::storage::testing::{Driver, conformance, image};
use ringfence_block::storage::{Disk, Op};
use ringfence_testkit::block::{Guest, Stage};

use support::needs::{LOOPS, Need, find_program, skip_for};
use support::run;

/// Reports the test as skipped and returns `true` if this user or this container cannot run it.
fn is_skipped(needs: &[Need]) -> bool {
    let missing = needs.iter().find_map(|need| Some((*need, need.missing()?)));
    if let Some((need, reason)) = &missing {
        skip_for(*need, reason);
    }
    missing.is_some()
}

macro_rules! require {
    ($($program:literal of $package:literal),+ $(,)?) => {
        if is_skipped(&[Need::Root, LOOPS, $(Need::Program($program, $package)),+]) {
            return;
        }
    };
}

/// Loop device. Dropping the value detaches it.
struct Loop(PathBuf);

impl Loop {
    fn of(file: &Path, sector_size: u32) -> Loop {
        let size = sector_size.to_string();
        let words = ["--find", "--show", "--sector-size", &size, file.to_str().unwrap()];
        Loop(run("losetup", &words).trim().into())
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        support::output("losetup", &["--detach", self.path()]);
    }
}

/// Mounted file system. Dropping the value unmounts it.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, size: &str) -> Mount {
        std::fs::create_dir(at).unwrap();
        let size = format!("size={size}");
        run("mount", &["-t", "tmpfs", "-o", &size, "none", at.to_str().unwrap()]);
        Mount(at.to_owned())
    }

    fn ext4(at: &Path, device: &Loop) -> Mount {
        std::fs::create_dir(at).unwrap();
        run("mkfs.ext4", &["-q", "-F", device.path()]);
        run("mount", &[device.path(), at.to_str().unwrap()]);
        Mount(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        support::output("umount", &[self.0.to_str().unwrap()]);
    }
}

/// Device whose second half fails.
struct HalfBad {
    mapped: Option<String>,
    device: Loop,
}

impl HalfBad {
    /// Uses the kernel's device mapper if it is available. Otherwise the file of a loop device is truncated,
    /// which the device detects with each request.
    fn of(file: &Path, bytes: u64) -> HalfBad {
        let device = Loop::of(file, 512);
        let (half, name) = (bytes / 1024, format!("ringfence-test-{}", std::process::id()));
        if find_program("dmsetup").is_none() || !Path::new("/dev/mapper/control").exists() {
            File::options().write(true).open(file).unwrap().set_len(bytes / 2).unwrap();
            return HalfBad { mapped: None, device };
        }
        let table = format!("0 {half} linear {} 0\n{half} {half} error\n", device.path());
        run("dmsetup", &["create", "--noudevsync", &name, "--table", &table]);
        HalfBad { mapped: Some(name), device }
    }

    fn path(&self) -> PathBuf {
        let of = |name: &String| format!("/dev/mapper/{name}").into();
        self.mapped.as_ref().map_or_else(|| self.device.0.clone(), of)
    }
}

impl Drop for HalfBad {
    fn drop(&mut self) {
        if let Some(name) = &self.mapped {
            support::output("dmsetup", &["remove", "--noudevsync", name]);
        }
    }
}

/// Creates a sparse file of `bytes` bytes.
fn sparse(path: &Path, bytes: u64) -> File {
    let file = File::options().create(true).read(true).write(true).truncate(true).open(path);
    file.as_ref().unwrap().set_len(bytes).unwrap();
    file.unwrap()
}

/// Returns the engines that this kernel supports.
fn engines(path: &Path) -> Vec<Engine> {
    let options = FileOptions { engine: Engine::IoUring, ..FileOptions::default() };
    let uring = FileDisk::open(path, &options).unwrap().queue(1).is_ok();
    if uring { vec![Engine::IoUring, Engine::Threads] } else { vec![Engine::Threads] }
}

/// Disk that a guest reaches through blkfront, a ring and blkback.
struct Served {
    guest: Guest,
    _stage: Stage,
}

impl Served {
    fn new(disk: FileDisk) -> Served {
        let mut stage = Stage::new();
        let (back, front) = (BlkbackOptions::default(), BlkfrontOptions::default());
        Served { guest: Guest::join(&mut stage, Arc::new(disk), back, front), _stage: stage }
    }

    fn driver(&self) -> Driver {
        Driver::new(self.guest.disk().queue(16).unwrap())
    }
}

/// Checks random I/O on a disk with faults: each result, and at the end all of the disk's content.
/// Returns the number of rounds that ended with a failure.
fn check_faulty_disk(disk: &dyn Disk, rounds: u64) -> u64 {
    let mut checker = Checker::new();
    let mut driver = Driver::new(disk.queue(16).unwrap());
    let mut running = Workload::new(21).start(disk);
    let mut failed = 0;
    for _ in 0..rounds {
        match running.steps(&mut driver, &mut checker, 50) {
            Ok(()) => {}
            Err(Failure::Failed(errno)) => {
                assert!([libc::EIO, libc::ENOSPC].contains(&errno), "errno {errno}");
                failed += 1;
            }
            Err(failure) => panic!("{failure:?}"),
        }
    }
    while let Err(failure) = running.finish(&mut driver, &mut checker) {
        assert!(matches!(failure, Failure::Failed(_)), "{failure:?}");
    }
    failed
}

#[test]
fn block_device_with_512_or_4096_byte_sectors_conforms() {
    require!("losetup" of "mount");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("backing");
    for sector_size in [512, 4096] {
        let file = sparse(&path, 8 << 20);
        let device = Loop::of(&path, sector_size);
        for engine in engines(&device.0) {
            for cache in [CacheMode::None, CacheMode::WriteThrough] {
                file.set_len(0).unwrap();
                file.set_len(8 << 20).unwrap();
                run("blockdev", &["--flushbufs", device.path()]);
                let options =
                    FileOptions { engine, cache, discard: true, ..FileOptions::default() };
                let disk = FileDisk::open(&device.0, &options).unwrap();
                assert_eq!(disk.geometry().sector_size, sector_size);
                assert_eq!(disk.geometry().bytes, 8 << 20);
                conformance::check(&disk, u64::from(sector_size));
            }
        }
        let served = Served::new(FileDisk::open(&device.0, &FileOptions::default()).unwrap());
        let mut driver = served.driver();
        driver.write(1 << 20, &[0xA5; 8192]).unwrap();
        assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
        let mut found = [0; 8192];
        file.read_exact_at(&mut found, 1 << 20).unwrap();
        assert!(found.iter().all(|byte| *byte == 0xA5), "the device's file has it");
    }
}

#[test]
fn io_beyond_end_of_shrunk_device_fails_and_rest_is_served() {
    require!("losetup" of "mount");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("backing");
    for engine in [Engine::Auto, Engine::Threads] {
        let file = sparse(&path, 8 << 20);
        let device = Loop::of(&path, 512);
        let options = FileOptions { engine, ..FileOptions::default() };
        let served = Served::new(FileDisk::open(&device.0, &options).unwrap());
        let mut driver = served.driver();
        driver.write(6 << 20, &[1; 4096]).unwrap();
        for announced in [false, true] {
            // First the file is truncated; then the device learns its new capacity.
            if announced {
                run("losetup", &["--set-capacity", device.path()]);
            } else {
                file.set_len(4 << 20).unwrap();
            }
            assert_eq!(driver.read(6 << 20, 4096), Err(libc::EIO), "announced: {announced}");
            assert_eq!(
                driver.read((4 << 20) - 4096, 8192),
                Err(libc::EIO),
                "announced: {announced}"
            );
            driver.write(1 << 20, &[2; 4096]).unwrap();
            assert_eq!(driver.read(1 << 20, 4096), Ok(vec![2; 4096]));
            assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
        }
        // The kernel's error for writes beyond the end of a device.
        assert_eq!(driver.write(6 << 20, &[3; 4096]), Err(libc::ENOSPC), "beyond the end");
    }
}

#[test]
fn io_on_bad_sectors_fails_and_other_sectors_are_served() {
    require!("losetup" of "mount");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("backing");
    const BYTES: u64 = 8 << 20;
    for cache in [CacheMode::None, CacheMode::WriteThrough] {
        drop(sparse(&path, BYTES));
        let device = HalfBad::of(&path, BYTES);
        let options = FileOptions { cache, ..FileOptions::default() };
        let served = Served::new(FileDisk::open(&device.path(), &options).unwrap());
        let failed = check_faulty_disk(&*served.guest.disk(), 40);
        assert!(failed > 0, "half of the device is bad");
        let mut driver = served.driver();
        assert_eq!(driver.read(BYTES - 4096, 4096), Err(libc::EIO));
        driver.write(0, &[9; 4096]).unwrap();
        assert_eq!(driver.read(0, 4096), Ok(vec![9; 4096]), "{cache:?}: the other half works");
    }
}

#[test]
fn flush_after_failed_writeback_returns_error() {
    require!("losetup" of "mount");
    let directory = tempfile::tempdir().unwrap();
    // The device fails writes: its file system has no space.
    let mount = Mount::tmpfs(&directory.path().join("small"), "1m");
    let path = mount.0.join("backing");
    drop(sparse(&path, 8 << 20));
    let device = Loop::of(&path, 512);
    let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
    let served = Served::new(FileDisk::open(&device.0, &options).unwrap());
    let mut driver = served.driver();
    let written = driver.write(0, &[7; 4 << 20]);
    let flushed = driver.run(Op::Flush, 0, 0, vec![]).result;
    assert!(written.is_err() || flushed.is_err(), "the lost write was acknowledged and flushed");
    drop(driver);
    drop(served);
    // Without a page cache the write itself fails.
    let served = Served::new(FileDisk::open(&device.0, &FileOptions::default()).unwrap());
    assert_eq!(served.driver().write(4 << 20, &[7; 2 << 20]), Err(libc::ENOSPC));
}

#[test]
fn write_to_full_file_system_fails_and_acknowledged_data_is_kept() {
    require!("losetup" of "mount", "mkfs.ext4" of "e2fsprogs");
    let directory = tempfile::tempdir().unwrap();
    let of = |name: &str| directory.path().join(name);
    drop(sparse(&of("backing"), 8 << 20));
    let device = Loop::of(&of("backing"), 512);
    let mounts = [Mount::tmpfs(&of("tmpfs"), "2m"), Mount::ext4(&of("ext4"), &device)];
    for (mount, cache) in mounts.iter().zip([CacheMode::WriteBack, CacheMode::None]) {
        let (path, filler) = (mount.0.join("disk"), mount.0.join("filler"));
        drop(sparse(&path, 32 << 20));
        // The workload writes more than fits.
        let options = FileOptions { cache, discard: true, ..FileOptions::default() };
        let served = Served::new(FileDisk::open(&path, &options).unwrap());
        let failed = check_faulty_disk(&*served.guest.disk(), 80);
        assert!(failed > 0, "{}: no write failed", mount.0.display());
        let mut driver = served.driver();
        let full = (0..).map(|n| driver.write((n << 20) % (32 << 20), &[5; 1 << 20]).is_err());
        assert!(full.take(64).any(|failed| failed), "no write failed");
        assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()), "data that fits is flushed");
        assert!(!filler.exists());
        assert_eq!(image(&*served.guest.disk()).len(), 32 << 20, "the whole disk is readable");
        // A discard frees space.
        let discard = Op::Discard { secure: false };
        assert_eq!(driver.run(discard, 0, 32 << 20, vec![]).result, Ok(()));
        driver.write(16 << 20, &[6; 65536]).unwrap();
        assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
        assert_eq!(driver.read(16 << 20, 65536), Ok(vec![6; 65536]));
    }
}

#[test]
fn sparse_file_grows_by_written_blocks_and_keeps_its_size() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    const BYTES: u64 = 1 << 30;
    let file = sparse(&path, BYTES);
    let places: Vec<u64> = (0..32).map(|n| n * (BYTES / 32) + 4096).collect();
    {
        let served = Served::new(FileDisk::open(&path, &FileOptions::default()).unwrap());
        let mut driver = served.driver();
        for (place, byte) in places.iter().zip(1..) {
            driver.write(*place, &[byte; 4096]).unwrap();
        }
        assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
        assert_eq!(driver.read(BYTES - 4096, 4096), Ok(vec![0; 4096]), "a hole is zeros");
    }
    let facts = file.metadata().unwrap();
    assert_eq!(facts.len(), BYTES);
    assert!(facts.blocks() * 512 < 16 << 20, "{} bytes for 128 KiB", facts.blocks() * 512);
    for (place, byte) in places.iter().zip(1..) {
        let mut found = [0; 4096 + 1024];
        file.read_exact_at(&mut found, place - 512).unwrap();
        assert!(found[..512].iter().all(|b| *b == 0), "in front of {place}");
        assert!(found[512..4608].iter().all(|b| *b == byte), "at {place}");
        assert!(found[4608..].iter().all(|b| *b == 0), "behind {place}");
    }
}
