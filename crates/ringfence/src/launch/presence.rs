//! Runtime directory of a launcher, which may be removed while its guest runs: the watch over it, and its replacement.
//!
//! [`GuestProcesses::follow_presence`](super::guest_processes::GuestProcesses) makes directory and sockets anew
//! (`presence_changes`). The kernel takes 10 to 30 ms to end a watch, so the watch begins when the command has run for some
//! time. After a loss the launcher also looks at intervals: the directory may be on a file system that is unmounted
//! next, which raises no event.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ringfence_hostnet::guest_watch::RemovalWatch;
use ringfence_hostnet::runtime_dir::RuntimeDir;

/// Interval between two looks after the directory was lost.
pub(super) const LOOKS: Duration = Duration::from_secs(10);

/// Runtime directory of a launcher.
pub(super) struct Presence<'a> {
    original: &'a RuntimeDir,
    /// Directory that replaced the original one.
    pub(super) renewed: Option<RuntimeDir>,
    pub(super) watch: Option<RemovalWatch>,
    /// Time of the next look without an event.
    pub(super) next_look: Option<Instant>,
    /// Set once the user knows that the directory cannot be made.
    pub(super) has_complained: bool,
}

impl<'a> Presence<'a> {
    /// Begins with the directory that the launcher has opened, without a watch.
    pub(super) fn new(original: &'a RuntimeDir) -> Presence<'a> {
        Presence { original, renewed: None, watch: None, next_look: None, has_complained: false }
    }

    /// Returns the directory in use.
    pub(super) fn directory(&self) -> &RuntimeDir {
        self.renewed.as_ref().unwrap_or(self.original)
    }

    /// Returns the descriptor to poll.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// Returns the time of the next look, if one is due without an event.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.next_look
    }

    /// Returns `true` if there were events since the last call, or a look is due.
    pub(super) fn may_be_lost(&mut self) -> bool {
        let has_fired = self.watch.as_ref().is_some_and(RemovalWatch::has_fired);
        let is_due = self.next_look.take_if(|at| *at <= Instant::now()).is_some();
        if is_due {
            self.next_look = Some(Instant::now() + LOOKS);
        }
        has_fired || is_due
    }
}
