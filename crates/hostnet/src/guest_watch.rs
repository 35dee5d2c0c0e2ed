//! Watches over a runtime directory: for launchers that begin to listen for clients, and for the removal of names in it.
//!
//! A launcher gives its socket a name by a rename, once it listens ([`RuntimeDir::listen_for_clients`]). Nothing else in the
//! directory is renamed.
//!
//! [`RuntimeDir::listen_for_clients`]: crate::runtime_dir::RuntimeDir::listen_for_clients

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

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
        watch(directory, WatchFlags::MOVED_TO | WatchFlags::ONLYDIR)
    }

    /// Removes all events that have happened, so that the descriptor is readable after the next one.
    pub fn clear(&self) {
        self.take_events();
    }

    fn take_events(&self) -> bool {
        let (mut events, mut any) = ([0; 4096], false);
        while let Ok(1..) = rustix::io::read(&self.0, &mut events) {
            any = true;
        }
        any
    }
}

impl AsFd for GuestWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Watch for names that disappear from a directory, and for a directory that is renamed. The kernel reports the removal of a
/// directory only when no process has it open any more.
#[derive(Debug)]
pub struct RemovalWatch(GuestWatch);

impl RemovalWatch {
    /// Starts to watch an open directory.
    ///
    /// # Errors
    ///
    /// Fails if the system permits no watch.
    pub(crate) fn new(directory: BorrowedFd<'_>) -> Result<RemovalWatch, Errno> {
        let names = WatchFlags::DELETE | WatchFlags::MOVED_FROM;
        let events = names | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR;
        Ok(RemovalWatch(watch(directory, events)?))
    }

    /// Removes all events that have happened. Returns `true` if there were any.
    pub fn has_fired(&self) -> bool {
        self.0.take_events()
    }
}

impl AsFd for RemovalWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn watch(directory: BorrowedFd<'_>, events: WatchFlags) -> Result<GuestWatch, Errno> {
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let path = format!("/proc/self/fd/{}/", directory.as_raw_fd());
    inotify::add_watch(&watch, path, events)?;
    Ok(GuestWatch(watch))
}
