//! Generator and sink of packets, and their idle strategy.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_frame::batch::{Batch, SCRATCH_DEFAULT};
use ringfence_frame::port::Port;
use ringfence_offload::OffloadMeta;
use ringfence_platform::Counters;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::orders::Amount;
use super::packet::{Checker, Template};
use super::params::{Spoil, Verify};

/// Default number of packets of a batch.
pub(super) const ROUND: u16 = 64;
/// Maximum bytes of a batch's packets, chosen to stay in a core's cache.
const ROUND_BYTES: usize = 512 << 10;
/// Polls of the rings, each followed by a pause instruction, before the process yields: about the time
/// that a full ring of small packets takes to drain.
const SPINS: u32 = 4000;
/// Yields before the process sleeps.
const YIELDS: u32 = 200;
/// Time after which a packet counts as lost, far beyond any scheduling delay.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of one sleep, after which the time limit is checked.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// Batches that are sent between two readings of the clock, which costs more than a packet.
const CLOCK_EVERY: u32 = 8;
/// Index of the packet that is spoilt on request.
const SPOILT: u64 = 1000;

/// Idle strategy of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waiting {
    /// Polls, then yields, then sleeps until an event.
    OnItsOwnCore,
    /// Yields and sleeps without polling, which would keep the peer from running.
    OnASharedCore,
    /// Polls without end and makes no system call.
    Polls,
}

/// Idle state of one worker.
pub(super) struct Idle<'a> {
    counters: &'a Counters,
    waiting: Waiting,
    looks: u32,
    since: Option<Instant>,
}

impl<'a> Idle<'a> {
    pub(super) fn new(counters: &'a Counters, waiting: Waiting) -> Idle<'a> {
        Idle { counters, waiting, looks: 0, since: None }
    }

    /// Resets the strategy after work was found.
    #[inline]
    pub(super) fn reset(&mut self) {
        (self.looks, self.since) = (0, None);
    }

    /// Waits one step. Fails with `what` if no work was found for [`PATIENCE`].
    pub(super) fn wait(&mut self, port: &mut dyn Port, what: &str) -> anyhow::Result<()> {
        let spins = if self.waiting == Waiting::OnASharedCore { 0 } else { SPINS };
        self.looks = self.looks.saturating_add(1);
        if self.looks <= spins {
            std::hint::spin_loop();
            return Ok(());
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        ensure!(since.elapsed() < PATIENCE, "{what} within {PATIENCE:?}");
        if self.waiting == Waiting::Polls {
            self.looks = 0;
            return Ok(());
        }
        if self.looks <= spins + YIELDS {
            self.counters.syscalls.add(1);
            std::thread::yield_now();
            return Ok(());
        }
        self.sleep(port)
    }

    fn sleep(&mut self, port: &mut dyn Port) -> anyhow::Result<()> {
        match sleep(port, None, Some(&NAP))? {
            Slept::Not => {}
            Slept::InVain => self.counters.syscalls.add(1),
            Slept::Well | Slept::Other => {
                self.counters.syscalls.add(1);
                self.counters.wakeups.add(1);
            }
        }
        Ok(())
    }
}

/// End of a sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Slept {
    /// The port had work already.
    Not,
    /// No event came.
    InVain,
    /// An event came.
    Well,
    /// The other file is readable, whatever came from the port.
    Other,
}

/// Arms a port and sleeps until it has an event, another file is readable, or the time is over.
pub(super) fn sleep(
    port: &mut dyn Port,
    other: Option<BorrowedFd<'_>>,
    limit: Option<&Timespec>,
) -> anyhow::Result<Slept> {
    if port.arm().context("arming")? {
        return Ok(Slept::Not);
    }
    let fds: Vec<BorrowedFd<'_>> = port.wait_fds().into_iter().chain(other).collect();
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    match poll(&mut fds, limit) {
        Ok(0) | Err(Errno::INTR) => return Ok(Slept::InVain),
        Ok(_) => {}
        Err(error) => return Err(error).context("poll"),
    }
    let is_other = other.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
    drop(fds);
    port.clear_events().context("clearing events")?;
    Ok(if is_other { Slept::Other } else { Slept::Well })
}

/// Generator of numbered packets.
pub(super) struct Generator {
    template: Template,
    batch: Batch,
    indices: Vec<u32>,
    /// Packets of a batch, and scratch bytes of a packet.
    round: usize,
    room: usize,
    sequence: u64,
    /// Room of the port without packets in flight.
    idle_room: usize,
}

impl Generator {
    pub(super) fn new(size: u32, batch: u16, port: &mut dyn Port) -> anyhow::Result<Generator> {
        Generator::of(Template::new(size), batch, port)
    }

    /// Creates a generator of packets of a template.
    pub(super) fn of(
        template: Template,
        batch: u16,
        port: &mut dyn Port,
    ) -> anyhow::Result<Generator> {
        let size = template.bytes().len();
        let room = template.bytes().len().next_multiple_of(64);
        let round = (ROUND_BYTES / room).clamp(1, batch.into());
        let mut batch = Batch::with_capacity(round, round * room);
        // The pattern of each packet stays in place between batches; only its numbers change.
        for place in batch.scratch_tail_mut().chunks_exact_mut(room) {
            place[..template.bytes().len()].copy_from_slice(template.bytes());
        }
        let indices = (0..).take(round).collect();
        let idle_room = port.room().context("room")?;
        ensure!(idle_room > 0, "the rings have no room for a packet of {size} bytes");
        Ok(Generator { template, batch, indices, round, room, sequence: 0, idle_room })
    }

    /// Sends `amount` and marks the last packet. Returns the number of packets once all are completed.
    pub(super) fn send(
        &mut self,
        port: &mut dyn Port,
        amount: Amount,
        spoil: Option<Spoil>,
        idle: &mut Idle<'_>,
    ) -> anyhow::Result<u64> {
        let began = Instant::now();
        let first = self.sequence;
        let (mut last, mut rounds) = (false, 0u32);
        while !last {
            let room = port.room().context("looking for room")?.min(self.round);
            if room == 0 {
                idle.wait(port, "the peer did not take a packet")?;
                continue;
            }
            idle.reset();
            let sent = self.sequence - first;
            let count = match amount {
                Amount::Packets(total) => {
                    let left = total.saturating_sub(sent);
                    last = left <= room as u64;
                    usize::try_from(left).unwrap_or(room).clamp(1, room)
                }
                Amount::Time(length) => {
                    // Reading the clock costs as much as a packet or two.
                    rounds = rounds.wrapping_add(1);
                    last = rounds.is_multiple_of(CLOCK_EVERY) && began.elapsed() >= length;
                    room
                }
            };
            self.fill(
                count,
                last,
                spoil.filter(|_| sent <= SPOILT && SPOILT < sent + count as u64),
                sent,
            )?;
            self.transmit(port, count)?;
            port.flush().context("flushing")?;
        }
        self.drain(port, idle)?;
        Ok(self.sequence - first)
    }

    /// Sends a batch and publishes it at once. `wait` is called while the port has no room. Returns the number of packets.
    pub(super) fn burst(
        &mut self,
        port: &mut dyn Port,
        mut wait: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<usize> {
        let mut left = self.round;
        while left > 0 {
            // The room is that for packets of maximum size, of which a ring holds few.
            let room = port.room().context("looking for room")?.min(left);
            if room == 0 {
                port.flush().context("flushing")?;
                wait()?;
                continue;
            }
            self.fill(room, false, None, 0)?;
            self.transmit(port, room)?;
            left -= room;
        }
        port.flush().context("flushing")?;
        Ok(self.round)
    }

    fn transmit(&self, port: &mut dyn Port, count: usize) -> anyhow::Result<()> {
        let done = port.transmit(&self.batch, &self.indices[..count]).context("sending")?;
        ensure!(
            done.sent == count,
            "the port dropped {} of {count} packets it had room for",
            count - done.sent
        );
        Ok(())
    }

    /// Returns the number of packets of a batch.
    pub(super) fn round(&self) -> usize {
        self.round
    }

    fn fill(
        &mut self,
        count: usize,
        last: bool,
        spoil: Option<Spoil>,
        sent: u64,
    ) -> anyhow::Result<()> {
        self.batch.clear();
        let len = self.template.bytes().len();
        for i in 0..count {
            let at = self.batch.reserve(self.room).context("a full batch")?;
            let packet = self.batch.scratch_mut(at..at + len)?;
            let mut sequence = self.sequence;
            let spoil = spoil.filter(|_| sent + i as u64 == SPOILT);
            match spoil {
                Some(Spoil::Lose) => self.sequence += 1,
                Some(Spoil::Repeat) => sequence -= 1,
                _ => {}
            }
            self.template.number(packet, sequence, last && i + 1 == count);
            if spoil == Some(Spoil::Damage) {
                packet[len - 1] ^= 0x10;
            }
            self.sequence += 1;
            self.batch.push_contiguous(at, len, OffloadMeta::PLAIN)?;
        }
        Ok(())
    }

    /// Waits until every packet is completed.
    fn drain(&mut self, port: &mut dyn Port, idle: &mut Idle<'_>) -> anyhow::Result<()> {
        self.batch.clear();
        loop {
            port.receive(&mut self.batch, 0).context("waiting for answers")?;
            if port.room().context("waiting for answers")? == self.idle_room {
                idle.reset();
                return Ok(());
            }
            idle.wait(port, "not every packet was answered")?;
        }
    }
}

/// Sink that verifies packets.
pub(super) struct Sink {
    round: usize,
    batch: Batch,
    checker: Checker,
}

impl Sink {
    pub(super) fn new(size: u32, batch: u16, verify: Verify) -> Sink {
        let round = usize::from(batch);
        let batch = Batch::with_capacity(round, SCRATCH_DEFAULT);
        Sink { round, batch, checker: Checker::verifying(size, verify) }
    }

    /// Returns the bytes fetched from lent memory for verification.
    pub(super) fn fetched(&self) -> u64 {
        self.checker.fetched()
    }

    /// Receives packets up to the one marked as last. Returns their number.
    pub(super) fn take(&mut self, port: &mut dyn Port, idle: &mut Idle<'_>) -> anyhow::Result<u64> {
        let first = self.checker.packets();
        let mut last = false;
        while !last {
            self.batch.clear();
            let got = port.receive(&mut self.batch, self.round).context("receiving")?;
            if got.work == 0 {
                let due = self.checker.packets();
                idle.wait(port, "nothing arrived")
                    .with_context(|| format!("packet {due} is missing"))?;
                continue;
            }
            idle.reset();
            for frame in self.batch.iter() {
                if last {
                    bail!("a packet came after the last one");
                }
                last = self.checker.take(frame)?;
            }
            // Frames must not be accessed after `complete`.
            self.batch.clear();
            port.complete().context("answering")?;
        }
        Ok(self.checker.packets() - first)
    }
}
