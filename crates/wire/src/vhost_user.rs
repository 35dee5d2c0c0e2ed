//! vhost-user messages for a backend (QEMU's interface description "vhost-user").
//!
//! A frontend, such as QEMU, sends requests over a Unix stream socket. Each has a header of 12 bytes:
//!
//! ```text
//! request u32   flags u32 (version 1 in bits 0 and 1; 4: reply; 8: reply needed)   length u32   payload
//! ```
//!
//! Integers are in native byte order. Files (memory, eventfds) come with the header's first byte. [`Header::parse`]
//! bounds the payload's length, and [`Request::parse`] decodes it. The functions that begin with `reply` encode answers.

use arrayvec::ArrayVec;
use thiserror::Error;

use crate::numbers::bounded;

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 12;
/// Maximum regions of the memory table.
pub const REGIONS_MAX: usize = 8;
/// Maximum length of a request's payload in bytes: a whole configuration space.
pub const PAYLOAD_MAX: usize = CONFIG_HEADER_LEN + CONFIG_MAX;
/// Maximum length of a device's configuration space in bytes.
pub const CONFIG_MAX: usize = 256;
/// Maximum number of files that come with a request.
pub const FILES_MAX: usize = REGIONS_MAX;

/// Length of a region in a memory table, in bytes.
const REGION_LEN: usize = 32;
/// Length of a vring's addresses, in bytes.
const ADDRESS_LEN: usize = 40;
/// Bytes before a part of the configuration space: offset, size and flags.
const CONFIG_HEADER_LEN: usize = 12;
/// Length of the description of an in-flight log in bytes, without the padding that C compilers add.
const LOG_LEN: usize = 20;
/// Length of the description of an in-flight log with that padding.
const LOG_LEN_PADDED: usize = 24;

/// Number of the backend's request that tells a change of the configuration space.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// Bit of the payload that names a vring: no file comes with it.
const NO_FILE: u64 = 1 << 8;

/// Feature bit: protocol features are negotiated (`VHOST_USER_F_PROTOCOL_FEATURES`).
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Feature bit: the backend marks the pages that it writes in a log (`VHOST_F_LOG_ALL`).
pub const LOG_ALL: u64 = 1 << 26;

/// Flag of a vring's addresses: writes to its used ring are marked in that log (`VHOST_VRING_F_LOG`).
pub const LOG_USED: u32 = 1;

/// Protocol features, as masks.
pub mod protocol_feature {
    /// The device has more than one queue, or more than one pair of them (`MQ`).
    pub const MULTIQUEUE: u64 = 1 << 0;
    /// The frontend passes the log of written pages as a file (`LOG_SHMFD`).
    pub const LOG_FILE: u64 = 1 << 1;
    /// The backend sends a packet that announces a machine after its migration (`SEND_RARP`).
    pub const RARP: u64 = 1 << 2;
    /// The backend answers requests that ask for it.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The backend learns the MTU of a network card (`NET_SET_MTU`).
    pub const MTU: u64 = 1 << 4;
    /// The frontend passes a socket for requests of the backend (`SET_BACKEND_REQ_FD`).
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The backend learns the byte order of vrings (`SET_VRING_ENDIAN`).
    pub const CROSS_ENDIAN: u64 = 1 << 6;
    /// The frontend reads the configuration space from the backend.
    pub const CONFIG: u64 = 1 << 9;
    /// The frontend keeps a log of the requests in flight, for the next backend (`INFLIGHT_SHMFD`).
    pub const INFLIGHT: u64 = 1 << 12;
    /// The device can be reset (`RESET_DEVICE`).
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Regions are added and removed one by one (`ADD_MEM_REG`, `REM_MEM_REG`).
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The backend learns the status of the device (`SET_STATUS`, `GET_STATUS`).
    pub const STATUS: u64 = 1 << 16;
}

/// First bytes of a pool: memory whose only purpose is to be lent to a device. The driver's side writes them.
pub const POOL_MARK: [u8; 16] = *b"ringfence-pool 1";
/// Maximum length of a pool's name in bytes.
pub const POOL_NAME_MAX: usize = 31;
/// Number of bytes of a pool that [`pool_name`] looks at: the mark, a space, a name and the end of the name.
pub const POOL_HEAD_LEN: usize = POOL_MARK.len() + POOL_NAME_MAX + 2;

/// Returns the name of a pool that begins with `head`: the text behind [`POOL_MARK`] and a space, up to a byte 0 or a line
/// feed. A pool without a valid name has an empty one. Returns `None` without a mark.
pub fn pool_name(head: &[u8]) -> Option<&str> {
    let rest = head.strip_prefix(&POOL_MARK)?;
    let name = rest.strip_prefix(b" ").unwrap_or_default();
    let end = name.iter().position(|byte| [0, b'\n'].contains(byte));
    let name = end.and_then(|end| std::str::from_utf8(&name[..end]).ok());
    Some(name.filter(|name| is_pool_name(name)).unwrap_or_default())
}

/// Returns `true` for a name that a pool can have: a letter, then letters, digits, `.`, `_` and `-`.
pub fn is_pool_name(name: &str) -> bool {
    name.len() <= POOL_NAME_MAX
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Header before each vhost-user message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub request: u32,
    /// The frontend waits for an answer, also to a request that has none by itself.
    pub needs_reply: bool,
    /// Length of the payload in bytes, at most [`PAYLOAD_MAX`].
    pub len: usize,
}

/// State of a vring: its size, its next index, or a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringState {
    /// Number of the vring.
    pub index: u32,
    pub value: u32,
}

/// Addresses of a vring's tables, in the address space of the frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringAddress {
    /// Number of the vring.
    pub index: u32,
    /// Only [`LOG_USED`].
    pub flags: u32,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring in the log of written pages: that of descriptors.
    pub log: u64,
}

/// Region of the guest's memory. Its file comes with the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRegion {
    /// First address as descriptors name it.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// First address in the address space of the frontend.
    pub user: u64,
    pub offset: u64,
}

/// Vring and the presence of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringFile {
    /// Number of the vring.
    pub index: u32,
    /// A file comes with the message.
    pub has_file: bool,
}

/// Part of the configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfigPart {
    /// Offset of the first byte.
    pub offset: u32,
    /// Length in bytes, at most [`CONFIG_MAX`].
    pub size: u32,
    pub flags: u32,
}

/// Place of the in-flight log in its file, and the queues that it covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InflightArea {
    /// Length of the log in bytes. A frontend that asks for one leaves it 0.
    pub len: u64,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Maximum entries of each queue.
    pub queue_size: u16,
    /// Set if the description is followed by the padding of a C structure, which an answer has too then.
    pub is_padded: bool,
}

/// Place of the log of written pages in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyArea {
    /// Length of the log in bytes.
    pub len: u64,
    /// Offset in the file in bytes.
    pub offset: u64,
}

/// Requests of a vhost-user frontend (QEMU) that this back-end knows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemoryTable(ArrayVec<MemoryRegion, REGIONS_MAX>),
    /// Passes the log of written pages, whose file comes with the message.
    SetLog(DirtyArea),
    SetVringSize(VringState),
    SetVringAddress(VringAddress),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(VringFile),
    SetVringCall(VringFile),
    SetVringError(VringFile),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueCount,
    SetVringEnable(VringState),
    /// MTU that the frontend has configured for its network card.
    SetMtu(u64),
    /// Socket for requests of the backend. It comes with the message.
    SetBackendSocket,
    GetConfig(ConfigPart),
    /// Asks for a file for the in-flight log.
    GetInflight(InflightArea),
    /// Passes the in-flight log, whose file comes with the message.
    SetInflight(InflightArea),
    /// Asks for the number of regions that the memory can have.
    GetMemorySlots,
    /// Adds a region to the memory. Its file comes with the message.
    AddRegion(MemoryRegion),
    /// Removes a region, which has the same addresses and length as when it was added.
    RemoveRegion(MemoryRegion),
    /// Request that this module does not know.
    Unknown(u32),
}

/// Broken rule of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MessageError {
    /// Protocol version other than 1.
    #[error("version {version} of vhost-user, not {VERSION}")]
    Version { version: u32 },
    /// Answer where a request belongs.
    #[error("an answer to request {request}, which was not sent")]
    Answer { request: u32 },
    /// Request where an answer belongs.
    #[error("request {request} in place of an answer")]
    NoAnswer { request: u32 },
    /// Payload longer than [`PAYLOAD_MAX`].
    #[error("request {request} has {len} bytes, the limit is {PAYLOAD_MAX}")]
    TooLong { request: u32, len: u32 },
    /// Payload shorter than the request needs.
    #[error("request {request} has {len} bytes, less than {needed}")]
    TooShort {
        request: u32,
        len: usize,
        /// Length that the request needs.
        needed: usize,
    },
    /// Memory table with more regions than [`REGIONS_MAX`].
    #[error("a memory table of {count} regions, the limit is {REGIONS_MAX}")]
    Regions { count: u32 },
    /// Part of the configuration space that is longer than the message.
    #[error("{size} bytes of configuration in a message of {len}")]
    Config { size: u32, len: usize },
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// Returns the [`MessageError`] of the first broken rule. The start of the next message is unknown then.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Header, MessageError> {
        match Header::parse_any(bytes)? {
            (header, false) => Ok(header),
            (Header { request, .. }, true) => Err(MessageError::Answer { request }),
        }
    }

    /// Decodes the header of an answer.
    ///
    /// # Errors
    ///
    /// As [`Header::parse`].
    pub fn parse_answer(bytes: &[u8; HEADER_LEN]) -> Result<Header, MessageError> {
        match Header::parse_any(bytes)? {
            (header, true) => Ok(header),
            (Header { request, .. }, false) => Err(MessageError::NoAnswer { request }),
        }
    }

    /// Decodes a header. Returns `true` with that of an answer.
    fn parse_any(bytes: &[u8; HEADER_LEN]) -> Result<(Header, bool), MessageError> {
        let word = |at: usize| u32_at(bytes, at);
        let (request, flags, len) = (word(0), word(4), word(8));
        let version = flags & VERSION_MASK;
        if version != VERSION {
            return Err(MessageError::Version { version });
        }
        match usize::try_from(len) {
            Ok(bounded) if bounded <= PAYLOAD_MAX => {
                let needs_reply = flags & NEED_REPLY != 0;
                Ok((Header { request, needs_reply, len: bounded }, flags & REPLY != 0))
            }
            _ => Err(MessageError::TooLong { request, len }),
        }
    }
}

impl Request {
    /// Returns `true` for a request that only asks: it changes neither memory nor vrings, nor the state of a driver.
    pub fn is_question(&self) -> bool {
        matches!(
            self,
            Request::GetFeatures
                | Request::GetProtocolFeatures
                | Request::GetQueueCount
                | Request::GetConfig(_)
                | Request::GetInflight(_)
                | Request::GetMemorySlots
        )
    }
}

/// Defines the numbers of the requests, and decodes them.
macro_rules! requests {
    ($($name:ident = $number:literal: $body:expr;)*) => {
        /// Numbers of the requests.
        pub mod number {
            $(#[allow(missing_docs, reason = "the name says all")] pub const $name: u32 = $number;)*
        }

        impl Request {
            /// Decodes a request and its payload.
            ///
            /// # Errors
            ///
            /// Returns the [`MessageError`] of the first broken rule.
            pub fn parse(request: u32, payload: &[u8]) -> Result<Request, MessageError> {
                let body = Body { request, payload };
                match request {
                    $($number => {
                        let decode: fn(&Body<'_>) -> Result<Request, MessageError> = $body;
                        decode(&body)
                    })*
                    unknown => Ok(Request::Unknown(unknown)),
                }
            }
        }
    };
}

requests! {
    GET_FEATURES = 1: |_| Ok(Request::GetFeatures);
    SET_FEATURES = 2: |body| Ok(Request::SetFeatures(body.word()?));
    SET_OWNER = 3: |_| Ok(Request::SetOwner);
    RESET_OWNER = 4: |_| Ok(Request::ResetOwner);
    SET_MEM_TABLE = 5: |body| Ok(Request::SetMemoryTable(body.regions()?));
    SET_LOG_BASE = 6: |body| Ok(Request::SetLog(body.dirty()?));
    SET_VRING_NUM = 8: |body| Ok(Request::SetVringSize(body.state()?));
    SET_VRING_ADDR = 9: |body| Ok(Request::SetVringAddress(body.address()?));
    SET_VRING_BASE = 10: |body| Ok(Request::SetVringBase(body.state()?));
    GET_VRING_BASE = 11: |body| Ok(Request::GetVringBase(body.state()?));
    SET_VRING_KICK = 12: |body| Ok(Request::SetVringKick(body.file()?));
    SET_VRING_CALL = 13: |body| Ok(Request::SetVringCall(body.file()?));
    SET_VRING_ERR = 14: |body| Ok(Request::SetVringError(body.file()?));
    GET_PROTOCOL_FEATURES = 15: |_| Ok(Request::GetProtocolFeatures);
    SET_PROTOCOL_FEATURES = 16: |body| Ok(Request::SetProtocolFeatures(body.word()?));
    GET_QUEUE_NUM = 17: |_| Ok(Request::GetQueueCount);
    SET_VRING_ENABLE = 18: |body| Ok(Request::SetVringEnable(body.state()?));
    NET_SET_MTU = 20: |body| Ok(Request::SetMtu(body.word()?));
    SET_BACKEND_REQ_FD = 21: |_| Ok(Request::SetBackendSocket);
    GET_CONFIG = 24: |body| Ok(Request::GetConfig(body.config()?));
    GET_INFLIGHT_FD = 31: |body| Ok(Request::GetInflight(body.inflight()?));
    SET_INFLIGHT_FD = 32: |body| Ok(Request::SetInflight(body.inflight()?));
    GET_MAX_MEM_SLOTS = 36: |_| Ok(Request::GetMemorySlots);
    ADD_MEM_REG = 37: |body| Ok(Request::AddRegion(body.region()?));
    REM_MEM_REG = 38: |body| Ok(Request::RemoveRegion(body.region()?));
}

/// Payload of a request.
struct Body<'a> {
    request: u32,
    payload: &'a [u8],
}

impl Body<'_> {
    fn bytes<const N: usize>(&self) -> Result<&[u8; N], MessageError> {
        let (request, len) = (self.request, self.payload.len());
        let short = MessageError::TooShort { request, len, needed: N };
        self.payload.first_chunk().ok_or(short)
    }

    fn word(&self) -> Result<u64, MessageError> {
        self.bytes().map(|bytes| u64::from_ne_bytes(*bytes))
    }

    fn state(&self) -> Result<VringState, MessageError> {
        let bytes = self.bytes::<8>()?;
        Ok(VringState { index: u32_at(bytes, 0), value: u32_at(bytes, 4) })
    }

    fn file(&self) -> Result<VringFile, MessageError> {
        let word = self.word()?;
        // Bits 0 to 7 number the vring.
        let index = bounded(word & 0xff, 0xff);
        Ok(VringFile { index, has_file: word & NO_FILE == 0 })
    }

    fn address(&self) -> Result<VringAddress, MessageError> {
        let bytes = self.bytes::<ADDRESS_LEN>()?;
        Ok(VringAddress {
            index: u32_at(bytes, 0),
            flags: u32_at(bytes, 4),
            descriptors: u64_at(bytes, 8),
            used: u64_at(bytes, 16),
            available: u64_at(bytes, 24),
            log: u64_at(bytes, 32),
        })
    }

    fn dirty(&self) -> Result<DirtyArea, MessageError> {
        let bytes = self.bytes::<16>()?;
        Ok(DirtyArea { len: u64_at(bytes, 0), offset: u64_at(bytes, 8) })
    }

    fn config(&self) -> Result<ConfigPart, MessageError> {
        let bytes = self.bytes::<CONFIG_HEADER_LEN>()?;
        let [offset, size, flags] = [0, 4, 8].map(|at| u32_at(bytes, at));
        let len = self.payload.len();
        match usize::try_from(size) {
            // The frontend sends room for the answer.
            Ok(bytes) if bytes == len - CONFIG_HEADER_LEN => Ok(ConfigPart { offset, size, flags }),
            _ => Err(MessageError::Config { size, len }),
        }
    }

    fn inflight(&self) -> Result<InflightArea, MessageError> {
        let bytes = self.bytes::<LOG_LEN>()?;
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Ok(InflightArea {
            len: u64_at(bytes, 0),
            offset: u64_at(bytes, 8),
            queues: half(16),
            queue_size: half(18),
            is_padded: self.payload.len() >= LOG_LEN_PADDED,
        })
    }

    fn region(&self) -> Result<MemoryRegion, MessageError> {
        self.bytes::<{ 8 + REGION_LEN }>().map(|bytes| region_at(&bytes[8..]))
    }

    fn regions(&self) -> Result<ArrayVec<MemoryRegion, REGIONS_MAX>, MessageError> {
        let count = u32_at(self.bytes::<8>()?, 0);
        let bounded = usize::try_from(count).ok().filter(|count| *count <= REGIONS_MAX);
        let bounded = bounded.ok_or(MessageError::Regions { count })?;
        let (request, len) = (self.request, self.payload.len());
        let needed = 8 + bounded * REGION_LEN;
        let Some(table) = self.payload.get(8..needed) else {
            return Err(MessageError::TooShort { request, len, needed });
        };
        Ok(table.chunks_exact(REGION_LEN).map(region_at).collect())
    }
}

/// Decodes a region from [`REGION_LEN`] bytes.
fn region_at(bytes: &[u8]) -> MemoryRegion {
    MemoryRegion {
        guest: u64_at(bytes, 0),
        len: u64_at(bytes, 8),
        user: u64_at(bytes, 16),
        offset: u64_at(bytes, 24),
    }
}

/// Encodes the payload of a memory table with at most [`REGIONS_MAX`] regions. That of a request that adds or removes a
/// region is a table of one.
pub fn memory_table(regions: &[MemoryRegion]) -> Vec<u8> {
    let region = |region: &MemoryRegion| {
        let &MemoryRegion { guest, len, user, offset } = region;
        [guest, len, user, offset].map(u64::to_ne_bytes)
    };
    let head = [bounded(regions.len(), u32::MAX), 0_u32].map(u32::to_ne_bytes);
    let regions = regions.iter().flat_map(region).flatten();
    head.into_iter().flatten().chain(regions).collect()
}

/// Encoded answer to a request.
pub type Reply = ArrayVec<u8, { HEADER_LEN + PAYLOAD_MAX }>;

/// Encodes the answer to a request: a number.
pub fn reply_word(request: u32, value: u64) -> Reply {
    reply(request, &value.to_ne_bytes())
}

/// Encodes the answer to a request: the state of a vring.
pub fn reply_state(request: u32, state: VringState) -> Reply {
    reply(request, &[state.index.to_ne_bytes(), state.value.to_ne_bytes()].concat())
}

/// Encodes the answer to a request: a part of the configuration space, whose bytes beyond `config` are 0.
pub fn reply_config(request: u32, part: ConfigPart, config: &[u8]) -> Reply {
    let at_most = |n: u32, limit: usize| usize::try_from(n).unwrap_or(limit).min(limit);
    let (size, start) = (at_most(part.size, CONFIG_MAX), at_most(part.offset, config.len()));
    let mut payload = [part.offset, part.size, part.flags].map(u32::to_ne_bytes).concat();
    payload.extend(config[start..].iter().copied().chain(std::iter::repeat(0)).take(size));
    reply(request, &payload)
}

/// Encodes the answer to a request: the place of an in-flight log, whose file comes with the message.
pub fn reply_inflight(request: u32, area: InflightArea) -> Reply {
    let InflightArea { len, offset, queues, queue_size, is_padded } = area;
    let mut payload = [len.to_ne_bytes(), offset.to_ne_bytes()].concat();
    payload.extend([queues.to_ne_bytes(), queue_size.to_ne_bytes()].concat());
    payload.resize(if is_padded { LOG_LEN_PADDED } else { LOG_LEN }, 0);
    reply(request, &payload)
}

/// Encodes an answer. A payload of more than [`PAYLOAD_MAX`] bytes is cut.
pub fn reply(request: u32, payload: &[u8]) -> Reply {
    let payload = &payload[..payload.len().min(PAYLOAD_MAX)];
    let len = bounded(payload.len(), u32::MAX);
    let head = [request, VERSION | REPLY, len].map(u32::to_ne_bytes);
    head.as_flattened().iter().chain(payload).copied().collect()
}

/// Encodes the request of a backend that its configuration space has changed (`BACKEND_CONFIG_CHANGE_MSG`).
pub fn config_changed() -> Vec<u8> {
    request(BACKEND_CONFIG_CHANGE, false, &[])
}

/// Encodes a request, for a proxy and for tests of a backend.
pub fn request(request: u32, needs_reply: bool, payload: &[u8]) -> Vec<u8> {
    let flags = if needs_reply { VERSION | NEED_REPLY } else { VERSION };
    let len = bounded(payload.len(), u32::MAX);
    [&request.to_ne_bytes()[..], &flags.to_ne_bytes(), &len.to_ne_bytes(), payload].concat()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn header(bytes: &[u8]) -> Result<Header, MessageError> {
        Header::parse(bytes.first_chunk().unwrap())
    }

    #[test]
    fn header_fields_match_layout() {
        let bytes = request(5, true, &[0; 40]);
        assert_eq!(header(&bytes), Ok(Header { request: 5, needs_reply: true, len: 40 }));
        let answer = reply_word(1, 0x0102_0304_0506_0708);
        assert_eq!(header(&answer), Err(MessageError::Answer { request: 1 }));
        assert_eq!(answer[12..], 0x0102_0304_0506_0708_u64.to_ne_bytes());
        let state = reply_state(11, VringState { index: 1, value: 7 });
        assert_eq!((state[12], state[16], state.len()), (1, 7, 20));
    }

    #[test]
    fn header_of_another_version_or_length_is_rejected() {
        let mut bytes = request(1, false, &[]);
        bytes[4] = 2;
        assert_eq!(header(&bytes), Err(MessageError::Version { version: 2 }));
        bytes[4] = 1;
        let len = u32::try_from(PAYLOAD_MAX).unwrap() + 1;
        bytes[8..12].copy_from_slice(&len.to_ne_bytes());
        assert_eq!(header(&bytes), Err(MessageError::TooLong { request: 1, len }));
    }

    #[test]
    fn memory_table_fields_match_layout() {
        let payload = words(&[2, 0x1000, 0x2000, 0x3000, 0x4000, 5, 6, 7, 8]);
        let first = MemoryRegion { guest: 0x1000, len: 0x2000, user: 0x3000, offset: 0x4000 };
        let second = MemoryRegion { guest: 5, len: 6, user: 7, offset: 8 };
        let expected = Request::SetMemoryTable([first, second].into_iter().collect());
        assert_eq!(Request::parse(number::SET_MEM_TABLE, &payload), Ok(expected));
        let short = Request::parse(number::SET_MEM_TABLE, &payload[..71]);
        assert_eq!(short, Err(MessageError::TooShort { request: 5, len: 71, needed: 72 }));
        let many = [9_u64.to_ne_bytes().as_slice(), &[0; 9 * 32]].concat();
        let many = Request::parse(number::SET_MEM_TABLE, &many);
        assert_eq!(many, Err(MessageError::Regions { count: 9 }));
    }

    #[test]
    fn vring_address_fields_match_layout() {
        let mut payload = [0; 40];
        payload[0] = 1;
        for (at, value) in [(8, 0x10), (16, 0x20), (24, 0x30), (32, 0x40)] {
            payload[at] = value;
        }
        let expected = VringAddress {
            index: 1,
            flags: 0,
            descriptors: 0x10,
            used: 0x20,
            available: 0x30,
            log: 0x40,
        };
        let parsed = Request::parse(number::SET_VRING_ADDR, &payload);
        assert_eq!(parsed, Ok(Request::SetVringAddress(expected)));
    }

    #[test]
    fn log_of_written_pages_needs_its_length_and_its_offset() {
        let parsed = Request::parse(number::SET_LOG_BASE, &words(&[0x2000, 0x1000]));
        assert_eq!(parsed, Ok(Request::SetLog(DirtyArea { len: 0x2000, offset: 0x1000 })));
        // That of a frontend without a file is an address.
        let short = Request::parse(number::SET_LOG_BASE, &words(&[0x2000]));
        assert_eq!(short, Err(MessageError::TooShort { request: 6, len: 8, needed: 16 }));
    }

    #[test]
    fn config_request_and_answer_match_layout() {
        let header = |size: u32| [2_u32, size, 0].map(u32::to_ne_bytes).concat();
        let parse = |size, room: usize| {
            Request::parse(number::GET_CONFIG, &[header(size), vec![9; room]].concat())
        };
        let part = ConfigPart { offset: 2, size: 3, flags: 0 };
        assert_eq!(parse(3, 3), Ok(Request::GetConfig(part)));
        assert_eq!(parse(4, 3), Err(MessageError::Config { size: 4, len: 15 }));
        let answer = reply_config(number::GET_CONFIG, part, &[1, 2, 3, 4]);
        assert_eq!((answer[8], &answer[24..]), (15, &[3, 4, 0][..]));
        let beyond = ConfigPart { offset: u32::MAX, size: u32::MAX, flags: 0 };
        assert_eq!(reply_config(number::GET_CONFIG, beyond, &[1]).len(), HEADER_LEN + PAYLOAD_MAX);
    }

    #[test]
    fn log_description_is_answered_in_the_length_of_the_request() {
        for padding in [0, 4] {
            let mut payload = words(&[0x1000, 0x40]);
            payload.extend([4_u16, 128].map(u16::to_ne_bytes).concat());
            payload.resize(20 + padding, 0);
            let area = InflightArea {
                len: 0x1000,
                offset: 0x40,
                queues: 4,
                queue_size: 128,
                is_padded: padding > 0,
            };
            let parsed = Request::parse(number::SET_INFLIGHT_FD, &payload);
            assert_eq!(parsed, Ok(Request::SetInflight(area)));
            let answer = reply_inflight(number::GET_INFLIGHT_FD, area);
            assert_eq!(answer[HEADER_LEN..], payload);
        }
    }

    #[test]
    fn answer_and_request_are_told_apart() {
        let answer = reply(3, &[1, 2]);
        let parse = |bytes: &[u8]| Header::parse_answer(bytes.first_chunk().unwrap());
        assert_eq!(parse(&answer), Ok(Header { request: 3, needs_reply: false, len: 2 }));
        assert_eq!(parse(&request(3, true, &[])), Err(MessageError::NoAnswer { request: 3 }));
    }

    #[test]
    fn regions_survive_a_round_trip() {
        let one = MemoryRegion { guest: 1, len: 2, user: 3, offset: 4 };
        let table = memory_table(&[one, one]);
        let parsed = Request::parse(number::SET_MEM_TABLE, &table);
        assert_eq!(parsed, Ok(Request::SetMemoryTable([one, one].into_iter().collect())));
        let alone = memory_table(&[one]);
        for (number, expected) in [
            (number::ADD_MEM_REG, Request::AddRegion(one)),
            (number::REM_MEM_REG, Request::RemoveRegion(one)),
        ] {
            assert_eq!(Request::parse(number, &alone), Ok(expected));
            let short = MessageError::TooShort { request: number, len: 39, needed: 40 };
            assert_eq!(Request::parse(number, &alone[..39]), Err(short));
        }
    }

    #[test]
    fn name_of_a_pool_is_the_text_behind_its_mark() {
        let name = |text: &str| pool_name(format!("{text}\0\0").as_bytes()).map(str::to_owned);
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(name("ringfence-pool 1 disk-1.a"), named("disk-1.a"));
        assert_eq!(name("ringfence-pool 1 disk\n"), named("disk"));
        let longest = "x".repeat(POOL_NAME_MAX);
        assert_eq!(name(&format!("ringfence-pool 1 {longest}")), named(&longest));
        for unnamed in ["", " ", " 1", " a b", "x", " a/b"] {
            assert_eq!(name(&format!("ringfence-pool 1{unnamed}")), named(""), "{unnamed:?}");
        }
        assert_eq!(name(&format!("ringfence-pool 1 {longest}x")), named(""));
        assert_eq!((name("ringfence-pool 2 disk"), name("")), (None, None));
    }

    #[test]
    fn vring_without_file_is_told_apart() {
        let parse = |word: u64| Request::parse(number::SET_VRING_KICK, &word.to_ne_bytes());
        let file = |index, has_file| Ok(Request::SetVringKick(VringFile { index, has_file }));
        assert_eq!(parse(1), file(1, true));
        assert_eq!(parse(0x101), file(1, false));
    }

    proptest! {
        #[test]
        fn arbitrary_messages_are_parsed_or_rejected(
            head in any::<[u8; HEADER_LEN]>(),
            payload in proptest::collection::vec(any::<u8>(), 0..PAYLOAD_MAX + 9),
        ) {
            if let Ok(header) = Header::parse(&head) {
                prop_assert!(header.len <= PAYLOAD_MAX);
                let _ = Request::parse(header.request, &payload);
            }
            let _ = Request::parse(u32::from(head[0] % 40), &payload);
        }
    }
}
