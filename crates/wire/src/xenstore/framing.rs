//! Messages out of a byte stream.

use super::header::{HEADER_LEN, Header, MessageType, PAYLOAD_MAX};
use thiserror::Error;

/// The stream holds something that is no message; there is no way to find the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FramingError {
    /// The header announces more than a message may hold.
    #[error("a {kind:?} message announces {len} payload bytes, the limit is {limit}")]
    PayloadTooLong {
        /// What the message claims to be.
        kind: MessageType,
        /// Bytes announced.
        len: u32,
        /// [`PAYLOAD_MAX`].
        limit: u32,
    },
}

/// A message at the head of a byte string.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decoded<'a> {
    /// Its header.
    pub header: Header,
    /// Its payload, `header.len` bytes.
    pub payload: &'a [u8],
    /// What follows it.
    pub rest: &'a [u8],
}

/// Takes one message off the head of `bytes`; `None` when it is not all there yet.
///
/// # Errors
/// [`FramingError`] as soon as the header is complete, without waiting for the payload.
pub fn decode(bytes: &[u8]) -> Result<Option<Decoded<'_>>, FramingError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Ok(None);
    };
    let header = Header::parse(header);
    if header.len > PAYLOAD_MAX {
        return Err(FramingError::PayloadTooLong {
            kind: header.kind,
            len: header.len,
            limit: PAYLOAD_MAX,
        });
    }
    // At most 4096, so this cannot truncate.
    let len = header.len as usize;
    Ok(rest.split_at_checked(len).map(|(payload, rest)| Decoded { header, payload, rest }))
}

/// Collects what a stream delivers and hands out whole messages.
///
/// The buffer has room for two of the largest messages and never grows. The loop is: read into
/// [`spare`](Self::spare), tell how much by [`commit`](Self::commit), call [`next`](Self::next)
/// until it has nothing more. After an error the reader keeps giving that error.
///
/// ```
/// # use ringfence_wire::xenstore::{MessageReader, MessageType, Request, Path};
/// let mut sent = Vec::new();
/// let path = Path::parse(b"/local/domain/1/name")?;
/// Request::Read { path }.emit(7, 0, &mut sent)?;
///
/// let mut reader = MessageReader::new();
/// for piece in sent.chunks(5) {
///     reader.spare()[..piece.len()].copy_from_slice(piece);
///     reader.commit(piece.len());
/// }
/// let (header, payload) = reader.next()?.expect("it is all there");
/// assert_eq!((header.kind, header.req_id), (MessageType::Read, 7));
/// assert_eq!(payload, b"/local/domain/1/name\0");
/// assert_eq!(reader.next()?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MessageReader {
    buffer: Box<[u8]>,
    /// First byte not yet handed out.
    start: usize,
    /// First byte not yet filled; `start <= end <= buffer.len()`.
    end: usize,
}

impl MessageReader {
    const CAPACITY: usize = 2 * (HEADER_LEN + PAYLOAD_MAX as usize);

    /// An empty reader.
    pub fn new() -> MessageReader {
        MessageReader { buffer: vec![0; Self::CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Where the next bytes of the stream go. Never empty once [`next`](Self::next) gave `None`:
    /// an unfinished message takes at most half of the buffer.
    pub fn spare(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.buffer[self.end..]
    }

    /// Says that the first `filled` bytes of the last [`spare`](Self::spare) are from the stream.
    ///
    /// # Panics
    /// If that is more than was spare; it is the caller's own count, not the peer's.
    pub fn commit(&mut self, filled: usize) {
        assert!(filled <= self.buffer.len() - self.end, "more bytes committed than were spare");
        self.end += filled;
    }

    /// The next whole message: header and payload.
    ///
    /// # Errors
    /// [`FramingError`]: the connection is beyond repair.
    #[allow(clippy::should_implement_trait)] // It lends from self, so it cannot be an Iterator.
    pub fn next(&mut self) -> Result<Option<(Header, &[u8])>, FramingError> {
        let Some(Decoded { header, payload, .. }) = decode(&self.buffer[self.start..self.end])?
        else {
            return Ok(None);
        };
        self.start += HEADER_LEN + payload.len();
        Ok(Some((header, payload)))
    }

    /// Bytes that are here but belong to no whole message yet.
    pub fn pending(&self) -> usize {
        self.end - self.start
    }
}

impl Default for MessageReader {
    fn default() -> Self {
        Self::new()
    }
}
