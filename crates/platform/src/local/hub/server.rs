//! Hub thread: one `epoll` loop over the domains' connections, the store and a command mailbox.
//!
//! Every request is answered at once. A domain that breaks the protocol, or leaves replies unread, loses
//! its connection. [`HubHandle`] sends commands from other threads of the process.

// #syscall driver epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2: the hub waits for its domains
// #syscall driver eventfd2,read,write: the hub's own bell
// #syscall driver accept4: domains connect
// #syscall driver getsockopt 1=SOL_SOCKET: the credentials of who connects
// #syscall driver setsockopt 1=SOL_SOCKET 2=SO_SNDBUF: bounding what a peer can make the kernel hold
// #syscall driver ioctl 1=0x5421: FIONBIO: O_NONBLOCK
// #syscall driver socketpair 0=AF_UNIX: event channels, store connections

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_sys::descriptors::{Descriptors, dispose_socket, refuse_descriptors};
use ringfence_sys::mailbox::{MailSender, Mailbox, mailbox};
use ringfence_sys::socket::{peer_user, unread_by_peer};
use ringfence_wire::grant::DomId;
use ringfence_xenstore::{Leftovers, Limits, StorePump};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::broker::{Broker, HubLimits};
use super::protocol::{self, ANY_DOMAIN, HubMessage, HubReceived, Kind, REPLY, Refusal};
use crate::error::PlatformError;
use crate::local::arena::{ArenaFiles, ArenaShape};

/// Maximum number of messages of one domain in one round.
const BURST: usize = 16;

/// Maximum number of connections of the listener that have not sent HELLO. One more closes the oldest
/// of them.
const STRANGERS_MAX: usize = 32;

/// Maximum size of unread replies of a domain in bytes: about forty replies, each of which may hold
/// descriptors. A correct domain has one request open at a time.
const UNREAD_BYTES: usize = 16 << 10;

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const STORE: u64 = 2;
/// First token of a domain's connection.
const FIRST_TOKEN: u64 = 16;

enum HubCommand {
    Admit {
        wanted: Option<DomId>,
        privileged: bool,
        reply: Sender<Result<(DomId, OwnedFd), Refusal>>,
    },
    Stop,
}

/// Sender of commands to the hub. Its drop ends the hub.
struct HubOwner {
    commands: MailSender<HubCommand>,
}

impl HubOwner {
    fn stop(&self) {
        // A hub that has already ended needs no command.
        let _ = self.commands.send(HubCommand::Stop);
    }
}

impl Drop for HubOwner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Handle to a running hub, for other threads of its process. Clones refer to the same hub; dropping the
/// last one ends it.
#[derive(Clone)]
pub struct HubHandle {
    owner: Arc<HubOwner>,
    faults: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

impl HubHandle {
    /// Creates a connection for a new domain. Returns the domain's end with its number, which the domain
    /// learns by HELLO.
    ///
    /// # Errors
    ///
    /// Fails if a quota is used up or the hub has ended.
    pub fn admit(
        &self,
        wanted: Option<DomId>,
        privileged: bool,
    ) -> Result<(DomId, OwnedFd), PlatformError> {
        let (reply, answer) = channel();
        self.command(HubCommand::Admit { wanted, privileged, reply })?;
        let answer = answer.recv().map_err(|_| PlatformError::Disconnected("hub"))?;
        answer.map_err(|why| why.to("admit a domain"))
    }

    /// Ends the hub's thread, while other handles exist too.
    pub fn stop(&self) {
        self.owner.stop();
    }

    /// Returns counts of violations of the hub's protocol, by rule.
    pub fn faults(&self) -> BTreeMap<&'static str, u64> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn command(&self, command: HubCommand) -> Result<(), PlatformError> {
        self.owner.commands.send(command).map_err(|_| PlatformError::Disconnected("hub"))
    }
}

/// Connection of one domain.
struct HubConnection {
    socket: OwnedFd,
    /// `None` until HELLO for a connection of the listener.
    domain: Option<DomId>,
    /// Number that HELLO returns.
    assigned: Option<DomId>,
    privileged: bool,
}

/// Hub state, owned by the thread of [`Hub::run`].
pub struct Hub {
    epoll: OwnedFd,
    commands: Mailbox<HubCommand>,
    listener: Option<OwnedFd>,
    connections: BTreeMap<u64, HubConnection>,
    next_token: u64,
    broker: Broker,
    store: StorePump,
    faults: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    /// Spare descriptor, with which a caller can be rejected when no other descriptor is left.
    spare: Option<OwnedFd>,
}

fn pair(kind: SocketType) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

/// Creates a socket pair for bytes alone: neither end ever accepts descriptors.
fn byte_pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = pair(SocketType::STREAM)?;
    refuse_descriptors(&near)?;
    refuse_descriptors(&far)?;
    Ok((near, far))
}

impl Hub {
    /// Creates a hub and its handle.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn new(limits: HubLimits) -> io::Result<(Hub, HubHandle)> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let (sender, commands) = mailbox()?;
        epoll::add(&epoll, &commands, EventData::new_u64(WAKE), EventFlags::IN)?;
        let store = StorePump::new(Limits::default())?;
        epoll::add(&epoll, &store, EventData::new_u64(STORE), EventFlags::IN)?;
        let spare = Some(commands.as_fd().try_clone_to_owned()?);
        let faults = Arc::new(Mutex::new(BTreeMap::new()));
        let owner = Arc::new(HubOwner { commands: sender });
        let handle = HubHandle { owner, faults: Arc::clone(&faults) };
        let hub = Hub {
            epoll,
            commands,
            listener: None,
            connections: BTreeMap::new(),
            next_token: FIRST_TOKEN,
            broker: Broker::new(limits),
            store,
            faults,
            spare,
        };
        Ok((hub, handle))
    }

    /// Accepts domains on `listener` (`SOCK_SEQPACKET`) too. A client with the hub's own user may request
    /// a number, and may request 0 with privilege while it is free.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn listen(&mut self, listener: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        epoll::add(&self.epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Serves domains until [`HubHandle::stop`], or until the last handle is dropped.
    ///
    /// # Errors
    ///
    /// Returns the system's error from waiting.
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
        self.commands.clear();
        while let Some(command) = self.commands.take() {
            match command {
                HubCommand::Admit { wanted, privileged, reply } => {
                    // A caller that is gone drops its end of the connection, which releases it.
                    let _ = reply.send(self.admit(wanted, privileged));
                }
                HubCommand::Stop => return false,
            }
        }
        true
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
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, UNREAD_BYTES)?;
        let token = self.next_token;
        epoll::add(&self.epoll, &socket, EventData::new_u64(token), EventFlags::IN)?;
        self.next_token += 1;
        let connection = HubConnection { socket, domain: assigned, assigned, privileged };
        self.connections.insert(token, connection);
        Ok(())
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => return self.reject_caller(),
            Err(_) => return,
        };
        let same_user =
            peer_user(&socket).is_ok_and(|peer| peer == rustix::process::geteuid().as_raw());
        if self.connect(socket, None, same_user).is_err() {
            self.count("hub_no_room_for_connection");
        }
        self.bound_strangers();
    }

    /// Rejects a caller when no descriptor is left: accepts it with the spare one and closes it. A
    /// caller that stays in the queue would wake this thread endlessly.
    fn reject_caller(&mut self) {
        self.count("hub_no_room_for_connection");
        let Some(listener) = &self.listener else { return };
        drop(self.spare.take());
        drop(rustix::net::accept_with(listener, SocketFlags::CLOEXEC));
        self.spare = self.commands.as_fd().try_clone_to_owned().ok();
    }

    /// Closes the oldest connection without HELLO if there are too many.
    fn bound_strangers(&mut self) {
        let mut strangers = self.connections.iter().filter(|(_, c)| c.domain.is_none());
        let oldest = strangers.next().map(|(token, _)| *token);
        if let Some(oldest) = oldest.filter(|_| strangers.count() >= STRANGERS_MAX) {
            self.count("hub_strangers");
            self.drop_connection(oldest);
        }
    }

    fn drop_connection(&mut self, token: u64) {
        let Some(connection) = self.connections.remove(&token) else { return };
        // Closing would not remove it while a copy of the descriptor is in transit.
        let _ = epoll::delete(&self.epoll, &connection.socket);
        // Messages with descriptors may still be in its queue.
        dispose_socket(connection.socket);
        if let Some(id) = connection.domain {
            self.broker.release(id);
            self.store.release(id, Leftovers::Remove);
        }
    }

    fn serve_domain(&mut self, token: u64) {
        for _ in 0..BURST {
            let Some(connection) = self.connections.get(&token) else { return };
            match protocol::receive(&connection.socket) {
                HubReceived::Message(message, fds) => {
                    if !self.answer(token, message, fds) {
                        return self.drop_connection(token);
                    }
                }
                HubReceived::Malformed(why) => {
                    self.count(match why {
                        Refusal::Descriptors => "hub_surplus_descriptors",
                        _ => "hub_malformed_message",
                    });
                    return self.drop_connection(token);
                }
                HubReceived::Closed => return self.drop_connection(token),
                HubReceived::Nothing => return,
            }
        }
    }

    /// Serves one request. Returns `false` if the connection must be closed.
    fn answer(&mut self, token: u64, message: HubMessage, fds: Descriptors) -> bool {
        let kind = Kind::from_raw(message.kind);
        let wanted_fds = if kind == Kind::Lend { protocol::FDS_MAX } else { 0 };
        let surplus = fds.len() > wanted_fds;
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
                    Refusal::Malformed if matches!(kind, Kind::Unknown(_)) => "hub_unknown_request",
                    Refusal::Malformed => "hub_malformed_message",
                    Refusal::Descriptors if surplus => "hub_surplus_descriptors",
                    Refusal::Descriptors => "hub_missing_descriptors",
                    Refusal::BadArena => "hub_bad_arena",
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
        // The kernel counts descriptors in transit for all processes of a user together. Each domain may
        // have those of one reply in transit: a correct one reads a reply before its next request.
        if !fds.is_empty() && unread_by_peer(&connection.socket).is_ok_and(|unread| unread > 0) {
            self.count("hub_reply_not_taken");
            return false;
        }
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let reply = HubMessage { kind: message.kind | REPLY, seq: message.seq, args };
        let mut sent = protocol::send(&connection.socket, reply, &borrowed);
        if sent == Err(Errno::TOOMANYREFS) {
            // Another process of this user has too many descriptors in transit, which the kernel counts
            // against all of them. The requesting domain is not at fault.
            self.count("hub_descriptors_under_way");
            let args = [Refusal::System.to_raw(), 0, 0, 0, 0, 0];
            sent = protocol::send(&connection.socket, HubMessage { args, ..reply }, &[]);
        }
        if sent.is_err() {
            self.count("hub_reply_not_taken");
            return false;
        }
        true
    }

    /// Refuses files that break a rule. The grantee checks them again, but the hub keeps them, and they
    /// could be anything. A socket to the hub itself, for example, would keep an ended domain connected.
    fn check_arena(&self, shape: ArenaShape, fds: Descriptors) -> Result<Vec<OwnedFd>, Refusal> {
        shape.check().map_err(|_| Refusal::Quota)?;
        let files = ArenaFiles::receive(fds, shape).map_err(|why| {
            self.count(why.kind());
            Refusal::BadArena
        })?;
        Ok(files.into_vec())
    }

    fn serve(
        &mut self,
        token: u64,
        kind: Kind,
        args: [u32; 6],
        fds: Descriptors,
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
                let (near, far) = byte_pair().map_err(|_| Refusal::System)?;
                if self.store.attach(near, me, privileged).is_err() {
                    self.broker.store_closed(me);
                    return Err(Refusal::Quota);
                }
                done(0, vec![far])
            }
            Kind::Lend => {
                let shape =
                    ArenaShape { writable: args[1], read_only: args[2], references: args[3] };
                let fds = self.check_arena(shape, fds)?;
                self.broker.lend(me, domain(args[0])?, args[4], shape, fds)?;
                done(0, Vec::new())
            }
            Kind::Fetch => {
                let (shape, files) = self.broker.fetch(me, domain(args[0])?, args[1])?;
                let mut copies = Vec::with_capacity(protocol::FDS_MAX);
                for fd in files.each() {
                    copies.push(fd.try_clone_to_owned().map_err(|_| Refusal::System)?);
                }
                Ok(([shape.writable, shape.read_only, shape.references, 0, 0], copies))
            }
            Kind::Alloc => {
                let remote = domain(args[0])?;
                let (near, far) = byte_pair().map_err(|_| Refusal::System)?;
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
            // A number may have grants that its last owner left: only the toolstack chooses numbers.
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn hub_ends_when_its_last_handle_is_dropped() {
        let (hub, first) = Hub::new(HubLimits::default()).unwrap();
        let thread = std::thread::spawn(move || hub.run());
        let second = first.clone();
        drop(first);
        second.admit(None, false).unwrap();
        assert!(!thread.is_finished());
        drop(second);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !thread.is_finished() {
            assert!(Instant::now() < deadline, "the hub runs without a handle");
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().unwrap().unwrap();
    }
}
