//! Frames on their way through one round of the data plane.
//!
//! # Theory of operation
//!
//! A round: a port *receives* frames into a batch, the switch picks where each one goes, the ports
//! they leave by *transmit* them, synchronously, and the batch is cleared. So a frame lives no
//! longer than its round, and a batch is storage that is used again and again: in the steady state
//! nothing is allocated per frame.
//!
//! A batch owns `scratch`, private memory of a fixed size from which space is handed out from the
//! front to the back, and a list of [`LentSlice`]s. A frame is a *header* (its first bytes, private,
//! contiguous, at most [`HEADER_MAX`]) followed by *segments*: more private bytes, or bytes that
//! are still in the memory of the domain that lent them. A short frame is a header and nothing else.
//!
//! Headers are private so that they can be parsed: what a look at them said is still true at the
//! next look. Lent segments can change between two looks; they are only ever copied or handed to the
//! kernel.
//!
//! # How a port fills it
//!
//! 1. [`Batch::scratch_tail_mut`] is the space that is free; pieces of it, carved off with
//!    `split_at_mut`, can be the targets of one copy list. [`Batch::scratch_used`] is the offset of
//!    the tail's first byte.
//! 2. [`Batch::reserve`] takes what was filled.
//! 3. [`Batch::push_contiguous`], or [`Batch::frame`] for a frame of several pieces, makes frames of
//!    it. Space that was reserved and belongs to no frame is simply lost until the batch is cleared.
//!
//! # What is made of frames
//!
//! A frame that the port it leaves by cannot take whole becomes many ([`Batch::derive`]): each has a
//! header of its own, and payload that is the original's. There is room for [`DERIVED_MAX`] of them
//! that receivers do not see. Who made them takes them away again ([`Batch::drop_derived`]) once they
//! were sent, and goes on with the next ones.
//!
//! Likewise several frames become one ([`Batch::join`]), with a header of its own and the payload of all
//! of them. These stay ([`Batch::keep_derived`]) while others are split, until the port had all of its
//! frames ([`Batch::drop_all_derived`]).

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

use derive::Derived;
pub use derive::{DERIVED_MAX, DeriveError, JOINED_MAX};
pub use room::Room;
pub use view::{FrameView, SegmentView, Segments};

/// Bytes that a frame's header has at most.
pub const HEADER_MAX: usize = 256;

/// Segments that follow the header of a frame that was received, at most.
pub const SEGMENTS_MAX: usize = 30;

/// Segments that follow the header of a joined frame, at most: with the header and a virtio-net header
/// they fill one scatter-gather list.
pub const JOINED_SEGMENTS_MAX: usize = LIST_MAX - 2;

/// Frames of a batch, where nobody asks for another number.
pub const FRAMES_DEFAULT: usize = 64;

/// Bytes of scratch memory, where nobody asks for another number: 64 frames of 32 KiB, or 31 of
/// the largest size.
pub const SCRATCH_DEFAULT: usize = 2 << 20;

/// Bytes of scratch memory that a batch has at most.
pub const SCRATCH_MAX: usize = 1 << 30;

/// Short frames of a port begin at multiples of this, so that two of them share no cache line.
const ALIGN: usize = 64;

/// Why something was not added to a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// The batch has as many frames as it can hold.
    #[error("all {limit} frames of the batch are in use")]
    Frames {
        /// Frames there are.
        limit: usize,
    },
    /// The range was not reserved.
    #[error("{len} bytes at {offset} are not reserved ({reserved} are)")]
    NotReserved {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes that are reserved, from 0.
        reserved: usize,
    },
    /// The range does not lie inside the lent slice.
    #[error("{len} bytes at {offset} do not lie inside {size} lent ones")]
    NotLent {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes lent.
        size: usize,
    },
    /// The header is longer than [`HEADER_MAX`].
    #[error("a header of {len} bytes, the limit is {HEADER_MAX}")]
    Header {
        /// Bytes offered.
        len: usize,
    },
    /// The frame has more segments than [`SEGMENTS_MAX`].
    #[error("more than {SEGMENTS_MAX} segments in one frame")]
    Segments,
}

/// A piece of a frame behind its header. All numbers were checked when it was added.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Segment {
    Private { offset: usize, len: usize },
    Lent { index: usize, offset: usize, len: usize },
}

impl Segment {
    fn len(self) -> usize {
        match self {
            Segment::Private { len, .. } | Segment::Lent { len, .. } => len,
        }
    }
}

/// Half a cache line: a batch of small frames is mostly these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// Where in the scratch memory it begins; its bytes; bytes of the whole frame.
    header: u32,
    header_len: u32,
    len: u32,
    /// The first of its segments; how many.
    first_segment: u32,
    segments: u32,
    meta: OffloadMeta,
}

/// What is in a batch has no number beyond this: its scratch memory is at most as long.
fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
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

/// Frames, and the memory they are in. See the [module](self).
#[derive(Debug)]
pub struct Batch {
    scratch: Box<[u8]>,
    used: usize,
    lent: Vec<LentSlice>,
    segments: Vec<Segment>,
    frames: Vec<Frame>,
    frames_max: usize,
    /// Bytes of scratch memory for what is received; the headers of derived frames are behind them.
    receivable: usize,
    /// Where derived frames begin, while there are some.
    derived: Option<Derived>,
    /// Where the frames are expected to go, there is so much room.
    room: Room,
    /// Slots that a frame needs which was left where it was.
    refused: Option<usize>,
}

impl Default for Batch {
    fn default() -> Self {
        Batch::with_capacity(FRAMES_DEFAULT, SCRATCH_DEFAULT)
    }
}

impl Batch {
    /// A batch of at most `frames` frames and `scratch` bytes of private memory, which are never more
    /// than [`SCRATCH_MAX`].
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

    /// Forgets all frames, lets go of the lent memory, and keeps the storage.
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

    /// Frames in the batch.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether the batch has no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Frames that can still be added.
    #[inline]
    pub fn frames_left(&self) -> usize {
        self.frames_max.saturating_sub(self.frames.len())
    }

    /// Takes no more frames until it is cleared than `room` has place for.
    pub fn limit(&mut self, room: Room) {
        self.room = room;
    }

    /// Place that is left for frames. Frames that are added use it up.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Whether there is place for a frame of `len` bytes. If not, that is remembered: whoever adds
    /// frames leaves this one, and those behind it, where they are.
    #[inline]
    pub fn has_room_for(&mut self, len: usize) -> bool {
        let fits = self.room.fits(len);
        if !fits {
            self.refuse(len);
        }
        fits
    }

    /// Remembers that a frame of `len` bytes was left where it was.
    pub fn refuse(&mut self, len: usize) {
        self.refused = Some(self.room.cost(len));
    }

    /// Slots that the frame needs which was left where it was for want of place.
    pub fn refused(&self) -> Option<usize> {
        self.refused
    }

    /// Bytes of scratch memory handed out so far: the offset of the tail's first byte.
    pub fn scratch_used(&self) -> usize {
        self.used
    }

    /// Bytes of scratch memory that can still be reserved.
    #[inline]
    pub fn scratch_left(&self) -> usize {
        self.receivable - self.used
    }

    /// Takes `len` bytes off the front of the free scratch memory and returns their offset. They
    /// hold whatever was there before.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<usize> {
        if len > self.scratch_left() {
            return None;
        }
        let offset = self.used;
        self.used += len;
        Some(offset)
    }

    /// All scratch memory that is not reserved, to be filled before it is.
    pub fn scratch_tail_mut(&mut self) -> &mut [u8] {
        self.scratch.get_mut(self.used..self.receivable).unwrap_or_default()
    }

    /// Reserved scratch memory.
    ///
    /// # Errors
    ///
    /// [`BatchError::NotReserved`].
    #[inline]
    pub fn scratch_mut(&mut self, range: Range<usize>) -> Result<&mut [u8], BatchError> {
        let len = range.end.saturating_sub(range.start);
        self.check_reserved(range.start, len)?;
        Ok(&mut self.scratch[range.start..range.start + len])
    }

    /// Adds a frame whose bytes are all at `offset` of the scratch memory; returns its index.
    ///
    /// # Errors
    ///
    /// [`BatchError::Frames`], [`BatchError::NotReserved`].
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
            self.segments.push(Segment::Private { offset: header.end, len: len - HEADER_MAX });
        }
        self.room.take(len, meta.gso);
        self.frames.push(Frame::new(header, first..self.segments.len(), len, meta));
        // As many as there is scratch memory for.
        Ok(number(self.frames.len() - 1))
    }

    /// Adds a frame whose first `len` bytes, at most [`HEADER_MAX`], are those that `fill` writes to
    /// private memory; `rest` are its other bytes, lent ones: the slice, the first byte in it, how
    /// many. What `fill` returns, where it is not an error, is known about the frame then.
    ///
    /// This is [`Batch::reserve`], [`Batch::frame`] and [`FrameBuilder::finish`] in one, for the frames
    /// of which there are many. Nothing is added if there is no room ([`Batch::has_place_for`]), or the
    /// rest does not lie inside the slice, or `fill` fails: then with what it says, otherwise `None`.
    #[inline]
    pub fn push<E>(
        &mut self,
        len: usize,
        rest: Option<(&LentSlice, usize, usize)>,
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
        if let Some((slice, offset, more)) = rest {
            if offset > slice.len() || more > slice.len() - offset {
                return Err(None);
            }
            self.segments.push(Segment::Lent { index: self.lent.len(), offset, len: more });
            self.lent.push(slice.clone());
            whole += more;
        }
        self.used = (at + len).next_multiple_of(ALIGN).min(self.receivable);
        self.room.take(whole, meta.gso);
        self.frames.push(Frame::new(at..at + len, first..self.segments.len(), whole, meta));
        Ok(())
    }

    /// Whether [`Batch::push`] finds place for a frame with that many private bytes.
    #[inline]
    pub fn has_place_for(&self, len: usize) -> bool {
        len <= HEADER_MAX && len <= self.receivable - self.used && self.frames_left() > 0
    }

    /// Begins a frame whose header is at `offset` of the scratch memory. Its other pieces follow in
    /// order; [`FrameBuilder::finish`] adds it to the batch.
    ///
    /// # Errors
    ///
    /// [`BatchError::Frames`], [`BatchError::Header`], [`BatchError::NotReserved`].
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

    /// The frame of that index, counted from 0 in the order in which they were added.
    #[inline]
    pub fn get(&self, index: u32) -> Option<FrameView<'_>> {
        let frame = self.frames.get(usize::try_from(index).ok()?)?;
        Some(FrameView::new(self, frame))
    }

    /// All frames.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = FrameView<'_>> {
        self.frames.iter().map(|frame| FrameView::new(self, frame))
    }

    /// The frames of `indices`; an index that no frame has is skipped.
    pub fn select<'a>(&'a self, indices: &'a [u32]) -> impl Iterator<Item = FrameView<'a>> {
        indices.iter().filter_map(|&index| self.get(index))
    }

    /// The header of a frame, to be changed in place.
    pub fn header_mut(&mut self, index: u32) -> Option<&mut [u8]> {
        let frame = self.frames.get(usize::try_from(index).ok()?)?;
        self.scratch.get_mut(frame.header())
    }

    /// Replaces what is known about a frame.
    pub fn set_meta(&mut self, index: u32, meta: OffloadMeta) {
        let frame = usize::try_from(index).ok().and_then(|index| self.frames.get_mut(index));
        if let Some(frame) = frame {
            frame.meta = meta;
        }
    }

    /// Finishes the frame's checksum if it is blank: sums the bytes as they are now and stores the
    /// result in the private header. From then on it counts as verified.
    ///
    /// # Errors
    ///
    /// [`PartialError`] when the checksum field is not inside the header.
    pub fn finish_checksum(&mut self, index: u32) -> Result<(), PartialError> {
        let Some(frame) = self.get(index) else { return Ok(()) };
        let Some(place) = frame.meta().checksum.place() else { return Ok(()) };
        // A frame is summed from `start` on, which may lie beyond the header only if its field
        // does too; `begin` refuses that.
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

/// A frame that is being put together. Dropped without [`finish`](Self::finish), it leaves no trace.
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
    /// Adds reserved scratch memory behind what there is.
    ///
    /// # Errors
    ///
    /// [`BatchError::NotReserved`], [`BatchError::Segments`]; nothing is added.
    #[inline]
    pub fn private(&mut self, offset: usize, len: usize) -> Result<(), BatchError> {
        self.batch.check_reserved(offset, len)?;
        self.add(Segment::Private { offset, len })
    }

    /// Adds lent memory behind what there is. The batch holds the slice until it is cleared.
    ///
    /// # Errors
    ///
    /// [`BatchError::NotLent`], [`BatchError::Segments`]; nothing is added.
    pub fn lent(&mut self, slice: LentSlice, offset: usize, len: usize) -> Result<(), BatchError> {
        let size = slice.len();
        if offset > size || len > size - offset {
            return Err(BatchError::NotLent { offset, len, size });
        }
        let index = self.batch.lent.len();
        self.add(Segment::Lent { index, offset, len })?;
        if len > 0 {
            self.batch.lent.push(slice);
        }
        Ok(())
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes so far.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The header, to be parsed (and, by [`accept`](ringfence_offload::accept), amended).
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
        // A batch of more than 2^32 frames cannot be made: each takes more than an byte.
        u32::try_from(index).unwrap_or(u32::MAX)
    }

    #[inline]
    fn add(&mut self, segment: Segment) -> Result<(), BatchError> {
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
