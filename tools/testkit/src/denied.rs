//! What a process says of a system call that its sandbox denies it loudly: for tests, where such a
//! call means that the sandbox's list lacks something.

use core::ffi::{c_int, c_void};
use std::io;

// #syscall none: for tests

/// Where the kernel puts the call's number (`siginfo_t`, `_sigsys._syscall`): after three numbers,
/// padding, and the address of the call.
const NUMBER_AT: usize = 24;

/// From now on a denied call ends this process, after a line on standard error that names it.
///
/// # Errors
///
/// The kernel's; none are expected.
pub fn end_with_a_word() -> io::Result<()> {
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = end;
    // SAFETY: all zeroes is a valid `sigaction` (no handler, no flags, an empty mask).
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: `action` is whole, and its handler has the shape that SA_SIGINFO asks for and calls
    // nothing but what is safe in a signal handler.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, core::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Says "[denied call N]" and ends the process as the signal would have.
extern "C" fn end(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a whole `siginfo_t` (128 octets) to a handler with SA_SIGINFO, and in
    // that of SIGSYS the call's number is a `c_int` there.
    let number = unsafe { info.byte_add(NUMBER_AT).cast::<c_int>().read() };
    let mut line = *b"[denied call 0000]\n";
    let mut rest = number.unsigned_abs();
    for digit in line[13..17].iter_mut().rev() {
        // Below ten.
        *digit = b"0123456789"[(rest % 10) as usize];
        rest /= 10;
    }
    // SAFETY: the buffer lives through the call; `write` and `_exit` may be called in a handler.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        libc::_exit(128 + libc::SIGSYS);
    }
}
