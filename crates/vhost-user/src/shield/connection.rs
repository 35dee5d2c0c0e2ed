//! Connection to a backend, towards which the shield is the frontend. It waits for each answer.

// #syscall shield ppoll: an answer of the backend
// #syscall shield fcntl 1=F_DUPFD_CLOEXEC: descriptors of the pool and of eventfds for the backend

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_ring::split::QueueFeatures;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::poll::wait_any;
use ringfence_wire::vhost_user::{
    self, PROTOCOL_FEATURES, memory_table, number, protocol_feature as protocol,
};
use ringfence_wire::virtio::feature;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;

use super::fault::ShieldFault;
use super::pool::ShieldPool;
use super::shadow::ShadowQueue;
use crate::proxy::ProxyFault;
use crate::proxy::end::{End, Incoming, Kind, Outgoing};
use crate::proxy::notices::Notices;
use crate::proxy::table;

/// Maximum wait for an answer of the backend. A disk answers once its I/O in progress has ended.
pub const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Features of a kind of device, and the form of integers. All others are of vrings and the transport.
pub(super) const PASSED: u64 = ((1 << 24) - 1) | feature::VERSION_1 | !((1 << 50) - 1);
/// Protocol features of a backend that a hypervisor can use.
pub(super) const PASSED_PROTOCOL: u64 =
    protocol::MULTIQUEUE | protocol::CONFIG | protocol::RARP | protocol::MTU;
/// Features of vrings that the shield uses where a backend has them.
const OF_VRINGS: u64 = feature::INDIRECT | feature::EVENT_IDX;
/// Maximum of queues, or of their pairs.
pub(super) const QUEUES_MAX: u16 = 64;

/// Connection to a backend, and the pool that it sees.
#[derive(Debug)]
pub(super) struct Connection {
    end: End,
    pub(super) notices: Notices,
    pub(super) pool: ShieldPool,
    features: u64,
    protocol: u64,
    pub(super) queues: u16,
    /// The backend has the pool.
    has_pool: bool,
}

/// Eventfds of a vring at the backend.
#[derive(Debug)]
pub(super) struct Events {
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
}

// #syscall shield eventfd2: kicks and calls between the shield and a backend
impl Events {
    pub(super) fn new() -> Result<Events, ShieldFault> {
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let system =
            |errno: Errno| ShieldFault::System { what: "an eventfd", source: errno.into() };
        Ok(Events { kick: event().map_err(system)?, call: event().map_err(system)? })
    }
}

/// Wait for calls of one vring. A call is an edge of its eventfd: a backend could make a read of the counter block.
#[derive(Debug)]
pub(super) struct Calls(OwnedFd);

// #syscall shield epoll_create1,epoll_ctl: waiting for calls of one vring
// #syscall shield epoll_pwait,epoll_pwait2: each call once
impl Calls {
    pub(super) fn new(events: &Events) -> Result<Calls, ShieldFault> {
        let watched = || {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let edges = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, &events.call, epoll::EventData::new_u64(0), edges)?;
            Ok(Calls(epoll))
        };
        let what = "waiting for calls";
        watched().map_err(|errno: Errno| ShieldFault::System { what, source: errno.into() })
    }

    /// Forgets the calls until now.
    fn clear(&self) {
        let mut events =
            [epoll::Event { flags: EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        // Without a call there is nothing to forget.
        let _ = epoll::wait(&self.0, &mut events[..], Some(&none));
    }
}

impl Connection {
    /// Negotiates with a backend. `channel` is a pair of sockets for its requests.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault`] for a backend that breaks a rule, is silent, or has no protocol features.
    pub(super) fn new(
        socket: OwnedFd,
        pool: ShieldPool,
        channel: [OwnedFd; 2],
    ) -> Result<Connection, ShieldFault> {
        let (end, notices) = (End::new(socket), Notices::default());
        let (features, protocol, queues) = (0, 0, 1);
        let has_pool = false;
        let mut made = Connection { end, notices, pool, features, protocol, queues, has_pool };
        if let Err(fault) = made.negotiate(channel) {
            made.close();
            return Err(fault);
        }
        Ok(made)
    }

    fn negotiate(&mut self, channel: [OwnedFd; 2]) -> Result<(), ShieldFault> {
        self.features = self.ask_word(number::GET_FEATURES)?;
        if self.features & PROTOCOL_FEATURES == 0 {
            return Err(ProxyFault::TooOld.into());
        }
        let offered = self.ask_word(number::GET_PROTOCOL_FEATURES)?;
        let own = protocol::REPLY_ACK | protocol::BACKEND_REQ;
        let mut chosen = offered & (PASSED_PROTOCOL | own);
        if chosen & protocol::CONFIG == 0 {
            // The only request of a backend that passes is about its configuration space.
            chosen &= !protocol::BACKEND_REQ;
        }
        self.order(number::SET_PROTOCOL_FEATURES, &chosen.to_ne_bytes(), None)?;
        self.protocol = chosen;
        if chosen & protocol::MULTIQUEUE != 0 {
            let queues = self.ask_word(number::GET_QUEUE_NUM)?;
            self.queues = u16::try_from(queues).unwrap_or(QUEUES_MAX).clamp(1, QUEUES_MAX);
        }
        self.order(number::SET_OWNER, &[], None)?;
        if chosen & protocol::BACKEND_REQ != 0 {
            let [own, theirs] = channel;
            self.notices = Notices::new(own, chosen);
            self.order(number::SET_BACKEND_REQ_FD, &[], Some(theirs))?;
        }
        Ok(())
    }

    /// Returns the features of the device that a hypervisor is offered.
    pub(super) fn features(&self) -> u64 {
        self.features & PASSED
    }

    /// Returns the protocol features that a hypervisor is offered.
    pub(super) fn protocol(&self) -> u64 {
        self.protocol & PASSED_PROTOCOL
    }

    /// Returns the features of the backend's vrings.
    pub(super) fn vring_features(&self) -> QueueFeatures {
        let has = |feature| self.features & feature != 0;
        let (indirect, event_idx) = (has(feature::INDIRECT), has(feature::EVENT_IDX));
        QueueFeatures { indirect, event_idx, in_order: false }
    }

    /// Passes the features that a driver uses, and the pool.
    pub(super) fn set_features(&mut self, features: u64) -> Result<(), ShieldFault> {
        let chosen = features & PASSED | self.features & OF_VRINGS | PROTOCOL_FEATURES;
        self.order(number::SET_FEATURES, &chosen.to_ne_bytes(), None)?;
        if !self.has_pool {
            let file = self.pool.file().try_clone_to_owned();
            let file = file.map_err(|source| ShieldFault::System { what: "the pool", source })?;
            let table = memory_table(&[self.pool.region()]);
            self.order(number::SET_MEM_TABLE, &table, Some(file))?;
            self.has_pool = true;
        }
        Ok(())
    }

    /// Starts a vring at the backend.
    pub(super) fn start(
        &mut self,
        index: u32,
        shadow: &ShadowQueue,
        events: &Events,
    ) -> Result<(), ShieldFault> {
        let state = |value: u32| [index, value].map(u32::to_ne_bytes).concat();
        let [descriptors, used, available] = shadow.tables();
        let tables = [descriptors, used, available, 0].map(u64::to_ne_bytes).concat();
        let word = u64::from(index).to_ne_bytes();
        let copy = |file: &OwnedFd| {
            let copy = file.try_clone();
            copy.map_err(|source| ShieldFault::System { what: "an eventfd", source })
        };
        self.order(number::SET_VRING_NUM, &state(shadow.size().into()), None)?;
        self.order(number::SET_VRING_BASE, &state(0), None)?;
        self.order(number::SET_VRING_ADDR, &[state(0), tables].concat(), None)?;
        self.order(number::SET_VRING_CALL, &word, Some(copy(&events.call)?))?;
        self.order(number::SET_VRING_KICK, &word, Some(copy(&events.kick)?))?;
        self.order(number::SET_VRING_ENABLE, &state(1), None)
    }

    /// Stops a vring at the backend, which then uses no further chain of it.
    pub(super) fn stop(&mut self, index: u32) -> Result<(), ShieldFault> {
        let state = [index, 0].map(u32::to_ne_bytes).concat();
        self.ask(number::GET_VRING_BASE, &state, 8).map(drop)
    }

    fn ask_word(&mut self, number: u32) -> Result<u64, ShieldFault> {
        let answer = self.ask(number, &[], 8)?;
        Ok(answer.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
    }

    /// Sends a request, and returns the payload of its answer, which has `len` bytes.
    pub(super) fn ask(
        &mut self,
        number: u32,
        payload: &[u8],
        len: usize,
    ) -> Result<Vec<u8>, ShieldFault> {
        let bytes = vhost_user::request(number, false, payload);
        self.end.send(Outgoing::new(bytes, Descriptors::default()));
        self.answer(number, len)
    }

    /// Sends a request without an answer of its own, with at most one file. Waits until the backend has carried it out, if it
    /// can tell.
    pub(super) fn order(
        &mut self,
        number: u32,
        payload: &[u8],
        file: Option<OwnedFd>,
    ) -> Result<(), ShieldFault> {
        let acknowledges = self.protocol & protocol::REPLY_ACK != 0;
        let bytes = vhost_user::request(number, acknowledges, payload);
        let files: Vec<_> = file.into_iter().collect();
        self.end.send(Outgoing::new(bytes, files.into()));
        if !acknowledges {
            return self.flush(name_of(number));
        }
        let answer = self.answer(number, 8)?;
        match answer.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)) {
            0 => Ok(()),
            value => Err(ShieldFault::Failed { name: name_of(number), value }),
        }
    }

    /// Waits until a request is sent.
    fn flush(&mut self, name: &'static str) -> Result<(), ShieldFault> {
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            if !self.end.flush()? {
                return Err(ShieldFault::Gone);
            }
            if !self.end.is_full() {
                return Ok(());
            }
            self.wait(PollFlags::OUT, name, deadline)?;
        }
    }

    /// Waits for an answer. Returns its payload.
    fn answer(&mut self, number: u32, len: usize) -> Result<Vec<u8>, ShieldFault> {
        let name = name_of(number);
        self.flush(name)?;
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            match self.end.receive(Kind::Answer)? {
                Incoming::Nothing => self.wait(PollFlags::IN, name, deadline)?,
                Incoming::Gone => return Err(ShieldFault::Gone),
                Incoming::Message(message) => {
                    let (found, found_len) = (message.header.request, message.payload.len());
                    // A device that has no such configuration answers without a payload.
                    let is_empty = number == number::GET_CONFIG && found_len == 0;
                    if found != number || found_len != len && !is_empty {
                        return Err(ProxyFault::Answer { found, len: found_len, name }.into());
                    }
                    return Ok(message.payload);
                }
            }
        }
    }

    /// Waits for the event at most until the deadline, and serves the backend's requests: it may wait for an acknowledgement
    /// before it answers.
    fn wait(
        &mut self,
        event: PollFlags,
        name: &'static str,
        deadline: Instant,
    ) -> Result<(), ShieldFault> {
        self.wait_with(None, (event, name), deadline)
    }

    /// Waits for a call of a vring at most until the deadline, as for an answer.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault`] for a backend that leaves, breaks a rule, or is silent until the deadline.
    pub(super) fn wait_call(
        &mut self,
        calls: &Calls,
        deadline: Instant,
    ) -> Result<(), ShieldFault> {
        self.wait_with(Some(&calls.0), (PollFlags::IN, "a request in flight"), deadline)?;
        calls.clear();
        self.check_silence()
    }

    fn wait_with(
        &mut self,
        calls: Option<&OwnedFd>,
        (event, name): (PollFlags, &'static str),
        deadline: Instant,
    ) -> Result<(), ShieldFault> {
        let now = Instant::now();
        if deadline <= now {
            return Err(ShieldFault::Silent { name, seconds: ANSWER_MAX.as_secs() });
        }
        self.notices.serve(now)?;
        let until = self.notices.deadline().map_or(deadline, |due| due.min(deadline));
        let calls = calls.map(|calls| PollFd::new(calls, PollFlags::IN));
        let own = [PollFd::new(&self.end, event)];
        let mut files: Vec<_> = own.into_iter().chain(calls).chain(self.notices.wait()).collect();
        let waited = wait_any(&mut files, Some(until));
        waited.map_err(|source| ShieldFault::System { what: "waiting for the backend", source })?;
        Ok(())
    }

    /// Checks that the backend is there and sends nothing: it was not asked.
    pub(super) fn check_silence(&mut self) -> Result<(), ShieldFault> {
        match self.end.receive(Kind::Answer)? {
            Incoming::Nothing => Ok(()),
            Incoming::Gone => Err(ShieldFault::Gone),
            Incoming::Message(_) => Err(ProxyFault::Unsolicited.into()),
        }
    }

    /// Returns the time at which half of a message is a fault, or a notice is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.end.deadline(), self.notices.deadline()].into_iter().flatten().min()
    }

    /// Checks that the rest of a message is not overdue.
    pub(super) fn check_time(&self, now: Instant) -> Result<(), ShieldFault> {
        Ok(self.end.check_time(now)?)
    }

    /// Closes the connection and the channel without waiting.
    pub(super) fn close(mut self) {
        self.notices.close();
        self.end.close();
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

/// Returns the name of a request.
fn name_of(number: u32) -> &'static str {
    table::request(number).map_or("a request", |row| row.name)
}
