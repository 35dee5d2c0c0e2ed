//! What one ring's worth of requests goes through: asked for, cut into pieces, posted, answered, and
//! posted once more when the backend went before it answered.

use std::collections::VecDeque;
use std::sync::Arc;

use ringfence_access::window::SourceLevels;
use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Channel, ChannelError, Granter, Lease};
use ringfence_ring::{FrontRing, RingPages};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{
    Abi, Direction, Operation, Response, SEGMENTS_DIRECT, SegmentRange, Slot, Status, direct,
    discard, indirect, indirect_descriptors,
};
use rustix::io::Errno;

use super::bytes::{from_page, to_page};
use super::completions::Completions;
use super::pool::{Page, Pool};
use crate::storage::{Op, Request, Segment};

/// How a flush is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FlushBy {
    /// The disk loses nothing.
    Nothing,
    /// By an operation of its own.
    Operation,
    /// By a barrier without segments.
    Barrier,
}

/// What was agreed with the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Terms {
    pub(super) handle: u16,
    /// Most segments of a request.
    pub(super) segments: usize,
    pub(super) flush: FlushBy,
    pub(super) discard: bool,
}

/// A ring that is connected.
pub(super) struct Connection<G, C> {
    pub(super) ring: FrontRing<RingPages>,
    pub(super) ring_pages: Vec<Lease>,
    pub(super) channel: C,
    pub(super) pool: Pool<G>,
    pub(super) terms: Terms,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
    Zero,
    Flush,
    Discard { secure: bool },
}

/// A part of what somebody asked for, to be posted.
#[derive(Clone, Copy, Debug)]
struct Piece {
    job: u32,
    kind: Kind,
    /// Its first byte in the request.
    at: u64,
    len: u64,
}

/// A piece that is in the ring.
struct Posted {
    piece: Piece,
    operation: Operation,
    pages: Vec<Page>,
    descriptors: Option<Page>,
    /// Tells those apart that had the same place.
    generation: u32,
    /// Counts what is posted, to post it again in that order.
    turn: u64,
}

/// What somebody asked for.
struct Job {
    owner: u32,
    request: Request,
    /// Bytes, or the one step of a request without any, not yet done.
    left: u64,
    error: Option<i32>,
    flushes: bool,
}

/// How the backend misbehaved, or went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Broken(pub(super) &'static str);

/// The state of one ring and all who use it.
pub(super) struct Lane<G, C> {
    connection: Option<Connection<G, C>>,
    /// No connection is to be waited for.
    given_up: bool,
    backlog: VecDeque<Piece>,
    posted: Vec<Option<Posted>>,
    free: Vec<u32>,
    jobs: Vec<Option<Job>>,
    free_jobs: Vec<u32>,
    owners: Vec<Option<Arc<Completions>>>,
    turns: u64,
    generations: u32,
    rules: Arc<RuleCounters>,
    /// Event asked for, and not cleared since.
    armed: bool,
    /// Pages that a connection that broke could not take back.
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
            turns: 0,
            generations: 0,
            rules,
            armed: false,
            orphans: Vec::new(),
        }
    }

    pub(super) fn connection(&self) -> Option<&Connection<G, C>> {
        self.connection.as_ref()
    }

    /// Pages lent now.
    pub(super) fn lent(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.pool.lent())
    }

    /// Gives back pages that no request uses.
    pub(super) fn release_pages(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.pool.release();
        }
    }

    /// Windows keep at most so many pages from now on.
    pub(super) fn resize_window(&mut self, most: u32) {
        if let Some(connection) = &mut self.connection {
            connection.pool.resize_window(most);
        }
    }

    /// What is in the window, where there is one.
    pub(super) fn window_levels(&mut self) -> Option<SourceLevels> {
        self.connection.as_mut()?.pool.window_levels()
    }

    /// Takes up a connection, and posts what waits for one.
    pub(super) fn connect(&mut self, connection: Connection<G, C>) -> Result<(), Broken> {
        let count = connection.ring.count();
        self.posted = (0..count).map(|_| None).collect();
        self.free = (0..count).rev().collect();
        self.connection = Some(connection);
        (self.given_up, self.armed) = (false, true);
        self.pump()?;
        self.arm().map(|_| ())
    }

    /// Gives a connection up. What was posted and not answered waits for the next one, in its order;
    /// pages that cannot be taken back are returned.
    pub(super) fn disconnect(&mut self) -> Vec<Lease> {
        self.break_off();
        core::mem::take(&mut self.orphans)
    }

    /// As [`Lane::disconnect`], for whoever finds that the connection is of no use. Its channel closes,
    /// so that nobody is woken by it any more.
    pub(super) fn break_off(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let mut unanswered: Vec<Posted> = self.posted.drain(..).flatten().collect();
        unanswered.sort_unstable_by_key(|posted| posted.turn);
        let mut leases = connection.ring_pages;
        for posted in unanswered.into_iter().rev() {
            self.backlog.push_front(posted.piece);
            let pages = posted.pages.into_iter().chain(posted.descriptors);
            leases.extend(pages.filter_map(Page::into_lease));
        }
        drop((connection.ring, connection.channel));
        self.orphans.extend(connection.pool.close(leases));
    }

    /// Everything that waits for a connection fails, and so does what is submitted before there is one.
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

    /// Takes a request of `owner`. It is posted by [`Lane::pump`].
    pub(super) fn submit(&mut self, owner: u32, request: Request) {
        let (kind, len) = match request.op {
            Op::Read => (Kind::Read, request.len),
            Op::Write { .. } => (Kind::Write, request.len),
            Op::WriteZeroes => (Kind::Zero, request.len),
            Op::Flush => (Kind::Flush, 1),
            Op::Discard { secure } => (Kind::Discard { secure }, request.len),
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
                // As many as can be in flight, which is far below.
                u32::try_from(self.jobs.len() - 1).unwrap_or(u32::MAX)
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

    /// Posts as much as there is room for.
    pub(super) fn pump(&mut self) -> Result<(), Broken> {
        while let Some(piece) = self.backlog.front().copied() {
            if self.connection.is_none() {
                return Ok(());
            }
            if let Some(answer) = self.answer_alone(piece.kind) {
                self.backlog.pop_front();
                self.done(piece, answer);
                continue;
            }
            let Some(posted) = self.post(piece) else {
                let full = self.connection.as_ref().is_some_and(|c| c.ring.free() == 0);
                if full || self.posted.iter().any(Option::is_some) {
                    break;
                }
                // There is no page, and none will come back.
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
        if let Err(held) = connection.pool.tend() {
            tracing::warn!("{held}");
            return Err(self.broken("window_held_too_long"));
        }
        if connection.ring.publish() {
            connection.channel.notify().map_err(|error| channel_rule(&self.rules, error))?;
        }
        Ok(())
    }

    /// The answer to what the backend need not, or cannot, be asked for.
    fn answer_alone(&self, kind: Kind) -> Option<Option<i32>> {
        let terms = &self.connection.as_ref()?.terms;
        match kind {
            Kind::Flush if terms.flush == FlushBy::Nothing => Some(None),
            Kind::Discard { .. } if !terms.discard => Some(Some(Errno::OPNOTSUPP.raw_os_error())),
            _ => None,
        }
    }

    /// Posts the beginning of a piece; its length, or `None` when there is no room.
    fn post(&mut self, piece: Piece) -> Option<u64> {
        let connection = self.connection.as_mut()?;
        let job = self.jobs.get(piece.job as usize)?.as_ref()?;
        let place = *self.free.last()?;
        if connection.ring.free() == 0 {
            return None;
        }
        let generation = self.generations.wrapping_add(1);
        let id = u64::from(generation) << 32 | u64::from(place);
        let names = (id, connection.terms.handle);
        let sector = (job.request.offset + piece.at) / 512;
        let (slot, mut posted) = match piece.kind {
            Kind::Flush => {
                let barrier = connection.terms.flush == FlushBy::Barrier;
                let operation = if barrier { Operation::Barrier } else { Operation::Flush };
                (direct(Abi::NATIVE, operation, names, 0, &[])?, Posted::bare(piece, operation))
            }
            Kind::Discard { secure } => {
                let slot = discard(Abi::NATIVE, names, sector, piece.len / 512, secure);
                (slot, Posted::bare(piece, Operation::Discard))
            }
            Kind::Read | Kind::Write | Kind::Zero => {
                carry(connection, &job.request.segments, piece, names, sector)?
            }
        };
        if !connection.ring.request(&slot) {
            return None;
        }
        (self.generations, posted.generation) = (generation, generation);
        posted.turn = self.turns;
        self.turns += 1;
        let len = posted.piece.len;
        self.free.pop();
        self.posted[place as usize] = Some(posted);
        Some(len)
    }

    /// Takes the answers there are. Nothing is lost if the backend breaks a rule: what it did not answer
    /// in order waits for another one.
    pub(super) fn collect(&mut self) -> Result<(), Broken> {
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
                // What a backend answered before it went counts.
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

    /// Asks to be told of the next answer; whether there is one already.
    pub(super) fn arm(&mut self) -> Result<bool, Broken> {
        let Some(connection) = &mut self.connection else { return Ok(false) };
        self.armed = true;
        connection.ring.final_check().map_err(|_| self.broken("front_response_overflow"))
    }

    fn broken(&self, rule: &'static str) -> Broken {
        self.rules.count(rule);
        Broken(rule)
    }

    fn answered(&mut self, response: Response) -> Result<(), Broken> {
        let place = response.id & 0xFFFF_FFFF;
        let slot = usize::try_from(place).ok().and_then(|place| self.posted.get_mut(place));
        let asked = slot.and_then(|slot| {
            slot.take_if(|posted| {
                u64::from(posted.generation) == response.id >> 32
                    && posted.operation.to_raw() == response.operation
            })
        });
        let (Some(posted), Some(connection)) = (asked, &mut self.connection) else {
            return Err(self.broken("front_response_foreign_id"));
        };
        self.free.push(u32::try_from(place).unwrap_or(u32::MAX));
        let Posted { piece, pages, descriptors, .. } = posted;
        let mut error = match response.status {
            Status::Okay => None,
            Status::NotSupported => Some(Errno::OPNOTSUPP.raw_os_error()),
            Status::Error | Status::Unknown(_) => Some(Errno::IO.raw_os_error()),
        };
        let job = self.jobs.get(piece.job as usize).and_then(Option::as_ref);
        if let (Kind::Read, None, Some(job)) = (piece.kind, error, job) {
            let mut at = usize::try_from(piece.at).unwrap_or(usize::MAX);
            let mut left = usize::try_from(piece.len).unwrap_or(0);
            for page in &pages {
                let len = left.min(PAGE_SIZE);
                if from_page(&job.request.segments, at, page.memory(), len).is_err() {
                    error = Some(Errno::FAULT.raw_os_error());
                }
                at += len;
                left -= len;
            }
        }
        for page in pages.into_iter().rev().chain(descriptors) {
            connection.pool.give_back(page);
        }
        self.done(piece, error);
        Ok(())
    }

    /// A piece is over.
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

    /// A number for a new owner: one that nothing that is posted is for.
    pub(super) fn enter(&mut self, completions: Arc<Completions>) -> u32 {
        let vacant = (0..self.owners.len()).find(|place| {
            let number = u32::try_from(*place).unwrap_or(u32::MAX);
            self.owners[*place].is_none() && self.pending(number) == 0
        });
        let place = vacant.unwrap_or_else(|| {
            self.owners.push(None);
            self.owners.len() - 1
        });
        self.owners[place] = Some(completions);
        u32::try_from(place).unwrap_or(u32::MAX)
    }

    /// Forgets an owner and what it asked for; what is posted is answered to nobody.
    pub(super) fn leave(&mut self, owner: u32) {
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

    /// Who uses the lane.
    pub(super) fn owners(&self) -> impl Iterator<Item = &Arc<Completions>> {
        self.owners.iter().flatten()
    }

    /// Requests of `owner` that are not over.
    pub(super) fn pending(&self, owner: u32) -> usize {
        self.jobs.iter().flatten().filter(|job| job.owner == owner).count()
    }
}

impl Posted {
    fn bare(piece: Piece, operation: Operation) -> Posted {
        let (pages, descriptors) = (Vec::new(), None);
        Posted { piece, operation, pages, descriptors, generation: 0, turn: 0 }
    }
}

/// Puts as much of a piece as fits into pages, and makes a request of them.
fn carry<G: Granter, C>(
    connection: &mut Connection<G, C>,
    segments: &[Segment],
    piece: Piece,
    names: (u64, u16),
    sector: u64,
) -> Option<(Slot, Posted)> {
    let pool = &mut connection.pool;
    let reads = piece.kind == Kind::Read;
    let access = if reads { Access::ReadWrite } else { Access::ReadOnly };
    let wanted = usize::try_from(piece.len.div_ceil(PAGE_SIZE as u64)).unwrap_or(usize::MAX);
    let wanted = wanted.min(connection.terms.segments);
    let mut descriptors = None;
    if wanted > SEGMENTS_DIRECT {
        descriptors = pool.take(Access::ReadOnly);
    }
    let most = if descriptors.is_some() { wanted } else { wanted.min(SEGMENTS_DIRECT) };
    let mut pages = Vec::with_capacity(most);
    while pages.len() < most {
        let Some(page) = pool.take(access) else { break };
        pages.push(page);
    }
    if pages.len() <= SEGMENTS_DIRECT
        && let Some(page) = descriptors.take()
    {
        pool.give_back(page);
    }
    let len = piece.len.min((pages.len() * PAGE_SIZE) as u64);
    let piece = Piece { len, ..piece };
    let filled = fill(&pages, segments, piece);
    let request = filled.and_then(|ranges| {
        let direction = if reads { Direction::Read } else { Direction::Write };
        let operation = if reads { Operation::Read } else { Operation::Write };
        let Some(list) = &descriptors else {
            return Some((direct(Abi::NATIVE, operation, names, sector, &ranges)?, operation));
        };
        let bytes: Vec<u8> = indirect_descriptors(&ranges).flatten().collect();
        list.memory().copy_from(0, &bytes).ok()?;
        let count = u16::try_from(ranges.len()).ok()?;
        let slot = indirect(Abi::NATIVE, direction, names, sector, count, &[list.gref()])?;
        // The answer names the inner operation.
        Some((slot, operation))
    });
    match request.filter(|_| len > 0) {
        Some((slot, operation)) => {
            let posted = Posted { piece, operation, pages, descriptors, generation: 0, turn: 0 };
            Some((slot, posted))
        }
        None => {
            pages.into_iter().chain(descriptors).for_each(|page| pool.give_back(page));
            None
        }
    }
}

/// Copies what is to be written into the pages, and says what of each is used.
fn fill(pages: &[Page], segments: &[Segment], piece: Piece) -> Option<Vec<SegmentRange>> {
    let mut at = usize::try_from(piece.at).ok()?;
    let mut left = usize::try_from(piece.len).ok()?;
    let mut ranges = Vec::with_capacity(pages.len());
    for page in pages {
        let len = left.min(PAGE_SIZE);
        let filled = match piece.kind {
            Kind::Write => to_page(segments, at, page.memory(), len),
            Kind::Zero => page.memory().zero(0, len),
            _ => Ok(()),
        };
        filled.ok()?;
        let last = u8::try_from((len / 512).checked_sub(1)?).ok()?;
        ranges.push(SegmentRange::new(page.gref(), 0, last)?);
        at += len;
        left -= len;
    }
    Some(ranges)
}

fn channel_rule(rules: &RuleCounters, error: ChannelError) -> Broken {
    let rule = match error {
        ChannelError::PeerGone => "channel_closed",
        ChannelError::System(_) => "channel_failed",
    };
    rules.count(rule);
    Broken(rule)
}
