//! Private memory that stands for a guest's while the disk is at work.

use ringfence_memory::LentSlice;

/// The smallest piece, as a power of two.
const SMALLEST: u32 = 12;
/// Sizes there are: 4 KiB to 2 MiB.
const SIZES: usize = 10;
/// Pieces of one size that are kept for later.
const KEPT: usize = 64;

/// Pieces of memory that are not in use, by size.
#[derive(Default)]
pub(super) struct Bounces {
    free: [Vec<LentSlice>; SIZES],
}

fn size_of(bytes: usize) -> usize {
    let log = bytes.max(1).next_power_of_two().ilog2();
    log.saturating_sub(SMALLEST) as usize
}

impl Bounces {
    /// A piece of at least so many bytes. What is in it is of no meaning, and was this ring's.
    pub(super) fn take(&mut self, bytes: usize) -> LentSlice {
        let size = size_of(bytes);
        let kept = self.free.get_mut(size).and_then(Vec::pop);
        kept.unwrap_or_else(|| LentSlice::anonymous(1 << (SMALLEST as usize + size)))
    }

    pub(super) fn give_back(&mut self, piece: LentSlice) {
        if let Some(free) = self.free.get_mut(size_of(piece.len()))
            && free.len() < KEPT
        {
            free.push(piece);
        }
    }

    /// Gives everything back to the system.
    pub(super) fn clear(&mut self) {
        self.free.iter_mut().for_each(Vec::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_large_enough_and_come_back() {
        let mut bounces = Bounces::default();
        for bytes in [1, 512, 4096, 4097, 45056, 1 << 20, (1 << 21) + 512] {
            let piece = bounces.take(bytes);
            assert!(piece.len() >= bytes && piece.len() < 2 * bytes.max(4096));
            bounces.give_back(piece);
        }
        assert_eq!(bounces.free.iter().map(Vec::len).sum::<usize>(), 4);
        let again = bounces.take(8000);
        assert_eq!(again.len(), 8192);
        assert_eq!(bounces.free[1].len(), 0);
    }
}
