//! Requests in progress: where each is, and the rules on which of them may run at the same time.

use ringfence_access::request_access::PageHold;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::blkif::{Direction, SegmentRange, Transfer};

use super::fault::QueueFault;
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
    pub(super) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Transfer(transfer) => Some(transfer),
            Work::Flush(transfer) | Work::Barrier(transfer) => transfer,
            Work::Discard { .. } | Work::Zeroes { .. } | Work::Extents { .. } => None,
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
            Work::Zeroes { allocate, .. } => Op::WriteZeroes { allocate },
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

/// Jobs that the disk works on, by the token of the disk's request and by ring slot.
///
/// A job belongs to one place at a time: to the function that handles it, to the queue while it waits, or to this
/// table while the disk works on it. So a completion looks its job up once, and everything after that has the job
/// itself.
#[derive(Debug)]
pub(super) struct JobTable {
    /// Running jobs; the token is the position.
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    /// Token of the job in each ring slot. An entry is valid while a running job has that slot.
    by_slot: Vec<u32>,
}

impl JobTable {
    /// Makes an empty table for a ring of `count` slots, a power of two.
    pub(super) fn new(count: u32) -> JobTable {
        JobTable {
            jobs: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
            by_slot: vec![0; usize_from(count)],
        }
    }

    /// Adds a job and returns the token for the disk.
    ///
    /// # Errors
    ///
    /// Returns [`QueueFault::UnknownSlot`] if there are more jobs than ring slots, which the ring excludes.
    #[inline]
    pub(super) fn insert(&mut self, job: Job) -> Result<u64, QueueFault> {
        let index = job.index;
        let token = self.free.pop().ok_or(QueueFault::UnknownSlot { index })?;
        let slot = self.slot(index);
        self.by_slot[slot] = token;
        self.jobs[usize_from(token)] = Some(job);
        Ok(token.into())
    }

    /// Removes the job of a completion.
    ///
    /// # Errors
    ///
    /// Returns [`QueueFault::UnknownCompletion`] if the disk does not work on such a job.
    #[inline]
    pub(super) fn remove(&mut self, token: u64) -> Result<Job, QueueFault> {
        let unknown = QueueFault::UnknownCompletion { token };
        let Ok(number) = u32::try_from(token) else { return Err(unknown) };
        let job = self.jobs.get_mut(usize_from(number)).and_then(Option::take).ok_or(unknown)?;
        self.free.push(number);
        Ok(job)
    }

    /// Notes that the ring moved a request from the slot at index `from` to the slot at index `to`.
    ///
    /// # Errors
    ///
    /// Returns [`QueueFault::UnknownSlot`] if no running job is at `from`.
    #[inline]
    pub(super) fn moved(&mut self, from: u32, to: u32) -> Result<(), QueueFault> {
        let (old, new) = (self.slot(from), self.slot(to));
        let token = self.by_slot[old];
        let job = self.jobs.get_mut(usize_from(token)).and_then(Option::as_mut);
        let job = job.filter(|job| job.index == from);
        job.ok_or(QueueFault::UnknownSlot { index: from })?.index = to;
        self.by_slot[new] = token;
        Ok(())
    }

    #[inline]
    fn slot(&self, index: u32) -> usize {
        usize_from(index) & (self.by_slot.len() - 1)
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
pub(super) struct InFlight {
    running: usize,
    barrier: bool,
    /// No two of the ranges overlap.
    changes: Vec<ChangedSectors>,
}

impl InFlight {
    /// Returns `true` if `work` may start now.
    pub(super) fn may_start(&self, work: Work) -> bool {
        if self.barrier || (matches!(work, Work::Barrier(_)) && self.running > 0) {
            return false;
        }
        let Some(new) = work.changes() else { return true };
        self.changes.iter().all(|old| new.end <= old.first || old.end <= new.first)
    }

    /// Returns the number of requests in progress.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    pub(super) fn started(&mut self, work: Work) {
        self.running += 1;
        self.barrier |= matches!(work, Work::Barrier(_));
        self.changes.extend(work.changes());
    }

    pub(super) fn ended(&mut self, work: Work) {
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

    fn job(index: u32) -> Job {
        Job {
            index,
            id: index.into(),
            operation: 0,
            work: read(0, 8),
            ranges: vec![],
            step: Op::Read,
            pages: None,
            parked: vec![],
        }
    }

    #[test]
    fn completion_with_unknown_or_repeated_token_is_a_fault() {
        let mut table = JobTable::new(4);
        let token = table.insert(job(7)).unwrap();
        for unknown in [token + 1, 4, u64::from(u32::MAX), u64::MAX] {
            let fault = table.remove(unknown).unwrap_err();
            assert_eq!(fault.rule(), "blk_unknown_completion");
        }
        assert_eq!(table.remove(token).unwrap().id, 7);
        assert!(matches!(table.remove(token), Err(QueueFault::UnknownCompletion { .. })));
    }

    #[test]
    fn job_of_moved_request_has_its_new_index() {
        let mut table = JobTable::new(4);
        let tokens = [5, 6, 7, 8].map(|index| table.insert(job(index)).unwrap());
        assert_eq!(table.insert(job(9)).unwrap_err().rule(), "blk_unknown_slot");
        table.remove(tokens[2]).unwrap();
        table.moved(5, 7).unwrap();
        table.remove(tokens[3]).unwrap();
        table.moved(6, 8).unwrap();
        // The request that was at index 5 moves a second time.
        let token = table.insert(job(9)).unwrap();
        table.remove(token).unwrap();
        table.moved(7, 9).unwrap();
        for (token, index) in [(tokens[0], 9), (tokens[1], 8)] {
            assert_eq!(table.remove(token).unwrap().index, index);
        }
        assert_eq!(table.moved(9, 10).unwrap_err().rule(), "blk_unknown_slot");
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
