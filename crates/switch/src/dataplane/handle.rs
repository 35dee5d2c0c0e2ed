//! Control handle of a data plane: commands and replies between other threads and the workers.

// #syscall driver,frontend,daemon eventfd2,write: the data plane is told something

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::{Fault, Port};
use ringfence_frame::steer::Steering;
use rustix::event::EventfdFlags;

use crate::forwarding::{AttachError, PortPolicy};

/// Id of a port in a data plane. An id is never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortId(pub u64);

impl PortId {
    /// Id under which the counters of frames handed between workers are reported.
    pub(super) const RELAY: PortId = PortId(u64::MAX);
}

/// A port that ended itself.
pub struct PortGone {
    pub id: PortId,
    pub name: String,
    pub reason: Fault,
    /// The port, or its parts, to be dropped where that holds nobody up: the one that ended, and those
    /// that [`PortGone::gather`] found.
    pub ports: Vec<Box<dyn Port>>,
    pub(super) planes: WeakHandle,
}

impl PortGone {
    /// Returns `true` if both describe the same port.
    pub fn is_of_one_port(&self, other: &PortGone) -> bool {
        self.id == other.id && self.planes.0.ptr_eq(&other.planes.0)
    }

    /// Takes the parts of the port that are on other threads out of the data plane: when this returns,
    /// each has been removed, or was given up by its thread before. To be called by the owner of the
    /// port, not on a thread of the data plane. Where there is one thread there is nothing to do.
    pub fn gather(&mut self) {
        if let Some(planes) = self.planes.0.upgrade().filter(|planes| planes.outboxes.len() > 1) {
            self.ports.extend(DataplaneHandle { planes }.remove_port(self.id));
        }
    }
}

/// Weak handle to all workers, held by each worker.
#[derive(Clone)]
pub(super) struct WeakHandle(Weak<Planes>);

/// Port entry: the id and index of a port, the same on every worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortEntry {
    pub(super) id: PortId,
    pub(super) place: usize,
}

/// Errors of [`DataplaneHandle::add_port`].
#[derive(Debug, thiserror::Error)]
pub enum AddPortError {
    /// The switch refused.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Its events cannot be waited for.
    #[error("cannot wait for the port's events: {0}")]
    Watch(#[from] io::Error),
    /// The data plane has ended.
    #[error("the data plane has ended")]
    Stopped,
}

/// Counters and table size of a data plane.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DataplaneStats {
    /// Its ports.
    pub ports: Vec<PortStats>,
    /// Addresses the switch knows (0 for a patch).
    pub addresses: usize,
}

/// A port's counters at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortStats {
    pub id: PortId,
    pub name: String,
    /// Name and value of each counter.
    pub counters: Vec<(&'static str, u64)>,
}

pub(super) enum Command {
    Add {
        /// Part of this worker, if it has one.
        port: Option<Box<dyn Port>>,
        parts: usize,
        /// Port entry chosen by the first worker; `None` for the first worker.
        entry: Option<PortEntry>,
        policy: PortPolicy,
        name: String,
        reply: Sender<Result<PortEntry, AddPortError>>,
    },
    Parts {
        id: PortId,
        reply: Sender<usize>,
    },
    Steer {
        id: PortId,
        steering: Option<Arc<Steering>>,
        reply: Sender<()>,
    },
    Remove {
        id: PortId,
        reply: Sender<Option<Box<dyn Port>>>,
    },
    Order {
        id: PortId,
        queue: u16,
        order: PortCommand,
        reply: Sender<PortReply>,
    },
    Stats {
        reply: Sender<DataplaneStats>,
    },
    Stop,
}

/// Receiving end of the commands, with an eventfd that is readable when one is queued.
pub(super) struct Inbox {
    pub(super) commands: Receiver<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

struct Outbox {
    /// `None` only while this is dropped.
    commands: Option<Sender<Command>>,
    wake: Arc<OwnedFd>,
}

impl Outbox {
    fn wake(&self) {
        // Only this process holds the file, and nobody writes enough to fill it.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.commands = None;
        self.wake();
    }
}

/// Controls a data plane from other threads. When the last clone is dropped the data plane ends.
///
/// The calls that return something wait for the data plane's answer, which takes it at most a round.
/// They must not be made from the data plane's own thread.
#[derive(Clone)]
pub struct DataplaneHandle {
    planes: Arc<Planes>,
}

struct Planes {
    outboxes: Vec<Outbox>,
    /// Lock held while the workers are notified, one after the other, of a change of ports.
    changing: Mutex<()>,
}

pub(super) fn connect(planes: usize) -> io::Result<(Vec<Inbox>, DataplaneHandle)> {
    let mut inboxes = Vec::with_capacity(planes);
    let mut outboxes = Vec::with_capacity(planes);
    for _ in 0..planes {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let wake = Arc::new(wake);
        let (sender, commands) = channel();
        outboxes.push(Outbox { commands: Some(sender), wake: Arc::clone(&wake) });
        inboxes.push(Inbox { commands, wake });
    }
    let planes = Arc::new(Planes { outboxes, changing: Mutex::default() });
    Ok((inboxes, DataplaneHandle { planes }))
}

impl DataplaneHandle {
    /// Adds a port. If the data plane has several threads, it is split into as many parts as it can be.
    ///
    /// # Errors
    ///
    /// [`AddPortError`]; the port is dropped.
    pub fn add_port(
        &self,
        port: Box<dyn Port>,
        policy: PortPolicy,
        name: &str,
    ) -> Result<PortId, AddPortError> {
        self.add_queues(vec![port], policy, name)
    }

    /// Adds a port that consists of these, which are a queue each, and served by a thread each as far
    /// as there are threads. Those beyond are dropped.
    ///
    /// # Errors
    ///
    /// [`AddPortError`]; all are dropped.
    pub fn add_queues(
        &self,
        mut ports: Vec<Box<dyn Port>>,
        policy: PortPolicy,
        name: &str,
    ) -> Result<PortId, AddPortError> {
        let threads = self.threads();
        if let ([port], 2..) = (ports.as_mut_slice(), threads) {
            let others = port.split_off(threads);
            ports.extend(others);
        }
        ports.truncate(threads);
        let parts = ports.len();
        let mut ports = ports.into_iter();
        let _changing = self.planes.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entry = None;
        for plane in 0..threads {
            let (port, policy, name) = (ports.next(), policy.clone(), name.to_owned());
            let added =
                self.ask(plane, |reply| Command::Add { port, parts, entry, policy, name, reply });
            match added.unwrap_or(Err(AddPortError::Stopped)) {
                Ok(added) => entry = Some(added),
                Err(error) => {
                    // Those before it let go of it again.
                    if let Some(PortEntry { id, .. }) = entry {
                        (0..plane).for_each(|plane| drop(self.remove_part(plane, id)));
                    }
                    return Err(error);
                }
            }
        }
        entry.map(|entry| entry.id).ok_or(AddPortError::Stopped)
    }

    /// Removes a port and returns it, or its parts. After that the data plane does not touch it.
    /// Nothing when it is not there, perhaps because it ended itself a moment ago.
    pub fn remove_port(&self, id: PortId) -> Vec<Box<dyn Port>> {
        let _changing = self.planes.changing.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.threads()).filter_map(|plane| self.remove_part(plane, id)).collect()
    }

    fn remove_part(&self, plane: usize, id: PortId) -> Option<Box<dyn Port>> {
        self.ask(plane, |reply| Command::Remove { id, reply }).flatten()
    }

    /// Has a port carry out an order for one of its queues, between two rounds. `None` when it is not
    /// there. What concerns the whole port is carried out by all of its parts.
    pub fn order(&self, id: PortId, queue: u16, order: PortCommand) -> Option<PortReply> {
        let parts = match self.threads() {
            1 => 1,
            _ => self.ask(0, |reply| Command::Parts { id, reply })?,
        };
        if parts < 2 {
            return self.ask(0, |reply| Command::Order { id, queue, order, reply });
        }
        match &order {
            PortCommand::SetPolicy(wanted) => {
                for plane in 1..parts {
                    let order = PortCommand::SetPolicy(*wanted);
                    self.ask(plane, |reply| Command::Order { id, queue, order, reply });
                }
                return self.ask(0, |reply| Command::Order { id, queue, order, reply });
            }
            PortCommand::Hash(steering) => {
                for plane in 0..self.threads() {
                    let steering = steering.clone();
                    self.ask(plane, |reply| Command::Steer { id, steering, reply });
                }
            }
            _ => {}
        }
        let plane = usize::from(queue) % parts;
        self.ask(plane, |reply| Command::Order { id, queue, order, reply })
    }

    /// Returns the counters of the data plane, or `None` after it has ended.
    pub fn stats(&self) -> Option<DataplaneStats> {
        let mut all = self.ask(0, |reply| Command::Stats { reply })?;
        for plane in 1..self.threads() {
            let more = self.ask(plane, |reply| Command::Stats { reply })?;
            more.ports.into_iter().for_each(|port| all.add(port));
        }
        Some(all)
    }

    /// Threads that the data plane has.
    pub fn threads(&self) -> usize {
        self.planes.outboxes.len()
    }

    /// Ends the data plane and drops its ports. Does not wait for that.
    pub fn stop(&self) {
        (0..self.threads()).for_each(|plane| self.send(plane, Command::Stop));
    }

    pub(super) fn weak(&self) -> WeakHandle {
        WeakHandle(Arc::downgrade(&self.planes))
    }

    fn ask<T>(&self, plane: usize, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (sender, answer) = channel();
        self.send(plane, command(sender));
        answer.recv().ok()
    }

    fn send(&self, plane: usize, command: Command) {
        let Some(outbox) = self.planes.outboxes.get(plane) else { return };
        if let Some(commands) = &outbox.commands {
            // A data plane that has ended drops the command, and with it the sender of the answer.
            let _ = commands.send(command);
        }
        outbox.wake();
    }
}

impl DataplaneStats {
    /// Adds what another part of a port counted.
    fn add(&mut self, port: PortStats) {
        let Some(known) = self.ports.iter_mut().find(|known| known.id == port.id) else {
            return self.ports.push(port);
        };
        for ((_, sum), (_, more)) in known.counters.iter_mut().zip(&port.counters) {
            *sum = sum.saturating_add(*more);
        }
    }
}
