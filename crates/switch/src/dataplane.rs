//! Datapath workers: threads that move frames between ports.
//!
//! # Theory of operation
//!
//! One thread owns the ports, the fabric and one [`Batch`], and runs *rounds*. In a round the worker
//! receives at most [`DataplaneConfig::budget`] frames from each port. It delivers them before it polls
//! the next port, so no port waits for more than one budget of each other port. The first port of the
//! round changes every time. At the end of a round the worker flushes every port that it sent to.
//! In a switch, competing ports get equal time, not equal numbers of frames (`share`).
//!
//! After a round without work, the worker busy-polls for a short time that adapts to past sleeps
//! ([`ringfence_sys::pace`]). Then it arms all ports, checks them once more and sleeps until one of
//! their files is readable.
//!
//! # Effects of a port on the others
//!
//! * A fault ends only the port that has it. The owner's callback gets the port and the reason.
//! * Frames that a port cannot take are dropped. A sender that sends to this port alone is held up
//!   instead, as long as the port earns that by its speed (`hold`). In a patch the other end is the
//!   only sender, so it is always held up.
//! * A few spurious events are tolerated; after that the port's events are ignored for a while.
//!
//! # Several threads
//!
//! A data plane may have several workers ([`Dataplane::several`]), each on a thread of its own and with
//! an index. A multi-queue port is split when it is added
//! ([`Port::split_off`](ringfence_frame::Port::split_off)): part `n` belongs to worker `n`. A port of one
//! queue belongs to worker 0, so the others sleep if there is no multi-queue port. Each part is used by
//! one thread only; frames for another worker's part are copied (`relay`). Callers see one data plane,
//! with one handle and one set of ports.
//!
//! Control threads send commands through a [`DataplaneHandle`]; the worker executes them between rounds.

// #syscall driver,frontend,daemon epoll_create1,epoll_ctl: the data plane waits for its ports

mod exchange;
mod handle;
mod hold;
mod members;
mod relay;
mod rest;
mod share;
mod slot;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

use ringfence_memory::PAGE_SIZE;
use ringfence_sys::counters::Counters;
use ringfence_sys::pace::Spin;
use rustix::event::epoll;

use crate::egress::{Edge, Leaving};
use crate::forwarding::{Fabric, Plan, PortIndex};
pub use handle::{AddPortError, DataplaneHandle, DataplaneStats, PortGone, PortId, PortStats};
use ringfence_frame::batch::{Batch, FRAMES_DEFAULT, Room, SCRATCH_DEFAULT};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::Transmitted;
use ringfence_sys::clock::monotonic;

use handle::{Command, Inbox, WeakHandle};
use relay::{Post, Relay};
use share::Fairness;
use slot::Slot;

/// Epoll token of the wake-up eventfd; the tokens of ports are their indices.
const WAKE: u64 = u64::MAX;

/// Maximum number of workers of a data plane.
pub const PLANES_MAX: usize = 16;

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
        // Polling on the only processor keeps the peer from doing what is polled for.
        let alone = std::thread::available_parallelism().map_or(true, |n| n.get() == 1);
        let spin_max = if alone { Duration::ZERO } else { Duration::from_micros(50) };
        DataplaneConfig { budget: FRAMES_DEFAULT, scratch: SCRATCH_DEFAULT, spin_max }
    }
}

/// Worker of a data plane. See the [module](self).
pub struct Dataplane {
    config: DataplaneConfig,
    fabric: Fabric,
    slots: Vec<Option<Slot>>,
    batch: Batch,
    plan: Plan,
    edge: Edge,
    /// Index of the port that the next round polls first.
    first: usize,
    next_id: u64,
    epoll: OwnedFd,
    inbox: Inbox,
    /// Handle to all workers, this one included.
    handle: WeakHandle,
    /// The other planes, if there are any.
    relay: Option<Relay>,
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
        let (mut inboxes, handle) = handle::connect(1)?;
        let inbox = inboxes.pop().ok_or(io::ErrorKind::InvalidInput)?;
        let on_gone = Box::new(on_gone);
        let dataplane = Dataplane::with(fabric, config, system, on_gone, inbox, handle.weak())?;
        Ok((dataplane, handle))
    }

    /// As [`Dataplane::new`], but of `threads` threads, at least one and at most [`PLANES_MAX`]: each
    /// of the planes is to be run on one of its own. `fabric` makes as many as there are planes, all
    /// alike.
    ///
    /// # Errors
    ///
    /// When the system has no files to wait by.
    pub fn several(
        threads: usize,
        mut fabric: impl FnMut() -> Fabric,
        config: DataplaneConfig,
        system: &Arc<Counters>,
        on_gone: impl FnMut(PortGone) + Send + Clone + 'static,
    ) -> io::Result<(Vec<Dataplane>, DataplaneHandle)> {
        let (inboxes, handle) = handle::connect(threads.clamp(1, PLANES_MAX))?;
        let posts = inboxes.iter().map(|inbox| Post::new(Arc::clone(&inbox.wake)));
        let posts: Arc<[Post]> = posts.collect();
        let mut planes = Vec::with_capacity(inboxes.len());
        for (index, inbox) in inboxes.into_iter().enumerate() {
            let (on_gone, weak) = (Box::new(on_gone.clone()), handle.weak());
            let system = Arc::clone(system);
            let mut plane = Dataplane::with(fabric(), config, system, on_gone, inbox, weak)?;
            if posts.len() > 1 {
                plane.relay = Some(Relay::new(index, &posts));
                plane.fabric.keep_news();
            }
            planes.push(plane);
        }
        Ok((planes, handle))
    }

    fn with(
        fabric: Fabric,
        config: DataplaneConfig,
        system: Arc<Counters>,
        on_gone: Box<dyn FnMut(PortGone) + Send>,
        inbox: Inbox,
        handle: WeakHandle,
    ) -> io::Result<Dataplane> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, inbox.wake.as_fd(), token, epoll::EventFlags::IN)?;
        let now = monotonic();
        Ok(Dataplane {
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
            handle,
            relay: None,
            on_gone,
            system,
            now,
            spin: Spin::new(config.spin_max),
            fairness: Fairness::default(),
            turned: now,
            last_work: now,
            last_sleep: None,
        })
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
                Ok(Command::Add { port, parts, entry, policy, name, reply }) => {
                    let _ = reply.send(self.add(port, parts, entry, policy, name));
                }
                Ok(Command::Parts { id, reply }) => {
                    let place = self.relay.as_ref().and_then(|relay| relay.place(id));
                    let _ = place.map(|place| reply.send(self.parts(place)));
                }
                Ok(Command::Steer { id, steering, reply }) => {
                    if let Some(relay) = &mut self.relay {
                        relay.steer(id, steering);
                    }
                    let _ = reply.send(());
                }
                Ok(Command::Remove { id, reply }) => {
                    let _ = reply.send(self.remove(id));
                }
                Ok(Command::Order { id, queue, order, reply }) => {
                    // Without the port the reply is dropped, which tells.
                    let slot = self.slots.iter_mut().flatten().find(|slot| slot.id == id);
                    let _ = slot.map(|slot| reply.send(slot.port.execute(queue, order)));
                }
                Ok(Command::Stats { reply }) => {
                    let _ = reply.send(self.stats());
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return Flow::Stop,
                Err(TryRecvError::Empty) => return Flow::Continue,
            }
        }
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
        let mut worked = self.relay.is_some() && self.take_in();
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
        if refused.is_some() && waited_for.is_none() {
            self.relay.iter_mut().for_each(|relay| relay.awaited = true);
        }
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
        let parcels =
            self.relay.as_ref().zip(port).and_then(|(relay, port)| relay.slots(place, port));
        let slot = self.slot_mut(port).filter(|slot| patient || slot.patience.lasts());
        let slots = slot.and_then(|slot| Some((slot.slots()?, slot.capabilities)));
        match (slots, parcels) {
            (Some((slots, into)), parcels) if parcels.is_none_or(|parcels| slots <= parcels) => {
                (port, Room::of(slots, &into))
            }
            // A thread that is handed too much is waited for however slow: it only ever moves frames.
            (_, Some(parcels)) => (None, Room::of(parcels, &relay::TAKEN)),
            _ => (None, Room::UNBOUNDED),
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
        self.tell_news();
        let towards = match self.plan.ports() {
            [only] => Some(*only),
            _ => None,
        };
        if let Some(source) = &mut self.slots[place] {
            source.towards = towards;
        }
        self.hand_out(Some(place), &counters);
        if let Some(relay) = &mut self.relay {
            let woken = relay.send_all();
            self.system.syscalls.add(woken);
            self.system.notifications.add(woken);
        }
    }

    /// Sends the frames of the batch to the ports of the plan: what came by `source` also to other
    /// planes, and what came from another plane to the ports of this one alone.
    fn hand_out(&mut self, source: Option<usize>, counters: &PortCounters) {
        for n in 0..self.plan.ports().len() {
            let Some((port, frames)) = self.plan.entry_mut(n) else { break };
            if let Some((relay, source)) = self.relay.as_mut().zip(source) {
                relay.divert(source, port, &self.batch, frames);
                if frames.is_empty() {
                    continue;
                }
            }
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
            // With other planes the place is free when it is free in all of them.
            if self.relay.is_none() {
                self.forget(place);
            }
            let planes = self.handle.clone();
            (self.on_gone)(PortGone { id, name, reason, ports: vec![port], planes });
        }
        any
    }
}

/// Slots that the frames of `ready` took, of which some may have been dropped.
fn slots_taken(batch: &Batch, ready: &[u32], done: Transmitted) -> usize {
    if done.dropped > 0 {
        return done.sent;
    }
    batch.select(ready).map(|frame| frame.len().div_ceil(PAGE_SIZE)).sum()
}
