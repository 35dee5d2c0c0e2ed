//! Locks on single bytes of a file that belong to the open file description (`fcntl`, `F_OFD_SETLK`).
//!
//! Such a lock ends with the last descriptor of the open file, in whichever process that is, and never
//! earlier. Locks of two open files conflict also if one process has both. A locked byte need not exist.
//! All locks here are shared ones: they need no write access, and a query shows whether anybody else
//! holds one.

// #syscall daemon fcntl 1=F_OFD_SETLK: the locks by which QEMU knows that a disk is in use
// #syscall daemon fcntl 1=F_OFD_GETLK: whether QEMU uses a disk

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Takes a shared lock on `byte`. Never blocks.
///
/// # Errors
///
/// Returns the kernel's error: `EAGAIN` if another open file holds an exclusive lock, `EINVAL` or `ENOLCK`
/// if the file system has no such locks.
pub fn lock(file: impl AsFd, byte: i64) -> io::Result<()> {
    on_byte(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte).map(drop)
}

/// Ends the lock on `byte`, if there is one.
///
/// # Errors
///
/// Returns the kernel's error: `EINVAL` or `ENOLCK` if the file system has no such locks.
pub fn unlock(file: impl AsFd, byte: i64) -> io::Result<()> {
    on_byte(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte).map(drop)
}

/// Returns `true` if another open file, or a process, holds a lock of any kind on `byte`.
///
/// # Errors
///
/// Returns the kernel's error: `EINVAL` or `ENOLCK` if the file system has no such locks.
pub fn is_locked_elsewhere(file: impl AsFd, byte: i64) -> io::Result<bool> {
    let found = on_byte(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte)?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

fn on_byte(
    file: impl AsFd,
    command: libc::c_int,
    kind: libc::c_int,
    byte: i64,
) -> io::Result<libc::flock> {
    let narrow = |value| libc::c_short::try_from(value).map_err(io::Error::other);
    let mut lock = libc::flock {
        l_type: narrow(kind)?,
        l_whence: narrow(libc::SEEK_SET)?,
        l_start: byte,
        l_len: 1,
        // The kernel requires 0 for locks of open files.
        l_pid: 0,
    };
    // SAFETY: both commands read a `struct flock` at the address, and F_OFD_GETLK writes one there; `lock`
    // is one and outlives the call. The descriptor is open while `file` is borrowed.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut lock) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(lock) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn lock_is_seen_by_other_open_files_until_its_last_descriptor_closes() {
        let memory = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let (first, second) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        lock(&first, 100).unwrap();
        assert!(is_locked_elsewhere(&second, 100).unwrap());
        assert!(!is_locked_elsewhere(&second, 101).unwrap(), "the neighbour is free");
        assert!(!is_locked_elsewhere(&first, 100).unwrap(), "its own lock does not count");
        lock(&second, 100).unwrap();
        unlock(&second, 100).unwrap();
        let copy = first.try_clone().unwrap();
        drop(first);
        assert!(is_locked_elsewhere(&second, 100).unwrap(), "a descriptor is left");
        drop(copy);
        // A process that another test starts has all descriptors until it executes its program.
        let begun = Instant::now();
        while is_locked_elsewhere(&second, 100).unwrap() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no descriptor is left");
            std::thread::yield_now();
        }
    }
}
