//! Buffer pool of an export: page-aligned memory for payloads.

use std::io;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};

use crate::protocol::PAYLOAD_MAX;

/// Maximum number of bytes of free buffers that are kept.
const KEPT_MAX: usize = 32 << 20;

/// Number of sizes: 1, 2, 4, … pages up to [`PAYLOAD_MAX`].
const CLASSES: usize = 14;
const _: () = assert!(PAGE_SIZE << (CLASSES - 1) == PAYLOAD_MAX as usize);

/// Free buffers of all clients of an export.
#[derive(Default)]
pub(super) struct Buffers {
    free: [Vec<LentSlice>; CLASSES],
    kept: usize,
}

/// Buffer of one request, and its part that holds the payload.
pub(super) struct Payload {
    whole: LentSlice,
    /// Memory of exactly the length of the request.
    pub(super) bytes: LentSlice,
}

impl Buffers {
    /// Returns a buffer for `len` bytes with undefined content.
    pub(super) fn take(&mut self, len: u32) -> io::Result<Payload> {
        let len = len.clamp(1, PAYLOAD_MAX) as usize;
        let class = len.div_ceil(PAGE_SIZE).next_power_of_two().trailing_zeros() as usize;
        let whole = match self.free[class].pop() {
            Some(whole) => {
                self.kept -= whole.len();
                whole
            }
            None => Mapping::private(PAGE_SIZE << class)?.lent(),
        };
        let bytes = whole.slice(0, len).map_err(io::Error::other)?;
        Ok(Payload { whole, bytes })
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
            let payload = buffers.take(len).unwrap();
            assert_eq!(payload.bytes.len(), len as usize);
            buffers.give_back(payload);
            assert!(buffers.kept <= KEPT_MAX);
        }
        let many: Vec<_> = (0..20).map(|_| buffers.take(4 << 20).unwrap()).collect();
        many.into_iter().for_each(|payload| buffers.give_back(payload));
        assert!(buffers.kept <= KEPT_MAX);
    }
}
