//! Report of denied system calls, for tests: a process names the call and exits.
//!
//! The sandbox has to raise SIGSYS for denied calls. A report then means that its list lacks a call.

use core::ffi::{c_int, c_void};
use std::io;

// #syscall none: for tests

/// Offset of the system call's number in `siginfo_t` (`_sigsys._syscall`): after three numbers, padding
/// and the address of the call.
const NUMBER_AT: usize = 24;

/// Installs the handler: from now on a denied call ends this process, after a line on standard error.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn end_with_a_word() -> io::Result<()> {
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = end;
    // SAFETY: all zeroes is a valid `sigaction` (no handler, no flags, an empty mask).
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: `action` is initialised. Its handler has the signature that SA_SIGINFO requires, and
    // calls only functions that are safe in a signal handler.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, core::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes "[denied call N]" and ends the process with the status of the signal.
extern "C" fn end(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a whole `siginfo_t` (128 bytes) to a handler with SA_SIGINFO. For SIGSYS
    // the system call's number is a `c_int` at that offset.
    let number = unsafe { info.byte_add(NUMBER_AT).cast::<c_int>().read() };
    let mut line = *b"[denied call 0000]\n";
    let mut rest = number.unsigned_abs();
    for digit in line[13..17].iter_mut().rev() {
        // The remainder is below ten.
        *digit = b"0123456789"[(rest % 10) as usize];
        rest /= 10;
    }
    // SAFETY: the buffer outlives the call; `write` and `_exit` may be called in a signal handler.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        libc::_exit(128 + libc::SIGSYS);
    }
}
