//! Idle strategy of a worker: arms all ports, then waits in epoll.

// #syscall driver,frontend,daemon epoll_pwait,epoll_pwait2,read: the data plane waits for its ports

use core::mem::MaybeUninit;
use core::time::Duration;

use ringfence_sys::clock::monotonic;
use rustix::event::{Timespec, epoll};

use super::slot::Slot;
use super::{Dataplane, WAKE};

/// Maximum number of events read in one call; the next sleep reads the others.
const EVENTS: usize = 64;

impl Dataplane {
    /// Arms all ports and sleeps until one of them may have work. Returns at once if one has.
    pub(super) fn sleep(&mut self) {
        let mut work = false;
        for slot in self.slots.iter_mut().flatten() {
            slot.throttle.expire(self.now);
            work |= slot.arm();
        }
        if self.bury() || work {
            return;
        }
        if self.relay.as_mut().is_some_and(|relay| !relay.fall_asleep()) {
            return;
        }
        // The files of held ports stay readable, so they are not watched. If every port is held, as when
        // both ends of a patch wait for each other's room, the events of all ports are watched.
        let deadlock = self.slots.iter().flatten().all(|slot| slot.held);
        let mut calls = 1;
        for slot in self.slots.iter_mut().flatten() {
            calls += slot.update_watch(&self.epoll, !deadlock);
        }
        self.system.syscalls.add(calls);
        self.wait();
        if let Some(relay) = &self.relay {
            relay.awake();
        }
        let woke = monotonic();
        self.last_sleep = Some(woke.saturating_sub(self.now));
        self.now = woke;
        self.system.wakeups.add(1);
        for slot in self.slots.iter_mut().flatten() {
            slot.throttle.expire(woke);
        }
    }

    /// Waits in epoll until a file is readable or the earliest alarm of a slot is due.
    fn wait(&mut self) {
        let ends = self.slots.iter().flatten().filter_map(Slot::alarm).min();
        let timeout = ends.map(|end| timespec(end.saturating_sub(self.now)));
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let waited = match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            // Before Linux 5.11 there are only whole milliseconds.
            Err(rustix::io::Errno::NOSYS) => {
                let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                epoll::wait(&self.epoll, &mut room, Some(&millisecond))
            }
            waited => waited,
        };
        // After an interruption the next sleep finds the events.
        let Ok((events, _)) = waited else { return };
        for event in events {
            self.dispatch(event.data.u64());
        }
    }

    fn dispatch(&mut self, token: u64) {
        if token == WAKE {
            self.system.syscalls.add(1);
            let _ = rustix::io::read(&self.inbox.wake, &mut [0; 8]);
            return;
        }
        let place = usize::try_from(token).ok();
        let slot = place.and_then(|place| self.slots.get_mut(place)).and_then(Option::as_mut);
        // A port with two files may have two events.
        if let Some(slot) = slot.filter(|slot| !slot.woken && slot.fault.is_none()) {
            slot.wake();
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
