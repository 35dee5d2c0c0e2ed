//! Dataplane workers: threads that move frames between ports.
//!
//! # Theory of operation
//!
//! A worker owns its ports, a fabric and one [`Batch`], and runs *rounds*:
//!
//! ```text
//! run_commands ─> for each port: receive ─> route ─> egress processing ─> transmit ─> complete
//!                 then: flush each port that frames were sent to ─> next round, spin or sleep
//! ```
//!
//! In a round the worker receives at most [`DataplaneConfig::budget`] frames from each port. It delivers
//! them before it polls the next port, so a port waits for at most one budget of each other port. The
//! first port of the round changes every time. In a switch, competing ports get equal time, not equal
//! numbers of frames (`fairness`).
//!
//! After a round without work, the worker busy-polls for a short time that adapts to past sleeps
//! ([`ringfence_sys::pace`]), and offers its processor to other threads between two looks. Then it
//! arms all ports, checks them once more and sleeps until one of their files is readable (`idle`).
//!
//! # Effects of a port on the others
//!
//! * A fault removes only the port that has it. The owner's callback gets the port and the reason.
//! * Frames that a port cannot take are dropped and counted. A sender whose frames go to this port alone
//!   is slowed instead, while the port has a backpressure budget (`backpressure`). In a patch the other
//!   end is the only sender, so backpressure has no limit there.
//! * A few spurious events are tolerated. After that the worker ignores the port's events for a while.
//!
//! # Several workers
//!
//! A dataplane may have several workers ([`DataplaneWorker::group`]), each with an index and a thread of
//! its own. A multi-queue port is split when it is added
//! ([`Port::split_off`](ringfence_frame::Port::split_off)): part `n` belongs to worker `n`. A port with one
//! queue belongs to worker 0, so the other workers sleep if there is no multi-queue port. Each part is
//! used by one thread only. Frames for another worker's part are copied (`handoff`). All workers share one
//! handle and one set of ports.
//!
//! Control threads send commands through a [`DataplaneHandle`]. The worker executes them between rounds.

// #syscall driver,frontend,card,daemon epoll_create1,epoll_ctl: a worker waits for its ports
// #syscall driver,frontend,card,daemon sched_yield: a worker that polls lets others run

mod backpressure;
mod exchange;
mod fairness;
mod handle;
mod handoff;
mod idle;
mod port_entry;
mod ports;

#[cfg(test)]
mod tests;

use core::ops::ControlFlow;
use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

use ringfence_memory::PAGE_SIZE;
use ringfence_sys::counters::Counters;
use ringfence_sys::pace::Spin;
use rustix::event::epoll;

use crate::egress::{EgressPort, EgressProcessor};
use crate::forwarding::{Fabric, Plan, PortIndex};
pub use handle::{AddPortError, DataplaneHandle, DataplaneStats, PortGone, PortId, PortStats};
use ringfence_frame::batch::{Batch, FRAMES_DEFAULT, Room, SCRATCH_DEFAULT};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::Transmitted;
use ringfence_sys::clock::monotonic;

use fairness::Fairness;
use handle::{Command, CommandReceiver, WeakHandle};
use handoff::{PeerWorkers, WorkerMailbox};
use port_entry::PortEntry;

/// Epoll token of the wake-up eventfd. Those of a port's files are its index and multiples of [`port_entry::TOKENS`].
const WAKE: u64 = u64::MAX;

pub const WORKERS_MAX: usize = 16;

/// Limits and timing of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataplaneConfig {
    /// Maximum number of frames received from a port before the next port is polled.
    pub budget: usize,
    /// Private memory for the frames of one port's budget, in bytes.
    pub scratch: usize,
    /// Maximum time of busy-polling after the last work.
    pub spin_max: Duration,
}

impl Default for DataplaneConfig {
    fn default() -> Self {
        // On a single processor, busy-polling keeps the peer from producing work.
        let single = std::thread::available_parallelism().map_or(true, |n| n.get() == 1);
        let spin_max = if single { Duration::ZERO } else { Duration::from_micros(50) };
        DataplaneConfig { budget: FRAMES_DEFAULT, scratch: SCRATCH_DEFAULT, spin_max }
    }
}

/// Worker of a dataplane. See the [module](self).
pub struct DataplaneWorker {
    config: DataplaneConfig,
    fabric: Fabric,
    /// Ports of this worker, by port index.
    ports: Vec<Option<PortEntry>>,
    batch: Batch,
    plan: Plan,
    egress: EgressProcessor,
    /// Index of the port that the next round polls first.
    first: usize,
    next_id: u64,
    epoll: OwnedFd,
    commands: CommandReceiver,
    /// Handle to all workers, this one included.
    handle: WeakHandle,
    /// Connection to the other workers; `None` if there is one worker only.
    peers: Option<PeerWorkers>,
    on_gone: Box<dyn FnMut(PortGone) + Send>,
    system: Arc<Counters>,
    now: Duration,
    spin: Spin,
    fairness: Fairness,
    /// Start of the time that is charged to the next port with work.
    charge_start: Duration,
    last_work: Duration,
    last_sleep: Option<Duration>,
}

impl DataplaneWorker {
    /// Creates the only worker of a dataplane, without ports.
    ///
    /// The worker calls `on_gone` on its thread for each port that it removes because of a fault.
    /// `on_gone` must neither block nor call the handle. System calls and wake-ups are counted in
    /// `system`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if it creates no eventfd or epoll instance.
    pub fn new(
        fabric: Fabric,
        config: DataplaneConfig,
        system: Arc<Counters>,
        on_gone: impl FnMut(PortGone) + Send + 'static,
    ) -> io::Result<(DataplaneWorker, DataplaneHandle)> {
        let (mut receivers, handle) = handle::connect(1)?;
        let commands = receivers.pop().ok_or(io::ErrorKind::InvalidInput)?;
        let on_gone = Box::new(on_gone);
        let worker =
            DataplaneWorker::with(fabric, config, system, on_gone, commands, handle.weak())?;
        Ok((worker, handle))
    }

    /// Creates the workers of one dataplane; each is to be run on a thread of its own. `count` is
    /// limited to the range from 1 to [`WORKERS_MAX`]. `fabric` is called once for each worker and must
    /// create equal fabrics. `on_gone` and `system` are those of [`DataplaneWorker::new`].
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if it creates no eventfd or epoll instance.
    pub fn group(
        count: usize,
        mut fabric: impl FnMut() -> Fabric,
        config: DataplaneConfig,
        system: &Arc<Counters>,
        on_gone: impl FnMut(PortGone) + Send + Clone + 'static,
    ) -> io::Result<(Vec<DataplaneWorker>, DataplaneHandle)> {
        let (receivers, handle) = handle::connect(count.clamp(1, WORKERS_MAX))?;
        let mailboxes = receivers.iter().map(|receiver| Arc::clone(&receiver.wake));
        let mailboxes: Arc<[WorkerMailbox]> = mailboxes.map(WorkerMailbox::new).collect();
        let mut workers = Vec::with_capacity(receivers.len());
        for (index, commands) in receivers.into_iter().enumerate() {
            let (on_gone, weak) = (Box::new(on_gone.clone()), handle.weak());
            let system = Arc::clone(system);
            let mut worker =
                DataplaneWorker::with(fabric(), config, system, on_gone, commands, weak)?;
            if mailboxes.len() > 1 {
                worker.peers = Some(PeerWorkers::new(index, &mailboxes));
                worker.fabric.record_announcements();
            }
            workers.push(worker);
        }
        Ok((workers, handle))
    }

    fn with(
        fabric: Fabric,
        config: DataplaneConfig,
        system: Arc<Counters>,
        on_gone: Box<dyn FnMut(PortGone) + Send>,
        commands: CommandReceiver,
        handle: WeakHandle,
    ) -> io::Result<DataplaneWorker> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, commands.wake.as_fd(), token, epoll::EventFlags::IN)?;
        let now = monotonic();
        Ok(DataplaneWorker {
            config,
            fabric,
            ports: Vec::new(),
            batch: Batch::with_capacity(config.budget, config.scratch),
            plan: Plan::new(),
            egress: EgressProcessor::default(),
            first: 0,
            next_id: 0,
            epoll,
            commands,
            handle,
            peers: None,
            on_gone,
            system,
            now,
            spin: Spin::new(config.spin_max),
            fairness: Fairness::default(),
            charge_start: now,
            last_work: now,
            last_sleep: None,
        })
    }

    /// Runs rounds until the handle stops the dataplane or the last handle is dropped.
    pub fn run(mut self) {
        while self.run_commands().is_continue() {
            let worked = self.round();
            self.now = monotonic();
            if worked {
                if let Some(length) = self.last_sleep.take() {
                    self.spin.slept(length);
                }
                self.last_work = self.now;
            }
            self.end_round();
            if worked {
                continue;
            }
            if self.now.saturating_sub(self.last_work) < self.spin.limit() {
                // With more threads than processors, the next one of the packet's way may have work.
                rustix::thread::sched_yield();
                self.system.syscalls.add(1);
                continue;
            }
            self.sleep();
        }
    }

    /// Updates the backpressure and throttle state of all ports at the end of a round.
    fn end_round(&mut self) {
        self.ports.iter_mut().flatten().for_each(|entry| entry.end_round(self.now));
    }

    /// Executes the queued commands. Returns `Break` if the worker must end.
    fn run_commands(&mut self) -> ControlFlow<()> {
        loop {
            match self.commands.queue.try_recv() {
                Ok(Command::Add { port, parts, key, policy, name, reply }) => {
                    let _ = reply.send(self.add(port, parts, key, policy, name));
                }
                Ok(Command::Parts { id, reply }) => {
                    let index = self.peers.as_ref().and_then(|peers| peers.index_of(id));
                    let _ = index.map(|index| reply.send(self.parts(index)));
                }
                Ok(Command::Steer { id, steering, reply }) => {
                    if let Some(peers) = &mut self.peers {
                        peers.set_steering(id, steering);
                    }
                    let _ = reply.send(());
                }
                Ok(Command::Remove { id, reply }) => {
                    let _ = reply.send(self.remove(id));
                }
                Ok(Command::Execute { id, queue, command, reply }) => {
                    // Without the port the sender of the reply is dropped, and the caller gets `None`.
                    let entry = self.ports.iter_mut().flatten().find(|entry| entry.id == id);
                    let _ = entry.map(|entry| reply.send(entry.execute(queue, command)));
                }
                Ok(Command::Stats { only, reply }) => {
                    let _ = reply.send(self.stats(only));
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                    return ControlFlow::Break(());
                }
                Err(TryRecvError::Empty) => return ControlFlow::Continue(()),
            }
        }
    }

    /// Polls each port once and flushes those that frames were sent to. Returns `true` if there was work.
    fn round(&mut self) -> bool {
        self.charge_start = self.now;
        let mut worked = self.poll_ports();
        // If no port had work, ports that were skipped for fairness are polled at once.
        while self.fairness.end_pass() {
            worked |= self.poll_ports();
        }
        for entry in self.ports.iter_mut().flatten() {
            if core::mem::take(&mut entry.unflushed) && entry.fault.is_none() {
                let flushed = entry.port.flush();
                entry.checked(flushed);
            }
        }
        self.remove_faulty() || worked
    }

    /// Polls the other workers and each port that is not skipped for fairness.
    fn poll_ports(&mut self) -> bool {
        let count = self.ports.len();
        let mut worked = self.peers.is_some() && self.poll_workers();
        for offset in 0..count {
            worked |= self.poll_port((self.first + offset) % count);
        }
        self.first = (self.first + 1) % count.max(1);
        worked
    }

    /// Receives frames of one port and delivers them. Returns `true` if there was work.
    fn poll_port(&mut self, index: usize) -> bool {
        if self.ports[index].as_mut().is_some_and(PortEntry::is_left_out) {
            return false;
        }
        let (egress_port, room) = self.egress_room(index);
        let Some(entry) = self.ports[index].as_mut().filter(|entry| entry.fault.is_none()) else {
            return false;
        };
        let switched = matches!(self.fabric, Fabric::Switch(_));
        // In a patch each end sends to the other one only, and both are of one guest.
        entry.paused = switched && !self.fairness.admits(&entry.account);
        if entry.paused {
            return false;
        }
        let budget = self.config.budget;
        let budget = if switched { self.fairness.budget(&entry.account, budget) } else { budget };
        self.batch.limit(room);
        let received = entry.port.receive(&mut self.batch, budget);
        let received = entry.checked(received).unwrap_or_default();
        entry.is_drained = entry.port.is_drained();
        if entry.fault.is_some() {
            self.batch.clear();
            return true;
        }
        let any = received.work > 0 || received.frames > 0;
        let refused = self.batch.refused();
        entry.paused = refused.is_some() && !any;
        if refused.is_some() && egress_port.is_none() {
            self.peers.iter_mut().for_each(|peers| peers.sender_waits = true);
        }
        if let Some((slots, full)) = refused.zip(self.usable_port(egress_port)) {
            full.port.await_slots(slots);
            if switched {
                full.backpressure.record_waiting();
            }
        }
        if !any {
            self.batch.clear();
            return false;
        }
        let Some(entry) = &mut self.ports[index] else { return false };
        entry.worked();
        // The driver of a virtual machine may have started or stopped.
        entry.capabilities = entry.port.capabilities();
        self.deliver(index);
        // `complete` returns the sender's pages, so nothing may refer to them any more.
        self.batch.clear();
        if let Some(entry) = &mut self.ports[index] {
            let completed = entry.port.complete();
            entry.checked(completed);
            if switched {
                let now = monotonic();
                let took = now.saturating_sub(self.charge_start);
                self.charge_start = now;
                let work = received.work.max(received.frames);
                self.fairness.charge(&mut entry.account, took, work);
            }
        }
        true
    }

    /// Returns the limit on frames from the port at `index`, and the egress port that sets it. Without a
    /// port, free handoff batches set the limit, or there is none.
    fn egress_room(&mut self, index: usize) -> (Option<PortIndex>, Room) {
        let source = u16::try_from(index).ok().map(PortIndex);
        let (port, unlimited) = match &self.fabric {
            // Without a port at the other end the frames are received and dropped.
            Fabric::Patch(patch) => (source.and_then(|source| patch.other(source)), true),
            Fabric::Switch(_) => {
                (self.ports[index].as_ref().and_then(|entry| entry.sole_egress), false)
            }
        };
        let handoff =
            self.peers.as_ref().zip(port).and_then(|(peers, port)| peers.free_slots(index, port));
        let entry = self.usable_port(port);
        let entry = entry.filter(|entry| unlimited || entry.backpressure.has_budget());
        let slots = entry.and_then(|entry| Some((entry.free_slots()?, entry.capabilities)));
        match (slots, handoff) {
            (Some((slots, into)), handoff) if handoff.is_none_or(|handoff| slots <= handoff) => {
                let room = Room::of(slots, &into);
                // Without a budget, a wait for more slots than the port ever has would not end.
                (port, if unlimited { room.awaiting_whole_frames() } else { room })
            }
            // Another worker always makes progress, so senders wait for it without a budget.
            (_, Some(handoff)) => (None, Room::of(handoff, &handoff::BATCH_CAPABILITIES)),
            _ => (None, Room::UNBOUNDED),
        }
    }

    /// Returns the port of that index, if this worker has it and it has no fault.
    fn usable_port(&mut self, port: Option<PortIndex>) -> Option<&mut PortEntry> {
        let entry = self.ports.get_mut(usize::from(port?.0))?.as_mut();
        entry.filter(|entry| entry.fault.is_none())
    }

    /// Forwards the frames of the batch, which were received from the port at `index`.
    fn deliver(&mut self, index: usize) {
        let (Some(entry), Ok(source)) = (&self.ports[index], u16::try_from(index)) else { return };
        if self.batch.is_empty() {
            return;
        }
        self.plan.clear();
        let counters = Arc::clone(entry.port.counters());
        self.fabric.route(PortIndex(source), &self.batch, self.now, &counters, &mut self.plan);
        self.announce_addresses();
        let sole_egress = match self.plan.ports() {
            [only] => Some(*only),
            _ => None,
        };
        if let Some(entry) = &mut self.ports[index] {
            entry.sole_egress = sole_egress;
        }
        self.transmit_plan(Some(index), &counters);
        if let Some(peers) = &mut self.peers {
            let woken = peers.flush();
            self.system.syscalls.add(woken);
            self.system.notifications.add(woken);
        }
    }

    /// Transmits the frames of the batch to the ports of the plan. Frames of the local port `source` may
    /// also be handed to other workers. `source` is `None` for a handoff batch, whose frames go to ports of
    /// this worker only.
    fn transmit_plan(&mut self, source: Option<usize>, counters: &PortCounters) {
        for n in 0..self.plan.ports().len() {
            let Some((port, frames)) = self.plan.entry_mut(n) else { break };
            if let Some((peers, source)) = self.peers.as_mut().zip(source) {
                peers.divert(source, port, &self.batch, frames);
                if frames.is_empty() {
                    continue;
                }
            }
            let entry = self.ports.get_mut(usize::from(port.0)).and_then(Option::as_mut);
            let Some(entry) = entry.filter(|entry| entry.fault.is_none()) else {
                counters.dropped_many(DropReason::NoDestination, frames.len() as u64);
                continue;
            };
            let (capabilities, egress) = (entry.capabilities, Arc::clone(entry.port.counters()));
            let joins = entry.joins;
            let port = EgressPort { capabilities: &capabilities, counters: &egress, joins };
            self.egress.process(&mut self.batch, frames, port, |batch, ready| {
                entry.unflushed = true;
                let transmitted = entry.port.transmit(batch, ready);
                let done = entry.checked(transmitted)?;
                if done.sent > 0 {
                    entry.worked();
                    entry.backpressure.credit(slots_used(batch, ready, done));
                }
                Some(done)
            });
        }
    }

    /// Removes the ports that have a fault and passes them to the owner. Returns `true` if there were any.
    fn remove_faulty(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.ports.len() {
            if self.ports[index].as_ref().is_none_or(|entry| entry.fault.is_none()) {
                continue;
            }
            any = true;
            let Some(PortEntry { id, name, port, fault: Some(reason), .. }) =
                self.take_entry(index)
            else {
                continue;
            };
            // With several workers the index is free after all of them removed the port.
            if self.peers.is_none() {
                self.free_index(index);
            }
            let workers = self.handle.clone();
            (self.on_gone)(PortGone { id, name, reason, ports: vec![port], workers });
        }
        any
    }
}

/// Returns the number of ring slots that the frames of `ready` used: one a page, or one a frame if the
/// port dropped some of them.
fn slots_used(batch: &Batch, ready: &[u32], done: Transmitted) -> usize {
    if done.dropped > 0 {
        return done.sent;
    }
    batch.select(ready).map(|frame| frame.len().div_ceil(PAGE_SIZE)).sum()
}
