//! Buffer pool of an export: page-aligned memory for payloads.

use std::io;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};
use ringfence_sys::numbers::usize_from;

use super::unaligned::Span;
use crate::protocol::PAYLOAD_MAX;

/// Maximum number of bytes of free buffers that are kept.
const KEPT_MAX: usize = 32 << 20;

/// Number of sizes: 1, 2, 4, … pages. The largest holds [`PAYLOAD_MAX`] bytes and the sectors around them.
const CLASSES: usize = 15;
const LEN_MAX: usize = PAGE_SIZE << (CLASSES - 1);
const _: () = assert!(LEN_MAX == 2 * PAYLOAD_MAX as usize);

/// Free buffers of all clients of an export.
#[derive(Default)]
pub(super) struct Buffers {
    free: [Vec<LentSlice>; CLASSES],
    kept: usize,
}

/// Buffer of one request, and its part that holds the payload.
pub(super) struct Payload {
    whole: LentSlice,
    /// Memory of the sectors that contain the range of the request.
    pub(super) sectors: LentSlice,
    /// Memory of exactly the length of the request.
    pub(super) bytes: LentSlice,
}

impl Buffers {
    /// Returns a buffer for the range of a request with undefined content.
    pub(super) fn take(&mut self, span: Span, sector: u32) -> io::Result<Payload> {
        let wide = span.widened(sector);
        let small = |len: u64| usize_from(len).min(LEN_MAX);
        let (head, len, sectors) =
            (small(span.offset - wide.offset), small(span.len), small(wide.len));
        let pages = sectors.div_ceil(PAGE_SIZE).max(1);
        let class = pages.next_power_of_two().trailing_zeros() as usize;
        let whole = match self.free[class].pop() {
            Some(whole) => {
                self.kept -= whole.len();
                whole
            }
            None => Mapping::private(PAGE_SIZE << class)?.lent(),
        };
        let sectors = whole.slice(0, sectors).map_err(io::Error::other)?;
        let bytes = sectors.slice(head, len).map_err(io::Error::other)?;
        Ok(Payload { whole, sectors, bytes })
    }

    /// Returns a buffer to the pool.
    pub(super) fn give_back(&mut self, payload: Payload) {
        let len = payload.whole.len();
        if self.kept + len <= KEPT_MAX {
            self.kept += len;
            let class = (len / PAGE_SIZE).trailing_zeros() as usize;
            self.free[class].push(payload.whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_has_exact_length_and_kept_bytes_are_bounded() {
        let mut buffers = Buffers::default();
        for len in [1, 512, 4096, 4097, 1 << 20, PAYLOAD_MAX, PAYLOAD_MAX] {
            for offset in [0, 512, 4095] {
                let span = Span { offset, len: u64::from(len) };
                let payload = buffers.take(span, 512).unwrap();
                assert_eq!(payload.bytes.len(), len as usize);
                assert_eq!(payload.sectors.len() as u64, span.widened(512).len);
                buffers.give_back(payload);
                assert!(buffers.kept <= KEPT_MAX);
            }
        }
        let span = Span { offset: 0, len: 4 << 20 };
        let many: Vec<_> = (0..20).map(|_| buffers.take(span, 512).unwrap()).collect();
        many.into_iter().for_each(|payload| buffers.give_back(payload));
        assert!(buffers.kept <= KEPT_MAX);
    }
}
