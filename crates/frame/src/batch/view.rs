//! Frame views: read access of an egress port to a frame of a batch.

use core::ops::Range;

use ringfence_memory::{LentSlice, ListFull, OutOfRange, PushError, WriteList};
use ringfence_offload::OffloadMeta;

use super::{Batch, Frame, FrameSegment};

/// Number of bytes copied from lent memory at a time when they are only read.
const PIECE: usize = 2048;

/// View of one frame of a batch.
#[derive(Clone, Copy, Debug)]
pub struct FrameView<'a> {
    batch: &'a Batch,
    frame: &'a Frame,
}

/// View of a piece of a frame behind its header.
#[derive(Clone, Copy, Debug)]
pub enum SegmentView<'a> {
    Private(&'a [u8]),
    /// Lent bytes: the slice, the offset, and the length. The range lies inside the slice.
    Lent(&'a LentSlice, usize, usize),
}

impl SegmentView<'_> {
    /// Returns the length of the piece in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            SegmentView::Private(bytes) => bytes.len(),
            SegmentView::Lent(_, _, len) => *len,
        }
    }

    /// Returns true if the piece is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on into `out`, up to the end of either; returns their number.
    pub fn copy_from(&self, offset: usize, out: &mut [u8]) -> usize {
        let n = out.len().min(self.len().saturating_sub(offset));
        let out = &mut out[..n];
        match self {
            SegmentView::Private(bytes) => out.copy_from_slice(&bytes[offset..offset + n]),
            SegmentView::Lent(slice, start, _) => {
                // Cannot fail: the range was checked when the segment was added. Zeros are a safe result, since the
                // peer controls the bytes anyway.
                if slice.copy_to(start + offset, out).is_err() {
                    out.fill(0);
                }
            }
        }
        n
    }

    /// Passes the bytes to `look` in order, as private pieces. It copies a lent segment piece by piece.
    pub fn for_each_piece(&self, look: impl FnMut(&[u8])) {
        self.for_each_piece_of(0..self.len(), look);
    }

    /// Passes the bytes of `range` to `look` in order, up to the end of the piece.
    pub fn for_each_piece_of(&self, range: Range<usize>, mut look: impl FnMut(&[u8])) {
        let (mut at, end) = (range.start, range.end.min(self.len()));
        if let SegmentView::Private(bytes) = self {
            return look(bytes.get(at..end).unwrap_or_default());
        }
        let mut piece = [0; PIECE];
        while at < end {
            let n = self.copy_from(at, &mut piece[..PIECE.min(end - at)]);
            look(&piece[..n]);
            at += n;
        }
    }
}

/// Iterator over the segments of a frame, in order.
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    batch: &'a Batch,
    rest: core::slice::Iter<'a, FrameSegment>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = SegmentView<'a>;

    #[inline]
    fn next(&mut self) -> Option<SegmentView<'a>> {
        let view = match *self.rest.next()? {
            FrameSegment::Private { offset, len } => {
                SegmentView::Private(&self.batch.scratch[offset..offset + len])
            }
            FrameSegment::Lent { index, offset, len } => {
                SegmentView::Lent(&self.batch.lent[index], offset, len)
            }
        };
        Some(view)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rest.size_hint()
    }
}

impl ExactSizeIterator for Segments<'_> {}

impl<'a> FrameView<'a> {
    #[inline]
    pub(super) fn new(batch: &'a Batch, frame: &'a Frame) -> FrameView<'a> {
        FrameView { batch, frame }
    }

    /// Returns the frame's first bytes, which are private and at most [`HEADER_MAX`](super::HEADER_MAX).
    #[inline]
    pub fn header(&self) -> &'a [u8] {
        &self.batch.scratch[self.frame.header()]
    }

    /// Returns the segments behind the header.
    #[inline]
    pub fn segments(&self) -> Segments<'a> {
        let segments = &self.batch.segments[self.frame.segments()];
        Segments { batch: self.batch, rest: segments.iter() }
    }

    /// Returns all pieces of the frame in order, the header first.
    pub fn pieces(&self) -> impl Iterator<Item = SegmentView<'a>> + use<'a> {
        core::iter::once(SegmentView::Private(self.header())).chain(self.segments())
    }

    /// Returns the length of the frame in bytes, from the Ethernet header on, without check sequence.
    #[inline]
    pub fn len(&self) -> usize {
        self.frame.len()
    }

    /// Returns true if the frame is empty.
    pub fn is_empty(&self) -> bool {
        self.frame.len() == 0
    }

    /// Returns the offload metadata: the blank checksum and the segmentation that are still due.
    #[inline]
    pub fn meta(&self) -> OffloadMeta {
        self.frame.meta
    }

    /// Returns the whole frame if its bytes are contiguous in private memory.
    #[inline]
    pub fn contiguous(&self) -> Option<&'a [u8]> {
        let header = self.frame.header();
        match self.batch.segments[self.frame.segments()] {
            [] => Some(self.header()),
            [FrameSegment::Private { offset, len }] if offset == header.end => {
                Some(&self.batch.scratch[header.start..offset + len])
            }
            _ => None,
        }
    }

    /// Copies the frame's first bytes into `out`, up to the end of either; returns their number.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        if let Some(bytes) = self.contiguous() {
            let n = bytes.len().min(out.len());
            out[..n].copy_from_slice(&bytes[..n]);
            return n;
        }
        let mut done = 0;
        for piece in self.pieces() {
            done += piece.copy_from(0, &mut out[done..]);
        }
        done
    }

    /// Adds the bytes of `range`, up to the end of the frame, to a list for a kernel write.
    ///
    /// # Errors
    ///
    /// Returns [`ListFull`] if the list has no room for all pieces.
    pub fn gather_range(
        &self,
        range: Range<usize>,
        list: &mut WriteList<'a>,
    ) -> Result<(), ListFull> {
        if let Some(bytes) = self.contiguous() {
            let end = range.end.min(bytes.len());
            return list.push(bytes.get(range.start..end).unwrap_or_default());
        }
        let mut at = 0;
        for piece in self.pieces() {
            let from = range.start.saturating_sub(at).min(piece.len());
            let to = range.end.saturating_sub(at).min(piece.len());
            at += piece.len();
            if from >= to {
                continue;
            }
            match piece {
                SegmentView::Private(bytes) => list.push(&bytes[from..to])?,
                SegmentView::Lent(slice, offset, _) => {
                    match list.push_lent(slice, offset + from, to - from) {
                        // The range was checked when the segment was added.
                        Ok(()) | Err(PushError::Range(_)) => {}
                        Err(PushError::Full(full)) => return Err(full),
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the whole frame to `offset` of lent memory.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the frame does not fit inside, or the memory is read-only. A part of the
    /// frame may have been written.
    #[inline]
    pub fn copy_to_lent(&self, page: &LentSlice, offset: usize) -> Result<(), OutOfRange> {
        if let Some(bytes) = self.contiguous() {
            return page.copy_from(offset, bytes);
        }
        let mut at = offset;
        for piece in self.pieces() {
            match piece {
                SegmentView::Private(bytes) => page.copy_from(at, bytes)?,
                SegmentView::Lent(lent, from, len) => page.copy_from_lent(at, lent, from, len)?,
            }
            at += piece.len();
        }
        Ok(())
    }

    /// Adds the frame to a list for a kernel write.
    ///
    /// # Errors
    ///
    /// Returns [`ListFull`] if the list has no room for all pieces.
    pub fn gather(&self, list: &mut WriteList<'a>) -> Result<(), ListFull> {
        if let Some(bytes) = self.contiguous() {
            return list.push(bytes);
        }
        for piece in self.pieces() {
            match piece {
                SegmentView::Private(bytes) => list.push(bytes)?,
                SegmentView::Lent(slice, offset, len) => {
                    match list.push_lent(slice, offset, len) {
                        // The range was checked when the segment was added.
                        Ok(()) | Err(PushError::Range(_)) => {}
                        Err(PushError::Full(full)) => return Err(full),
                    }
                }
            }
        }
        Ok(())
    }
}
