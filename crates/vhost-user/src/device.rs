//! State of the device that a hypervisor sets up: features, memory, vrings, and the log of chains in flight.
//!
//! ```text
//! SET_FEATURES, SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG   the device
//! SET_VRING_NUM, _BASE, _ADDR, _KICK, _CALL, _ENABLE      a vring: runs once all are there
//! GET_VRING_BASE                                          stops a vring
//! GET_INFLIGHT_FD, SET_INFLIGHT_FD                        the log, which the hypervisor keeps for the next backend
//! SET_LOG_BASE                                            the log of written pages, of a device that offers LOG_ALL
//! ```
//!
//! A vring that runs has a [queue](Vring::queue) in mapped memory. It stops while a region with its tables is removed: QEMU
//! removes and adds a region to change it. The device of a disk has no chain in flight while it handles
//! a request that changes memory or vrings ([`Request::is_question`]).

mod vrings;

use std::os::fd::{BorrowedFd, OwnedFd};

use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_sys::event_signal::EventSignal;
use ringfence_wire::vhost_user::{
    ConfigPart, DirtyArea, InflightArea, LOG_ALL, Request, VringState, config_changed,
    protocol_feature,
};
use ringfence_wire::virtio::feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType, sockopt};

use super::dirty::DirtyLog;
use super::fault::ClientFault;
use super::inflight::PassedLog;
use super::memory::{GuestMemory, SLOTS_MAX};
use super::pool::PoolRule;

pub use vrings::Vring;

/// Properties that a kind of device offers.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOffer {
    /// Features that a driver may use.
    pub features: u64,
    /// Protocol features beyond [`PROTOCOL`] and the slots of memory.
    pub protocol: u64,
    /// Number of vrings.
    pub vrings: usize,
    /// Number of queues, or of their pairs, as the hypervisor counts them.
    pub queues: u16,
    /// Maximum length of an IP packet in bytes, of a network card that speaks [`protocol_feature::MTU`].
    pub mtu: u16,
}

impl DeviceOffer {
    /// Returns the features that a hypervisor is offered. With `ACCESS_PLATFORM` the driver uses the DMA operations of its
    /// platform, by which all that it lends lies in a pool. Without a vIOMMU the hypervisor keeps that bit to itself:
    /// descriptors have the guest's physical addresses.
    pub fn offered(&self) -> u64 {
        self.features | feature::ACCESS_PLATFORM
    }

    fn protocol(&self) -> u64 {
        self.protocol | PROTOCOL | protocol_feature::CONFIGURE_MEM_SLOTS
    }
}

/// Protocol features of every device. QEMU asks for both where `ACCESS_PLATFORM` is on.
pub const PROTOCOL: u64 = protocol_feature::REPLY_ACK | protocol_feature::BACKEND_REQ;

/// Maximum length of the file of an in-flight log in bytes.
pub const LOG_FILE_MAX: u64 = 4 << 20;

/// Answer to a request.
#[derive(Debug)]
pub enum RequestAnswer {
    /// Nothing, or an acknowledgement if the client asks for one.
    Done,
    Word(u64),
    State(VringState),
    /// Part of the configuration space, and all of it.
    Config(ConfigPart, Vec<u8>),
    /// Place and file of an in-flight log.
    Inflight(InflightArea, OwnedFd),
}

/// Parts of a device that serve its vrings.
pub struct Parts<'a> {
    pub memory: &'a GuestMemory,
    pub vrings: &'a mut [Vring],
    /// Interrupts drivers.
    pub signal: &'a EventSignal,
    pub dirty: &'a DirtyLog,
}

/// Device of one client.
#[derive(Debug)]
pub struct Device {
    offer: DeviceOffer,
    features: u64,
    protocol: u64,
    rule: PoolRule,
    /// Configuration space.
    config: Vec<u8>,
    memory: GuestMemory,
    /// Vrings, as many as the offer has.
    pub vrings: Vec<Vring>,
    /// Socket of the hypervisor for requests: a change of the configuration space. A hypervisor complains when it is closed.
    /// Closing it can block, so [`Descriptors`] disposes of it.
    requests: Descriptors,
    log: Option<PassedLog>,
    dirty: DirtyLog,
    /// Files for in-flight logs: memory without content.
    log_files: Vec<OwnedFd>,
    /// Identity that all eventfds have.
    of_eventfds: FileIdentity,
    /// Interrupts drivers. The counter of a client's eventfd can be full at any time.
    signal: EventSignal,
}

// #syscall disk,shield sendto: a change of the configuration space
// #syscall uplink,disk,card,shield getsockopt 1=SOL_SOCKET: the type of a socket for requests
// #syscall uplink,disk,card,shield eventfd2: what the files of vrings are compared with
impl Device {
    /// Creates a device that nobody has set up, and that accepts memory by this rule. `signal` interrupts the driver; a
    /// process creates it before its sandbox closes.
    ///
    /// # Errors
    ///
    /// Returns the system's error if descriptors are exhausted.
    pub fn new(
        offer: DeviceOffer,
        config: Vec<u8>,
        rule: PoolRule,
        signal: EventSignal,
    ) -> Result<Device, Errno> {
        let of_eventfds = identity(eventfd(0, EventfdFlags::CLOEXEC)?)?;
        let (memory, requests) = Default::default();
        let vrings = (0..offer.vrings).map(|_| Vring::default()).collect();
        let (features, protocol) = (0, 0);
        let (log, dirty, log_files) = Default::default();
        Ok(Device {
            offer,
            features,
            protocol,
            rule,
            config,
            memory,
            vrings,
            requests,
            log,
            dirty,
            log_files,
            of_eventfds,
            signal,
        })
    }

    /// Forgets everything that a client has set up.
    pub fn reset(&mut self, epoll: BorrowedFd<'_>) {
        (self.features, self.protocol) = (0, 0);
        for vring in &mut self.vrings {
            vring.remove_kick(epoll);
            *vring = Vring::default();
        }
        self.memory = GuestMemory::default();
        self.requests = Descriptors::default();
        (self.log, self.dirty) = Default::default();
    }

    /// Replaces the offer, before a client uses it. The number of vrings stays.
    pub fn set_offer(&mut self, offer: DeviceOffer) {
        self.offer = DeviceOffer { vrings: self.vrings.len(), ..offer };
    }

    /// Adds a file for an in-flight log: a memfd of [`LOG_FILE_MAX`] bytes, all 0.
    pub fn add_log_file(&mut self, file: OwnedFd) {
        self.log_files.push(file);
    }

    /// Returns the number of files for in-flight logs.
    pub fn log_files(&self) -> usize {
        self.log_files.len()
    }

    /// Returns the memory that the hypervisor has handed over.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Returns the parts that serve the vrings.
    pub fn parts(&mut self) -> Parts<'_> {
        let Device { memory, vrings, signal, dirty, .. } = self;
        Parts { memory, vrings, signal, dirty }
    }

    /// Replaces the configuration space, and tells the hypervisor.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`] for a hypervisor that does not read its requests; it is to be disconnected.
    pub fn set_config(&mut self, config: Vec<u8>) -> Result<(), ClientFault> {
        self.config = config;
        self.tell_change()
    }

    /// Tells the hypervisor of a change of the configuration space, if it has passed a socket for requests.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`], with `EAGAIN` if that socket has no room.
    pub fn tell_change(&self) -> Result<(), ClientFault> {
        let socket = self.requests.each().next();
        let Some(socket) = socket.filter(|_| self.speaks(protocol_feature::CONFIG)) else {
            return Ok(());
        };
        let message = config_changed();
        match rustix::net::send(socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(bytes) if bytes == message.len() => Ok(()),
            Ok(bytes) => Err(ClientFault::Partial { bytes, len: message.len() }),
            // A hypervisor that has closed it reads the configuration space when it needs that.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(source) => Err(ClientFault::System { what: "telling a change", source }),
        }
    }

    /// Returns the negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns `true` if all these features were negotiated.
    pub fn has(&self, features: u64) -> bool {
        self.features & features == features
    }

    /// Returns `true` if any of these protocol features was negotiated.
    pub fn speaks(&self, feature: u64) -> bool {
        self.protocol & feature != 0
    }

    /// Returns `true` if requests without an answer are acknowledged on demand.
    pub fn acknowledges(&self) -> bool {
        self.speaks(protocol_feature::REPLY_ACK)
    }

    /// Carries out a request. `files` came with it.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`]; the client is to be disconnected.
    pub fn handle(
        &mut self,
        request: Request,
        files: Descriptors,
        epoll: BorrowedFd<'_>,
    ) -> Result<RequestAnswer, ClientFault> {
        match request {
            Request::GetFeatures => return Ok(RequestAnswer::Word(self.offer.offered())),
            Request::GetProtocolFeatures => return Ok(RequestAnswer::Word(self.offer.protocol())),
            Request::GetQueueCount => {
                return Ok(RequestAnswer::Word(self.offer.queues.into()));
            }
            Request::GetVringBase(state) => return self.stop(state, epoll),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::GetConfig(part) if self.speaks(protocol_feature::CONFIG) => {
                return Ok(RequestAnswer::Config(part, self.config.clone()));
            }
            Request::GetInflight(area) if self.speaks(protocol_feature::INFLIGHT) => {
                return self.new_log(area);
            }
            Request::SetInflight(area) if self.speaks(protocol_feature::INFLIGHT) => {
                return self.set_log(area, files);
            }
            Request::SetProtocolFeatures(features) => match features & !self.offer.protocol() {
                0 => self.protocol = features,
                features => return Err(ClientFault::ProtocolFeatures { features }),
            },
            Request::SetMtu(mtu) if self.speaks(protocol_feature::MTU) => self.check_mtu(mtu)?,
            Request::SetBackendSocket => self.set_requests(files)?,
            // The process belongs to this client alone.
            Request::SetOwner => {}
            Request::ResetOwner => self.reset(epoll),
            Request::SetMemoryTable(_) | Request::AddRegion(_) | Request::RemoveRegion(_) => {
                self.set_memory(request, files)?;
            }
            Request::GetMemorySlots if self.speaks(protocol_feature::CONFIGURE_MEM_SLOTS) => {
                return Ok(RequestAnswer::Word(SLOTS_MAX as u64));
            }
            Request::SetLog(area) if self.speaks(protocol_feature::LOG_FILE) => {
                return self.set_dirty_log(area, files);
            }
            Request::SetVringSize(_)
            | Request::SetVringBase(_)
            | Request::SetVringAddress(_)
            | Request::SetVringKick(_)
            | Request::SetVringCall(_)
            | Request::SetVringError(_)
            | Request::SetVringEnable(_) => self.set_vring(request, files, epoll)?,
            Request::GetConfig(_)
            | Request::GetInflight(_)
            | Request::SetInflight(_)
            | Request::SetLog(_)
            | Request::GetMemorySlots
            | Request::SetMtu(_) => return Err(ClientFault::Protocol),
            Request::Unknown(request) => return Err(ClientFault::Request { request }),
        }
        Ok(RequestAnswer::Done)
    }

    /// Changes the memory. Vrings that run find their tables in it, or stop until they are there again.
    fn set_memory(&mut self, request: Request, files: Descriptors) -> Result<(), ClientFault> {
        match request {
            Request::SetMemoryTable(regions) => {
                self.memory = GuestMemory::map(&regions, files, self.rule)?;
            }
            _ if !self.speaks(protocol_feature::CONFIGURE_MEM_SLOTS) => {
                return Err(ClientFault::Protocol);
            }
            Request::AddRegion(region) => self.memory.add(region, files, self.rule)?,
            // Earlier versions of the protocol have a file here. It is closed.
            Request::RemoveRegion(region) => {
                self.memory.remove(&region, self.rule)?;
                self.stop_without_memory();
            }
            _ => {}
        }
        self.move_all()
    }

    /// Checks that the card carries packets of the hypervisor's MTU.
    fn check_mtu(&self, mtu: u64) -> Result<(), ClientFault> {
        let max = self.offer.mtu;
        if mtu > max.into() {
            return Err(ClientFault::Mtu { mtu, max });
        }
        Ok(())
    }

    /// Takes the features that the driver uses.
    fn set_features(&mut self, features: u64) -> Result<(), ClientFault> {
        let offered = self.offer.features;
        if features & !offered == feature::ACCESS_PLATFORM {
            return Err(ClientFault::Translated);
        }
        match features & !offered {
            0 => self.features = features,
            features => return Err(ClientFault::Features { features }),
        }
        self.dirty.switch(self.has(LOG_ALL));
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

    /// Maps the log of written pages. If pages were to be marked before, all of them are: a hypervisor that connects again
    /// switches marks on first.
    fn set_dirty_log(
        &mut self,
        area: DirtyArea,
        files: Descriptors,
    ) -> Result<RequestAnswer, ClientFault> {
        if self.dirty.map(area, files)? {
            self.memory.extents().try_for_each(|(start, len)| self.dirty.mark(start, len))?;
        }
        // A hypervisor waits for this answer without having asked for one.
        Ok(RequestAnswer::Word(0))
    }

    /// Returns a file for a log of so many queues of that size, and its place.
    fn new_log(&mut self, area: InflightArea) -> Result<RequestAnswer, ClientFault> {
        let len = PassedLog::bytes(area, self.vrings.len())?;
        let file = self.log_files.pop().ok_or(ClientFault::NoLogFile)?;
        Ok(RequestAnswer::Inflight(InflightArea { len, offset: 0, ..area }, file))
    }

    /// Maps the log that the hypervisor has kept, or has just been given. Vrings that start use it.
    fn set_log(
        &mut self,
        area: InflightArea,
        files: Descriptors,
    ) -> Result<RequestAnswer, ClientFault> {
        if self.vrings.iter().any(|vring| vring.queue.is_some()) {
            let InflightArea { len, queues, queue_size, .. } = area;
            return Err(ClientFault::Log { queues, queue_size, len });
        }
        self.log = Some(PassedLog::map(area, files, self.vrings.len())?);
        Ok(RequestAnswer::Done)
    }
}
