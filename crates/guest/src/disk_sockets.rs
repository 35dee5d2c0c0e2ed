//! Sockets of a guest's disks: NBD servers of the frontend, in the guest's own runtime directory.
//!
//! ```text
//! init: directory in memory, in the outer mount namespace ── socket(2), bind(2), listen(2)
//!    └── FromGuest::Ready: the directory, the listeners ──> launcher ──> frontend, which accepts connections
//! ```
//!
//! The host has no path to them, and other guests have none, whatever runtime directories they know.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use ringfence_sys::descriptors::refuse_descriptors;
use rustix::fs::{Mode, OFlags};

use crate::config::ViewConfig;
use crate::covers;

/// Returns the file name of a disk's socket.
pub fn name(number: usize) -> String {
    format!("disk{number}")
}

/// Sockets of a guest's disks.
#[derive(Debug, Default)]
pub(super) struct DiskSockets {
    /// The directory, for the launcher. `None` without disks.
    directory: Option<OwnedFd>,
    listeners: Vec<OwnedFd>,
}

impl DiskSockets {
    /// Returns the descriptors for the launcher: the directory, and the listener of each disk.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.directory.iter().chain(&self.listeners).map(AsFd::as_fd)
    }
}

/// Creates the guest's own runtime directory in place of the covered one, with the sockets of its disks.
pub(super) fn make(view: &ViewConfig) -> io::Result<DiskSockets> {
    // Another root directory has its own /run, in which nothing may be left behind.
    let parent = view.runtime_dir.parent().filter(|_| view.root.is_some() && view.disks > 0);
    if let Some(run) = parent {
        covers::cover_directory(run, 0o755)?;
    }
    // A guest without disks does not need the directory.
    let made = if view.root.is_none() || view.disks > 0 {
        covers::make_private_directory(&view.runtime_dir)
    } else {
        Ok(())
    };
    if view.disks == 0 {
        return Ok(DiskSockets::default());
    }
    made?;
    let listeners = (0..view.disks).map(|number| listen(&view.runtime_dir.join(name(number))));
    let listeners = listeners.collect::<io::Result<_>>()?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(&view.runtime_dir, flags, Mode::empty())?;
    Ok(DiskSockets { directory: Some(directory), listeners })
}

/// Creates a listening socket to which clients can send no descriptors.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = UnixListener::bind(path)?;
    refuse_descriptors(&socket)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use ringfence_sys::descriptors::testing::assert_descriptors_are_refused;

    use super::*;

    #[test]
    fn descriptor_to_the_socket_of_a_disk_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let view = ViewConfig {
            runtime_dir: directory.path().join("r"),
            disks: 2,
            ..ViewConfig::default()
        };
        let sockets = make(&view).unwrap();
        assert_eq!(sockets.descriptors().count(), 3);
        for number in 0..2 {
            let path = view.runtime_dir.join(name(number));
            assert_descriptors_are_refused(UnixStream::connect(path).unwrap());
        }
    }
}
