//! Copies between the segments of a request and the pages lent to the backend.

use core::ops::Range;

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_sys::numbers::usize_from;

use crate::storage::Segment;

/// Iterates over the parts of `segments` that hold `len` bytes from `at` on: memory, offset, length.
fn parts(
    segments: &[Segment],
    at: usize,
    len: usize,
) -> impl Iterator<Item = (&LentSlice, usize, usize)> {
    let (mut skip, mut left) = (at, len);
    segments.iter().filter_map(move |segment| {
        let size = segment.memory.len();
        let hidden = skip.min(size);
        skip -= hidden;
        let bytes = (size - hidden).min(left);
        left -= bytes;
        (bytes > 0).then_some((&segment.memory, hidden, bytes))
    })
}

/// Copies `len` bytes of the request from offset `at` to the beginning of `page`.
pub(super) fn to_page(
    segments: &[Segment],
    at: usize,
    page: &LentSlice,
    len: usize,
) -> Result<(), OutOfRange> {
    let mut place = 0;
    for (memory, offset, bytes) in parts(segments, at, len) {
        page.copy_from_lent(place, memory, offset, bytes)?;
        place += bytes;
    }
    Ok(())
}

/// Copies `len` bytes from the beginning of `page` to offset `at` of the request.
fn from_page(
    segments: &[Segment],
    at: usize,
    page: &LentSlice,
    len: usize,
) -> Result<(), OutOfRange> {
    let mut place = 0;
    for (memory, offset, bytes) in parts(segments, at, len) {
        memory.copy_from_lent(offset, page, place, bytes)?;
        place += bytes;
    }
    Ok(())
}

/// Copies bytes from the beginnings of `pages`, full pages but the last, to `range` of the request.
pub(super) fn from_pages<'a>(
    segments: &[Segment],
    range: Range<u64>,
    pages: impl Iterator<Item = &'a LentSlice>,
) -> Result<(), OutOfRange> {
    let mut at = usize_from(range.start);
    let mut left = usize_from(range.end - range.start);
    for page in pages {
        let len = left.min(PAGE_SIZE);
        from_page(segments, at, page, len)?;
        at += len;
        left -= len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_across_segment_ends_keeps_the_order_of_bytes() {
        let whole: Vec<u8> = (0..200).collect();
        let mut segments = vec![];
        for range in [0..7, 7..7, 7..100, 100..101, 101..200] {
            let memory = LentSlice::anonymous(range.len().max(1)).slice(0, range.len()).unwrap();
            memory.copy_from(0, &whole[range]).unwrap();
            segments.push(Segment::from(memory));
        }
        let page = LentSlice::anonymous(256);
        for (at, len) in [(0, 200), (6, 2), (7, 93), (99, 3), (50, 0), (199, 1)] {
            to_page(&segments, at, &page, len).unwrap();
            let mut found = vec![0; len];
            page.copy_to(0, &mut found).unwrap();
            assert_eq!(found, whole[at..at + len]);
        }
        page.copy_from(0, &[255; 60]).unwrap();
        from_page(&segments, 70, &page, 60).unwrap();
        to_page(&segments, 0, &page, 200).unwrap();
        let mut found = vec![0; 200];
        page.copy_to(0, &mut found).unwrap();
        assert_eq!((&found[..70], &found[70..130]), (&whole[..70], &[255; 60][..]));
        assert_eq!(found[130..], whole[130..]);
    }
}
