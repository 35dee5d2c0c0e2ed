//! Client side of the transmission phase: parsing and validation of replies.
//!
//! A server may reply in any order, to a read in any number of chunks, and a chunk may arrive in any number
//! of pieces. [`Replies`] checks each reply against its request: data must lie within the requested range,
//! arrive once, and be complete at the end.

use std::collections::HashMap;

use ringfence_sys::numbers::{bounded, usize_from};

use super::numbers::{SIMPLE_REPLY, STRUCTURED_REPLY, chunk, error};
use super::{Bytes, ProtocolError};

/// Maximum length in bytes of a header that is parsed as a whole: a chunk with offset and length.
const HEADER_MAX: usize = 32;

/// Maximum length in bytes of an error chunk, above the limit of its message.
const ERROR_MAX: u32 = 8192;

/// Maximum length in bytes of a chunk of extents: a context and 2^20 of them.
const STATUS_MAX: u32 = 4 + (8 << 20);

/// Maximum number of separate received ranges of one read.
const PIECES_MAX: usize = 1024;

/// Expected reply of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    Data {
        /// Offset of the first byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Completion without data.
    Done,
    /// Extents of a range of this length in bytes.
    Extents(u32),
}

/// Bytes, zeros or error that one chunk of the server's answer carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyContent<'a> {
    Data {
        cookie: u64,
        /// Offset from the start of the request.
        at: u64,
        /// Received bytes.
        bytes: &'a [u8],
    },
    /// Zeros of a read.
    Zeros {
        cookie: u64,
        /// Offset from the start of the request.
        at: u64,
        /// Number of zeros.
        len: u64,
    },
    /// Next extent of a block status query.
    Extent {
        cookie: u64,
        /// Length in bytes, at least one.
        len: u32,
        /// Flags of the extent ([`state`](super::numbers::state)).
        flags: u32,
    },
    /// End of a request: success, or the protocol's error number.
    Over { cookie: u64, result: Result<(), u32> },
}

#[derive(Default)]
struct ReplyProgress {
    /// Received ranges from the start of the request, sorted and not adjacent. Of extents, those described.
    received: Vec<(u64, u64)>,
    error: Option<u32>,
}

enum ReplyState {
    /// Start of a reply or chunk.
    Header,
    /// Data of a read: cookie, offset in the request, bytes left; `last` if it ends the reply.
    Data { cookie: u64, at: u64, left: u64, last: bool },
    /// Extents of a block status query: cookie, bytes left; `last` if it ends the reply.
    Extents { cookie: u64, left: u32, last: bool },
    /// Bytes to skip, and the request that ends after them.
    Skip { left: u32, ends: Option<u64> },
}

/// Parser of the replies of one connection.
pub struct Replies {
    structured: bool,
    state: ReplyState,
    held: arrayvec::ArrayVec<u8, HEADER_MAX>,
    open: HashMap<u64, (Expect, ReplyProgress)>,
}

impl Replies {
    /// Creates the parser. `structured` is set if structured replies were negotiated.
    pub fn new(structured: bool) -> Replies {
        let held = arrayvec::ArrayVec::new();
        Replies { structured, state: ReplyState::Header, held, open: HashMap::new() }
    }

    /// Records a request that was sent.
    pub fn expect(&mut self, cookie: u64, expect: Expect) {
        self.open.insert(cookie, (expect, ReplyProgress::default()));
    }

    /// Returns the number of requests without a complete reply.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Parses all received bytes and calls `each` with their content.
    ///
    /// # Errors
    ///
    /// Returns a [`ProtocolError`], which ends the connection.
    pub fn feed(
        &mut self,
        mut input: &[u8],
        mut each: impl FnMut(ReplyContent<'_>),
    ) -> Result<(), ProtocolError> {
        while !input.is_empty() {
            match self.state {
                ReplyState::Header => input = self.header(input, &mut each)?,
                ReplyState::Data { cookie, at, left, last } => {
                    let step = usize_from(left).min(input.len());
                    let (bytes, rest) = input.split_at(step);
                    input = rest;
                    each(ReplyContent::Data { cookie, at, bytes });
                    let step = step as u64;
                    self.state =
                        ReplyState::Data { cookie, at: at + step, left: left - step, last };
                    if left == step {
                        self.state = ReplyState::Header;
                        if last {
                            self.end(cookie, &mut each)?;
                        }
                    }
                }
                ReplyState::Extents { cookie, left, last } => {
                    let (taken, rest) = input.split_at((8 - self.held.len()).min(input.len()));
                    self.held.extend(taken.iter().copied());
                    input = rest;
                    if self.held.len() == 8 {
                        let entry = std::mem::take(&mut self.held);
                        self.extent(cookie, &entry, &mut each)?;
                        self.state = ReplyState::Extents { cookie, left: left - 8, last };
                        if left == 8 {
                            self.state = ReplyState::Header;
                            if last {
                                self.end(cookie, &mut each)?;
                            }
                        }
                    }
                }
                ReplyState::Skip { left, ends } => {
                    let step = bounded(input.len().min(usize_from(left)), left);
                    input = &input[step as usize..];
                    self.state = ReplyState::Skip { left: left - step, ends };
                    if left == step {
                        self.state = ReplyState::Header;
                        if let Some(cookie) = ends {
                            self.end(cookie, &mut each)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Collects a header and handles it once it is complete. Returns the rest of the input.
    fn header<'a>(
        &mut self,
        input: &'a [u8],
        each: &mut impl FnMut(ReplyContent<'_>),
    ) -> Result<&'a [u8], ProtocolError> {
        let need = self.header_len()?;
        let step = (need - self.held.len()).min(input.len());
        let (taken, rest) = input.split_at(step);
        self.held.extend(taken.iter().copied());
        // The length of the header follows from its first fields.
        if self.held.len() == self.header_len()? {
            let header = std::mem::take(&mut self.held);
            self.handle_header(&header, each)?;
        }
        Ok(rest)
    }

    /// Returns the length of the header, as far as its received fields determine it.
    fn header_len(&self) -> Result<usize, ProtocolError> {
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
            chunk::BLOCK_STATUS if !(12..=STATUS_MAX).contains(&len) || len % 8 != 4 => {
                Err(length("a chunk of extents"))
            }
            chunk::BLOCK_STATUS => Ok(24),
            chunk::ERROR_BIT.. if !(6..=ERROR_MAX).contains(&len) => Err(length("an error")),
            chunk::ERROR_BIT.. => Ok(26),
            kind => Err(ProtocolError::Kind { kind }),
        }
    }

    fn handle_header(
        &mut self,
        header: &[u8],
        each: &mut impl FnMut(ReplyContent<'_>),
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
                    self.state = ReplyState::Data { cookie, at, left: len, last };
                } else {
                    each(ReplyContent::Zeros { cookie, at, len });
                    if last {
                        self.end(cookie, each)?;
                    }
                }
            }
            // Only one context was selected, so its number has no meaning.
            chunk::BLOCK_STATUS => {
                if !matches!(expect, Expect::Extents(_)) || !progress.received.is_empty() {
                    return Err(ProtocolError::Kind { kind });
                }
                self.state = ReplyState::Extents { cookie, left: len - 4, last };
            }
            _ => {
                let number = bytes.u32().ok_or(short)?;
                // An error chunk with error number 0 is still an error.
                let number = if number == 0 { error::IO } else { number };
                progress.error.get_or_insert(number);
                self.state = ReplyState::Skip { left: len - 6, ends: last.then_some(cookie) };
                if len == 6 {
                    self.state = ReplyState::Header;
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
        each: &mut impl FnMut(ReplyContent<'_>),
    ) -> Result<(), ProtocolError> {
        let (expect, progress) =
            self.open.get_mut(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        if number != 0 {
            progress.error = Some(number);
            return self.end(cookie, each);
        }
        match *expect {
            // With structured replies, data must come in chunks.
            Expect::Data { .. } if self.structured => Err(ProtocolError::Kind { kind: 0 }),
            Expect::Data { offset, len } => {
                let at = receive(*expect, progress, offset, u64::from(len))?;
                self.state = ReplyState::Data { cookie, at, left: u64::from(len), last: true };
                Ok(())
            }
            Expect::Done => self.end(cookie, each),
            Expect::Extents(_) => Err(ProtocolError::Kind { kind: 0 }),
        }
    }

    /// Handles the next extent of a block status query.
    fn extent(
        &mut self,
        cookie: u64,
        entry: &[u8],
        each: &mut impl FnMut(ReplyContent<'_>),
    ) -> Result<(), ProtocolError> {
        let mut bytes = Bytes(entry);
        let (len, flags) = (bytes.u32().unwrap_or(0), bytes.u32().unwrap_or(0));
        let open = self.open.get_mut(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        let (Expect::Extents(wanted), progress) = open else {
            return Err(ProtocolError::Kind { kind: chunk::BLOCK_STATUS });
        };
        let described = progress.received.first().map_or(0, |(_, end)| *end);
        // The last extent may reach beyond the range.
        if len == 0 || described >= u64::from(*wanted) {
            return Err(ProtocolError::Range { offset: described, len: len.into() });
        }
        progress.received = vec![(0, described + u64::from(len))];
        each(ReplyContent::Extent { cookie, len, flags });
        Ok(())
    }

    fn end(
        &mut self,
        cookie: u64,
        each: &mut impl FnMut(ReplyContent<'_>),
    ) -> Result<(), ProtocolError> {
        let (expect, progress) =
            self.open.remove(&cookie).ok_or(ProtocolError::Cookie { cookie })?;
        let result = progress.error.map_or(Ok(()), Err);
        if let (Expect::Data { offset, len }, Ok(())) = (expect, result)
            && progress.received != [(0, u64::from(len))]
        {
            return Err(ProtocolError::Range { offset, len: u64::from(len) });
        }
        if let (Expect::Extents(len), Ok(()), true) = (expect, result, progress.received.is_empty())
        {
            return Err(ProtocolError::Range { offset: 0, len: len.into() });
        }
        each(ReplyContent::Over { cookie, result });
        Ok(())
    }
}

/// Records a received range of a read. Returns its offset in the request.
fn receive(
    expect: Expect,
    progress: &mut ReplyProgress,
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
    // Most ranges arrive in order, so the position is usually the last.
    let position = ranges.partition_point(|(start, _)| *start < at);
    let touches_before = position > 0 && ranges[position - 1].1 >= at;
    if (position > 0 && ranges[position - 1].1 > at)
        || ranges.get(position).is_some_and(|(start, _)| *start < end)
    {
        return Err(broken);
    }
    let touches_behind = ranges.get(position).is_some_and(|(start, _)| *start == end);
    match (touches_before, touches_behind) {
        (true, true) => ranges[position - 1].1 = ranges.remove(position).1,
        (true, false) => ranges[position - 1].1 = end,
        (false, true) => ranges[position].0 = at,
        (false, false) if ranges.len() < PIECES_MAX => ranges.insert(position, (at, end)),
        (false, false) => return Err(broken),
    }
    Ok(at)
}
