//! A thread that does nothing else: an uplink and its link to the guest, without a data plane between.
//!
//! It goes turns as long as there is work, and sleeps when a turn found none: until a frame comes, a
//! socket is ready, a deadline has come, or it is told to stop.
//!
//! Before it sleeps it goes some turns for nothing, as long as sleeps have been short of late ([`Spin`]): to
//! sleep and be woken costs more than those. It does not yield the processor in between: with Linux 6.18, who
//! yields to a thread that computes gives away a whole turn of its own, and comes to the next frame milliseconds
//! later. Behind much data it sleeps at once: then those who send and receive it want the processor.

// #syscall uplink sched_yield: polling threads let others run
// #syscall uplink ppoll: waiting for the guest and for sockets

use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use ringfence_frame::batch::Batch;
use ringfence_frame::{Fault, Port, Received};
use ringfence_sys::clock::Clock;
use ringfence_sys::pace::Spin;
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::engine::Uplink;
use crate::link::GuestSide;
use crate::team::Member;

/// Frames taken from the guest in one turn.
const BUDGET: usize = 64;
/// Octets of private memory for them: few enough that what was read is still in a processor's own cache
/// when it is sent on.
const SCRATCH: usize = 400_000;

/// Octets since it was idle last, from which on it does not wait for more before it sleeps.
const BULK: u64 = 64 << 10;

/// An uplink with its link.
pub struct Runner<L> {
    uplink: Uplink,
    link: L,
    clock: Clock,
    batch: Batch,
    indices: Vec<u32>,
    spin: Spin,
    /// Others that carry the same guest's packets.
    member: Option<Member>,
    /// What of its sources has something; known for the first turn after it slept.
    ready: Sources,
}

/// What a turn looks at.
#[derive(Clone, Copy, Debug)]
struct Sources {
    link: bool,
    host: bool,
}

impl Sources {
    const ALL: Sources = Sources { link: true, host: true };
}

/// Why a runner ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// It was told to.
    #[error("it was told to stop")]
    Stopped,
    /// The link is of no more use.
    #[error("the link to the guest: {0}")]
    Link(#[from] Fault),
    /// The host's sockets are of no more use.
    #[error("the sockets: {0}")]
    Host(Errno),
    /// It cannot wait.
    #[error("poll: {0}")]
    Poll(io::Error),
}

impl<L: Port + GuestSide> Runner<L> {
    /// A runner that goes turns for nothing for at most `spin` before it sleeps.
    pub fn new(uplink: Uplink, link: L, clock: Clock, spin: Duration) -> Runner<L> {
        let batch = Batch::with_capacity(BUDGET, SCRATCH);
        let (indices, spin) = (Vec::new(), Spin::new(spin));
        Runner { uplink, link, clock, batch, indices, spin, member: None, ready: Sources::ALL }
    }

    /// The same as one of several, each with an engine that knows its
    /// [`Share`](crate::share::Share).
    pub fn with_others(self, member: Member) -> Runner<L> {
        Runner { member: Some(member), ..self }
    }

    /// Runs until `stop` is readable, or something of it has come to its end; tells why.
    pub fn run(mut self, stop: impl AsFd) -> Ended {
        loop {
            if let Err(ended) = self.run_until_idle() {
                return ended;
            }
            match self.sleep(stop.as_fd()) {
                Ok(false) => {}
                Ok(true) => return Ended::Stopped,
                Err(ended) => return ended,
            }
        }
    }

    /// Turns until there was nothing to do for a while.
    fn run_until_idle(&mut self) -> Result<(), Ended> {
        let mut idle_since = None;
        let mut carried = self.uplink.counters().octets();
        loop {
            let now = self.clock.now();
            if self.turn(now)? {
                idle_since = None;
                continue;
            }
            let since = match idle_since {
                Some(since) => since,
                None => {
                    let before = core::mem::replace(&mut carried, self.uplink.counters().octets());
                    if carried.wrapping_sub(before) >= BULK {
                        return Ok(());
                    }
                    *idle_since.insert(now)
                }
            };
            if now.saturating_sub(since) >= self.spin.window() {
                return Ok(());
            }
            core::hint::spin_loop();
        }
    }

    /// One turn; whether there was something to do, or is.
    pub fn turn(&mut self, now: Duration) -> Result<bool, Ended> {
        let ready = core::mem::replace(&mut self.ready, Sources::ALL);
        let mut received = Received::default();
        if ready.link {
            received = self.link.receive(&mut self.batch, BUDGET)?;
        }
        if received.frames > 0 {
            self.indices.clear();
            self.indices.extend(0..u32::try_from(self.batch.len()).unwrap_or(0));
            self.uplink.input(&self.batch, &self.indices, now);
        }
        self.batch.clear();
        self.link.complete()?;
        let taken = self.take_over(now);
        let mut events = 0;
        if ready.host {
            events = self.uplink.poll_host(now).map_err(Ended::Host)?;
        }
        self.uplink.run_timers(now);
        let more = self.uplink.output(&mut self.link, now);
        Port::flush(&mut self.link)?;
        // Who waits for room would take the processor from whoever makes it.
        let more = more && !self.link.is_full();
        self.uplink.stock_up();
        if let Some(member) = &self.member {
            let counters = self.uplink.counters().clone();
            member.hand_over(self.uplink.take_handed(), &counters);
        }
        Ok(more || received.work > 0 || events > 0 || taken > 0)
    }

    /// Takes what others have handed over; how much.
    fn take_over(&mut self, now: Duration) -> usize {
        let Some(member) = &self.member else { return 0 };
        let mut taken = 0;
        for handed in member.take(BUDGET) {
            self.uplink.take_over(handed, now);
            taken += 1;
        }
        taken
    }

    /// Sleeps until there is something to do; whether it is to stop.
    fn sleep(&mut self, stop: BorrowedFd<'_>) -> Result<bool, Ended> {
        if self.link.arm()? {
            return Ok(false);
        }
        let slept = self.clock.now();
        let deadline = [self.uplink.deadline(), Port::deadline(&self.link)];
        let left =
            deadline.into_iter().flatten().min().map(|deadline| deadline.saturating_sub(slept));
        let until = left.and_then(|left| Instant::now().checked_add(left));
        let (stopped, ready) = {
            let mut fds = vec![
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.uplink.wait_fd(), PollFlags::IN),
            ];
            let link = self.link.wait_fds();
            let others = self.member.as_ref().map(Member::wait_fd);
            fds.extend(others.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let links = fds.len();
            fds.extend(link.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            wait_any(&mut fds, until).map_err(Ended::Poll)?;
            let has = |fd: &PollFd<'_>| !fd.revents().is_empty();
            (has(&fds[0]), Sources { host: has(&fds[1]), link: fds[links..].iter().any(has) })
        };
        self.ready = ready;
        self.spin.slept(self.clock.now().saturating_sub(slept));
        self.link.clear_events()?;
        if let Some(member) = &self.member {
            member.clear();
        }
        Ok(stopped)
    }

    /// The engine.
    pub fn uplink(&mut self) -> &mut Uplink {
        &mut self.uplink
    }
}
