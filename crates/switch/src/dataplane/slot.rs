//! Slots: the ports of a worker with their state.

// #syscall driver,frontend,daemon epoll_ctl: a port comes or goes

use core::time::Duration;
use std::io;
use std::os::fd::OwnedFd;

use ringfence_frame::port::{Fault, Port, PortCapabilities};
use ringfence_sys::pace::Throttle;
use rustix::event::epoll;

use super::handle::PortId;
use super::hold::Backpressure;
use super::share::Share;
use crate::forwarding::PortIndex;

pub(super) struct Slot {
    pub(super) id: PortId,
    pub(super) name: String,
    pub(super) port: Box<dyn Port>,
    pub(super) capabilities: PortCapabilities,
    /// Set if small frames are joined for this port.
    pub(super) joins: bool,
    pub(super) throttle: Throttle,
    pub(super) share: Share,
    /// Its events ended the sleep, or its last look said that there is work, and none was found yet.
    pub(super) woken: bool,
    /// Nothing is received from it because whom it sends to has no room, or to let others catch up.
    pub(super) held: bool,
    /// Sole egress port of the last frames received here, if there was only one.
    pub(super) towards: Option<PortIndex>,
    /// How long those wait who send to it alone and find no room.
    pub(super) patience: Backpressure,
    /// Free slots when somebody asked last.
    vacant: usize,
    /// Set if frames were transmitted to the port in this round.
    pub(super) touched: bool,
    /// Fault for which the port is about to be removed. The port is not called any more.
    pub(super) fault: Option<Fault>,
    token: u64,
    watched: bool,
}

impl Slot {
    pub(super) fn new(id: PortId, name: String, port: Box<dyn Port>, token: u64) -> Slot {
        Slot {
            id,
            name,
            capabilities: port.capabilities(),
            joins: false,
            port,
            throttle: Throttle::default(),
            share: Share::default(),
            woken: false,
            held: false,
            towards: None,
            patience: Backpressure::default(),
            vacant: 0,
            touched: false,
            fault: None,
            token,
            watched: false,
        }
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

    /// Handles an event of the port that ended a sleep.
    pub(super) fn wake(&mut self) {
        self.woken = true;
        self.port.counters().wakeups.add(1);
        let cleared = self.port.clear_events();
        self.checked(cleared);
    }

    /// Its free slots. That there are more than before was worth an event.
    pub(super) fn slots(&mut self) -> Option<usize> {
        let slots = self.port.slots();
        let slots = self.checked(slots)?;
        if slots > core::mem::replace(&mut self.vacant, slots) && self.patience.awaited() {
            self.worked();
        }
        Some(slots)
    }

    /// A round is over: an event without work behind it is held against the port.
    pub(super) fn settle(&mut self, now: Duration) {
        if self.patience.settle(now) {
            self.port.counters().hold_ups.add(1);
        }
        let asked = !self.held && self.throttle.until().is_none();
        if !core::mem::take(&mut self.woken) || !asked {
            return;
        }
        self.port.counters().spurious_wakeups.add(1);
        if self.throttle.spurious(now) {
            self.port.counters().throttles.add(1);
        }
    }

    /// Whether there is work that can be done now; asks for an event if there is not.
    pub(super) fn arm(&mut self) -> bool {
        if self.fault.is_some() || self.throttle.until().is_some() {
            return false;
        }
        let armed = self.port.arm();
        let work = self.checked(armed).unwrap_or(false) && !self.held;
        self.woken |= work;
        work
    }

    /// Returns the time at which this port ends the coming sleep.
    pub(super) fn alarm(&self) -> Option<Duration> {
        // What is held is not asked, so that its time may be over already.
        let deadline = self.port.deadline().filter(|_| !self.held);
        let ends = [self.throttle.until(), self.patience.until(), deadline];
        ends.into_iter().flatten().min()
    }

    /// Watches its files, or no longer does, as is right for the sleep that begins. Returns the number
    /// of system calls.
    pub(super) fn update_watch(&mut self, epoll: &OwnedFd, skip_held: bool) -> u64 {
        let idle = self.held && skip_held && !self.patience.awaited();
        let wanted = !idle && self.throttle.until().is_none();
        if self.watched == wanted {
            return 0;
        }
        let calls = self.port.wait_fds().len() as u64;
        if wanted {
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
        for fd in self.port.wait_fds() {
            epoll::add(epoll, fd, epoll::EventData::new_u64(self.token), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    pub(super) fn unwatch(&mut self, epoll: &OwnedFd) {
        self.watched = false;
        for fd in self.port.wait_fds() {
            // It fails only for a file that is not watched, which is what is wanted.
            let _ = epoll::delete(epoll, fd);
        }
    }
}
