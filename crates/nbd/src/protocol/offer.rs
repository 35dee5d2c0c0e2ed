//! Server side of the NBD handshake: option haggling up to the transmission phase.

use ringfence_sys::numbers::{bounded, usize_from};

use super::numbers::{
    BASE_ALLOCATION, GREETING, OPTION, OPTION_REPLY, handshake, info, option, reply,
};
use super::{Bytes, NAME_MAX, Offer, ProtocolError};

/// Maximum length in bytes of option data that is kept. Longer data is skipped and refused.
const OPTION_MAX: u32 = 16 << 10;

/// Maximum number of options of one client.
const OPTIONS_MAX: u32 = 256;

/// Maximum number of metadata queries in one option.
const QUERIES_MAX: u32 = 64;

/// Id of the only metadata context.
pub const ALLOCATION_CONTEXT: u32 = 1;

/// Export of a server: name, description and properties.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Name of the export. The empty name selects it as well.
    pub name: String,
    pub description: String,
    /// Properties of the disk.
    pub offer: Offer,
}

/// Features that the client negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Agreed {
    /// Reads have structured replies.
    pub structured: bool,
    /// Block status queries are allowed.
    pub block_status: bool,
}

/// State of the handshake after fed bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServerProgress {
    /// The handshake is not complete.
    More,
    /// The handshake is complete, and requests follow.
    Transmission(Agreed),
    /// The client ended the connection.
    Aborted,
}

#[derive(Clone, Copy, Debug)]
enum OfferState {
    Flags,
    Option,
    /// Option data: option number, and length in bytes.
    Data(u32, u32),
    /// Option data to skip: option number, and bytes left.
    Skip(u32, u32),
    Over,
}

/// State machine of the server side of the handshake.
pub struct ServerHandshake {
    export: Export,
    state: OfferState,
    options: u32,
    no_zeroes: bool,
    agreed: Agreed,
    /// Reason for which no client may choose the export.
    refusal: Option<String>,
}

/// Returns the first message of a server.
pub fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&GREETING.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION.to_be_bytes());
    let flags = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    bytes[16..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

fn put_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend(OPTION_REPLY.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(bounded(len, u32::MAX).to_be_bytes());
    data.iter().for_each(|part| out.extend_from_slice(part));
}

impl ServerHandshake {
    /// Creates the state machine for an export. The caller sends [`greeting`] first.
    pub fn new(export: Export) -> ServerHandshake {
        ServerHandshake {
            export,
            state: OfferState::Flags,
            options: 0,
            no_zeroes: false,
            agreed: Agreed::default(),
            refusal: None,
        }
    }

    /// Refuses each choice of the export, with a reason for the client's user, and then ends the connection.
    #[must_use]
    pub fn refusing(mut self, why: String) -> ServerHandshake {
        self.refusal = Some(why);
        self
    }

    /// Parses received bytes and appends the reply to `out`. Returns the number of bytes consumed and the state.
    /// The caller repeats the call with the rest of the input until it consumes nothing.
    ///
    /// # Errors
    ///
    /// Returns a [`ProtocolError`], which ends the connection.
    pub fn feed(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ServerProgress), ProtocolError> {
        let mut bytes = Bytes(input);
        let progress = match self.state {
            OfferState::Flags => bytes.u32().map(|flags| self.flags(flags)).transpose()?,
            OfferState::Option => match (bytes.u64(), bytes.u32(), bytes.u32()) {
                (Some(magic), Some(number), Some(len)) => {
                    Some(self.option(magic, number, len, out)?)
                }
                _ => None,
            },
            OfferState::Data(number, len) => match bytes.take(len as usize) {
                Some(data) => Some(self.data(number, data, out)?),
                None => None,
            },
            OfferState::Skip(number, left) => {
                let step = bounded(input.len().min(usize_from(left)), left);
                bytes.take(step as usize);
                self.state = OfferState::Skip(number, left - step);
                if left == step {
                    put_reply(out, number, reply::TOO_BIG, &[]);
                    self.state = OfferState::Option;
                }
                Some(ServerProgress::More)
            }
            OfferState::Over => None,
        };
        match progress {
            Some(progress) => Ok((input.len() - bytes.0.len(), progress)),
            None => Ok((0, ServerProgress::More)),
        }
    }

    fn flags(&mut self, flags: u32) -> Result<ServerProgress, ProtocolError> {
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(ProtocolError::Flags { flags });
        }
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.state = OfferState::Option;
        Ok(ServerProgress::More)
    }

    fn option(
        &mut self,
        magic: u64,
        number: u32,
        len: u32,
        out: &mut Vec<u8>,
    ) -> Result<ServerProgress, ProtocolError> {
        if magic != OPTION {
            return Err(ProtocolError::Magic { what: "an option", found: magic });
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(ProtocolError::TooMany { what: "options", limit: OPTIONS_MAX });
        }
        self.state = match len {
            // Option data of length 0 is complete: the caller need not feed more.
            0 => return self.data(number, &[], out),
            1..=OPTION_MAX => OfferState::Data(number, len),
            _ if number == option::EXPORT_NAME => {
                // This option has no refusal reply.
                let (len, limit) = (u64::from(len), NAME_MAX as u64);
                return Err(ProtocolError::TooLong { what: "the name of an export", len, limit });
            }
            _ => OfferState::Skip(number, len),
        };
        Ok(ServerProgress::More)
    }

    fn data(
        &mut self,
        number: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<ServerProgress, ProtocolError> {
        self.state = OfferState::Option;
        match number {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                put_reply(out, number, reply::ACK, &[]);
                self.state = OfferState::Over;
                return Ok(ServerProgress::Aborted);
            }
            option::LIST if data.is_empty() => {
                let name = self.export.name.as_bytes();
                let len = bounded(name.len(), u32::MAX).to_be_bytes();
                let description = self.export.description.as_bytes();
                put_reply(out, number, reply::SERVER, &[&len, name, description]);
                put_reply(out, number, reply::ACK, &[]);
            }
            option::INFO | option::GO => return Ok(self.go(number, data, out)),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                put_reply(out, number, reply::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(number, data, out);
            }
            option::LIST | option::STRUCTURED_REPLY => {
                put_reply(out, number, reply::INVALID, &[b"this option has no data"]);
            }
            option::STARTTLS => put_reply(out, number, reply::POLICY, &[b"no TLS here"]),
            _ => put_reply(out, number, reply::UNSUPPORTED, &[]),
        }
        Ok(ServerProgress::More)
    }

    fn is_our_export(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }

    fn transmission(&mut self) -> ServerProgress {
        self.state = OfferState::Over;
        ServerProgress::Transmission(self.agreed)
    }

    fn export_name(
        &mut self,
        name: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<ServerProgress, ProtocolError> {
        // This option has no refusal reply.
        let refused = |error, message| {
            Err(ProtocolError::Refused { option: option::EXPORT_NAME, error, message })
        };
        if let Some(why) = &self.refusal {
            return refused(reply::POLICY, why.clone());
        }
        if !self.is_our_export(name) {
            return refused(reply::UNKNOWN, String::new());
        }
        let Offer { bytes, flags, .. } = self.export.offer;
        out.extend(bytes.to_be_bytes());
        out.extend(flags.to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Ok(self.transmission())
    }

    fn go(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) -> ServerProgress {
        let Some((name, wanted)) = parse_go(data) else {
            put_reply(out, number, reply::INVALID, &[]);
            return ServerProgress::More;
        };
        if !self.is_our_export(name) {
            put_reply(out, number, reply::UNKNOWN, &[b"there is no export of that name"]);
            return ServerProgress::More;
        }
        if let Some(why) = &self.refusal {
            put_reply(out, number, reply::POLICY, &[why.as_bytes()]);
            self.state = OfferState::Over;
            return ServerProgress::Aborted;
        }
        let Offer { bytes, flags, block_min, block_preferred, payload_max } = self.export.offer;
        let about = |out: &mut Vec<u8>, what: u16, data: &[&[u8]]| {
            let kind = what.to_be_bytes();
            let mut parts: Vec<&[u8]> = vec![&kind];
            parts.extend(data);
            put_reply(out, number, reply::INFO, &parts);
        };
        about(out, info::EXPORT, &[&bytes.to_be_bytes(), &flags.to_be_bytes()]);
        let sizes = [block_min, block_preferred, payload_max].map(u32::to_be_bytes);
        about(out, info::BLOCK_SIZE, &[sizes.as_flattened()]);
        let asks =
            |what: u16| wanted.as_chunks().0.iter().any(|kind| u16::from_be_bytes(*kind) == what);
        if asks(info::NAME) {
            about(out, info::NAME, &[self.export.name.as_bytes()]);
        }
        if asks(info::DESCRIPTION) {
            about(out, info::DESCRIPTION, &[self.export.description.as_bytes()]);
        }
        put_reply(out, number, reply::ACK, &[]);
        if number == option::GO { self.transmission() } else { ServerProgress::More }
    }

    fn contexts(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = number == option::SET_META_CONTEXT;
        if set {
            self.agreed.block_status = false;
        }
        if !self.agreed.structured {
            let why = b"structured replies come first";
            return put_reply(out, number, reply::INVALID, &[why]);
        }
        let Some((name, asks)) = parse_contexts(data, !set) else {
            return put_reply(out, number, reply::INVALID, &[]);
        };
        if !self.is_our_export(name) {
            return put_reply(out, number, reply::UNKNOWN, &[]);
        }
        if asks {
            let id = if set { ALLOCATION_CONTEXT } else { 0 }.to_be_bytes();
            put_reply(out, number, reply::META_CONTEXT, &[&id, BASE_ALLOCATION.as_bytes()]);
            self.agreed.block_status |= set;
        }
        put_reply(out, number, reply::ACK, &[]);
    }
}

/// Parses the data of INFO and GO: export name, and the requested information types of two bytes each.
fn parse_go(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut bytes = Bytes(data);
    let len = bytes.u32()? as usize;
    let name = bytes.take(len).filter(|name| name.len() <= NAME_MAX)?;
    let count = usize::from(bytes.u16()?);
    (bytes.0.len() == 2 * count).then_some((name, bytes.0))
}

/// Parses a metadata option: export name, and `true` if the queries match the only context. In a list, no
/// query matches all contexts, and a namespace with a colon matches its contexts.
fn parse_contexts(data: &[u8], list: bool) -> Option<(&[u8], bool)> {
    let mut bytes = Bytes(data);
    let len = bytes.u32()? as usize;
    let name = bytes.take(len).filter(|name| name.len() <= NAME_MAX)?;
    let count = bytes.u32()?;
    if count > QUERIES_MAX {
        return None;
    }
    let mut asks = list && count == 0;
    for _ in 0..count {
        let len = bytes.u32()? as usize;
        let query = bytes.take(len)?;
        asks |= query == BASE_ALLOCATION.as_bytes() || (list && query == b"base:");
    }
    bytes.0.is_empty().then_some((name, asks))
}
