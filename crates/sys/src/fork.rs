//! Child processes that go on with this program's memory: fork(2) of a process with one thread.
//!
//! Such a child starts sooner than one that executes the program again, and shares the pages that neither process
//! writes. It also shares the layout of the address space, so it is for processes that trust each other.

// #syscall none: before a sandbox closes

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::process::Pid;

/// Exit status of a child whose function panicked, as that of a Rust program.
const PANICKED: u8 = 101;

/// Function that a child runs, with the descriptor and the words from [`fork`]. It returns the exit status.
pub type Main = fn(OwnedFd, &[OsString]) -> u8;

/// Returns `true` if this process has one thread, so that it may call [`fork`].
///
/// # Errors
///
/// Returns the error of reading `/proc/self/task`.
pub fn has_one_thread() -> io::Result<bool> {
    Ok(fs::read_dir("/proc/self/task")?.count() == 1)
}

/// Starts a child process that runs `main` and exits with the status that it returns. Nothing else of this process
/// runs in the child, no destructor either.
///
/// The child has `descriptor`, the standard streams, and the descriptors from 3 on that programs started by this
/// process inherit. All others are closed in it, so `main` must not use statics that own descriptors.
///
/// # Errors
///
/// Returns `InvalidInput` if this process has several threads, and the errors of the kernel.
pub fn fork(descriptor: OwnedFd, words: &[OsString], main: Main) -> io::Result<Pid> {
    if !has_one_thread()? {
        let why = "a process with several threads cannot be forked";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    // SAFETY: the caller is the only thread. No other thread can hold a lock, so the child may run any code, as its
    // parent could.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let status = std::panic::catch_unwind(|| {
                let closed = close_others(descriptor.as_raw_fd());
                closed.map_or(PANICKED, |()| main(descriptor, words))
            });
            // SAFETY: _exit runs nothing of this process: no destructor of a value whose descriptor was closed.
            unsafe { libc::_exit(status.unwrap_or(PANICKED).into()) }
        }
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("a process without a number")),
    }
}

/// Starts a child process in another cgroup of version 2, whose directory `cgroup` is. The child runs `main`, typically to
/// execute a program, and exits with the status that it returns. It inherits every descriptor; nothing else of this
/// process runs in it.
///
/// A process that enters a cgroup later waits for all processors (10 to 20 ms), a process that starts in it does not.
///
/// # Errors
///
/// Returns `InvalidInput` if this process has several threads, and the errors of clone3(2): `ENOSYS` and `EPERM` where a
/// seccomp list refuses it, `EACCES` if the user may not move processes there.
pub fn fork_into(cgroup: BorrowedFd<'_>, main: impl FnOnce() -> u8) -> io::Result<Pid> {
    /// Value of `CLONE_INTO_CGROUP` in `linux/sched.h`.
    const INTO_CGROUP: u64 = 0x2_0000_0000;
    if !has_one_thread()? {
        let why = "a process with several threads cannot be forked";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let cgroup = u64::try_from(cgroup.as_raw_fd()).map_err(io::Error::other)?;
    let signal = u64::try_from(libc::SIGCHLD).map_err(io::Error::other)?;
    // `struct clone_args` of linux/sched.h: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls,
    // set_tid, set_tid_size, cgroup.
    let arguments: [u64; 11] = [INTO_CGROUP, 0, 0, 0, signal, 0, 0, 0, 0, 0, cgroup];
    // SAFETY: without CLONE_VM the child gets a copy of the memory, this stack included, and goes on as after fork(2).
    // The caller is the only thread, so no lock is held by another. The kernel reads `arguments`, and writes nothing.
    // The C library's record of the thread's number is the parent's in the child; only its calls for threads use it.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone3, arguments.as_ptr(), size_of_val(&arguments)) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(main));
        // SAFETY: _exit runs nothing of this process: no destructor of a value that the parent has, too.
        unsafe { libc::_exit(status.unwrap_or(PANICKED).into()) }
    }
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("a process without a number"))
}

/// Closes the descriptors from 3 on that are close-on-exec, except `kept`.
fn close_others(kept: RawFd) -> io::Result<()> {
    let listed: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for fd in listed {
        // SAFETY: F_GETFD only reads a flag. The directory's own descriptor, which is closed by now, answers EBADF.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        if fd > 2 && fd != kept && flags >= 0 && flags & libc::FD_CLOEXEC != 0 {
            // SAFETY: the values that own this descriptor belong to callers of `fork`, which never run again in this
            // process. `Main` captures nothing, and gets the descriptor that is kept.
            unsafe { libc::close(fd) };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_several_threads_is_not_forked() {
        // The test harness has a thread besides this one.
        let null = OwnedFd::from(fs::File::open("/dev/null").unwrap());
        let error = fork(null, &[], |_, _| 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let null = fs::File::open("/dev/null").unwrap();
        let error = fork_into(std::os::fd::AsFd::as_fd(&null), || 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
