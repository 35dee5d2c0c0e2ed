//! Disk queue of an NBD disk: requests, their commands, and replay over reconnects.
//!
//! ```text
//! Down ── connect ──> Joining ── handshake ──> Up ── journal replay ──> unsent commands
//!  ^                                            │
//!  └───────────── lost (error, stall) ──────────┘
//! ```
//!
//! A request is split into commands of the length that the server accepts. A command without a reply is sent
//! again on the next connection.

// #syscall driver,disk,daemon epoll_create1,epoll_ctl: waiting for a server and for time
// #syscall driver,disk,daemon timerfd_create: how long a server may take

mod connection;
mod memory;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringfence_block::storage::extents::ExtentList;
use ringfence_block::storage::{DiskQueue, Done, Op, Request, check_request};
use ringfence_sys::numbers::bounded;
use rustix::event::epoll;
use rustix::time::{TimerfdClockId, TimerfdFlags};

use super::dial::Dialer;
use super::journal::{Body, Journal, JournalEntry};
use super::link::{Endpoint, NbdLink, OutgoingRequest};
use super::shared::{Durability, SharedDisk};
use crate::protocol::errno_of;
use crate::protocol::numbers::{command, command_flag, error, transmission};
use crate::protocol::replies::ReplyContent;
use memory::{fill, pieces, request_of};

/// Delay before the second connection attempt; doubled for each later one.
const BACKOFF: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Maximum length in bytes of a command without payload.
const RANGE_MAX: u64 = 1 << 30;

enum QueueState {
    /// No connection; time of the next attempt.
    Down(Instant),
    /// A connection was requested from another process or thread; end of the wait.
    Asked(Instant),
    /// Connecting or in the handshake; end of the wait.
    Joining(NbdLink, Instant),
    Up(NbdLink),
}

/// Request that is not complete.
struct Active {
    request: Request,
    /// Number of commands without a reply.
    parts: usize,
    error: Option<i32>,
    /// Set while a flush that replaces FUA is in flight.
    flushing: bool,
    since: Instant,
    /// Extents received, for a block status query that was sent.
    extents: Option<ExtentList>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Request, by number.
    Request(u64),
    /// Replay of the journal.
    Journal,
    /// Flush of the client itself.
    Own,
}

/// Command for the server.
struct QueuedCommand {
    owner: Owner,
    kind: u16,
    flags: u16,
    offset: u64,
    len: u32,
    /// Offset in the request.
    at: u64,
    /// Writes that a flush covers: a number of the journal or of [`Durability`].
    covers: u64,
}

/// Progress of a journal replay.
struct Replay {
    /// Number of journal entries that were sent.
    sent: usize,
    /// Number of commands without a reply.
    waiting: usize,
    failed: bool,
}

/// Disk queue over one connection.
pub(super) struct NbdQueue {
    shared: Arc<SharedDisk>,
    /// Source of connections that this thread cannot make without blocking.
    dialer: Option<Arc<Dialer>>,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Expiry time of the timer.
    armed: Option<Instant>,
    state: QueueState,
    /// Set if epoll watches the socket for writing.
    watches_writing: bool,
    requests: BTreeMap<u64, Active>,
    commands: BTreeMap<u64, QueuedCommand>,
    unsent: VecDeque<u64>,
    next: u64,
    /// Journal, or `None` with several connections or without a journal size.
    journal: Option<Journal>,
    own_flush: bool,
    replay: Option<Replay>,
    last_reply: Instant,
    backoff: Duration,
    /// Set once the loss of the connection was logged.
    loss_logged: bool,
    ready: Vec<Done>,
    ended: Vec<(u64, Result<(), u32>)>,
}

impl NbdQueue {
    pub(super) fn new(shared: Arc<SharedDisk>, first: Option<NbdLink>) -> io::Result<NbdQueue> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let dialer = match &shared.target.endpoint {
            Endpoint::Handed(dialer) => Some(Arc::clone(dialer)),
            Endpoint::Tcp(host) => Some(Dialer::to_host(host.clone(), shared.options.connect)?),
            Endpoint::Unix(_) | Endpoint::UnixBelow(..) => None,
        };
        if let Some(dialer) = &dialer {
            epoll::add(&epoll, dialer, epoll::EventData::new_u64(2), epoll::EventFlags::IN)?;
        }
        let alone = shared.options.connections <= 1
            || !shared.settled.offer.has(transmission::CAN_MULTI_CONN);
        let keeps = alone && shared.options.journal > 0;
        let now = Instant::now();
        let mut queue = NbdQueue {
            journal: keeps.then(|| Journal::new(shared.options.journal)),
            shared,
            dialer,
            epoll,
            timer,
            armed: None,
            state: QueueState::Down(now),
            watches_writing: false,
            requests: BTreeMap::new(),
            commands: BTreeMap::new(),
            unsent: VecDeque::new(),
            next: 1,
            own_flush: false,
            replay: None,
            last_reply: now,
            backoff: BACKOFF,
            loss_logged: false,
            ready: vec![],
            ended: vec![],
        };
        match first {
            Some(link) => {
                queue.watch(&link)?;
                queue.state = QueueState::Up(link);
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

    /// Validates a request and queues its commands, or completes it.
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
            (_, Op::WriteZeroes { allocate }) if geometry.write_zeroes => {
                Ok((command::WRITE_ZEROES, hole_flags(allocate)))
            }
            (_, Op::Extents) if geometry.extents => Ok((command::BLOCK_STATUS, 0)),
            (_, Op::Discard { .. } | Op::WriteZeroes { .. } | Op::Extents) => Err(libc::EOPNOTSUPP),
        };
        match known {
            Ok((kind, flags)) => self.split(request, kind, flags),
            Err(errno) => self.end(request, Err(errno)),
        }
    }

    fn end(&mut self, request: Request, result: Result<(), i32>) {
        self.ready.push(request.done(result));
    }

    /// Queues one command, or several if the server does not accept the length.
    fn split(&mut self, request: Request, kind: u16, flags: u16) {
        let key = self.number();
        let (offset, mut len) = (request.offset, request.len);
        if kind == command::BLOCK_STATUS {
            // The list may end before the range does.
            len = len.min(RANGE_MAX);
        }
        let since = Instant::now();
        let mut active =
            Active { request, parts: 0, error: None, flushing: false, since, extents: None };
        if kind == command::FLUSH {
            active.parts = 1;
            self.queue_command(Owner::Request(key), kind, flags, 0, 0, 0);
        } else {
            let longest = self.longest(kind);
            let mut at = 0;
            while at < len {
                let step = longest.min(len - at);
                let part = bounded(step, u32::MAX);
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
        self.commands
            .insert(cookie, QueuedCommand { owner, kind, flags, offset, len, at, covers: 0 });
        self.unsent.push_back(cookie);
    }

    /// Sends all commands that may be sent now.
    fn pump(&mut self) {
        if !matches!(self.state, QueueState::Up(_)) {
            return;
        }
        if self.replay.is_some() {
            self.replay_batch();
        }
        if self.replay.is_some() {
            return;
        }
        if !self.own_flush && self.journal.as_ref().is_some_and(Journal::is_half_full) {
            self.own_flush = true;
            self.queue_command(Owner::Own, command::FLUSH, 0, 0, 0, 0);
            // The flush precedes the writes that wait for it.
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
        let QueuedCommand { owner, kind, flags, offset, len, at, .. } = *command;
        if let (Owner::Request(key), command::BLOCK_STATUS) = (owner, kind)
            && let Some(active) = self.requests.get_mut(&key)
        {
            let sector = self.shared.geometry.sector_size;
            active.extents = Some(ExtentList::new(len.into(), sector));
        }
        let payload = match (owner, kind) {
            (Owner::Request(key), command::WRITE) => self
                .requests
                .get(&key)
                .map_or(vec![], |active| pieces(&active.request, at, u64::from(len))),
            _ => vec![],
        };
        self.send_now(OutgoingRequest { cookie, kind, flags, offset, len, payload });
    }

    fn send_now(&mut self, sending: OutgoingRequest) {
        let QueueState::Up(link) = &mut self.state else { return };
        if link.open() == 0 {
            // The stall timeout starts with the first open request.
            self.last_reply = Instant::now();
        }
        link.send(sending);
    }

    /// Sends the next batch of the journal once the last batch was acknowledged.
    fn replay_batch(&mut self) {
        let Some(Replay { sent, waiting: 0, failed }) = self.replay else { return };
        let Some(journal) = &mut self.journal else { return };
        let batch = if failed { vec![] } else { journal.next_batch(sent) };
        if batch.is_empty() {
            self.replay = None;
            if failed {
                tracing::error!(
                    "the NBD server does not take again what the one before had acknowledged: the \
                     next flush fails"
                );
                journal.remove_flushed(u64::MAX);
                self.durability().suspect = true;
            }
            return;
        }
        let mut waiting = 0;
        let sent = sent + batch.len();
        for JournalEntry { offset, body, .. } in batch {
            let (kind, flags, len) = match &body {
                Body::Bytes(bytes) => (command::WRITE, 0, bytes.len() as u64),
                Body::Zeros { len, allocate } => {
                    (command::WRITE_ZEROES, hole_flags(*allocate), *len)
                }
            };
            let mut at = 0;
            while at < len {
                let step = self.longest(kind).min(len - at);
                let part = bounded(step, u32::MAX);
                let payload = match (&body, usize::try_from(at), usize::try_from(step)) {
                    (Body::Bytes(bytes), Ok(at), Ok(step)) => bytes.slice(at, step).ok(),
                    _ => None,
                };
                let (cookie, offset) = (self.number(), offset + at);
                let owner = Owner::Journal;
                let command =
                    QueuedCommand { owner, kind, flags, offset, len: part, at: 0, covers: 0 };
                self.commands.insert(cookie, command);
                let payload = payload.into_iter().collect();
                self.send_now(OutgoingRequest { cookie, kind, flags, offset, len: part, payload });
                waiting += 1;
                at += step;
            }
        }
        self.replay = Some(Replay { sent, waiting, failed: false });
    }

    /// Handles the reply of a command.
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
                // On failure the entries are dropped too; the next flush of the guest fails.
                if let Some(journal) = &mut self.journal {
                    journal.remove_flushed(command.covers);
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

    /// Completes a request after its last command.
    fn finish(&mut self, key: u64, covers: u64) {
        let Some(mut active) = self.requests.remove(&key) else { return };
        let mut result = active.error.map_or(Ok(()), Err);
        match active.request.op {
            // A server that cannot tell now: the whole range may have data.
            Op::Extents if result.is_err() => result = Err(libc::EOPNOTSUPP),
            Op::Extents => result = active.store_extents(),
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
            // FUA writes are recorded too: the replay repeats earlier unflushed writes that they overlap, and must
            // repeat the newer ones after them.
            Op::Write { .. } | Op::WriteZeroes { .. } => self.record_write(&active.request),
            Op::Flush => {
                if let Some(journal) = &mut self.journal {
                    journal.remove_flushed(covers);
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

    /// Records an acknowledged write that a flush must cover.
    fn record_write(&mut self, request: &Request) {
        if !self.offers(transmission::SEND_FLUSH) {
            // A server without flushes declares all writes durable.
            return;
        }
        match (&mut self.journal, request.op) {
            (Some(journal), Op::WriteZeroes { allocate }) => {
                journal.record_zeros(request.offset, request.len, allocate);
            }
            (Some(journal), _) => journal.record_write(request),
            (None, Op::Write { fua: true }) => {}
            (None, _) => self.durability().written += 1,
        }
    }

    /// Makes all progress that needs no waiting.
    fn drive(&mut self) {
        self.expire();
        if let QueueState::Down(again) = self.state
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

    /// Sends commands and receives replies.
    fn exchange(&mut self) -> io::Result<()> {
        let NbdQueue { state, commands, requests, ended, last_reply, .. } = self;
        let (QueueState::Joining(link, _) | QueueState::Up(link)) = state else { return Ok(()) };
        let mut replied = false;
        let settled = link.drive(|answer| {
            replied = true;
            match answer {
                ReplyContent::Data { cookie, at, bytes } => {
                    if let Some((request, from)) = request_of(commands, requests, cookie) {
                        fill(request, from + at, Some(bytes), bytes.len() as u64);
                    }
                }
                ReplyContent::Zeros { cookie, at, len } => {
                    if let Some((request, from)) = request_of(commands, requests, cookie) {
                        fill(request, from + at, None, len);
                    }
                }
                ReplyContent::Extent { cookie, len, flags } => {
                    let owner = commands.get(&cookie).map(|command| command.owner);
                    if let Some(Owner::Request(key)) = owner
                        && let Some(active) = requests.get_mut(&key)
                    {
                        active.add_extent(len, flags);
                    }
                }
                ReplyContent::Over { cookie, result } => ended.push((cookie, result)),
            }
        });
        if replied {
            *last_reply = Instant::now();
        }
        let mut leaves = false;
        for (cookie, result) in std::mem::take(&mut self.ended) {
            if result == Err(error::SHUTDOWN) {
                // The server shuts down: its successor will reply.
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

    /// Sends commands without receiving.
    fn push(&mut self) -> io::Result<()> {
        self.pump();
        match &mut self.state {
            QueueState::Up(link) => link.write(),
            _ => Ok(()),
        }
    }
}

/// Returns the flags of a write of zeros.
fn hole_flags(allocate: bool) -> u16 {
    if allocate { command_flag::NO_HOLE } else { 0 }
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
        let down = QueueState::Down(Instant::now());
        if let QueueState::Up(link) = std::mem::replace(&mut self.state, down) {
            link.disconnect();
        }
    }
}
