//! The thread that moves frames between ports.
//!
//! # Theory of operation
//!
//! One thread owns the ports, the switch and one [`Batch`], and goes *rounds*. In a round each port is
//! asked once for at most [`DataplaneConfig::budget`] frames, and these are delivered before the next
//! port is asked: no port waits for longer than one budget of each other one. Who is first changes
//! with every round. At the end of the round every port that was sent something publishes it, once.
//! In a switch, ports that compete get the same time, not the same number of frames (`share`).
//!
//! When a round finds nothing to do, the thread goes on polling for a short while
//! ([`ringfence_platform::pace`]: as long as experience says that it pays), then arms all ports, looks once more and sleeps until one of
//! their files is readable.
//!
//! # What a port can do to the others
//!
//! * A fault ends that port and no other. It is handed to the owner's callback with the reason.
//! * Frames it cannot take are dropped. Who sends to it alone is held up instead, as long as the port
//!   earns that by being fast (`hold`). (In a patch nobody but the other end sends to it, so there
//!   the other end is always held up.)
//! * Events that announce nothing are put up with for a few times, then ignored for a while.
//!
//! Control threads send commands through a [`DataplaneHandle`]; the thread looks for them between
//! rounds.

mod handle;
mod hold;
mod share;
mod slot;

#[cfg(test)]
mod tests;

use core::mem::MaybeUninit;
use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

use ringfence_memory::PAGE_SIZE;
use ringfence_platform::Counters;
use ringfence_platform::pace::Spin;
use rustix::event::{Timespec, epoll};

use crate::batch::{Batch, FRAMES_DEFAULT, Room, SCRATCH_DEFAULT};
use crate::clock::monotonic;
use crate::counters::DropReason;
use crate::edge::{Edge, Leaving};
use crate::port::{Port, Transmitted};
use crate::switch::{AttachError, Fabric, PORTS_MAX, Plan, PortIndex, PortPolicy};
pub use handle::{AddPortError, DataplaneHandle, DataplaneStats, PortGone, PortId, PortStats};
use handle::{Command, Inbox};
use share::Fairness;
use slot::Slot;

/// What the wake-up file is known by; ports are known by their places.
const WAKE: u64 = u64::MAX;

/// Events taken from the kernel at a time; more are found at the next sleep.
const EVENTS: usize = 64;

/// How a data plane goes about its work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataplaneConfig {
    /// Frames taken from a port before it is the next one's turn.
    pub budget: usize,
    /// Octets of private memory for the frames of one turn.
    pub scratch: usize,
    /// The longest time to go on polling after the last work.
    pub spin_max: Duration,
}

impl Default for DataplaneConfig {
    fn default() -> Self {
        // Polling on the only processor keeps the peer from doing what is polled for.
        let alone = std::thread::available_parallelism().map_or(true, |n| n.get() == 1);
        let spin_max = if alone { Duration::ZERO } else { Duration::from_micros(50) };
        DataplaneConfig { budget: FRAMES_DEFAULT, scratch: SCRATCH_DEFAULT, spin_max }
    }
}

/// A data plane. See the [module](self).
pub struct Dataplane {
    config: DataplaneConfig,
    fabric: Fabric,
    slots: Vec<Option<Slot>>,
    batch: Batch,
    plan: Plan,
    edge: Edge,
    /// The place whose turn is first in the next round.
    first: usize,
    next_id: u64,
    epoll: OwnedFd,
    inbox: Inbox,
    on_gone: Box<dyn FnMut(PortGone) + Send>,
    system: Arc<Counters>,
    now: Duration,
    spin: Spin,
    fairness: Fairness,
    /// When the last turn with work was over.
    turned: Duration,
    last_work: Duration,
    last_sleep: Option<Duration>,
}

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flow {
    Continue,
    Stop,
}

impl Dataplane {
    /// A data plane without ports. `on_gone` is called on its thread when a port ended itself; it must
    /// not block, nor call the handle. System calls and wake-ups are counted in `system`.
    ///
    /// # Errors
    ///
    /// When the system has no files to wait by.
    pub fn new(
        fabric: Fabric,
        config: DataplaneConfig,
        system: Arc<Counters>,
        on_gone: impl FnMut(PortGone) + Send + 'static,
    ) -> io::Result<(Dataplane, DataplaneHandle)> {
        let (inbox, handle) = handle::connect()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, inbox.wake.as_fd(), token, epoll::EventFlags::IN)?;
        let now = monotonic();
        let dataplane = Dataplane {
            config,
            fabric,
            slots: Vec::new(),
            batch: Batch::with_capacity(config.budget, config.scratch),
            plan: Plan::new(),
            edge: Edge::default(),
            first: 0,
            next_id: 0,
            epoll,
            inbox,
            on_gone: Box::new(on_gone),
            system,
            now,
            spin: Spin::new(config.spin_max),
            fairness: Fairness::default(),
            turned: now,
            last_work: now,
            last_sleep: None,
        };
        Ok((dataplane, handle))
    }

    /// Goes rounds until it is told to stop, or until nobody holds a handle any more.
    pub fn run(mut self) {
        while self.obey() == Flow::Continue {
            let worked = self.round();
            self.now = monotonic();
            if worked {
                if let Some(length) = self.last_sleep.take() {
                    self.spin.slept(length);
                }
                self.last_work = self.now;
            }
            self.settle();
            if worked {
                continue;
            }
            if self.now.saturating_sub(self.last_work) < self.spin.window() {
                core::hint::spin_loop();
                continue;
            }
            self.sleep();
        }
    }

    /// A round is over.
    fn settle(&mut self) {
        self.slots.iter_mut().flatten().for_each(|slot| slot.settle(self.now));
    }

    /// Carries out the commands that wait.
    fn obey(&mut self) -> Flow {
        loop {
            match self.inbox.commands.try_recv() {
                Ok(Command::Add { port, policy, name, reply }) => {
                    let _ = reply.send(self.add(port, policy, name));
                }
                Ok(Command::Remove { id, reply }) => {
                    let _ = reply.send(self.remove(id));
                }
                Ok(Command::Order { id, queue, order, reply }) => {
                    // Without the port the reply is dropped, which tells.
                    let slot = self.slots.iter_mut().flatten().find(|slot| slot.id == id);
                    let _ = slot.map(|slot| reply.send(slot.port.obey(queue, order)));
                }
                Ok(Command::Stats { reply }) => {
                    let _ = reply.send(self.stats());
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return Flow::Stop,
                Err(TryRecvError::Empty) => return Flow::Continue,
            }
        }
    }

    fn add(
        &mut self,
        port: Box<dyn Port>,
        policy: PortPolicy,
        name: String,
    ) -> Result<PortId, AddPortError> {
        let free = self.slots.iter().position(Option::is_none);
        let place = free.unwrap_or(self.slots.len());
        let full = AttachError::Full { limit: PORTS_MAX };
        if place >= PORTS_MAX {
            return Err(full.into());
        }
        let index = PortIndex(u16::try_from(place).map_err(|_| full)?);
        self.fabric.attach(index, policy)?;
        let id = PortId(self.next_id);
        let mut slot = Slot::new(id, name, port, place as u64);
        slot.joins = policy.join && matches!(self.fabric, Fabric::Switch(_));
        if let Err(error) = slot.watch(&self.epoll) {
            slot.unwatch(&self.epoll);
            self.fabric.detach(index);
            return Err(error.into());
        }
        self.next_id += 1;
        if place == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[place] = Some(slot);
        // What it already has is found by the round that follows.
        Ok(id)
    }

    fn remove(&mut self, id: PortId) -> Option<Box<dyn Port>> {
        let place = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|s| s.id == id))?;
        Some(self.take(place)?.port)
    }

    /// Takes a port out; nothing refers to it afterwards.
    fn take(&mut self, place: usize) -> Option<Slot> {
        let mut slot = self.slots[place].take()?;
        slot.unwatch(&self.epoll);
        if let Ok(index) = u16::try_from(place) {
            self.fabric.detach(PortIndex(index));
        }
        Some(slot)
    }

    fn stats(&self) -> DataplaneStats {
        let ports = self.slots.iter().flatten().map(|slot| PortStats {
            id: slot.id,
            name: slot.name.clone(),
            counters: slot.port.counters().named(),
        });
        DataplaneStats { ports: ports.collect(), addresses: self.fabric.addresses() }
    }

    /// Gives each port one turn. Returns whether there was work.
    fn round(&mut self) -> bool {
        self.turned = self.now;
        let mut worked = self.turns();
        // If there was none, ports that were left out for the others' sake have their turn at once.
        while self.fairness.settle() {
            worked |= self.turns();
        }
        for slot in self.slots.iter_mut().flatten() {
            if core::mem::take(&mut slot.touched) && slot.fault.is_none() {
                let flushed = slot.port.flush();
                slot.checked(flushed);
            }
        }
        self.bury() || worked
    }

    /// One turn for each port that is not left out.
    fn turns(&mut self) -> bool {
        let places = self.slots.len();
        let mut worked = false;
        for turn in 0..places {
            worked |= self.serve((self.first + turn) % places);
        }
        self.first = (self.first + 1) % places.max(1);
        worked
    }

    /// One port's turn. Returns whether there was work.
    fn serve(&mut self, place: usize) -> bool {
        let (waited_for, room) = self.room(place);
        let Some(slot) = self.slots[place].as_mut().filter(|slot| slot.fault.is_none()) else {
            return false;
        };
        let switched = matches!(self.fabric, Fabric::Switch(_));
        // In a patch each end sends to the other one only, and both are of one guest.
        slot.held = switched && !self.fairness.admits(&slot.share);
        if slot.held {
            return false;
        }
        let budget = self.config.budget;
        let budget = if switched { self.fairness.budget(&slot.share, budget) } else { budget };
        self.batch.limit(room);
        let received = slot.port.receive(&mut self.batch, budget);
        let received = slot.checked(received).unwrap_or_default();
        if slot.fault.is_some() {
            self.batch.clear();
            return true;
        }
        let any = received.work > 0 || received.frames > 0;
        let refused = self.batch.refused();
        slot.held = refused.is_some() && !any;
        if let Some((slots, port)) = refused.zip(self.slot_mut(waited_for)) {
            port.port.await_slots(slots);
            if switched {
                port.patience.wait();
            }
        }
        if !any {
            self.batch.clear();
            return false;
        }
        let Some(slot) = &mut self.slots[place] else { return false };
        slot.worked();
        self.deliver(place);
        // Before the sender is told that its pages are free, nothing may refer to them any more.
        self.batch.clear();
        if let Some(slot) = &mut self.slots[place] {
            let completed = slot.port.complete();
            slot.checked(completed);
            if switched {
                let now = monotonic();
                let took = now.saturating_sub(self.turned);
                self.turned = now;
                self.fairness.charge(&mut slot.share, took, received.work.max(received.frames));
            }
        }
        true
    }

    /// The port that frames from `place` wait for if it has no room, and the room it has.
    fn room(&mut self, place: usize) -> (Option<PortIndex>, Room) {
        let index = u16::try_from(place).ok().map(PortIndex);
        let (port, patient) = match &self.fabric {
            // With nobody at the other end the frames are taken and dropped.
            Fabric::Patch(patch) => (index.and_then(|index| patch.other(index)), true),
            Fabric::Switch(_) => (self.slots[place].as_ref().and_then(|slot| slot.towards), false),
        };
        let unbounded = (None, Room::UNBOUNDED);
        let Some(slot) = self.slot_mut(port).filter(|slot| patient || slot.patience.lasts()) else {
            return unbounded;
        };
        match slot.slots() {
            Some(slots) => (port, Room::of(slots, &slot.capabilities)),
            None => unbounded,
        }
    }

    /// The port at that place, if it is of use.
    fn slot_mut(&mut self, port: Option<PortIndex>) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(usize::from(port?.0))?.as_mut();
        slot.filter(|slot| slot.fault.is_none())
    }

    /// Sends the frames of the batch, which came by `place`, to where they go.
    fn deliver(&mut self, place: usize) {
        let (Some(source), Ok(index)) = (&self.slots[place], u16::try_from(place)) else { return };
        if self.batch.is_empty() {
            return;
        }
        self.plan.clear();
        let counters = Arc::clone(source.port.counters());
        self.fabric.route(PortIndex(index), &self.batch, self.now, &counters, &mut self.plan);
        let towards = match self.plan.ports() {
            [only] => Some(*only),
            _ => None,
        };
        if let Some(source) = &mut self.slots[place] {
            source.towards = towards;
        }
        for n in 0..self.plan.ports().len() {
            let Some((port, frames)) = self.plan.entry_mut(n) else { break };
            let slot = self.slots.get_mut(usize::from(port.0)).and_then(Option::as_mut);
            let Some(slot) = slot.filter(|slot| slot.fault.is_none()) else {
                counters.dropped_many(DropReason::NoDestination, frames.len() as u64);
                continue;
            };
            let (capabilities, leaving) = (slot.capabilities, Arc::clone(slot.port.counters()));
            let joins = slot.joins;
            let port = Leaving { capabilities: &capabilities, counters: &leaving, joins };
            self.edge.pass(&mut self.batch, frames, port, |batch, ready| {
                slot.touched = true;
                let transmitted = slot.port.transmit(batch, ready);
                let done = slot.checked(transmitted)?;
                if done.sent > 0 {
                    slot.worked();
                    slot.patience.earn(slots_taken(batch, ready, done));
                }
                Some(done)
            });
        }
    }

    /// Removes the ports that ended themselves. Returns whether there were any.
    fn bury(&mut self) -> bool {
        let mut any = false;
        for place in 0..self.slots.len() {
            if self.slots[place].as_ref().is_none_or(|slot| slot.fault.is_none()) {
                continue;
            }
            any = true;
            let Some(Slot { id, name, port, fault: Some(reason), .. }) = self.take(place) else {
                continue;
            };
            (self.on_gone)(PortGone { id, name, reason, port });
        }
        any
    }

    /// Sleeps until there may be work, unless there is some already.
    fn sleep(&mut self) {
        let mut work = false;
        for slot in self.slots.iter_mut().flatten() {
            slot.throttle.expire(self.now);
            work |= slot.arm();
        }
        if self.bury() || work {
            return;
        }
        // Files that stay readable are not watched while their frames cannot be taken. Where both
        // ends of a patch wait for the other's room, their events are what they wait for.
        let deadlock = self.slots.iter().flatten().all(|slot| slot.held);
        let mut calls = 1;
        for slot in self.slots.iter_mut().flatten() {
            calls += slot.update_watch(&self.epoll, !deadlock);
        }
        self.system.syscalls.add(calls);
        self.wait();
        let woke = monotonic();
        self.last_sleep = Some(woke.saturating_sub(self.now));
        self.now = woke;
        self.system.wakeups.add(1);
        for slot in self.slots.iter_mut().flatten() {
            slot.throttle.expire(woke);
        }
    }

    /// Waits in the kernel until a file is readable, or somebody's time of being ignored is over, or
    /// somebody is to be asked without an event.
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
        // Interrupted: whatever there is is found at the next sleep.
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

/// Slots that the frames of `ready` took, of which some may have been dropped.
fn slots_taken(batch: &Batch, ready: &[u32], done: Transmitted) -> usize {
    if done.dropped > 0 {
        return done.sent;
    }
    batch.select(ready).map(|frame| frame.len().div_ceil(PAGE_SIZE)).sum()
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
