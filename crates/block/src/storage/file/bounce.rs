//! Bounce buffers of one file queue: page-aligned private memory of bounded total size.

use std::io;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};

/// Size in bytes of the largest buffer. Longer requests use it several times.
pub(super) const BUFFER_MAX: usize = 1 << 20;

/// Maximum number of bytes in use at the same time.
const BUDGET: usize = 16 << 20;

/// Maximum number of bytes of free buffers that are kept.
const KEPT_MAX: usize = 4 << 20;

/// Number of sizes: 1, 2, 4, … pages up to [`BUFFER_MAX`].
const CLASSES: usize = 9;
const _: () = assert!(PAGE_SIZE << (CLASSES - 1) == BUFFER_MAX);

/// Bounce buffers of one queue.
#[derive(Default)]
pub(super) struct BounceBuffers {
    free: [Vec<LentSlice>; CLASSES],
    /// Bytes in `free`.
    kept: usize,
    /// Bytes in use.
    in_use: usize,
}

fn class(len: usize) -> usize {
    let pages = len.clamp(1, BUFFER_MAX).div_ceil(PAGE_SIZE).next_power_of_two();
    pages.trailing_zeros() as usize
}

impl BounceBuffers {
    /// Returns a buffer of at least `len` bytes, or of [`BUFFER_MAX`] if `len` is larger. Returns `None` if
    /// the budget is used up.
    pub(super) fn take(&mut self, len: usize) -> io::Result<Option<LentSlice>> {
        let class = class(len);
        let size = PAGE_SIZE << class;
        if self.in_use > 0 && self.in_use + size > BUDGET {
            return Ok(None);
        }
        let buffer = match self.free[class].pop() {
            Some(buffer) => {
                self.kept -= size;
                buffer
            }
            None => Mapping::private(size)?.lent(),
        };
        self.in_use += size;
        Ok(Some(buffer))
    }

    /// Returns a buffer for reuse.
    pub(super) fn give_back(&mut self, buffer: LentSlice) {
        let size = buffer.len();
        self.in_use = self.in_use.saturating_sub(size);
        if self.kept + size <= KEPT_MAX {
            self.kept += size;
            self.free[class(size)].push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_taken_is_large_enough_page_aligned_and_reused() {
        let mut buffers = BounceBuffers::default();
        for len in [1, 512, 4096, 4097, 100_000, BUFFER_MAX, BUFFER_MAX * 3] {
            let buffer = buffers.take(len).unwrap().unwrap();
            assert!(buffer.len() >= len.min(BUFFER_MAX) && buffer.len() <= BUFFER_MAX);
            assert!(buffer.is_aligned_to(PAGE_SIZE));
            buffers.give_back(buffer);
        }
        assert_eq!(buffers.in_use, 0);
        assert_eq!(buffers.kept, 4096 + 8192 + 131_072 + BUFFER_MAX);
    }

    #[test]
    fn bytes_in_use_and_bytes_kept_are_bounded() {
        let mut buffers = BounceBuffers::default();
        let mut used = vec![];
        while let Some(buffer) = buffers.take(BUFFER_MAX).unwrap() {
            used.push(buffer);
        }
        assert_eq!(used.len(), 16);
        assert!(buffers.take(1).unwrap().is_none());
        used.into_iter().for_each(|buffer| buffers.give_back(buffer));
        assert_eq!((buffers.kept, buffers.in_use), (KEPT_MAX, 0));
    }
}
