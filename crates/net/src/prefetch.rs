//! Slot prefetch buffer: copies of ring slots, fetched several at a time and each only once.

use ringfence_wire::numbers::bounded;

/// Number of entries of a netif ring, which has one page.
const ENTRIES: usize = 256;

/// Prefetch buffer for the unconsumed slots of a ring. A slot that stays on the ring for a later round is
/// not fetched again (XSA-155).
pub(crate) struct PrefetchBuffer<const N: usize> {
    /// Slots by ring index modulo the number of entries.
    slots: Box<[[u8; N]; ENTRIES]>,
    /// Free-running index behind the last fetched slot.
    fetched: u32,
}

impl<const N: usize> PrefetchBuffer<N> {
    /// Makes an empty buffer for a ring that is consumed up to `consumed`.
    pub(crate) fn new(consumed: u32) -> PrefetchBuffer<N> {
        PrefetchBuffer { slots: Box::new([[0; N]; ENTRIES]), fetched: consumed }
    }

    /// Ensures that the first `ahead` slots from the free-running index `consumed` on are in the buffer. The
    /// ring must have produced them. `read` copies slots from an offset on, relative to `consumed`.
    #[inline]
    pub(crate) fn fetch(
        &mut self,
        consumed: u32,
        ahead: u32,
        mut read: impl FnMut(u32, &mut [[u8; N]]),
    ) {
        // A ring of one page has no more entries.
        let ahead = ahead.min(256);
        let mut held = self.fetched.wrapping_sub(consumed);
        if held > 256 {
            // The caller consumed slots that were not fetched here.
            (self.fetched, held) = (consumed, 0);
        }
        while held < ahead {
            let place = Self::place(self.fetched);
            let Some(into) = self.slots.get_mut(place..) else { return };
            let now = into.len().min((ahead - held) as usize);
            read(held, &mut into[..now]);
            // At most the number of entries.
            let now = bounded(now, u32::MAX);
            self.fetched = self.fetched.wrapping_add(now);
            held += now;
        }
    }

    /// Returns the slot of a free-running index, which must have been fetched.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> [u8; N] {
        self.slots[Self::place(index)]
    }

    #[inline]
    fn place(index: u32) -> usize {
        index as usize % ENTRIES
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Checks that each slot is fetched once and stays readable, for any sequence of fetches.
        #[test]
        fn xsa_155_each_slot_is_fetched_once(
            start: u32, steps in proptest::collection::vec((0u32..=256, 0u32..=256), 1..60),
        ) {
            let mut buffer = PrefetchBuffer::<4>::new(start);
            let (mut consumed, mut next) = (start, start);
            for (ahead, consume) in steps {
                buffer.fetch(consumed, ahead, |from, into| {
                    for (n, slot) in (0u32..).zip(into) {
                        let index = consumed.wrapping_add(from).wrapping_add(n);
                        assert_eq!(index, next, "in order, and none again");
                        next = next.wrapping_add(1);
                        *slot = index.to_le_bytes();
                    }
                });
                for n in 0..ahead {
                    let index = consumed.wrapping_add(n);
                    prop_assert_eq!(buffer.get(index), index.to_le_bytes());
                }
                consumed = consumed.wrapping_add(consume.min(next.wrapping_sub(consumed)));
            }
        }
    }
}
