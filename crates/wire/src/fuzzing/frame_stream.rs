//! Fuzz target `frame_stream`: the byte stream of a virtual machine's frames.

use crate::frame_stream::{FRAME_MAX, FrameReader, PREFIX_LEN};
use crate::numbers::usize_from;

/// Runs one case: the length of the pieces in which a stream arrives, and the stream.
///
/// # Panics
///
/// Panics if the frames differ from those of a reader that has all bytes at once.
pub fn frame_stream(data: &[u8]) {
    let Some((&split, stream)) = data.split_first() else { return };
    let (expected, fails) = oracle(stream);
    let mut reader = FrameReader::new();
    let mut frames = Vec::new();
    let mut failed = false;
    'all: for piece in stream.chunks(usize::from(split) + 1) {
        let room = reader.spare();
        assert!(room.len() >= piece.len(), "an incomplete frame leaves no room");
        room[..piece.len()].copy_from_slice(piece);
        reader.commit(piece.len());
        loop {
            let has_next = reader.has_next();
            match reader.next() {
                Ok(Some(frame)) => {
                    assert_eq!(has_next, Ok(true));
                    assert!(frame.len() <= FRAME_MAX);
                    frames.push(frame.to_vec());
                }
                Ok(None) => {
                    assert_eq!(has_next, Ok(false));
                    break;
                }
                Err(error) => {
                    assert_eq!((has_next, reader.next()), (Err(error), Err(error)));
                    failed = true;
                    break 'all;
                }
            }
        }
    }
    assert_eq!(failed, fails);
    assert_eq!(frames, expected);
}

/// Returns the frames of a whole stream, and `true` if a length ends it.
fn oracle(mut stream: &[u8]) -> (Vec<Vec<u8>>, bool) {
    let mut frames = Vec::new();
    while stream.len() >= PREFIX_LEN {
        let len = stream[..PREFIX_LEN].iter().fold(0_u64, |len, &byte| len * 256 + u64::from(byte));
        if len > FRAME_MAX as u64 {
            return (frames, true);
        }
        let end = PREFIX_LEN + usize_from(len);
        let Some(frame) = stream.get(PREFIX_LEN..end) else { break };
        frames.push(frame.to_vec());
        stream = &stream[end..];
    }
    (frames, false)
}
