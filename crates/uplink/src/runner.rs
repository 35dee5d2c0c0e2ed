//! Runner: a thread that drives one [`Uplink`] and its link to the guest, without a switch in between.
//!
//! ```text
//! round: link.receive -> uplink.input -> poll_host -> run_timers -> output -> link.flush
//!   work left or found: next round
//!   idle:               spin, then arm the link and sleep in poll
//! ```
//!
//! It sleeps until a frame arrives, a socket is ready, a timer is due, another runner hands something over,
//! or the stop descriptor is readable.
//!
//! With a link of which each look is a system call ([`GuestLink::is_polled_by_calls`]), one call of the host's epoll before a
//! round tells all of that, in spins and in sleeps. A round then reads the frames that it expects, as many as in the
//! last one, and only further ones if the epoll tells of them. So no read finds nothing while frames come one by one.
//!
//! Before it sleeps it busy-polls as long as recent sleeps were short ([`Spin`]): sleeping and waking cost
//! more. It does not yield the processor meanwhile. On Linux 6.18 a thread that yields to a computing thread
//! loses its whole time slice, which delays the next frame by milliseconds. After bulk data it sleeps at
//! once, because sender and receiver then need the processor.

// #syscall uplink ppoll: waiting for the guest and for sockets

use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use ringfence_frame::batch::Batch;
use ringfence_frame::{Fault, Port, Received};
use ringfence_sys::clock::Clock;
use ringfence_sys::numbers::bounded;
use ringfence_sys::pace::Spin;
use ringfence_sys::poll::wait_any;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::engine::Uplink;
use crate::host::RunnerFile;
use crate::link::GuestLink;
use crate::team::{DrainRequest, Member, TeamDrain};

/// Maximum of frames received from the guest in one round.
const FRAMES_PER_ROUND: usize = 64;
/// Size of the batch's private memory in bytes. Small enough that received data is still in the
/// processor's cache when it is sent.
const SCRATCH_LEN: usize = 400_000;

/// Number of bytes since the last idle period from which on the runner sleeps without spinning.
const BULK_BYTES: u64 = 64 << 10;

/// Maximum time between two looks at the host's sockets while the runner busy-polls.
const LOOK_WITHIN: Duration = Duration::from_micros(5);
/// Minimum of that time: about as long as the look itself takes.
const LOOK_AFTER: Duration = Duration::from_micros(1);

/// Time without payload after which a runner no longer waits for data of a guest that has ended.
const DRAIN_QUIET: Duration = Duration::from_millis(500);
/// Maximum time of a drain. Programs that wait for [`Runner::drain`] should wait a little longer.
pub const DRAIN_MAX: Duration = Duration::from_secs(10);
/// Interval of the looks at a link and connections that are being drained.
const DRAIN_PAUSE: Duration = Duration::from_millis(1);

/// Number of busy rounds after which the runner looks at its stop descriptor.
const ROUNDS_PER_CHECK: u32 = 256;

/// Uplink engine with its link and its thread's state.
pub struct Runner<L> {
    uplink: Uplink,
    link: L,
    clock: Clock,
    batch: Batch,
    indices: Vec<u32>,
    spin: Spin,
    /// Connection to the runners of the guest's other engines.
    member: Option<Member>,
    /// Sources with events, if they are known for the next round.
    ready: Option<Sources>,
    /// Time of the next look at the host's sockets, while nothing happens.
    look_at: Duration,
    /// Set if one call of the host's epoll tells all events. `None`: it was not tried.
    is_watched: Option<bool>,
    /// Set if the stop descriptor had an event.
    is_stopped: bool,
    /// Maximum of frames for the next round.
    budget: usize,
    /// Set if the last round received all of its budget, and no look has found the link empty since.
    was_full: bool,
    /// Set after a round that found frames of the guest alone, and left no work.
    is_drained: bool,
    /// Set after a round that found nothing in the link.
    is_link_empty: bool,
}

/// Sources that a round polls.
#[derive(Clone, Copy, Debug)]
struct Sources {
    link: bool,
    host: bool,
}

impl Sources {
    const ALL: Sources = Sources { link: true, host: true };
}

/// Reasons for which a runner ends.
#[derive(Debug, thiserror::Error)]
pub enum RunnerEnd {
    /// The stop descriptor became readable.
    #[error("stopped on request")]
    Stopped,
    /// The link to the guest failed.
    #[error("the link to the guest: {0}")]
    Link(#[from] Fault),
    /// The host's epoll failed.
    #[error("the sockets: {0}")]
    Host(Errno),
    /// The runner could not wait.
    #[error("poll: {0}")]
    Poll(io::Error),
}

impl<L: Port + GuestLink> Runner<L> {
    /// Creates a runner that busy-polls for at most `spin` before it sleeps.
    pub fn new(uplink: Uplink, link: L, clock: Clock, spin: Duration) -> Runner<L> {
        let batch = Batch::with_capacity(FRAMES_PER_ROUND, SCRATCH_LEN);
        let (indices, spin) = (Vec::new(), Spin::new(spin));
        Runner {
            uplink,
            link,
            clock,
            batch,
            indices,
            spin,
            member: None,
            ready: None,
            look_at: Duration::ZERO,
            is_watched: None,
            is_stopped: false,
            budget: FRAMES_PER_ROUND,
            was_full: false,
            is_drained: false,
            is_link_empty: false,
        }
    }

    /// Makes the runner one of several, whose engines each know their [`Share`](crate::share::Share).
    pub fn with_others(self, member: Member) -> Runner<L> {
        Runner { member: Some(member), ..self }
    }

    /// Runs rounds until `stop` is readable or the link or the host fails. Returns the reason.
    pub fn run(mut self, stop: impl AsFd) -> RunnerEnd {
        self.run_until(stop.as_fd(), PollFlags::IN)
    }

    /// Runs rounds until `stop` has one of these events, or is hung up, or the link or the host fails. Returns
    /// the reason. It can be called again after [`RunnerEnd::Stopped`], with the same `stop` and `events`.
    pub fn run_until(&mut self, stop: BorrowedFd<'_>, events: PollFlags) -> RunnerEnd {
        if self.is_watched.is_none() {
            self.is_watched = Some(self.watch(stop, events));
        }
        loop {
            while let Some(request) = self.member.as_ref().and_then(Member::take_drain_request) {
                if let Err(ended) = self.drain_until(Some(request), None) {
                    return ended;
                }
            }
            if let Err(ended) = self.run_until_idle(stop, events) {
                return ended;
            }
            match self.sleep(stop, events) {
                Ok(false) => {}
                Ok(true) => return RunnerEnd::Stopped,
                Err(ended) => return ended,
            }
        }
    }

    /// Carries the last data of a guest whose programs have ended: the frames that wait in the link, and the rest of each
    /// connection, until the guest's kernel has closed it. It ends earlier when no payload has moved for half a second, or
    /// after [`DRAIN_MAX`]. The other runners of the team do the same.
    ///
    /// # Errors
    ///
    /// Returns the failure of the link or the host.
    pub fn drain(&mut self) -> Result<(), RunnerEnd> {
        let team = self.member.as_ref().map(Member::request_drain);
        let own = self.member.as_ref().and_then(Member::take_drain_request);
        self.drain_until(own, team)
    }

    /// Drains the link, then drops `request`, and goes on until those of the `team` are drained, too.
    fn drain_until(
        &mut self,
        mut request: Option<DrainRequest>,
        team: Option<TeamDrain>,
    ) -> Result<(), RunnerEnd> {
        // The worker behind a link without system calls may not have written a frame yet that it has taken.
        let looks = if self.link.is_polled_by_calls() { 1 } else { 2 };
        let began = self.clock.now();
        let (mut moved, mut empty) = (began, 0);
        loop {
            let now = self.clock.now();
            let carried = self.uplink.counters().bytes();
            self.ready = Some(Sources::ALL);
            self.run_round(now)?;
            if self.uplink.counters().bytes() != carried {
                moved = now;
            }
            empty = if self.is_link_empty { empty + 1 } else { 0 };
            let is_over = now >= began + DRAIN_MAX || now >= moved + DRAIN_QUIET;
            if is_over || empty >= looks && !self.uplink.has_data_of_guest() {
                drop(request.take());
                if is_over || team.as_ref().is_none_or(TeamDrain::is_complete) {
                    return Ok(());
                }
            }
            if self.is_link_empty {
                self.pause()?;
            }
        }
    }

    /// Waits for an event of any source, for at most [`DRAIN_PAUSE`].
    fn pause(&mut self) -> Result<(), RunnerEnd> {
        let link = self.link.wait_fds();
        let others = self.member.as_ref().map(Member::wait_fd);
        let fds = [self.uplink.wait_fd()].into_iter().chain(others).chain(link);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let until = Instant::now().checked_add(DRAIN_PAUSE);
        wait_any(&mut fds, until).map_err(RunnerEnd::Poll)?;
        self.link.clear_events()?;
        self.member.iter().for_each(Member::clear);
        Ok(())
    }

    /// Has the host's epoll watch the link, the stop descriptor and the other runners. Returns `false` if it does not.
    fn watch(&mut self, stop: BorrowedFd<'_>, events: PollFlags) -> bool {
        let link = self.link.wait_fds();
        let &[link] = &link[..] else { return false };
        if !self.link.is_polled_by_calls() {
            return false;
        }
        let stops =
            if events.contains(PollFlags::IN) { EventFlags::IN } else { EventFlags::empty() };
        // The items themselves tell whether the event was handled.
        let team = self
            .member
            .as_ref()
            .map(|member| (RunnerFile::Team, member.wait_fd(), EventFlags::IN | EventFlags::ET));
        let (stop, link) =
            ((RunnerFile::Stop, stop, stops), (RunnerFile::Link, link, EventFlags::IN));
        // The link is the last one: its event stays as long as frames wait, and nobody would take it after a failure.
        let files = [Some(stop), team, Some(link)].into_iter().flatten();
        let mut watch = |(file, fd, flags)| self.uplink.watch_runner(file, fd, flags).is_ok();
        files.into_iter().all(&mut watch)
    }

    /// Looks at all sources by one call, for at most `within`. Returns those with events.
    fn look(&mut self, within: Option<Duration>) -> Result<Sources, RunnerEnd> {
        let found = self.uplink.wait_host(within).map_err(RunnerEnd::Host)?;
        self.is_stopped |= found.stop;
        self.was_full &= found.link;
        Ok(Sources { link: found.link, host: true })
    }

    /// Runs rounds until none had work for the current spin time. It also looks at `stop` now and then, because
    /// a guest can keep a runner busy for long.
    fn run_until_idle(&mut self, stop: BorrowedFd<'_>, events: PollFlags) -> Result<(), RunnerEnd> {
        let mut idle_since = None;
        let mut busy = 0_u32;
        let mut carried = self.uplink.counters().bytes();
        loop {
            let now = self.clock.now();
            let has_worked = self.run_round(now)?;
            if core::mem::take(&mut self.is_stopped) {
                return Err(RunnerEnd::Stopped);
            }
            if has_worked {
                idle_since = None;
                self.look_at = Duration::ZERO;
                busy = busy.wrapping_add(1);
                let is_due = self.is_watched != Some(true) && busy.is_multiple_of(ROUNDS_PER_CHECK);
                if is_due && has_events(stop, events)? {
                    return Err(RunnerEnd::Stopped);
                }
                let is_bulk = self.uplink.counters().bytes().wrapping_sub(carried) >= BULK_BYTES;
                if self.is_drained && !is_bulk && self.spin.limit().is_zero() {
                    // The sleep itself tells what comes next: a look at all sources would find nothing most times.
                    return Ok(());
                }
                continue;
            }
            let since = match idle_since {
                Some(since) => since,
                None => {
                    let before = core::mem::replace(&mut carried, self.uplink.counters().bytes());
                    if carried.wrapping_sub(before) >= BULK_BYTES {
                        return Ok(());
                    }
                    *idle_since.insert(now)
                }
            };
            let end = since + self.spin.limit();
            if now >= end {
                return Ok(());
            }
            if now >= self.look_at {
                self.look_at = (now + look_interval(now.saturating_sub(since))).min(end);
            }
            // A link that needs no calls is looked at all the time; otherwise the look tells of it, too.
            while self.is_watched == Some(true) && self.clock.now() < self.look_at {
                core::hint::spin_loop();
            }
            core::hint::spin_loop();
        }
    }

    /// Runs one round. Returns `true` if it had work or left some.
    ///
    /// # Errors
    ///
    /// Returns the failure of the link or the host.
    pub fn run_round(&mut self, now: Duration) -> Result<bool, RunnerEnd> {
        let is_watched = self.is_watched == Some(true);
        let ready = match self.ready.take() {
            Some(ready) => ready,
            None if is_watched => self.look(Some(Duration::ZERO))?,
            None => Sources { link: true, host: now >= self.look_at },
        };
        let mut received = Received::default();
        if ready.link {
            received = self.receive(is_watched)?;
        }
        if received.frames > 0 {
            self.indices.clear();
            self.indices.extend(0..bounded(self.batch.len(), u32::MAX));
            self.uplink.input(&self.batch, &self.indices, now);
        }
        self.batch.clear();
        self.link.complete()?;
        let taken = self.accept_handoff(now);
        let mut events = 0;
        if ready.host {
            events = self.uplink.poll_host(now).map_err(RunnerEnd::Host)?;
        }
        self.uplink.run_timers(now);
        let more = self.uplink.output(&mut self.link, now);
        Port::flush(&mut self.link)?;
        // Polling a full link would take the processor from the guest that must drain it.
        let more = more && !self.link.is_full();
        self.uplink.prepare();
        if let Some(member) = &self.member {
            let counters = self.uplink.counters().clone();
            member.hand_over(self.uplink.take_handoffs(), &counters);
        }
        let is_read = received.work < FRAMES_PER_ROUND && (!self.was_full || self.budget == 1);
        self.is_link_empty = ready.link && received.work == 0;
        self.is_drained = !more && events == 0 && taken == 0 && is_read;
        Ok(more || received.work > 0 || events > 0 || taken > 0)
    }

    /// Receives frames of the guest. A runner that learns by its look whether frames wait reads no more than it expects.
    fn receive(&mut self, is_watched: bool) -> Result<Received, Fault> {
        if !is_watched {
            return self.link.receive(&mut self.batch, FRAMES_PER_ROUND);
        }
        if self.was_full {
            self.budget = (self.budget * 2).min(FRAMES_PER_ROUND);
        }
        let received = self.link.receive(&mut self.batch, self.budget)?;
        self.was_full = received.work >= self.budget;
        if !self.was_full {
            self.budget = received.work.max(1);
        }
        Ok(received)
    }

    /// Accepts frames and connections from other runners. Returns their number.
    fn accept_handoff(&mut self, now: Duration) -> usize {
        let Some(member) = &self.member else { return 0 };
        let mut taken = 0;
        for handoff in member.take(FRAMES_PER_ROUND) {
            self.uplink.accept_handoff(handoff, now);
            taken += 1;
        }
        taken
    }

    /// Sleeps until there is work. Returns `true` if the runner is to stop.
    fn sleep(&mut self, stop: BorrowedFd<'_>, events: PollFlags) -> Result<bool, RunnerEnd> {
        if self.link.arm()? {
            self.ready = Some(Sources::ALL);
            return Ok(false);
        }
        self.uplink.counters().sleeps.add(1);
        let slept = self.clock.now();
        let deadline = [self.uplink.deadline(), Port::deadline(&self.link)];
        let left =
            deadline.into_iter().flatten().min().map(|deadline| deadline.saturating_sub(slept));
        if self.is_watched == Some(true) {
            let had_more = self.was_full;
            self.ready = Some(self.look(left)?);
            // A sleep that frames ended which had waited before it says nothing about the next one.
            if !(had_more && self.was_full) {
                self.spin.slept(self.clock.now().saturating_sub(slept));
            }
            self.link.clear_events()?;
            return Ok(core::mem::take(&mut self.is_stopped));
        }
        let until = left.and_then(|left| Instant::now().checked_add(left));
        let (stopped, ready) = {
            let mut fds = vec![
                PollFd::from_borrowed_fd(stop, events),
                PollFd::from_borrowed_fd(self.uplink.wait_fd(), PollFlags::IN),
            ];
            let link = self.link.wait_fds();
            let others = self.member.as_ref().map(Member::wait_fd);
            fds.extend(others.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let links = fds.len();
            fds.extend(link.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            wait_any(&mut fds, until).map_err(RunnerEnd::Poll)?;
            let has = |fd: &PollFd<'_>| !fd.revents().is_empty();
            (has(&fds[0]), Sources { host: has(&fds[1]), link: fds[links..].iter().any(has) })
        };
        self.ready = Some(ready);
        self.spin.slept(self.clock.now().saturating_sub(slept));
        self.link.clear_events()?;
        if let Some(member) = &self.member {
            member.clear();
        }
        Ok(stopped)
    }

    /// Returns the engine of the runner.
    pub fn uplink(&mut self) -> &mut Uplink {
        &mut self.uplink
    }
}

/// Returns the time until the next look at the host's sockets, for a runner that has busy-polled for `idle`. A look is a
/// system call: without a pause between them a runner made one each microsecond. A quarter of the time that it has
/// waited is little beside it, and 5 µs are little beside a sleep, which costs tens of µs. Timers and the stop
/// descriptor are late by as much at most.
fn look_interval(idle: Duration) -> Duration {
    (idle / 4).clamp(LOOK_AFTER, LOOK_WITHIN)
}

/// Returns `true` if a descriptor has one of these events now, or is hung up.
fn has_events(fd: BorrowedFd<'_>, events: PollFlags) -> Result<bool, RunnerEnd> {
    let mut fds = [PollFd::from_borrowed_fd(fd, events)];
    wait_any(&mut fds, Some(Instant::now())).map_err(RunnerEnd::Poll)?;
    Ok(!fds[0].revents().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_of_fifty_microseconds_looks_a_few_times() {
        let (mut idle, mut looks) = (Duration::ZERO, 0);
        while idle < Duration::from_micros(50) {
            let interval = look_interval(idle);
            assert!(interval <= LOOK_WITHIN && interval <= (idle / 4).max(LOOK_AFTER), "{idle:?}");
            idle += interval;
            looks += 1;
        }
        assert!(looks <= 20, "{looks}");
    }
}
