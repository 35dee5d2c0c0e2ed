//! Process-wide calls for sandboxes: namespaces, read-only mount trees, inheritable descriptors.
//!
//! These calls need `unsafe`. The crate `sandbox` uses them.

// #syscall none: what makes a sandbox comes before its list

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// Namespaces that the calling process leaves for fresh ones (namespaces(7)).
///
/// No variant has `CLONE_FILES` or `CLONE_FS`: [`unshare`] could not be safe with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// A user namespace, and a PID namespace that the *next child* enters as process 1. The
    /// caller holds every capability in the new user namespace. It must have one thread.
    UserAndPid,
    /// Mounts, network, System V IPC and POSIX queues, host name. Needs `CAP_SYS_ADMIN` in the
    /// caller's user namespace.
    MountNetIpcUts,
    /// The namespaces of [`Fresh::MountNetIpcUts`] without a network namespace.
    MountIpcUts,
    Mount,
    /// A cgroup namespace only, whose root is the cgroup of this process. Needs `CAP_SYS_ADMIN` in the caller's user
    /// namespace. Who has no capability in that user namespace mounts no hierarchy of cgroups by it.
    Cgroup,
    /// A nested user namespace alone. The caller stays in namespaces that it then has no capability over. The caller
    /// must have one thread.
    User,
    /// A nested user namespace that owns the namespaces of [`Fresh::MountNetIpcUts`]. The kernel locks every
    /// existing mount: no process of the new user namespace can remove it, move it or look under it
    /// (mount_namespaces(7)). The caller must have one thread.
    UserMountNetIpcUts,
}

/// Moves the calling process into fresh namespaces.
///
/// # Errors
///
/// Returns the kernel's error: `EPERM` if a policy forbids user namespaces, `ENOSPC` or `EUSERS` if a
/// limit on them is reached, `EINVAL` if the caller has several threads.
pub fn unshare(which: Fresh) -> io::Result<()> {
    let flags = match which {
        Fresh::UserAndPid => UnshareFlags::NEWUSER | UnshareFlags::NEWPID,
        Fresh::MountNetIpcUts => {
            UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS
        }
        Fresh::MountIpcUts => UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS,
        Fresh::Mount => UnshareFlags::NEWNS,
        Fresh::Cgroup => UnshareFlags::NEWCGROUP,
        Fresh::User => UnshareFlags::NEWUSER,
        Fresh::UserMountNetIpcUts => {
            UnshareFlags::NEWUSER
                | UnshareFlags::NEWNS
                | UnshareFlags::NEWNET
                | UnshareFlags::NEWIPC
                | UnshareFlags::NEWUTS
        }
    };
    // SAFETY: the flags do not hold FILES, the one flag that could take descriptors away from a
    // thread which owns them.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    Ok(())
}

/// Makes the mount at `path`, and all mounts below it, read-only (mount_setattr(2)).
///
/// # Errors
///
/// Returns the kernel's error: `EINVAL` if `path` is no mount point, `EBUSY` if a file of it is open for
/// writing.
pub fn make_tree_read_only(path: &CStr) -> io::Result<()> {
    add_mount_attributes(path, RECURSIVE, READ_ONLY)
}

/// Makes the mount at `path` read-only, and none below it. The device nodes in it stay writable.
///
/// # Errors
///
/// Returns the kernel's error, as [`make_tree_read_only`].
pub fn make_mount_read_only(path: &CStr) -> io::Result<()> {
    add_mount_attributes(path, 0, READ_ONLY)
}

/// Refuses the use of device nodes in the mount at `path` and in all mounts below it.
///
/// # Errors
///
/// Returns the kernel's error: `EINVAL` if `path` is no mount point.
pub fn make_tree_without_devices(path: &CStr) -> io::Result<()> {
    add_mount_attributes(path, RECURSIVE, NO_DEVICES)
}

/// Value of `AT_RECURSIVE` in `linux/fcntl.h`.
const RECURSIVE: libc::c_int = 0x8000;
/// Value of `MOUNT_ATTR_RDONLY` in `linux/mount.h`.
const READ_ONLY: u64 = 1;
/// Value of `MOUNT_ATTR_NODEV` in `linux/mount.h`.
const NO_DEVICES: u64 = 4;

fn add_mount_attributes(path: &CStr, flags: libc::c_int, set: u64) -> io::Result<()> {
    // `struct mount_attr` of linux/mount.h: set, clear, propagation, user namespace.
    let attributes: [u64; 4] = [set, 0, 0, 0];
    // SAFETY: `path` ends with a zero byte, `attributes` has the size that is given; the call only reads
    // both.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the descriptors from 3 on that a program started by this process would inherit.
///
/// Rust code opens files close-on-exec. At the start of `main` the result is therefore the set that the
/// parent process passed on purpose (a shell's `7>file` or `<(...)`).
///
/// # Errors
///
/// Returns the error of reading `/proc/self/fd`.
pub fn inheritable_fds() -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let Some(fd) = name.to_str().and_then(|text| text.parse::<RawFd>().ok()) else {
            continue;
        };
        if fd > 2 && !close_on_exec(fd)? {
            found.push(fd);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns `true` if a descriptor leads to other files than its own: that of a directory, and one by which a file is only
/// named (`O_PATH`). By the former a process reaches a tree as it was mounted where it was opened, by the latter what the
/// name of a socket stands for.
///
/// # Errors
///
/// Returns the kernel's error: `EBADF` if the number is not open.
pub fn leads_to_files(fd: RawFd) -> io::Result<bool> {
    // SAFETY: F_GETFL only reads flags; a number that is not open answers EBADF.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if flags & libc::O_PATH != 0 {
        return Ok(true);
    }
    let kind = std::fs::metadata(format!("/proc/self/fd/{fd}"))?.file_type();
    Ok(kind.is_dir())
}

/// Returns the process group of this process. `None` if the group's leader is outside of the PID namespace, so that
/// the group has no number in it.
pub fn process_group() -> Option<Pid> {
    // SAFETY: getpgrp takes no argument, always succeeds and changes nothing.
    Pid::from_raw(unsafe { libc::getpgrp() })
}

/// Sets whether programs started by this process inherit these descriptors.
///
/// This changes no descriptor's use within the process, so it cannot break the ownership that
/// `OwnedFd` stands for. Numbers that are not open are passed over.
///
/// # Errors
///
/// Returns the kernel's error, except for a number that is not open.
pub fn set_inheritable(fds: &[RawFd], inheritable: bool) -> io::Result<()> {
    let flags = if inheritable { 0 } else { libc::FD_CLOEXEC };
    for &fd in fds {
        // SAFETY: F_SETFD only sets the close-on-exec flag of the table entry; it neither closes
        // nor redirects a descriptor, and a number that is not open answers EBADF.
        let done = unsafe { libc::fcntl(fd, libc::F_SETFD, flags) };
        if done < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBADF) {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Takes a descriptor that the parent process passed by number, as an option says. Its old number then refers to
/// `/dev/null` and is no longer inheritable, so that it can be taken once.
///
/// # Errors
///
/// Returns `EBADF` if the number is not open, is a standard stream, or was not inherited; other errors of the kernel
/// if no descriptor is free.
pub fn take_inherited(fd: RawFd) -> io::Result<OwnedFd> {
    if fd <= 2 || close_on_exec(fd)? {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    let null = std::fs::File::open("/dev/null")?;
    // SAFETY: F_DUPFD_CLOEXEC makes a new descriptor and changes no other.
    let taken = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if taken < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for this call, so nothing else owns it.
    let taken = unsafe { OwnedFd::from_raw_fd(taken) };
    // SAFETY: `fd` is not close-on-exec. Rust opens all descriptors close-on-exec, so no value of this process owns
    // it, and its file may be replaced.
    let replaced = unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) };
    if replaced < 0 { Err(io::Error::last_os_error()) } else { Ok(taken) }
}

fn close_on_exec(fd: RawFd) -> io::Result<bool> {
    // SAFETY: F_GETFD only reads a flag; a number that is not open answers EBADF.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags >= 0 {
        return Ok(flags & libc::FD_CLOEXEC != 0);
    }
    let error = io::Error::last_os_error();
    // The directory was listed through a descriptor that is closed by now.
    if error.raw_os_error() == Some(libc::EBADF) { Ok(true) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_descriptor_is_taken_once() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let fd = writer.as_raw_fd();
        assert!(take_inherited(fd).is_err(), "this process opened it");
        assert!(take_inherited(1).is_err() && take_inherited(-1).is_err());
        // As a parent process leaves it.
        set_inheritable(&[fd], true).unwrap();
        let taken = take_inherited(fd).unwrap();
        assert!(take_inherited(fd).is_err());
        rustix::io::write(&taken, b"1").unwrap();
        drop(taken);
        let mut bytes = [0; 2];
        assert_eq!(rustix::io::read(&reader, &mut bytes).unwrap(), 1);
        // The old number does not keep the pipe open.
        assert_eq!(rustix::io::read(&reader, &mut bytes).unwrap(), 0);
    }

    #[test]
    fn descriptor_is_listed_only_while_it_is_inheritable() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = file.as_raw_fd();
        assert!(!inheritable_fds().unwrap().contains(&fd));
        set_inheritable(&[fd], true).unwrap();
        assert!(inheritable_fds().unwrap().contains(&fd));
        set_inheritable(&[fd, 1_000_000], false).unwrap();
        assert!(!inheritable_fds().unwrap().contains(&fd));
    }
}
