//! Frames that are made of others: segments of a super-packet.

use core::ops::Range;

use ringfence_offload::OffloadMeta;

use super::{Batch, Frame, HEADER_MAX, Segment};

/// Derived frames that there can be at a time: 64 KiB in segments of 512 octets. More than a ring has
/// slots would be of no use.
pub const DERIVED_MAX: usize = 128;

/// Why a frame was not derived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeriveError {
    /// There are [`DERIVED_MAX`] already.
    #[error("all {DERIVED_MAX} derived frames are in use")]
    Full,
    /// The header is longer than [`HEADER_MAX`].
    #[error("a header of {len} octets, the limit is {HEADER_MAX}")]
    Header {
        /// Octets offered.
        len: usize,
    },
    /// The original does not have that payload.
    #[error("octets {start} to {end} of a frame of {len}")]
    Payload {
        /// First octet.
        start: usize,
        /// First octet behind it.
        end: usize,
        /// Octets of the original.
        len: usize,
    },
}

impl Batch {
    /// Derived frames that can still be made.
    pub fn derivable(&self) -> usize {
        DERIVED_MAX - self.derived()
    }

    fn derived(&self) -> usize {
        self.received.map_or(0, |(frames, _)| self.frames.len() - frames)
    }

    /// Adds a frame of `header`, which is copied, and the octets at `payload` of the frame `original`,
    /// which stay where they are; returns its index. While there are such frames none is to be
    /// received.
    ///
    /// # Errors
    ///
    /// [`DeriveError`]; nothing is added.
    pub fn derive(
        &mut self,
        original: u32,
        header: &[u8],
        payload: Range<usize>,
        meta: OffloadMeta,
    ) -> Result<u32, DeriveError> {
        let derived = self.derived();
        if derived == DERIVED_MAX {
            return Err(DeriveError::Full);
        }
        if header.len() > HEADER_MAX {
            return Err(DeriveError::Header { len: header.len() });
        }
        let found = usize::try_from(original).ok().and_then(|index| self.frames.get(index));
        let len = found.map_or(0, |frame| frame.len);
        let Range { start, end } = payload;
        let Some(frame) = found.filter(|_| start <= end && end <= len) else {
            return Err(DeriveError::Payload { start, end, len });
        };
        let (first, rest) = (frame.header.clone(), frame.segments.clone());
        if self.received.is_none() {
            self.received = Some((self.frames.len(), self.segments.len()));
        }
        let at = self.receivable + derived * HEADER_MAX;
        self.scratch[at..at + header.len()].copy_from_slice(header);
        let segments_start = self.segments.len();
        self.share(first, rest, start..end);
        self.frames.push(Frame {
            header: at..at + header.len(),
            segments: segments_start..self.segments.len(),
            len: header.len() + (end - start),
            meta,
        });
        // A batch never has so many: each frame takes more than an octet.
        Ok(u32::try_from(self.frames.len() - 1).unwrap_or(u32::MAX))
    }

    /// Adds segments for the octets `wanted` of a frame with this header and these segments.
    fn share(&mut self, header: Range<usize>, rest: Range<usize>, wanted: Range<usize>) {
        let mut piece = Segment::Private { offset: header.start, len: header.len() };
        let mut position = 0;
        for next in rest.start..=rest.end {
            let end = position + piece.len();
            let (from, to) = (wanted.start.max(position), wanted.end.min(end));
            if from < to {
                self.segments.push(piece.part(from - position, to - from));
            }
            if end >= wanted.end || next == rest.end {
                return;
            }
            (piece, position) = (self.segments[next], end);
        }
    }

    /// Takes the derived frames away.
    pub fn drop_derived(&mut self) {
        if let Some((frames, segments)) = self.received.take() {
            self.frames.truncate(frames);
            self.segments.truncate(segments);
        }
    }
}

impl Segment {
    /// `len` octets of it from `skip` on, which it has.
    fn part(self, skip: usize, len: usize) -> Segment {
        match self {
            Segment::Private { offset, .. } => Segment::Private { offset: offset + skip, len },
            Segment::Lent { index, offset, .. } => {
                Segment::Lent { index, offset: offset + skip, len }
            }
        }
    }
}
