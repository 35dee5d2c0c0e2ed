use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::*;
use crate::storage::testing::{Driver, conformance, lent_with};
use crate::storage::{Op, Segment};

struct Image {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

fn image(bytes: u64) -> Image {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    Image { path, _directory: directory }
}

fn options(engine: Engine) -> FileOptions {
    FileOptions { engine, discard: true, ..FileOptions::default() }
}

/// Reports a skipped test. Fails instead if `RINGFENCE_TEST_REQUIRE` is set, unless the kernel lacks the
/// feature altogether.
fn skip(reason: &str, errno: Option<i32>) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    let is_lacking = [Some(libc::ENOSYS), Some(libc::EOPNOTSUPP)].contains(&errno);
    assert!(!is_required || is_lacking, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Returns the engines that this kernel supports.
fn engines() -> Vec<Engine> {
    let image = image(1 << 20);
    let disk = FileDisk::open(&image.path, &options(Engine::IoUring)).unwrap();
    match disk.queue(1) {
        Ok(_) => vec![Engine::IoUring, Engine::Threads],
        Err(error) => {
            skip(&format!("io_uring is refused here: {error}"), error.raw_os_error());
            vec![Engine::Threads]
        }
    }
}

#[test]
fn every_engine_conforms_in_every_cache_mode() {
    let modes = CacheMode::NAMES.iter().map(|name| name.parse().unwrap());
    for (seed, cache) in (1..).zip(modes) {
        for engine in engines() {
            let image = image(5 << 20);
            let disk =
                FileDisk::open(&image.path, &FileOptions { cache, ..options(engine) }).unwrap();
            conformance::check(&disk, seed * 1000);
        }
    }
}

#[test]
fn bounce_buffers_and_large_sectors_conform() {
    for engine in engines() {
        for bounce in [Bounce::Always, Bounce::Never] {
            let image = image(5 << 20);
            let options = FileOptions { bounce, sector_size: Some(4096), ..options(engine) };
            conformance::check(&FileDisk::open(&image.path, &options).unwrap(), 77);
        }
    }
}

/// Returns the storage of a file in bytes.
fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Runs a write of zeros and a flush.
fn zero(driver: &mut Driver, allocate: bool, offset: u64, len: u64) {
    let done = driver.run(Op::WriteZeroes { allocate }, offset, len, vec![]);
    assert_eq!(done.result, Ok(()));
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
}

#[test]
fn zeros_free_storage_of_sparse_file_unless_request_keeps_it() {
    for engine in engines() {
        for discard in [false, true] {
            let image = image(64 << 20);
            let options = FileOptions { engine, discard, ..FileOptions::default() };
            let disk = FileDisk::open(&image.path, &options).unwrap();
            if !disk.facts().can_discard {
                let place = image.path.display();
                return skip(&format!("no holes at {place}"), Some(libc::EOPNOTSUPP));
            }
            let mut driver = Driver::new(disk.queue(4).unwrap());
            zero(&mut driver, false, 0, 64 << 20);
            assert!(allocated(&image.path) < 1 << 20, "zeros of a hole need no storage");
            driver.write(8 << 20, &vec![1; 4 << 20]).unwrap();
            zero(&mut driver, false, 8 << 20, 4 << 20);
            assert!(allocated(&image.path) < 1 << 20, "zeros over data free its storage");
            if discard {
                let discard = Op::Discard { secure: false };
                driver.run(discard, 16 << 20, 8 << 20, vec![]).result.unwrap();
                zero(&mut driver, false, 16 << 20, 8 << 20);
                assert!(allocated(&image.path) < 1 << 20, "a discarded range stays a hole");
            }
            zero(&mut driver, true, 8 << 20, 4 << 20);
            assert!(allocated(&image.path) >= 4 << 20, "the request asked for storage");
            assert_eq!(driver.read(9 << 20, 4096), Ok(vec![0; 4096]));
        }
    }
}

#[test]
fn allocated_disk_without_discard_keeps_zeros_allocated_and_refuses_discards() {
    for engine in engines() {
        let image = image(8 << 20);
        let file = File::options().write(true).open(&image.path).unwrap();
        file.write_all_at(&vec![7; 8 << 20], 0).unwrap();
        file.sync_all().unwrap();
        let disk = FileDisk::open(&image.path, &FileOptions { engine, ..FileOptions::default() });
        let disk = disk.unwrap();
        assert_eq!(disk.geometry().discard, None);
        let mut driver = Driver::new(disk.queue(4).unwrap());
        driver.write(0, &vec![1; 4 << 20]).unwrap();
        let before = std::fs::metadata(&image.path).unwrap().blocks();
        zero(&mut driver, false, 0, 4 << 20);
        assert!(std::fs::metadata(&image.path).unwrap().blocks() >= before);
        assert_eq!(driver.read(1 << 20, 4096), Ok(vec![0; 4096]));
        let discarded = driver.run(Op::Discard { secure: false }, 0, 4 << 20, vec![]);
        assert_eq!(discarded.result, Err(libc::EOPNOTSUPP));
    }
}

#[test]
fn discard_frees_blocks_of_the_file() {
    for engine in engines() {
        let image = image(8 << 20);
        let disk = FileDisk::open(&image.path, &options(engine)).unwrap();
        if disk.geometry().discard.is_none() {
            let place = image.path.display();
            skip(&format!("the file system of {place} punches no holes"), Some(libc::EOPNOTSUPP));
            return;
        }
        let mut driver = Driver::new(disk.queue(4).unwrap());
        driver.write(0, &vec![1; 4 << 20]).unwrap();
        driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
        let before = std::fs::metadata(&image.path).unwrap().blocks();
        driver.run(Op::Discard { secure: false }, 0, 4 << 20, vec![]).result.unwrap();
        driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
        let after = std::fs::metadata(&image.path).unwrap();
        assert!(after.blocks() + 4096 < before, "{} of {before} blocks", after.blocks());
        assert_eq!(after.len(), 8 << 20, "the size stays");
    }
}

#[test]
fn read_beyond_truncated_end_returns_error() {
    for engine in engines() {
        let image = image(1 << 20);
        let disk = FileDisk::open(&image.path, &options(engine)).unwrap();
        let mut driver = Driver::new(disk.queue(4).unwrap());
        driver.write(0, &[3; 4096]).unwrap();
        File::options().write(true).open(&image.path).unwrap().set_len(2048).unwrap();
        assert_eq!(driver.read(0, 4096), Err(libc::EIO), "the second half is not there");
        assert_eq!(driver.read(512 << 10, 4096), Err(libc::EIO));
        assert_eq!(driver.read(0, 2048), Ok(vec![3; 2048]));
    }
}

#[test]
fn write_to_read_only_disk_is_refused() {
    let image = image(1 << 20);
    let read_only = FileOptions { read_only: true, ..FileOptions::default() };
    let disk = FileDisk::open(&image.path, &read_only).unwrap();
    assert!(disk.geometry().read_only && !disk.geometry().write_zeroes);
    let mut driver = Driver::new(disk.queue(1).unwrap());
    assert_eq!(driver.write(0, &[1; 512]), Err(libc::EROFS));
    assert_eq!(
        driver.run(Op::WriteZeroes { allocate: false }, 0, 512, vec![]).result,
        Err(libc::EROFS)
    );
    assert_eq!(driver.read(0, 512), Ok(vec![0; 512]));
    FileDisk::open(&image.path, &read_only).expect("two readers may share it");
}

#[test]
fn file_that_is_no_disk_is_refused_with_reason() {
    let defaults = FileOptions::default();
    let refused = |path: &Path, options: &FileOptions| match FileDisk::open(path, options) {
        Ok(_) => panic!("{} was taken", path.display()),
        Err(error) => error.to_string(),
    };
    assert!(refused(Path::new("/dev/null"), &defaults).contains("neither a file nor a block"));
    assert!(refused(Path::new("/"), &defaults).contains("opening /"));
    assert!(refused(Path::new("/nowhere"), &defaults).contains("No such file"));
    assert!(refused(&image(0).path, &defaults).contains("no sector"));
    let odd = FileOptions { sector_size: Some(1024), ..defaults };
    assert!(refused(&image(4096).path, &odd).contains("512 or 4096"));
}

#[test]
fn image_of_odd_size_is_refused_with_the_size_to_pad_to() {
    for (bytes, sector_size, padded) in
        [(100, 512, "512"), (1000, 512, "1024"), (4608, 4096, "8192")]
    {
        let image = image(bytes);
        let options = FileOptions { sector_size: Some(sector_size), ..FileOptions::default() };
        let error = FileDisk::open(&image.path, &options).err().unwrap().to_string();
        let advice = format!("truncate -s {padded} {}", image.path.display());
        assert!(error.contains(&advice), "{error}");
    }
}

#[test]
fn image_of_odd_size_in_use_keeps_its_whole_sectors() {
    let image = image(4096 + 700);
    let options = FileOptions { in_use: true, ..FileOptions::default() };
    let disk = FileDisk::open(&image.path, &options).unwrap();
    assert_eq!(disk.geometry().bytes, 4096 + 512);
}

#[test]
fn image_of_another_format_is_refused_unless_it_is_said_to_be_raw() {
    let head = |bytes: &[u8], offset| (bytes.to_vec(), offset);
    let footer_at = (1 << 20) - 512;
    let signatures = [
        (head(b"QFI\xfb", 0), "qcow2"),
        (head(b"conectix", 0), "VHD"),
        (head(b"conectix", footer_at), "VHD"),
        (head(b"LUKS\xba\xbe", 0), "LUKS"),
        (head(b"\x7f\x10\xda\xbe", 64), "VDI"),
    ];
    for ((bytes, offset), name) in signatures {
        let image = image(1 << 20);
        let file = File::options().write(true).open(&image.path).unwrap();
        file.write_all_at(&bytes, offset).unwrap();
        let defaults = FileOptions::default();
        let error = FileDisk::open(&image.path, &defaults).err().expect(name).to_string();
        assert!(error.contains(name) && error.contains("format=raw"), "{error}");
        // A read-only open is refused as well.
        let read_only = FileOptions { read_only: true, ..defaults.clone() };
        assert!(FileDisk::open(&image.path, &read_only).is_err(), "{name}");
        let raw = FileOptions { raw: true, ..defaults };
        let disk = FileDisk::open(&image.path, &raw).unwrap();
        assert_eq!(disk.geometry().bytes, 1 << 20);
    }
}

#[test]
fn second_writer_waits_for_lock_of_first() {
    let image = image(1 << 20);
    let first = FileDisk::open(&image.path, &FileOptions::default()).unwrap();
    // Before the thread begins to sleep: this one may be late.
    let begun = std::time::Instant::now();
    let gone = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        drop(first);
    });
    FileDisk::open(&image.path, &FileOptions::default()).unwrap();
    assert!(begun.elapsed().as_millis() >= 150, "it was opened beside the other");
    gone.join().unwrap();
}

/// Checks that errors of the file reach the guest, on a device that is always full.
#[test]
fn error_of_full_device_reaches_the_guest() {
    for engine in engines() {
        let image = image(1 << 20);
        let mut disk = FileDisk::open(&image.path, &options(engine)).unwrap();
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        disk.file = Arc::new(full.into());
        let mut driver = Driver::new(disk.queue(1).unwrap());
        assert_eq!(driver.write(0, &[1; 512]), Err(libc::ENOSPC));
        assert!(driver.run(Op::Flush, 0, 0, vec![]).result.is_err());
    }
}

#[test]
fn registered_memory_is_used_until_it_is_unregistered() {
    if !engines().contains(&Engine::IoUring) {
        return;
    }
    let image = image(1 << 20);
    let disk = FileDisk::open(&image.path, &options(Engine::IoUring)).unwrap();
    let mut driver = Driver::new(disk.queue(4).unwrap());
    let memory = ringfence_memory::Mapping::private(8192).unwrap().lent();
    let first = memory.slice(0, 4096).unwrap();
    if !driver.queue().register(7, &first) {
        skip("memory cannot be registered here: raise RLIMIT_MEMLOCK (ulimit -l)", None);
        return;
    }
    first.copy_from(0, &[9; 4096]).unwrap();
    let named = |memory: &LentSlice| vec![Segment { memory: memory.clone(), registered: Some(7) }];
    let write = Op::Write { fua: false };
    assert_eq!(driver.run(write, 8192, 4096, named(&first)).result, Ok(()));
    first.zero(0, 4096).unwrap();
    assert_eq!(driver.run(Op::Read, 8192, 4096, named(&first)).result, Ok(()));
    assert_eq!(first.fetch::<4>(4092).unwrap().into_unchecked(), [9; 4]);
    // A wrong name, or one of other memory, is a hint without effect.
    let second = memory.slice(4096, 4096).unwrap();
    assert_eq!(driver.run(Op::Read, 8192, 4096, named(&second)).result, Ok(()));
    assert_eq!(second.fetch::<4>(0).unwrap().into_unchecked(), [9; 4]);
    driver.queue().unregister(7);
    second.zero(0, 4096).unwrap();
    assert_eq!(driver.run(Op::Read, 8192, 4096, named(&second)).result, Ok(()));
    assert_eq!(second.fetch::<4>(0).unwrap().into_unchecked(), [9; 4]);
    for name in 0..3 {
        assert!(driver.queue().register(name, &first), "names can be used again");
    }
}

/// Checks that I/O through a registration uses the pages of the time of registration. A replaced page, as
/// after a revoke, is used only after a new registration.
#[test]
fn replaced_page_is_read_only_after_new_registration() {
    use rustix::fs::{FallocateFlags, MemfdFlags};
    if !engines().contains(&Engine::IoUring) {
        return;
    }
    let image = image(1 << 20);
    File::options().write(true).open(&image.path).unwrap().write_all_at(&[4; 4096], 0).unwrap();
    let disk = FileDisk::open(&image.path, &options(Engine::IoUring)).unwrap();
    let mut driver = Driver::new(disk.queue(4).unwrap());
    let arena = rustix::fs::memfd_create("arena", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&arena, 4096).unwrap();
    let protection = ringfence_memory::Protection::ReadWrite;
    let page = Mapping::new(&arena, 0, 4096, protection).unwrap().lent();
    page.copy_from(0, &[1]).unwrap();
    if !driver.queue().register(1, &page) {
        skip("memory cannot be registered here: raise RLIMIT_MEMLOCK (ulimit -l)", None);
        return;
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&arena, punch, 0, 4096).unwrap();
    let read = |driver: &mut Driver| {
        let segment = Segment { memory: page.clone(), registered: Some(1) };
        driver.run(Op::Read, 0, 4096, vec![segment]).result.unwrap();
        page.fetch::<1>(0).unwrap().into_unchecked()[0]
    };
    assert_eq!(read(&mut driver), 0, "reported as done, and lost: why names have generations");
    driver.queue().unregister(1);
    assert_eq!(read(&mut driver), 4, "without a registration the mapping leads to the new page");
    page.zero(0, 4096).unwrap();
    assert!(driver.queue().register(1, &page));
    assert_eq!(read(&mut driver), 4, "and so does a new one");
}

#[test]
fn bounced_write_stores_bytes_of_submission() {
    // The page changes after the submission: the write must store the bytes of before.
    for engine in engines() {
        let image = image(1 << 20);
        let bounced = FileOptions { bounce: Bounce::Always, ..options(engine) };
        let disk = FileDisk::open(&image.path, &bounced).unwrap();
        let mut driver = Driver::new(disk.queue(4).unwrap());
        if engine == Engine::IoUring {
            let memory = lent_with(&[1; 4096]);
            let write = Op::Write { fua: false };
            driver.submit(write, 0, 4096, vec![memory.clone().into()]);
            memory.copy_from(0, &[2; 4096]).unwrap();
            assert_eq!(driver.wait().unwrap()[0].result, Ok(()));
            assert_eq!(driver.read(0, 4096), Ok(vec![1; 4096]));
        }
    }
}
