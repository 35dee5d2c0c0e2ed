//! Event loop that serves all clients of an export.
//!
//! The loop waits for the listener, the disk queue and the clients in epoll. In each round it reads from
//! ready clients, submits their requests to the disk, and queues replies to the completed ones.

// #syscall frontend,daemon epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2: the export waits for its clients
// #syscall frontend,daemon accept4: users of a disk connect

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_block::storage::{Disk, DiskQueue, Done, Geometry, Op, Request, Segment};
use ringfence_memory::{LentSlice, Mapping};
use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::numbers::{bounded, usize_from};
use ringfence_sys::poll::timespec;
use rustix::event::{Timespec, epoll};
use rustix::net::SocketFlags;

use super::ExportOptions;
use super::buffers::{Buffers, Payload};
use super::connection::{DiskRequest, ExportConnection, Interest, ReceivedCommand};
use super::unaligned::{Exclusion, Span, Step, Steps, steps};
use crate::protocol::offer::Export;
use crate::protocol::serve::{ClientRequest, NbdCommand};

/// Maximum number of events per wait.
const EVENTS: usize = 64;

/// Event names that are no clients.
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const DISK: u64 = 2;
const FIRST_CLIENT: u64 = 16;

/// Events of a connection that is closed in both directions: no reply can reach the client.
const GONE: epoll::EventFlags = epoll::EventFlags::HUP.union(epoll::EventFlags::ERR);

/// Maximum number of payload bytes of all clients, beyond the first request of each.
const BYTES_MAX: usize = 128 << 20;

/// Number of zero bytes written at once if the disk cannot zero a range.
const ZEROS: usize = 256 << 10;

/// Maximum number of reads from one client per round.
const READS: usize = 4;

/// Maximum number of clients over the limit that are told so at the same time. Others are disconnected.
pub(super) const REFUSED_MAX: usize = 8;

/// Pause of accepting when there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Request of a client at the disk.
struct Active {
    client: u64,
    request: ClientRequest,
    payload: Option<Payload>,
    /// Sector at an edge of the range that was read last.
    edge: Option<Payload>,
    /// Step at the disk.
    current: Option<Step>,
    /// Steps that follow.
    steps: Steps,
    /// Value of [`Server::changes`] at the start.
    changes: u64,
    /// Set if the request changes the disk.
    writes: bool,
}

/// State of the event loop.
pub(super) struct Server {
    epoll: OwnedFd,
    listener: OwnedFd,
    disk: Arc<dyn Disk>,
    queue: Box<dyn DiskQueue>,
    geometry: Geometry,
    export: Export,
    options: ExportOptions,
    clients: HashMap<u64, ExportConnection>,
    next_client: u64,
    active: HashMap<u64, Active>,
    exclusion: Exclusion,
    /// Number of starts and ends of requests that change the disk.
    changes: u64,
    next_token: u64,
    at_disk: usize,
    /// Requests that wait for room in the disk queue.
    backlog: VecDeque<Request>,
    buffers: Buffers,
    zeros: LentSlice,
    /// Spare segment vectors.
    vectors: Vec<Vec<Segment>>,
    done: Vec<Done>,
    accept_again: Option<Instant>,
    /// Set once a client over the limit was logged.
    limit_logged: bool,
}

impl Server {
    pub(super) fn new(
        listener: OwnedFd,
        stop: &WakeFd,
        (disk, queue): (Arc<dyn Disk>, Box<dyn DiskQueue>),
        geometry: Geometry,
        export: Export,
        options: ExportOptions,
    ) -> io::Result<Server> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let readable = epoll::EventFlags::IN;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), readable)?;
        epoll::add(&epoll, stop, epoll::EventData::new_u64(STOP), readable)?;
        epoll::add(&epoll, queue.wait_fd(), epoll::EventData::new_u64(DISK), readable)?;
        Ok(Server {
            epoll,
            listener,
            disk,
            queue,
            geometry,
            export,
            options,
            clients: HashMap::new(),
            next_client: FIRST_CLIENT,
            active: HashMap::new(),
            exclusion: Exclusion::default(),
            changes: 0,
            next_token: 0,
            at_disk: 0,
            backlog: VecDeque::new(),
            buffers: Buffers::default(),
            zeros: Mapping::private(ZEROS)?.lent(),
            vectors: vec![],
            done: vec![],
            accept_again: None,
            limit_logged: false,
        })
    }

    /// Serves clients until the stop event.
    ///
    /// # Errors
    ///
    /// Returns the error of `epoll_wait`.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let mut active_clients = vec![];
            for event in &events {
                let flags = event.flags;
                match event.data.u64() {
                    STOP => return Ok(()),
                    LISTENER => self.accept(),
                    DISK => {}
                    client if flags.intersects(GONE) => {
                        self.disconnect(client, &io::ErrorKind::UnexpectedEof.into());
                    }
                    client => {
                        self.read_from(client);
                        active_clients.push(client);
                    }
                }
            }
            self.run_round(&mut active_clients);
            self.expire();
        }
    }

    /// Submits received requests and replies to completed ones, until neither is left.
    fn run_round(&mut self, active_clients: &mut Vec<u64>) {
        loop {
            self.submit_backlog();
            self.queue.kick();
            let mut done = std::mem::take(&mut self.done);
            self.queue.reap(&mut done);
            let idle = done.is_empty();
            for done in done.drain(..) {
                active_clients.extend(self.take_done(done));
            }
            self.done = done;
            active_clients.sort_unstable();
            active_clients.dedup();
            for client in active_clients.drain(..) {
                self.serve_client(client);
            }
            if idle && (self.backlog.is_empty() || self.at_disk > 0) {
                return;
            }
        }
    }

    /// Returns the time until the next deadline.
    fn timeout(&self) -> Option<Timespec> {
        let deadlines = self.clients.values().filter_map(|client| client.deadline);
        let next = deadlines.chain(self.accept_again).min()?;
        Some(timespec(next.saturating_duration_since(Instant::now())))
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = match rustix::net::accept_with(&self.listener, flags) {
            Ok(stream) => stream,
            Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM) => {
                // The listener stays readable: without the pause the loop would spin.
                let _ = epoll::delete(&self.epoll, &self.listener);
                self.accept_again = Some(Instant::now() + PAUSE);
                return;
            }
            // The client closed the connection before it was accepted.
            Err(_) => return,
        };
        let Some(mut client) = self.new_client(stream) else { return };
        let id = self.next_client;
        client.interest = Interest { readable: true, writable: false };
        let data = epoll::EventData::new_u64(id);
        if epoll::add(&self.epoll, &client.stream, data, epoll::EventFlags::IN).is_err() {
            return;
        }
        self.next_client += 1;
        self.clients.insert(id, client);
        self.serve_client(id);
    }

    /// Creates the connection of a client, or one that tells it the limit of clients. Returns `None` if many are told
    /// already.
    fn new_client(&mut self, stream: OwnedFd) -> Option<ExportConnection> {
        let refused = self.clients.values().filter(|client| client.is_refused()).count();
        // A client learns the size once, when it connects.
        self.export.offer.bytes = self.disk.geometry().bytes;
        let (export, limit) = (self.export.clone(), self.options.clients_max);
        let deadline = Instant::now() + self.options.handshake;
        if self.clients.len() - refused < limit {
            return Some(ExportConnection::new(stream, export, &self.geometry, deadline));
        }
        let why = format!("{limit} clients use this disk, which is its limit");
        if !std::mem::replace(&mut self.limit_logged, true) {
            tracing::warn!("{why}: another one is refused");
        }
        (refused < REFUSED_MAX)
            .then(|| ExportConnection::refused(stream, export, &self.geometry, deadline, why))
    }

    fn read_from(&mut self, id: u64) {
        for _ in 0..READS {
            let Some(client) = self.clients.get_mut(&id) else { return };
            if !client.wants_to_read() {
                return;
            }
            match client.receive() {
                Ok(received) => {
                    self.take_requests(id);
                    if received == ReceivedCommand::Nothing {
                        return;
                    }
                }
                Err(error) => return self.disconnect(id, &error),
            }
        }
    }

    /// Starts the received requests of a client, within its limits.
    fn take_requests(&mut self, id: u64) {
        loop {
            let all: usize = self.clients.values().map(ExportConnection::held).sum();
            let Some(client) = self.clients.get_mut(&id) else { return };
            if all > BYTES_MAX && client.held() > 0 {
                return;
            }
            match client.next(self.changes, &mut self.buffers) {
                Ok(Some(request)) => self.start(id, request),
                Ok(None) => return,
                Err(error) => return self.disconnect(id, &error),
            }
        }
    }

    /// Sends the replies of a client, then starts requests for which there is room now.
    fn serve_client(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if let Err(error) = client.flush(&mut self.buffers) {
            return self.disconnect(id, &error);
        }
        // Requests that were held back are in the input buffer already.
        self.take_requests(id);
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.is_over() {
            self.remove(id);
            return;
        }
        let interest =
            Interest { readable: client.wants_to_read(), writable: client.wants_to_write() };
        if interest != client.interest {
            client.interest = interest;
            let mut flags = epoll::EventFlags::empty();
            flags.set(epoll::EventFlags::IN, interest.readable);
            flags.set(epoll::EventFlags::OUT, interest.writable);
            let data = epoll::EventData::new_u64(id);
            if let Err(error) = epoll::modify(&self.epoll, &client.stream, data, flags) {
                self.disconnect(id, &error.into());
            }
        }
    }

    fn disconnect(&mut self, id: u64, why: &io::Error) {
        match why.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => tracing::debug!("a client of the disk is gone"),
            _ => tracing::info!("a client of the disk is cut off: {why}"),
        }
        self.remove(id);
    }

    /// Removes a client. Its requests at the disk complete; their replies are dropped.
    fn remove(&mut self, id: u64) {
        if let Some(client) = self.clients.remove(&id) {
            let _ = epoll::delete(&self.epoll, &client.stream);
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            let data = epoll::EventData::new_u64(LISTENER);
            let _ = epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN);
        }
        let late =
            |client: &ExportConnection| client.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<u64> =
            self.clients.iter().filter(|(_, client)| late(client)).map(|(id, _)| *id).collect();
        for id in late {
            self.disconnect(id, &io::ErrorKind::TimedOut.into());
        }
    }

    fn start(&mut self, client: u64, wanted: DiskRequest) {
        let DiskRequest { request, command, payload } = wanted;
        let Geometry { sector_size, write_zeroes, .. } = self.geometry;
        let steps = steps(command, Span::of(&request), sector_size, write_zeroes);
        let reads_edges = steps.iter().any(|step| matches!(step, Step::ReadEdge(_)));
        let sector = Span { offset: 0, len: u64::from(sector_size) };
        let edge = match reads_edges.then(|| self.buffers.take(sector, sector_size)).transpose() {
            Ok(edge) => edge,
            Err(_) => {
                if let Some(client) = self.clients.get_mut(&client) {
                    let error = Err(libc::ENOMEM);
                    client.answer(&request, payload, error, self.changes, &mut self.buffers);
                }
                return;
            }
        };
        let token = self.next_token;
        self.next_token += 1;
        let may_start = self.exclusion.admit(token, &steps);
        let writes = !matches!(
            command,
            NbdCommand::Read | NbdCommand::Flush | NbdCommand::BlockStatus { .. }
        );
        self.changes += u64::from(writes);
        let changes = self.changes;
        let active =
            Active { client, request, payload, edge, current: None, steps, changes, writes };
        if may_start {
            self.advance(token, active);
        } else {
            self.active.insert(token, active);
        }
    }

    /// Queues the next step of a request for the disk. Queues the reply instead if no step is left, and returns
    /// the client.
    fn advance(&mut self, token: u64, mut active: Active) -> Option<u64> {
        let Some(step) = active.steps.pop() else { return Some(self.finish(active, Ok(()))) };
        active.current = Some(step);
        let mut segments = self.vectors.pop().unwrap_or_default();
        let with = |payload: &Option<Payload>| {
            payload.as_ref().map(|payload| Segment::from(payload.sectors.clone()))
        };
        let (op, span) = match step {
            Step::Flush => (Op::Flush, Span { offset: 0, len: 0 }),
            Step::Range(op, span) => (op, span),
            Step::Payload(op, span) => {
                segments.extend(with(&active.payload));
                (op, span)
            }
            Step::ReadEdge(span) => {
                segments.extend(with(&active.edge));
                (Op::Read, span)
            }
            Step::WriteEdge(span) => {
                segments.extend(with(&active.edge));
                (Op::Write { fua: false }, span)
            }
            Step::Zeros(span) => {
                let now = Span { len: span.len.min(ZEROS as u64), ..span };
                if now.len < span.len {
                    let rest = Span { offset: now.end(), len: span.len - now.len };
                    active.steps.push(Step::Zeros(rest));
                }
                let len = usize_from(now.len);
                segments.extend(self.zeros.slice(0, len).map(Segment::from));
                (Op::Write { fua: false }, now)
            }
        };
        self.active.insert(token, active);
        self.backlog.push_back(Request { token, op, offset: span.offset, len: span.len, segments });
        None
    }

    fn submit_backlog(&mut self) {
        while self.at_disk < self.options.depth as usize {
            let Some(request) = self.backlog.pop_front() else { return };
            self.at_disk += 1;
            self.queue.submit(request);
        }
    }

    /// Handles a completion of the disk. Returns the client that has a reply to send.
    fn take_done(&mut self, done: Done) -> Option<u64> {
        let Done { token, result, mut segments } = done;
        self.at_disk = self.at_disk.saturating_sub(1);
        segments.clear();
        self.vectors.push(segments);
        let active = self.active.remove(&token)?;
        let result = result.and_then(|()| merge_edge(&active, &self.zeros));
        if result.is_ok() && !active.steps.is_empty() {
            return self.advance(token, active);
        }
        for token in self.exclusion.finish(token) {
            if let Some(active) = self.active.remove(&token) {
                self.advance(token, active);
            }
        }
        Some(self.finish(active, result))
    }

    /// Queues the reply of a request and returns its client.
    fn finish(&mut self, active: Active, result: Result<(), i32>) -> u64 {
        let Active { client: id, request, payload, edge, changes, writes, .. } = active;
        self.changes += u64::from(writes);
        edge.into_iter().for_each(|edge| self.buffers.give_back(edge));
        match self.clients.get_mut(&id) {
            Some(client) => {
                client.answer(&request, payload, result, changes, &mut self.buffers);
            }
            None => payload.into_iter().for_each(|payload| self.buffers.give_back(payload)),
        }
        id
    }
}

/// Completes data with the sector at its edge, if that was read now: a write with the bytes around its range,
/// and the sector itself with zeros inside the range of a write of zeros.
fn merge_edge(active: &Active, zeros: &LentSlice) -> Result<(), i32> {
    let (Some(Step::ReadEdge(sector)), Some(edge)) = (active.current, &active.edge) else {
        return Ok(());
    };
    let range = Span::of(&active.request);
    let within = |base: u64, span: Span| {
        Some((
            usize::try_from(span.offset.checked_sub(base)?).ok()?,
            usize::try_from(span.len).ok()?,
        ))
    };
    let copy = |to: &LentSlice, base: u64, from: (&LentSlice, u64), span: Span| {
        let (at, len) = within(base, span)?;
        let (source, _) = within(from.1, span)?;
        to.copy_from_lent(at, from.0, source, len).ok()
    };
    let copied = match &active.payload {
        None => {
            let span = range.common(sector);
            copy(&edge.sectors, sector.offset, (zeros, span.offset), span)
        }
        Some(payload) => {
            let base = range.widened(bounded(sector.len, u32::MAX)).offset;
            let mut around = sector.around(range).into_iter().filter(|span| span.len > 0);
            around.try_for_each(|span| {
                copy(&payload.sectors, base, (&edge.sectors, sector.offset), span)
            })
        }
    };
    copied.ok_or(libc::EIO)
}
