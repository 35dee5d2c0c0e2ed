//! Requests that are being worked on, and which of them may be at the same time.

use ringfence_wire::blkif::{Direction, SegmentRange, Transfer};

use super::pages::Held;
use crate::storage::{Op, Segment};

/// What is to be done, in steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Read or write.
    Transfer(Transfer),
    /// Flush; then write, for good.
    Flush(Option<Transfer>),
    /// Alone: flush; then write, for good.
    Barrier(Option<Transfer>),
    /// Give up a range.
    Discard { sector: u64, sectors: u64, secure: bool },
}

impl Work {
    /// The range that is changed.
    fn changes(self) -> Option<(u64, u64)> {
        match self {
            Work::Transfer(transfer) if transfer.direction == Direction::Read => None,
            Work::Transfer(transfer)
            | Work::Flush(Some(transfer))
            | Work::Barrier(Some(transfer)) => {
                Some((transfer.sector, transfer.sector.saturating_add(transfer.sectors)))
            }
            Work::Discard { sector, sectors, .. } => Some((sector, sector.saturating_add(sectors))),
            Work::Flush(None) | Work::Barrier(None) => None,
        }
    }

    /// The transfer that is a part of it.
    pub(super) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Transfer(transfer) => Some(transfer),
            Work::Flush(transfer) | Work::Barrier(transfer) => transfer,
            Work::Discard { .. } => None,
        }
    }

    /// What the disk is to do first.
    pub(super) fn first(self) -> Op {
        match self {
            Work::Transfer(Transfer { direction: Direction::Read, .. }) => Op::Read,
            Work::Transfer(_) => Op::Write { fua: false },
            Work::Flush(_) | Work::Barrier(_) => Op::Flush,
            Work::Discard { secure, .. } => Op::Discard { secure },
        }
    }

    /// What the disk is to do after `done`.
    pub(super) fn next(self, done: Op) -> Option<Op> {
        let writes = matches!(self, Work::Flush(Some(_)) | Work::Barrier(Some(_)));
        (writes && done == Op::Flush).then_some(Op::Write { fua: true })
    }

    /// First sector and sectors of a step.
    pub(super) fn range(self, op: Op) -> (u64, u64) {
        match (op, self) {
            (Op::Flush, _) => (0, 0),
            (_, Work::Discard { sector, sectors, .. }) => (sector, sectors),
            (_, work) => work.transfer().map_or((0, 0), |t| (t.sector, t.sectors)),
        }
    }
}

/// A request that was taken off the ring and is not answered.
#[derive(Debug)]
pub(super) struct Job {
    /// Where it is in the ring.
    pub(super) index: u32,
    pub(super) id: u64,
    pub(super) operation: u8,
    pub(super) work: Work,
    pub(super) ranges: Vec<SegmentRange>,
    /// The step the disk is at.
    pub(super) step: Op,
    pub(super) held: Option<Held>,
    /// The pages of what follows a flush.
    pub(super) parked: Vec<Segment>,
}

/// Which of the requests may be worked on at the same time.
///
/// Reads and writes go to the disk as they come, with two exceptions. A barrier is alone. And a write
/// waits for one in front of it that touches the same sectors: so what is unanswered at any time can be
/// done once more, by a successor, without undoing what was answered.
#[derive(Debug, Default)]
pub(super) struct Order {
    running: usize,
    barrier: bool,
    changes: Vec<(u32, u64, u64)>,
}

impl Order {
    /// Whether `work` may start now.
    pub(super) fn may_start(&self, work: Work) -> bool {
        if self.barrier || (matches!(work, Work::Barrier(_)) && self.running > 0) {
            return false;
        }
        let Some((start, end)) = work.changes() else { return true };
        self.changes.iter().all(|(_, first, behind)| end <= *first || *behind <= start)
    }

    /// Requests that are being worked on.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    pub(super) fn started(&mut self, job: u32, work: Work) {
        self.running += 1;
        self.barrier |= matches!(work, Work::Barrier(_));
        if let Some((start, end)) = work.changes() {
            self.changes.push((job, start, end));
        }
    }

    pub(super) fn ended(&mut self, job: u32, work: Work) {
        self.running = self.running.saturating_sub(1);
        self.barrier &= !matches!(work, Work::Barrier(_));
        if let Some(at) = self.changes.iter().position(|(other, ..)| *other == job) {
            self.changes.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(sector: u64, sectors: u64) -> Work {
        Work::Transfer(Transfer { direction: Direction::Write, sector, sectors })
    }

    fn read(sector: u64, sectors: u64) -> Work {
        Work::Transfer(Transfer { direction: Direction::Read, sector, sectors })
    }

    #[test]
    fn writes_of_the_same_sectors_wait_for_each_other_and_nothing_else_does() {
        let mut order = Order::default();
        order.started(1, write(8, 8));
        assert!(order.may_start(write(0, 8)) && order.may_start(write(16, 1)));
        for (sector, sectors) in [(8, 8), (0, 9), (15, 4), (10, 1), (0, 100)] {
            assert!(!order.may_start(write(sector, sectors)));
            assert!(order.may_start(read(sector, sectors)));
        }
        assert!(!order.may_start(Work::Discard { sector: 15, sectors: 1, secure: false }));
        assert!(order.may_start(Work::Flush(None)));
        order.ended(1, write(8, 8));
        assert!(order.may_start(write(8, 8)));
    }

    #[test]
    fn a_barrier_is_alone() {
        let mut order = Order::default();
        order.started(1, read(0, 8));
        assert!(!order.may_start(Work::Barrier(None)));
        order.ended(1, read(0, 8));
        assert!(order.may_start(Work::Barrier(None)));
        order.started(2, Work::Barrier(None));
        for work in [read(0, 1), write(0, 1), Work::Flush(None), Work::Barrier(None)] {
            assert!(!order.may_start(work));
        }
        order.ended(2, Work::Barrier(None));
        assert!(order.may_start(read(0, 1)));
        assert_eq!(order.running(), 0);
    }

    #[test]
    fn a_flush_with_segments_flushes_first_and_writes_for_good() {
        let transfer = Transfer { direction: Direction::Write, sector: 4, sectors: 2 };
        for work in [Work::Flush(Some(transfer)), Work::Barrier(Some(transfer))] {
            assert_eq!((work.first(), work.range(Op::Flush)), (Op::Flush, (0, 0)));
            let next = work.next(Op::Flush);
            assert_eq!(next, Some(Op::Write { fua: true }));
            assert_eq!(work.range(Op::Write { fua: true }), (4, 2));
            assert_eq!(work.next(Op::Write { fua: true }), None);
        }
        assert_eq!(Work::Flush(None).next(Op::Flush), None);
    }
}
