//! Keyrings of a process (keyrings(7)).

// #syscall none: a guest's init, which has no list

use std::io;

/// Number of `KEYCTL_JOIN_SESSION_KEYRING` in linux/keyctl.h.
const JOIN_SESSION_KEYRING: libc::c_int = 1;

/// Gives this process a new, empty session keyring. Programs that it starts inherit it, and no longer possess the keys of the
/// one before.
///
/// # Errors
///
/// Returns the kernel's error: `ENOSYS` if it has no keyrings, `EPERM` if a seccomp list forbids the call, `EDQUOT` if the
/// user has as many keys as `kernel.keys.maxkeys` allows.
pub fn join_new_session() -> io::Result<()> {
    // SAFETY: the kernel makes an anonymous keyring for a null pointer, and reads nothing.
    let done = unsafe {
        libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>())
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
