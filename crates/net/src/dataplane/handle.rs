//! How other threads talk to a data plane.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::EventfdFlags;

use crate::orders::{PortOrder, PortReply};
use crate::port::{Fault, Port};
use crate::switch::{AttachError, PortPolicy};

/// A port of a data plane. Never used again for another one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortId(pub u64);

/// A port that ended itself.
pub struct PortGone {
    /// Which.
    pub id: PortId,
    /// What it was called.
    pub name: String,
    /// Why.
    pub reason: Fault,
    /// The port, to be dropped where that holds nobody up.
    pub port: Box<dyn Port>,
}

/// Why a port was not added.
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

/// What a data plane says of itself.
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
    /// Which.
    pub id: PortId,
    /// What it is called.
    pub name: String,
    /// Name and value of each counter.
    pub counters: Vec<(&'static str, u64)>,
}

pub(super) enum Command {
    Add {
        port: Box<dyn Port>,
        policy: PortPolicy,
        name: String,
        reply: Sender<Result<PortId, AddPortError>>,
    },
    Remove {
        id: PortId,
        reply: Sender<Option<Box<dyn Port>>>,
    },
    Order {
        id: PortId,
        queue: u16,
        order: PortOrder,
        reply: Sender<PortReply>,
    },
    Stats {
        reply: Sender<DataplaneStats>,
    },
    Stop,
}

/// What a data plane hears of its handles by: commands, and a file that is readable when there is one.
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
    outbox: Arc<Outbox>,
}

pub(super) fn connect() -> io::Result<(Inbox, DataplaneHandle)> {
    let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let wake = Arc::new(wake);
    let (sender, commands) = channel();
    let outbox = Outbox { commands: Some(sender), wake: Arc::clone(&wake) };
    Ok((Inbox { commands, wake }, DataplaneHandle { outbox: Arc::new(outbox) }))
}

impl DataplaneHandle {
    /// Adds a port.
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
        let name = name.to_owned();
        self.ask(|reply| Command::Add { port, policy, name, reply })
            .unwrap_or(Err(AddPortError::Stopped))
    }

    /// Removes a port and returns it. After that the data plane does not touch it. `None` when it is
    /// not there, perhaps because it ended itself a moment ago.
    pub fn remove_port(&self, id: PortId) -> Option<Box<dyn Port>> {
        self.ask(|reply| Command::Remove { id, reply }).flatten()
    }

    /// Has a port carry out an order for one of its queues, between two rounds. `None` when it is not
    /// there.
    pub fn order(&self, id: PortId, queue: u16, order: PortOrder) -> Option<PortReply> {
        self.ask(|reply| Command::Order { id, queue, order, reply })
    }

    /// What the data plane says of itself; `None` when it has ended.
    pub fn stats(&self) -> Option<DataplaneStats> {
        self.ask(|reply| Command::Stats { reply })
    }

    /// Ends the data plane and drops its ports. Does not wait for that.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (sender, answer) = channel();
        self.send(command(sender));
        answer.recv().ok()
    }

    fn send(&self, command: Command) {
        if let Some(commands) = &self.outbox.commands {
            // A data plane that has ended drops the command, and with it the sender of the answer.
            let _ = commands.send(command);
        }
        self.outbox.wake();
    }
}
