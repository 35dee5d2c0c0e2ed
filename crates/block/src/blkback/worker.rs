//! The thread that serves a ring.

// #syscall driver,daemon eventfd2,read,write,ppoll: a worker is told something, and waits
// #syscall driver,daemon sched_yield: polling threads let others run
// #syscall driver,daemon clock_gettime: the CPU time that a worker used; time, where the vDSO does not know it

use core::time::Duration;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use ringfence_platform::{Channel, ChannelError, Counters, Grantee};
use ringfence_ring::{ProducerOverflow, RingMemory};
use ringfence_sys::pace::{Spin, Throttle};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::time::{ClockId, clock_gettime};

use super::counters::QueueCounters;
use super::manners::{Manners, Turn};
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

/// What a worker is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    Stop,
    Squeeze,
}

/// The way to a worker.
pub(super) struct Orders {
    sender: Sender<Order>,
    wake: Arc<OwnedFd>,
}

/// The worker's end.
pub(super) struct Inbox {
    receiver: Receiver<Order>,
    wake: Arc<OwnedFd>,
}

/// Both ends.
pub(super) fn orders() -> io::Result<(Orders, Inbox)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = channel();
    Ok((Orders { sender, wake: Arc::clone(&wake) }, Inbox { receiver, wake }))
}

impl Orders {
    pub(super) fn give(&self, order: Order) {
        // A worker that is gone needs no orders.
        if self.sender.send(order).is_ok() {
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// Time since a fixed moment.
pub(super) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// A queue, its channel, and when to look.
pub(super) struct Worker<G, M, C> {
    pub(super) queue: Queue<G, M>,
    pub(super) channel: C,
    pub(super) inbox: Inbox,
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
        let mut manners = Manners::default();
        let mut event = false;
        loop {
            match self.inbox.receiver.try_recv() {
                Ok(Order::Squeeze) => self.queue.squeeze(),
                Ok(Order::Stop) | Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {}
            }
            let worked = self.queue.round(now)?;
            if self.queue.notify_due() {
                self.channel.notify().map_err(fault)?;
            }
            self.take_turns(manners.after(self.counters.refused.get(), self.queue.not_kept()));
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

    /// Lets others go first, if that is due.
    fn take_turns(&self, turn: Turn) {
        match turn {
            Turn::GoOn => return,
            Turn::GiveWay => rustix::thread::sched_yield(),
            Turn::Pause(length) => {
                self.counters.pauses.add(1);
                // An order ends it.
                let mut orders = [PollFd::new(&*self.inbox.wake, PollFlags::IN)];
                let _ = poll(&mut orders, Some(&timespec(length)));
            }
        }
        self.system.syscalls.add(1);
    }

    /// Sleeps until there may be work.
    fn sleep(&self, now: Duration, deaf_until: Option<Duration>) -> Result<Woken, QueueFault> {
        let disk = self.queue.disk().wait_fd();
        let mut files = [
            PollFd::new(&*self.inbox.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(disk, PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN),
        ];
        // While the channel is not listened to, it is looked at again in time.
        let deaf = deaf_until.map(|until| until.saturating_sub(now));
        let idle = (self.queue.kept() > 0).then_some(TIDY_EVERY);
        let limit = deaf.into_iter().chain(idle).min().map(timespec);
        let listened = if deaf.is_some() { &mut files[..2] } else { &mut files[..] };
        self.system.syscalls.add(1);
        match poll(listened, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(QueueFault::System { what: "waiting", source: errno.into() });
            }
        }
        let ready: [bool; 3] =
            [0, 1, 2].map(|i| listened.get(i).is_some_and(|file| !file.revents().is_empty()));
        if ready[0] {
            let _ = rustix::io::read(&*self.inbox.wake, &mut [0; 8]);
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
                let mut disk =
                    [PollFd::from_borrowed_fd(self.queue.disk().wait_fd(), PollFlags::IN)];
                let _ = poll(&mut disk, Some(&timespec(DRAIN_STEP)));
            }
        }
        if self.queue.notify_due() {
            // It may be gone, which is why we are here.
            let _ = self.channel.notify();
        }
        self.queue.squeeze();
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
