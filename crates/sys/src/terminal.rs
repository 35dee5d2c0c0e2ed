//! Controlling terminal of a process: finding it, and giving it up without leaving the session.
//!
//! A session is a scheduling group of its own (`kernel.sched_autogroup_enabled`). A process that works for others of its
//! session can therefore stay in it, and yet have no terminal: `TIOCNOTTY` takes the terminal from this process and
//! its later children alone, unless it leads the session. It cannot get one back: only a session's leader acquires a
//! terminal, and `/dev/tty` exists only for a process that has one.

// #syscall none: a supervisor calls this before it starts a sandbox

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;

use rustix::io::Errno;
use rustix::ioctl::{NoArg, Opcode};

/// Request number of `asm-generic/ioctls.h`.
const TIOCNOTTY: Opcode = 0x5422;

/// Detaches this process from its controlling terminal. It must not lead its session. Returns `false` if the terminal
/// cannot be reached, and stays.
///
/// # Errors
///
/// Returns the kernel's error if it does not take the terminal away.
pub fn detach() -> io::Result<bool> {
    let terminal = match File::open("/dev/tty") {
        Ok(terminal) => terminal,
        Err(error) => return Ok(error.raw_os_error() == Some(Errno::NXIO.raw_os_error())),
    };
    // SAFETY: the request has no argument.
    unsafe { rustix::ioctl::ioctl(&terminal, NoArg::<TIOCNOTTY>::new()) }?;
    Ok(true)
}

/// Returns `true` if the descriptor of this number is a terminal: any, or this process's controlling one.
pub fn is_terminal(fd: RawFd, controlling: bool) -> bool {
    // SAFETY: the calls only read properties of a file; a number that is not open answers EBADF.
    unsafe {
        libc::isatty(fd) == 1
            && (!controlling
                || libc::tcgetpgrp(fd) >= 0
                || io::Error::last_os_error().raw_os_error() != Some(libc::ENOTTY))
    }
}

/// Opens the controlling terminal of this process, for reading and writing without blocking. `None` if it has none.
pub fn open_controlling() -> Option<File> {
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    File::options().read(true).write(true).custom_flags(flags).open("/dev/tty").ok()
}
