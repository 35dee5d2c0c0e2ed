//! Idle strategy of a worker: arms all ports, then waits in epoll.
//!
//! [`DataplaneWorker::run`] spins first and calls [`DataplaneWorker::sleep`] after that. To arm a port
//! checks it once more, so work that arrived in the meantime prevents the sleep. The sleep ends with an
//! event of a port, a command, work from another worker, or the earliest wake-up time of a port.

// #syscall driver,frontend,card,daemon epoll_pwait,epoll_pwait2,read: a worker waits for its ports

use core::mem::MaybeUninit;
use core::time::Duration;

use ringfence_sys::clock::monotonic;
use rustix::event::{Timespec, epoll};

use super::port_entry::{PortEntry, TOKENS};
use super::{DataplaneWorker, WAKE};

/// Maximum number of events read in one call; the next sleep reads the others.
const EVENTS: usize = 64;

impl DataplaneWorker {
    /// Arms all ports and sleeps until one of them may have work. Returns at once if one has.
    pub(super) fn sleep(&mut self) {
        let mut work = false;
        for entry in self.ports.iter_mut().flatten() {
            entry.throttle.expire(self.now);
            work |= entry.arm();
        }
        if self.remove_faulty() || work {
            return;
        }
        if self.peers.as_mut().is_some_and(|peers| !peers.prepare_sleep()) {
            return;
        }
        // The files of a paused port stay readable, so they are not watched. If every port is paused, as
        // when both ends of a patch wait for each other's room, the files of all ports are watched.
        let all_paused = self.ports.iter().flatten().all(|entry| entry.paused);
        let mut calls = 1;
        for entry in self.ports.iter_mut().flatten() {
            calls += entry.update_watch(&self.epoll, !all_paused);
        }
        self.system.syscalls.add(calls);
        self.wait();
        if let Some(peers) = &self.peers {
            peers.end_sleep();
        }
        let woke = monotonic();
        self.last_sleep = Some(woke.saturating_sub(self.now));
        self.now = woke;
        self.system.wakeups.add(1);
        for entry in self.ports.iter_mut().flatten() {
            entry.throttle.expire(woke);
            // Epoll has said nothing of it, so it is as empty as before the sleep.
            entry.is_drained = !entry.woken && entry.port.is_drained();
        }
    }

    /// Waits in epoll until a file is readable or the earliest wake-up time of a port is due.
    fn wait(&mut self) {
        let end = self.ports.iter().flatten().filter_map(PortEntry::wakeup_time).min();
        let timeout = end.map(|end| timespec(end.saturating_sub(self.now)));
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        let waited = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            // Linux before 5.11 has no epoll_pwait2, and epoll_wait takes whole milliseconds.
            Err(rustix::io::Errno::NOSYS) => {
                let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                epoll::wait(&self.epoll, &mut events, Some(&millisecond))
            }
            waited => waited,
        };
        // After an interruption the next sleep finds the events.
        let Ok((ready, _)) = waited else { return };
        for event in ready {
            self.dispatch(event.data.u64());
        }
    }

    /// Handles an event: a wake-up of this worker, or an event of a port.
    fn dispatch(&mut self, token: u64) {
        if token == WAKE {
            self.system.syscalls.add(1);
            let _ = rustix::io::read(&self.commands.wake, &mut [0; 8]);
            return;
        }
        let Ok(token) = usize::try_from(token) else { return };
        let entry = self.ports.get_mut(token % TOKENS).and_then(Option::as_mut);
        if let Some(entry) = entry.filter(|entry| entry.fault.is_none()) {
            entry.handle_event(token / TOKENS);
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
