//! Crash journal of a control ring: the staged pages and the hash configuration, for a process that takes
//! the ring over.
//!
//! # Theory of operation
//!
//! The journal is memory of the backend that outlives its process. It holds the journal of the ring
//! ([`ringfence_ring::BackRing::attach_recorded`]) and two *banks*. After each batch of messages, the backend
//! writes the new state to the bank without the current one, together with the ring index after its
//! responses. Then it publishes the responses. The next process loads the state of the index that it finds
//! in the ring. So state and responses always agree. If a process crashed between the two steps, its
//! responses are unpublished and the previous state is loaded; the messages are executed again. A partially
//! written bank has a wrong checksum.
//!
//! The journal belongs to the backend, but its content is not trusted beyond that: the pages in it are
//! validated and mapped as those of a frontend's list are.

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};
use ringfence_platform::{Access, Gref};
use ringfence_ring::RingPages;
use ringfence_wire::numbers::bounded;

/// Size of a bank in bytes. The maximum number of staged pages and the longest table take less.
const BANK: usize = 12 * PAGE_SIZE;
/// Number of bytes before a bank's content: checksum, index, length.
const HEADER: usize = 16;

/// Crash journal of one control ring.
#[derive(Clone, Debug)]
pub struct CtrlRecord {
    memory: LentSlice,
}

/// State of a control ring in the crash journal.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct CtrlState {
    /// Set if staging was offered to the guest.
    pub(crate) staging: bool,
    /// Staged pages by queue.
    pub(crate) staged: Vec<Vec<(Gref, Access)>>,
    /// Hash configuration, as [`super::hash::HashSetup`] encodes it.
    pub(crate) hash: Vec<u8>,
}

impl CtrlRecord {
    /// Size of a crash journal in bytes.
    pub const BYTES: usize = PAGE_SIZE + 2 * BANK;

    /// Makes a crash journal of `memory`; zeroed memory is an empty one.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the memory is too short or read-only.
    pub fn new(memory: LentSlice) -> Result<CtrlRecord, OutOfRange> {
        RingPages::new(memory.slice(0, PAGE_SIZE)?, PAGE_SIZE)?;
        Ok(CtrlRecord { memory: memory.slice(0, Self::BYTES)? })
    }

    /// Returns the journal of the ring.
    pub(crate) fn ring(&self) -> Result<RingPages, OutOfRange> {
        RingPages::new(self.memory.slice(0, PAGE_SIZE)?, PAGE_SIZE)
    }

    /// Clears the recorded state.
    pub(crate) fn clear(&self) {
        let cleared = self.memory.zero(PAGE_SIZE, 2 * BANK);
        debug_assert!(cleared.is_ok(), "new() has checked the range");
    }

    /// Writes the state after the responses up to `index`. Returns false if it does not fit; then
    /// [`CtrlRecord::load`] finds no state of this index.
    pub(crate) fn save(&self, index: u32, state: &CtrlState) -> bool {
        let content = state.to_bytes();
        // The published state is in the other bank: the index changes between two batches.
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

    /// Loads the state that was recorded for this index.
    pub(crate) fn load(&self, index: u32) -> Option<CtrlState> {
        let bank = self.bank_of(Some(index))?;
        CtrlState::from_bytes(&self.content(bank)?)
    }

    /// Returns the bank with the state of this index; `None` finds an empty bank.
    fn bank_of(&self, index: Option<u32>) -> Option<usize> {
        (0..2).find(|bank| self.index(*bank) == index)
    }

    /// Returns the index of a bank's state, if the bank is complete.
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
        // A zeroed bank is empty.
        (len > 0 && sum(&bytes) == u64::from_le_bytes(*says)).then(|| bytes.split_off(8))
    }

    /// Returns the bank with the older state.
    fn older(&self, index: u32) -> usize {
        let behind = |bank| self.index(bank).map_or(u32::MAX, |there| index.wrapping_sub(there));
        usize::from(behind(1) > behind(0))
    }
}

fn place(bank: usize) -> usize {
    PAGE_SIZE + bank * BANK
}

/// Computes the FNV-1a checksum, which detects partial writes but no manipulation.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl CtrlState {
    /// Encodes the state in little endian: staging flag, number of queues, then for each the number of pages, and
    /// their references with a read-only flag. The hash configuration follows.
    fn to_bytes(&self) -> Vec<u8> {
        let count = |len: usize| bounded(len, u32::MAX).to_le_bytes();
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
    fn state_of_index_remains_until_second_save_after_it() {
        let record = CtrlRecord::new(LentSlice::anonymous(CtrlRecord::BYTES)).unwrap();
        assert_eq!(record.load(0), None);
        for index in [0, 1, 4, 8, u32::MAX, 3] {
            assert!(record.save(index, &state(index % 7)));
            assert_eq!(record.load(index), Some(state(index % 7)));
        }
        // The state of the last published index, and that of the next one.
        assert_eq!(record.load(u32::MAX), Some(state(u32::MAX % 7)));
        assert_eq!(record.load(8), None);
        // The same messages again, after a crash before their responses were published.
        assert!(record.save(3, &state(1)));
        assert_eq!(record.load(3), Some(state(1)));
        assert_eq!(record.load(u32::MAX), Some(state(u32::MAX % 7)));
        record.clear();
        assert_eq!(record.load(3), None);
    }

    #[test]
    fn maximum_number_of_staged_pages_fits() {
        let record = CtrlRecord::new(LentSlice::anonymous(CtrlRecord::BYTES)).unwrap();
        let limits = ringfence_access::staging::StagingLimits::default();
        assert!(record.save(1, &state(limits.per_guest / 2)));
        assert_eq!(record.load(1), Some(state(limits.per_guest / 2)));
        assert!(!record.save(2, &state(u32::try_from(BANK).unwrap())));
        assert_eq!(record.load(2), None);
    }

    proptest! {
        #[test]
        fn partial_write_leaves_previous_state(cut in 0usize..600, pages in 0u32..40) {
            let memory = LentSlice::anonymous(CtrlRecord::BYTES);
            let record = CtrlRecord::new(memory.clone()).unwrap();
            prop_assert!(record.save(1, &state(3)) && record.save(2, &state(5)));
            let mut before = vec![0; 600];
            memory.copy_to(place(0), &mut before).unwrap();
            prop_assert!(record.save(3, &state(pages)));
            // The first bytes are new, the others are from before.
            memory.copy_from(place(0) + cut, &before[cut..]).unwrap();
            prop_assert_eq!(record.load(2), Some(state(5)));
            prop_assert!(record.load(3).is_none_or(|found| found == state(pages)));
        }

        #[test]
        fn arbitrary_memory_is_loaded_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let memory = LentSlice::anonymous(CtrlRecord::BYTES);
            memory.copy_from(PAGE_SIZE, &bytes).unwrap();
            let record = CtrlRecord::new(memory).unwrap();
            prop_assert_eq!(record.load(0), None);
            let _ = CtrlState::from_bytes(&bytes);
        }
    }
}
