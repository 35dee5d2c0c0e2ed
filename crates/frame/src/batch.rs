//! Frame batches: the frames of one round of a datapath worker, and their memory.
//!
//! # Theory of operation
//!
//! In a round, a port *receives* frames into a batch. The switch selects the egress ports, which
//! *transmit* the frames synchronously. Then the batch is cleared. A frame exists for one round only, and
//! the batch reuses its storage: the steady state allocates nothing per frame.
//!
//! A batch owns `scratch`, private memory of a fixed size that is reserved from front to back, and a
//! list of [`LentSlice`]s. A frame is a *header* (its first bytes, private, contiguous, at most
//! [`HEADER_MAX`]) and *segments*. A segment is private memory, or memory of the domain that lent it.
//! A short frame has a header only.
//!
//! Headers are private, so that a parsed header cannot change afterwards. A lent segment can change at
//! any time; it is only copied or passed to the kernel.
//!
//! # Steps of a receiving port
//!
//! 1. The port writes into [`Batch::scratch_tail_mut`], the free scratch memory. Pieces from
//!    `split_at_mut` can be the targets of one copy list. [`Batch::scratch_used`] is the offset of the
//!    tail's first byte.
//! 2. [`Batch::reserve`] reserves the bytes that were written.
//! 3. [`Batch::push_contiguous`], or [`Batch::frame`] for a frame of several pieces, adds a frame.
//!    Reserved memory that belongs to no frame stays unused until the batch is cleared.
//!
//! # Derived frames
//!
//! Egress processing splits a super-packet that the egress port does not accept ([`Batch::derive`]).
//! Each derived frame has its own header and refers to the payload of the original. At most
//! [`DERIVED_MAX`] exist at a time. After the port has sent them, the caller removes them
//! ([`Batch::drop_derived`]) and derives the next ones.
//!
//! [`Batch::join`] makes one frame of several, with its own header and the payload of all of them.
//! [`Batch::keep_derived`] keeps joined frames while others are split.
//! [`Batch::drop_all_derived`] removes all of them at the end.

mod derive;
mod room;
mod view;

#[cfg(test)]
mod tests;

use core::ops::Range;

use ringfence_memory::{LIST_MAX, LentSlice};
use ringfence_offload::OffloadMeta;
use ringfence_offload::checksum::{Completion, PartialError};
use ringfence_offload::meta::Checksum;
use ringfence_sys::numbers::bounded;

use derive::Derived;
pub use derive::{DERIVED_MAX, DeriveError, JOINED_MAX};
pub use room::Room;
pub use view::{FrameView, SegmentView, Segments};

/// Maximum length of a frame's header in bytes.
pub const HEADER_MAX: usize = 256;

/// Maximum number of segments behind the header of a received frame.
pub const SEGMENTS_MAX: usize = 30;

/// Maximum number of segments behind the header of a joined frame. With the header and a virtio-net
/// header they fill one scatter-gather list.
pub const JOINED_SEGMENTS_MAX: usize = LIST_MAX - 2;

/// Default number of frames of a batch.
pub const FRAMES_DEFAULT: usize = 64;

/// Default size of the scratch memory in bytes: 64 frames of 32 KiB, or 31 of the maximum size.
pub const SCRATCH_DEFAULT: usize = 2 << 20;

/// Maximum size of the scratch memory in bytes.
pub const SCRATCH_MAX: usize = 1 << 30;

/// Alignment of short frames in the scratch memory, so that no two of them share a cache line.
const ALIGN: usize = 64;

/// Reasons for which a batch refuses a frame or a piece of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// Every frame of the batch is in use.
    #[error("all {limit} frames of the batch are in use")]
    Frames {
        /// Maximum number of frames.
        limit: usize,
    },
    /// Range that was not reserved.
    #[error("{len} bytes at {offset} are not reserved ({reserved} are)")]
    NotReserved {
        /// Offset of the range's first byte.
        offset: usize,
        /// Length of the range in bytes.
        len: usize,
        /// Number of reserved bytes, from offset 0.
        reserved: usize,
    },
    /// Range that reaches over the end of the lent slice.
    #[error("{len} bytes at {offset} do not lie inside {size} lent ones")]
    NotLent {
        /// Offset of the range's first byte.
        offset: usize,
        /// Length of the range in bytes.
        len: usize,
        /// Length of the lent slice in bytes.
        size: usize,
    },
    /// Header that is longer than [`HEADER_MAX`].
    #[error("a header of {len} bytes, the limit is {HEADER_MAX}")]
    Header {
        /// Length of the header in bytes.
        len: usize,
    },
    /// Frame with more segments than [`SEGMENTS_MAX`].
    #[error("more than {SEGMENTS_MAX} segments in one frame")]
    Segments,
}

/// Piece of a frame behind its header. Its range was checked when the piece was added.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FrameSegment {
    Private { offset: usize, len: usize },
    Lent { index: usize, offset: usize, len: usize },
}

impl FrameSegment {
    fn len(self) -> usize {
        match self {
            FrameSegment::Private { len, .. } | FrameSegment::Lent { len, .. } => len,
        }
    }
}

/// Frame record of half a cache line: most records of a batch describe small frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// Offset of the header in the scratch memory, its length, and the length of the whole frame.
    header: u32,
    header_len: u32,
    len: u32,
    /// Index of the first segment, and the number of segments.
    first_segment: u32,
    segments: u32,
    meta: OffloadMeta,
}

/// Converts an offset or count of a batch. All are below 2^32: the scratch memory is at most 1 GiB.
#[inline]
fn number(n: usize) -> u32 {
    bounded(n, u32::MAX)
}

impl Frame {
    #[inline]
    fn new(header: Range<usize>, segments: Range<usize>, len: usize, meta: OffloadMeta) -> Frame {
        Frame {
            header: number(header.start),
            header_len: number(header.len()),
            len: number(len),
            first_segment: number(segments.start),
            segments: number(segments.len()),
            meta,
        }
    }

    #[inline]
    fn header(&self) -> Range<usize> {
        let start = self.header as usize;
        start..start + self.header_len as usize
    }

    #[inline]
    fn segments(&self) -> Range<usize> {
        let start = self.first_segment as usize;
        start..start + self.segments as usize
    }

    #[inline]
    fn len(&self) -> usize {
        self.len as usize
    }
}

/// Range of lent memory: a frame's payload behind its private header.
#[derive(Clone, Copy, Debug)]
pub struct LentRange<'a> {
    pub slice: &'a LentSlice,
    /// Offset in the slice in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Frames of one round, and the memory that holds them. See the [module](self).
#[derive(Debug)]
pub struct Batch {
    scratch: Box<[u8]>,
    used: usize,
    lent: Vec<LentSlice>,
    segments: Vec<FrameSegment>,
    frames: Vec<Frame>,
    frames_max: usize,
    /// Scratch bytes for received frames. The headers of derived frames follow them.
    receivable: usize,
    /// Position of the first derived frame, while there are derived frames.
    derived: Option<Derived>,
    /// Free slots at the expected egress ports.
    room: Room,
    /// Number of slots for the first frame that the room did not hold.
    refused: Option<usize>,
}

impl Default for Batch {
    fn default() -> Self {
        Batch::with_capacity(FRAMES_DEFAULT, SCRATCH_DEFAULT)
    }
}

impl Batch {
    /// Makes a batch of at most `frames` frames and `scratch` bytes of private memory, limited to
    /// [`SCRATCH_MAX`].
    pub fn with_capacity(frames: usize, scratch: usize) -> Batch {
        let scratch = scratch.min(SCRATCH_MAX);
        Batch {
            scratch: vec![0; scratch + DERIVED_MAX * HEADER_MAX].into_boxed_slice(),
            used: 0,
            lent: Vec::with_capacity(frames),
            segments: Vec::with_capacity(2 * frames),
            frames: Vec::with_capacity(frames + DERIVED_MAX),
            frames_max: frames,
            receivable: scratch,
            derived: None,
            room: Room::UNBOUNDED,
            refused: None,
        }
    }

    /// Removes all frames, releases the lent memory, and keeps the storage.
    #[inline]
    pub fn clear(&mut self) {
        self.used = 0;
        self.derived = None;
        self.room = Room::UNBOUNDED;
        self.refused = None;
        self.frames.clear();
        self.segments.clear();
        self.lent.clear();
    }

    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns true if the batch has no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of frames that can still be added.
    #[inline]
    pub fn frames_left(&self) -> usize {
        self.frames_max.saturating_sub(self.frames.len())
    }

    /// Limits the frames to `room` until the batch is cleared.
    pub fn limit(&mut self, room: Room) {
        self.room = room;
    }

    /// Returns the free slots at the egress ports, after the frames of the batch.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Returns true if there is room for a frame of `len` bytes. Otherwise it records the refusal, and the
    /// caller leaves this frame and the later ones at their source.
    #[inline]
    pub fn has_room_for(&mut self, len: usize) -> bool {
        let fits = self.room.fits(len);
        if !fits {
            self.refuse(len);
        }
        fits
    }

    /// Records that a frame of `len` bytes stayed at its source.
    pub fn refuse(&mut self, len: usize) {
        self.refused = Some(self.room.needed(len));
    }

    /// Returns the number of slots that the refused frame needs; `None` if no frame was refused.
    pub fn refused(&self) -> Option<usize> {
        self.refused
    }

    /// Returns the number of reserved scratch bytes: the offset of the tail's first byte.
    pub fn scratch_used(&self) -> usize {
        self.used
    }

    /// Returns the number of scratch bytes that can still be reserved.
    #[inline]
    pub fn scratch_left(&self) -> usize {
        self.receivable - self.used
    }

    /// Reserves `len` bytes at the front of the free scratch memory and returns their offset. Their
    /// content is arbitrary.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<usize> {
        if len > self.scratch_left() {
            return None;
        }
        let offset = self.used;
        self.used += len;
        Some(offset)
    }

    /// Returns the free scratch memory, which the caller fills before it reserves it.
    pub fn scratch_tail_mut(&mut self) -> &mut [u8] {
        self.scratch.get_mut(self.used..self.receivable).unwrap_or_default()
    }

    /// Returns a range of the reserved scratch memory.
    ///
    /// # Errors
    ///
    /// Returns [`BatchError::NotReserved`] if the range is not reserved.
    #[inline]
    pub fn scratch_mut(&mut self, range: Range<usize>) -> Result<&mut [u8], BatchError> {
        let len = range.end.saturating_sub(range.start);
        self.check_reserved(range.start, len)?;
        Ok(&mut self.scratch[range.start..range.start + len])
    }

    /// Adds a frame whose bytes are contiguous at `offset` of the scratch memory; returns its index.
    ///
    /// # Errors
    ///
    /// Returns [`BatchError::Frames`] if the batch is full, and [`BatchError::NotReserved`] if the range is
    /// not reserved.
    #[inline]
    pub fn push_contiguous(
        &mut self,
        offset: usize,
        len: usize,
        meta: OffloadMeta,
    ) -> Result<u32, BatchError> {
        self.check_reserved(offset, len)?;
        if self.frames_left() == 0 {
            return Err(BatchError::Frames { limit: self.frames_max });
        }
        let header = offset..offset + len.min(HEADER_MAX);
        let first = self.segments.len();
        if len > HEADER_MAX {
            self.segments.push(FrameSegment::Private { offset: header.end, len: len - HEADER_MAX });
        }
        self.room.take(len, meta.gso);
        self.frames.push(Frame::new(header, first..self.segments.len(), len, meta));
        // The scratch memory bounds the number of frames.
        Ok(number(self.frames.len() - 1))
    }

    /// Adds a frame with a private header of `len` bytes, at most [`HEADER_MAX`], which `fill` writes. `rest`
    /// is the payload in lent memory. `fill` returns the frame's metadata.
    ///
    /// The function combines [`Batch::reserve`], [`Batch::frame`] and [`FrameBuilder::finish`] for the fast
    /// paths.
    ///
    /// # Errors
    ///
    /// Returns `Some` with the error of `fill`. Returns `None` if there is no room ([`Batch::has_place_for`])
    /// or `rest` is not inside its slice. The batch is unchanged in both cases.
    #[inline]
    pub fn push<E>(
        &mut self,
        len: usize,
        rest: Option<LentRange<'_>>,
        fill: impl FnOnce(&mut [u8]) -> Result<OffloadMeta, E>,
    ) -> Result<(), Option<E>> {
        if !self.has_place_for(len) {
            return Err(None);
        }
        let at = self.used;
        let Some(header) = self.scratch.get_mut(at..at + len) else { return Err(None) };
        let meta = fill(header).map_err(Some)?;
        let first = self.segments.len();
        let mut whole = len;
        if let Some(LentRange { slice, offset, len: more }) = rest {
            if offset > slice.len() || more > slice.len() - offset {
                return Err(None);
            }
            self.segments.push(FrameSegment::Lent { index: self.lent.len(), offset, len: more });
            self.lent.push(slice.clone());
            whole += more;
        }
        self.used = (at + len).next_multiple_of(ALIGN).min(self.receivable);
        self.room.take(whole, meta.gso);
        self.frames.push(Frame::new(at..at + len, first..self.segments.len(), whole, meta));
        Ok(())
    }

    /// Returns true if [`Batch::push`] has room for a frame with `len` private bytes.
    #[inline]
    pub fn has_place_for(&self, len: usize) -> bool {
        len <= HEADER_MAX && len <= self.receivable - self.used && self.frames_left() > 0
    }

    /// Begins a frame whose header is at `offset` of the scratch memory. The caller adds the other pieces in
    /// order. [`FrameBuilder::finish`] adds the frame to the batch.
    ///
    /// # Errors
    ///
    /// Returns [`BatchError::Frames`] if the batch is full, [`BatchError::Header`] if the header is too long,
    /// and [`BatchError::NotReserved`] if the range is not reserved.
    #[inline]
    pub fn frame(&mut self, offset: usize, len: usize) -> Result<FrameBuilder<'_>, BatchError> {
        if self.frames_left() == 0 {
            return Err(BatchError::Frames { limit: self.frames_max });
        }
        if len > HEADER_MAX {
            return Err(BatchError::Header { len });
        }
        self.check_reserved(offset, len)?;
        let segments_start = self.segments.len();
        let lent_start = self.lent.len();
        let header = offset..offset + len;
        Ok(FrameBuilder { batch: self, header, len, segments_start, lent_start, finished: false })
    }

    /// Returns the frame with this index, which counts from 0 in the order of addition.
    #[inline]
    pub fn get(&self, index: u32) -> Option<FrameView<'_>> {
        let frame = self.frames.get(usize::try_from(index).ok()?)?;
        Some(FrameView::new(self, frame))
    }

    /// Iterates over all frames.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = FrameView<'_>> {
        self.frames.iter().map(|frame| FrameView::new(self, frame))
    }

    /// Iterates over the frames of `indices`, and skips an index without a frame.
    pub fn select<'a>(&'a self, indices: &'a [u32]) -> impl Iterator<Item = FrameView<'a>> {
        indices.iter().filter_map(|&index| self.get(index))
    }

    /// Returns the header of a frame for changes in place.
    pub fn header_mut(&mut self, index: u32) -> Option<&mut [u8]> {
        let frame = self.frames.get(usize::try_from(index).ok()?)?;
        self.scratch.get_mut(frame.header())
    }

    /// Replaces the offload metadata of a frame.
    pub fn set_meta(&mut self, index: u32, meta: OffloadMeta) {
        let frame = usize::try_from(index).ok().and_then(|index| self.frames.get_mut(index));
        if let Some(frame) = frame {
            frame.meta = meta;
        }
    }

    /// Completes a blank checksum: sums the bytes as they are now and stores the result in the private
    /// header. Then the checksum counts as verified.
    ///
    /// # Errors
    ///
    /// Returns [`PartialError`] if the checksum field is not inside the header.
    pub fn finish_checksum(&mut self, index: u32) -> Result<(), PartialError> {
        let Some(frame) = self.get(index) else { return Ok(()) };
        let Some(place) = frame.meta().checksum.place() else { return Ok(()) };
        // The sum begins at `start`, which lies beyond the header only if the checksum field does. `begin`
        // refuses such a frame.
        let mut completion = Completion::begin(place, frame.header())?;
        for segment in frame.segments() {
            segment.for_each_piece(|piece| completion.add(piece));
        }
        let meta = OffloadMeta { checksum: Checksum::Verified, ..frame.meta() };
        if let Some(header) = self.header_mut(index) {
            completion.finish(header)?;
            self.set_meta(index, meta);
        }
        Ok(())
    }

    #[inline]
    fn check_reserved(&self, offset: usize, len: usize) -> Result<(), BatchError> {
        if offset > self.used || len > self.used - offset {
            return Err(BatchError::NotReserved { offset, len, reserved: self.used });
        }
        Ok(())
    }
}

/// Frame under construction. Dropping it without [`finish`](Self::finish) leaves the batch unchanged.
#[derive(Debug)]
pub struct FrameBuilder<'a> {
    batch: &'a mut Batch,
    header: Range<usize>,
    len: usize,
    segments_start: usize,
    lent_start: usize,
    finished: bool,
}

impl FrameBuilder<'_> {
    /// Appends a range of the reserved scratch memory.
    ///
    /// # Errors
    ///
    /// Returns [`BatchError::NotReserved`] or [`BatchError::Segments`]; nothing is added.
    #[inline]
    pub fn private(&mut self, offset: usize, len: usize) -> Result<(), BatchError> {
        self.batch.check_reserved(offset, len)?;
        self.add(FrameSegment::Private { offset, len })
    }

    /// Appends a range of lent memory. The batch holds the slice until it is cleared.
    ///
    /// # Errors
    ///
    /// Returns [`BatchError::NotLent`] or [`BatchError::Segments`]; nothing is added.
    pub fn lent(&mut self, slice: LentSlice, offset: usize, len: usize) -> Result<(), BatchError> {
        let size = slice.len();
        if offset > size || len > size - offset {
            return Err(BatchError::NotLent { offset, len, size });
        }
        let index = self.batch.lent.len();
        self.add(FrameSegment::Lent { index, offset, len })?;
        if len > 0 {
            self.batch.lent.push(slice);
        }
        Ok(())
    }

    /// Returns the length of the frame so far in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the frame has no bytes so far.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the header, which the caller parses and [`accept`](ringfence_offload::accept) amends.
    #[inline]
    pub fn header_mut(&mut self) -> &mut [u8] {
        &mut self.batch.scratch[self.header.clone()]
    }

    /// Adds the frame to the batch and returns its index.
    #[inline]
    pub fn finish(mut self, meta: OffloadMeta) -> u32 {
        self.finished = true;
        self.batch.room.take(self.len, meta.gso);
        let index = self.batch.frames.len();
        let segments = self.segments_start..self.batch.segments.len();
        self.batch.frames.push(Frame::new(self.header.clone(), segments, self.len, meta));
        // A batch has fewer than 2^32 frames: each has at least one byte of scratch memory.
        bounded(index, u32::MAX)
    }

    #[inline]
    fn add(&mut self, segment: FrameSegment) -> Result<(), BatchError> {
        let len = segment.len();
        if len == 0 {
            return Ok(());
        }
        if self.batch.segments.len() - self.segments_start == SEGMENTS_MAX {
            return Err(BatchError::Segments);
        }
        self.batch.segments.push(segment);
        self.len += len;
        Ok(())
    }
}

impl Drop for FrameBuilder<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.batch.segments.truncate(self.segments_start);
            self.batch.lent.truncate(self.lent_start);
        }
    }
}
