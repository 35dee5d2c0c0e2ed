//! Request processing of one ring: consume, validate, submit to the disk, answer.
//!
//! A request becomes a [`Job`] with a number, which is also its token at the disk. The job of each
//! unanswered request is found by its ring slot (`places`). Requests are consumed in ring order and answered
//! in the order of completion. At most one consumed request waits ([`InFlight::may_start`]); while it
//! does, no further request is consumed.

use core::time::Duration;
use std::sync::Arc;

use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{GrantStatus, Grantee};
use ringfence_ring::{AnyOrderRing, ProducerOverflow, RingMemory};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{
    Abi, Body, IndirectHead, Request, Response, Rules, SegmentRange, Slot, Status,
};
use rustix::io::Errno;

use super::counters::QueueCounters;
use super::job::{InFlight, Job, Work};
use super::pages::{PageError, Pages};
use crate::storage::{self, DiskQueue, Done, Op, Segment};

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

/// Ring and the jobs of its unanswered requests.
pub(super) struct Queue<G, M> {
    ring: AnyOrderRing<M>,
    terms: QueueTerms,
    pages: Pages<G>,
    disk: Box<dyn DiskQueue>,
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    /// Job number by ring slot, or [`NO_JOB`].
    places: Vec<u32>,
    in_flight: InFlight,
    /// Job that was consumed and may not start yet.
    waiting: Option<u32>,
    done: Vec<Done>,
    segments: Vec<Vec<Segment>>,
    ranges: Vec<Vec<SegmentRange>>,
    descriptors: Vec<u8>,
    rules: Arc<RuleCounters>,
    counters: Arc<QueueCounters>,
}

/// Entry of `places` for a slot without a job.
const NO_JOB: u32 = u32::MAX;

impl<G: Grantee, M: RingMemory> Queue<G, M> {
    pub(super) fn new(
        ring: AnyOrderRing<M>,
        terms: QueueTerms,
        pages: Pages<G>,
        disk: Box<dyn DiskQueue>,
        (rules, counters): (Arc<RuleCounters>, Arc<QueueCounters>),
    ) -> Queue<G, M> {
        let count = ring.count();
        Queue {
            terms,
            pages,
            disk,
            jobs: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
            places: vec![NO_JOB; count as usize],
            in_flight: InFlight::default(),
            waiting: None,
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
    pub(super) fn round(&mut self, now: Duration) -> Result<bool, ProducerOverflow> {
        let mut taken = 0;
        if let Some(job) = self.waiting.take() {
            self.start(job, now);
        }
        let available = self.ring.unconsumed()?.min(BATCH);
        // A page over the persistent limit costs a map and an unmap: the round ends, so that others can run.
        let not_kept = self.not_kept();
        while taken < available && self.waiting.is_none() && self.not_kept() == not_kept {
            self.consume(now);
            taken += 1;
        }
        self.disk.kick();
        let ended = self.finish();
        Ok(taken > 0 || ended)
    }

    /// Answers completed requests. Returns `true` if there was any.
    pub(super) fn finish(&mut self) -> bool {
        let mut any = false;
        loop {
            self.disk.reap(&mut self.done);
            if self.done.is_empty() {
                return any;
            }
            any = true;
            let mut again = false;
            for i in 0..self.done.len() {
                let Done { token, result, segments } = &mut self.done[i];
                let (token, result, segments) = (*token, *result, core::mem::take(segments));
                again |= self.completed(token, result, segments);
            }
            self.done.clear();
            if !again {
                return true;
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
        if self.waiting.is_some() { Ok(false) } else { self.ring.final_check() }
    }

    pub(super) fn tidy(&mut self, now: Duration) {
        self.pages.tidy(now, &mut *self.disk);
    }

    pub(super) fn shrink(&mut self) {
        self.pages.shrink(&mut *self.disk);
        self.segments.clear();
        self.ranges.clear();
    }

    /// Consumes one request from the ring and starts it.
    fn consume(&mut self, now: Duration) {
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
        let Request { id, operation, body } =
            Request::parse(self.terms.abi, &slot, &self.terms.rules, &mut ranges);
        let validated = match body {
            Ok(Body::Transfer(transfer)) => Ok(Work::Transfer(transfer)),
            Ok(Body::Flush(transfer)) => Ok(Work::Flush(transfer)),
            Ok(Body::Barrier(transfer)) => Ok(Work::Barrier(transfer)),
            Ok(Body::Discard { sector, sectors, secure }) => {
                Ok(Work::Discard { sector, sectors, secure })
            }
            Ok(Body::Extents { sector, sectors }) => Ok(Work::Extents { sector, sectors }),
            Ok(Body::Indirect(head)) => {
                self.indirect(&head, now, &mut ranges).inspect(|_| self.counters.indirect.add(1))
            }
            Err(refusal) => Err((refusal.label(), refusal.status())),
        };
        let step = Op::Flush;
        match (validated, self.free.pop()) {
            (Ok(work), Some(job)) => {
                self.counters.count(work, &ranges);
                self.jobs[job as usize] = Some(Job {
                    index,
                    id,
                    operation,
                    work,
                    ranges,
                    step,
                    pages: None,
                    parked: vec![],
                });
                self.place(index, job);
                self.start(job, now);
                self.counters.waited.add(u64::from(self.waiting.is_some()));
            }
            (Ok(_), None) => {
                // There are as many job numbers as ring slots.
                debug_assert!(false, "more requests than slots");
                self.answer(index, Response { id, operation, status: Status::Error });
            }
            (Err((rule, status)), free) => {
                self.free.extend(free);
                self.ranges.push(ranges);
                self.refused(rule);
                self.answer(index, Response { id, operation, status });
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
        let mut descriptors = core::mem::take(&mut self.descriptors);
        let read =
            self.pages.descriptors(head.pages(), head.descriptor_bytes(), now, &mut descriptors);
        let validated = match read {
            Ok(()) => head
                .segments(&descriptors, &self.terms.rules, ranges)
                .map(Work::Transfer)
                .map_err(|refusal| (refusal.label(), refusal.status())),
            Err(status) => Err((grant_rule(status), Status::Error)),
        };
        self.descriptors = descriptors;
        validated
    }

    fn place(&mut self, index: u32, job: u32) {
        let slot = index & (self.ring.count() - 1);
        self.places[slot as usize] = job;
    }

    /// Starts a job, or makes it wait.
    fn start(&mut self, number: u32, now: Duration) {
        let Some(job) = self.jobs[number as usize].as_mut() else { return };
        if !self.in_flight.may_start(job.work) {
            self.waiting = Some(number);
            return;
        }
        let mut segments = self.segments.pop().unwrap_or_default();
        if let Some(direction) = job.work.page_direction() {
            match self.pages.reach(&job.ranges, direction, now, &mut *self.disk, &mut segments) {
                Ok(pages) => job.pages = Some(pages),
                Err(why) => {
                    self.segments.push(segments);
                    return self.page_failed(number, why);
                }
            }
        }
        let work = job.work;
        self.in_flight.started(number, work);
        let mut step = work.first();
        if step == Op::Flush && self.terms.skips_flush {
            match work.next(step) {
                Some(next) => step = next,
                None => return self.end(number, Ok(()), segments),
            }
        }
        self.submit(number, step, segments);
    }

    fn page_failed(&mut self, number: u32, why: PageError) {
        let rule = match why {
            PageError::Later if self.in_flight.running() > 0 => {
                self.waiting = Some(number);
                return;
            }
            PageError::Later => "blk_too_many_mapped",
            PageError::Failed(status) => grant_rule(status),
        };
        self.refused(rule);
        self.conclude(number, Status::Error);
    }

    fn submit(&mut self, number: u32, step: Op, mut segments: Vec<Segment>) {
        let Some(job) = self.jobs[number as usize].as_mut() else { return };
        job.step = step;
        if step == Op::Flush {
            // The segments belong to the write that follows.
            core::mem::swap(&mut segments, &mut job.parked);
        }
        let (sector, sectors) = job.work.range(step);
        // Both lie within the disk, whose size in bytes is a `u64`.
        let (offset, len) = (sector * 512, sectors * 512);
        self.disk.submit(storage::Request {
            token: number.into(),
            op: step,
            offset,
            len,
            segments,
        });
    }

    /// Handles a completion of the disk. Returns `true` if it submitted the next operation of the job.
    fn completed(&mut self, token: u64, result: Result<(), i32>, segments: Vec<Segment>) -> bool {
        let found = u32::try_from(token).ok().and_then(|number| {
            let job = self.jobs.get(number as usize)?.as_ref()?;
            Some((number, job.work.next(job.step)))
        });
        let Some((number, next)) = found else {
            debug_assert!(false, "a disk that answers what was not asked");
            return false;
        };
        match next.filter(|_| result.is_ok()) {
            Some(step) => {
                let parked = self.jobs[number as usize].as_mut().map(|job| &mut job.parked);
                let written =
                    parked.map_or_else(Vec::new, |parked| core::mem::replace(parked, segments));
                self.submit(number, step, written);
                true
            }
            None => {
                self.end(number, result, segments);
                false
            }
        }
    }

    /// Ends a job after its last disk operation.
    fn end(&mut self, number: u32, result: Result<(), i32>, mut segments: Vec<Segment>) {
        // All page handles go before the answer: the frontend revokes the pages after it.
        segments.clear();
        self.segments.push(segments);
        let Some(job) = self.jobs[number as usize].as_ref() else { return };
        self.in_flight.ended(number, job.work);
        let status = match result {
            Ok(()) => self.deliver(number),
            Err(errno) => {
                self.counters.failed.add(1);
                let may = job.step == Op::Flush
                    || matches!(job.work, Work::Discard { .. } | Work::Extents { .. });
                match Errno::from_raw_os_error(errno) {
                    Errno::OPNOTSUPP if may => Status::NotSupported,
                    Errno::NOSPC if self.terms.no_space => Status::NoSpace,
                    _ => Status::Error,
                }
            }
        };
        self.conclude(number, status);
    }

    /// Copies read data from the bounce buffer to the guest, in mode `copy`.
    fn deliver(&mut self, number: u32) -> Status {
        let Some(job) = self.jobs[number as usize].as_ref() else { return Status::Error };
        let fills = matches!(job.step, Op::Read | Op::Extents);
        let Some(pages) = job.pages.as_ref().filter(|_| fills) else {
            return Status::Okay;
        };
        match self.pages.copy_out(pages) {
            Ok(()) => Status::Okay,
            Err(status) => {
                self.refused(grant_rule(status));
                Status::Error
            }
        }
    }

    /// Releases the pages of a job and answers its request.
    fn conclude(&mut self, number: u32, status: Status) {
        let Some(job) = self.jobs[number as usize].take() else { return };
        let Job { index, id, operation, ranges, pages, parked, .. } = job;
        drop(parked);
        if let Some(pages) = pages {
            self.pages.release(pages);
        }
        self.ranges.push(ranges);
        self.free.push(number);
        self.answer(index, Response { id, operation, status });
    }

    fn answer(&mut self, index: u32, response: Response) {
        let oldest = self.ring.oldest();
        let given = self.ring.answer(index, &response.to_bytes());
        debug_assert!(given, "each answer is owed to a request");
        if oldest == index {
            return;
        }
        // `answer` moved the oldest request into the slot of the answered one.
        self.counters.moved.add(1);
        let slot = oldest & (self.ring.count() - 1);
        let moved = self.places[slot as usize];
        self.place(index, moved);
        if let Some(job) = self.jobs.get_mut(moved as usize).and_then(Option::as_mut) {
            job.index = index;
        }
    }
}

/// Returns the rule name of a page access failure.
fn grant_rule(status: GrantStatus) -> &'static str {
    match status {
        GrantStatus::BadGref => "blk_gref_not_granted",
        GrantStatus::PermissionDenied => "blk_grant_denied",
        GrantStatus::BadPage => "blk_page_beyond_arena",
        GrantStatus::Again => "blk_grant_revoked",
        GrantStatus::NoSpace => "blk_too_many_mapped",
        _ => "blk_grant_error",
    }
}
