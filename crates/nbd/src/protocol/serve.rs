//! Server side of the transmission phase: parsing of requests, encoding of replies.

use super::numbers::{
    REQUEST, SIMPLE_REPLY, STRUCTURED_REPLY, chunk, command, command_flag, error, state,
};
use super::offer::{ALLOCATION_CONTEXT, Agreed};
use super::{Bytes, Offer, ProtocolError};
use ringfence_block::storage::extents::ExtentState;
use ringfence_sys::numbers::bounded;

/// Length in bytes of a request without its payload.
pub const REQUEST_LEN: usize = 28;

/// Operation on a range, decoded from type and flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NbdCommand {
    Read,
    /// Writes the payload to the range.
    Write {
        /// Set if the write is durable when it completes.
        fua: bool,
    },
    /// Makes completed writes durable.
    Flush,
    /// Discards the range.
    Trim {
        /// Set if the discard is durable when it completes.
        fua: bool,
    },
    WriteZeroes {
        /// Set if the storage of the range stays allocated (`NBD_CMD_FLAG_NO_HOLE`).
        allocate: bool,
        /// Set if the zeros are durable when it completes.
        fua: bool,
    },
    /// Queries the allocation of the range.
    BlockStatus {
        /// Set if the reply must have one extent.
        one: bool,
    },
    /// Ends the connection, without a reply.
    Disconnect,
}

/// Validated request header, as a server receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientRequest {
    /// Cookie of the client, repeated in the reply.
    pub cookie: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Command, or the error number of the reply.
    pub command: Result<NbdCommand, u32>,
    /// Set if the reply must be structured.
    pub structured: bool,
    /// Length in bytes of the payload that follows the request.
    pub payload: u32,
}

/// Parses and validates a request.
///
/// An invalid request yields the error number of its reply; the caller skips its payload, if any.
///
/// # Errors
///
/// Returns the violations that end the connection: a wrong magic number, or a payload above the limit.
pub fn parse_request(
    bytes: &[u8; REQUEST_LEN],
    offer: &Offer,
    agreed: Agreed,
) -> Result<ClientRequest, ProtocolError> {
    let mut bytes = Bytes(bytes);
    let magic = bytes.u32().unwrap_or(0);
    if magic != REQUEST {
        return Err(ProtocolError::RequestMagic { found: magic });
    }
    let (flags, kind) = (bytes.u16().unwrap_or(0), bytes.u16().unwrap_or(0));
    let cookie = bytes.u64().unwrap_or(0);
    let (offset, len) = (bytes.u64().unwrap_or(0), bytes.u32().unwrap_or(0));
    let payload = if kind == command::WRITE { len } else { 0 };
    if payload > offer.payload_max {
        let (len, limit) = (u64::from(len), u64::from(offer.payload_max));
        return Err(ProtocolError::TooLong { what: "the payload of a write", len, limit });
    }
    let command = parse_command(kind, flags, offset, len, offer, agreed);
    let structured = agreed.structured && matches!(kind, command::READ | command::BLOCK_STATUS);
    Ok(ClientRequest { cookie, offset, len, command, structured, payload })
}

fn parse_command(
    kind: u16,
    flags: u16,
    offset: u64,
    len: u32,
    offer: &Offer,
    agreed: Agreed,
) -> Result<NbdCommand, u32> {
    let fua = flags & command_flag::FUA != 0;
    let (command, allowed) = match kind {
        command::READ => (NbdCommand::Read, command_flag::DF),
        command::WRITE => (NbdCommand::Write { fua }, 0),
        command::DISCONNECT => return Ok(NbdCommand::Disconnect),
        command::FLUSH => {
            // Offset and length of a flush have no meaning.
            let plain = flags & !command_flag::FUA == 0;
            return if plain { Ok(NbdCommand::Flush) } else { Err(error::INVAL) };
        }
        command::TRIM => (NbdCommand::Trim { fua }, 0),
        command::WRITE_ZEROES => {
            let allocate = flags & command_flag::NO_HOLE != 0;
            (NbdCommand::WriteZeroes { allocate, fua }, command_flag::NO_HOLE)
        }
        command::BLOCK_STATUS if agreed.block_status => {
            let one = flags & command_flag::REQ_ONE != 0;
            (NbdCommand::BlockStatus { one }, command_flag::REQ_ONE)
        }
        _ => return Err(error::INVAL),
    };
    // FUA is allowed without effect on commands that write nothing.
    if flags & !(allowed | command_flag::FUA) != 0 {
        return Err(error::INVAL);
    }
    let writes = !matches!(command, NbdCommand::Read | NbdCommand::BlockStatus { .. });
    if writes && offer.is_read_only() {
        return Err(error::PERM);
    }
    // The export serves ranges that are no multiples of the announced block size too.
    if len == 0 {
        return Err(error::INVAL);
    }
    if offset.checked_add(u64::from(len)).is_none_or(|end| end > offer.bytes) {
        return Err(if writes { error::NOSPC } else { error::INVAL });
    }
    if command == NbdCommand::Read && len > offer.payload_max {
        // `EOVERFLOW` tells a client that the reply would not fit in one chunk; only `DF` demands one.
        let is_single = flags & command_flag::DF != 0;
        return Err(if is_single { error::OVERFLOW } else { error::INVAL });
    }
    Ok(command)
}

/// Encoded reply without its payload.
pub type ReplyHeader = arrayvec::ArrayVec<u8, 44>;

/// Encodes the end of a request without data. `error` is 0 or the protocol's error number.
pub fn reply_end(cookie: u64, error: u32, structured: bool) -> ReplyHeader {
    let mut bytes = ReplyHeader::new();
    if !structured {
        bytes.extend(SIMPLE_REPLY.to_be_bytes());
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        return bytes;
    }
    if error == 0 {
        return chunk_header(chunk::NONE, cookie, 0);
    }
    let mut bytes = chunk_header(chunk::ERROR, cookie, 6);
    bytes.extend(error.to_be_bytes());
    // No message.
    bytes.extend(0u16.to_be_bytes());
    bytes
}

/// Encodes the header of `len` bytes read at `offset`, which also ends the request.
pub fn reply_data(cookie: u64, offset: u64, len: u32, structured: bool) -> ReplyHeader {
    if !structured {
        return reply_end(cookie, 0, false);
    }
    let mut bytes = chunk_header(chunk::OFFSET_DATA, cookie, len.saturating_add(8));
    bytes.extend(offset.to_be_bytes());
    bytes
}

/// Encodes the header of a block status reply of `count` extents, of [`status_entry`] each.
pub fn reply_status(cookie: u64, count: usize) -> ReplyHeader {
    let entries = bounded(count, u32::MAX / 8) * 8;
    let mut bytes = chunk_header(chunk::BLOCK_STATUS, cookie, entries.saturating_add(4));
    bytes.extend(ALLOCATION_CONTEXT.to_be_bytes());
    bytes
}

/// Encodes an extent of `len` bytes of a block status reply.
pub fn status_entry(len: u32, state: ExtentState) -> [u8; 8] {
    let ExtentState { hole, zero } = state;
    let flags = if hole { state::HOLE } else { 0 } | if zero { state::ZERO } else { 0 };
    (u64::from(len) << 32 | u64::from(flags)).to_be_bytes()
}

/// Encodes a block status reply: the whole range is allocated, the safe answer without knowledge.
pub fn reply_allocated(cookie: u64, len: u32) -> ReplyHeader {
    reply_extent(cookie, len, ExtentState::DATA)
}

/// Encodes a block status reply of one extent.
pub fn reply_extent(cookie: u64, len: u32, state: ExtentState) -> ReplyHeader {
    let mut bytes = reply_status(cookie, 1);
    bytes.extend(status_entry(len, state));
    bytes
}

fn chunk_header(kind: u16, cookie: u64, len: u32) -> ReplyHeader {
    let mut bytes = ReplyHeader::new();
    bytes.extend(STRUCTURED_REPLY.to_be_bytes());
    bytes.extend(chunk::DONE.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}
