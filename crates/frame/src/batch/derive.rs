//! Derived frames: segments of a super-packet, and super-packets joined from small frames.

use core::ops::Range;

use ringfence_offload::OffloadMeta;
use ringfence_sys::numbers::bounded;

use super::{Batch, Frame, FrameSegment, HEADER_MAX, JOINED_SEGMENTS_MAX};

/// Maximum number of derived frames at a time: 64 KiB in segments of 512 bytes. A larger number is of no
/// use, since a ring has only 256 slots.
pub const DERIVED_MAX: usize = 128;

/// Maximum number of joined frames at a time. The rest is left for split frames.
pub const JOINED_MAX: usize = DERIVED_MAX / 2;

/// Numbers of frames and segments: those of received frames, and those that [`Batch::drop_derived`] keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Derived {
    received: (usize, usize),
    kept: (usize, usize),
}

/// Reasons for which a frame is not derived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeriveError {
    /// All [`DERIVED_MAX`] derived frames are in use, or all [`JOINED_MAX`] joined ones.
    #[error("all {limit} derived frames are in use")]
    Full {
        /// Maximum number of derived frames.
        limit: usize,
    },
    /// Header that is longer than [`HEADER_MAX`].
    #[error("a header of {len} bytes, the limit is {HEADER_MAX}")]
    Header {
        /// Length of the header in bytes.
        len: usize,
    },
    /// Payload range that is not inside the original frame.
    #[error("bytes {start} to {end} of a frame of {len}")]
    Payload {
        /// Offset of the range's first byte.
        start: usize,
        /// Offset behind the range's last byte.
        end: usize,
        /// Length of the original in bytes.
        len: usize,
    },
    /// Frame with more segments than [`JOINED_SEGMENTS_MAX`].
    #[error("more than {JOINED_SEGMENTS_MAX} segments in a joined frame")]
    Segments,
}

impl Batch {
    /// Returns the number of frames that can still be derived.
    pub fn derivable(&self) -> usize {
        DERIVED_MAX - self.derived()
    }

    fn derived(&self) -> usize {
        self.derived.map_or(0, |derived| self.frames.len() - derived.received.0)
    }

    /// Adds a frame of a copied `header` and the bytes at `payload` of the frame `original`, which are not
    /// copied; returns its index. No frame may be received while derived frames exist.
    ///
    /// # Errors
    ///
    /// Returns [`DeriveError`]; nothing is added.
    pub fn derive(
        &mut self,
        original: u32,
        header: &[u8],
        payload: Range<usize>,
        meta: OffloadMeta,
    ) -> Result<u32, DeriveError> {
        self.add_derived(header, [(original, payload)], meta, DERIVED_MAX)
    }

    /// Adds a frame of a copied `header` and the payload ranges of `members` in order, which are not copied;
    /// returns its index. No frame may be received while derived frames exist.
    ///
    /// # Errors
    ///
    /// Returns [`DeriveError`]; nothing is added.
    pub fn join(
        &mut self,
        header: &[u8],
        members: impl IntoIterator<Item = (u32, Range<usize>)>,
        meta: OffloadMeta,
    ) -> Result<u32, DeriveError> {
        self.add_derived(header, members, meta, JOINED_MAX)
    }

    fn add_derived(
        &mut self,
        header: &[u8],
        members: impl IntoIterator<Item = (u32, Range<usize>)>,
        meta: OffloadMeta,
        limit: usize,
    ) -> Result<u32, DeriveError> {
        let place = self.derived();
        if place >= limit {
            return Err(DeriveError::Full { limit });
        }
        if header.len() > HEADER_MAX {
            return Err(DeriveError::Header { len: header.len() });
        }
        let start = (self.frames.len(), self.segments.len());
        let mut len = header.len();
        for (original, payload) in members {
            let bytes = payload.len();
            if let Err(error) = self.share(original, payload, start.1) {
                self.segments.truncate(start.1);
                return Err(error);
            }
            len += bytes;
        }
        self.derived.get_or_insert(Derived { received: start, kept: start });
        let at = self.receivable + place * HEADER_MAX;
        self.scratch[at..at + header.len()].copy_from_slice(header);
        let segments = start.1..self.segments.len();
        self.frames.push(Frame::new(at..at + header.len(), segments, len, meta));
        // A batch has fewer than 2^32 frames: each has at least one byte of scratch memory.
        Ok(bounded(start.0, u32::MAX))
    }

    /// Adds segments for the bytes `wanted` of a frame. The new frame's segments begin at index `first`.
    fn share(
        &mut self,
        original: u32,
        wanted: Range<usize>,
        first: usize,
    ) -> Result<(), DeriveError> {
        let found = usize::try_from(original).ok().and_then(|index| self.frames.get(index));
        let len = found.map_or(0, |frame| frame.len());
        let Range { start, end } = wanted;
        let Some(frame) = found.filter(|_| start <= end && end <= len) else {
            return Err(DeriveError::Payload { start, end, len });
        };
        let (header, rest) = (frame.header(), frame.segments());
        let mut piece = FrameSegment::Private { offset: header.start, len: header.len() };
        let mut position = 0;
        for next in rest.start..=rest.end {
            let piece_end = position + piece.len();
            let (from, to) = (start.max(position), end.min(piece_end));
            if from < to {
                if self.segments.len() - first == JOINED_SEGMENTS_MAX {
                    return Err(DeriveError::Segments);
                }
                self.add_part(piece.part(from - position, to - from), first);
            }
            if piece_end >= end || next == rest.end {
                break;
            }
            (piece, position) = (self.segments[next], piece_end);
        }
        Ok(())
    }

    /// Adds a segment, or extends the new frame's last one if both are adjacent.
    fn add_part(&mut self, part: FrameSegment, first: usize) {
        let of_frame = self.segments.get_mut(first..).unwrap_or_default();
        if let (
            Some(FrameSegment::Private { offset, len }),
            FrameSegment::Private { offset: next, len: more },
        ) = (of_frame.last_mut(), part)
            && *offset + *len == next
        {
            *len += more;
            return;
        }
        self.segments.push(part);
    }

    /// Keeps the present derived frames over the next [`Batch::drop_derived`].
    pub fn keep_derived(&mut self) {
        if let Some(derived) = &mut self.derived {
            derived.kept = (self.frames.len(), self.segments.len());
        }
    }

    /// Removes the derived frames that were not kept.
    pub fn drop_derived(&mut self) {
        if let Some(Derived { received, kept: (frames, segments) }) = self.derived {
            self.frames.truncate(frames);
            self.segments.truncate(segments);
            if received.0 == frames {
                self.derived = None;
            }
        }
    }

    /// Removes all derived frames.
    pub fn drop_all_derived(&mut self) {
        if let Some(derived) = self.derived.take() {
            self.frames.truncate(derived.received.0);
            self.segments.truncate(derived.received.1);
        }
    }
}

impl FrameSegment {
    /// Returns the `len` bytes from `skip` on. The range must lie inside the segment.
    fn part(self, skip: usize, len: usize) -> FrameSegment {
        match self {
            FrameSegment::Private { offset, .. } => {
                FrameSegment::Private { offset: offset + skip, len }
            }
            FrameSegment::Lent { index, offset, .. } => {
                FrameSegment::Lent { index, offset: offset + skip, len }
            }
        }
    }
}
