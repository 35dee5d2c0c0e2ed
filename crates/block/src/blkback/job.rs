//! Requests in progress, and where each is.

use ringfence_access::request_access::PageHold;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::blkif::SegmentRange;

use super::fault::QueueFault;
use crate::storage::{Op, Segment};
use crate::work::Work;

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

#[cfg(test)]
mod tests {
    use ringfence_wire::blkif::{Direction, Transfer};

    use super::*;

    fn job(index: u32) -> Job {
        Job {
            index,
            id: index.into(),
            operation: 0,
            work: Work::Transfer(Transfer { direction: Direction::Read, sector: 0, sectors: 8 }),
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
}
