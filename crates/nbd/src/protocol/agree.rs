//! Client side of the NBD handshake.
//!
//! ```text
//! greeting ──> [STARTTLS] ──> STRUCTURED_REPLY ──> SET_META_CONTEXT ──> GO ──> ready
//!                                       └──────────(unsupported)────────┘ └──(unsupported)──> EXPORT_NAME ──> ready
//! ```

use ringfence_sys::numbers::bounded;
use serde::{Deserialize, Serialize};

use super::numbers::{
    BASE_ALLOCATION, GREETING, OPTION, OPTION_REPLY, handshake, info, option, reply, transmission,
};
use super::{Bytes, NAME_MAX, Offer, PAYLOAD_MAX, ProtocolError};

/// Maximum length in bytes of the reply to an option.
const REPLY_MAX: u32 = 16 << 10;

/// Maximum number of replies to one option.
const REPLIES_MAX: u32 = 256;

/// State of the handshake after fed bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientProgress {
    /// The handshake is not complete.
    More,
    /// The handshake is complete, and requests may follow.
    Ready(Negotiated),
    /// The server agreed to TLS: all further bytes go through it.
    StartTls,
}

/// Result of the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Negotiated {
    /// Properties of the export.
    pub offer: Offer,
    /// Reads have structured replies.
    pub structured: bool,
    /// Block status queries are allowed.
    pub block_status: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AgreeState {
    Greeting,
    /// A reply to this option is expected.
    Asked(u32),
    /// The reply to `EXPORT_NAME`, which has no header, is expected.
    OldAnswer,
    Over,
}

/// State machine of the client side of the handshake.
pub struct ClientHandshake {
    name: String,
    tls: bool,
    /// Structured replies are not requested.
    simple: bool,
    state: AgreeState,
    no_zeroes: bool,
    structured: bool,
    block_status: bool,
    /// Number of replies to the last option.
    replies: u32,
    /// Size and flags, once received.
    export: Option<(u64, u16)>,
    blocks: BlockSizes,
}

/// Block sizes of an export, in bytes.
struct BlockSizes {
    min: u32,
    preferred: u32,
    max: u32,
}

fn put_option(out: &mut Vec<u8>, number: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend(OPTION.to_be_bytes());
    out.extend(number.to_be_bytes());
    out.extend(bounded(len, u32::MAX).to_be_bytes());
    data.iter().for_each(|part| out.extend_from_slice(part));
}

impl ClientHandshake {
    /// Creates the state machine for the export `name` of at most [`NAME_MAX`] bytes; the empty name selects
    /// the server's default. With `tls`, an unencrypted connection is refused.
    ///
    /// # Errors
    ///
    /// Returns [`ProtocolError::TooLong`] for a longer name.
    pub fn new(name: &str, tls: bool) -> Result<ClientHandshake, ProtocolError> {
        if name.len() > NAME_MAX {
            let (len, limit) = (name.len() as u64, NAME_MAX as u64);
            return Err(ProtocolError::TooLong { what: "the name of an export", len, limit });
        }
        Ok(ClientHandshake {
            name: name.to_owned(),
            tls,
            simple: false,
            state: AgreeState::Greeting,
            no_zeroes: false,
            structured: false,
            block_status: false,
            replies: 0,
            export: None,
            blocks: BlockSizes { min: 1, preferred: 4096, max: PAYLOAD_MAX },
        })
    }

    /// Requests simple instead of structured replies.
    #[must_use]
    pub fn simple(mut self) -> ClientHandshake {
        self.simple = true;
        self
    }

    fn after_encryption(&self) -> u32 {
        if self.simple { option::GO } else { option::STRUCTURED_REPLY }
    }

    /// Parses received bytes and appends the next option to `out`. Returns the number of bytes consumed and the
    /// state. The caller repeats the call with the rest of the input until it consumes nothing.
    ///
    /// # Errors
    ///
    /// Returns a [`ProtocolError`], which ends the connection.
    pub fn feed(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ClientProgress), ProtocolError> {
        let mut bytes = Bytes(input);
        let progress = match self.state {
            AgreeState::Greeting => match (bytes.u64(), bytes.u64(), bytes.u16()) {
                (Some(greeting), Some(kind), Some(flags)) => {
                    Some(self.greeting(greeting, kind, flags, out)?)
                }
                _ => None,
            },
            AgreeState::Asked(asked) => self.parse_reply(asked, &mut bytes, out)?,
            AgreeState::OldAnswer => {
                let zeros = if self.no_zeroes { 0 } else { 124 };
                match (bytes.u64(), bytes.u16(), bytes.take(zeros)) {
                    (Some(size), Some(flags), Some(_)) => {
                        self.export = Some((size, flags));
                        Some(self.ready()?)
                    }
                    _ => None,
                }
            }
            AgreeState::Over => None,
        };
        match progress {
            Some(progress) => Ok((input.len() - bytes.0.len(), progress)),
            None => Ok((0, ClientProgress::More)),
        }
    }

    fn greeting(
        &mut self,
        greeting: u64,
        kind: u64,
        flags: u16,
        out: &mut Vec<u8>,
    ) -> Result<ClientProgress, ProtocolError> {
        for (what, found, wanted) in [("greeting", greeting, GREETING), ("style", kind, OPTION)] {
            if found != wanted {
                return Err(ProtocolError::Magic { what, found });
            }
        }
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(ProtocolError::NotFixed);
        }
        let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.no_zeroes = ours & handshake::NO_ZEROES != 0;
        out.extend(u32::from(ours).to_be_bytes());
        let first = if self.tls { option::STARTTLS } else { self.after_encryption() };
        self.send_option(first, out);
        Ok(ClientProgress::More)
    }

    fn send_option(&mut self, number: u32, out: &mut Vec<u8>) {
        let name = self.name.as_bytes();
        let len = bounded(name.len(), u32::MAX).to_be_bytes();
        match number {
            option::GO => {
                let wanted = [0, 1, 0, 3];
                put_option(out, number, &[&len, name, &wanted]);
            }
            option::EXPORT_NAME => put_option(out, number, &[name]),
            option::SET_META_CONTEXT => {
                let context = BASE_ALLOCATION.as_bytes();
                let context_len = bounded(context.len(), u32::MAX).to_be_bytes();
                put_option(out, number, &[&len, name, &[0, 0, 0, 1], &context_len, context]);
            }
            _ => put_option(out, number, &[]),
        }
        self.replies = 0;
        self.state = match number {
            option::EXPORT_NAME => AgreeState::OldAnswer,
            _ => AgreeState::Asked(number),
        };
    }

    /// Continues the handshake after TLS was established.
    pub fn encrypted(&mut self, out: &mut Vec<u8>) {
        self.send_option(self.after_encryption(), out);
    }

    fn parse_reply(
        &mut self,
        asked: u32,
        bytes: &mut Bytes<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<ClientProgress>, ProtocolError> {
        let (Some(magic), Some(to), Some(kind), Some(len)) =
            (bytes.u64(), bytes.u32(), bytes.u32(), bytes.u32())
        else {
            return Ok(None);
        };
        if magic != OPTION_REPLY {
            return Err(ProtocolError::Magic { what: "the answer to an option", found: magic });
        }
        if to != asked {
            return Err(ProtocolError::Option { asked, found: to });
        }
        if len > REPLY_MAX {
            let (len, limit) = (u64::from(len), u64::from(REPLY_MAX));
            return Err(ProtocolError::TooLong { what: "the answer to an option", len, limit });
        }
        let Some(data) = bytes.take(len as usize) else { return Ok(None) };
        self.replies += 1;
        if self.replies > REPLIES_MAX {
            return Err(ProtocolError::TooMany { what: "answers", limit: REPLIES_MAX });
        }
        self.handle_reply(asked, kind, data, out).map(Some)
    }

    fn handle_reply(
        &mut self,
        asked: u32,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<ClientProgress, ProtocolError> {
        match (asked, kind) {
            (option::STARTTLS, reply::ACK) => return Ok(ClientProgress::StartTls),
            (option::STRUCTURED_REPLY, reply::ACK) => {
                self.structured = true;
                self.send_option(option::SET_META_CONTEXT, out);
            }
            (option::SET_META_CONTEXT, reply::META_CONTEXT) => {
                self.block_status |= data.get(4..) == Some(BASE_ALLOCATION.as_bytes());
            }
            (option::SET_META_CONTEXT, reply::ACK) => self.send_option(option::GO, out),
            (_, reply::TLS_REQUIRED) if asked != option::STARTTLS => {
                return Err(ProtocolError::RequiresTls);
            }
            // The server sends simple replies then, or tells nothing about holes.
            (option::STRUCTURED_REPLY | option::SET_META_CONTEXT, reply::ERROR..) => {
                self.block_status = false;
                self.send_option(option::GO, out);
            }
            (option::GO, reply::INFO) => self.info(data)?,
            (option::GO, reply::ACK) => return self.ready(),
            // The server knows only the option without a refusal reply.
            (option::GO, reply::UNSUPPORTED) => self.send_option(option::EXPORT_NAME, out),
            (_, error @ reply::ERROR..) => {
                let message = String::from_utf8_lossy(&data[..data.len().min(200)]).into_owned();
                if (asked, error) == (option::GO, reply::UNKNOWN) {
                    return Err(ProtocolError::UnknownExport { name: self.name.clone(), message });
                }
                if asked == option::STARTTLS {
                    return Err(ProtocolError::NoTls { message });
                }
                return Err(ProtocolError::Refused { option: asked, error, message });
            }
            // Unrequested information, and replies of unknown types, are ignored.
            _ => {}
        }
        Ok(ClientProgress::More)
    }

    fn info(&mut self, data: &[u8]) -> Result<(), ProtocolError> {
        let len = data.len() as u64;
        let mut bytes = Bytes(data);
        let broken = ProtocolError::Length { what: "a piece of information", len };
        match bytes.u16().ok_or(broken.clone())? {
            info::EXPORT => {
                let (Some(size), Some(flags), []) = (bytes.u64(), bytes.u16(), bytes.0) else {
                    return Err(broken);
                };
                self.export = Some((size, flags));
            }
            info::BLOCK_SIZE => {
                let (Some(min), Some(preferred), Some(max), []) =
                    (bytes.u32(), bytes.u32(), bytes.u32(), bytes.0)
                else {
                    return Err(broken);
                };
                let fits = min.is_power_of_two()
                    && preferred.is_power_of_two()
                    && min <= preferred
                    && min <= 64 << 10
                    && max >= preferred;
                if !fits {
                    return Err(ProtocolError::BlockSizes { min, preferred, max });
                }
                self.blocks = BlockSizes { min, preferred, max };
            }
            _ => {}
        }
        Ok(())
    }

    fn ready(&mut self) -> Result<ClientProgress, ProtocolError> {
        let (bytes, flags) = self.export.ok_or(ProtocolError::NoExport)?;
        self.state = AgreeState::Over;
        let BlockSizes { min: block_min, preferred: block_preferred, max } = self.blocks;
        // A server without flags supports only reads and writes.
        let flags = if flags & transmission::HAS_FLAGS == 0 { 0 } else { flags };
        // The limit is rounded down to the block size.
        let payload_max = max.min(PAYLOAD_MAX);
        let payload_max = payload_max - payload_max % block_min;
        let offer = Offer { bytes, flags, block_min, block_preferred, payload_max };
        let (structured, block_status) = (self.structured, self.block_status);
        Ok(ClientProgress::Ready(Negotiated { offer, structured, block_status }))
    }
}
