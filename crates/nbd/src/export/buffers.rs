//! Memory for payloads, aligned to a page, used again.

use std::io;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};

use crate::protocol::PAYLOAD_MAX;

/// Bytes kept for the next one.
const KEPT_MAX: usize = 32 << 20;

/// Sizes: one page, two, four, … up to [`PAYLOAD_MAX`].
const CLASSES: usize = 14;
const _: () = assert!(PAGE_SIZE << (CLASSES - 1) == PAYLOAD_MAX as usize);

/// Buffers of all clients of a disk.
#[derive(Default)]
pub(super) struct Buffers {
    free: [Vec<LentSlice>; CLASSES],
    kept: usize,
}

/// A buffer: the whole of it, and the part that is the payload.
pub(super) struct Payload {
    whole: LentSlice,
    /// Exactly the bytes of the request.
    pub(super) bytes: LentSlice,
}

impl Buffers {
    /// A buffer for `len` bytes, which hold anything.
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

    /// Takes a buffer back.
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
    fn buffers_are_exact_and_what_is_kept_is_bounded() {
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
