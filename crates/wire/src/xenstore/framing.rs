//! Message framing: extracts whole messages from a byte stream.

use super::header::{HEADER_LEN, Header, MessageType, PAYLOAD_MAX};
use crate::stream_buffer::StreamBuffer;
use thiserror::Error;

/// Invalid message in the stream. The start of the next message is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FramingError {
    /// Header announces more payload than a message may hold.
    #[error("a {kind:?} message announces {len} payload bytes, the limit is {limit}")]
    PayloadTooLong {
        /// Type that the header claims.
        kind: MessageType,
        /// Payload bytes that the header announces.
        len: u32,
        /// Maximum, equal to [`PAYLOAD_MAX`].
        limit: u32,
    },
}

/// Message at the head of a byte string.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decoded<'a> {
    pub header: Header,
    /// Payload of `header.len` bytes.
    pub payload: &'a [u8],
    /// Bytes behind the message.
    pub rest: &'a [u8],
}

/// Splits one message off the head of `bytes`; returns `None` while it is incomplete.
///
/// # Errors
/// Returns [`FramingError`] as soon as the header is complete, without waiting for the payload.
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
    // The length is at most 4096, so the cast cannot truncate.
    let len = header.len as usize;
    Ok(rest.split_at_checked(len).map(|(payload, rest)| Decoded { header, payload, rest }))
}

/// Reader that collects the bytes of a stream and returns whole messages.
///
/// The buffer holds two of the largest messages and never grows. The caller reads into
/// [`spare`](Self::spare), reports the count with [`commit`](Self::commit), and calls
/// [`next`](Self::next) until it returns `None`. After an error the reader keeps returning that error.
///
/// ```
/// # use ringfence_wire::xenstore::{MessageReader, MessageType, StoreRequest, Path};
/// let mut sent = Vec::new();
/// let path = Path::parse(b"/local/domain/1/name")?;
/// StoreRequest::Read { path }.emit(7, 0, &mut sent)?;
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
    buffer: StreamBuffer,
}

impl MessageReader {
    const CAPACITY: usize = 2 * (HEADER_LEN + PAYLOAD_MAX as usize);

    /// Creates an empty reader.
    pub fn new() -> MessageReader {
        MessageReader { buffer: StreamBuffer::new(Self::CAPACITY) }
    }

    /// Returns the space for the next bytes of the stream. The space is never empty once
    /// [`next`](Self::next) returned `None`: an incomplete message fills at most half of the buffer.
    pub fn spare(&mut self) -> &mut [u8] {
        self.buffer.spare()
    }

    /// Marks the first `filled` bytes of the last [`spare`](Self::spare) as read from the stream.
    ///
    /// # Panics
    /// Panics if `filled` exceeds the spare space. The count is the caller's own, never the peer's.
    pub fn commit(&mut self, filled: usize) {
        self.buffer.commit(filled);
    }

    /// Returns the next whole message: header and payload.
    ///
    /// # Errors
    /// Returns [`FramingError`]; the caller must close the connection.
    #[allow(clippy::should_implement_trait)] // The result borrows from self, so this is no Iterator.
    pub fn next(&mut self) -> Result<Option<(Header, &[u8])>, FramingError> {
        let Some(Decoded { header, payload, .. }) = decode(self.buffer.bytes())? else {
            return Ok(None);
        };
        let len = HEADER_LEN + payload.len();
        Ok(self.buffer.take(len).get(HEADER_LEN..).map(|payload| (header, payload)))
    }

    /// Returns the number of received bytes that belong to no whole message yet.
    pub fn pending(&self) -> usize {
        self.buffer.bytes().len()
    }
}

impl Default for MessageReader {
    fn default() -> Self {
        Self::new()
    }
}
