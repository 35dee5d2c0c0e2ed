//! Errors of the storage behind `run --disk` reach the user as errors. No request hangs, no request is
//! acknowledged that was not done, and the rest of the disk works. All processes, sandboxes and rings take part.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringfence_block::storage::testing::{Driver, lent_with};
use ringfence_block::storage::{Disk, Op};

use crate::require;
use crate::support::disks::{
    Background, image_file, listens, loop_missing, output_of, served_within, succeed,
};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT};

/// Limit for requests, longer than any that does not hang.
const NEVER: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// Mounted file system or device, with the command that removes it on drop.
struct Undone(&'static [&'static str], PathBuf);

impl Drop for Undone {
    fn drop(&mut self) {
        let path = self.1.display().to_string();
        output_of(&[self.0, &[&path]].concat());
    }
}

fn flush(driver: &mut Driver) -> Result<(), i32> {
    driver.run(Op::Flush, 0, 0, vec![]).result
}

/// Checks that acknowledged data can be read.
fn holds(driver: &mut Driver, at: usize, byte: u8) {
    let found = driver.read(u64::try_from(at).unwrap(), 65536).unwrap();
    assert!(found.iter().all(|b| *b == byte), "what was acknowledged at {at} is not there");
}

#[test]
fn full_file_system_fails_writes_and_keeps_acknowledged_data() {
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let small = lab.file("small");
    fs::create_dir(&small).unwrap();
    succeed(&["mount", "-t", "tmpfs", "-o", "size=4m", "none", small.to_str().unwrap()]);
    let _mounted = Undone(&["umount", "-l"], small.clone());
    let path = small.join("disk.img");
    fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
    let disk = format!("{},cache=writeback,discard", path.display());
    let (_guest, disk) = served_within(&lab, &disk, NEVER);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    let mut kept = vec![];
    let mut failed = 0;
    for (at, byte) in (0..16).map(|n| n * MIB).zip(1..) {
        match driver.write(u64::try_from(at).unwrap(), &[byte; 65536]) {
            Ok(()) => kept.push((at, byte)),
            Err(errno) => panic!("there is room for this: errno {errno}"),
        }
    }
    for at in (0..16).map(|n| n * MIB + 65536) {
        let written = driver.write(u64::try_from(at).unwrap(), &[99; MIB - 65536]);
        assert!(matches!(written, Ok(()) | Err(libc::ENOSPC)), "the reason arrives: {written:?}");
        failed += usize::from(written.is_err());
    }
    assert!(failed > 0, "16 MiB do not fit");
    assert_eq!(flush(&mut driver), Ok(()), "what was acknowledged is as safe as it can be");
    for (at, byte) in &kept {
        holds(&mut driver, *at, *byte);
    }
    // Deleted data makes room again.
    let discard = Op::Discard { secure: false };
    assert_eq!(driver.run(discard, 8 << 20, 8 << 20, vec![]).result, Ok(()));
    assert_eq!(driver.write(9 << 20, &[7; 65536]), Ok(()));
    holds(&mut driver, 9 * MIB, 7);
}

#[test]
fn write_beyond_limit_of_file_size_is_no_space_and_disk_works() {
    require!(Need::Guests, Need::Root, Need::Program("prlimit", "util-linux"));
    let lab = Lab::new();
    let path = image_file(&lab, 8).canonicalize().unwrap();
    let disk = format!("{},cache=writeback", path.display());
    let (guest, disk) = served_within(&lab, &disk, NEVER);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    let process = guest.inner("driver").pid.as_raw_nonzero().to_string();
    succeed(&["prlimit", "--pid", &process, "--fsize=4194304"]);
    assert_eq!(driver.write(6 << 20, &[1; 65536]), Err(libc::ENOSPC));
    driver.write(1 << 20, &[2; 65536]).unwrap();
    assert_eq!(flush(&mut driver), Ok(()));
    holds(&mut driver, MIB, 2);
}

#[test]
fn truncated_file_fails_requests_beyond_end_and_serves_rest() {
    require!(Need::Guests);
    let lab = Lab::new();
    let path = image_file(&lab, 8);
    let (_guest, disk) = served_within(&lab, &path.display().to_string(), NEVER);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    driver.write(6 << 20, &[1; 65536]).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(4 << 20).unwrap();
    assert_eq!(driver.read(6 << 20, 65536), Err(libc::EIO));
    assert_eq!(driver.read((4 << 20) - 4096, 8192), Err(libc::EIO), "half of it is gone");
    driver.write(1 << 20, &[2; 65536]).unwrap();
    assert_eq!(flush(&mut driver), Ok(()));
    holds(&mut driver, MIB, 2);
    let mut found = [0; 65536];
    fs::File::open(&path).unwrap().read_exact_at(&mut found, 1 << 20).unwrap();
    assert!(found.iter().all(|byte| *byte == 2));
}

#[test]
fn bad_sectors_return_errors_and_others_are_served() {
    require!(Need::Guests, Need::Root, Need::Program("losetup", "mount"));
    if let Some(reason) = loop_missing() {
        return crate::support::needs::skip_for_the_kernel(&reason);
    }
    let lab = Lab::new();
    let path = image_file(&lab, 8);
    let device = succeed(&["losetup", "--find", "--show", path.to_str().unwrap()]);
    let device = device.trim().to_owned();
    let _attached = Undone(&["losetup", "--detach"], device.clone().into());
    for cache in ["none", "writethrough"] {
        let image = fs::File::options().write(true).open(&path).unwrap();
        image.set_len(8 << 20).unwrap();
        succeed(&["losetup", "--set-capacity", &device]);
        let (guest, disk) = served_within(&lab, &format!("{device},cache={cache}"), NEVER);
        let mut driver = Driver::new(disk.queue(4).unwrap());
        driver.write(6 << 20, &[1; 65536]).unwrap();
        // The device no longer has its second half. First each request finds that out, then the backend knows it.
        image.set_len(4 << 20).unwrap();
        if cache == "none" {
            assert_eq!(driver.read(6 << 20, 65536), Err(libc::EIO), "{cache}");
        }
        succeed(&["losetup", "--set-capacity", &device]);
        assert_eq!(driver.read(6 << 20, 65536), Err(libc::EIO), "{cache}");
        // The kernel's error for writes beyond the end of a device.
        assert_eq!(driver.write(6 << 20, &[1; 65536]), Err(libc::ENOSPC), "{cache}");
        driver.write(1 << 20, &[3; 65536]).unwrap();
        assert_eq!(flush(&mut driver), Ok(()), "{cache}");
        holds(&mut driver, MIB, 3);
        drop((driver, disk));
        drop(guest);
        // The device is free again, even if a cache still holds what failed.
        let free = || output_of(&["blockdev", "--flushbufs", &device]).0.is_some();
        assert!(crate::support::eventually(MOMENT, free));
    }
}

/// Starts nbdkit with a file at the socket, and with filters.
fn nbdkit(socket: &Path, image: &Path, filter: &[&str]) -> Background {
    let (path, image) = (socket.to_str().unwrap(), image.to_str().unwrap());
    let (filters, settings): (Vec<_>, Vec<_>) =
        filter.iter().partition(|word| word.starts_with("--"));
    let words = [&["nbdkit", "-f", "-U", path], &filters[..], &["file", image], &settings[..]];
    Background::start(&words.concat(), || listens(socket))
}

#[test]
fn server_error_is_returned_as_disk_error() {
    require!(Need::Guests, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let (image, socket, trigger) = (image_file(&lab, 8), lab.file("socket"), lab.file("trigger"));
    let trigger_word = format!("error-file={}", trigger.display());
    let filter = ["--filter=error", "error=EIO", "error-rate=100%", &trigger_word];
    let _server = nbdkit(&socket, &image, &filter);
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let (_guest, disk) = served_within(&lab, &address, NEVER);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    driver.write(0, &[4; 65536]).unwrap();
    fs::write(&trigger, "").unwrap();
    assert_eq!(driver.read(0, 65536), Err(libc::EIO));
    assert_eq!(driver.write(65536, &[5; 65536]), Err(libc::EIO));
    let durable = Op::Write { fua: true };
    let written = driver.run(durable, 1 << 17, 4096, vec![lent_with(&[5; 4096]).into()]).result;
    assert_eq!(written, Err(libc::EIO), "nothing is acknowledged that was not done");
    fs::remove_file(&trigger).unwrap();
    holds(&mut driver, 0, 4);
    assert_eq!(flush(&mut driver), Ok(()));
}

#[test]
fn killed_server_fails_requests_within_timeout() {
    require!(Need::Guests, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let (image, socket) = (image_file(&lab, 8), lab.file("socket"));
    let server = nbdkit(&socket, &image, &[]);
    let address = format!("nbd+unix:///?socket={},timeout=4,connect=2", socket.display());
    let (_guest, disk) = served_within(&lab, &address, NEVER);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    driver.write(0, &[6; 65536]).unwrap();
    drop(server);
    let begun = Instant::now();
    assert_eq!(driver.write(65536, &[7; 65536]), Err(libc::EIO));
    assert_eq!(flush(&mut driver), Err(libc::EIO), "what was not flushed is not said to be");
    assert!(begun.elapsed() >= Duration::from_secs(1), "it was waited for");
}
