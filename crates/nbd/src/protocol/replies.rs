//! Replies, as a client sees them.
//!
//! A server may answer in any order, a read in any number of chunks, and a chunk may come in any
//! number of pieces. [`Replies`] holds every answer against the request it claims to be for: data
//! must lie within what was asked for, come once, and be complete at the end.

use std::collections::HashMap;

use super::numbers::{SIMPLE_REPLY, STRUCTURED_REPLY, chunk, error};
use super::{Bytes, ProtocolError};

/// Bytes of the longest header that is looked at as a whole: that of a chunk, with the offset and
/// length behind it.
const HEADER_MAX: usize = 32;

/// Bytes of an error chunk: more than its message may have.
const ERROR_MAX: u32 = 8192;

/// Separate pieces of what was received of one read.
const PIECES_MAX: usize = 1024;

/// What was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// This much, from here.
    Data {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// That it is done.
    Done,
}

/// What an answer says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer<'a> {
    /// Data of a read.
    Data {
        /// The request.
        cookie: u64,
        /// Where they go: bytes from the start of the request.
        at: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Zeros of a read.
    Zeros {
        /// The request.
        cookie: u64,
        /// Where they go: bytes from the start of the request.
        at: u64,
        /// How many.
        len: u64,
    },
    /// The request is over: as it should be, or with this error (the protocol's number).
    Over {
        /// The request.
        cookie: u64,
        /// How it ended.
        result: Result<(), u32>,
    },
}

#[derive(Default)]
struct Progress {
    /// What came already: ranges from the start of the request, in order, apart.
    received: Vec<(u64, u64)>,
    error: Option<u32>,
}

enum State {
    /// A header.
    Header,
    /// Data of a read: the request, where they go, bytes left, and whether they end the answer.
    Data { cookie: u64, at: u64, left: u64, last: bool },
    /// Bytes that say nothing: how many are left; and what ends behind them.
    Skip { left: u32, ends: Option<u64> },
}

/// The replies of one connection.
pub struct Replies {
    structured: bool,
    state: State,
    held: arrayvec::ArrayVec<u8, HEADER_MAX>,
    open: HashMap<u64, (Expect, Progress)>,
}

impl Replies {
    /// `structured`: this was agreed on.
    pub fn new(structured: bool) -> Replies {
        let held = arrayvec::ArrayVec::new();
        Replies { structured, state: State::Header, held, open: HashMap::new() }
    }

    /// A request was sent.
    pub fn expect(&mut self, cookie: u64, expect: Expect) {
        self.open.insert(cookie, (expect, Progress::default()));
    }

    /// Requests without an answer.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Takes what came in, all of it, and tells what it says.
    ///
    /// # Errors
    ///
    /// A [`ProtocolError`] ends the connection.
    pub fn feed(
        &mut self,
        mut input: &[u8],
        mut each: impl FnMut(Answer<'_>),
    ) -> Result<(), ProtocolError> {
        while !input.is_empty() {
            match self.state {
                State::Header => input = self.header(input, &mut each)?,
                State::Data { cookie, at, left, last } => {
                    let step = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                    let (bytes, rest) = input.split_at(step);
                    input = rest;
                    each(Answer::Data { cookie, at, bytes });
                    let step = step as u64;
                    self.state = State::Data { cookie, at: at + step, left: left - step, last };
                    if left == step {
                        self.state = State::Header;
                        if last {
                            self.end(cookie, &mut each)?;
                        }
                    }
                }
                State::Skip { left, ends } => {
                    let step = u32::try_from(input.len()).unwrap_or(u32::MAX).min(left);
                    input = &input[step as usize..];
                    self.state = State::Skip { left: left - step, ends };
                    if left == step {
                        self.state = State::Header;
                        if let Some(cookie) = ends {
                            self.end(cookie, &mut each)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Collects a header; once it is whole, acts on it. Returns what is left of the input.
    fn header<'a>(
        &mut self,
        input: &'a [u8],
        each: &mut impl FnMut(Answer<'_>),
    ) -> Result<&'a [u8], ProtocolError> {
        let need = self.need()?;
        let step = (need - self.held.len()).min(input.len());
        let (taken, rest) = input.split_at(step);
        self.held.extend(taken.iter().copied());
        // What is needed becomes clear as it comes.
        if self.held.len() == self.need()? {
            let header = std::mem::take(&mut self.held);
            self.act(&header, each)?;
        }
        Ok(rest)
    }

    /// Bytes that the header has, as far as is known of it.
    fn need(&self) -> Result<usize, ProtocolError> {
        let mut bytes = Bytes(&self.held);
        let magic = match bytes.u32() {
            None => return Ok(4),
            Some(SIMPLE_REPLY) => return Ok(16),
            Some(STRUCTURED_REPLY) if self.structured => STRUCTURED_REPLY,
            Some(magic) => {
                return Err(ProtocolError::Magic { what: "a reply", found: u64::from(magic) });
            }
        };
        debug_assert_eq!(magic, STRUCTURED_REPLY);
        let (Some(_), Some(kind)) = (bytes.u16(), bytes.u16()) else { return Ok(20) };
        let (Some(_), Some(len)) = (bytes.u64(), bytes.u32()) else { return Ok(20) };
        let length = |what| ProtocolError::Length { what, len: u64::from(len) };
        match kind {
            chunk::NONE if len != 0 => Err(length("an empty chunk")),
            chunk::NONE => Ok(20),
            chunk::OFFSET_DATA if len <= 8 => Err(length("a chunk of data")),
            chunk::OFFSET_DATA => Ok(28),
            chunk::OFFSET_HOLE if len != 12 => Err(length("a chunk of zeros")),
            chunk::OFFSET_HOLE => Ok(32),
            chunk::ERROR_BIT.. if !(6..=ERROR_MAX).contains(&len) => Err(length("an error")),
            chunk::ERROR_BIT.. => Ok(26),
            kind => Err(ProtocolError::Kind { kind }),
        }
    }

    fn act(
        &mut self,
        header: &[u8],
        each: &mut impl FnMut(Answer<'_>),
    ) -> Result<(), ProtocolError> {
        let mut bytes = Bytes(header);
        let short = ProtocolError::Length { what: "a header", len: header.len() as u64 };
        if bytes.u32() == Some(SIMPLE_REPLY) {
            let (Some(error), Some(cookie)) = (bytes.u32(), bytes.u64()) else { return Err(short) };
            return self.simple(cookie, error, each);
        }
        let (Some(flags), Some(kind), Some(cookie), Some(len)) =
            (bytes.u16(), bytes.u16(), bytes.u64(), bytes.u32())
        else {
            return Err(short);
        };
        let last = flags & chunk::DONE != 0;
        let (expect, progress) =
            self.open.get_mut(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        match kind {
            chunk::NONE if !last => return Err(ProtocolError::Kind { kind }),
            chunk::NONE => self.end(cookie, each)?,
            chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
                let is_data = kind == chunk::OFFSET_DATA;
                let offset = bytes.u64().ok_or(short.clone())?;
                let len = if is_data { len - 8 } else { bytes.u32().ok_or(short)? };
                let len = u64::from(len);
                let at = receive(*expect, progress, offset, len)?;
                if is_data {
                    self.state = State::Data { cookie, at, left: len, last };
                } else {
                    each(Answer::Zeros { cookie, at, len });
                    if last {
                        self.end(cookie, each)?;
                    }
                }
            }
            _ => {
                let number = bytes.u32().ok_or(short)?;
                // An error that says 0 is one nevertheless.
                let number = if number == 0 { error::IO } else { number };
                progress.error.get_or_insert(number);
                self.state = State::Skip { left: len - 6, ends: last.then_some(cookie) };
                if len == 6 {
                    self.state = State::Header;
                    if last {
                        self.end(cookie, each)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn simple(
        &mut self,
        cookie: u64,
        number: u32,
        each: &mut impl FnMut(Answer<'_>),
    ) -> Result<(), ProtocolError> {
        let (expect, progress) =
            self.open.get_mut(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        if number != 0 {
            progress.error = Some(number);
            return self.end(cookie, each);
        }
        match *expect {
            // In chunks only, if that was agreed on.
            Expect::Data { .. } if self.structured => Err(ProtocolError::Kind { kind: 0 }),
            Expect::Data { offset, len } => {
                let at = receive(*expect, progress, offset, u64::from(len))?;
                self.state = State::Data { cookie, at, left: u64::from(len), last: true };
                Ok(())
            }
            Expect::Done => self.end(cookie, each),
        }
    }

    fn end(&mut self, cookie: u64, each: &mut impl FnMut(Answer<'_>)) -> Result<(), ProtocolError> {
        let (expect, progress) =
            self.open.remove(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        let result = progress.error.map_or(Ok(()), Err);
        if let (Expect::Data { offset, len }, Ok(())) = (expect, result)
            && progress.received != [(0, u64::from(len))]
        {
            return Err(ProtocolError::Range { offset, len: u64::from(len) });
        }
        each(Answer::Over { cookie, result });
        Ok(())
    }
}

/// Takes note that `len` bytes at `offset` came; returns where they go.
fn receive(
    expect: Expect,
    progress: &mut Progress,
    offset: u64,
    len: u64,
) -> Result<u64, ProtocolError> {
    let broken = ProtocolError::Range { offset, len };
    let Expect::Data { offset: first, len: wanted } = expect else {
        return Err(ProtocolError::Kind { kind: chunk::OFFSET_DATA });
    };
    let at = offset.checked_sub(first).ok_or(broken.clone())?;
    let end = at.checked_add(len).filter(|end| len > 0 && *end <= u64::from(wanted));
    let end = end.ok_or(broken.clone())?;
    let ranges = &mut progress.received;
    // The place among those that came; most come in order.
    let place = ranges.partition_point(|(start, _)| *start < at);
    let touches_before = place > 0 && ranges[place - 1].1 >= at;
    if (place > 0 && ranges[place - 1].1 > at)
        || ranges.get(place).is_some_and(|(start, _)| *start < end)
    {
        return Err(broken);
    }
    let touches_behind = ranges.get(place).is_some_and(|(start, _)| *start == end);
    match (touches_before, touches_behind) {
        (true, true) => ranges[place - 1].1 = ranges.remove(place).1,
        (true, false) => ranges[place - 1].1 = end,
        (false, true) => ranges[place].0 = at,
        (false, false) if ranges.len() < PIECES_MAX => ranges.insert(place, (at, end)),
        (false, false) => return Err(broken),
    }
    Ok(at)
}
