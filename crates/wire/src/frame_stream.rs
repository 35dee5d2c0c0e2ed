//! Ethernet frames on a byte stream: a virtual machine's network interface on a Unix socket.
//!
//! A big-endian length of 4 bytes precedes each frame. QEMU (`-netdev stream`) and libkrun send frames so, and expect
//! them so. The stream carries no checksum offloads and no super-packets.
//!
//! [`FrameReader`] guarantees that the peer chooses no allocation: the buffer has a fixed size. A length beyond
//! [`FRAME_MAX`] is an error, because the start of the next frame cannot be known then.

use thiserror::Error;

use crate::stream_buffer::StreamBuffer;

/// Length in bytes of the number that precedes each frame.
pub const PREFIX_LEN: usize = 4;

/// Maximum length of a frame in bytes: the longest IP packet behind an Ethernet header with one VLAN tag.
pub const FRAME_MAX: usize = 65_535 + 18;

/// Length that no frame has. The start of the next frame is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the stream announces a frame of {len} bytes, the limit is {FRAME_MAX}")]
pub struct FrameTooLong {
    /// Announced length in bytes.
    pub len: u32,
}

/// Returns the bytes that precede a frame of `len` bytes; `None` if it is longer than [`FRAME_MAX`].
pub fn prefix(len: usize) -> Option<[u8; PREFIX_LEN]> {
    let len = u32::try_from(len).ok().filter(|_| len <= FRAME_MAX)?;
    Some(len.to_be_bytes())
}

/// Returns the length of the frame at the head of `bytes`; `None` while the length itself is incomplete.
fn announced(bytes: &[u8]) -> Result<Option<usize>, FrameTooLong> {
    let Some(prefix) = bytes.first_chunk::<PREFIX_LEN>() else { return Ok(None) };
    let len = u32::from_be_bytes(*prefix);
    match usize::try_from(len) {
        Ok(valid) if valid <= FRAME_MAX => Ok(Some(valid)),
        _ => Err(FrameTooLong { len }),
    }
}

/// Reader that collects the bytes of a stream and returns whole frames.
///
/// The caller reads into [`spare`](Self::spare), reports the count with [`commit`](Self::commit), and calls
/// [`next`](Self::next) until it returns `None`. After an error the reader keeps returning that error, until
/// [`clear`](Self::clear).
#[derive(Debug)]
pub struct FrameReader {
    buffer: StreamBuffer,
}

impl FrameReader {
    /// Size of the buffer in bytes: several of the longest frames, so that one read returns many frames.
    const CAPACITY: usize = 4 * (PREFIX_LEN + FRAME_MAX);

    /// Creates an empty reader.
    pub fn new() -> FrameReader {
        FrameReader { buffer: StreamBuffer::new(FrameReader::CAPACITY) }
    }

    /// Returns the space for the next bytes of the stream. The space is never empty once [`next`](Self::next)
    /// returned `None`: an incomplete frame fills at most a quarter of the buffer.
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

    /// Returns the next whole frame, which may be empty.
    ///
    /// # Errors
    /// Returns [`FrameTooLong`]; the caller must close the connection.
    #[allow(clippy::should_implement_trait)] // The result borrows from self, so this is no Iterator.
    pub fn next(&mut self) -> Result<Option<&[u8]>, FrameTooLong> {
        if !self.has_next()? {
            return Ok(None);
        }
        let len = announced(self.buffer.bytes())?.unwrap_or(0);
        Ok(self.buffer.take(PREFIX_LEN + len).get(PREFIX_LEN..))
    }

    /// Returns `true` if the next frame is complete.
    ///
    /// # Errors
    /// Returns [`FrameTooLong`] as [`next`](Self::next) does.
    pub fn has_next(&self) -> Result<bool, FrameTooLong> {
        let bytes = self.buffer.bytes();
        Ok(announced(bytes)?.is_some_and(|len| bytes.len() - PREFIX_LEN >= len))
    }

    /// Removes all bytes: the next ones belong to another stream.
    pub fn clear(&mut self) {
        self.buffer.clear();
    }
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fuzzing::frame_stream;

    fn read(reader: &mut FrameReader, bytes: &[u8]) -> Result<Vec<Vec<u8>>, FrameTooLong> {
        reader.spare()[..bytes.len()].copy_from_slice(bytes);
        reader.commit(bytes.len());
        let mut frames = Vec::new();
        while let Some(frame) = reader.next()? {
            frames.push(frame.to_vec());
        }
        Ok(frames)
    }

    #[test]
    fn length_beyond_the_limit_is_rejected_before_the_frame_arrives() {
        let longest = u32::try_from(FRAME_MAX).unwrap();
        for len in [longest + 1, 1 << 24, u32::MAX] {
            let mut reader = FrameReader::new();
            assert_eq!(read(&mut reader, &len.to_be_bytes()), Err(FrameTooLong { len }));
            assert_eq!(reader.has_next(), Err(FrameTooLong { len }));
            reader.clear();
            assert_eq!(read(&mut reader, &[0, 0, 0, 1, 7]), Ok(vec![vec![7]]));
        }
        assert_eq!(read(&mut FrameReader::new(), &longest.to_be_bytes()), Ok(vec![]));
        assert_eq!(prefix(FRAME_MAX), Some(longest.to_be_bytes()));
        assert_eq!(prefix(FRAME_MAX + 1), None);
    }

    #[test]
    fn longest_frames_pass_in_pieces_of_any_size() {
        let frame = vec![0xA5; FRAME_MAX];
        let stream: Vec<u8> =
            (0..9).flat_map(|_| [&prefix(FRAME_MAX).unwrap()[..], &frame].concat()).collect();
        let mut reader = FrameReader::new();
        let (mut at, mut seen) = (0, 0);
        while at < stream.len() {
            let room = reader.spare();
            let len = room.len().min(stream.len() - at);
            assert!(len > 0);
            room[..len].copy_from_slice(&stream[at..at + len]);
            reader.commit(len);
            at += len;
            while let Some(next) = reader.next().unwrap() {
                assert_eq!(next, frame);
                seen += 1;
            }
        }
        assert_eq!(seen, 9);
    }

    proptest! {
        #[test]
        fn arbitrary_streams_give_the_same_frames_in_any_pieces(
            data in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            frame_stream(&data);
        }

        #[test]
        fn valid_streams_give_the_same_frames_in_any_pieces(
            frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..20),
            split in any::<u8>(),
        ) {
            let mut data = vec![split];
            for frame in &frames {
                data.extend(prefix(frame.len()).unwrap());
                data.extend(frame);
            }
            frame_stream(&data);
        }
    }
}
