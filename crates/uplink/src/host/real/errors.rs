//! Errors of system calls as the [`Host`](crate::Host) returns them.

use std::io;

use rustix::io::Errno;

/// Returns the error's number; `EIO` for an error that did not come from the kernel.
pub(super) fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
