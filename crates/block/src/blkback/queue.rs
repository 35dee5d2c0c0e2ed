//! Request processing of one ring: consume, validate, submit to the disk, answer.
//!
//! A request becomes a [`Job`]. [`BlkbackQueue::start`] makes its pages accessible and passes it to the disk; while the
//! disk works on it, the job is in the [`JobTable`]. Each completion takes its job out again: the job continues with
//! its next operation, or [`BlkbackQueue::conclude`] releases its pages and answers the request. Requests are consumed in
//! ring order and answered in the order of completion. At most one consumed request waits
//! ([`InFlight::may_start`]); while it does, no further request is consumed.
//!
//! A completion without a job, and a ring slot without a request, end the queue with a [`QueueFault`].

use core::time::Duration;
use std::sync::Arc;

use super::counters::QueueCounters;
use super::fault::QueueFault;
use super::job::{Job, JobTable};
use super::pages::{access_for, grant_rule, page_ranges};
use super::pause::ClosedQueue;
use crate::storage::failure::Failure;
use crate::storage::{self, DiskQueue, Done, Op, Segment};
use crate::work::{InFlight, Work};
use ringfence_access::RequestAccess;
use ringfence_access::request_access::PageError;
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::Grantee;
use ringfence_ring::{AnyOrderRing, ProducerOverflow, RingMemory};
use ringfence_sys::numbers::u64_from;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{
    Abi, BlkRequest, Body, IndirectHead, Response, Rules, SegmentRange, Slot, Status,
};

/// Maximum number of requests consumed before completed ones are answered.
const BATCH: u32 = 64;

/// Request layout and rules of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueueTerms {
    pub(super) abi: Abi,
    pub(super) rules: Rules,
    /// Flushes are answered without the disk, which has no volatile cache.
    pub(super) skips_flush: bool,
    /// The frontend knows [`Status::NoSpace`].
    pub(super) no_space: bool,
}

/// Properties of a disk that may change while its ring is paused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DiskSize {
    /// Size in units of 512 bytes.
    pub(super) sectors: u64,
    /// Flushes are answered without the disk, which has no volatile cache.
    pub(super) skips_flush: bool,
}

/// Ring and the jobs of its unanswered requests.
pub(super) struct BlkbackQueue<G, M> {
    ring: AnyOrderRing<M>,
    terms: QueueTerms,
    pages: RequestAccess<G>,
    disk: Box<dyn DiskQueue>,
    jobs: JobTable,
    in_flight: InFlight,
    /// Job that was consumed and may not start yet.
    waiting: Option<Job>,
    /// No request is consumed or started.
    paused: bool,
    done: Vec<Done>,
    segments: Vec<Vec<Segment>>,
    ranges: Vec<Vec<SegmentRange>>,
    descriptors: Vec<u8>,
    rules: Arc<RuleCounters>,
    counters: Arc<QueueCounters>,
}

impl<G: Grantee, M: RingMemory> BlkbackQueue<G, M> {
    pub(super) fn new(
        ring: AnyOrderRing<M>,
        terms: QueueTerms,
        pages: RequestAccess<G>,
        disk: Box<dyn DiskQueue>,
        rules: Arc<RuleCounters>,
        counters: Arc<QueueCounters>,
    ) -> BlkbackQueue<G, M> {
        BlkbackQueue {
            terms,
            pages,
            disk,
            jobs: JobTable::new(ring.count()),
            in_flight: InFlight::default(),
            waiting: None,
            paused: false,
            done: Vec::new(),
            segments: Vec::new(),
            ranges: Vec::new(),
            descriptors: Vec::with_capacity(PAGE_SIZE),
            rules,
            counters,
            ring,
        }
    }

    pub(super) fn disk(&self) -> &dyn DiskQueue {
        &*self.disk
    }

    /// Returns the number of requests that the disk works on.
    pub(super) fn running(&self) -> usize {
        self.in_flight.running()
    }

    /// Returns the number of persistent pages.
    pub(super) fn kept(&self) -> usize {
        self.pages.kept()
    }

    /// Returns the running total of pages over the limit of persistent pages.
    pub(super) fn not_kept(&self) -> u64 {
        self.pages.persistent().over.get()
    }

    /// Serves one round: consumes up to [`BATCH`] requests, submits them, and answers completed ones. Returns
    /// `true` if any work was done.
    pub(super) fn round(&mut self, now: Duration) -> Result<bool, QueueFault> {
        let mut taken = 0;
        if self.paused {
            return self.finish();
        }
        if let Some(job) = self.waiting.take() {
            self.start(job, now)?;
        }
        let available = self.ring.unconsumed()?.min(BATCH);
        // A page over the persistent limit costs a map and an unmap: the round ends, so that others can run.
        let not_kept = self.not_kept();
        while taken < available && self.waiting.is_none() && self.not_kept() == not_kept {
            self.consume(now)?;
            taken += 1;
        }
        self.disk.kick();
        let ended = self.finish()?;
        self.counters.kept.set(u64_from(self.kept()));
        Ok(taken > 0 || ended)
    }

    /// Answers completed requests. Returns `true` if there was any, or the first fault after all were handled.
    pub(super) fn finish(&mut self) -> Result<bool, QueueFault> {
        let mut any = false;
        let mut outcome = Ok(());
        loop {
            self.disk.reap(&mut self.done);
            if self.done.is_empty() {
                return outcome.map(|()| any);
            }
            any = true;
            let mut again = false;
            for i in 0..self.done.len() {
                let Done { token, result, segments } = &mut self.done[i];
                let (token, result, segments) = (*token, *result, core::mem::take(segments));
                match self.completed(token, result, segments) {
                    Ok(submitted) => again |= submitted,
                    Err(fault) => outcome = outcome.and(Err(fault)),
                }
            }
            self.done.clear();
            if !again {
                return outcome.map(|()| true);
            }
            self.disk.kick();
        }
    }

    /// Returns `true` if the frontend must be notified of answers.
    pub(super) fn notify_due(&mut self) -> bool {
        self.ring.notify_due()
    }

    /// Requests an event for the next request. Returns `true` if a request arrived meanwhile. While a job waits
    /// for others, no event is requested.
    pub(super) fn final_check(&mut self) -> Result<bool, ProducerOverflow> {
        if self.paused || self.waiting.is_some() { Ok(false) } else { self.ring.final_check() }
    }

    /// Consumes no further request, and starts none.
    pub(super) fn pause(&mut self) {
        self.paused = true;
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Closes the disk queue of a paused ring once no request is in flight. Returns `true` if it is closed.
    pub(super) fn close_disk(&mut self) -> Result<bool, QueueFault> {
        self.finish()?;
        if self.in_flight.running() > 0 {
            return Ok(false);
        }
        let failed = |source| QueueFault::System { what: "closing the disk", source };
        let closed = Box::new(ClosedQueue::new().map_err(failed)?);
        // Registrations of pages end with the queue.
        self.shrink();
        self.disk = closed;
        Ok(true)
    }

    /// Serves the ring from another disk queue. A ring that was not paused keeps its own.
    pub(super) fn resume(&mut self, disk: Box<dyn DiskQueue>, size: DiskSize) {
        if core::mem::take(&mut self.paused) {
            self.counters.engine.set(disk.engine());
            self.disk = disk;
            self.terms.rules.sectors = size.sectors;
            self.terms.skips_flush = size.skips_flush;
        }
    }

    pub(super) fn tidy(&mut self, now: Duration) {
        self.pages.tidy(now, &mut *self.disk);
    }

    /// Limits the pages that stay mapped, and frees spare memory.
    pub(super) fn keep(&mut self, pages: u16) {
        self.pages.limit_kept(pages, &mut *self.disk);
        self.counters.kept.set(u64_from(self.kept()));
        self.segments.clear();
        self.ranges.clear();
    }

    pub(super) fn shrink(&mut self) {
        self.pages.shrink(&mut *self.disk);
        self.segments.clear();
        self.ranges.clear();
    }

    /// Consumes one request from the ring and starts it.
    fn consume(&mut self, now: Duration) -> Result<(), QueueFault> {
        let mut slot: Slot = [0; 112];
        let index = match self.terms.abi {
            Abi::X86_64 => {
                let (index, raw) = self.ring.take::<112>();
                slot = raw.into_unchecked();
                index
            }
            Abi::X86_32 => {
                let (index, raw) = self.ring.take::<108>();
                slot[..108].copy_from_slice(&raw.into_unchecked());
                index
            }
        };
        let mut ranges = self.ranges.pop().unwrap_or_default();
        ranges.clear();
        let BlkRequest { id, operation, body } =
            BlkRequest::parse(self.terms.abi, &slot, &self.terms.rules, &mut ranges);
        let validated = match body {
            Ok(Body::Transfer(transfer)) => Ok(Work::Transfer(transfer)),
            Ok(Body::Flush(transfer)) => Ok(Work::Flush(transfer)),
            Ok(Body::Barrier(transfer)) => Ok(Work::Barrier(transfer)),
            Ok(Body::Discard { sector, sectors, secure }) => {
                Ok(Work::Discard { sector, sectors, secure })
            }
            Ok(Body::WriteZeroes { sector, sectors, allocate }) => {
                Ok(Work::Zeroes { sector, sectors, allocate })
            }
            Ok(Body::Extents { sector, sectors }) => Ok(Work::Extents { sector, sectors }),
            Ok(Body::Indirect(head)) => {
                self.indirect(&head, now, &mut ranges).inspect(|_| self.counters.indirect.add(1))
            }
            Err(refusal) => Err((refusal.label(), refusal.status())),
        };
        match validated {
            Ok(work) => {
                self.counters.count(work, &ranges);
                let (step, pages, parked) = (work.first(), None, Vec::new());
                let job = Job { index, id, operation, work, ranges, step, pages, parked };
                self.start(job, now)?;
                self.counters.waited.add(u64::from(self.waiting.is_some()));
                Ok(())
            }
            Err((rule, status)) => {
                self.ranges.push(ranges);
                self.refused(rule);
                self.answer(index, Response { id, operation, status })
            }
        }
    }

    fn refused(&self, rule: &'static str) {
        self.counters.refused.add(1);
        if self.rules.count(rule) == 0 {
            tracing::warn!(rule, "a request of a guest was refused (logged once a rule)");
        }
    }

    /// Copies the descriptors of an indirect request once, and validates the copy.
    fn indirect(
        &mut self,
        head: &IndirectHead,
        now: Duration,
        ranges: &mut Vec<SegmentRange>,
    ) -> Result<Work, (&'static str, Status)> {
        self.descriptors.clear();
        self.descriptors.resize(head.descriptor_bytes(), 0);
        match self.pages.copy_pages(head.pages(), now, &mut self.descriptors) {
            Ok(()) => head
                .segments(&self.descriptors, &self.terms.rules, ranges)
                .map(Work::Transfer)
                .map_err(|refusal| (refusal.label(), refusal.status())),
            Err(status) => Err((grant_rule(status), Status::Error)),
        }
    }

    /// Starts a job, or makes it wait.
    fn start(&mut self, mut job: Job, now: Duration) -> Result<(), QueueFault> {
        if !self.in_flight.may_start(job.work) {
            self.waiting = Some(job);
            return Ok(());
        }
        let mut segments = self.segments.pop().unwrap_or_default();
        if let Some(direction) = job.work.page_direction() {
            let (ranges, access) = (page_ranges(&job.ranges), access_for(direction));
            match self.pages.begin(ranges, access, now, &mut *self.disk, &mut segments) {
                Ok(pages) => job.pages = Some(pages),
                Err(why) => return self.page_failed(job, segments, why),
            }
        }
        self.in_flight.started(job.work);
        self.note_in_flight();
        let first = job.work.first();
        if first == Op::Flush && self.terms.skips_flush {
            return match job.work.next(first) {
                Some(next) => self.submit(job, next, segments),
                None => self.end(job, Ok(()), segments),
            };
        }
        self.submit(job, first, segments)
    }

    fn page_failed(
        &mut self,
        job: Job,
        segments: Vec<Segment>,
        why: PageError,
    ) -> Result<(), QueueFault> {
        let rule = match why {
            PageError::Later if self.in_flight.running() > 0 => {
                self.segments.push(segments);
                self.waiting = Some(job);
                return Ok(());
            }
            PageError::Later => "blk_too_many_mapped",
            PageError::Failed(status) => grant_rule(status),
        };
        self.refused(rule);
        self.conclude(job, segments, Status::Error)
    }

    fn note_in_flight(&self) {
        self.counters.in_flight.set(u64_from(self.in_flight.running()));
    }

    /// Passes an operation of a job to the disk.
    fn submit(
        &mut self,
        mut job: Job,
        step: Op,
        mut segments: Vec<Segment>,
    ) -> Result<(), QueueFault> {
        job.step = step;
        if step == Op::Flush {
            // The segments belong to the write that follows.
            core::mem::swap(&mut segments, &mut job.parked);
        }
        let (sector, sectors) = job.work.range(step);
        // Both lie within the disk, whose size in bytes is a `u64`.
        let (offset, len) = (sector * 512, sectors * 512);
        let token = self.jobs.insert(job)?;
        self.disk.submit(storage::Request { token, op: step, offset, len, segments });
        Ok(())
    }

    /// Handles a completion of the disk. Returns `true` if it submitted the next operation of the job.
    fn completed(
        &mut self,
        token: u64,
        result: Result<(), i32>,
        segments: Vec<Segment>,
    ) -> Result<bool, QueueFault> {
        let mut job = self.jobs.remove(token)?;
        match job.work.next(job.step).filter(|_| result.is_ok()) {
            Some(step) => {
                let written = core::mem::replace(&mut job.parked, segments);
                self.submit(job, step, written).map(|()| true)
            }
            None => self.end(job, result, segments).map(|()| false),
        }
    }

    /// Ends a job after its last disk operation.
    fn end(
        &mut self,
        job: Job,
        result: Result<(), i32>,
        segments: Vec<Segment>,
    ) -> Result<(), QueueFault> {
        self.in_flight.ended(job.work);
        self.note_in_flight();
        let status = match result {
            Ok(()) => self.deliver(&job),
            Err(errno) => {
                self.counters.failed.add(1);
                let may = job.step == Op::Flush
                    || matches!(
                        job.work,
                        Work::Discard { .. } | Work::Zeroes { .. } | Work::Extents { .. }
                    );
                match Failure::of(errno) {
                    Failure::Unsupported if may => Status::NotSupported,
                    Failure::NoSpace if self.terms.no_space => Status::NoSpace,
                    // Blkif has no status for another reason.
                    _ => Status::Error,
                }
            }
        };
        self.conclude(job, segments, status)
    }

    /// Copies read data from the bounce buffer to the guest, in mode `copy`.
    fn deliver(&mut self, job: &Job) -> Status {
        let fills = matches!(job.step, Op::Read | Op::Extents);
        let Some(pages) = job.pages.as_ref().filter(|_| fills) else {
            return Status::Okay;
        };
        match self.pages.copy_out(pages, page_ranges(&job.ranges)) {
            Ok(()) => Status::Okay,
            Err(status) => {
                self.refused(grant_rule(status));
                Status::Error
            }
        }
    }

    /// Releases the pages of a job, then answers its request: the guest revokes the pages after the answer.
    fn conclude(
        &mut self,
        job: Job,
        mut segments: Vec<Segment>,
        status: Status,
    ) -> Result<(), QueueFault> {
        let Job { index, id, operation, ranges, pages, mut parked, .. } = job;
        // A flush that failed leaves the segments of its write here.
        segments.append(&mut parked);
        match pages {
            Some(pages) => self.pages.end(pages, &mut segments),
            None => segments.clear(),
        }
        self.segments.push(segments);
        self.ranges.push(ranges);
        self.answer(index, Response { id, operation, status })
    }

    fn answer(&mut self, index: u32, response: Response) -> Result<(), QueueFault> {
        let oldest = self.ring.oldest();
        if !self.ring.answer(index, &response.to_bytes()) {
            return Err(QueueFault::UnknownSlot { index });
        }
        if oldest == index {
            return Ok(());
        }
        // `answer` moved the oldest request into the slot of the answered one.
        self.counters.moved.add(1);
        match &mut self.waiting {
            Some(job) if job.index == oldest => {
                job.index = index;
                Ok(())
            }
            _ => self.jobs.moved(oldest, index),
        }
    }
}
