//! The thread that serves a ring.

// #syscall driver,daemon eventfd2,read,write,ppoll: a worker is told something, and waits
// #syscall driver,daemon sched_yield: polling threads let others run
// #syscall driver,daemon clock_gettime: the CPU time that a worker used; time, where the vDSO does not know it

use core::time::Duration;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use ringfence_platform::{Channel, ChannelError, Counters, Grantee};
use ringfence_ring::{ProducerOverflow, RingMemory};
use ringfence_sys::mailbox::Mailbox;
use ringfence_sys::pace::{Spin, Throttle};
use ringfence_sys::poll::{wait_any, wait_readable};
use rustix::event::{PollFd, PollFlags};
use rustix::time::{ClockId, clock_gettime};

use super::counters::QueueCounters;
use super::penalty::{Penalties, Penalty};
use super::queue::Queue;

/// How often pages are looked at that nobody uses, while nothing else happens.
const TIDY_EVERY: Duration = Duration::from_millis(100);
/// How long a queue that is stopped waits for its disk, at a time.
const DRAIN_STEP: Duration = Duration::from_millis(100);

/// Why a queue ended.
#[derive(Debug, thiserror::Error)]
pub enum QueueFault {
    /// The frontend announced what its ring cannot hold.
    #[error(transparent)]
    Ring(#[from] ProducerOverflow),
    /// The frontend closed its end of the channel.
    #[error("the other end of the event channel was closed")]
    Gone,
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The thread died of a mistake of its own.
    #[error("the thread of a queue panicked")]
    Panicked,
}

impl QueueFault {
    /// A constant name, for counters.
    pub fn rule(&self) -> &'static str {
        match self {
            QueueFault::Ring(_) => "blk_producer_overflow",
            QueueFault::Gone => "channel_closed",
            QueueFault::System { .. } => "channel_failed",
            QueueFault::Panicked => "queue_panicked",
        }
    }
}

/// Commands of the device to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WorkerCommand {
    /// Stop serving the ring, drain the disk queue and end the thread.
    Stop,
    /// Unmap all idle pages and free spare memory.
    Shrink,
}

/// Time since a fixed moment.
pub(super) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// A queue, its channel, and when to look.
pub(super) struct Worker<G, M, C> {
    pub(super) queue: Queue<G, M>,
    pub(super) channel: C,
    pub(super) commands: Mailbox<WorkerCommand>,
    pub(super) spin: Spin,
    pub(super) counters: Arc<QueueCounters>,
    pub(super) system: Arc<Counters>,
    pub(super) drain_limit: Duration,
}

/// How a sleep is woken from.
struct Woken {
    event: bool,
    /// A file said something.
    any: bool,
}

impl<G: Grantee, M: RingMemory, C: Channel> Worker<G, M, C> {
    /// Serves until told to stop, or until the frontend breaks a rule. Nothing is in flight and nothing
    /// of the guest's is mapped when this returns.
    pub(super) fn run(mut self) -> Result<(), QueueFault> {
        // Whoever served the ring before may have answered and died before it said so.
        let told = self.channel.notify();
        let served = told.map_err(fault).and_then(|()| self.serve());
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
            match self.commands.take() {
                Some(WorkerCommand::Shrink) => self.queue.shrink(),
                Some(WorkerCommand::Stop) => return Ok(()),
                None => {}
            }
            let worked = self.queue.round(now)?;
            if self.queue.notify_due() {
                self.channel.notify().map_err(fault)?;
            }
            self.apply_penalty(
                penalties.after_round(self.counters.refused.get(), self.queue.not_kept()),
            );
            now = monotonic();
            if now.saturating_sub(tidied) >= TIDY_EVERY {
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
            if core::mem::take(&mut event) {
                self.counters.spurious_wakeups.add(1);
                self.counters.throttles.add(u64::from(throttle.spurious(now)));
            }
            if now.saturating_sub(last_work) < self.spin.window() {
                // Where there are more rings than processors, others have something to do.
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

    /// Sleeps until there may be work.
    fn sleep(&self, now: Duration, deaf_until: Option<Duration>) -> Result<Woken, QueueFault> {
        let disk = self.queue.disk().wait_fd();
        let mut files = [
            PollFd::new(&self.commands, PollFlags::IN),
            PollFd::from_borrowed_fd(disk, PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN),
        ];
        // While the channel is not listened to, it is looked at again in time.
        let deaf = deaf_until.map(|until| until.saturating_sub(now));
        let idle = (self.queue.kept() > 0).then_some(TIDY_EVERY);
        let limit = deaf.into_iter().chain(idle).min().map(|length| Instant::now() + length);
        let listened = if deaf.is_some() { &mut files[..2] } else { &mut files[..] };
        self.system.syscalls.add(1);
        wait_any(listened, limit)
            .map_err(|source| QueueFault::System { what: "waiting", source })?;
        let ready: [bool; 3] =
            [0, 1, 2].map(|i| listened.get(i).is_some_and(|file| !file.revents().is_empty()));
        if ready[0] {
            self.commands.clear();
        }
        if ready[2] {
            self.channel.clear().map_err(fault)?;
        }
        Ok(Woken { event: ready[2] && !ready[0] && !ready[1], any: ready.contains(&true) })
    }

    /// Waits for what is in flight, and answers it; then lets go of all pages.
    fn drain(&mut self) {
        let begun = monotonic();
        while self.queue.running() > 0 && monotonic().saturating_sub(begun) < self.drain_limit {
            if !self.queue.finish() {
                let _ = wait_readable(self.queue.disk().wait_fd(), Some(DRAIN_STEP));
            }
        }
        if self.queue.notify_due() {
            // It may be gone, which is why we are here.
            let _ = self.channel.notify();
        }
        self.queue.shrink();
    }
}

fn fault(error: ChannelError) -> QueueFault {
    match error {
        ChannelError::PeerGone => QueueFault::Gone,
        ChannelError::System(errno) => QueueFault::System {
            what: "event channel",
            source: io::Error::from_raw_os_error(errno),
        },
    }
}
