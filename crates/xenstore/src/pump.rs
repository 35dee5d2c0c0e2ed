//! Event loop of the store: moves messages between sockets and a [`StoreServer`] without blocking.
//!
//! A pump has its own epoll descriptor, which is readable when there is work. A thread with its own event
//! loop adds that one descriptor ([`AsFd`]) and calls [`dispatch`](StorePump::dispatch). Other threads
//! call [`wait`](StorePump::wait).
//!
//! A round is bounded: one read from each ready connection, which holds at most a few hundred requests of
//! minimum size, and the output that they cause. While the server accepts no requests of a connection
//! ([`StoreServer::may_read`]), the pump does not read from it. Messages that were read before stay in
//! a buffer of fixed size.

// #syscall driver epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2,ppoll: the store waits for its clients

use super::server::{ConnectionId, Leftovers, StoreServer, TooManyConnections};
use super::transport::{Stream, Transfer};
use super::{Limits, StoreCounters};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{FramingError, MessageReader};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use thiserror::Error;

/// Number of bytes sent in one system call.
const CHUNK: usize = 16 << 10;

/// Maximum number of connections handled in one round.
const EVENTS: usize = 32;

/// Reasons for which a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CloseReason {
    /// Close by the domain.
    #[error("the domain closed its store connection")]
    Peer,
    /// Drop by the server: too much unread output, or a released domain.
    #[error("the store dropped the connection: it did not read, or its domain was released")]
    Dropped,
    /// Bytes that are no message.
    #[error(transparent)]
    Framing(#[from] FramingError),
    /// Failure of the socket.
    #[error("the store connection failed: {0}")]
    System(#[from] Errno),
}

/// Record of a connection that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    pub connection: ConnectionId,
    pub domain: DomId,
    pub reason: CloseReason,
}

/// Reasons for which a connection is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum StoreAttachError {
    /// Connection above the limit of the domain.
    #[error(transparent)]
    TooMany(#[from] TooManyConnections),
    #[error("cannot watch a store connection: {0}")]
    System(#[from] Errno),
}

#[derive(Debug)]
struct StoreConnection {
    stream: Stream,
    reader: MessageReader,
    domain: DomId,
    /// Set while the reader may hold a message that the server does not accept yet.
    stalled: bool,
    interest: epoll::EventFlags,
}

/// Server with the sockets that it serves.
#[derive(Debug)]
pub struct StorePump {
    server: StoreServer,
    epoll: OwnedFd,
    connections: BTreeMap<ConnectionId, StoreConnection>,
    closed: VecDeque<Closed>,
}

impl StorePump {
    /// Creates an empty store without connections.
    ///
    /// # Errors
    /// Returns the kernel's error if it refuses an epoll descriptor.
    pub fn new(limits: Limits) -> Result<StorePump, Errno> {
        Ok(StorePump {
            server: StoreServer::new(limits),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            connections: BTreeMap::new(),
            closed: VecDeque::new(),
        })
    }

    /// Adds a connection of `domain` over the stream socket `socket`.
    ///
    /// # Errors
    /// Returns [`StoreAttachError`] if the domain has too many connections or a system call fails. The socket
    /// is closed then.
    pub fn attach(
        &mut self,
        socket: OwnedFd,
        domain: DomId,
        privileged: bool,
    ) -> Result<ConnectionId, StoreAttachError> {
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

    /// Ends a connection. Calls for a connection that ended do nothing.
    pub fn detach(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
        self.server.disconnect(id);
        self.flush_ready();
    }

    /// Introduces a domain as [`StoreServer::introduce`] does, and sends the events.
    pub fn introduce(&mut self, domain: DomId) {
        self.server.introduce(domain);
        self.flush_ready();
    }

    /// Releases a domain as [`StoreServer::release`] does, and sends the events.
    pub fn release(&mut self, domain: DomId, leftovers: Leftovers) {
        self.server.release(domain, leftovers);
        self.flush_ready();
    }

    /// Returns the state machine of the store.
    pub fn server(&self) -> &StoreServer {
        &self.server
    }

    /// Returns the counters of the server.
    pub fn counters(&self) -> &StoreCounters {
        self.server.counters()
    }

    /// Returns the next connection that ended for another reason than [`detach`](Self::detach). Each is
    /// returned once. Call this after [`dispatch`](Self::dispatch), [`introduce`](Self::introduce) and
    /// [`release`](Self::release).
    pub fn take_closed(&mut self) -> Option<Closed> {
        self.closed.pop_front()
    }

    /// Blocks until there is work, for at most `timeout`, and does it.
    ///
    /// # Errors
    /// Returns the kernel's error on poll or epoll. Errors of a connection only end that connection.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Errno> {
        // A timeout beyond the range of `Timespec` is no timeout.
        let timeout = Timespec::try_from(timeout).ok();
        let mut ready = [PollFd::new(&self.epoll, PollFlags::IN)];
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => self.dispatch(),
            Err(errno) => Err(errno),
        }
    }

    /// Reads requests, handles them and sends output, without blocking.
    ///
    /// # Errors
    /// Returns the kernel's error on epoll. Errors of a connection only end that connection.
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
        self.flush_ready();
        Ok(())
    }

    fn on_event(&mut self, id: ConnectionId, flags: epoll::EventFlags) -> Result<(), CloseReason> {
        let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if connection.stalled {
            // The peer cannot read the replies any more, and level-triggered epoll would report this again.
            if flags.intersects(gone) {
                return Err(CloseReason::Peer);
            }
        } else if flags.intersects(gone | epoll::EventFlags::IN) {
            connection.fill()?;
            connection.process(id, &mut self.server)?;
        }
        self.flush(id)
    }

    /// Sends the output of all ready connections, and resumes connections that waited for that.
    fn flush_ready(&mut self) {
        loop {
            while let Some(id) = self.server.take_ready() {
                if let Err(reason) = self.flush(id) {
                    self.close(id, reason);
                }
            }
            // The loop ends: each iteration takes messages from buffers that are not filled here.
            if !self.resume() {
                break;
            }
        }
        self.update_interest();
    }

    /// Resumes stalled connections that the server accepts requests of. Returns `true` if it resumed any.
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

    /// Sends the output of one connection until the socket is full.
    fn flush(&mut self, id: ConnectionId) -> Result<(), CloseReason> {
        let Some(connection) = self.connections.get(&id) else {
            return Ok(());
        };
        let mut chunk = [0; CHUNK];
        loop {
            let output = self.server.output(id).ok_or(CloseReason::Dropped)?;
            let len = output.peek(&mut chunk);
            if len == 0 {
                return Ok(());
            }
            match connection.stream.send(&chunk[..len])? {
                Transfer::Bytes(sent) => output.advance(sent),
                Transfer::WouldBlock => return Ok(()),
                Transfer::Closed => return Err(CloseReason::Peer),
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

    /// Updates the epoll events of each connection.
    fn update_interest(&mut self) {
        let mut failed = Vec::new();
        for (id, connection) in &mut self.connections {
            let mut wanted = epoll::EventFlags::empty();
            let output_waits = self.server.output(*id).is_some_and(|output| !output.is_empty());
            wanted.set(epoll::EventFlags::IN, !connection.stalled);
            wanted.set(epoll::EventFlags::OUT, output_waits);
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
    /// Returns the epoll descriptor. It is readable when [`dispatch`](Self::dispatch) has work.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl StoreConnection {
    /// Reads once from the socket into the buffer.
    fn fill(&mut self) -> Result<(), CloseReason> {
        match self.stream.receive(self.reader.spare())? {
            Transfer::Bytes(len) => {
                self.reader.commit(len);
                Ok(())
            }
            Transfer::WouldBlock => Ok(()),
            Transfer::Closed => Err(CloseReason::Peer),
        }
    }

    /// Passes buffered messages to the server until it accepts no more.
    fn process(&mut self, id: ConnectionId, server: &mut StoreServer) -> Result<(), CloseReason> {
        loop {
            if !server.may_read(id) {
                // The buffer may hold a whole message. It is parsed when the server accepts requests again.
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
