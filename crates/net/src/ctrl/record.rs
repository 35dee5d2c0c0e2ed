//! What a backend keeps of a control ring so that another process can go on with it: which pages
//! are staged, and how packets are hashed.
//!
//! # Theory of operation
//!
//! A record is memory of the backend's own that outlives its process. It has the record of the ring
//! ([`ringfence_ring::BackRing::attach_recorded`]) and, behind it, two *banks*. After each turn the
//! state goes to the bank that does not have the present one, with the index that the ring's answers
//! have come to; then the answers are published. Whoever takes over asks for the state of the index
//! at which it finds the ring. So state and answers never disagree: of a process that died between
//! the two, the answers are unpublished and the state is that from before, and its messages are
//! carried out once more. A bank that was not written to its end does not have the sum that it says.
//!
//! The record is the backend's own: what it says is believed as far as it cannot do harm, and the
//! pages it names are judged and mapped as those of a list are.

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_platform::{Access, Gref};
use ringfence_ring::RingPages;

/// Bytes of a bank: what most queues may stage and the longest table take less.
const BANK: usize = 12 * PAGE_SIZE;
/// Bytes of what precedes a bank's content: sum, index, length.
const HEADER: usize = 16;

/// The record.
#[derive(Clone, Debug)]
pub struct CtrlRecord {
    memory: LentSlice,
}

/// What is recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct CtrlState {
    /// The guest was told that pages can be staged.
    pub(crate) staging: bool,
    /// The pages, by queue.
    pub(crate) staged: Vec<Vec<(Gref, Access)>>,
    /// How packets are hashed, as [`super::hash::HashSetup`] writes it.
    pub(crate) hash: Vec<u8>,
}

impl CtrlRecord {
    /// Bytes that a record takes.
    pub const BYTES: usize = PAGE_SIZE + 2 * BANK;

    /// Takes `memory` as a record; zeros are one of nothing.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] when it is too short, or read-only.
    pub fn new(memory: LentSlice) -> Result<CtrlRecord, OutOfRange> {
        RingPages::new(memory.slice(0, PAGE_SIZE)?, PAGE_SIZE)?;
        Ok(CtrlRecord { memory: memory.slice(0, Self::BYTES)? })
    }

    /// The record of the ring.
    pub(crate) fn ring(&self) -> Result<RingPages, OutOfRange> {
        RingPages::new(self.memory.slice(0, PAGE_SIZE)?, PAGE_SIZE)
    }

    /// Forgets what was recorded.
    pub(crate) fn clear(&self) {
        let cleared = self.memory.zero(PAGE_SIZE, 2 * BANK);
        debug_assert!(cleared.is_ok(), "new() has checked the range");
    }

    /// Writes the state that holds once the answers up to `index` are published. False: it does not
    /// fit, and no state of this index will be found.
    pub(crate) fn save(&self, index: u32, state: &CtrlState) -> bool {
        let content = state.to_bytes();
        // What is published is in the other bank; between two turns the index changes.
        let bank = self.bank_of(Some(index)).or_else(|| self.bank_of(None));
        let bank = bank.unwrap_or_else(|| self.older(index));
        let mut bytes = Vec::with_capacity(HEADER + content.len());
        let Ok(len) = u32::try_from(content.len()) else { return false };
        bytes.extend(index.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(content);
        let sum = sum(&bytes);
        bytes.splice(0..0, sum.to_le_bytes());
        bytes.len() <= BANK && self.memory.copy_from(place(bank), &bytes).is_ok()
    }

    /// The state that was recorded for this index.
    pub(crate) fn load(&self, index: u32) -> Option<CtrlState> {
        let bank = self.bank_of(Some(index))?;
        CtrlState::from_bytes(&self.content(bank)?)
    }

    /// The bank that has the state of this index, or one that has none.
    fn bank_of(&self, index: Option<u32>) -> Option<usize> {
        (0..2).find(|bank| self.index(*bank) == index)
    }

    /// The index of what is in a bank, if that is whole.
    fn index(&self, bank: usize) -> Option<u32> {
        self.content(bank)?;
        let word = self.memory.fetch::<4>(place(bank) + 8).ok()?;
        Some(u32::from_le_bytes(word.into_unchecked()))
    }

    fn content(&self, bank: usize) -> Option<Vec<u8>> {
        let header: [u8; HEADER] = self.memory.fetch(place(bank)).ok()?.into_unchecked();
        let (says, rest) = header.split_first_chunk::<8>()?;
        let len = rest.last_chunk::<4>().map(|len| u32::from_le_bytes(*len))?;
        let len = usize::try_from(len).ok().filter(|len| *len <= BANK - HEADER)?;
        let mut bytes = vec![0; 8 + len];
        self.memory.copy_to(place(bank) + 8, &mut bytes).ok()?;
        // A bank of zeros is none.
        (len > 0 && sum(&bytes) == u64::from_le_bytes(*says)).then(|| bytes.split_off(8))
    }

    /// The bank whose index is further behind.
    fn older(&self, index: u32) -> usize {
        let behind = |bank| self.index(bank).map_or(u32::MAX, |there| index.wrapping_sub(there));
        usize::from(behind(1) > behind(0))
    }
}

fn place(bank: usize) -> usize {
    PAGE_SIZE + bank * BANK
}

/// FNV-1a: tells what was cut off in the middle, and is no protection against anybody.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl CtrlState {
    /// Little endian: staging, queues, pages and references of each (the lowest bit: read-only), and
    /// the rest is about hashing.
    fn to_bytes(&self) -> Vec<u8> {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = vec![u8::from(self.staging)];
        bytes.extend(count(self.staged.len()));
        for queue in &self.staged {
            bytes.extend(count(queue.len()));
            for (gref, access) in queue {
                bytes.extend(gref.0.to_le_bytes());
                bytes.push(u8::from(*access == Access::ReadOnly));
            }
        }
        bytes.extend(&self.hash);
        bytes
    }

    fn from_bytes(mut bytes: &[u8]) -> Option<CtrlState> {
        let word = |bytes: &mut &[u8]| {
            let (word, rest) = bytes.split_first_chunk::<4>()?;
            *bytes = rest;
            Some(u32::from_le_bytes(*word))
        };
        let byte = |bytes: &mut &[u8]| {
            let (byte, rest) = bytes.split_first()?;
            *bytes = rest;
            Some(*byte)
        };
        let staging = byte(&mut bytes)? != 0;
        let mut staged = Vec::new();
        for _ in 0..word(&mut bytes)? {
            let mut queue = Vec::new();
            for _ in 0..word(&mut bytes)? {
                let gref = Gref(word(&mut bytes)?);
                let read_only = byte(&mut bytes)? != 0;
                queue.push((gref, if read_only { Access::ReadOnly } else { Access::ReadWrite }));
            }
            staged.push(queue);
        }
        Some(CtrlState { staging, staged, hash: bytes.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(pages: u32) -> CtrlState {
        let access = |n| if n % 3 == 0 { Access::ReadOnly } else { Access::ReadWrite };
        let queue = |first| (0..pages).map(|n| (Gref(first + n), access(n))).collect();
        CtrlState { staging: true, staged: vec![queue(8), queue(9000)], hash: vec![7; 2100] }
    }

    #[test]
    fn the_state_of_an_index_is_there_until_the_one_after_next() {
        let record = CtrlRecord::new(LentSlice::anonymous(CtrlRecord::BYTES)).unwrap();
        assert_eq!(record.load(0), None);
        for index in [0, 1, 4, 8, u32::MAX, 3] {
            assert!(record.save(index, &state(index % 7)));
            assert_eq!(record.load(index), Some(state(index % 7)));
        }
        // What was published last, and what would have been published next.
        assert_eq!(record.load(u32::MAX), Some(state(u32::MAX % 7)));
        assert_eq!(record.load(8), None);
        // The same messages again, after somebody died before their answers were published.
        assert!(record.save(3, &state(1)));
        assert_eq!(record.load(3), Some(state(1)));
        assert_eq!(record.load(u32::MAX), Some(state(u32::MAX % 7)));
        record.clear();
        assert_eq!(record.load(3), None);
    }

    #[test]
    fn the_most_that_may_be_staged_fits() {
        let record = CtrlRecord::new(LentSlice::anonymous(CtrlRecord::BYTES)).unwrap();
        let limits = ringfence_access::staging::StagingLimits::default();
        assert!(record.save(1, &state(limits.per_guest / 2)));
        assert_eq!(record.load(1), Some(state(limits.per_guest / 2)));
        assert!(!record.save(2, &state(u32::try_from(BANK).unwrap())));
        assert_eq!(record.load(2), None);
    }

    proptest! {
        #[test]
        fn a_write_that_was_cut_off_leaves_the_state_from_before(cut in 0usize..600, pages in 0u32..40) {
            let memory = LentSlice::anonymous(CtrlRecord::BYTES);
            let record = CtrlRecord::new(memory.clone()).unwrap();
            prop_assert!(record.save(1, &state(3)) && record.save(2, &state(5)));
            let mut before = vec![0; 600];
            memory.copy_to(place(0), &mut before).unwrap();
            prop_assert!(record.save(3, &state(pages)));
            // The first bytes are new, the others as they were.
            memory.copy_from(place(0) + cut, &before[cut..]).unwrap();
            prop_assert_eq!(record.load(2), Some(state(5)));
            prop_assert!(record.load(3).is_none_or(|found| found == state(pages)));
        }

        #[test]
        fn whatever_is_in_the_memory_is_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let memory = LentSlice::anonymous(CtrlRecord::BYTES);
            memory.copy_from(PAGE_SIZE, &bytes).unwrap();
            let record = CtrlRecord::new(memory).unwrap();
            prop_assert_eq!(record.load(0), None);
            let _ = CtrlState::from_bytes(&bytes);
        }
    }
}
