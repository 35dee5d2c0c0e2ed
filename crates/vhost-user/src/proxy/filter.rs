//! Filter of messages: the decision on each, and the state that decisions depend on. It sends and receives nothing.

use std::os::fd::OwnedFd;

use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_wire::vhost_user::{
    self, LOG_ALL, PROTOCOL_FEATURES, Request, memory_table, number, protocol_feature as protocol,
};
use ringfence_wire::virtio::feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SocketType, sockopt};

use super::end::{Outgoing, ProxyMessage};
use super::fault::ProxyFault;
use super::pool::{HeldRegions, PoolChoice, Withheld, is_in_memory};
use super::table::{self, Answer, Decision, Length, PASSED, Row};
use crate::HandedOver;
use crate::device::{LOG_FILE_MAX, PROTOCOL};
use crate::memory::size_of;

/// Lengths of the description of an in-flight log, without and with padding.
const INFLIGHT_LENS: [usize; 2] = [20, 24];
/// Bytes before the data of a part of the configuration space.
const CONFIG_HEAD: usize = 12;

/// Answer for which the frontend waits.
#[derive(Clone, Copy, Debug)]
enum Expected {
    /// To a request that has one. Its payload has this length, or another one that the request allows.
    Own { row: &'static Row, len: usize },
    /// Acknowledgement of the backend.
    Ack(&'static Row),
    /// Answer to `GET_FEATURES` behind a request, which the backend then has carried out. The frontend gets an
    /// acknowledgement of the request.
    Barrier(&'static Row),
}

/// Messages to be sent because of one that came.
#[derive(Debug, Default)]
pub struct Actions {
    pub to_backend: Option<Outgoing>,
    pub to_frontend: Option<Outgoing>,
    /// Socket of the frontend for requests of the backend.
    pub channel: Option<NewChannel>,
}

/// Socket for requests of a backend.
#[derive(Debug)]
pub struct NewChannel {
    pub socket: OwnedFd,
    /// Protocol features of the backend, if it gets an end of its own.
    pub protocol: Option<u64>,
}

/// State of one frontend and its backend.
#[derive(Debug)]
pub struct Filter {
    choice: PoolChoice,
    /// Features that the frontend was offered.
    features: u64,
    /// Protocol features of the backend that pass.
    backend_offer: u64,
    /// Protocol features that the frontend has chosen.
    protocol: u64,
    regions: HeldRegions,
    expected: Option<Expected>,
    /// End of a channel for the backend.
    spare: Option<OwnedFd>,
    has_channel: bool,
    /// Identity that all eventfds have.
    of_eventfds: FileIdentity,
}

// #syscall proxy eventfd2: what the files of vrings are compared with
// #syscall proxy getsockopt 1=SOL_SOCKET: the type of a socket for requests
impl Filter {
    /// Creates the filter of a new frontend. `spare` is the end of a channel that the backend can get.
    ///
    /// # Errors
    ///
    /// Returns the system's error if descriptors are exhausted.
    pub fn new(choice: PoolChoice, spare: OwnedFd) -> Result<Filter, Errno> {
        let of_eventfds = identity(eventfd(0, EventfdFlags::CLOEXEC)?)?;
        Ok(Filter {
            choice,
            features: 0,
            backend_offer: 0,
            protocol: 0,
            regions: HeldRegions::default(),
            expected: None,
            spare: Some(spare),
            has_channel: false,
            of_eventfds,
        })
    }

    /// Returns `true` while the backend has to answer.
    pub fn awaits_answer(&self) -> bool {
        self.expected.is_some()
    }

    /// Returns the pool that the backend has, and the memory that it does not get.
    pub fn memory(&self) -> (Option<HandedOver>, Withheld) {
        (self.regions.lent(), self.regions.withheld())
    }

    /// Decides on a request of the frontend. The backend must owe no answer.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault`]; both are to be disconnected.
    pub fn take_request(&mut self, message: ProxyMessage) -> Result<Actions, ProxyFault> {
        let ProxyMessage { header, payload, files } = message;
        let row =
            table::request(header.request).ok_or(ProxyFault::Unknown { number: header.request })?;
        let name = row.name;
        if let Decision::Refuse(why) = row.decision {
            return Err(ProxyFault::Refused { name, why });
        }
        if row.feature & !self.protocol != 0 {
            return Err(ProxyFault::Protocol { name });
        }
        if matches!(row.length, Length::Exactly(len) if len != payload.len()) {
            return Err(ProxyFault::Length { name, len: payload.len() });
        }
        let acknowledges = self.protocol & protocol::REPLY_ACK != 0;
        let wants_ack = header.needs_reply && acknowledges && row.answer == Answer::None;
        tracing::debug!("vhost-user: {name}, {} files", files.len());
        if row.decision == Decision::Pass {
            return Ok(self.forward(row, &payload, Descriptors::default(), wants_ack));
        }
        self.apply_rule(row, &payload, files, wants_ack)
    }

    /// Decides on a request that has a rule.
    fn apply_rule(
        &mut self,
        row: &'static Row,
        payload: &[u8],
        files: Descriptors,
        wants_ack: bool,
    ) -> Result<Actions, ProxyFault> {
        let none = Descriptors::default;
        match row.number {
            number::SET_FEATURES => self.check_features(payload)?,
            number::SET_PROTOCOL_FEATURES => {
                let chosen = self.set_protocol_features(payload)?;
                return Ok(self.forward(row, &chosen.to_ne_bytes(), none(), wants_ack));
            }
            number::SET_MEM_TABLE => return self.set_memory(row, payload, files, wants_ack),
            number::ADD_MEM_REG => return self.add_region(row, payload, files, wants_ack),
            number::REM_MEM_REG => {
                if let Request::RemoveRegion(region) = Request::parse(row.number, payload)? {
                    let is_lent = self.regions.remove(&region)?;
                    return Ok(self.forward_if(is_lent, row, payload, none(), wants_ack));
                }
            }
            number::SET_VRING_ADDR => self.check_vring(payload)?,
            number::SET_VRING_KICK | number::SET_VRING_CALL | number::SET_VRING_ERR => {
                let files = self.event(row, payload, files)?;
                return Ok(self.forward(row, payload, files, wants_ack));
            }
            number::SET_BACKEND_REQ_FD => return self.set_channel(row, files, wants_ack),
            number::GET_CONFIG | table::SET_CONFIG => {
                // Both have the same fields.
                Request::parse(number::GET_CONFIG, payload)?;
            }
            number::GET_INFLIGHT_FD => check_inflight(row, payload)?,
            number::SET_INFLIGHT_FD => {
                check_inflight(row, payload)?;
                let files = self.log(row, files, 1)?;
                return Ok(self.forward(row, payload, files, wants_ack));
            }
            // Rules for the answers to these.
            _ => {}
        }
        Ok(self.forward(row, payload, none(), wants_ack))
    }

    /// Passes a request, and notes the answer that follows. A request whose acknowledgement the backend cannot send is
    /// followed by a question.
    fn forward(
        &mut self,
        row: &'static Row,
        payload: &[u8],
        files: Descriptors,
        wants_ack: bool,
    ) -> Actions {
        let backend = self.protocol & self.backend_offer;
        // Backends differ in whether new protocol features apply to the message that brings them.
        let acks =
            backend & protocol::REPLY_ACK != 0 && row.number != number::SET_PROTOCOL_FEATURES;
        let mut bytes = vhost_user::request(row.number, wants_ack && acks, payload);
        self.expected = match row.answer {
            Answer::None if !wants_ack => None,
            Answer::None if acks => Some(Expected::Ack(row)),
            Answer::None => {
                bytes.extend(vhost_user::request(number::GET_FEATURES, false, &[]));
                Some(Expected::Barrier(row))
            }
            _ => Some(Expected::Own { row, len: payload.len() }),
        };
        Actions { to_backend: Some(Outgoing::new(bytes, files)), ..Actions::default() }
    }

    /// Passes a request about memory that the backend has. Acknowledges one about other memory.
    fn forward_if(
        &mut self,
        is_lent: bool,
        row: &'static Row,
        payload: &[u8],
        files: Descriptors,
        wants_ack: bool,
    ) -> Actions {
        if is_lent {
            return self.forward(row, payload, files, wants_ack);
        }
        tracing::debug!("vhost-user: {} is not about the pool, and does not pass", row.name);
        acknowledged(row, wants_ack)
    }

    fn check_features(&self, payload: &[u8]) -> Result<(), ProxyFault> {
        let features = word(payload);
        if features & feature::ACCESS_PLATFORM != 0 {
            return Err(ProxyFault::Translated);
        }
        match features & !self.features {
            0 => Ok(()),
            features => Err(ProxyFault::Features { features }),
        }
    }

    /// Takes the protocol features that the frontend has chosen. Returns those for the backend.
    fn set_protocol_features(&mut self, payload: &[u8]) -> Result<u64, ProxyFault> {
        let chosen = word(payload);
        match chosen & !(self.backend_offer | PROTOCOL) {
            0 => self.protocol = chosen,
            features => return Err(ProxyFault::ProtocolFeatures { features }),
        }
        Ok(chosen & self.backend_offer)
    }

    /// Passes the memory table, without the regions of other memory and their files.
    fn set_memory(
        &mut self,
        row: &'static Row,
        payload: &[u8],
        mut files: Descriptors,
        wants_ack: bool,
    ) -> Result<Actions, ProxyFault> {
        let Request::SetMemoryTable(regions) = Request::parse(row.number, payload)? else {
            return Err(ProxyFault::Length { name: row.name, len: payload.len() });
        };
        let (count, needed) = (files.len(), regions.len());
        if count != needed {
            return Err(ProxyFault::Files { name: row.name, count, needed });
        }
        let is_lent = self.regions.replace(&regions, &files, &self.choice)?;
        let lent = regions.iter().zip(&is_lent).filter(|(_, is_lent)| **is_lent);
        let lent: Vec<_> = lent.map(|(region, _)| *region).collect();
        files.retain(|number| is_lent[number]);
        tracing::debug!("vhost-user: {} of {needed} regions pass", lent.len());
        Ok(self.forward(row, &memory_table(&lent), files, wants_ack))
    }

    fn add_region(
        &mut self,
        row: &'static Row,
        payload: &[u8],
        files: Descriptors,
        wants_ack: bool,
    ) -> Result<Actions, ProxyFault> {
        let Request::AddRegion(region) = Request::parse(row.number, payload)? else {
            return Err(ProxyFault::Length { name: row.name, len: payload.len() });
        };
        let count = files.len();
        let is_lent = match (count, files.each().next()) {
            (1, Some(file)) => self.regions.add(region, file, &self.choice)?,
            _ => return Err(ProxyFault::Files { name: row.name, count, needed: 1 }),
        };
        Ok(self.forward_if(is_lent, row, payload, files, wants_ack))
    }

    /// Checks that the tables of a vring lie in the pool.
    fn check_vring(&self, payload: &[u8]) -> Result<(), ProxyFault> {
        let Request::SetVringAddress(address) = Request::parse(number::SET_VRING_ADDR, payload)?
        else {
            return Ok(());
        };
        if address.flags != 0 {
            return Err(ProxyFault::Logged);
        }
        let tables = [address.descriptors, address.available, address.used];
        match tables.into_iter().find(|table| !self.regions.lends(*table)) {
            None => Ok(()),
            Some(table) => Err(ProxyFault::Vring { index: address.index, address: table }),
        }
    }

    /// Returns the eventfd of a request, if one belongs to it.
    fn event(
        &self,
        row: &'static Row,
        payload: &[u8],
        files: Descriptors,
    ) -> Result<Descriptors, ProxyFault> {
        let file = match Request::parse(row.number, payload)? {
            Request::SetVringKick(file)
            | Request::SetVringCall(file)
            | Request::SetVringError(file) => file,
            _ => return Ok(Descriptors::default()),
        };
        if !file.has_file {
            return Ok(Descriptors::default());
        }
        let (name, count) = (row.name, files.len());
        if count != 1 {
            return Err(ProxyFault::Files { name, count, needed: 1 });
        }
        let is_event = |file| identity(file).is_ok_and(|found| found == self.of_eventfds);
        let are_events = files.each().all(is_event);
        if are_events { Ok(files) } else { Err(ProxyFault::NoEvent { name }) }
    }

    /// Keeps the socket of the frontend. The backend gets an end of a channel of the proxy's, if it knows channels.
    fn set_channel(
        &mut self,
        row: &'static Row,
        files: Descriptors,
        wants_ack: bool,
    ) -> Result<Actions, ProxyFault> {
        let is_stream = |file| sockopt::socket_type(file) == Ok(SocketType::STREAM);
        if self.has_channel || !files.each().all(is_stream) {
            return Err(ProxyFault::NoSocket);
        }
        let name = row.name;
        let [socket] =
            files.exactly().map_err(|count| ProxyFault::Files { name, count, needed: 1 })?;
        self.has_channel = true;
        let chosen = self.protocol & self.backend_offer;
        let spare = self.spare.take().filter(|_| chosen & protocol::BACKEND_REQ != 0);
        let protocol = spare.is_some().then_some(chosen);
        let actions = match spare {
            Some(spare) => self.forward(row, &[], vec![spare].into(), wants_ack),
            None => acknowledged(row, wants_ack),
        };
        Ok(Actions { channel: Some(NewChannel { socket, protocol }), ..actions })
    }

    /// Returns the file of an in-flight log, of which there are between `least` and one.
    fn log(
        &self,
        row: &'static Row,
        files: Descriptors,
        least: usize,
    ) -> Result<Descriptors, ProxyFault> {
        let (name, count) = (row.name, files.len());
        if !(least..=1).contains(&count) {
            return Err(ProxyFault::Files { name, count, needed: 1 });
        }
        let is_log = |file| {
            is_in_memory(file)
                && size_of(file).is_ok_and(|size| size <= LOG_FILE_MAX)
                && identity(file).is_ok_and(|file| !self.regions.has_file(file))
        };
        let are_logs = files.each().all(is_log);
        if are_logs { Ok(files) } else { Err(ProxyFault::NoLog { name }) }
    }

    /// Decides on an answer of the backend. Returns that for the frontend.
    ///
    /// # Errors
    ///
    /// Returns [`ProxyFault`]; both are to be disconnected.
    pub fn take_answer(&mut self, message: ProxyMessage) -> Result<Outgoing, ProxyFault> {
        let ProxyMessage { header, payload, files } = message;
        let expected = self.expected.take().ok_or(ProxyFault::Unsolicited)?;
        let (found, len) = (header.request, payload.len());
        let (row, asked, is_fit) = match expected {
            Expected::Own { row, len: asked } => (row, row.number, fits(row, asked, len)),
            Expected::Ack(row) => (row, row.number, len == 8),
            Expected::Barrier(row) => (row, number::GET_FEATURES, len == 8),
        };
        if found != asked || !is_fit {
            return Err(ProxyFault::Answer { found, len, name: row.name });
        }
        let answer = match (expected, row.number) {
            (Expected::Barrier(_), _) => return Ok(acknowledgement(row)),
            (Expected::Own { .. }, number::GET_FEATURES) => self.offer(word(&payload))?,
            (Expected::Own { .. }, number::GET_PROTOCOL_FEATURES) => {
                self.backend_offer = word(&payload) & PASSED;
                self.backend_offer | PROTOCOL
            }
            (Expected::Own { .. }, number::GET_INFLIGHT_FD) => {
                let files = self.log(row, files, 0)?;
                return Ok(Outgoing::new(vhost_user::reply(found, &payload).to_vec(), files));
            }
            _ => {
                let bytes = vhost_user::reply(found, &payload).to_vec();
                return Ok(Outgoing::new(bytes, Descriptors::default()));
            }
        };
        Ok(Outgoing::new(vhost_user::reply_word(found, answer).to_vec(), Descriptors::default()))
    }

    /// Returns the features that the frontend is offered.
    fn offer(&mut self, features: u64) -> Result<u64, ProxyFault> {
        if features & PROTOCOL_FEATURES == 0 {
            return Err(ProxyFault::TooOld);
        }
        let offered = (features & !LOG_ALL) | feature::ACCESS_PLATFORM;
        self.features = offered;
        Ok(offered)
    }
}

/// Acknowledges a request that does not pass, if the frontend wants that.
fn acknowledged(row: &'static Row, wants_ack: bool) -> Actions {
    let to_frontend = wants_ack.then(|| acknowledgement(row));
    Actions { to_frontend, ..Actions::default() }
}

fn acknowledgement(row: &'static Row) -> Outgoing {
    let bytes = vhost_user::reply_word(row.number, 0).to_vec();
    Outgoing::new(bytes, Descriptors::default())
}

/// Returns `true` if an answer can have this length. `asked` is the length of the request's payload.
fn fits(row: &'static Row, asked: usize, len: usize) -> bool {
    match row.answer {
        Answer::None | Answer::Word | Answer::State => len == 8,
        // Without data for an error.
        Answer::Config => len == asked || len == 0 || len == CONFIG_HEAD,
        Answer::Inflight => INFLIGHT_LENS.contains(&len),
    }
}

fn check_inflight(row: &'static Row, payload: &[u8]) -> Result<(), ProxyFault> {
    match INFLIGHT_LENS.contains(&payload.len()) {
        true => Ok(()),
        false => Err(ProxyFault::Length { name: row.name, len: payload.len() }),
    }
}

/// Decodes a payload whose length was checked.
fn word(payload: &[u8]) -> u64 {
    payload.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}
