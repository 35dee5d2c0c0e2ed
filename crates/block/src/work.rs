//! Work of a disk's requests, and the rules on which of them may run at the same time. They are those of every backend.

use ringfence_wire::blkif::{Direction, Transfer};

use crate::storage::Op;

/// Operation of a request, as a sequence of one or two disk operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    /// Transfer of data: a read or a write.
    Transfer(Transfer),
    /// Flush, then an optional write with FUA.
    Flush(Option<Transfer>),
    /// Flush and optional write with FUA, while no other request runs.
    Barrier(Option<Transfer>),
    Discard {
        sector: u64,
        sectors: u64,
        secure: bool,
    },
    /// Zeros for a range, without data.
    Zeroes {
        sector: u64,
        sectors: u64,
        allocate: bool,
    },
    /// Query of the extents of a range.
    Extents {
        sector: u64,
        sectors: u64,
    },
}

impl Work {
    /// Returns the sectors that the request changes, if it changes any.
    fn changes(self) -> Option<ChangedSectors> {
        let (first, sectors) = match self {
            Work::Transfer(transfer) if transfer.direction == Direction::Read => return None,
            Work::Transfer(transfer)
            | Work::Flush(Some(transfer))
            | Work::Barrier(Some(transfer)) => (transfer.sector, transfer.sectors),
            Work::Discard { sector, sectors, .. } | Work::Zeroes { sector, sectors, .. } => {
                (sector, sectors)
            }
            Work::Flush(None) | Work::Barrier(None) | Work::Extents { .. } => return None,
        };
        Some(ChangedSectors { first, end: first.saturating_add(sectors) })
    }

    /// Returns the transfer that the request contains, if any.
    pub(crate) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Transfer(transfer) => Some(transfer),
            Work::Flush(transfer) | Work::Barrier(transfer) => transfer,
            Work::Discard { .. } | Work::Zeroes { .. } | Work::Extents { .. } => None,
        }
    }

    /// Returns the direction in which the request uses pages, if it has any.
    pub(crate) fn page_direction(self) -> Option<Direction> {
        match self {
            Work::Extents { .. } => Some(Direction::Read),
            work => work.transfer().map(|transfer| transfer.direction),
        }
    }

    /// Returns the first disk operation.
    pub(crate) fn first(self) -> Op {
        match self {
            Work::Transfer(Transfer { direction: Direction::Read, .. }) => Op::Read,
            Work::Transfer(_) => Op::Write { fua: false },
            Work::Flush(_) | Work::Barrier(_) => Op::Flush,
            Work::Discard { secure, .. } => Op::Discard { secure },
            Work::Zeroes { allocate, .. } => Op::WriteZeroes { allocate },
            Work::Extents { .. } => Op::Extents,
        }
    }

    /// Returns the disk operation that follows `done`, if any.
    pub(crate) fn next(self, done: Op) -> Option<Op> {
        let writes = matches!(self, Work::Flush(Some(_)) | Work::Barrier(Some(_)));
        (writes && done == Op::Flush).then_some(Op::Write { fua: true })
    }

    /// Returns the first sector and the number of sectors of a disk operation.
    pub(crate) fn range(self, op: Op) -> (u64, u64) {
        match (op, self) {
            (Op::Flush, _) => (0, 0),
            (
                _,
                Work::Discard { sector, sectors, .. }
                | Work::Zeroes { sector, sectors, .. }
                | Work::Extents { sector, sectors },
            ) => (sector, sectors),
            (_, work) => work.transfer().map_or((0, 0), |t| (t.sector, t.sectors)),
        }
    }
}

/// Range of sectors that a running request changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ChangedSectors {
    first: u64,
    /// First sector behind the range.
    end: u64,
}

/// Set of requests in progress, and admission of further ones.
///
/// Reads and writes start as they arrive, with two exceptions. A barrier runs alone. A write waits for an
/// earlier write in progress that touches the same sectors. A backend that takes the ring over can
/// therefore repeat all unanswered requests without overwriting newer, acknowledged data.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    running: usize,
    barrier: bool,
    /// No two of the ranges overlap.
    changes: Vec<ChangedSectors>,
}

impl InFlight {
    /// Returns `true` if `work` may start now.
    pub(crate) fn may_start(&self, work: Work) -> bool {
        if self.barrier || (matches!(work, Work::Barrier(_)) && self.running > 0) {
            return false;
        }
        let Some(new) = work.changes() else { return true };
        self.changes.iter().all(|old| new.end <= old.first || old.end <= new.first)
    }

    /// Returns the number of requests in progress.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    pub(crate) fn started(&mut self, work: Work) {
        self.running += 1;
        self.barrier |= matches!(work, Work::Barrier(_));
        self.changes.extend(work.changes());
    }

    pub(crate) fn ended(&mut self, work: Work) {
        debug_assert!(self.running > 0, "a request ends once");
        self.running = self.running.saturating_sub(1);
        self.barrier &= !matches!(work, Work::Barrier(_));
        let Some(changed) = work.changes() else { return };
        let place = self.changes.iter().position(|other| *other == changed);
        debug_assert!(place.is_some(), "a request that ends has started");
        if let Some(place) = place {
            self.changes.swap_remove(place);
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
        in_flight.started(write(8, 8));
        assert!(in_flight.may_start(write(0, 8)) && in_flight.may_start(write(16, 1)));
        for (sector, sectors) in [(8, 8), (0, 9), (15, 4), (10, 1), (0, 100)] {
            assert!(!in_flight.may_start(write(sector, sectors)));
            assert!(in_flight.may_start(read(sector, sectors)));
        }
        assert!(!in_flight.may_start(Work::Discard { sector: 15, sectors: 1, secure: false }));
        assert!(!in_flight.may_start(Work::Zeroes { sector: 15, sectors: 1, allocate: false }));
        assert!(in_flight.may_start(Work::Flush(None)));
        assert!(in_flight.may_start(Work::Extents { sector: 8, sectors: 8 }));
        in_flight.ended(write(8, 8));
        assert!(in_flight.may_start(write(8, 8)));
    }

    #[test]
    fn barrier_starts_only_when_nothing_runs_and_blocks_others() {
        let mut in_flight = InFlight::default();
        in_flight.started(read(0, 8));
        assert!(!in_flight.may_start(Work::Barrier(None)));
        in_flight.ended(read(0, 8));
        assert!(in_flight.may_start(Work::Barrier(None)));
        in_flight.started(Work::Barrier(None));
        for work in [read(0, 1), write(0, 1), Work::Flush(None), Work::Barrier(None)] {
            assert!(!in_flight.may_start(work));
        }
        in_flight.ended(Work::Barrier(None));
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
