//! Journal of acknowledged writes that no flush has covered, for replay after a reconnect.

use std::collections::VecDeque;

use ringfence_memory::LentSlice;

use ringfence_block::storage::Request;

/// Content of a write.
#[derive(Clone)]
pub(super) enum Body {
    /// Copy of the written bytes.
    Bytes(LentSlice),
    Zeros {
        /// Number of bytes.
        len: u64,
        /// Storage of the range stays allocated.
        allocate: bool,
    },
}

/// Write that the server acknowledged.
#[derive(Clone)]
pub(super) struct JournalEntry {
    pub(super) offset: u64,
    pub(super) body: Body,
    number: u64,
}

impl JournalEntry {
    fn len(&self) -> u64 {
        match &self.body {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Zeros { len, .. } => *len,
        }
    }

    fn overlaps(&self, other: &JournalEntry) -> bool {
        let end = |entry: &JournalEntry| entry.offset.saturating_add(entry.len());
        self.offset < end(other) && other.offset < end(self)
    }
}

/// Acknowledged writes that are not durable, in the order of their acknowledgement.
pub(super) struct Journal {
    entries: VecDeque<JournalEntry>,
    bytes: usize,
    limit: usize,
    /// Sequence number of the last entry.
    number: u64,
}

/// Minimum limit in bytes.
const LIMIT_MIN: usize = 64 << 10;

/// Bytes that an entry counts beside its data.
const OVERHEAD: usize = 128;

/// Maximum number of entries replayed at the same time.
const TOGETHER: usize = 64;

impl Journal {
    /// Creates a journal of about `limit` bytes; the longest write may exceed it.
    pub(super) fn new(limit: usize) -> Journal {
        // A smaller journal would cause a flush for almost every write.
        let limit = limit.max(LIMIT_MIN);
        Journal { entries: VecDeque::new(), bytes: 0, limit, number: 0 }
    }

    /// Records an acknowledged write. The data is copied at the acknowledgement, not when it was sent: a guest
    /// that changes it in between changes its own disk.
    pub(super) fn record_write(&mut self, request: &Request) {
        let Ok(len) = usize::try_from(request.len) else { return };
        let bytes = LentSlice::anonymous(len);
        let mut at = 0;
        for segment in &request.segments {
            let piece = segment.memory.len();
            // The segments are as long as the request, as checked at submission.
            if bytes.copy_from_lent(at, &segment.memory, 0, piece).is_err() {
                return;
            }
            at += piece;
        }
        self.bytes += len;
        self.push(request.offset, Body::Bytes(bytes));
    }

    /// Records a range of acknowledged zeros.
    pub(super) fn record_zeros(&mut self, offset: u64, len: u64, allocate: bool) {
        self.push(offset, Body::Zeros { len, allocate });
    }

    fn push(&mut self, offset: u64, body: Body) {
        self.number += 1;
        self.bytes += OVERHEAD;
        self.entries.push_back(JournalEntry { offset, body, number: self.number });
    }

    /// Returns the number of the last entry, which a flush sent now covers.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Removes the entries that a flush covered: all up to `number`.
    pub(super) fn remove_flushed(&mut self, number: u64) {
        while let Some(first) = self.entries.front().filter(|first| first.number <= number) {
            if let Body::Bytes(bytes) = &first.body {
                self.bytes -= bytes.len();
            }
            self.bytes -= OVERHEAD;
            self.entries.pop_front();
        }
    }

    /// Returns `true` if a flush is due.
    pub(super) fn is_half_full(&self) -> bool {
        self.bytes >= self.limit / 2
    }

    /// Returns `true` if no write may be sent before a flush.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= self.limit
    }

    /// Returns the next entries to replay after the first `done`. They do not overlap, so their order is
    /// irrelevant.
    pub(super) fn next_batch(&self, done: usize) -> Vec<JournalEntry> {
        let mut batch: Vec<JournalEntry> = vec![];
        for entry in self.entries.iter().skip(done).take(TOGETHER) {
            if batch.iter().any(|other| other.overlaps(entry)) {
                break;
            }
            batch.push(entry.clone());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_block::storage::Op;
    use ringfence_block::storage::testing::lent_with;

    fn write(offset: u64, len: usize) -> Request {
        let op = Op::Write { fua: false };
        let segments = vec![lent_with(&vec![1; len]).into()];
        Request { token: 0, op, offset, len: len as u64, segments }
    }

    #[test]
    fn flush_removes_exactly_the_covered_entries() {
        let mut journal = Journal::new(LIMIT_MIN);
        journal.record_write(&write(0, 4096));
        journal.record_zeros(8192, 1 << 40, false);
        let covers = journal.number();
        assert!(!journal.is_half_full());
        journal.record_write(&write(4096, 32 << 10));
        assert!(journal.is_half_full() && !journal.is_full());
        journal.remove_flushed(covers);
        let left = journal.next_batch(0);
        assert_eq!((left.len(), left[0].offset), (1, 4096));
        journal.remove_flushed(journal.number());
        assert_eq!((journal.bytes, journal.entries.len()), (0, 0));
    }

    #[test]
    fn overlapping_writes_are_replayed_in_separate_batches() {
        let mut journal = Journal::new(1 << 20);
        for offset in [0, 4096, 8192, 4096 + 512, 0] {
            journal.record_write(&write(offset, 4096));
        }
        let offsets = |done| -> Vec<u64> {
            journal.next_batch(done).iter().map(|entry| entry.offset).collect()
        };
        assert_eq!(offsets(0), [0, 4096, 8192]);
        assert_eq!(offsets(3), [4608, 0]);
        assert_eq!(offsets(5), [] as [u64; 0]);
    }
}
