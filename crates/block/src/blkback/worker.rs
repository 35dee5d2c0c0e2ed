//! Worker thread of one ring.
//!
//! The worker serves rounds of its queue until there is no work, polls for a while (see
//! [`ringfence_sys::pace::Spin`]), then sleeps in `poll`. A command of the device, a completion of the
//! disk or an event of the frontend ends the sleep. Spurious events are throttled
//! ([`ringfence_sys::pace::Throttle`]). When it stops, it waits for the disk, answers what completed and
//! unmaps all pages.

// #syscall driver,daemon eventfd2,read,write,ppoll: a worker takes commands, and waits
// #syscall driver,daemon sched_yield: polling threads let others run
// #syscall driver,daemon clock_gettime: the CPU time that a worker used; time, where the vDSO does not know it

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use ringfence_platform::{Channel, Counters, Grantee};
use ringfence_ring::RingMemory;
use ringfence_sys::mailbox::Mailbox;
use ringfence_sys::numbers::bounded;
use ringfence_sys::pace::{Spin, Throttle};
use ringfence_sys::poll::{wait_any, wait_readable};
use rustix::event::{PollFd, PollFlags};
use rustix::time::{ClockId, clock_gettime};

use super::counters::QueueCounters;
use super::fault::QueueFault;
use super::pause::PauseToken;
use super::penalty::{Penalties, Penalty};
use super::queue::{BlkbackQueue, DiskSize};
use crate::storage::DiskQueue;

/// Interval at which idle persistent pages are examined for expiry.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for one completion of the disk while a stopped queue drains.
const DRAIN_STEP: Duration = Duration::from_millis(100);

/// Commands of the device to a worker.
pub(super) enum WorkerCommand {
    /// Stop serving the ring, drain the disk queue and end the thread.
    Stop,
    /// Keep at most this number of pages mapped, and free spare memory.
    Keep(u16),
    /// Consume no request, drain and close the disk queue, then drop the token.
    Pause(Arc<PauseToken>),
    /// Serve the ring from another queue, of a disk with these sizes.
    Resume(Box<dyn DiskQueue>, DiskSize),
}

/// Returns the time of the monotonic clock.
pub(super) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.max(0).cast_unsigned(), now.tv_nsec.max(0));
    Duration::new(seconds, bounded(nanoseconds.cast_unsigned(), 999_999_999))
}

/// Queue, its event channel and the state of its thread.
pub(super) struct Worker<G, M, C> {
    pub(super) queue: BlkbackQueue<G, M>,
    pub(super) channel: C,
    pub(super) commands: Mailbox<WorkerCommand>,
    pub(super) spin: Spin,
    pub(super) counters: Arc<QueueCounters>,
    pub(super) system: Arc<Counters>,
    pub(super) drain_limit: Duration,
    /// Token of a pause until the disk queue is closed. Dropped after the queue.
    pub(super) pausing: Option<Arc<PauseToken>>,
}

/// Causes that ended a sleep.
struct Woken {
    event: bool,
    /// At least one file was ready.
    any: bool,
}

impl<G: Grantee, M: RingMemory, C: Channel> Worker<G, M, C> {
    /// Serves the ring until a stop command or a fault. When it returns, no request is in flight and no page
    /// of the guest is mapped, unless the disk exceeded `drain_limit`.
    pub(super) fn run(mut self) -> Result<(), QueueFault> {
        // An earlier backend may have crashed after it answered and before it notified.
        let notified = self.channel.notify();
        let served = notified.map_err(QueueFault::from).and_then(|()| self.serve());
        self.drain();
        served
    }

    fn serve(&mut self) -> Result<(), QueueFault> {
        let mut now = monotonic();
        let (mut last_work, mut tidied) = (now, now);
        let mut slept: Option<Duration> = None;
        let mut throttle = Throttle::default();
        let mut penalties = Penalties::default();
        let mut event = false;
        loop {
            // All of them: the event is cleared once for those that were sent before it.
            while let Some(command) = self.commands.take() {
                match command {
                    WorkerCommand::Keep(pages) => self.queue.keep(pages),
                    WorkerCommand::Stop => return Ok(()),
                    WorkerCommand::Pause(token) => {
                        self.queue.pause();
                        self.pausing = Some(token);
                    }
                    WorkerCommand::Resume(disk, size) => self.queue.resume(disk, size),
                }
            }
            if self.pausing.is_some() && self.queue.close_disk()? {
                self.pausing = None;
            }
            let worked = self.queue.round(now)?;
            if self.queue.notify_due() {
                self.channel.notify()?;
            }
            self.apply_penalty(
                penalties.after_round(self.counters.refused.get(), self.queue.not_kept()),
            );
            now = monotonic();
            if now.saturating_sub(tidied) >= EXPIRY_INTERVAL {
                self.queue.tidy(now);
                tidied = now;
            }
            if worked {
                if let Some(length) = slept.take() {
                    self.spin.slept(length);
                }
                throttle.worked();
                event = false;
                last_work = now;
                continue;
            }
            // A frontend that posts requests during a pause does what it should.
            if core::mem::take(&mut event) && !self.queue.is_paused() {
                self.counters.spurious_wakeups.add(1);
                self.counters.throttles.add(u64::from(throttle.spurious(now)));
            }
            if now.saturating_sub(last_work) < self.spin.limit() {
                // With more rings than processors, another thread may have work.
                rustix::thread::sched_yield();
                self.system.syscalls.add(1);
                continue;
            }
            throttle.expire(now);
            if self.queue.final_check()? {
                continue;
            }
            let woken = self.sleep(now, throttle.until())?;
            let woke = monotonic();
            if woken.any {
                slept = Some(woke.saturating_sub(now));
                self.system.wakeups.add(1);
            }
            now = woke;
            event = woken.event;
        }
    }

    /// Yields the processor or pauses, as the penalty accounting demands.
    fn apply_penalty(&self, penalty: Penalty) {
        match penalty {
            Penalty::None => return,
            Penalty::Yield => rustix::thread::sched_yield(),
            Penalty::Pause(length) => {
                self.counters.pauses.add(1);
                // A command ends the pause.
                let _ = wait_readable(&self.commands, Some(length));
            }
        }
        self.system.syscalls.add(1);
    }

    /// Blocks until a command, a completion or an event arrives, or a time limit elapses.
    fn sleep(&self, now: Duration, throttled_until: Option<Duration>) -> Result<Woken, QueueFault> {
        let disk = self.queue.disk().wait_fd();
        let mut files = [
            PollFd::new(&self.commands, PollFlags::IN),
            PollFd::from_borrowed_fd(disk, PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN),
        ];
        // An event channel that is throttled is not polled; the throttle's end bounds the sleep.
        let throttled = throttled_until.map(|until| until.saturating_sub(now));
        let idle = (self.queue.kept() > 0).then_some(EXPIRY_INTERVAL);
        let limit = throttled.into_iter().chain(idle).min().map(|length| Instant::now() + length);
        let listened = if throttled.is_some() { &mut files[..2] } else { &mut files[..] };
        self.system.syscalls.add(1);
        wait_any(listened, limit)
            .map_err(|source| QueueFault::System { what: "waiting", source })?;
        let ready: [bool; 3] =
            [0, 1, 2].map(|i| listened.get(i).is_some_and(|file| !file.revents().is_empty()));
        if ready[0] {
            self.commands.clear();
        }
        if ready[2] {
            self.channel.clear()?;
        }
        Ok(Woken { event: ready[2] && !ready[0] && !ready[1], any: ready.contains(&true) })
    }

    /// Waits for the requests in flight, answers them, then unmaps all pages.
    fn drain(&mut self) {
        let begun = monotonic();
        while self.queue.running() > 0 && monotonic().saturating_sub(begun) < self.drain_limit {
            match self.queue.finish() {
                Ok(true) => {}
                Ok(false) => {
                    let _ = wait_readable(self.queue.disk().wait_fd(), Some(DRAIN_STEP));
                }
                // The other requests must still end.
                Err(fault) => tracing::warn!(%fault, "a queue that stops met another fault"),
            }
        }
        if self.queue.notify_due() {
            // The notification fails if the frontend is gone.
            let _ = self.channel.notify();
        }
        self.queue.shrink();
    }
}
