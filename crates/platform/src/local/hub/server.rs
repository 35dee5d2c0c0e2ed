//! The hub's thread.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::broker::{Broker, HubLimits};
use super::protocol::{self, ANY_DOMAIN, Kind, Message, REPLY, Received, Refusal};
use crate::local::ArenaShape;
use crate::store::{Leftovers, Limits, StorePump};
use crate::{DomId, PlatformError};

/// Messages of one domain served before the others have their turn.
const BURST: usize = 16;

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const STORE: u64 = 2;
/// Tokens of domains' connections, from here on.
const FIRST_TOKEN: u64 = 16;

enum Command {
    Admit {
        wanted: Option<DomId>,
        privileged: bool,
        reply: Sender<Result<(DomId, OwnedFd), Refusal>>,
    },
    Stop,
}

/// A handle to a running hub, for the program that it runs in.
#[derive(Clone)]
pub struct HubHandle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    faults: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

impl HubHandle {
    /// Makes a connection for a new domain; the far end is to be handed to it. The domain has its
    /// number already and learns it by saying HELLO.
    ///
    /// # Errors
    ///
    /// When a quota is used up or the hub is gone.
    pub fn admit(
        &self,
        wanted: Option<DomId>,
        privileged: bool,
    ) -> Result<(DomId, OwnedFd), PlatformError> {
        let (reply, answer) = channel();
        self.command(Command::Admit { wanted, privileged, reply })?;
        let answer = answer.recv().map_err(|_| PlatformError::Disconnected("hub"))?;
        answer.map_err(|why| PlatformError::Refused { what: "admit a domain", why })
    }

    /// Ends the hub's thread.
    pub fn stop(&self) {
        // A hub that is gone already needs no telling.
        let _ = self.command(Command::Stop);
    }

    /// How often domains broke which rule of the hub's protocol.
    pub fn faults(&self) -> BTreeMap<&'static str, u64> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn command(&self, command: Command) -> Result<(), PlatformError> {
        self.commands.send(command).map_err(|_| PlatformError::Disconnected("hub"))?;
        rustix::io::write(&*self.wake, &1u64.to_ne_bytes())
            .map_err(|e| PlatformError::system("waking the hub", e))?;
        Ok(())
    }
}

/// One domain's connection.
struct Connection {
    socket: OwnedFd,
    /// `None` until HELLO for one that came through the listener.
    domain: Option<DomId>,
    /// Told to it when it says HELLO.
    assigned: Option<DomId>,
    privileged: bool,
}

/// The hub's state; [`Hub::run`] is its thread.
pub struct Hub {
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    commands: Receiver<Command>,
    listener: Option<OwnedFd>,
    connections: BTreeMap<u64, Connection>,
    next_token: u64,
    broker: Broker,
    store: StorePump,
    faults: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

fn pair(kind: SocketType) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

impl Hub {
    /// A hub and the handle to it.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn new(limits: HubLimits) -> io::Result<(Hub, HubHandle)> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let store = StorePump::new(Limits::default())?;
        epoll::add(&epoll, &store, EventData::new_u64(STORE), EventFlags::IN)?;
        let (wake, (commands, received)) = (Arc::new(wake), channel());
        let faults = Arc::new(Mutex::new(BTreeMap::new()));
        let handle = HubHandle { commands, wake: Arc::clone(&wake), faults: Arc::clone(&faults) };
        let hub = Hub {
            epoll,
            wake,
            commands: received,
            listener: None,
            connections: BTreeMap::new(),
            next_token: FIRST_TOKEN,
            broker: Broker::new(limits),
            store,
            faults,
        };
        Ok((hub, handle))
    }

    /// Accepts domains on `listener` (`SOCK_SEQPACKET`) too. One that runs as the hub's own user
    /// and asks for number 0 gets it, with privilege, once.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn listen(&mut self, listener: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        epoll::add(&self.epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Serves until [`HubHandle::stop`] or until every handle is gone.
    ///
    /// # Errors
    ///
    /// The system's, from waiting.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        if !self.serve_commands() {
                            return Ok(());
                        }
                    }
                    LISTENER => self.accept(),
                    STORE => self.store.dispatch()?,
                    token => self.serve_domain(token),
                }
            }
            while let Some(closed) = self.store.take_closed() {
                self.broker.store_closed(closed.domain);
            }
        }
    }

    fn count(&self, fault: &'static str) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        *faults.entry(fault).or_default() += 1;
    }

    fn serve_commands(&mut self) -> bool {
        let mut count = [0u8; 8];
        // Nothing to read only means that another wake-up was served first.
        let _ = rustix::io::read(&*self.wake, &mut count);
        loop {
            match self.commands.try_recv() {
                Ok(Command::Admit { wanted, privileged, reply }) => {
                    // An asker that is gone drops its end of the connection, which releases it.
                    let _ = reply.send(self.admit(wanted, privileged));
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn admit(
        &mut self,
        wanted: Option<DomId>,
        privileged: bool,
    ) -> Result<(DomId, OwnedFd), Refusal> {
        let id = self.broker.admit(wanted)?;
        let joined = pair(SocketType::SEQPACKET).and_then(|(near, far)| {
            self.connect(near, Some(id), privileged)?;
            Ok(far)
        });
        match joined {
            Ok(far) => {
                self.store.introduce(id);
                Ok((id, far))
            }
            Err(_) => {
                self.broker.release(id);
                Err(Refusal::System)
            }
        }
    }

    fn connect(
        &mut self,
        socket: OwnedFd,
        assigned: Option<DomId>,
        privileged: bool,
    ) -> rustix::io::Result<()> {
        let token = self.next_token;
        epoll::add(&self.epoll, &socket, EventData::new_u64(token), EventFlags::IN)?;
        self.next_token += 1;
        let connection = Connection { socket, domain: assigned, assigned, privileged };
        self.connections.insert(token, connection);
        Ok(())
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { return };
        let same_user = rustix::net::sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == rustix::process::geteuid());
        if self.connect(socket, None, same_user).is_err() {
            self.count("hub_no_room_for_connection");
        }
    }

    fn drop_connection(&mut self, token: u64) {
        let Some(connection) = self.connections.remove(&token) else { return };
        // Closing would remove it too, were no copy of the descriptor on its way anywhere.
        let _ = epoll::delete(&self.epoll, &connection.socket);
        if let Some(id) = connection.domain {
            self.broker.release(id);
            self.store.release(id, Leftovers::Remove);
        }
    }

    fn serve_domain(&mut self, token: u64) {
        for _ in 0..BURST {
            let Some(connection) = self.connections.get(&token) else { return };
            match protocol::receive(&connection.socket) {
                Received::Message(message, fds) => {
                    if !self.answer(token, message, fds) {
                        return self.drop_connection(token);
                    }
                }
                Received::Malformed(why) => {
                    self.count(match why {
                        Refusal::Descriptors => "hub_surplus_descriptors",
                        _ => "hub_malformed_message",
                    });
                    return self.drop_connection(token);
                }
                Received::Closed => return self.drop_connection(token),
                Received::Nothing => return,
            }
        }
    }

    /// Serves one request; `false` when the connection is of no more use.
    fn answer(&mut self, token: u64, message: Message, fds: Vec<OwnedFd>) -> bool {
        let kind = Kind::from_raw(message.kind);
        let wanted_fds = if kind == Kind::Lend { protocol::FDS_MAX } else { 0 };
        let outcome = if fds.len() == wanted_fds {
            self.serve(token, kind, message.args, fds)
        } else {
            Err(Refusal::Descriptors)
        };
        let (args, fds) = match outcome {
            Ok((values, fds)) => {
                let mut args = [0; 6];
                args[1..].copy_from_slice(&values);
                (args, fds)
            }
            Err(why) => {
                self.count(match why {
                    Refusal::Malformed => "hub_malformed_message",
                    Refusal::Descriptors => "hub_surplus_descriptors",
                    Refusal::Quota => "hub_quota",
                    Refusal::NotFound => "hub_not_found",
                    Refusal::NotPermitted => "hub_not_permitted",
                    Refusal::InUse => "hub_in_use",
                    Refusal::System | Refusal::Unknown(_) => "hub_system",
                });
                ([why.to_raw(), 0, 0, 0, 0, 0], Vec::new())
            }
        };
        let Some(connection) = self.connections.get(&token) else { return false };
        if message.seq == protocol::UNANSWERED {
            return true;
        }
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let reply = Message { kind: message.kind | REPLY, seq: message.seq, args };
        if protocol::send(&connection.socket, reply, &borrowed).is_err() {
            self.count("hub_reply_not_taken");
            return false;
        }
        true
    }

    fn serve(
        &mut self,
        token: u64,
        kind: Kind,
        args: [u32; 6],
        fds: Vec<OwnedFd>,
    ) -> Result<([u32; 5], Vec<OwnedFd>), Refusal> {
        if kind == Kind::Hello {
            return self
                .hello(token, args[0])
                .map(|id| ([u32::from(id.0), 0, 0, 0, 0], Vec::new()));
        }
        let connection = self.connections.get(&token).ok_or(Refusal::NotFound)?;
        let me = connection.domain.ok_or(Refusal::NotPermitted)?;
        let privileged = connection.privileged;
        let domain = |raw: u32| u16::try_from(raw).map(DomId).map_err(|_| Refusal::Malformed);
        let done = |first: u32, fds| Ok(([first, 0, 0, 0, 0], fds));
        match kind {
            Kind::Store => {
                self.broker.count_store(me)?;
                let privileged = privileged && me == DomId(0);
                let (near, far) = pair(SocketType::STREAM).map_err(|_| Refusal::System)?;
                if self.store.attach(near, me, privileged).is_err() {
                    self.broker.store_closed(me);
                    return Err(Refusal::Quota);
                }
                done(0, vec![far])
            }
            Kind::Lend => {
                let shape =
                    ArenaShape { writable: args[1], read_only: args[2], references: args[3] };
                self.broker.lend(me, domain(args[0])?, shape, fds)?;
                done(0, Vec::new())
            }
            Kind::Fetch => {
                let (shape, files) = self.broker.fetch(me, domain(args[0])?)?;
                let mut copies = Vec::with_capacity(protocol::FDS_MAX);
                for fd in files.each() {
                    copies.push(fd.try_clone_to_owned().map_err(|_| Refusal::System)?);
                }
                Ok(([shape.writable, shape.read_only, shape.references, 0, 0], copies))
            }
            Kind::Alloc => {
                let remote = domain(args[0])?;
                let (near, far) = pair(SocketType::STREAM).map_err(|_| Refusal::System)?;
                // A newly bound channel is pending once, as on Xen.
                rustix::io::write(&near, &[1]).map_err(|_| Refusal::System)?;
                let port = self.broker.alloc(me, remote, far)?;
                done(port, vec![near])
            }
            Kind::Bind => {
                let (port, socket) = self.broker.bind(me, domain(args[0])?, args[1])?;
                done(port, vec![socket])
            }
            Kind::Close => {
                self.broker.close(me, args[0])?;
                done(0, Vec::new())
            }
            Kind::Hello | Kind::Unknown(_) => Err(Refusal::Malformed),
        }
    }

    fn hello(&mut self, token: u64, wanted: u32) -> Result<DomId, Refusal> {
        let connection = self.connections.get_mut(&token).ok_or(Refusal::NotFound)?;
        if let Some(assigned) = connection.assigned {
            return Ok(assigned);
        }
        let wanted = match wanted {
            ANY_DOMAIN => None,
            // A number can be lent to that its owner left behind: only the toolstack picks.
            _ if !connection.privileged => return Err(Refusal::NotPermitted),
            raw => Some(DomId(u16::try_from(raw).map_err(|_| Refusal::Malformed)?)),
        };
        let id = self.broker.admit(wanted)?;
        connection.domain = Some(id);
        connection.assigned = Some(id);
        self.store.introduce(id);
        Ok(id)
    }
}
