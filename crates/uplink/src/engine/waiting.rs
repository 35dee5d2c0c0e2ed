//! Waiting for the host's sockets and the runner's own files by one call.

use core::time::Duration;
use std::os::fd::BorrowedFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::Uplink;
use crate::host::{OwnerKind, RunnerFile};

/// Files of the runner with events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunnerEvents {
    pub(crate) link: bool,
    pub(crate) stop: bool,
}

impl Uplink {
    /// Adds a file of the runner to those of [`wait_host`](Self::wait_host).
    ///
    /// # Errors
    ///
    /// Returns the host's error; the runner must wait for the file itself.
    pub(crate) fn watch_runner(
        &mut self,
        file: RunnerFile,
        fd: BorrowedFd<'_>,
        flags: EventFlags,
    ) -> Result<(), Errno> {
        self.host.watch_runner(file, fd, flags)
    }

    /// Returns `true` if connections may still have data of the guest. After the guest's programs have ended, its kernel sends
    /// what is left, and closes them.
    pub(crate) fn has_data_of_guest(&self) -> bool {
        self.tcp.has_data_of_guest() || self.relays.have_data_of_guest()
    }

    /// Waits for events of the host and of the runner's files, for at most `within`; `None` is no limit. The next
    /// [`poll_host`](Self::poll_host) handles those of the host.
    ///
    /// # Errors
    ///
    /// Returns the host's error, after which the host cannot be used.
    pub(crate) fn wait_host(&mut self, within: Option<Duration>) -> Result<RunnerEvents, Errno> {
        self.host.poll(&mut self.ready, within)?;
        self.has_events = true;
        let mut found = RunnerEvents::default();
        self.ready.retain(|ready| {
            let owner = ready.owner;
            if owner.kind == OwnerKind::Runner {
                found.link |= owner == RunnerFile::Link.owner();
                found.stop |= owner == RunnerFile::Stop.owner();
            }
            owner.kind != OwnerKind::Runner
        });
        Ok(found)
    }
}
