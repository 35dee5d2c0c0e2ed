//! Bounce buffers of mode `copy`: private memory that the I/O works on instead of the guest's pages.

use ringfence_memory::LentSlice;

/// Size of the smallest buffer, as a power of two.
const SMALLEST: u32 = 12;
/// Number of size classes that are kept: 4 KiB to 2 MiB.
const SIZES: usize = 10;
/// Maximum number of free buffers kept of each size.
const KEPT: usize = 64;

/// Free bounce buffers of one ring, by size class.
#[derive(Default)]
pub(crate) struct BounceBuffers {
    free: [Vec<LentSlice>; SIZES],
}

fn size_of(bytes: usize) -> usize {
    let log = bytes.max(1).next_power_of_two().ilog2();
    log.saturating_sub(SMALLEST) as usize
}

impl BounceBuffers {
    /// Returns a buffer of at least `bytes` bytes. Its content is undefined; it comes from this ring's
    /// earlier requests or is zero.
    pub(crate) fn take(&mut self, bytes: usize) -> LentSlice {
        let size = size_of(bytes);
        let kept = self.free.get_mut(size).and_then(Vec::pop);
        kept.unwrap_or_else(|| LentSlice::anonymous(1 << (SMALLEST as usize + size)))
    }

    /// Keeps a buffer for a later request, unless there are enough of its size.
    pub(crate) fn give_back(&mut self, buffer: LentSlice) {
        if let Some(free) = self.free.get_mut(size_of(buffer.len()))
            && free.len() < KEPT
        {
            free.push(buffer);
        }
    }

    /// Frees all buffers that are not in use.
    pub(crate) fn clear(&mut self) {
        self.free.iter_mut().for_each(Vec::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_given_back_is_large_enough_and_reused() {
        let mut buffers = BounceBuffers::default();
        for bytes in [1, 512, 4096, 4097, 45056, 1 << 20, (1 << 21) + 512] {
            let buffer = buffers.take(bytes);
            assert!(buffer.len() >= bytes && buffer.len() < 2 * bytes.max(4096));
            buffers.give_back(buffer);
        }
        assert_eq!(buffers.free.iter().map(Vec::len).sum::<usize>(), 4);
        let again = buffers.take(8000);
        assert_eq!(again.len(), 8192);
        assert_eq!(buffers.free[1].len(), 0);
    }
}
