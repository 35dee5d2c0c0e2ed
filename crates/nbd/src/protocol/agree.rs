//! The client's side of the handshake.

use serde::{Deserialize, Serialize};

use super::numbers::{
    GREETING, OPTION, OPTION_REPLY, handshake, info, option, reply, transmission,
};
use super::{Bytes, NAME_MAX, Offer, PAYLOAD_MAX, ProtocolError};

/// Bytes of the answer to an option.
const REPLY_MAX: u32 = 16 << 10;

/// Answers to one option.
const REPLIES_MAX: u32 = 256;

/// How far the handshake is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// More is to come.
    More,
    /// Agreed: requests may follow.
    Ready(Settled),
    /// The server agreed to encrypt: whatever follows is to go through TLS.
    StartTls,
}

/// What was agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settled {
    /// What the server offers.
    pub offer: Offer,
    /// Reads are answered in chunks.
    pub structured: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Greeting,
    /// Answers to this option are awaited.
    Asked(u32),
    /// The answer to the oldest of the options has no header.
    OldAnswer,
    Over,
}

/// The client's side of the handshake.
pub struct ClientHandshake {
    name: String,
    tls: bool,
    /// Replies are to be simple.
    simple: bool,
    state: State,
    no_zeroes: bool,
    structured: bool,
    /// Answers to the option asked last.
    replies: u32,
    /// Size and flags, once they came.
    export: Option<(u64, u16)>,
    /// Minimum, preferred, maximum.
    blocks: (u32, u32, u32),
}

fn put_option(out: &mut Vec<u8>, number: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend(OPTION.to_be_bytes());
    out.extend(number.to_be_bytes());
    out.extend(u32::try_from(len).unwrap_or(0).to_be_bytes());
    data.iter().for_each(|part| out.extend_from_slice(part));
}

impl ClientHandshake {
    /// Asks for the export `name` (at most [`NAME_MAX`] bytes; empty: the server's choice). `tls`:
    /// only encrypted.
    ///
    /// # Errors
    ///
    /// When the name is too long.
    pub fn new(name: &str, tls: bool) -> Result<ClientHandshake, ProtocolError> {
        if name.len() > NAME_MAX {
            let (len, limit) = (name.len() as u64, NAME_MAX as u64);
            return Err(ProtocolError::TooLong { what: "the name of an export", len, limit });
        }
        Ok(ClientHandshake {
            name: name.to_owned(),
            tls,
            simple: false,
            state: State::Greeting,
            no_zeroes: false,
            structured: false,
            replies: 0,
            export: None,
            blocks: (1, 4096, PAYLOAD_MAX),
        })
    }

    /// Asks for simple replies.
    #[must_use]
    pub fn simple(mut self) -> ClientHandshake {
        self.simple = true;
        self
    }

    fn after_encryption(&self) -> u32 {
        if self.simple { option::GO } else { option::STRUCTURED_REPLY }
    }

    /// Takes what came in: returns how many bytes of `input` were used, and how far things are.
    /// What is to be sent is appended to `out`. To be called again, with what is left of the input,
    /// until it uses nothing.
    ///
    /// # Errors
    ///
    /// A [`ProtocolError`] ends the connection.
    pub fn feed(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Progress), ProtocolError> {
        let mut bytes = Bytes(input);
        let progress = match self.state {
            State::Greeting => match (bytes.u64(), bytes.u64(), bytes.u16()) {
                (Some(greeting), Some(kind), Some(flags)) => {
                    Some(self.greeting(greeting, kind, flags, out)?)
                }
                _ => None,
            },
            State::Asked(asked) => self.answer(asked, &mut bytes, out)?,
            State::OldAnswer => {
                let zeros = if self.no_zeroes { 0 } else { 124 };
                match (bytes.u64(), bytes.u16(), bytes.take(zeros)) {
                    (Some(size), Some(flags), Some(_)) => {
                        self.export = Some((size, flags));
                        Some(self.ready()?)
                    }
                    _ => None,
                }
            }
            State::Over => None,
        };
        match progress {
            Some(progress) => Ok((input.len() - bytes.0.len(), progress)),
            None => Ok((0, Progress::More)),
        }
    }

    fn greeting(
        &mut self,
        greeting: u64,
        kind: u64,
        flags: u16,
        out: &mut Vec<u8>,
    ) -> Result<Progress, ProtocolError> {
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
        self.ask(first, out);
        Ok(Progress::More)
    }

    fn ask(&mut self, number: u32, out: &mut Vec<u8>) {
        let name = self.name.as_bytes();
        let len = u32::try_from(name.len()).unwrap_or(0).to_be_bytes();
        match number {
            option::GO => {
                let wanted = [0, 1, 0, 3];
                put_option(out, number, &[&len, name, &wanted]);
            }
            option::EXPORT_NAME => put_option(out, number, &[name]),
            _ => put_option(out, number, &[]),
        }
        self.replies = 0;
        self.state = match number {
            option::EXPORT_NAME => State::OldAnswer,
            _ => State::Asked(number),
        };
    }

    /// The channel is encrypted now: goes on.
    pub fn encrypted(&mut self, out: &mut Vec<u8>) {
        self.ask(self.after_encryption(), out);
    }

    fn answer(
        &mut self,
        asked: u32,
        bytes: &mut Bytes<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Progress>, ProtocolError> {
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
        self.understand(asked, kind, data, out).map(Some)
    }

    fn understand(
        &mut self,
        asked: u32,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Progress, ProtocolError> {
        match (asked, kind) {
            (option::STARTTLS, reply::ACK) => return Ok(Progress::StartTls),
            (option::STRUCTURED_REPLY, reply::ACK) => {
                self.structured = true;
                self.ask(option::GO, out);
            }
            // It answers simply, then.
            (option::STRUCTURED_REPLY, reply::ERROR..) => self.ask(option::GO, out),
            (option::GO, reply::INFO) => self.info(data)?,
            (option::GO, reply::ACK) => return self.ready(),
            // It knows only the oldest way to choose.
            (option::GO, reply::UNSUPPORTED) => self.ask(option::EXPORT_NAME, out),
            (_, error @ reply::ERROR..) => {
                let message = String::from_utf8_lossy(&data[..data.len().min(200)]).into_owned();
                return Err(ProtocolError::Refused { option: asked, error, message });
            }
            // What was not asked for, and an answer of a kind that is not known.
            _ => {}
        }
        Ok(Progress::More)
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
                self.blocks = (min, preferred, max);
            }
            _ => {}
        }
        Ok(())
    }

    fn ready(&mut self) -> Result<Progress, ProtocolError> {
        let (bytes, flags) = self.export.ok_or(ProtocolError::NoExport)?;
        self.state = State::Over;
        let (block_min, block_preferred, max) = self.blocks;
        // A server without flags can do nothing but read and write.
        let flags = if flags & transmission::HAS_FLAGS == 0 { 0 } else { flags };
        // A maximum that is no multiple of the smallest block ends below it.
        let payload_max = max.min(PAYLOAD_MAX);
        let payload_max = payload_max - payload_max % block_min;
        let offer = Offer { bytes, flags, block_min, block_preferred, payload_max };
        Ok(Progress::Ready(Settled { offer, structured: self.structured }))
    }
}
