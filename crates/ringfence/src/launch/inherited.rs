//! Descriptors that the launcher was started with, and that the command gets.
//!
//! The command gets the standard streams, and by their numbers the descriptors from 3 on that are not close-on-exec: files,
//! pipes, sockets and devices, as a shell hands them over (`7<file`, `<(...)`). It gets no descriptor that leads to
//! further files: that of a directory, or one opened with `O_PATH`. Such a descriptor leads around the view, because the
//! kernel resolves names below it by the mounts of the namespace in which it was opened.
//!
//! Descriptors that the launcher opens itself are close-on-exec.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use anyhow::bail;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::namespaces::{inheritable_fds, leads_to_files, set_inheritable};

use super::report::Reporter;

/// Returns the descriptors from 3 on that the command gets, and keeps all from Ringfence's own processes.
pub(super) fn for_command(reporter: Reporter) -> anyhow::Result<Vec<RawFd>> {
    let inherited = inheritable_fds()?;
    set_inheritable(&inherited, false)?;
    for (stream, fd) in ["standard input", "standard output", "standard error"].iter().zip(0..) {
        if leads_to_files(fd).unwrap_or(false) {
            bail!(
                "{stream} is a directory, which would lead the command to all files: redirect it from or to a file"
            );
        }
    }
    let (withheld, kept): (Vec<_>, Vec<_>) =
        inherited.into_iter().partition(|fd| leads_to_files(*fd).unwrap_or(true));
    for fd in withheld {
        reporter
            .summary(format_args!("descriptor {fd} is a directory: the command does not get it"));
    }
    Ok(kept)
}

/// Returns `true` if a descriptor of a client leads to further files.
pub(super) fn any_leads_to_files(fds: &Descriptors) -> bool {
    fds.each().any(|fd| leads_to_files(fd.as_fd().as_raw_fd()).unwrap_or(true))
}
