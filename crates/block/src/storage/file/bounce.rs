//! Private memory that requests go through, aligned to a page, in a bounded amount.

use std::io;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE};

/// Bytes of the largest buffer. Longer requests go through it piece by piece.
pub(super) const BUFFER_MAX: usize = 1 << 20;

/// Bytes handed out at the same time.
const BUDGET: usize = 16 << 20;

/// Bytes kept for the next one when they come back.
const KEPT_MAX: usize = 4 << 20;

/// Sizes: one page, two, four, … up to [`BUFFER_MAX`].
const CLASSES: usize = 9;
const _: () = assert!(PAGE_SIZE << (CLASSES - 1) == BUFFER_MAX);

/// The buffers of one queue.
#[derive(Default)]
pub(super) struct Bounces {
    free: [Vec<LentSlice>; CLASSES],
    /// Bytes in `free`.
    kept: usize,
    /// Bytes handed out.
    out: usize,
}

fn class(len: usize) -> usize {
    let pages = len.clamp(1, BUFFER_MAX).div_ceil(PAGE_SIZE).next_power_of_two();
    pages.trailing_zeros() as usize
}

impl Bounces {
    /// A buffer of at least `len` bytes (or of [`BUFFER_MAX`]); `None` when so much is in use that
    /// one has to come back first.
    pub(super) fn take(&mut self, len: usize) -> io::Result<Option<LentSlice>> {
        let class = class(len);
        let size = PAGE_SIZE << class;
        if self.out > 0 && self.out + size > BUDGET {
            return Ok(None);
        }
        let buffer = match self.free[class].pop() {
            Some(buffer) => {
                self.kept -= size;
                buffer
            }
            None => Mapping::private(size)?.lent(),
        };
        self.out += size;
        Ok(Some(buffer))
    }

    /// Takes a buffer back.
    pub(super) fn give_back(&mut self, buffer: LentSlice) {
        let size = buffer.len();
        self.out = self.out.saturating_sub(size);
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
    fn a_buffer_is_large_enough_aligned_and_used_again() {
        let mut bounces = Bounces::default();
        for len in [1, 512, 4096, 4097, 100_000, BUFFER_MAX, BUFFER_MAX * 3] {
            let buffer = bounces.take(len).unwrap().unwrap();
            assert!(buffer.len() >= len.min(BUFFER_MAX) && buffer.len() <= BUFFER_MAX);
            assert!(buffer.is_aligned_to(PAGE_SIZE));
            bounces.give_back(buffer);
        }
        assert_eq!(bounces.out, 0);
        assert_eq!(bounces.kept, 4096 + 8192 + 131_072 + BUFFER_MAX);
    }

    #[test]
    fn what_is_handed_out_and_what_is_kept_is_bounded() {
        let mut bounces = Bounces::default();
        let mut buffers = vec![];
        while let Some(buffer) = bounces.take(BUFFER_MAX).unwrap() {
            buffers.push(buffer);
        }
        assert_eq!(buffers.len(), 16);
        assert!(bounces.take(1).unwrap().is_none());
        buffers.into_iter().for_each(|buffer| bounces.give_back(buffer));
        assert_eq!((bounces.kept, bounces.out), (KEPT_MAX, 0));
    }
}
