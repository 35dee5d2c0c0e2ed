//! Control handle of a dataplane: commands and replies between control threads and the workers.
//!
//! Each worker has a command queue and an eventfd that wakes it. A request waits for the worker's reply.
//! A change of ports sends the same command to one worker after the other under a lock, so all workers
//! see the changes in the same order.

// #syscall driver,frontend,card,daemon eventfd2,write: a command is queued for a worker

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::PortLevels;
use ringfence_frame::port::{Fault, Port};
use ringfence_frame::steer::Steering;
use rustix::event::EventfdFlags;

use crate::forwarding::{AttachError, PortPolicy};

/// Id of a port in a dataplane. An id is never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortId(pub u64);

impl PortId {
    /// Id under which the counters of frames handed between workers are reported.
    pub(super) const HANDOFF: PortId = PortId(u64::MAX);
}

/// Report of a port that a worker removed because of a fault.
pub struct PortGone {
    pub id: PortId,
    pub name: String,
    pub reason: Fault,
    /// Part of the port that had the fault, and the parts that [`PortGone::collect_parts`] added. Their
    /// teardown may block, so the owner drops them on a thread of its own.
    pub ports: Vec<Box<dyn Port>>,
    pub(super) workers: WeakHandle,
}

impl PortGone {
    /// Returns `true` if both reports are of the same port.
    pub fn is_same_port(&self, other: &PortGone) -> bool {
        self.id == other.id && self.workers.0.ptr_eq(&other.workers.0)
    }

    /// Removes the port's parts from the other workers and adds them to [`PortGone::ports`].
    ///
    /// When this returns, no worker has a part. A part that is missing had a fault of its own, and a
    /// report of it was made before. With a single worker this does nothing. Must not be called on a
    /// worker's thread.
    pub fn collect_parts(&mut self) {
        let workers = self.workers.0.upgrade();
        if let Some(workers) = workers.filter(|workers| workers.senders.len() > 1) {
            self.ports.extend(DataplaneHandle { workers }.remove_port(self.id));
        }
    }
}

/// Weak handle to all workers, held by each worker.
#[derive(Clone)]
pub(super) struct WeakHandle(Weak<Workers>);

/// Id and index of a port, the same on every worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortKey {
    pub(super) id: PortId,
    pub(super) index: usize,
}

/// Errors of [`DataplaneHandle::add_port`] and [`DataplaneHandle::add_queues`].
#[derive(Debug, thiserror::Error)]
pub enum AddPortError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("cannot wait for the port's events: {0}")]
    Watch(#[from] io::Error),
    #[error("the data plane has ended")]
    Stopped,
}

/// Counters of all ports, and the size of the forwarding database.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DataplaneStats {
    pub ports: Vec<PortStats>,
    /// Number of addresses that worker 0 knows; 0 for a patch.
    pub addresses: usize,
}

/// Counters of a port at one moment, summed over its parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortStats {
    pub id: PortId,
    pub name: String,
    /// Name and value of each counter.
    pub counters: Vec<(&'static str, u64)>,
    pub levels: PortLevels,
}

/// Command of a control thread to one worker.
pub(super) enum Command {
    Add {
        /// Part of this worker, if it has one.
        port: Option<Box<dyn Port>>,
        parts: usize,
        /// Key that worker 0 allocated; `None` in the command to worker 0.
        key: Option<PortKey>,
        policy: PortPolicy,
        name: String,
        reply: Sender<Result<PortKey, AddPortError>>,
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
    Execute {
        id: PortId,
        queue: u16,
        command: PortCommand,
        reply: Sender<PortReply>,
    },
    Stats {
        /// Port whose counters are wanted; `None` for all ports.
        only: Option<PortId>,
        reply: Sender<DataplaneStats>,
    },
    Stop,
}

/// Command queue of a worker, with an eventfd that is readable when a command was queued.
pub(super) struct CommandReceiver {
    pub(super) queue: Receiver<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

/// Sending end of a worker's command queue.
struct CommandSender {
    /// Sender of the queue; `None` only during the drop.
    queue: Option<Sender<Command>>,
    wake: Arc<OwnedFd>,
}

impl CommandSender {
    fn wake(&self) {
        // The write fails only if the counter would overflow; the eventfd is readable then.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Disconnects the queue and wakes the worker, which then ends.
impl Drop for CommandSender {
    fn drop(&mut self) {
        self.queue = None;
        self.wake();
    }
}

/// Control handle of a dataplane for other threads. The dataplane ends when the last clone is dropped.
///
/// Calls that return a value wait for the replies of the workers, each for about one round at most. They
/// must not be made on a worker's thread.
#[derive(Clone)]
pub struct DataplaneHandle {
    workers: Arc<Workers>,
}

struct Workers {
    senders: Vec<CommandSender>,
    /// Lock held while the workers are notified, one after the other, of a change of ports.
    changing: Mutex<()>,
}

/// Creates the command queues of `count` workers.
pub(super) fn connect(count: usize) -> io::Result<(Vec<CommandReceiver>, DataplaneHandle)> {
    let mut receivers = Vec::with_capacity(count);
    let mut senders = Vec::with_capacity(count);
    for _ in 0..count {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let wake = Arc::new(wake);
        let (sender, queue) = channel();
        senders.push(CommandSender { queue: Some(sender), wake: Arc::clone(&wake) });
        receivers.push(CommandReceiver { queue, wake });
    }
    let workers = Arc::new(Workers { senders, changing: Mutex::default() });
    Ok((receivers, DataplaneHandle { workers }))
}

impl DataplaneHandle {
    /// Adds a port. If the dataplane has several workers, the port is split into at most as many parts.
    ///
    /// # Errors
    ///
    /// Returns [`AddPortError`] if a worker refuses the port; the port is dropped.
    pub fn add_port(
        &self,
        port: Box<dyn Port>,
        policy: PortPolicy,
        name: &str,
    ) -> Result<PortId, AddPortError> {
        self.add_queues(vec![port], policy, name)
    }

    /// Adds one port that consists of `ports`, each of one queue. Worker `n` gets the `n`th of them; those
    /// beyond the number of workers are dropped.
    ///
    /// # Errors
    ///
    /// Returns [`AddPortError`] if a worker refuses its part; all parts are dropped.
    pub fn add_queues(
        &self,
        mut ports: Vec<Box<dyn Port>>,
        policy: PortPolicy,
        name: &str,
    ) -> Result<PortId, AddPortError> {
        let count = self.workers();
        if let ([port], 2..) = (ports.as_mut_slice(), count) {
            let others = port.split_off(count);
            ports.extend(others);
        }
        ports.truncate(count);
        let parts = ports.len();
        let mut ports = ports.into_iter();
        let _changing = self.workers.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = None;
        for worker in 0..count {
            let (port, policy, name) = (ports.next(), policy.clone(), name.to_owned());
            let added = self.request(worker, |reply| Command::Add {
                port,
                parts,
                key,
                policy,
                name,
                reply,
            });
            match added.unwrap_or(Err(AddPortError::Stopped)) {
                Ok(added) => key = Some(added),
                Err(error) => {
                    // The workers before this one have added their parts already.
                    if let Some(PortKey { id, .. }) = key {
                        (0..worker).for_each(|worker| drop(self.remove_part(worker, id)));
                    }
                    return Err(error);
                }
            }
        }
        key.map(|key| key.id).ok_or(AddPortError::Stopped)
    }

    /// Removes a port from all workers and returns its parts. No worker uses them afterwards. The result is
    /// empty if the port was not found, for example because a fault has just removed it.
    pub fn remove_port(&self, id: PortId) -> Vec<Box<dyn Port>> {
        let _changing = self.workers.changing.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.workers()).filter_map(|worker| self.remove_part(worker, id)).collect()
    }

    fn remove_part(&self, worker: usize, id: PortId) -> Option<Box<dyn Port>> {
        self.request(worker, |reply| Command::Remove { id, reply }).flatten()
    }

    /// Executes a command on one queue of a port, between two rounds. If the port has several parts, a command
    /// for the whole port is executed on all of them, and a hash configuration is set on all workers. Returns `None` if there is no
    /// such port.
    pub fn execute(&self, id: PortId, queue: u16, command: PortCommand) -> Option<PortReply> {
        let parts = match self.workers() {
            1 => 1,
            _ => self.request(0, |reply| Command::Parts { id, reply })?,
        };
        if parts < 2 {
            return self.request(0, |reply| Command::Execute { id, queue, command, reply });
        }
        let for_each_part = |command: &PortCommand| match command {
            PortCommand::WholePort(command) => Some(PortCommand::WholePort(Arc::clone(command))),
            PortCommand::SetMtu(mtu) => Some(PortCommand::SetMtu(*mtu)),
            PortCommand::Hash(_) | PortCommand::Queue(_) => None,
        };
        match &command {
            PortCommand::WholePort(_) | PortCommand::SetMtu(_) => {
                for (worker, command) in
                    (1..parts).filter_map(|n| Some((n, for_each_part(&command)?)))
                {
                    self.request(worker, |reply| Command::Execute { id, queue, command, reply });
                }
                return self.request(0, |reply| Command::Execute { id, queue, command, reply });
            }
            PortCommand::Hash(steering) => {
                for worker in 0..self.workers() {
                    let steering = steering.clone();
                    self.request(worker, |reply| Command::Steer { id, steering, reply });
                }
            }
            PortCommand::Queue(_) => {}
        }
        let worker = usize::from(queue) % parts;
        self.request(worker, |reply| Command::Execute { id, queue, command, reply })
    }

    /// Returns the counters of the dataplane, or `None` after it has ended.
    pub fn stats(&self) -> Option<DataplaneStats> {
        self.stats_of(None)
    }

    /// Returns the counters of the dataplane with `only` that port, or with all. `None` after it has ended.
    pub fn stats_of(&self, only: Option<PortId>) -> Option<DataplaneStats> {
        let mut all = self.request(0, |reply| Command::Stats { only, reply })?;
        for worker in 1..self.workers() {
            let more = self.request(worker, |reply| Command::Stats { only, reply })?;
            more.ports.into_iter().for_each(|port| all.add(port));
        }
        Some(all)
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.workers.senders.len()
    }

    /// Ends the workers, which drop their ports. Does not wait for them.
    pub fn stop(&self) {
        (0..self.workers()).for_each(|worker| self.send(worker, Command::Stop));
    }

    pub(super) fn weak(&self) -> WeakHandle {
        WeakHandle(Arc::downgrade(&self.workers))
    }

    /// Sends a command and waits for the reply. Returns `None` if the worker drops the reply's sender.
    fn request<T>(&self, worker: usize, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (sender, reply) = channel();
        self.send(worker, command(sender));
        reply.recv().ok()
    }

    fn send(&self, worker: usize, command: Command) {
        let Some(sender) = self.workers.senders.get(worker) else { return };
        if let Some(queue) = &sender.queue {
            // If the worker has ended, the command is dropped, and with it the sender of the reply.
            let _ = queue.send(command);
        }
        sender.wake();
    }
}

impl DataplaneStats {
    /// Adds the counters of another worker's part of a port.
    fn add(&mut self, port: PortStats) {
        let Some(known) = self.ports.iter_mut().find(|known| known.id == port.id) else {
            return self.ports.push(port);
        };
        for ((_, sum), (_, more)) in known.counters.iter_mut().zip(&port.counters) {
            *sum = sum.saturating_add(*more);
        }
        known.levels.add(port.levels);
    }
}
