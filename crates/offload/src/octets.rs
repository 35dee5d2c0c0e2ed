//! A frame's octets, by position, for what has to read payload: sums.
//!
//! Segmenting and coalescing move no payload; they say which octets go where. Only a checksum that
//! must be finished, or verified, needs to see them. They may be in one piece, in many, or in lent
//! memory that has to be fetched through a small buffer; [`FrameOctets`] is what all of these are.

use std::ops::Range;

use crate::checksum::Accumulator;

/// Octets of a frame that are read to be summed.
pub trait FrameOctets {
    /// Shows the octets of `range` in order, in pieces of any length, none of them twice. Positions
    /// count from the start of the frame (its Ethernet header). What the frame does not have is left
    /// out.
    fn show(&mut self, range: Range<u32>, look: impl FnMut(&[u8]));
}

/// A frame in one piece.
impl FrameOctets for &[u8] {
    fn show(&mut self, range: Range<u32>, mut look: impl FnMut(&[u8])) {
        look(part(self, 0, &range));
    }
}

/// A frame in many pieces, the first of which usually holds the headers.
///
/// Reading on from where the last read ended costs nothing extra, so a super-packet of any number of
/// pieces is cut in one pass over them.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    pieces: &'a [&'a [u8]],
    /// The piece that was read last, and its first octet's position.
    at: usize,
    position: u64,
}

impl<'a> Pieces<'a> {
    /// The frame whose octets are those of `pieces`, one after the other.
    #[must_use]
    pub fn new(pieces: &'a [&'a [u8]]) -> Self {
        Self { pieces, at: 0, position: 0 }
    }
}

impl FrameOctets for Pieces<'_> {
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

fn len(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

/// The octets of `piece`, which begins at `position`, that lie in `range`.
fn part<'a>(piece: &'a [u8], position: u64, range: &Range<u32>) -> &'a [u8] {
    let index = |at: u32| {
        let at = u64::from(at).saturating_sub(position);
        usize::try_from(at).unwrap_or(usize::MAX).min(piece.len())
    };
    piece.get(index(range.start)..index(range.end)).unwrap_or_default()
}

/// The source of a frame's octets had fewer, or more, than were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{expected} octets of payload were asked for, {given} were shown")]
pub struct OctetsMissing {
    /// Octets asked for.
    pub expected: u32,
    /// Octets shown.
    pub given: u64,
}

/// Adds the octets of `range` to `sum`.
pub(crate) fn add_range(
    sum: &mut Accumulator,
    octets: &mut impl FrameOctets,
    range: &Range<u32>,
) -> Result<(), OctetsMissing> {
    let expected = range.end.saturating_sub(range.start);
    let mut given = 0u64;
    octets.show(range.clone(), |piece| {
        sum.add(piece);
        given = given.saturating_add(len(piece));
    });
    if given != u64::from(expected) {
        return Err(OctetsMissing { expected, given });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_read_as_their_sequence(
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
            let mut octets = Pieces::new(&pieces);
            for (start, len) in ranges {
                let (mut scattered, mut whole) = (Vec::new(), Vec::new());
                octets.show(start..start + len, |piece| scattered.extend_from_slice(piece));
                (&all[..]).show(start..start + len, |piece| whole.extend_from_slice(piece));
                prop_assert_eq!(&scattered, &whole);
                let from = all.len().min(start as usize);
                let to = all.len().min((start + len) as usize);
                prop_assert_eq!(&whole, &all[from..to]);
            }
        }
    }
}
