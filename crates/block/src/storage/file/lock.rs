//! Locks of a file that serves as a disk.
//!
//! Two kinds are taken at opening. Both belong to the open file, which I/O in flight holds, so they end with
//! the last write of the process that had the disk.
//!
//! * `flock` on the file keeps out other processes of Ringfence: exclusive, or shared for a read-only disk.
//! * Locks on single bytes are those of QEMU, `qemu-nbd` and `qemu-img` (QEMU's `locking=auto`). Each
//!   permission has a number N. Byte 100 + N is locked by whoever holds the permission, and byte 200 + N by
//!   whoever does not allow it to others. A program first locks its bytes, then looks for locks of others that
//!   contradict, and withdraws if there is one. Two programs that start together may both withdraw, never both
//!   stay.
//!
//! A file system without byte locks is reported, and `flock` alone protects the disk there.
//!
//! # After a kill
//!
//! I/O that io_uring has in flight outlives a killed process, and so do the locks of its open file. The kernel closes
//! that file after the last operation, on a busy machine some seconds later. A disk that io_uring may serve therefore
//! has two marks, locks on further bytes:
//!
//! | byte | lock of | ends with |
//! |---|---|---|
//! | 300 | the open file of the I/O | the last operation |
//! | 301 | an open file of its own, which no operation uses | the process |
//!
//! Byte 300 without byte 301 means that a process has ended and its I/O has not. The next process waits for that
//! longer than for a disk that is in use.

// #syscall daemon flock: that nobody else has a disk
// #syscall daemon openat,fstat: the mark of the process that serves a disk

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_sys::byte_lock;
use rustix::fs::{FlockOperation, Mode, OFlags};

use super::error::{LockHolder, OpenFileError, system};
use super::facts::OpenFile;

/// Maximum wait for the locks. I/O in flight of a daemon that ended still holds them.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum wait for I/O of a process that ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Wait after which the user learns the reason.
const SILENCE: Duration = Duration::from_millis(500);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// First byte of the permissions that a program holds.
const HELD: i64 = 100;

/// First byte of the permissions that a program does not allow to others.
const UNSHARED: i64 = 200;

/// Byte that the open file of I/O locks which may outlive its process.
const OUTLIVES: i64 = 300;

/// Byte that a process locks, through a descriptor without I/O, while it serves the disk.
const SERVES: i64 = 301;

/// Permission in QEMU's numbering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Permission {
    ConsistentRead = 0,
    Write = 1,
    Resize = 3,
}

impl Permission {
    /// Returns the name in QEMU's messages.
    fn name(self) -> &'static str {
        match self {
            Permission::ConsistentRead => "consistent read",
            Permission::Write => "write",
            Permission::Resize => "resize",
        }
    }

    fn held(self) -> i64 {
        HELD + self as i64
    }

    fn unshared(self) -> i64 {
        UNSHARED + self as i64
    }
}

/// Permissions that nobody else may have while the file is a disk.
const EXCLUSIVE: [Permission; 2] = [Permission::Write, Permission::Resize];

/// Returns the permissions of a disk.
fn permissions(read_only: bool) -> &'static [Permission] {
    const ALL: [Permission; 2] = [Permission::ConsistentRead, Permission::Write];
    if read_only { &ALL[..1] } else { &ALL }
}

/// Takes both kinds of locks. Waits for other holders at most [`TIMEOUT`], for the I/O of a process that ended at most
/// [`DRAIN_TIMEOUT`], and reports the wait to `report`.
pub(super) fn acquire(
    file: &OwnedFd,
    read_only: bool,
    path: &Path,
    report: &dyn Fn(&str),
) -> Result<(), OpenFileError> {
    let begun = Instant::now();
    let mut told = false;
    loop {
        let Some(holder) = try_acquire(file, read_only, path)? else { return Ok(()) };
        let waited = begun.elapsed();
        let (holder, limit) = match is_draining(file) {
            true => (LockHolder::Ended, DRAIN_TIMEOUT),
            false => (holder, TIMEOUT),
        };
        if waited >= limit {
            return Err(OpenFileError::InUse { path: path.to_owned(), holder });
        }
        if !told && waited >= SILENCE {
            told = true;
            let left = (limit - waited).as_secs();
            report(&format!("{} is in use {holder}: waiting for {left} seconds", path.display()));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Turns the locks of a disk into those of a backing file: others may read it, and no program may write it until the last
/// descriptor of this open file is closed.
///
/// # Errors
///
/// Returns the system's error.
pub fn give_up_writing(file: &OwnedFd) -> io::Result<()> {
    // In this order: the byte that denies writing to others stays locked, so no program can write meanwhile.
    match byte_lock::unlock(file, Permission::Write.held()) {
        Err(error) if !has_no_byte_locks(&error) => Err(error),
        _ => Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockShared)?),
    }
}

/// Locks a file of an image for reading, after the disk that wrote it has given up its locks for writing. Waits as for a
/// disk that is opened.
///
/// # Errors
///
/// Returns [`OpenFileError`] if another program writes the file.
pub fn lock_backing(file: &OwnedFd, path: &Path) -> Result<(), OpenFileError> {
    acquire(file, true, path, &|text| tracing::warn!("{text}"))
}

/// Marks a locked disk that io_uring may serve. Returns the descriptor that the process keeps beside the file, or `None`
/// if the file system has no byte locks, or another file has the path by now: the disk then has no marks.
pub(super) fn mark(file: &OwnedFd, path: &Path) -> Option<OwnedFd> {
    let own = rustix::fs::open(path, OpenFile::reading() | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let identity = |file: &OwnedFd| {
        rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino, stat.st_rdev)).ok()
    };
    if identity(&own)? != identity(file)? {
        return None;
    }
    // In this order: the other one alone would mean that this process has ended.
    byte_lock::lock(&own, SERVES).ok()?;
    byte_lock::lock(file, OUTLIVES).ok()?;
    Some(own)
}

/// Returns `true` if only I/O of a process that ended holds the locks.
fn is_draining(file: &OwnedFd) -> bool {
    let is_locked = |byte| byte_lock::is_locked_elsewhere(file, byte);
    matches!((is_locked(OUTLIVES), is_locked(SERVES)), (Ok(true), Ok(false)))
}

/// Takes both kinds of locks, or none and returns a holder that contradicts.
fn try_acquire(
    file: &OwnedFd,
    read_only: bool,
    path: &Path,
) -> Result<Option<LockHolder>, OpenFileError> {
    let operation = match read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
            return Ok(Some(LockHolder::Disk));
        }
        Err(error) => return Err(system("locking", path)(error)),
    }
    let contradiction = match lock_bytes(file, permissions(read_only)) {
        Ok(found) => found,
        Err(error) if has_no_byte_locks(&error) => {
            tracing::warn!(
                "{}: the file system has no locks of byte ranges ({error}): QEMU does not see that the \
                 file is in use",
                path.display()
            );
            return Ok(None);
        }
        Err(error) => return Err(system("locking", path)(error)),
    };
    if contradiction.is_some() {
        // What is kept would make others withdraw who could have the disk.
        unlock_bytes(file, permissions(read_only));
        let _ = rustix::fs::flock(file, FlockOperation::Unlock);
    }
    Ok(contradiction.map(|permission| LockHolder::Qemu(permission.name())))
}

/// Locks the bytes of the permissions. Returns the first permission about which another program disagrees.
fn lock_bytes(file: &OwnedFd, own: &[Permission]) -> io::Result<Option<Permission>> {
    let held = own.iter().map(|permission| permission.held());
    for byte in held.chain(EXCLUSIVE.map(Permission::unshared)) {
        byte_lock::lock(file, byte)?;
    }
    let denied = own.iter().map(|permission| (*permission, permission.unshared()));
    let taken = EXCLUSIVE.map(|permission| (permission, permission.held()));
    for (permission, byte) in denied.chain(taken) {
        if byte_lock::is_locked_elsewhere(file, byte)? {
            return Ok(Some(permission));
        }
    }
    Ok(None)
}

fn unlock_bytes(file: &OwnedFd, own: &[Permission]) {
    let held = own.iter().map(|permission| permission.held());
    for byte in held.chain(EXCLUSIVE.map(Permission::unshared)) {
        let _ = byte_lock::unlock(file, byte);
    }
}

fn has_no_byte_locks(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(errno, Some(libc::EINVAL | libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn open(path: &Path) -> OwnedFd {
        File::options().read(true).write(true).open(path).unwrap().into()
    }

    /// Tries to take the locks once.
    fn attempt(file: &OwnedFd, read_only: bool) -> Option<LockHolder> {
        try_acquire(file, read_only, Path::new("disk")).unwrap()
    }

    #[test]
    fn locks_exclude_a_second_writer_and_admit_readers_together() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let (first, second) = (open(&path), open(&path));
        assert_eq!(attempt(&first, false), None);
        assert_eq!(attempt(&second, false), Some(LockHolder::Disk));
        drop(first);
        let third = open(&path);
        assert_eq!(attempt(&second, true), None);
        assert_eq!(attempt(&third, true), None, "two readers");
    }

    #[test]
    fn io_of_a_process_that_ended_is_told_from_a_disk_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let (first, second) = (open(&path), open(&path));
        assert_eq!(attempt(&first, false), None);
        assert!(!is_draining(&second), "a disk without marks is in use");
        let serving = mark(&first, &path).unwrap();
        assert_eq!(attempt(&second, false), Some(LockHolder::Disk));
        assert!(!is_draining(&second), "its process lives");
        // The descriptor that no operation uses is closed with the process; the other one is not.
        drop(serving);
        assert!(is_draining(&second));
        assert_eq!(attempt(&second, false), Some(LockHolder::Disk), "the I/O still has the disk");
        drop(first);
        assert!(!is_draining(&second));
        assert_eq!(attempt(&second, false), None);
    }

    #[test]
    fn disk_that_becomes_a_backing_file_admits_readers_and_no_writer_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let (disk, backing, writer) = (open(&path), open(&path), open(&path));
        assert_eq!(attempt(&disk, false), None);
        assert_eq!(attempt(&backing, true), Some(LockHolder::Disk));
        give_up_writing(&disk).unwrap();
        assert!(attempt(&writer, false).is_some(), "before the reader has its lock");
        // A program of QEMU has no `flock`.
        assert_eq!(lock_bytes(&writer, permissions(false)).unwrap(), Some(Permission::Write));
        unlock_bytes(&writer, permissions(false));
        assert_eq!(attempt(&backing, true), None);
        drop(disk);
        assert!(attempt(&writer, false).is_some(), "after the disk is closed");
        assert_eq!(
            lock_bytes(&writer, permissions(false)).unwrap(),
            Some(Permission::Write),
            "the reader denies it"
        );
        drop(backing);
        assert_eq!(attempt(&open(&path), false), Some(LockHolder::Qemu("write")), "its own bytes");
        drop(writer);
        assert_eq!(attempt(&open(&path), false), None);
    }

    #[test]
    fn disk_whose_path_names_another_file_by_now_has_no_mark() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let file = open(&path);
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        std::fs::write(&path, [0; 512]).unwrap();
        assert!(mark(&file, &path).is_none());
        assert!(!is_draining(&open(&directory.path().join("moved"))));
    }

    #[test]
    fn byte_of_qemu_refuses_disk_and_withdrawal_leaves_no_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let (qemu, ours) = (open(&path), open(&path));
        // Held or denied by QEMU, and the result for a writer and for a reader.
        for (byte, writer, reader) in [
            (100, None, None),
            (101, Some("write"), Some("write")),
            (102, None, None),
            (103, Some("resize"), Some("resize")),
            (200, Some("consistent read"), Some("consistent read")),
            (201, Some("write"), None),
            (202, None, None),
            (203, None, None),
        ] {
            byte_lock::lock(&qemu, byte).unwrap();
            for (read_only, wanted) in [(false, writer), (true, reader)] {
                let found = attempt(&ours, read_only);
                assert_eq!(found, wanted.map(LockHolder::Qemu), "byte {byte}, {read_only}");
                let locked = [100, 101, 201, 203]
                    .map(|byte| byte_lock::is_locked_elsewhere(&qemu, byte).unwrap());
                let own = [true, !read_only, true, true];
                assert_eq!(locked, if wanted.is_some() { [false; 4] } else { own }, "byte {byte}");
                unlock_bytes(&ours, permissions(false));
            }
            byte_lock::unlock(&qemu, byte).unwrap();
        }
    }
}
