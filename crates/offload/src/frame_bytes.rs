//! Access to a frame's bytes by offset, for checksums over payload.
//!
//! Segmentation and coalescing move no payload; they return ranges of bytes. Only completing or verifying
//! a checksum reads payload. The payload may be one slice, many slices, or granted memory that is copied
//! through a small buffer. [`FrameBytes`] abstracts over these sources.

use std::ops::Range;

use crate::checksum::Accumulator;
use ringfence_base::numbers::{u64_from, usize_from};

/// Source of a frame's bytes for checksums.
pub trait FrameBytes {
    /// Passes the bytes of `range` to `look` in order, in pieces of any length, each byte once. Offsets
    /// count from the start of the frame (its Ethernet header). Bytes beyond the frame are omitted.
    fn show(&mut self, range: Range<u32>, look: impl FnMut(&[u8]));
}

/// Frame in one slice.
impl FrameBytes for &[u8] {
    fn show(&mut self, range: Range<u32>, mut look: impl FnMut(&[u8])) {
        look(part(self, 0, &range));
    }
}

/// Frame in many slices. The first slice usually holds the headers.
///
/// Sequential reads continue at the last position. So segmenting a super-packet of any number of slices
/// takes one pass over them.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    pieces: &'a [&'a [u8]],
    /// Slice of the last read, and the offset of its first byte.
    at: usize,
    position: u64,
}

impl<'a> Pieces<'a> {
    /// Creates the frame whose bytes are those of `pieces` in order.
    #[must_use]
    pub fn new(pieces: &'a [&'a [u8]]) -> Self {
        Self { pieces, at: 0, position: 0 }
    }
}

impl FrameBytes for Pieces<'_> {
    fn show(&mut self, range: Range<u32>, mut look: impl FnMut(&[u8])) {
        if u64::from(range.start) < self.position {
            (self.at, self.position) = (0, 0);
        }
        while let Some(piece) = self.pieces.get(self.at) {
            let wanted = part(piece, self.position, &range);
            if !wanted.is_empty() {
                look(wanted);
            }
            let end = self.position + len(piece);
            if end >= u64::from(range.end) {
                return;
            }
            (self.at, self.position) = (self.at + 1, end);
        }
    }
}

#[inline]
fn len(bytes: &[u8]) -> u64 {
    u64_from(bytes.len())
}

/// Returns the bytes of `piece`, which begins at `position`, that lie in `range`.
#[inline]
fn part<'a>(piece: &'a [u8], position: u64, range: &Range<u32>) -> &'a [u8] {
    let index = |at: u32| {
        let at = u64::from(at).saturating_sub(position);
        usize_from(at).min(piece.len())
    };
    piece.get(index(range.start)..index(range.end)).unwrap_or_default()
}

/// Source with fewer, or more, bytes than requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{expected} bytes of payload were requested, the source gave {given}")]
pub struct BytesMissing {
    /// Bytes requested from the source.
    pub expected: u32,
    /// Bytes that the source gave.
    pub given: u64,
}

/// Adds the bytes of `range` to `sum`.
pub(crate) fn add_range(
    sum: &mut Accumulator,
    frame_bytes: &mut impl FrameBytes,
    range: &Range<u32>,
) -> Result<(), BytesMissing> {
    let expected = range.end.saturating_sub(range.start);
    let mut given = 0u64;
    frame_bytes.show(range.clone(), |piece| {
        sum.add(piece);
        given = given.saturating_add(len(piece));
    });
    if given != u64::from(expected) {
        return Err(BytesMissing { expected, given });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_of_any_cut_read_like_one_slice(
            lengths in prop::collection::vec(0usize..40, 0..8),
            ranges in prop::collection::vec((0u32..300, 0u32..100), 1..6),
        ) {
            let all: Vec<u8> = (0..=255).cycle().take(lengths.iter().sum()).collect();
            let mut rest = &all[..];
            let pieces: Vec<&[u8]> = lengths
                .iter()
                .map(|&len| {
                    let (piece, tail) = rest.split_at(len);
                    rest = tail;
                    piece
                })
                .collect();
            let mut frame_bytes = Pieces::new(&pieces);
            for (start, len) in ranges {
                let (mut scattered, mut whole) = (Vec::new(), Vec::new());
                frame_bytes.show(start..start + len, |piece| scattered.extend_from_slice(piece));
                (&all[..]).show(start..start + len, |piece| whole.extend_from_slice(piece));
                prop_assert_eq!(&scattered, &whole);
                let from = all.len().min(start as usize);
                let to = all.len().min((start + len) as usize);
                prop_assert_eq!(&whole, &all[from..to]);
            }
        }
    }
}
