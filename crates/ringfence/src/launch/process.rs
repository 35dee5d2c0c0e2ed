//! One process of a guest, with everything that belongs to it.
//!
//! ```text
//! Absent      the guest has no such process
//! Planned     its state is prepared ──start──> Running: the domain, its channel, and the state
//! ```
//!
//! The state of a process ends with its domain.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::spawn::{DomainProcess, Ended, Event};
use ringfence_sys::descriptors::Descriptors;
use serde::de::DeserializeOwned;

/// Process of a guest, with its state `S`.
pub(super) enum GuestProcess<S> {
    Absent,
    Planned(S),
    Running(RunningProcess<S>),
}

/// Domain of a process, and the state of the process.
pub(super) struct RunningProcess<S> {
    pub(super) domain: WatchedDomain,
    pub(super) state: S,
}

/// A domain, with the channel to its inner process.
pub(super) struct WatchedDomain {
    domain: DomainProcess,
    /// Set once the channel is closed. The supervisor's report follows.
    is_silent: bool,
}

impl<S> GuestProcess<S> {
    /// Plans a process, if there is a state for it.
    pub(super) fn plan(state: Option<S>) -> GuestProcess<S> {
        state.map_or(GuestProcess::Absent, GuestProcess::Planned)
    }

    /// Makes the planned process a running one in this domain. Another one stays as it is.
    pub(super) fn start(&mut self, domain: DomainProcess) {
        *self = match std::mem::replace(self, GuestProcess::Absent) {
            GuestProcess::Planned(state) => {
                let domain = WatchedDomain { domain, is_silent: false };
                GuestProcess::Running(RunningProcess { domain, state })
            }
            other => other,
        };
    }

    /// Returns the state of the process, unless it is absent.
    pub(super) fn state(&self) -> Option<&S> {
        match self {
            GuestProcess::Absent => None,
            GuestProcess::Planned(state) => Some(state),
            GuestProcess::Running(running) => Some(&running.state),
        }
    }

    /// Returns the state of the process to change it, unless the process is absent.
    pub(super) fn state_mut(&mut self) -> Option<&mut S> {
        match self {
            GuestProcess::Absent => None,
            GuestProcess::Planned(state) => Some(state),
            GuestProcess::Running(running) => Some(&mut running.state),
        }
    }

    /// Returns the process, once it runs.
    pub(super) fn running(&self) -> Option<&RunningProcess<S>> {
        match self {
            GuestProcess::Running(running) => Some(running),
            GuestProcess::Absent | GuestProcess::Planned(_) => None,
        }
    }

    /// Returns the process to change it, once it runs.
    pub(super) fn running_mut(&mut self) -> Option<&mut RunningProcess<S>> {
        match self {
            GuestProcess::Running(running) => Some(running),
            GuestProcess::Absent | GuestProcess::Planned(_) => None,
        }
    }

    /// Returns the channel to the inner process, once it runs.
    pub(super) fn channel(&self) -> Option<&Channel> {
        self.running().map(|running| running.domain.channel())
    }

    /// Returns the state and the channel to the inner process, once it runs.
    pub(super) fn with_channel(&mut self) -> Option<(&mut S, &Channel)> {
        self.running_mut().map(|running| (&mut running.state, running.domain.channel()))
    }

    /// Iterates over the descriptors to poll.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.running().into_iter().flat_map(|running| running.domain.fds())
    }

    /// Begins to end the domain, as [`DomainProcess::begin_end`] does.
    pub(super) fn begin_end(&self) {
        if let Some(running) = self.running() {
            running.domain.domain.begin_end();
        }
    }
}

impl WatchedDomain {
    /// Returns the channel to the inner process.
    fn channel(&self) -> &Channel {
        self.domain.channel()
    }

    /// Returns the supervisor's next report, as [`DomainProcess::next_event`] does.
    pub(super) fn next_event(&self) -> Option<Event> {
        self.domain.next_event()
    }

    /// Blocks until the domain ends by itself, as [`DomainProcess::wait_ended`] does.
    pub(super) fn wait_ended(&self, timeout: Duration) -> Option<Ended> {
        self.domain.wait_ended(timeout)
    }

    /// Returns the inner process's next report, if there is one.
    pub(super) fn report<T: DeserializeOwned>(&mut self) -> Option<(T, Descriptors)> {
        if self.is_silent {
            return None;
        }
        let report = self.domain.channel().try_receive();
        self.is_silent = report.is_err();
        report.ok().flatten()
    }

    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let inner = (!self.is_silent).then(|| self.domain.channel().as_fd());
        inner.into_iter().chain([self.domain.events()])
    }
}
