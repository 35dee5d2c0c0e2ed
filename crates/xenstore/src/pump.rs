//! Moves messages between sockets and a [`StoreServer`], without ever waiting for one of them.
//!
//! A pump has an epoll descriptor of its own, which is readable when there is something to do. A
//! thread with an event loop of its own puts that one descriptor ([`AsFd`]) into it and calls
//! [`dispatch`](StorePump::dispatch); one without calls [`wait`](StorePump::wait).
//!
//! A round is bounded: one read of each connection that is ready, which is at most a few
//! hundred of the smallest requests, and the output that they cause. A connection that may not be
//! read from (see [`StoreServer::may_read`]) is left alone until it may; what it had sent before
//! stays in a buffer of fixed size.

// #syscall driver epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2,ppoll: the store waits for its clients

use super::server::{ConnectionId, Leftovers, StoreServer, TooManyConnections};
use super::transport::{Moved, Stream};
use super::{Limits, StoreCounters};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{FramingError, MessageReader};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use thiserror::Error;

/// Bytes handed to the kernel at a time.
const CHUNK: usize = 16 << 10;

/// Connections looked at in one round.
const EVENTS: usize = 32;

/// Why a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CloseReason {
    /// The other side closed it.
    #[error("the domain closed its store connection")]
    Peer,
    /// The server dropped it: too much unread output, or its domain was released.
    #[error("the store dropped the connection: it did not read, or its domain was released")]
    Dropped,
    /// What it sent is no message.
    #[error(transparent)]
    Framing(#[from] FramingError),
    /// The socket failed.
    #[error("the store connection failed: {0}")]
    System(#[from] Errno),
}

/// A connection that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    /// Which.
    pub connection: ConnectionId,
    /// Whose.
    pub domain: DomId,
    /// Why.
    pub reason: CloseReason,
}

/// Why a connection was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AttachError {
    /// The domain has enough.
    #[error(transparent)]
    TooMany(#[from] TooManyConnections),
    /// The system refused.
    #[error("cannot watch a store connection: {0}")]
    System(#[from] Errno),
}

#[derive(Debug)]
struct StoreConnection {
    stream: Stream,
    reader: MessageReader,
    domain: DomId,
    /// The reader may hold a message that the server is not ready for.
    stalled: bool,
    interest: epoll::EventFlags,
}

/// A server and the sockets it serves.
#[derive(Debug)]
pub struct StorePump {
    server: StoreServer,
    epoll: OwnedFd,
    connections: BTreeMap<ConnectionId, StoreConnection>,
    closed: VecDeque<Closed>,
}

impl StorePump {
    /// A new store without connections.
    ///
    /// # Errors
    /// When the system refuses another descriptor.
    pub fn new(limits: Limits) -> Result<StorePump, Errno> {
        Ok(StorePump {
            server: StoreServer::new(limits),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            connections: BTreeMap::new(),
            closed: VecDeque::new(),
        })
    }

    /// Serves the domain at the other end of `socket`, a stream socket.
    ///
    /// # Errors
    /// [`AttachError`]; the socket is closed then.
    pub fn attach(
        &mut self,
        socket: OwnedFd,
        domain: DomId,
        privileged: bool,
    ) -> Result<ConnectionId, AttachError> {
        let stream = Stream::new(socket)?;
        let id = self.server.connect(domain, privileged)?;
        let interest = epoll::EventFlags::IN;
        let key = epoll::EventData::new_u64(id.get());
        if let Err(errno) = epoll::add(&self.epoll, &stream, key, interest) {
            self.server.disconnect(id);
            return Err(errno.into());
        }
        let connection = StoreConnection {
            stream,
            reader: MessageReader::new(),
            domain,
            stalled: false,
            interest,
        };
        self.connections.insert(id, connection);
        Ok(id)
    }

    /// Ends a connection. Idempotent.
    pub fn detach(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
        self.server.disconnect(id);
        self.settle();
    }

    /// As [`StoreServer::introduce`], and sends the events.
    pub fn introduce(&mut self, domain: DomId) {
        self.server.introduce(domain);
        self.settle();
    }

    /// As [`StoreServer::release`], and sends the events.
    pub fn release(&mut self, domain: DomId, leftovers: Leftovers) {
        self.server.release(domain, leftovers);
        self.settle();
    }

    /// The state machine.
    pub fn server(&self) -> &StoreServer {
        &self.server
    }

    /// What the server counted.
    pub fn counters(&self) -> &StoreCounters {
        self.server.counters()
    }

    /// The next connection that ended other than by [`detach`](Self::detach), each once. Ask after
    /// every call that may end some: [`dispatch`](Self::dispatch), [`introduce`](Self::introduce),
    /// [`release`](Self::release).
    pub fn take_closed(&mut self) -> Option<Closed> {
        self.closed.pop_front()
    }

    /// Waits until there is something to do, for at most `timeout`, and does it.
    ///
    /// # Errors
    /// When the system fails; no connection's fault.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Errno> {
        // A timeout beyond what the type holds is as good as none.
        let timeout = Timespec::try_from(timeout).ok();
        let mut ready = [PollFd::new(&self.epoll, PollFlags::IN)];
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => self.dispatch(),
            Err(errno) => Err(errno),
        }
    }

    /// Does what can be done without waiting: reads requests, answers them, sends.
    ///
    /// # Errors
    /// When the system fails; no connection's fault.
    pub fn dispatch(&mut self) -> Result<(), Errno> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        for event in events {
            let id = ConnectionId::from_key(event.data.u64());
            if let Err(reason) = self.on_event(id, event.flags) {
                self.close(id, reason);
            }
        }
        self.settle();
        Ok(())
    }

    fn on_event(&mut self, id: ConnectionId, flags: epoll::EventFlags) -> Result<(), CloseReason> {
        let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if connection.stalled {
            // Nobody is left to read the answers it waits for, and this event would not cease.
            if flags.intersects(gone) {
                return Err(CloseReason::Peer);
            }
        } else if flags.intersects(gone | epoll::EventFlags::IN) {
            connection.fill()?;
            connection.process(id, &mut self.server)?;
        }
        self.flush(id)
    }

    /// Sends what is there to send, and goes on with connections that had to wait for that.
    fn settle(&mut self) {
        loop {
            while let Some(id) = self.server.take_ready() {
                if let Err(reason) = self.flush(id) {
                    self.close(id, reason);
                }
            }
            // Ends: each round takes messages out of buffers that are not filled here.
            if !self.resume() {
                break;
            }
        }
        self.update_interest();
    }

    /// Goes on with stalled connections; whether any request was handled.
    fn resume(&mut self) -> bool {
        let stalled: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(id, connection)| connection.stalled && self.server.may_read(**id))
            .map(|(id, _)| *id)
            .collect();
        for id in &stalled {
            let Some(connection) = self.connections.get_mut(id) else {
                continue;
            };
            if let Err(reason) = connection.process(*id, &mut self.server) {
                self.close(*id, reason);
            }
        }
        !stalled.is_empty()
    }

    /// Sends to one connection as much as goes.
    fn flush(&mut self, id: ConnectionId) -> Result<(), CloseReason> {
        let Some(connection) = self.connections.get(&id) else {
            return Ok(());
        };
        let mut chunk = [0; CHUNK];
        loop {
            let outbox = self.server.outbox(id).ok_or(CloseReason::Dropped)?;
            let len = outbox.peek(&mut chunk);
            if len == 0 {
                return Ok(());
            }
            match connection.stream.send(&chunk[..len])? {
                Moved::Bytes(sent) => outbox.advance(sent),
                Moved::NotNow => return Ok(()),
                Moved::Closed => return Err(CloseReason::Peer),
            }
        }
    }

    fn close(&mut self, connection: ConnectionId, reason: CloseReason) {
        self.server.disconnect(connection);
        if let Some(ended) = self.connections.remove(&connection) {
            let domain = ended.domain;
            self.closed.push_back(Closed { connection, domain, reason });
        }
    }

    /// Tells epoll what each connection waits for.
    fn update_interest(&mut self) {
        let mut failed = Vec::new();
        for (id, connection) in &mut self.connections {
            let mut wanted = epoll::EventFlags::empty();
            let waits_for_room = self.server.outbox(*id).is_some_and(|outbox| !outbox.is_empty());
            wanted.set(epoll::EventFlags::IN, !connection.stalled);
            wanted.set(epoll::EventFlags::OUT, waits_for_room);
            if wanted == connection.interest {
                continue;
            }
            let key = epoll::EventData::new_u64(id.get());
            match epoll::modify(&self.epoll, &connection.stream, key, wanted) {
                Ok(()) => connection.interest = wanted,
                Err(errno) => failed.push((*id, errno)),
            }
        }
        for (id, errno) in failed {
            self.close(id, errno.into());
        }
    }
}

impl AsFd for StorePump {
    /// Readable when [`dispatch`](Self::dispatch) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl StoreConnection {
    /// Reads once.
    fn fill(&mut self) -> Result<(), CloseReason> {
        match self.stream.receive(self.reader.spare())? {
            Moved::Bytes(len) => {
                self.reader.commit(len);
                Ok(())
            }
            Moved::NotNow => Ok(()),
            Moved::Closed => Err(CloseReason::Peer),
        }
    }

    /// Hands over the messages that were read, as far as the server wants them.
    fn process(&mut self, id: ConnectionId, server: &mut StoreServer) -> Result<(), CloseReason> {
        loop {
            if !server.may_read(id) {
                // Whether a whole message waits is not known; it is looked at when it may be.
                self.stalled = true;
                return Ok(());
            }
            match self.reader.next()? {
                Some((header, payload)) => server.handle(id, &header, payload),
                None => {
                    self.stalled = false;
                    return Ok(());
                }
            }
        }
    }
}
