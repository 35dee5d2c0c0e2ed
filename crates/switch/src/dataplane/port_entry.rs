//! Port entry: a worker's record of one of its ports.

// #syscall driver,frontend,card,daemon epoll_ctl: a port is added or removed

use core::time::Duration;
use std::io;
use std::os::fd::OwnedFd;

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::{Fault, Port, PortCapabilities};
use ringfence_sys::pace::Throttle;
use rustix::event::epoll;

use super::backpressure::Backpressure;
use super::fairness::TimeAccount;
use super::handle::PortId;
use crate::forwarding::PortIndex;

/// Number of tokens for the files of one number: a worker has fewer ports.
pub(super) const TOKENS: usize = 1 << 16;

/// A port, or a worker's part of a port, with its state.
pub(super) struct PortEntry {
    pub(super) id: PortId,
    pub(super) name: String,
    pub(super) port: Box<dyn Port>,
    pub(super) capabilities: PortCapabilities,
    /// Set if small frames are joined for this port.
    pub(super) joins: bool,
    pub(super) throttle: Throttle,
    pub(super) account: TimeAccount,
    /// Set if an event or [`PortEntry::arm`] reported work that no round has found yet.
    pub(super) woken: bool,
    /// Set if the last receive found no more frames by a system call.
    pub(super) is_drained: bool,
    /// Set if the worker receives nothing from the port: its egress port has no room, or other ports have
    /// precedence by fairness.
    pub(super) paused: bool,
    /// Sole egress port of the last frames received here, if there was only one.
    pub(super) sole_egress: Option<PortIndex>,
    /// Backpressure on senders whose frames go to this port alone.
    pub(super) backpressure: Backpressure,
    /// Number of free slots at the last call of [`PortEntry::free_slots`].
    last_slots: usize,
    /// Set if frames were transmitted to the port in this round.
    pub(super) unflushed: bool,
    /// Fault for which the port is about to be removed. The port is not called any more.
    pub(super) fault: Option<Fault>,
    /// Epoll token of the port's first file. That of the next one is larger by [`TOKENS`].
    token: u64,
    watched: bool,
}

impl PortEntry {
    pub(super) fn new(id: PortId, name: String, port: Box<dyn Port>, token: u64) -> PortEntry {
        PortEntry {
            id,
            name,
            capabilities: port.capabilities(),
            joins: false,
            port,
            throttle: Throttle::default(),
            account: TimeAccount::default(),
            woken: false,
            is_drained: false,
            paused: false,
            sole_egress: None,
            backpressure: Backpressure::default(),
            last_slots: 0,
            unflushed: false,
            fault: None,
            token,
            watched: false,
        }
    }

    /// Executes a command, which may change the port's capabilities.
    pub(super) fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        let reply = self.port.execute(queue, command);
        self.capabilities = self.port.capabilities();
        reply
    }

    /// Returns the value of a port's result, or stores the fault.
    pub(super) fn checked<T>(&mut self, result: Result<T, Fault>) -> Option<T> {
        result.map_err(|fault| self.fault = Some(fault)).ok()
    }

    /// Records that the port had work.
    pub(super) fn worked(&mut self) {
        self.woken = false;
        self.throttle.worked();
    }

    /// Handles an event that ended a sleep, of the port's file at `file`.
    pub(super) fn handle_event(&mut self, file: usize) {
        // A port with two files may have two events.
        if !core::mem::replace(&mut self.woken, true) {
            self.port.counters().wakeups.add(1);
        }
        let cleared = self.port.clear_event(file);
        self.checked(cleared);
    }

    /// Returns `true` if the port is left out of this round: the last one found it empty, and no event came since. A worker that
    /// sleeps learns by an event when a frame arrives, and a busy one looks in its next round.
    pub(super) fn is_left_out(&mut self) -> bool {
        core::mem::take(&mut self.is_drained) && !self.woken
    }

    /// Returns the number of free slots. If there are more than before and a sender waits for them, that is
    /// work, so the event that reported them is not spurious.
    pub(super) fn free_slots(&mut self) -> Option<usize> {
        let slots = self.port.slots();
        let slots = self.checked(slots)?;
        if slots > core::mem::replace(&mut self.last_slots, slots)
            && self.backpressure.has_waiting()
        {
            self.worked();
        }
        Some(slots)
    }

    /// Updates backpressure at the end of a round, and counts an event without work as spurious.
    pub(super) fn end_round(&mut self, now: Duration) {
        if self.backpressure.end_round(now) {
            self.port.counters().hold_ups.add(1);
        }
        let polled = !self.paused && self.throttle.until().is_none();
        if !core::mem::take(&mut self.woken) || !polled {
            return;
        }
        self.port.counters().spurious_wakeups.add(1);
        if self.throttle.spurious(now) {
            self.port.counters().throttles.add(1);
        }
    }

    /// Arms the port's notification. Returns `true` if the port has work that the worker may do now.
    pub(super) fn arm(&mut self) -> bool {
        if self.fault.is_some() || self.throttle.until().is_some() {
            return false;
        }
        let armed = self.port.arm();
        let work = self.checked(armed).unwrap_or(false) && !self.paused;
        self.woken |= work;
        work
    }

    /// Returns the time at which this port ends the coming sleep.
    pub(super) fn wakeup_time(&self) -> Option<Duration> {
        // A paused port is not polled, so its deadline may have passed already.
        let deadline = self.port.deadline().filter(|_| !self.paused);
        let ends = [self.throttle.until(), self.backpressure.ends_at(), deadline];
        ends.into_iter().flatten().min()
    }

    /// Adds the port's files to the epoll instance for the coming sleep, or removes them: a throttled port
    /// is not watched, and with `skip_paused` a paused port only if a sender waits for it. Returns the number
    /// of system calls.
    pub(super) fn update_watch(&mut self, epoll: &OwnedFd, skip_paused: bool) -> u64 {
        let skipped = self.paused && skip_paused && !self.backpressure.has_waiting();
        let watch = !skipped && self.throttle.until().is_none();
        if self.watched == watch {
            return 0;
        }
        let calls = self.port.wait_fds().len() as u64;
        if watch {
            if let Err(source) = self.watch(epoll) {
                self.fault = Some(Fault::system("cannot wait for the port's events", source));
            }
        } else {
            self.unwatch(epoll);
        }
        calls
    }

    pub(super) fn watch(&mut self, epoll: &OwnedFd) -> io::Result<()> {
        self.watched = true;
        for (fd, token) in self.port.wait_fds().into_iter().zip((self.token..).step_by(TOKENS)) {
            epoll::add(epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    pub(super) fn unwatch(&mut self, epoll: &OwnedFd) {
        self.watched = false;
        for fd in self.port.wait_fds() {
            // The call fails only for a file that is not watched; nothing is to be done then.
            let _ = epoll::delete(epoll, fd);
        }
    }
}
