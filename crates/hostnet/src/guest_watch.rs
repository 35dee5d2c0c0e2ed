//! Watch over a runtime directory: reports that a launcher has begun to listen for clients.
//!
//! The sockets of launchers are abstract and have no file. A launcher therefore sets the times of the directory once it
//! listens ([`RuntimeDir::listen_for_clients`]), which raises an event of inotify at the directory itself.
//!
//! [`RuntimeDir::listen_for_clients`]: crate::runtime_dir::RuntimeDir::listen_for_clients

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::Timestamps;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

/// Watch over a runtime directory.
#[derive(Debug)]
pub struct GuestWatch(OwnedFd);

impl GuestWatch {
    /// Starts to watch an open directory.
    ///
    /// # Errors
    ///
    /// Fails if the system permits no watch.
    pub(crate) fn new(directory: BorrowedFd<'_>) -> Result<GuestWatch, Errno> {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let path = format!("/proc/self/fd/{}/", directory.as_raw_fd());
        inotify::add_watch(&watch, path, WatchFlags::ATTRIB | WatchFlags::ONLYDIR)?;
        Ok(GuestWatch(watch))
    }

    /// Removes all events that have happened, so that the descriptor is readable after the next one.
    pub fn clear(&self) {
        let mut events = [0; 4096];
        while let Ok(1..) = rustix::io::read(&self.0, &mut events) {}
    }
}

impl AsFd for GuestWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Raises the event of all watches over an open directory.
pub(crate) fn wake(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    rustix::fs::futimens(directory, &Timestamps { last_access: now, last_modification: now })
}
