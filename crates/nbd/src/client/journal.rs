//! Writes that a server acknowledged, until a flush has covered them.

use std::collections::VecDeque;

use ringfence_memory::LentSlice;

use ringfence_block::storage::Request;

/// What was written.
#[derive(Clone)]
pub(super) enum Body {
    /// These bytes.
    Bytes(LentSlice),
    /// So many zeros.
    Zeros(u64),
}

/// A write that was acknowledged.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) offset: u64,
    pub(super) body: Body,
    number: u64,
}

impl Entry {
    fn len(&self) -> u64 {
        match &self.body {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Zeros(len) => *len,
        }
    }

    fn overlaps(&self, other: &Entry) -> bool {
        let end = |entry: &Entry| entry.offset.saturating_add(entry.len());
        self.offset < end(other) && other.offset < end(self)
    }
}

/// Writes that are not durable, in the order of their acknowledgement.
pub(super) struct Journal {
    entries: VecDeque<Entry>,
    bytes: usize,
    limit: usize,
    /// Of the last entry.
    number: u64,
}

/// Bytes that are kept in any case.
const LIMIT_MIN: usize = 64 << 10;

/// What an entry costs beside its bytes.
const OVERHEAD: usize = 128;

/// Entries that are written again at the same time.
const TOGETHER: usize = 64;

impl Journal {
    /// Keeps at most about `limit` bytes, beside the longest write.
    pub(super) fn new(limit: usize) -> Journal {
        // With less, it would flush for the sake of flushing.
        let limit = limit.max(LIMIT_MIN);
        Journal { entries: VecDeque::new(), bytes: 0, limit, number: 0 }
    }

    /// A write was acknowledged. (Copied here, and not when it was sent: what a guest changes in
    /// between it changes on its own disk.)
    pub(super) fn wrote(&mut self, request: &Request) {
        let Ok(len) = usize::try_from(request.len) else { return };
        let bytes = LentSlice::anonymous(len);
        let mut at = 0;
        for segment in &request.segments {
            let piece = segment.memory.len();
            // The segments are as long as the request: that was checked when it was submitted.
            if bytes.copy_from_lent(at, &segment.memory, 0, piece).is_err() {
                return;
            }
            at += piece;
        }
        self.bytes += len;
        self.push(request.offset, Body::Bytes(bytes));
    }

    /// Zeros were acknowledged.
    pub(super) fn zeroed(&mut self, offset: u64, len: u64) {
        self.push(offset, Body::Zeros(len));
    }

    fn push(&mut self, offset: u64, body: Body) {
        self.number += 1;
        self.bytes += OVERHEAD;
        self.entries.push_back(Entry { offset, body, number: self.number });
    }

    /// The number of the last entry: what a flush that is sent now will cover.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// A flush covered everything up to `number`.
    pub(super) fn flushed(&mut self, number: u64) {
        while let Some(first) = self.entries.front().filter(|first| first.number <= number) {
            if let Body::Bytes(bytes) = &first.body {
                self.bytes -= bytes.len();
            }
            self.bytes -= OVERHEAD;
            self.entries.pop_front();
        }
    }

    /// It is time to flush.
    pub(super) fn is_half_full(&self) -> bool {
        self.bytes >= self.limit / 2
    }

    /// Nothing more is to be written before a flush.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= self.limit
    }

    /// What is to be written again next, after `done` entries: some that do not overlap, so that
    /// their order does not matter.
    pub(super) fn again(&self, done: usize) -> Vec<Entry> {
        let mut batch: Vec<Entry> = vec![];
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
    fn a_flush_takes_away_what_it_covers_and_no_more() {
        let mut journal = Journal::new(LIMIT_MIN);
        journal.wrote(&write(0, 4096));
        journal.zeroed(8192, 1 << 40);
        let covers = journal.number();
        assert!(!journal.is_half_full());
        journal.wrote(&write(4096, 32 << 10));
        assert!(journal.is_half_full() && !journal.is_full());
        journal.flushed(covers);
        let left = journal.again(0);
        assert_eq!((left.len(), left[0].offset), (1, 4096));
        journal.flushed(journal.number());
        assert_eq!((journal.bytes, journal.entries.len()), (0, 0));
    }

    #[test]
    fn what_overlaps_is_written_again_one_after_the_other() {
        let mut journal = Journal::new(1 << 20);
        for offset in [0, 4096, 8192, 4096 + 512, 0] {
            journal.wrote(&write(offset, 4096));
        }
        let offsets =
            |done| -> Vec<u64> { journal.again(done).iter().map(|entry| entry.offset).collect() };
        assert_eq!(offsets(0), [0, 4096, 8192]);
        assert_eq!(offsets(3), [4608, 0]);
        assert_eq!(offsets(5), [] as [u64; 0]);
    }
}
