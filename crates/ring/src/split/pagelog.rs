//! Log of the pages that a device has written, in memory that a hypervisor shares (vhost-user, "Migration").
//!
//! The log is a bitmap: bit n, from the lowest bit of the first byte on, is the page of 4096 bytes at address n × 4096 of the
//! guest. The hypervisor clears a bit, then copies the page. So the mark of a write follows it, and is atomic.

use ringfence_memory::{LentSlice, OutOfRange};

use crate::sync::Ordering;

/// Number of bytes for which the log has a bit.
const PAGE: u64 = 4096;
/// Number of pages in a word of the log.
const WORD_PAGES: u64 = 32;

/// Log of written pages. See the [module](self).
#[derive(Debug)]
pub struct PageLog {
    bitmap: LentSlice,
}

impl PageLog {
    /// Uses memory as a log.
    pub fn new(bitmap: LentSlice) -> PageLog {
        PageLog { bitmap }
    }

    /// Marks the pages of `len` bytes at an address of the guest, which were written before.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the log has no bit for a page, is not aligned to 4 bytes, or is read-only. Some of the pages
    /// may be marked then.
    pub fn mark(&self, address: u64, len: usize) -> Result<(), OutOfRange> {
        let Some(more) = (len as u64).checked_sub(1) else { return Ok(()) };
        // No log has a bit for the last page of all.
        let last = address.saturating_add(more) / PAGE;
        let mut page = address / PAGE;
        while page <= last {
            let (word, first_bit) = (page / WORD_PAGES, page % WORD_PAGES);
            let last_bit = (last - word * WORD_PAGES).min(WORD_PAGES - 1);
            let bits = (u32::MAX << first_bit) & (u32::MAX >> (WORD_PAGES - 1 - last_bit));
            let at = usize::try_from(word * 4).unwrap_or(usize::MAX);
            // The write is visible before the mark, also where the bit was set already.
            self.bitmap.fetch_or_u32(at, bits.to_le(), Ordering::SeqCst)?;
            page = (word + 1) * WORD_PAGES;
        }
        Ok(())
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 4096;
    /// First address without a bit.
    const END: u64 = BYTES as u64 * 8 * PAGE;

    fn log() -> PageLog {
        PageLog::new(LentSlice::anonymous(BYTES))
    }

    /// Returns the numbers of the marked pages.
    fn marked(log: &PageLog) -> Vec<u64> {
        let mut bytes = [0; BYTES];
        log.bitmap.copy_to(0, &mut bytes).unwrap();
        let is_set = |page: &u64| bytes[usize::try_from(page / 8).unwrap()] >> (page % 8) & 1 != 0;
        (0..BYTES as u64 * 8).filter(is_set).collect()
    }

    #[test]
    fn page_without_a_bit_is_a_fault() {
        let log = log();
        log.mark(END - 1, 1).unwrap();
        for (address, len) in [(END, 1), (END - 1, 2), (u64::MAX, 1), (u64::MAX, 2)] {
            let fault = log.mark(address, len).unwrap_err();
            assert!(matches!(fault, OutOfRange::Bounds { .. }), "{address:#x}: {fault}");
        }
    }

    proptest! {
        #[test]
        fn pages_of_written_bytes_are_marked_and_no_others(
            writes in proptest::collection::vec((0..END - (1 << 20), 0_usize..1 << 20), 0..4),
        ) {
            let log = log();
            let mut expected = std::collections::BTreeSet::new();
            for (address, len) in writes {
                log.mark(address, len).unwrap();
                if len > 0 {
                    expected.extend(address / PAGE..=(address + len as u64 - 1) / PAGE);
                }
            }
            prop_assert_eq!(marked(&log), expected.into_iter().collect::<Vec<_>>());
        }
    }
}
