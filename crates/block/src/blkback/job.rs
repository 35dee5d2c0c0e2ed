//! Requests in progress, and the rules on which of them may run at the same time.

use ringfence_wire::blkif::{Direction, SegmentRange, Transfer};

use super::pages::PageHold;
use crate::storage::{Op, Segment};

/// Operation of a request, as a sequence of one or two disk operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Transfer of data: a read or a write.
    Transfer(Transfer),
    /// Flush, then an optional write with FUA.
    Flush(Option<Transfer>),
    /// Flush and optional write with FUA, while no other request runs.
    Barrier(Option<Transfer>),
    /// Discard of a range.
    Discard { sector: u64, sectors: u64, secure: bool },
    /// Query of the extents of a range.
    Extents { sector: u64, sectors: u64 },
}

impl Work {
    /// Returns the sectors that the request changes: first, and first behind.
    fn changes(self) -> Option<(u64, u64)> {
        match self {
            Work::Transfer(transfer) if transfer.direction == Direction::Read => None,
            Work::Transfer(transfer)
            | Work::Flush(Some(transfer))
            | Work::Barrier(Some(transfer)) => {
                Some((transfer.sector, transfer.sector.saturating_add(transfer.sectors)))
            }
            Work::Discard { sector, sectors, .. } => Some((sector, sector.saturating_add(sectors))),
            Work::Flush(None) | Work::Barrier(None) | Work::Extents { .. } => None,
        }
    }

    /// Returns the transfer that the request contains, if any.
    pub(super) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Transfer(transfer) => Some(transfer),
            Work::Flush(transfer) | Work::Barrier(transfer) => transfer,
            Work::Discard { .. } | Work::Extents { .. } => None,
        }
    }

    /// Returns the direction in which the request uses pages, if it has any.
    pub(super) fn page_direction(self) -> Option<Direction> {
        match self {
            Work::Extents { .. } => Some(Direction::Read),
            work => work.transfer().map(|transfer| transfer.direction),
        }
    }

    /// Returns the first disk operation.
    pub(super) fn first(self) -> Op {
        match self {
            Work::Transfer(Transfer { direction: Direction::Read, .. }) => Op::Read,
            Work::Transfer(_) => Op::Write { fua: false },
            Work::Flush(_) | Work::Barrier(_) => Op::Flush,
            Work::Discard { secure, .. } => Op::Discard { secure },
            Work::Extents { .. } => Op::Extents,
        }
    }

    /// Returns the disk operation that follows `done`, if any.
    pub(super) fn next(self, done: Op) -> Option<Op> {
        let writes = matches!(self, Work::Flush(Some(_)) | Work::Barrier(Some(_)));
        (writes && done == Op::Flush).then_some(Op::Write { fua: true })
    }

    /// Returns the first sector and the number of sectors of a disk operation.
    pub(super) fn range(self, op: Op) -> (u64, u64) {
        match (op, self) {
            (Op::Flush, _) => (0, 0),
            (_, Work::Discard { sector, sectors, .. } | Work::Extents { sector, sectors }) => {
                (sector, sectors)
            }
            (_, work) => work.transfer().map_or((0, 0), |t| (t.sector, t.sectors)),
        }
    }
}

/// Request that was consumed from the ring and is not answered yet.
#[derive(Debug)]
pub(super) struct Job {
    /// Index of the ring slot that holds the request.
    pub(super) index: u32,
    pub(super) id: u64,
    pub(super) operation: u8,
    pub(super) work: Work,
    pub(super) ranges: Vec<SegmentRange>,
    /// Disk operation in progress.
    pub(super) step: Op,
    pub(super) pages: Option<PageHold>,
    /// Segments of the write that follows the flush in progress.
    pub(super) parked: Vec<Segment>,
}

/// Set of requests in progress, and admission of further ones.
///
/// Reads and writes start as they arrive, with two exceptions. A barrier runs alone. A write waits for an
/// earlier write in progress that touches the same sectors. A backend that takes the ring over can
/// therefore repeat all unanswered requests without overwriting newer, acknowledged data.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    running: usize,
    barrier: bool,
    changes: Vec<(u32, u64, u64)>,
}

impl InFlight {
    /// Returns `true` if `work` may start now.
    pub(super) fn may_start(&self, work: Work) -> bool {
        if self.barrier || (matches!(work, Work::Barrier(_)) && self.running > 0) {
            return false;
        }
        let Some((start, end)) = work.changes() else { return true };
        self.changes.iter().all(|(_, first, behind)| end <= *first || *behind <= start)
    }

    /// Returns the number of requests in progress.
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
    fn overlapping_write_waits_for_earlier_one_and_other_requests_start() {
        let mut in_flight = InFlight::default();
        in_flight.started(1, write(8, 8));
        assert!(in_flight.may_start(write(0, 8)) && in_flight.may_start(write(16, 1)));
        for (sector, sectors) in [(8, 8), (0, 9), (15, 4), (10, 1), (0, 100)] {
            assert!(!in_flight.may_start(write(sector, sectors)));
            assert!(in_flight.may_start(read(sector, sectors)));
        }
        assert!(!in_flight.may_start(Work::Discard { sector: 15, sectors: 1, secure: false }));
        assert!(in_flight.may_start(Work::Flush(None)));
        assert!(in_flight.may_start(Work::Extents { sector: 8, sectors: 8 }));
        in_flight.ended(1, write(8, 8));
        assert!(in_flight.may_start(write(8, 8)));
    }

    #[test]
    fn barrier_starts_only_when_nothing_runs_and_blocks_others() {
        let mut in_flight = InFlight::default();
        in_flight.started(1, read(0, 8));
        assert!(!in_flight.may_start(Work::Barrier(None)));
        in_flight.ended(1, read(0, 8));
        assert!(in_flight.may_start(Work::Barrier(None)));
        in_flight.started(2, Work::Barrier(None));
        for work in [read(0, 1), write(0, 1), Work::Flush(None), Work::Barrier(None)] {
            assert!(!in_flight.may_start(work));
        }
        in_flight.ended(2, Work::Barrier(None));
        assert!(in_flight.may_start(read(0, 1)));
        assert_eq!(in_flight.running(), 0);
    }

    #[test]
    fn flush_with_segments_becomes_flush_then_fua_write() {
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
