//! State of one ring of a frontend: requests, their pieces, and replay after a reconnect.
//!
//! ```text
//! submit ──> job ──> pieces (backlog) ── pump ──> posted ── collect ──> done ──> completion queue
//!                        ^                           │
//!                        └──────── break_off ────────┘   connection lost: posted pieces go back in order
//! ```
//!
//! A job is one request of a handle. It is cut into pieces of the size that the backend accepts. A piece is
//! forgotten when its response is consumed, so nothing is completed twice. Responses with an unknown id or
//! operation, and impossible response counts, break the connection.

mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;

use ringfence_access::window::SourceLevels;
use ringfence_platform::{Access, Channel, Granter, Lease};
use ringfence_ring::{FrontRing, RingPages};
use ringfence_sys::numbers::bounded;
use ringfence_sys::pressure::Share;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{
    Abi, Operation, RequestName, Response, Status, direct, discard, extents, write_zeroes,
};
use rustix::io::Errno;

use super::broken::{BrokenRule, channel_rule};
use super::bytes::from_pages;
use super::completions::Completions;
use super::pool::{LentPool, Page};
use crate::storage::extents::LIST_BYTES;
use crate::storage::{Op, Request};
use transfer::build_transfer;

/// Operation by which a flush is requested from the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FlushBy {
    /// None: the disk has no volatile cache.
    Nothing,
    /// Flush request of blkif.
    Operation,
    /// A barrier without segments.
    Barrier,
}

/// Properties negotiated with the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaneTerms {
    pub(super) handle: u16,
    /// Maximum number of segments of a request.
    pub(super) segments: usize,
    pub(super) flush: FlushBy,
    pub(super) discard: bool,
    pub(super) extents: bool,
    pub(super) write_zeroes: bool,
}

/// Ring with a connected backend.
pub(super) struct LaneConnection<G, C> {
    pub(super) ring: FrontRing<RingPages>,
    pub(super) ring_pages: Vec<Lease>,
    pub(super) channel: C,
    pub(super) pool: LentPool<G>,
    pub(super) terms: LaneTerms,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
    Zero { allocate: bool },
    Flush,
    Discard { secure: bool },
    Extents,
}

/// Part of a job that is posted as one request.
#[derive(Clone, Copy, Debug)]
struct Piece {
    job: u32,
    kind: Kind,
    /// Offset of the first byte in the job.
    at: u64,
    len: u64,
}

/// Piece in the ring.
struct Posted {
    piece: Piece,
    operation: Operation,
    pages: Vec<Page>,
    descriptors: Option<Page>,
    /// Upper half of the request id; distinguishes pieces that used the same slot.
    generation: u32,
    /// Sequence number of posting; a replay keeps this order.
    sequence: u64,
}

/// Request of a handle.
struct Job {
    owner: u32,
    request: Request,
    /// Bytes not yet transferred; 1 for a flush that is not done.
    left: u64,
    error: Option<i32>,
    flushes: bool,
}

/// State of one ring and of all handles that use it.
pub(super) struct Lane<G, C> {
    connection: Option<LaneConnection<G, C>>,
    /// Set if no connection will follow; requests fail.
    given_up: bool,
    backlog: VecDeque<Piece>,
    posted: Vec<Option<Posted>>,
    free: Vec<u32>,
    jobs: Vec<Option<Job>>,
    free_jobs: Vec<u32>,
    owners: Vec<Option<Arc<Completions>>>,
    next_sequence: u64,
    generations: u32,
    rules: Arc<RuleCounters>,
    /// Set if an event was requested and not cleared since.
    armed: bool,
    /// Pages of a broken connection that could not be revoked.
    orphans: Vec<Lease>,
}

impl<G: Granter, C: Channel> Lane<G, C> {
    pub(super) fn new(rules: Arc<RuleCounters>) -> Lane<G, C> {
        Lane {
            connection: None,
            given_up: false,
            backlog: VecDeque::new(),
            posted: Vec::new(),
            free: Vec::new(),
            jobs: Vec::new(),
            free_jobs: Vec::new(),
            owners: Vec::new(),
            next_sequence: 0,
            generations: 0,
            rules,
            armed: false,
            orphans: Vec::new(),
        }
    }

    pub(super) fn connection(&self) -> Option<&LaneConnection<G, C>> {
        self.connection.as_ref()
    }

    /// Returns the number of pages lent by ordinary grants.
    pub(super) fn lent(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.pool.lent())
    }

    /// Revokes the pages that no request uses.
    pub(super) fn release_pages(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.pool.release();
        }
    }

    /// Sets the share of its pages that the pool keeps under memory pressure.
    pub(super) fn set_share(&mut self, share: Share) {
        if let Some(connection) = &mut self.connection {
            connection.pool.set_share(share);
        }
    }

    /// Returns the fill levels of the window, if there is one.
    pub(super) fn window_levels(&mut self) -> Option<SourceLevels> {
        self.connection.as_mut()?.pool.window_levels()
    }

    /// Installs a connection and posts the waiting pieces.
    pub(super) fn connect(&mut self, connection: LaneConnection<G, C>) -> Result<(), BrokenRule> {
        let count = connection.ring.count();
        self.posted = (0..count).map(|_| None).collect();
        self.free = (0..count).rev().collect();
        self.connection = Some(connection);
        (self.given_up, self.armed) = (false, true);
        self.pump()?;
        self.arm().map(|_| ())
    }

    /// Ends the connection. Unanswered pieces wait for the next connection, in their order. Returns the pages
    /// that could not be revoked.
    pub(super) fn disconnect(&mut self) -> Vec<Lease> {
        self.break_off();
        core::mem::take(&mut self.orphans)
    }

    /// Ends the connection as [`Lane::disconnect`] does, and keeps the pages that could not be revoked. The
    /// channel closes, so it wakes no thread any more.
    pub(super) fn break_off(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let mut unanswered: Vec<Posted> = self.posted.drain(..).flatten().collect();
        unanswered.sort_unstable_by_key(|posted| posted.sequence);
        let mut leases = connection.ring_pages;
        for posted in unanswered.into_iter().rev() {
            self.backlog.push_front(posted.piece);
            let pages = posted.pages.into_iter().chain(posted.descriptors);
            leases.extend(pages.filter_map(Page::into_lease));
        }
        drop((connection.ring, connection.channel));
        self.orphans.extend(connection.pool.close(leases));
    }

    /// Fails all waiting requests, and those submitted before the next connection.
    pub(super) fn give_up(&mut self) {
        if self.connection.is_some() {
            return;
        }
        self.given_up = true;
        for number in (0..).take(self.jobs.len()) {
            if let Some(Some(job)) = self.jobs.get_mut(number as usize) {
                job.error.get_or_insert(Errno::IO.raw_os_error());
                self.end(number);
            }
        }
        self.backlog.clear();
    }

    /// Adds a request of `owner`. [`Lane::pump`] posts it.
    pub(super) fn submit(&mut self, owner: u32, request: Request) {
        let (kind, len) = match request.op {
            Op::Read => (Kind::Read, request.len),
            Op::Write { .. } => (Kind::Write, request.len),
            Op::WriteZeroes { allocate } => (Kind::Zero { allocate }, request.len),
            Op::Flush => (Kind::Flush, 1),
            Op::Discard { secure } => (Kind::Discard { secure }, request.len),
            Op::Extents => (Kind::Extents, request.len),
        };
        let flushes = request.op == Op::Write { fua: true };
        let job = Job { owner, request, left: len, error: None, flushes };
        let number = match self.free_jobs.pop() {
            Some(number) => {
                self.jobs[number as usize] = Some(job);
                number
            }
            None => {
                self.jobs.push(Some(job));
                bounded(self.jobs.len() - 1, u32::MAX)
            }
        };
        if self.given_up {
            self.fail(number, Errno::IO);
        } else if len == 0 {
            self.done(Piece { job: number, kind, at: 0, len: 0 }, None);
        } else {
            self.backlog.push_back(Piece { job: number, kind, at: 0, len });
        }
    }

    /// Posts pieces while the ring and the pool have room, and notifies the backend.
    pub(super) fn pump(&mut self) -> Result<(), BrokenRule> {
        while let Some(piece) = self.backlog.front().copied() {
            if self.connection.is_none() {
                return Ok(());
            }
            if let Some(answer) = self.local_result(piece.kind) {
                self.backlog.pop_front();
                self.done(piece, answer);
                continue;
            }
            let Some(posted) = self.post(piece) else {
                let full = self.connection.as_ref().is_some_and(|c| c.ring.free() == 0);
                if full || self.posted.iter().any(Option::is_some) {
                    break;
                }
                // The pool has no page and none is in use: waiting would not help.
                self.rules.count("front_no_pages");
                self.backlog.retain(|other| other.job != piece.job);
                self.fail(piece.job, Errno::NOMEM);
                continue;
            };
            match self.backlog.front_mut() {
                Some(front) if posted < piece.len => {
                    front.at += posted;
                    front.len -= posted;
                }
                _ => {
                    self.backlog.pop_front();
                }
            }
        }
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if let Err(held) = connection.pool.reclaim() {
            tracing::warn!("{held}");
            return Err(self.broken("window_held_too_long"));
        }
        if connection.ring.publish() {
            connection.channel.notify().map_err(|error| channel_rule(&self.rules, error))?;
        }
        Ok(())
    }

    /// Returns the result of an operation that the backend need not, or cannot, execute.
    fn local_result(&self, kind: Kind) -> Option<Option<i32>> {
        let terms = &self.connection.as_ref()?.terms;
        match kind {
            Kind::Flush if terms.flush == FlushBy::Nothing => Some(None),
            Kind::Discard { .. } if !terms.discard => Some(Some(Errno::OPNOTSUPP.raw_os_error())),
            Kind::Extents if !terms.extents => Some(Some(Errno::OPNOTSUPP.raw_os_error())),
            _ => None,
        }
    }

    /// Posts the beginning of a piece. Returns its length, or `None` without room.
    fn post(&mut self, piece: Piece) -> Option<u64> {
        let connection = self.connection.as_mut()?;
        let job = self.jobs.get(piece.job as usize)?.as_ref()?;
        let place = *self.free.last()?;
        if connection.ring.free() == 0 {
            return None;
        }
        let generation = self.generations.wrapping_add(1);
        let id = u64::from(generation) << 32 | u64::from(place);
        let name = RequestName { id, handle: connection.terms.handle };
        let sector = (job.request.offset + piece.at) / 512;
        let (slot, mut posted) = match piece.kind {
            Kind::Flush => {
                let barrier = connection.terms.flush == FlushBy::Barrier;
                let operation = if barrier { Operation::Barrier } else { Operation::Flush };
                (direct(Abi::NATIVE, operation, name, 0, &[])?, Posted::bare(piece, operation))
            }
            Kind::Discard { secure } => {
                let slot = discard(Abi::NATIVE, name, sector, piece.len / 512, secure);
                (slot, Posted::bare(piece, Operation::Discard))
            }
            Kind::Zero { allocate } if connection.terms.write_zeroes => {
                let sectors = piece.len / 512;
                let slot = write_zeroes(Abi::NATIVE, name, sector, sectors, allocate);
                (slot, Posted::bare(piece, Operation::WriteZeroes))
            }
            Kind::Extents => {
                let page = connection.pool.take(Access::ReadWrite)?;
                let sectors = piece.len / 512;
                let slot = extents(Abi::NATIVE, name, sector, sectors, page.gref());
                let posted = Posted::bare(piece, Operation::Extents);
                (slot, Posted { pages: vec![page], ..posted })
            }
            Kind::Read | Kind::Write | Kind::Zero { .. } => {
                build_transfer(connection, &job.request.segments, piece, name, sector)?
            }
        };
        if !connection.ring.request(&slot) {
            return None;
        }
        (self.generations, posted.generation) = (generation, generation);
        posted.sequence = self.next_sequence;
        self.next_sequence += 1;
        let len = posted.piece.len;
        self.free.pop();
        self.posted[place as usize] = Some(posted);
        Some(len)
    }

    /// Consumes all responses. If the backend breaks a rule, pieces that are not completed wait for the next
    /// connection.
    pub(super) fn collect(&mut self) -> Result<(), BrokenRule> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let mut cleared = Ok(());
        if core::mem::take(&mut self.armed) {
            let clear = connection.channel.clear();
            cleared = clear.map(|_| ()).map_err(|error| channel_rule(&self.rules, error));
        }
        loop {
            let Some(connection) = &mut self.connection else { return Ok(()) };
            let unconsumed = connection.ring.unconsumed();
            let count = unconsumed.map_err(|_| self.broken("front_response_overflow"))?;
            if count == 0 {
                // Responses written before the backend closed the channel count.
                return cleared;
            }
            for _ in 0..count {
                let Some(connection) = &mut self.connection else { return Ok(()) };
                let response = connection.ring.response::<{ Response::MAX }>(0);
                connection.ring.consume(1);
                self.answered(Response::from_bytes(response.into_unchecked()))?;
            }
        }
    }

    /// Requests an event for the next response. Returns `true` if one arrived meanwhile.
    pub(super) fn arm(&mut self) -> Result<bool, BrokenRule> {
        let Some(connection) = &mut self.connection else { return Ok(false) };
        self.armed = true;
        connection.ring.final_check().map_err(|_| self.broken("front_response_overflow"))
    }

    fn broken(&self, rule: &'static str) -> BrokenRule {
        self.rules.count(rule);
        BrokenRule(rule)
    }

    fn answered(&mut self, response: Response) -> Result<(), BrokenRule> {
        let place = response.id & 0xFFFF_FFFF;
        let slot = usize::try_from(place).ok().and_then(|place| self.posted.get_mut(place));
        let found = slot.and_then(|slot| {
            slot.take_if(|posted| {
                u64::from(posted.generation) == response.id >> 32
                    && posted.operation.to_raw() == response.operation
            })
        });
        let (Some(posted), Some(connection)) = (found, &mut self.connection) else {
            return Err(self.broken("front_response_foreign_id"));
        };
        self.free.push(bounded(place, u32::MAX));
        let Posted { piece, operation, pages, descriptors, .. } = posted;
        if operation == Operation::WriteZeroes && response.status == Status::NotSupported {
            // The storage cannot after all: zeros go as data from now on.
            connection.terms.write_zeroes = false;
            self.backlog.push_front(piece);
            return Ok(());
        }
        let mut error = match response.status {
            Status::Okay => None,
            Status::NotSupported => Some(Errno::OPNOTSUPP.raw_os_error()),
            Status::NoSpace => Some(Errno::NOSPC.raw_os_error()),
            Status::Error | Status::Unknown(_) => Some(Errno::IO.raw_os_error()),
        };
        let job = self.jobs.get(piece.job as usize).and_then(Option::as_ref);
        let filled = match piece.kind {
            Kind::Read => Some(piece.at..piece.at + piece.len),
            Kind::Extents => Some(0..LIST_BYTES),
            _ => None,
        };
        if let (Some(range), None, Some(job)) = (filled, error, job)
            && from_pages(&job.request.segments, range, pages.iter().map(Page::memory)).is_err()
        {
            error = Some(Errno::FAULT.raw_os_error());
        }
        for page in pages.into_iter().rev().chain(descriptors) {
            connection.pool.give_back(page);
        }
        self.done(piece, error);
        Ok(())
    }

    /// Completes a piece; ends its job after the last one.
    fn done(&mut self, piece: Piece, error: Option<i32>) {
        let Some(Some(job)) = self.jobs.get_mut(piece.job as usize) else { return };
        job.left = job.left.saturating_sub(piece.len);
        job.error = job.error.or(error);
        if job.left > 0 {
            return;
        }
        if job.error.is_none() && core::mem::take(&mut job.flushes) {
            job.left = 1;
            self.backlog.push_back(Piece { job: piece.job, kind: Kind::Flush, at: 0, len: 1 });
            return;
        }
        self.end(piece.job);
    }

    fn fail(&mut self, number: u32, errno: Errno) {
        if let Some(Some(job)) = self.jobs.get_mut(number as usize) {
            job.error = Some(errno.raw_os_error());
        }
        self.end(number);
    }

    fn end(&mut self, number: u32) {
        let Some(job) = self.jobs.get_mut(number as usize).and_then(Option::take) else { return };
        self.free_jobs.push(number);
        if let Some(Some(owner)) = self.owners.get(job.owner as usize) {
            owner.push(job.request.done(job.error.map_or(Ok(()), Err)));
        }
    }

    /// Registers a handle. Returns a number that no unfinished job has.
    pub(super) fn register(&mut self, completions: Arc<Completions>) -> u32 {
        let vacant = (0..self.owners.len()).find(|place| {
            let number = bounded(*place, u32::MAX);
            self.owners[*place].is_none() && self.pending(number) == 0
        });
        let place = vacant.unwrap_or_else(|| {
            self.owners.push(None);
            self.owners.len() - 1
        });
        self.owners[place] = Some(completions);
        bounded(place, u32::MAX)
    }

    /// Unregisters a handle and drops its waiting pieces. Results of its posted pieces are discarded.
    pub(super) fn unregister(&mut self, owner: u32) {
        if let Some(place) = self.owners.get_mut(owner as usize) {
            *place = None;
        }
        let theirs = |job: &Option<Job>| job.as_ref().is_some_and(|job| job.owner == owner);
        let jobs = &mut self.jobs;
        self.backlog.retain(|piece| {
            let Some(job) = jobs.get_mut(piece.job as usize) else { return false };
            let goes = theirs(job);
            if let Some(job) = job.as_mut().filter(|_| goes) {
                job.left = job.left.saturating_sub(piece.len);
                job.flushes = false;
            }
            !goes
        });
        let posted: Vec<u32> = self.posted.iter().flatten().map(|p| p.piece.job).collect();
        for number in (0..).take(self.jobs.len()) {
            if theirs(&self.jobs[number as usize]) && !posted.contains(&number) {
                self.end(number);
            }
        }
    }

    /// Iterates over the completion queues of all handles.
    pub(super) fn owners(&self) -> impl Iterator<Item = &Arc<Completions>> {
        self.owners.iter().flatten()
    }

    /// Returns the number of unfinished requests of `owner`.
    pub(super) fn pending(&self, owner: u32) -> usize {
        self.jobs.iter().flatten().filter(|job| job.owner == owner).count()
    }
}

impl Posted {
    fn bare(piece: Piece, operation: Operation) -> Posted {
        let (pages, descriptors) = (Vec::new(), None);
        Posted { piece, operation, pages, descriptors, generation: 0, sequence: 0 }
    }
}
