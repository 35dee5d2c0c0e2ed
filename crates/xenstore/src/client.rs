//! The xenstore client: requests and answers over one stream, and watch events.
//!
//! For a frontend the server belongs to the other side, so nothing that it sends is trusted:
//!
//! * A message longer than the protocol allows, a reply to nothing that was asked, a reply of the
//!   wrong type or a malformed one breaks the connection; it is never used again.
//! * Every wait has an end ([`StoreClient::set_timeout`]), however slowly bytes trickle in. A reply
//!   that comes too late is recognised by its id and thrown away.
//! * Events wait in bounded memory ([`WatchEvent`] says what is merged), and names in listings are
//!   checked before anybody builds a path with them.
//!
//! A client belongs to one thread at a time. It waits only inside a request.

// #syscall driver,frontend,daemon ppoll: waiting for the store

mod access;
mod error;
mod events;

pub use access::StoreAccess;
pub use error::StoreError;
pub use events::WatchEvent;

use super::transport::{Moved, Stream};
use access::parse_path;
use events::{EventQueue, OwnWatch};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    self as wire, ErrorName, Header, MessageReader, MessageType, Path, Reply, ReplyError, Request,
    WatchPath, parse_transaction_id,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a request waits for its answer unless [`StoreClient::set_timeout`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Above this many waiting events they are merged by watch.
const EVENTS_CROWDED: usize = 256;

/// Most watches of one client.
const WATCHES_MAX: usize = 1024;

/// How many late replies may be outstanding before the connection counts as broken.
const LATE_MAX: usize = 16;

/// How often a transaction that meets a conflict is tried.
const TRANSACTION_ATTEMPTS: u32 = 32;

/// Longest pause before the next try.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// A connection to the store.
#[derive(Debug)]
pub struct StoreClient {
    stream: Stream,
    reader: MessageReader,
    timeout: Duration,
    last_id: u32,
    /// Requests that nobody waits for any more, whose replies may still come.
    late: VecDeque<u32>,
    events: EventQueue,
    broken: bool,
}

/// What the next message was, if there was one.
enum Sorted {
    Nothing,
    /// An event, or a late reply.
    Aside,
    /// The reply that is waited for.
    Payload(Result<Vec<u8>, ErrorName>),
}

impl StoreClient {
    /// A client over `fd`: a stream socket, or `/dev/xen/xenbus`.
    ///
    /// # Errors
    /// [`StoreError::System`].
    pub fn new(fd: OwnedFd) -> Result<StoreClient, StoreError> {
        Ok(StoreClient {
            stream: Stream::new(fd)?,
            reader: MessageReader::new(),
            timeout: TIMEOUT,
            last_id: 0,
            late: VecDeque::new(),
            events: EventQueue::new(EVENTS_CROWDED),
            broken: false,
        })
    }

    /// How long a request waits for its answer from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The descriptor to poll for events: when it is readable, call
    /// [`next_event`](Self::next_event) until it has none. Events may wait already that a request
    /// came across; so do that before polling as well.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The next watch event, without waiting. Reads at most once; `None` when nothing came.
    ///
    /// # Errors
    /// When the connection breaks.
    pub fn next_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        if let Some(event) = self.events.pop() {
            return Ok(Some(event));
        }
        self.guarded(|client| {
            client.sort_buffered()?;
            if client.events.is_empty() {
                client.fill()?;
                client.sort_buffered()?;
            }
            Ok(client.events.pop())
        })
    }

    /// The next watch event, waiting for it at most `timeout`.
    ///
    /// # Errors
    /// When the connection breaks.
    pub fn wait_event(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, StoreError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.next_event()? {
                return Ok(Some(event));
            }
            if !self.guarded(|client| client.await_stream(PollFlags::IN, deadline))? {
                return Ok(None);
            }
        }
    }

    /// Events that belonged to no watch, and were dropped.
    pub fn foreign_events(&self) -> u64 {
        self.events.foreign()
    }

    /// Watches `path` (or `@introduceDomain`, `@releaseDomain`) and all below it. Fires once at
    /// once.
    ///
    /// # Errors
    /// `EEXIST` when this client has that watch; [`StoreError::TooManyWatches`]; as
    /// [`StoreAccess`].
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let watch_path = parse_watch_path(path)?;
        let watch = OwnWatch { path: path.to_owned(), token: token.to_owned() };
        let kind = MessageType::Watch;
        if self.events.watches().contains(&watch) {
            return Err(StoreError::Refused { kind, path: watch.path, error: ErrorName::Exists });
        }
        if self.events.watches().len() >= WATCHES_MAX {
            return Err(StoreError::TooManyWatches { limit: WATCHES_MAX });
        }
        // Known before it is set: its first event may come ahead of the reply.
        self.events.add(watch);
        let token_bytes = token.as_bytes();
        let request = Request::Watch { path: watch_path, token: token_bytes, depth: None };
        let outcome = self.request(&request);
        if outcome.is_err() {
            self.events.remove(path, token);
        }
        outcome.map(drop)
    }

    /// Undoes [`watch`](Self::watch); events of it that wait are dropped.
    ///
    /// # Errors
    /// `ENOENT` when there is no such watch; as [`StoreAccess`].
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let watch_path = parse_watch_path(path)?;
        self.request(&Request::Unwatch { path: watch_path, token: token.as_bytes() })?;
        self.events.remove(path, token);
        Ok(())
    }

    /// The home of a domain.
    ///
    /// # Errors
    /// As [`StoreAccess`]; [`StoreError::Reply`] if the answer is no absolute path.
    pub fn domain_path(&mut self, domain: DomId) -> Result<String, StoreError> {
        let payload = self.request(&Request::GetDomainPath { domain })?;
        let text = payload.strip_suffix(b"\0").ok_or(ReplyError::Unterminated)?;
        let path = Path::parse(text).map_err(ReplyError::Path)?;
        if !path.is_absolute() {
            return Err(ReplyError::Path(wire::PathError::Empty).into());
        }
        Ok(path.as_str().to_owned())
    }

    /// Whether the store knows of a domain.
    ///
    /// # Errors
    /// As [`StoreAccess`].
    pub fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        Ok(self.request(&Request::IsDomainIntroduced { domain })? == b"T\0")
    }

    /// Does `work` in a transaction: all of it happens at once, or nothing does. After a conflict
    /// it is done again, so it must not have effects outside the store; when it fails, nothing
    /// happens and its error is returned.
    ///
    /// # Errors
    /// What `work` fails with; [`StoreError::Conflicts`]; as [`StoreAccess`].
    pub fn transaction<T>(
        &mut self,
        mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        for attempt in 0..TRANSACTION_ATTEMPTS {
            // Whoever interferes gets a moment to finish.
            std::thread::sleep(Duration::from_millis(attempt.into()).min(PAUSE_MAX));
            let started = self.request(&Request::TransactionStart)?;
            let id = self.guarded(|_| match parse_transaction_id(&started)? {
                0 => Err(StoreError::NoTransaction),
                id => Ok(id),
            })?;
            let mut transaction = Transaction { client: self, id };
            let outcome = work(&mut transaction);
            let commit = outcome.is_ok();
            let ended = transaction.request(&Request::TransactionEnd { commit });
            match (outcome, ended) {
                (Ok(value), Ok(_)) => return Ok(value),
                (Ok(_), Err(error)) if error.refusal() == Some(ErrorName::Again) => {}
                (Ok(_), Err(error)) | (Err(error), _) => return Err(error),
            }
        }
        Err(StoreError::Conflicts { attempts: TRANSACTION_ATTEMPTS })
    }

    /// Runs `step`, and remembers if it left the connection of no use.
    fn guarded<T>(
        &mut self,
        step: impl FnOnce(&mut StoreClient) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.broken {
            return Err(StoreError::Broken);
        }
        let outcome = step(self);
        if outcome.as_ref().is_err_and(StoreError::breaks) {
            self.broken = true;
        }
        outcome
    }

    fn request_in(
        &mut self,
        transaction: u32,
        request: &Request<'_>,
    ) -> Result<Vec<u8>, StoreError> {
        // 0 is what events have.
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
        let mut message = Vec::new();
        request.emit(self.last_id, transaction, &mut message)?;
        let kind = request.kind();
        let answer = self.guarded(|client| client.exchange(kind, &message))?;
        answer.map_err(|error| StoreError::Refused { kind, path: path_of(request), error })
    }

    /// Sends `message`, whose id is the last one given out, and waits for its answer.
    fn exchange(
        &mut self,
        kind: MessageType,
        message: &[u8],
    ) -> Result<Result<Vec<u8>, ErrorName>, StoreError> {
        let deadline = Instant::now().checked_add(self.timeout);
        let mut unsent = message;
        loop {
            let expected = unsent.is_empty().then_some((self.last_id, kind));
            loop {
                match self.sort_one(expected)? {
                    Sorted::Payload(answer) => return Ok(answer),
                    Sorted::Aside => {}
                    Sorted::Nothing => break,
                }
            }
            // While it cannot be sent, what comes is still read: the server may be waiting for that.
            if !unsent.is_empty() {
                unsent = self.send(unsent)?;
            }
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, !unsent.is_empty());
            if !self.await_stream(wanted, deadline)? {
                return Err(self.timed_out(kind, message.len(), unsent.len()));
            }
            self.fill()?;
        }
    }

    fn send<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], StoreError> {
        match self.stream.send(bytes)? {
            Moved::Bytes(sent) => Ok(&bytes[sent..]),
            Moved::NotNow => Ok(bytes),
            Moved::Closed => Err(StoreError::Closed),
        }
    }

    /// Keeps account of a request that was given up.
    fn timed_out(&mut self, kind: MessageType, len: usize, unsent: usize) -> StoreError {
        if unsent == 0 && self.late.len() < LATE_MAX {
            self.late.push_back(self.last_id);
        } else if unsent != len {
            // Half a request is out, or too many replies are missing.
            self.broken = true;
        }
        StoreError::Timeout { kind, timeout: self.timeout }
    }

    /// Waits for the stream until `deadline` (`None`: too far off to tell); whether it is ready.
    /// Past the deadline it never is, so that a server which always has something to say cannot
    /// hold a request up for ever.
    fn await_stream(
        &self,
        wanted: PollFlags,
        deadline: Option<Instant>,
    ) -> Result<bool, StoreError> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut ready = [PollFd::new(&self.stream, wanted)];
        match poll(&mut ready, left.as_ref()) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Reads once, what is there.
    fn fill(&mut self) -> Result<(), StoreError> {
        match self.stream.receive(self.reader.spare())? {
            Moved::Bytes(len) => self.reader.commit(len),
            Moved::NotNow => {}
            Moved::Closed => return Err(StoreError::Closed),
        }
        Ok(())
    }

    /// Sorts what was read while no reply is waited for.
    fn sort_buffered(&mut self) -> Result<(), StoreError> {
        while !matches!(self.sort_one(None)?, Sorted::Nothing) {}
        Ok(())
    }

    /// Takes one message out of the buffer. `expected` is the id and type of the reply that is
    /// waited for.
    fn sort_one(&mut self, expected: Option<(u32, MessageType)>) -> Result<Sorted, StoreError> {
        let Some((header, payload)) = self.reader.next()? else {
            return Ok(Sorted::Nothing);
        };
        if header.kind == MessageType::WatchEvent {
            let event = wire::WatchEvent::parse(payload)?;
            self.events.push(event.path, event.token);
            return Ok(Sorted::Aside);
        }
        let Header { req_id, .. } = header;
        if let Some((_, kind)) = expected.filter(|(id, _)| *id == req_id) {
            let answer = match Reply::parse(kind, &header, payload)? {
                Reply::Success(payload) => Ok(payload.to_vec()),
                Reply::Failure(error) => Err(error),
            };
            return Ok(Sorted::Payload(answer));
        }
        match self.late.iter().position(|late| *late == req_id) {
            Some(place) => {
                self.late.remove(place);
                Ok(Sorted::Aside)
            }
            None => Err(StoreError::UnexpectedReply { found: req_id }),
        }
    }
}

impl StoreAccess for StoreClient {
    fn request(&mut self, request: &Request<'_>) -> Result<Vec<u8>, StoreError> {
        self.request_in(0, request)
    }
}

impl AsFd for StoreClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// A transaction that [`StoreClient::transaction`] opened. What is written is seen by nobody else
/// until it ends.
#[derive(Debug)]
pub struct Transaction<'a> {
    client: &'a mut StoreClient,
    id: u32,
}

impl StoreAccess for Transaction<'_> {
    fn request(&mut self, request: &Request<'_>) -> Result<Vec<u8>, StoreError> {
        self.client.request_in(self.id, request)
    }
}

fn parse_watch_path(path: &str) -> Result<WatchPath<'_>, StoreError> {
    match WatchPath::parse(path.as_bytes()) {
        Ok(path) => Ok(path),
        Err(_) => parse_path(path).map(WatchPath::Node),
    }
}

/// The path that a request is about, for messages.
fn path_of(request: &Request<'_>) -> String {
    match request {
        Request::Directory { path }
        | Request::DirectoryPart { path, .. }
        | Request::Read { path }
        | Request::GetPerms { path }
        | Request::Write { path, .. }
        | Request::Mkdir { path }
        | Request::Rm { path }
        | Request::SetPerms { path, .. } => path.as_str().to_owned(),
        Request::Watch { path, .. } | Request::Unwatch { path, .. } => path.as_str().to_owned(),
        _ => String::new(),
    }
}
