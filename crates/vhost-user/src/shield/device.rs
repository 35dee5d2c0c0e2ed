//! Shield of one hypervisor after another: messages, vrings, and the connection to a backend.

// #syscall shield epoll_create1,epoll_ctl: waiting for a hypervisor, a driver and a backend
// #syscall shield epoll_pwait,epoll_pwait2: their events

mod requests;
mod vrings;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_sys::event_signal::EventSignal;
use ringfence_wire::vhost_user::{LOG_ALL, PROTOCOL_FEATURES, protocol_feature as protocol};
use ringfence_wire::virtio::feature;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::connection::{Connection, Events, QUEUES_MAX};
use super::fault::ShieldFault;
use super::pool::ShieldPool;
use super::shadow::ShadowQueue;
use super::totals::ShieldTotals;
use crate::device::{Device, DeviceOffer, Parts};
use crate::proxy::end::{End, Incoming, Kind, ProxyMessage};
use crate::proxy::{Party, ProxyFault};
use crate::{ClientFault, HandedOver, PoolRule};

/// Maximum of messages in one round.
const MESSAGES_PER_ROUND: usize = 32;
/// Number of rounds after which a busy shield looks for messages.
const ROUNDS_PER_LOOK: u32 = 64;
/// Time between two attempts to reach a backend.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Number of vrings that a device can have.
const VRINGS_MAX: usize = 2 * QUEUES_MAX as usize;

/// Numbers of the events. Those of kicks lie between the last two.
const FRONTEND: epoll::EventData = epoll::EventData::new_u64(0);
const BACKEND: epoll::EventData = epoll::EventData::new_u64(1);
const CHANNEL: epoll::EventData = epoll::EventData::new_u64(2);
const CALLS: u64 = 1024;

/// Settings of a shield.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShieldOptions {
    /// The end of a backend does not end the hypervisor's connection: the next backend continues.
    pub reconnect: bool,
}

/// Files of a connection to a backend, which the process's sandbox cannot create.
#[derive(Debug)]
pub struct BackendFiles {
    pub socket: OwnedFd,
    /// Memfd for a fresh pool.
    pub pool: OwnedFd,
    /// Pair of sockets for requests of the backend.
    pub channel: [OwnedFd; 2],
}

/// Outcome of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Worked,
    Idle,
}

/// Broken rule, or the end, of a peer.
#[derive(Debug, thiserror::Error)]
#[error("{party}: {fault}")]
pub struct Broken {
    pub party: Party,
    pub fault: ShieldFault,
}

impl Broken {
    /// Returns `true` if the peer has closed its connection, and broken no rule.
    pub fn is_end(&self) -> bool {
        matches!(self.fault, ShieldFault::Gone)
    }
}

/// Vring at the backend.
#[derive(Debug)]
struct ShieldVring {
    shadow: ShadowQueue,
    events: Events,
}

/// Wish for a connection to a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    /// None at present.
    None,
    /// From this time on.
    From(Instant),
    /// The connection is being made.
    Asked,
}

/// Shield. See the [module](super).
#[derive(Debug)]
pub struct Shield {
    options: ShieldOptions,
    device: Device,
    frontend: Option<End>,
    connection: Option<Connection>,
    wish: Wish,
    /// The hypervisor has an offer.
    has_offer: bool,
    /// The driver's features were passed on.
    has_features: bool,
    vrings: Vec<Option<ShieldVring>>,
    /// Numbers of the vrings that run.
    running: Vec<usize>,
    epoll: OwnedFd,
    /// Message that waits for the next backend.
    held: Option<ProxyMessage>,
    has_messages: bool,
    /// The hypervisor has closed its connection.
    is_frontend_gone: bool,
    /// The hypervisor's socket had no room for an answer.
    awaits_room: bool,
    rounds: u32,
    /// Counters, without the traffic of the pool of now.
    totals: ShieldTotals,
}

fn by(party: Party) -> impl Fn(ShieldFault) -> Broken {
    move |fault| Broken { party, fault }
}

/// Returns the party that broke a rule of vrings.
fn of_vrings(fault: ShieldFault) -> Broken {
    let party = match fault {
        ShieldFault::Used { .. } => Party::Backend,
        _ => Party::Frontend,
    };
    Broken { party, fault }
}

fn none() -> DeviceOffer {
    DeviceOffer { features: 0, protocol: 0, vrings: VRINGS_MAX, queues: 1, mtu: u16::MAX }
}

impl Shield {
    /// Creates a shield without peers. `signal` was created before the process's sandbox closed.
    ///
    /// # Errors
    ///
    /// Returns the system's error if descriptors are exhausted.
    pub fn new(options: ShieldOptions, signal: EventSignal) -> Result<Shield, Errno> {
        Ok(Shield {
            options,
            device: Device::new(none(), Vec::new(), PoolRule::Any, signal)?,
            frontend: None,
            connection: None,
            wish: Wish::None,
            has_offer: false,
            has_features: false,
            vrings: (0..VRINGS_MAX).map(|_| None).collect(),
            running: Vec::with_capacity(VRINGS_MAX),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            held: None,
            has_messages: false,
            is_frontend_gone: false,
            awaits_room: false,
            rounds: 0,
            totals: ShieldTotals::default(),
        })
    }

    /// Adds a file for an in-flight log, as [`Device::add_log_file`] does.
    pub fn add_log_file(&mut self, file: OwnedFd) {
        self.device.add_log_file(file);
    }

    /// Returns the number of files for in-flight logs.
    pub fn log_files(&self) -> usize {
        self.device.log_files()
    }

    /// Returns `true` while a hypervisor is connected.
    pub fn has_client(&self) -> bool {
        self.frontend.is_some()
    }

    /// Returns the pool that the backend sees, and the machine's memory, which it does not.
    pub fn memory(&self) -> (Option<HandedOver>, Option<HandedOver>) {
        let machine = self.device.memory().handed_over();
        let pool = self.connection.as_ref().filter(|_| machine.is_some());
        let pool = pool.map(|found| HandedOver { bytes: found.pool.bytes(), is_pool: true });
        (pool, machine)
    }

    /// Returns the counters since the start of the shield.
    pub fn totals(&self) -> ShieldTotals {
        let mut totals = self.totals;
        if let Some(connection) = &self.connection {
            totals.traffic.add(connection.pool.traffic);
        }
        totals
    }

    /// Begins to serve a hypervisor, once there is a backend.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn connect(&mut self, frontend: OwnedFd, now: Instant) -> Result<(), Errno> {
        // Its messages are read once there is a backend.
        epoll::add(&self.epoll, &frontend, FRONTEND, EventFlags::empty())?;
        self.frontend = Some(End::new(frontend));
        if self.wish != Wish::Asked {
            self.wish = Wish::From(now);
        }
        Ok(())
    }

    /// Returns `true`, once, if the caller shall connect to a backend.
    pub fn wants_backend(&mut self, now: Instant) -> bool {
        let is_due = matches!(self.wish, Wish::From(time) if time <= now);
        if is_due {
            self.wish = Wish::Asked;
        }
        is_due
    }

    /// Notes that a connection was made which is not used: the hypervisor has gone.
    pub fn forget_wish(&mut self) {
        self.wish = Wish::None;
    }

    /// Notes that no backend can be reached at present.
    pub fn unreachable(&mut self, now: Instant) {
        self.wish = Wish::None;
        if !self.has_client() {
        } else if self.options.reconnect {
            self.wish = Wish::From(now + RETRY_INTERVAL);
        } else {
            self.disconnect();
        }
    }

    /// Uses a connection to a backend, and a fresh pool. The chains in flight are passed to it.
    ///
    /// # Errors
    ///
    /// Returns [`Broken`]; [`Shield::lose`] disconnects the party.
    pub fn attach(&mut self, files: BackendFiles) -> Result<(), Broken> {
        let BackendFiles { socket, pool, channel } = files;
        self.wish = Wish::None;
        let failed = by(Party::Backend);
        let system = |what| move |source| ShieldFault::System { what, source };
        let pool = ShieldPool::new(pool).map_err(system("the pool")).map_err(&failed)?;
        let connection = Connection::new(socket, pool, channel).map_err(&failed)?;
        self.watch_backend(&connection)
            .map_err(|errno| failed(system("waiting for the backend")(errno.into())))?;
        self.totals.backends += 1;
        let connection = self.connection.insert(connection);
        if self.has_offer {
            // The disk may have another size than at the earlier backend.
            connection.notices.note();
            let used = self.device.features() & super::connection::PASSED;
            let missing = used & !connection.features();
            if missing != 0 {
                return Err(failed(ShieldFault::Lacks { features: missing }));
            }
        } else {
            self.has_offer = true;
            let own = feature::INDIRECT | feature::EVENT_IDX | LOG_ALL | PROTOCOL_FEATURES;
            self.device.set_offer(DeviceOffer {
                features: connection.features() | own,
                protocol: connection.protocol() | protocol::INFLIGHT | protocol::LOG_FILE,
                queues: connection.queues,
                ..none()
            });
        }
        if self.has_features {
            connection.set_features(self.device.features()).map_err(&failed)?;
        }
        for number in self.running.clone() {
            self.resume(number)?;
        }
        self.watch_frontend(EventFlags::IN);
        self.has_messages = true;
        self.synchronise()
    }

    /// Waits for events of the backend's sockets. Those of its channel are edges: a round reads it to the end, or later.
    fn watch_backend(&self, connection: &Connection) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, BACKEND, EventFlags::IN)?;
        match connection.notices.socket() {
            Some(channel) => {
                let edges = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
                epoll::add(&self.epoll, channel, CHANNEL, edges)
            }
            None => Ok(()),
        }
    }

    /// Sets the events of the hypervisor's socket. That of its end always comes.
    fn watch_frontend(&self, events: EventFlags) {
        if let Some(frontend) = &self.frontend {
            let watched = epoll::modify(&self.epoll, frontend, FRONTEND, events);
            debug_assert!(watched.is_ok(), "it was added");
        }
    }

    /// Disconnects a party, and the other one with it unless the next backend can continue.
    pub fn lose(&mut self, party: Party, now: Instant) {
        if party == Party::Backend && self.options.reconnect && self.frontend.is_some() {
            self.detach();
            self.watch_frontend(EventFlags::empty());
            self.wish = Wish::From(now + RETRY_INTERVAL);
        } else {
            self.disconnect();
        }
    }

    /// Closes the connection to the backend. Shadows keep their chains.
    fn detach(&mut self) {
        for number in &self.running {
            if let Some(vring) = &self.vrings[*number] {
                // The backend holds the file as well, so closing it does not suffice.
                let _ = epoll::delete(&self.epoll, &vring.events.call);
            }
        }
        if let Some(connection) = self.connection.take() {
            let _ = epoll::delete(&self.epoll, &connection);
            if let Some(channel) = connection.notices.socket() {
                let _ = epoll::delete(&self.epoll, channel);
            }
            self.totals.traffic.add(connection.pool.traffic);
            connection.close();
        }
    }

    /// Closes both connections, and forgets the hypervisor.
    fn disconnect(&mut self) {
        self.detach();
        for number in self.running.drain(..) {
            self.vrings[number] = None;
        }
        self.device.reset(self.epoll.as_fd());
        self.device.set_offer(none());
        self.held = None;
        (self.is_frontend_gone, self.awaits_room) = (false, false);
        (self.has_offer, self.has_features) = (false, false);
        if self.wish != Wish::Asked {
            self.wish = Wish::None;
        }
        if let Some(frontend) = self.frontend.take() {
            // Another process may hold the socket.
            let _ = epoll::delete(&self.epoll, &frontend);
            frontend.close();
        }
    }

    /// Serves one round: messages, and chains in both directions.
    ///
    /// # Errors
    ///
    /// Returns [`Broken`]; [`Shield::lose`] disconnects the party.
    pub fn round(&mut self, now: Instant) -> Result<Outcome, Broken> {
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            self.take_events(now);
        }
        let mut worked = std::mem::take(&mut self.has_messages) && self.attend(now)?;
        self.tell_change(now)?;
        worked |= self.pass_chains()?;
        Ok(if worked { Outcome::Worked } else { Outcome::Idle })
    }

    /// Passes chains in both directions. Returns `true` if there were any.
    fn pass_chains(&mut self) -> Result<bool, Broken> {
        let Some(Connection { pool, .. }) = &mut self.connection else { return Ok(false) };
        let Parts { memory, vrings: fronts, signal, dirty } = self.device.parts();
        let mut worked = false;
        for number in &self.running {
            let front = &mut fronts[*number];
            let (Some(queue), Some(vring)) = (&mut front.queue, &mut self.vrings[*number]) else {
                continue;
            };
            worked |= vring.shadow.forward(queue, memory, pool).map_err(of_vrings)?;
            if vring.shadow.publish() {
                // The backend may have filled the counter: a write would block.
                let _ = signal.signal(&vring.events.kick);
            }
            worked |= vring.shadow.complete(queue, pool, dirty).map_err(of_vrings)?;
            front.publish(signal);
            front.mark_used(dirty).map_err(|fault| of_vrings(fault.into()))?;
        }
        Ok(worked)
    }

    /// Requests events for new work. Returns `true` if there is work already.
    pub fn arm(&mut self) -> bool {
        let mut is_ready = self.has_messages;
        if self.connection.is_none() {
            return is_ready;
        }
        let Parts { vrings: fronts, .. } = self.device.parts();
        for number in &self.running {
            let (Some(queue), Some(vring)) =
                (&mut fronts[*number].queue, &mut self.vrings[*number])
            else {
                continue;
            };
            // A peer that breaks a rule is found by the next round.
            is_ready |= vring.shadow.arm(queue).unwrap_or(true);
        }
        is_ready
    }

    /// Returns the file that becomes readable when there is work.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Returns the time at which a round, or an attempt to reach a backend, is due although nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let wish = match self.wish {
            Wish::From(time) => Some(time),
            Wish::None | Wish::Asked => None,
        };
        let frontend = self.frontend.as_ref().and_then(End::deadline);
        let backend = self.connection.as_ref().and_then(Connection::deadline);
        [wish, frontend, backend].into_iter().flatten().min()
    }

    /// Clears the events that made [`Shield::wait_fd`] readable.
    pub fn clear_events(&mut self, now: Instant) {
        let Parts { vrings: fronts, .. } = self.device.parts();
        for number in &self.running {
            if let (Some(queue), Some(vring)) =
                (&mut fronts[*number].queue, &mut self.vrings[*number])
            {
                vring.shadow.suppress(queue);
            }
        }
        self.take_events(now);
    }

    /// Takes the events of the epoll, and looks at the time.
    fn take_events(&mut self, now: Instant) {
        self.has_messages |= self.deadline().is_some_and(|deadline| deadline <= now);
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: FRONTEND }; 32];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let found = epoll::wait(&self.epoll, &mut events[..], Some(&none)).unwrap_or(0);
        let is_message = |event: &epoll::Event| {
            [FRONTEND, BACKEND, CHANNEL].map(|own| own.u64()).contains(&event.data.u64())
        };
        self.has_messages |= events[..found].iter().any(is_message);
        self.is_frontend_gone |= events[..found].iter().any(|event| {
            let flags = event.flags;
            event.data.u64() == FRONTEND.u64() && flags.contains(EventFlags::HUP)
        });
    }

    /// Handles messages that are there. Returns `true` if there were any.
    fn attend(&mut self, now: Instant) -> Result<bool, Broken> {
        if let Some(connection) = &mut self.connection {
            connection.check_silence().map_err(by(Party::Backend))?;
            connection.check_time(now).map_err(by(Party::Backend))?;
            let served = connection.notices.serve(now);
            served.map_err(|fault| by(Party::Backend)(fault.into()))?;
        }
        let gone = || by(Party::Frontend)(ShieldFault::Gone);
        let failed = |fault: ProxyFault| by(Party::Frontend)(fault.into());
        for work in 0..MESSAGES_PER_ROUND {
            let Some(frontend) = &mut self.frontend else { return Ok(work > 0) };
            if self.connection.is_none() {
                return if self.is_frontend_gone { Err(gone()) } else { Ok(work > 0) };
            }
            if !frontend.flush().map_err(failed)? {
                return Err(gone());
            }
            if frontend.is_full() != self.awaits_room {
                self.awaits_room = frontend.is_full();
                let room = if self.awaits_room { EventFlags::OUT } else { EventFlags::empty() };
                self.watch_frontend(EventFlags::IN | room);
            }
            if self.awaits_room {
                return Ok(work > 0);
            }
            if let Some(message) = self.held.take() {
                self.handle(message)?;
                continue;
            }
            let Some(frontend) = &mut self.frontend else { return Ok(work > 0) };
            match frontend.receive(Kind::Request).map_err(failed)? {
                Incoming::Nothing => {
                    frontend.check_time(now).map_err(failed)?;
                    return Ok(work > 0);
                }
                Incoming::Gone => return Err(gone()),
                Incoming::Message(message) => self.handle(message)?,
            }
        }
        self.has_messages = true;
        Ok(true)
    }

    /// Tells the hypervisor that the configuration space has changed, if it has.
    fn tell_change(&mut self, now: Instant) -> Result<(), Broken> {
        let notices = self.connection.as_mut().map(|connection| &mut connection.notices);
        let Some(notices) = notices.filter(|notices| notices.is_due()) else { return Ok(()) };
        let had_room = match self.device.tell_change() {
            Ok(()) => true,
            Err(ClientFault::System { source: Errno::AGAIN, .. }) => false,
            Err(fault) => return Err(by(Party::Frontend)(fault.into())),
        };
        notices.told(had_room, now);
        self.totals.notices += u64::from(had_room);
        Ok(())
    }
}
