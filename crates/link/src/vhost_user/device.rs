//! State of the network device that a hypervisor sets up: features, memory, and two vrings.
//!
//! ```text
//! SET_FEATURES, SET_MEM_TABLE                             the device
//! SET_VRING_NUM, _BASE, _ADDR, _KICK, _CALL, _ENABLE      a vring: runs once all are there
//! GET_VRING_BASE                                          stops a vring
//! ```
//!
//! A vring that runs has a [`BackendQueue`] in mapped memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use ringfence_ring::split::QueueFeatures;
use ringfence_ring::split::backend::{BackendQueue, QueueTables};
use ringfence_sys::descriptors::{Descriptors, FileIdentity, dispose, identity};
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::vhost_user::{
    PROTOCOL_FEATURES, Request, VringAddress, VringFile, VringState, protocol_feature,
};
use ringfence_wire::virtio::feature;
use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SocketType, sockopt};

use super::fault::ClientFault;
use super::memory::{GuestMemory, only};
use super::pool::PoolRule;

/// Vring with buffers for frames to the guest.
pub(super) const TO_GUEST: usize = 0;
/// Vring with frames from the guest.
pub(super) const FROM_GUEST: usize = 1;
/// Number of vrings: one pair of queues.
const VRINGS: usize = 2;

/// Features that a driver may use.
pub(super) const FEATURES: u64 = feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::HOST_ECN
    | feature::MRG_RXBUF
    | feature::INDIRECT
    | feature::EVENT_IDX
    | feature::VERSION_1
    | PROTOCOL_FEATURES;
/// Features that a hypervisor is offered. With `ACCESS_PLATFORM` the driver uses the DMA operations of its platform, by
/// which all that it lends lies in a pool. Without a vIOMMU the hypervisor keeps that bit to itself: descriptors have the
/// guest's physical addresses.
pub(super) const OFFERED: u64 = FEATURES | feature::ACCESS_PLATFORM;
/// Protocol features that a hypervisor may use. QEMU asks for both where `ACCESS_PLATFORM` is on.
const PROTOCOL: u64 = protocol_feature::REPLY_ACK | protocol_feature::BACKEND_REQ;

/// First number of the vrings' kicks among the events of the epoll.
const KICKS: u64 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestAnswer {
    /// Nothing, or an acknowledgement if the client asks for one.
    Done,
    Word(u64),
    State(VringState),
}

/// Vring as the hypervisor has set it up.
#[derive(Debug, Default)]
pub(super) struct Vring {
    size: u32,
    /// Next available index of a vring that does not run.
    base: u16,
    address: Option<VringAddress>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    is_enabled: bool,
    /// Present while the vring runs.
    pub(super) queue: Option<BackendQueue>,
}

/// Network device of one client.
#[derive(Debug)]
pub(super) struct Device {
    features: u64,
    protocol: u64,
    rule: PoolRule,
    pub(super) memory: GuestMemory,
    pub(super) vrings: [Vring; VRINGS],
    /// Socket of the hypervisor for requests, of which there are none. A hypervisor complains when it is closed.
    /// Closing it can block, so [`Descriptors`] disposes of it.
    requests: Descriptors,
    /// Identity that all eventfds have.
    of_eventfds: FileIdentity,
    /// Interrupts drivers. The counter of a client's eventfd can be full at any time.
    pub(super) signal: EventSignal,
}

// #syscall uplink getsockopt 1=SOL_SOCKET: the type of a socket for requests
// #syscall uplink eventfd2: what the files of vrings are compared with
// #syscall uplink epoll_ctl: waiting for kicks of a virtual machine
impl Device {
    /// Creates a device that nobody has set up, and that accepts memory by this rule.
    pub(super) fn new(rule: PoolRule) -> Result<Device, Errno> {
        let of_eventfds = identity(eventfd(0, EventfdFlags::CLOEXEC)?)?;
        let (memory, vrings, requests) = Default::default();
        let signal = EventSignal::new()?;
        let (features, protocol) = (0, 0);
        Ok(Device { features, protocol, rule, memory, vrings, requests, of_eventfds, signal })
    }

    /// Forgets everything that a client has set up.
    pub(super) fn reset(&mut self, epoll: BorrowedFd<'_>) {
        (self.features, self.protocol) = (0, 0);
        for vring in &mut self.vrings {
            vring.remove_kick(epoll);
            *vring = Vring::default();
        }
        self.memory = GuestMemory::default();
        self.requests = Descriptors::default();
    }

    pub(super) fn features(&self) -> u64 {
        self.features
    }

    /// Returns `true` if all these features were negotiated.
    pub(super) fn has(&self, features: u64) -> bool {
        self.features & features == features
    }

    /// Returns `true` if requests without an answer are acknowledged on demand.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol & protocol_feature::REPLY_ACK != 0
    }

    /// Carries out a request. `files` came with it.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`]; the client is to be disconnected.
    pub(super) fn handle(
        &mut self,
        request: Request,
        files: Descriptors,
        epoll: BorrowedFd<'_>,
    ) -> Result<RequestAnswer, ClientFault> {
        match request {
            Request::GetFeatures => return Ok(RequestAnswer::Word(OFFERED)),
            Request::GetProtocolFeatures => return Ok(RequestAnswer::Word(PROTOCOL)),
            Request::GetQueueCount => return Ok(RequestAnswer::Word(1)),
            Request::GetVringBase(state) => {
                return self.stop(state, epoll).map(RequestAnswer::State);
            }
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetProtocolFeatures(features) => match features & !PROTOCOL {
                0 => self.protocol = features,
                features => return Err(ClientFault::ProtocolFeatures { features }),
            },
            Request::SetBackendSocket => self.set_requests(files)?,
            // The process belongs to this client alone.
            Request::SetOwner => {}
            Request::ResetOwner => self.reset(epoll),
            Request::SetMemoryTable(regions) => {
                self.memory = GuestMemory::map(&regions, files, self.rule)?;
                self.move_all()?;
            }
            Request::SetVringSize(VringState { index, value }) => {
                QueueTables::lengths(value)?;
                self.stopped(index)?.size = value;
            }
            Request::SetVringBase(VringState { index, value }) => {
                let base = u16::try_from(value).map_err(|_| ClientFault::Value { index, value })?;
                self.stopped(index)?.base = base;
            }
            Request::SetVringAddress(address) => {
                let vring = self.vring(address.index)?;
                if address.flags != 0 {
                    let VringAddress { index, flags: value, .. } = address;
                    return Err(ClientFault::Value { index, value });
                }
                vring.address = Some(address);
                self.move_all()?;
            }
            Request::SetVringKick(file) => self.set_kick(file, files, epoll)?,
            Request::SetVringCall(file) => {
                let call = self.event(file, files)?;
                self.vring(file.index)?.call = call;
            }
            // Errors end the connection.
            Request::SetVringError(file) => drop(self.event(file, files)?),
            Request::SetVringEnable(VringState { index, value }) => {
                self.vring(index)?.is_enabled = value != 0;
                self.run_all()?;
            }
            Request::Unknown(request) => return Err(ClientFault::Request { request }),
        }
        Ok(RequestAnswer::Done)
    }

    /// Takes the features that the driver uses.
    fn set_features(&mut self, features: u64) -> Result<(), ClientFault> {
        if features & !FEATURES == feature::ACCESS_PLATFORM {
            return Err(ClientFault::Translated);
        }
        match features & !FEATURES {
            0 => self.features = features,
            features => return Err(ClientFault::Features { features }),
        }
        self.run_all()
    }

    /// Keeps the socket for requests to the hypervisor, and closes an earlier one.
    fn set_requests(&mut self, files: Descriptors) -> Result<(), ClientFault> {
        let is_stream = |file| sockopt::socket_type(file) == Ok(SocketType::STREAM);
        match files.len() {
            1 if files.each().all(is_stream) => self.requests = files,
            1 => return Err(ClientFault::NoSocket),
            count => return Err(ClientFault::Files { count, needed: 1 }),
        }
        Ok(())
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, ClientFault> {
        let place = usize_from(index);
        self.vrings.get_mut(place).ok_or(ClientFault::Vring { index })
    }

    /// Returns a vring that must not run.
    fn stopped(&mut self, index: u32) -> Result<&mut Vring, ClientFault> {
        let vring = self.vring(index)?;
        match vring.queue {
            None => Ok(vring),
            Some(_) => Err(ClientFault::Value { index, value: 0 }),
        }
    }

    /// Returns the eventfd that came with a request.
    fn event(&self, file: VringFile, files: Descriptors) -> Result<Option<OwnedFd>, ClientFault> {
        if !file.has_file {
            return Ok(None);
        }
        let event = only(files)?;
        // A file of another kind could block in a write, or when it is closed.
        if identity(&event).is_ok_and(|found| found == self.of_eventfds) {
            return Ok(Some(event));
        }
        dispose(event);
        Err(ClientFault::NoEvent)
    }

    fn set_kick(
        &mut self,
        file: VringFile,
        files: Descriptors,
        epoll: BorrowedFd<'_>,
    ) -> Result<(), ClientFault> {
        // A vring that is to be polled has no eventfd.
        let kick = self.event(file, files)?.ok_or(ClientFault::Files { count: 0, needed: 1 })?;
        let number = KICKS + u64::from(file.index);
        let vring = self.vring(file.index)?;
        vring.remove_kick(epoll);
        // Each kick is an edge, so the counter is never read.
        let events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(epoll, &kick, epoll::EventData::new_u64(number), events)
            .map_err(|source| ClientFault::System { what: "waiting for kicks", source })?;
        vring.kick = Some(kick);
        self.run_all()
    }

    /// Stops a vring. Returns its next available index.
    fn stop(
        &mut self,
        state: VringState,
        epoll: BorrowedFd<'_>,
    ) -> Result<VringState, ClientFault> {
        let vring = self.vring(state.index)?;
        vring.pause();
        vring.remove_kick(epoll);
        Ok(VringState { index: state.index, value: vring.base.into() })
    }

    /// Lets each vring run that can, and stops each that must not.
    fn run_all(&mut self) -> Result<(), ClientFault> {
        let negotiates = self.has(PROTOCOL_FEATURES);
        let features = QueueFeatures {
            indirect: self.has(feature::INDIRECT),
            event_idx: self.has(feature::EVENT_IDX),
            in_order: false,
        };
        for vring in &mut self.vrings {
            let may_run = vring.kick.is_some() && (vring.is_enabled || !negotiates);
            let Some(address) = vring.address.filter(|_| may_run && vring.size > 0) else {
                vring.pause();
                continue;
            };
            if vring.queue.is_none() {
                let tables = tables(&self.memory, address, vring.size, features.event_idx)?;
                let mut queue = BackendQueue::new(tables, features, vring.base);
                queue.suppress();
                vring.queue = Some(queue);
            }
        }
        Ok(())
    }

    /// Finds the tables of vrings that run in the memory of now.
    fn move_all(&mut self) -> Result<(), ClientFault> {
        let event_idx = self.has(feature::EVENT_IDX);
        for vring in &mut self.vrings {
            if let (Some(queue), Some(address)) = (&mut vring.queue, vring.address) {
                queue.move_to(tables(&self.memory, address, vring.size, event_idx)?);
            }
        }
        self.run_all()
    }
}

impl Vring {
    /// Stops the vring, and keeps its place.
    fn pause(&mut self) {
        if let Some(queue) = self.queue.take() {
            self.base = queue.next_available();
        }
    }

    fn remove_kick(&mut self, epoll: BorrowedFd<'_>) {
        if let Some(kick) = self.kick.take() {
            // The hypervisor holds the file as well, so closing it does not suffice.
            let removed = epoll::delete(epoll, &kick);
            debug_assert!(removed.is_ok(), "it was added");
        }
    }

    /// Publishes returned chains. Interrupts the driver if it wants that; returns `true` then.
    pub(super) fn publish(&mut self, signal: &EventSignal) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        if !queue.publish() {
            return false;
        }
        let Some(call) = &self.call else { return false };
        // A write would block if the client has filled the counter.
        let _ = signal.signal(call);
        true
    }
}

fn tables(
    memory: &GuestMemory,
    address: VringAddress,
    size: u32,
    event_idx: bool,
) -> Result<QueueTables, ClientFault> {
    let VringAddress { descriptors, available, used, .. } = address;
    let [descriptors, available, used] =
        [memory.at_user(descriptors)?, memory.at_user(available)?, memory.at_user(used)?];
    Ok(QueueTables::new(size, event_idx, [&descriptors, &available, &used])?)
}
