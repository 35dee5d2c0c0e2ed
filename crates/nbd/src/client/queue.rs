//! Requests, over a connection that may break.

// #syscall driver,daemon epoll_create1,epoll_ctl: waiting for a server and for time
// #syscall driver,daemon timerfd_create: how long a server may take

mod connection;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringfence_block::storage::{DiskQueue, Done, Op, Request, check_request};
use ringfence_memory::LentSlice;
use rustix::event::epoll;
use rustix::time::{TimerfdClockId, TimerfdFlags};

use super::journal::{Body, Entry, Journal};
use super::link::{Link, Place, Sending};
use super::{Durability, Shared};
use crate::protocol::errno_of;
use crate::protocol::numbers::{command, command_flag, error, transmission};
use crate::protocol::replies::Answer;

/// How long to wait before the second try to connect; twice as long before each later one.
const BACKOFF: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Bytes of the longest request without a payload.
const RANGE_MAX: u64 = 1 << 30;

enum State {
    /// No connection; the next try.
    Down(Instant),
    /// Somebody else was asked to connect, and has until then.
    Asked(Instant),
    /// Trying, until then.
    Joining(Link, Instant),
    Up(Link),
}

/// A request that is not over.
struct Active {
    request: Request,
    /// Commands without an answer.
    parts: usize,
    error: Option<i32>,
    /// A flush that stands in for FUA is on its way.
    flushing: bool,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A request, by number.
    Request(u64),
    /// What is written again.
    Journal,
    /// A flush of our own.
    Own,
}

/// What the server is asked for.
struct Command {
    owner: Owner,
    kind: u16,
    flags: u16,
    offset: u64,
    len: u32,
    /// Where it begins in the request.
    at: u64,
    /// For a flush: what it covers (a number of the journal, or of `Durability`).
    covers: u64,
}

/// How far writing again is.
struct Replay {
    /// Entries of the journal that were sent.
    sent: usize,
    /// Commands without an answer.
    waiting: usize,
    failed: bool,
}

/// One connection's requests.
pub(super) struct NbdQueue {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// When the timer goes off.
    armed: Option<Instant>,
    state: State,
    /// The kernel was told that writing is of interest.
    watches_writing: bool,
    requests: BTreeMap<u64, Active>,
    commands: BTreeMap<u64, Command>,
    unsent: VecDeque<u64>,
    next: u64,
    /// `None` where others write too, or nothing is to be kept.
    journal: Option<Journal>,
    own_flush: bool,
    replay: Option<Replay>,
    heard: Instant,
    backoff: Duration,
    /// That the connection is lost was said.
    said: bool,
    ready: Vec<Done>,
    ended: Vec<(u64, Result<(), u32>)>,
}

impl NbdQueue {
    pub(super) fn new(shared: Arc<Shared>, first: Option<Link>) -> io::Result<NbdQueue> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        if let Place::Handed(dialer) = &shared.target.place {
            epoll::add(&epoll, dialer, epoll::EventData::new_u64(2), epoll::EventFlags::IN)?;
        }
        let alone = shared.options.connections <= 1
            || !shared.settled.offer.has(transmission::CAN_MULTI_CONN);
        let keeps = alone && shared.options.journal > 0;
        let now = Instant::now();
        let mut queue = NbdQueue {
            journal: keeps.then(|| Journal::new(shared.options.journal)),
            shared,
            epoll,
            timer,
            armed: None,
            state: State::Down(now),
            watches_writing: false,
            requests: BTreeMap::new(),
            commands: BTreeMap::new(),
            unsent: VecDeque::new(),
            next: 1,
            own_flush: false,
            replay: None,
            heard: now,
            backoff: BACKOFF,
            said: false,
            ready: vec![],
            ended: vec![],
        };
        match first {
            Some(link) => {
                queue.watch(&link)?;
                queue.state = State::Up(link);
            }
            None => queue.connect(),
        }
        Ok(queue)
    }

    fn offers(&self, flag: u16) -> bool {
        self.shared.settled.offer.has(flag)
    }

    fn durability(&self) -> MutexGuard<'_, Durability> {
        self.shared.durability.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Makes the commands of a request, or ends it.
    fn begin(&mut self, request: Request) {
        let geometry = &self.shared.geometry;
        let checked =
            check_request(&request, geometry.bytes, geometry.sector_size, geometry.read_only);
        let fua = if self.offers(transmission::SEND_FUA) { command_flag::FUA } else { 0 };
        let known = match (checked, request.op) {
            (Err(errno), _) => Err(errno),
            (_, Op::Flush) if !self.offers(transmission::SEND_FLUSH) => {
                return self.end(request, Ok(()));
            }
            (_, Op::Flush) => Ok((command::FLUSH, 0)),
            _ if request.len == 0 => return self.end(request, Ok(())),
            (_, Op::Read) => Ok((command::READ, 0)),
            (_, Op::Write { fua: true }) => Ok((command::WRITE, fua)),
            (_, Op::Write { fua: false }) => Ok((command::WRITE, 0)),
            (_, Op::Discard { secure: false }) if geometry.discard.is_some() => {
                Ok((command::TRIM, 0))
            }
            (_, Op::WriteZeroes) if geometry.write_zeroes => Ok((command::WRITE_ZEROES, 0)),
            (_, Op::Discard { .. } | Op::WriteZeroes) => Err(libc::EOPNOTSUPP),
        };
        match known {
            Ok((kind, flags)) => self.split(request, kind, flags),
            Err(errno) => self.end(request, Err(errno)),
        }
    }

    fn end(&mut self, request: Request, result: Result<(), i32>) {
        self.ready.push(request.done(result));
    }

    /// One command, or more where the server takes no request of that length.
    fn split(&mut self, request: Request, kind: u16, flags: u16) {
        let key = self.number();
        let (offset, len) = (request.offset, request.len);
        let since = Instant::now();
        let mut active = Active { request, parts: 0, error: None, flushing: false, since };
        if kind == command::FLUSH {
            active.parts = 1;
            self.queue_command(Owner::Request(key), kind, flags, 0, 0, 0);
        } else {
            let longest = self.longest(kind);
            let mut at = 0;
            while at < len {
                let step = longest.min(len - at);
                let part = u32::try_from(step).unwrap_or(0);
                self.queue_command(Owner::Request(key), kind, flags, offset + at, part, at);
                active.parts += 1;
                at += step;
            }
        }
        self.requests.insert(key, active);
    }

    fn longest(&self, kind: u16) -> u64 {
        let sector = u64::from(self.shared.geometry.sector_size);
        let payload = u64::from(self.shared.settled.offer.payload_max);
        match kind {
            command::READ | command::WRITE => (payload - payload % sector).max(sector),
            _ => RANGE_MAX,
        }
    }

    fn queue_command(
        &mut self,
        owner: Owner,
        kind: u16,
        flags: u16,
        offset: u64,
        len: u32,
        at: u64,
    ) {
        let cookie = self.number();
        self.commands.insert(cookie, Command { owner, kind, flags, offset, len, at, covers: 0 });
        self.unsent.push_back(cookie);
    }

    /// Sends what can be sent.
    fn pump(&mut self) {
        if !matches!(self.state, State::Up(_)) {
            return;
        }
        if self.replay.is_some() {
            self.write_again();
        }
        if self.replay.is_some() {
            return;
        }
        if !self.own_flush && self.journal.as_ref().is_some_and(Journal::is_half_full) {
            self.own_flush = true;
            self.queue_command(Owner::Own, command::FLUSH, 0, 0, 0, 0);
            // Before any write that waits for it.
            self.unsent.rotate_right(1);
        }
        while let Some(cookie) = self.unsent.front().copied() {
            let full = self.journal.as_ref().is_some_and(Journal::is_full);
            let writes = self.commands.get(&cookie).is_some_and(|command| {
                matches!(command.kind, command::WRITE | command::WRITE_ZEROES)
            });
            if full && writes && self.own_flush {
                return;
            }
            self.unsent.pop_front();
            self.send(cookie);
        }
    }

    fn send(&mut self, cookie: u64) {
        let covers = match &self.journal {
            Some(journal) => journal.number(),
            None => self.durability().written,
        };
        let Some(command) = self.commands.get_mut(&cookie) else { return };
        command.covers = covers;
        let Command { owner, kind, flags, offset, len, at, .. } = *command;
        let payload = match (owner, kind) {
            (Owner::Request(key), command::WRITE) => self
                .requests
                .get(&key)
                .map_or(vec![], |active| pieces(&active.request, at, u64::from(len))),
            _ => vec![],
        };
        self.send_now(Sending { cookie, kind, flags, offset, len, payload });
    }

    fn send_now(&mut self, sending: Sending) {
        let State::Up(link) = &mut self.state else { return };
        if link.open() == 0 {
            // It was not asked anything before.
            self.heard = Instant::now();
        }
        link.send(sending);
    }

    /// The next few entries of the journal, when the last few were written again.
    fn write_again(&mut self) {
        let Some(Replay { sent, waiting: 0, failed }) = self.replay else { return };
        let Some(journal) = &mut self.journal else { return };
        let batch = if failed { vec![] } else { journal.again(sent) };
        if batch.is_empty() {
            self.replay = None;
            if failed {
                tracing::error!(
                    "the NBD server does not take again what the one before had acknowledged: the \
                     next flush fails"
                );
                journal.flushed(u64::MAX);
                self.durability().suspect = true;
            }
            return;
        }
        let mut waiting = 0;
        let sent = sent + batch.len();
        for Entry { offset, body, .. } in batch {
            let (kind, len) = match &body {
                Body::Bytes(bytes) => (command::WRITE, bytes.len() as u64),
                Body::Zeros(len) => (command::WRITE_ZEROES, *len),
            };
            let mut at = 0;
            while at < len {
                let step = self.longest(kind).min(len - at);
                let part = u32::try_from(step).unwrap_or(0);
                let payload = match (&body, usize::try_from(at), usize::try_from(step)) {
                    (Body::Bytes(bytes), Ok(at), Ok(step)) => bytes.slice(at, step).ok(),
                    _ => None,
                };
                let (cookie, offset) = (self.number(), offset + at);
                let owner = Owner::Journal;
                let command =
                    Command { owner, kind, flags: 0, offset, len: part, at: 0, covers: 0 };
                self.commands.insert(cookie, command);
                let payload = payload.into_iter().collect();
                self.send_now(Sending { cookie, kind, flags: 0, offset, len: part, payload });
                waiting += 1;
                at += step;
            }
        }
        self.replay = Some(Replay { sent, waiting, failed: false });
    }

    /// A command is over.
    fn complete(&mut self, cookie: u64, result: Result<(), u32>) {
        let Some(command) = self.commands.remove(&cookie) else { return };
        match command.owner {
            Owner::Journal => {
                if let Some(replay) = &mut self.replay {
                    replay.waiting = replay.waiting.saturating_sub(1);
                    replay.failed |= result.is_err();
                }
            }
            Owner::Own => {
                self.own_flush = false;
                if result.is_err() {
                    self.durability().suspect = true;
                }
                // Flushed, or given up.
                if let Some(journal) = &mut self.journal {
                    journal.flushed(command.covers);
                }
            }
            Owner::Request(key) => {
                let Some(active) = self.requests.get_mut(&key) else { return };
                active.parts -= 1;
                if let Err(number) = result {
                    active.error.get_or_insert(errno_of(number));
                }
                if active.parts == 0 {
                    self.finish(key, command.covers);
                }
            }
        }
    }

    /// All commands of a request are over.
    fn finish(&mut self, key: u64, covers: u64) {
        let Some(mut active) = self.requests.remove(&key) else { return };
        let mut result = active.error.map_or(Ok(()), Err);
        match active.request.op {
            _ if result.is_err() => {}
            Op::Write { fua: true }
                if !active.flushing
                    && !self.offers(transmission::SEND_FUA)
                    && self.offers(transmission::SEND_FLUSH) =>
            {
                active.flushing = true;
                active.parts = 1;
                self.requests.insert(key, active);
                return self.queue_command(Owner::Request(key), command::FLUSH, 0, 0, 0, 0);
            }
            // One that is durable too: written again in its turn, it covers up what came before it
            // and is not durable, which is written again as well.
            Op::Write { .. } | Op::WriteZeroes => self.wrote(&active.request),
            Op::Flush => {
                if let Some(journal) = &mut self.journal {
                    journal.flushed(covers);
                }
                let mut durability = self.durability();
                durability.flushed = durability.flushed.max(covers);
                if std::mem::take(&mut durability.suspect) {
                    result = Err(libc::EIO);
                }
            }
            Op::Read | Op::Discard { .. } => {}
        }
        self.ready.push(active.request.done(result));
    }

    /// A write was acknowledged that a flush must cover.
    fn wrote(&mut self, request: &Request) {
        if !self.offers(transmission::SEND_FLUSH) {
            // The server promises that there is nothing to flush.
            return;
        }
        match (&mut self.journal, request.op) {
            (Some(journal), Op::WriteZeroes) => journal.zeroed(request.offset, request.len),
            (Some(journal), _) => journal.wrote(request),
            (None, Op::Write { fua: true }) => {}
            (None, _) => self.durability().written += 1,
        }
    }

    /// Does what can be done without waiting.
    fn drive(&mut self) {
        self.expire();
        if let State::Down(again) = self.state
            && again <= Instant::now()
        {
            self.connect();
        }
        self.take_connection();
        if let Err(error) = self.exchange() {
            self.lost(&error);
        }
        self.settle();
    }

    /// Sends and receives.
    fn exchange(&mut self) -> io::Result<()> {
        let NbdQueue { state, commands, requests, ended, heard, .. } = self;
        let (State::Joining(link, _) | State::Up(link)) = state else { return Ok(()) };
        let mut spoke = false;
        let settled = link.drive(|answer| {
            spoke = true;
            match answer {
                Answer::Data { cookie, at, bytes } => {
                    if let Some((request, from)) = place(commands, requests, cookie) {
                        fill(request, from + at, Some(bytes), bytes.len() as u64);
                    }
                }
                Answer::Zeros { cookie, at, len } => {
                    if let Some((request, from)) = place(commands, requests, cookie) {
                        fill(request, from + at, None, len);
                    }
                }
                Answer::Over { cookie, result } => ended.push((cookie, result)),
            }
        });
        if spoke {
            *heard = Instant::now();
        }
        let mut leaves = false;
        for (cookie, result) in std::mem::take(&mut self.ended) {
            if result == Err(error::SHUTDOWN) {
                // It goes away: somebody else will answer.
                leaves = true;
            } else {
                self.complete(cookie, result);
            }
        }
        match settled? {
            _ if leaves => return Err(io::Error::other("the server shuts down")),
            Some(settled) => self.joined(&settled)?,
            None => {}
        }
        self.push()
    }

    /// Sends only.
    fn push(&mut self) -> io::Result<()> {
        self.pump();
        match &mut self.state {
            State::Up(link) => link.write(),
            _ => Ok(()),
        }
    }
}

/// The request that an answer is for, and where its command begins in it.
fn place<'a>(
    commands: &BTreeMap<u64, Command>,
    requests: &'a BTreeMap<u64, Active>,
    cookie: u64,
) -> Option<(&'a Request, u64)> {
    let command = commands.get(&cookie)?;
    let Owner::Request(key) = command.owner else { return None };
    Some((&requests.get(&key)?.request, command.at))
}

/// Calls `each` with the pieces of memory that hold `len` bytes from byte `from` of a request.
fn each_piece(request: &Request, from: u64, len: u64, mut each: impl FnMut(LentSlice)) {
    let (mut skip, mut left) = (from, len);
    for segment in &request.segments {
        let whole = segment.memory.len() as u64;
        if skip < whole && left > 0 {
            let step = (whole - skip).min(left);
            left -= step;
            if let (Ok(at), Ok(step)) = (usize::try_from(skip), usize::try_from(step))
                && let Ok(piece) = segment.memory.slice(at, step)
            {
                each(piece);
            }
        }
        skip = skip.saturating_sub(whole);
    }
}

fn pieces(request: &Request, from: u64, len: u64) -> Vec<LentSlice> {
    let mut pieces = vec![];
    each_piece(request, from, len, |piece| pieces.push(piece));
    pieces
}

/// Puts what came (or zeros) where it was wanted. Both lie within the request: what the server says
/// was held against what it was asked for.
fn fill(request: &Request, from: u64, mut bytes: Option<&[u8]>, len: u64) {
    each_piece(request, from, len, |piece| {
        let result = match &mut bytes {
            None => piece.zero(0, piece.len()),
            Some(bytes) => {
                let (head, rest) = bytes.split_at(piece.len().min(bytes.len()));
                *bytes = rest;
                piece.copy_from(0, head)
            }
        };
        // That it may be written was checked when it was submitted.
        debug_assert!(result.is_ok());
    });
}

impl DiskQueue for NbdQueue {
    fn submit(&mut self, request: Request) {
        self.begin(request);
    }

    fn kick(&mut self) {
        if let Err(error) = self.push() {
            self.lost(&error);
        }
        self.settle();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.drive();
        done.append(&mut self.ready);
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        let down = State::Down(Instant::now());
        if let State::Up(link) = std::mem::replace(&mut self.state, down) {
            link.farewell();
        }
    }
}
