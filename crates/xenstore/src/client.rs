//! Xenstore client: requests, replies and watch events over one stream.
//!
//! A client belongs to one thread at a time. It blocks only inside a request or
//! [`StoreClient::wait_event`]. For a frontend the server belongs to the other side, so the client
//! validates everything that it receives:
//!
//! * A message longer than the protocol allows, a reply to no open request, a reply of the wrong type
//!   or a malformed reply breaks the connection. A broken connection is never used again.
//! * Every wait has a time limit ([`StoreClient::set_timeout`]), however slowly bytes arrive. A late
//!   reply is recognised by its id and discarded.
//! * Waiting events take bounded memory; [`WatchEvent`] describes the merging. Names in listings are
//!   validated before a caller can build paths from them.

// #syscall driver,frontend,card,daemon ppoll: waiting for the store

mod access;
mod error;
mod events;

pub use access::StoreAccess;
pub use error::StoreError;
pub use events::WatchEvent;

use super::transport::{Stream, Transfer};
use access::parse_path;
use events::{EventQueue, OwnWatch};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    self as wire, ErrorName, Header, MessageReader, MessageType, Path, Reply, ReplyError,
    StoreRequest, WatchPath, parse_transaction_id,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Default time limit of a request, see [`StoreClient::set_timeout`].
const TIMEOUT: Duration = Duration::from_secs(30);

/// Number of waiting events from which on events are merged by watch.
const EVENTS_MERGE_FROM: usize = 256;

const WATCHES_MAX: usize = 1024;

/// Maximum number of outstanding late replies. One more late reply breaks the connection.
const LATE_MAX: usize = 16;

/// Maximum number of attempts of a transaction that meets conflicts.
const TRANSACTION_ATTEMPTS: u32 = 32;

/// Maximum pause between two attempts of a transaction.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Client end of a connection to the store.
#[derive(Debug)]
pub struct StoreClient {
    stream: Stream,
    reader: MessageReader,
    timeout: Duration,
    last_id: u32,
    /// Ids of requests that timed out and whose replies may still arrive.
    late: VecDeque<u32>,
    events: EventQueue,
    broken: bool,
}

/// Outcome of reading one message from the buffer.
enum Incoming {
    None,
    /// The message was an event, which is queued now, or a late reply.
    Other,
    /// The expected reply arrived.
    Reply(Result<Vec<u8>, ErrorName>),
}

impl StoreClient {
    /// Creates a client over `fd`: a stream socket, or `/dev/xen/xenbus`.
    ///
    /// # Errors
    /// Returns [`StoreError::System`] if `fd` cannot be prepared.
    pub fn new(fd: OwnedFd) -> Result<StoreClient, StoreError> {
        Ok(StoreClient {
            stream: Stream::new(fd)?,
            reader: MessageReader::new(),
            timeout: TIMEOUT,
            last_id: 0,
            late: VecDeque::new(),
            events: EventQueue::new(EVENTS_MERGE_FROM),
            broken: false,
        })
    }

    /// Sets the time limit of all following requests.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the descriptor to poll for events. When it is readable, call
    /// [`next_event`](Self::next_event) until it returns `None`. Do so before polling too, because a
    /// request may have queued events.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the next watch event without blocking, or `None`. Reads at most once from the stream.
    ///
    /// # Errors
    /// Returns the error that broke the connection, and [`StoreError::Broken`] afterwards.
    pub fn next_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        if let Some(event) = self.events.pop() {
            return Ok(Some(event));
        }
        self.guarded(|client| {
            client.receive_buffered()?;
            if client.events.is_empty() {
                client.fill()?;
                client.receive_buffered()?;
            }
            Ok(client.events.pop())
        })
    }

    /// Blocks until the next watch event, for at most `timeout`. Returns `None` after that time.
    ///
    /// # Errors
    /// Returns the errors of [`next_event`](Self::next_event).
    pub fn wait_event(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, StoreError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.next_event()? {
                return Ok(Some(event));
            }
            if !self.guarded(|client| client.wait_stream(PollFlags::IN, deadline))? {
                return Ok(None);
            }
        }
    }

    /// Returns the number of events that matched no watch and were dropped.
    pub fn foreign_events(&self) -> u64 {
        self.events.foreign()
    }

    /// Sets a watch on `path` (or `@introduceDomain`, `@releaseDomain`) and all nodes below it. The
    /// first event follows at once.
    ///
    /// # Errors
    /// Returns `EEXIST` if this client has that watch, [`StoreError::TooManyWatches`] above the limit,
    /// and the errors of [`StoreAccess`].
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
        // The first event may arrive before the reply, so the watch is added before it is requested.
        self.events.add(watch);
        let token_bytes = token.as_bytes();
        let request = StoreRequest::Watch { path: watch_path, token: token_bytes, depth: None };
        let outcome = self.request(&request);
        if outcome.is_err() {
            self.events.remove(path, token);
        }
        outcome.map(drop)
    }

    /// Removes a watch that [`watch`](Self::watch) set, with its waiting events.
    ///
    /// # Errors
    /// Returns `ENOENT` without such a watch, and the errors of [`StoreAccess`].
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let watch_path = parse_watch_path(path)?;
        self.request(&StoreRequest::Unwatch { path: watch_path, token: token.as_bytes() })?;
        self.events.remove(path, token);
        Ok(())
    }

    /// Returns the home path of a domain.
    ///
    /// # Errors
    /// Returns [`StoreError::Reply`] if the reply is no absolute path, and the errors of
    /// [`StoreAccess`].
    pub fn domain_path(&mut self, domain: DomId) -> Result<String, StoreError> {
        let payload = self.request(&StoreRequest::GetDomainPath { domain })?;
        let text = payload.strip_suffix(b"\0").ok_or(ReplyError::Unterminated)?;
        let path = Path::parse(text).map_err(ReplyError::Path)?;
        if !path.is_absolute() {
            return Err(ReplyError::Path(wire::PathError::Empty).into());
        }
        Ok(path.as_str().to_owned())
    }

    /// Returns `true` if the domain is introduced to the store.
    ///
    /// # Errors
    /// Returns the errors of [`StoreAccess`].
    pub fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        Ok(self.request(&StoreRequest::IsDomainIntroduced { domain })? == b"T\0")
    }

    /// Runs `work` in a transaction and commits it. After a conflict `work` runs again, so it must have
    /// no effects outside the store. If `work` fails, the transaction is aborted.
    ///
    /// # Errors
    /// Returns the error of `work`, [`StoreError::Conflicts`] after too many attempts, and the errors
    /// of [`StoreAccess`].
    pub fn transaction<T>(
        &mut self,
        mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        for attempt in 0..TRANSACTION_ATTEMPTS {
            // The pause grows with each attempt, to let the conflicting writer finish.
            std::thread::sleep(Duration::from_millis(attempt.into()).min(PAUSE_MAX));
            let started = self.request(&StoreRequest::TransactionStart)?;
            let id = self.guarded(|_| match parse_transaction_id(&started)? {
                0 => Err(StoreError::NoTransaction),
                id => Ok(id),
            })?;
            let mut transaction = Transaction { client: self, id };
            let outcome = work(&mut transaction);
            let commit = outcome.is_ok();
            let ended = transaction.request(&StoreRequest::TransactionEnd { commit });
            match (outcome, ended) {
                (Ok(value), Ok(_)) => return Ok(value),
                (Ok(_), Err(error)) if error.refusal() == Some(ErrorName::Again) => {}
                (Ok(_), Err(error)) | (Err(error), _) => return Err(error),
            }
        }
        Err(StoreError::Conflicts { attempts: TRANSACTION_ATTEMPTS })
    }

    /// Runs `step`, and marks the connection as broken after an error that breaks it.
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
        request: &StoreRequest<'_>,
    ) -> Result<Vec<u8>, StoreError> {
        // Events have id 0.
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
        let mut message = Vec::new();
        request.emit(self.last_id, transaction, &mut message)?;
        let kind = request.kind();
        let answer = self.guarded(|client| client.exchange(kind, &message))?;
        answer.map_err(|error| StoreError::Refused { kind, path: path_of(request), error })
    }

    /// Sends `message`, whose id is `last_id`, and waits for its reply.
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
                match self.receive_one(expected)? {
                    Incoming::Reply(answer) => return Ok(answer),
                    Incoming::Other => {}
                    Incoming::None => break,
                }
            }
            // Incoming messages are read while the request cannot be sent, because the server may wait for that.
            if !unsent.is_empty() {
                unsent = self.send(unsent)?;
            }
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, !unsent.is_empty());
            if !self.wait_stream(wanted, deadline)? {
                return Err(self.record_timeout(kind, message.len(), unsent.len()));
            }
            self.fill()?;
        }
    }

    fn send<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], StoreError> {
        match self.stream.send(bytes)? {
            Transfer::Bytes(sent) => Ok(&bytes[sent..]),
            Transfer::WouldBlock => Ok(bytes),
            Transfer::Closed => Err(StoreError::Closed),
        }
    }

    /// Records a request that timed out, and returns its error.
    fn record_timeout(&mut self, kind: MessageType, len: usize, unsent: usize) -> StoreError {
        if unsent == 0 && self.late.len() < LATE_MAX {
            self.late.push_back(self.last_id);
        } else if unsent != len {
            // The request was sent in part, or too many replies are outstanding.
            self.broken = true;
        }
        StoreError::Timeout { kind, timeout: self.timeout }
    }

    /// Waits for the stream until `deadline` and returns `true` if it is ready. `None` stands for a
    /// deadline beyond the clock's range. Returns `false` past the deadline even if the stream is ready,
    /// so that a server with a constant flow of messages cannot delay a request without limit.
    fn wait_stream(
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

    /// Reads once from the stream into the buffer.
    fn fill(&mut self) -> Result<(), StoreError> {
        match self.stream.receive(self.reader.spare())? {
            Transfer::Bytes(len) => self.reader.commit(len),
            Transfer::WouldBlock => {}
            Transfer::Closed => return Err(StoreError::Closed),
        }
        Ok(())
    }

    /// Processes all buffered messages while no reply is expected.
    fn receive_buffered(&mut self) -> Result<(), StoreError> {
        while !matches!(self.receive_one(None)?, Incoming::None) {}
        Ok(())
    }

    /// Processes one buffered message. `expected` is the id and type of the reply that the caller waits
    /// for.
    fn receive_one(
        &mut self,
        expected: Option<(u32, MessageType)>,
    ) -> Result<Incoming, StoreError> {
        let Some((header, payload)) = self.reader.next()? else {
            return Ok(Incoming::None);
        };
        if header.kind == MessageType::WatchEvent {
            let event = wire::WatchEvent::parse(payload)?;
            self.events.push(event.path, event.token);
            return Ok(Incoming::Other);
        }
        let Header { req_id, .. } = header;
        if let Some((_, kind)) = expected.filter(|(id, _)| *id == req_id) {
            let answer = match Reply::parse(kind, &header, payload)? {
                Reply::Success(payload) => Ok(payload.to_vec()),
                Reply::Failure(error) => Err(error),
            };
            return Ok(Incoming::Reply(answer));
        }
        match self.late.iter().position(|late| *late == req_id) {
            Some(index) => {
                self.late.remove(index);
                Ok(Incoming::Other)
            }
            None => Err(StoreError::UnexpectedReply { found: req_id }),
        }
    }
}

impl StoreAccess for StoreClient {
    fn request(&mut self, request: &StoreRequest<'_>) -> Result<Vec<u8>, StoreError> {
        self.request_in(0, request)
    }
}

impl AsFd for StoreClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// Transaction that [`StoreClient::transaction`] opened. Other clients see its writes after the commit.
#[derive(Debug)]
pub struct Transaction<'a> {
    client: &'a mut StoreClient,
    id: u32,
}

impl StoreAccess for Transaction<'_> {
    fn request(&mut self, request: &StoreRequest<'_>) -> Result<Vec<u8>, StoreError> {
        self.client.request_in(self.id, request)
    }
}

fn parse_watch_path(path: &str) -> Result<WatchPath<'_>, StoreError> {
    match WatchPath::parse(path.as_bytes()) {
        Ok(path) => Ok(path),
        Err(_) => parse_path(path).map(WatchPath::Node),
    }
}

/// Returns the path in a request, for error messages.
fn path_of(request: &StoreRequest<'_>) -> String {
    match request {
        StoreRequest::Directory { path }
        | StoreRequest::DirectoryPart { path, .. }
        | StoreRequest::Read { path }
        | StoreRequest::GetPerms { path }
        | StoreRequest::Write { path, .. }
        | StoreRequest::Mkdir { path }
        | StoreRequest::Rm { path }
        | StoreRequest::SetPerms { path, .. } => path.as_str().to_owned(),
        StoreRequest::Watch { path, .. } | StoreRequest::Unwatch { path, .. } => {
            path.as_str().to_owned()
        }
        _ => String::new(),
    }
}
