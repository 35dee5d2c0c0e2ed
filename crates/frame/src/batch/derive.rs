//! Frames that are made of others: segments of a super-packet, and super-packets of small frames.

use core::ops::Range;

use ringfence_offload::OffloadMeta;

use super::{Batch, Frame, HEADER_MAX, JOINED_SEGMENTS_MAX, Segment};

/// Derived frames that there can be at a time: 64 KiB in segments of 512 bytes. More than a ring has
/// slots would be of no use.
pub const DERIVED_MAX: usize = 128;

/// Joined frames that there can be at a time. They leave room for others to be split.
pub const JOINED_MAX: usize = DERIVED_MAX / 2;

/// Frames and segments that are not derived, and those that are not, or stay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Derived {
    received: (usize, usize),
    kept: (usize, usize),
}

/// Why a frame was not derived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeriveError {
    /// There are [`DERIVED_MAX`] already, or [`JOINED_MAX`] where frames are joined.
    #[error("all {limit} derived frames are in use")]
    Full {
        /// How many there can be.
        limit: usize,
    },
    /// The header is longer than [`HEADER_MAX`].
    #[error("a header of {len} bytes, the limit is {HEADER_MAX}")]
    Header {
        /// Bytes offered.
        len: usize,
    },
    /// The original does not have that payload.
    #[error("bytes {start} to {end} of a frame of {len}")]
    Payload {
        /// First byte.
        start: usize,
        /// First byte behind it.
        end: usize,
        /// Bytes of the original.
        len: usize,
    },
    /// The frame would have more segments than [`JOINED_SEGMENTS_MAX`].
    #[error("more than {JOINED_SEGMENTS_MAX} segments in a joined frame")]
    Segments,
}

impl Batch {
    /// Derived frames that can still be made.
    pub fn derivable(&self) -> usize {
        DERIVED_MAX - self.derived()
    }

    fn derived(&self) -> usize {
        self.derived.map_or(0, |derived| self.frames.len() - derived.received.0)
    }

    /// Adds a frame of `header`, which is copied, and the bytes at `payload` of the frame `original`,
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
        self.add_derived(header, [(original, payload)], meta, DERIVED_MAX)
    }

    /// Adds a frame of `header`, which is copied, and of bytes of other frames, one behind the other,
    /// which stay where they are; returns its index. While there are such frames none is to be
    /// received.
    ///
    /// # Errors
    ///
    /// [`DeriveError`]; nothing is added.
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
        // A batch never has so many: each frame takes more than an byte.
        Ok(u32::try_from(start.0).unwrap_or(u32::MAX))
    }

    /// Adds segments for the bytes `wanted` of a frame; those from `first` on belong to the same one.
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
        let mut piece = Segment::Private { offset: header.start, len: header.len() };
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

    /// Adds a segment, or makes the one before it longer if they are neighbours and of one frame.
    fn add_part(&mut self, part: Segment, first: usize) {
        let of_frame = self.segments.get_mut(first..).unwrap_or_default();
        if let (
            Some(Segment::Private { offset, len }),
            Segment::Private { offset: next, len: more },
        ) = (of_frame.last_mut(), part)
            && *offset + *len == next
        {
            *len += more;
            return;
        }
        self.segments.push(part);
    }

    /// The derived frames that there are stay when others are taken away.
    pub fn keep_derived(&mut self) {
        if let Some(derived) = &mut self.derived {
            derived.kept = (self.frames.len(), self.segments.len());
        }
    }

    /// Takes the derived frames away, but for those that were kept.
    pub fn drop_derived(&mut self) {
        if let Some(Derived { received, kept: (frames, segments) }) = self.derived {
            self.frames.truncate(frames);
            self.segments.truncate(segments);
            if received.0 == frames {
                self.derived = None;
            }
        }
    }

    /// Takes all derived frames away.
    pub fn drop_all_derived(&mut self) {
        if let Some(derived) = self.derived.take() {
            self.frames.truncate(derived.received.0);
            self.segments.truncate(derived.received.1);
        }
    }
}

impl Segment {
    /// `len` bytes of it from `skip` on, which it has.
    fn part(self, skip: usize, len: usize) -> Segment {
        match self {
            Segment::Private { offset, .. } => Segment::Private { offset: offset + skip, len },
            Segment::Lent { index, offset, .. } => {
                Segment::Lent { index, offset: offset + skip, len }
            }
        }
    }
}
