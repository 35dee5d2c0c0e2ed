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

// #syscall daemon flock: that nobody else has a disk

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_sys::byte_lock;
use rustix::fs::FlockOperation;

use super::facts::{OpenFileError, system};

/// Maximum wait for the locks. I/O in flight of a daemon that ended still holds them.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Wait after which the user learns the reason.
const SILENCE: Duration = Duration::from_millis(500);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// First byte of the permissions that a program holds.
const HELD: i64 = 100;

/// First byte of the permissions that a program does not allow to others.
const UNSHARED: i64 = 200;

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

/// Holder of a lock that contradicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockHolder {
    /// Process that serves the file as a disk, by `flock`.
    Disk,
    /// Program with QEMU's locks, and the permission in question.
    Qemu(&'static str),
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LockHolder::Disk => f.write_str("as a disk by another process (it holds a lock)"),
            LockHolder::Qemu(permission) => {
                write!(f, "by QEMU or one of its tools (which hold a \"{permission}\" lock)")
            }
        }
    }
}

/// Takes both kinds of locks. Waits for other holders at most [`TIMEOUT`], and reports the wait to `report`.
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
        if waited >= TIMEOUT {
            return Err(OpenFileError::InUse { path: path.to_owned(), holder });
        }
        if !told && waited >= SILENCE {
            told = true;
            let left = (TIMEOUT - waited).as_secs();
            report(&format!("{} is in use {holder}: waiting for {left} seconds", path.display()));
        }
        std::thread::sleep(PAUSE);
    }
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
