//! The loop that serves all clients of a disk.

// #syscall frontend epoll_create1,epoll_ctl,epoll_pwait,epoll_pwait2: the export waits for its clients
// #syscall frontend accept4: users of a disk connect

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringfence_memory::{LentSlice, Mapping};
use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::poll::timespec;
use rustix::event::{Timespec, epoll};
use rustix::net::SocketFlags;

use super::ExportOptions;
use super::buffers::{Buffers, Payload};
use super::connection::{Connection, Received, Wanted};
use crate::protocol::offer::Export;
use crate::protocol::serve::{ClientRequest, Command};
use ringfence_block::storage::{DiskQueue, Done, Geometry, Op, Request, Segment};

/// Events taken at once.
const EVENTS: usize = 64;

/// What is not a client: names of events.
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const DISK: u64 = 2;
const FIRST_CLIENT: u64 = 16;

/// The other side is closed in both directions: nobody hears an answer any more.
const GONE: epoll::EventFlags = epoll::EventFlags::HUP.union(epoll::EventFlags::ERR);

/// Bytes of payloads of all clients, beyond the first request of each.
const BYTES_MAX: usize = 128 << 20;

/// Bytes of zeros written at once where a disk cannot zero a range.
const ZEROS: usize = 256 << 10;

/// Reads from one client before the others have their turn.
const READS: usize = 4;

/// How long nobody is accepted when there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// A request of a client, at the disk.
struct Active {
    client: u64,
    request: ClientRequest,
    payload: Option<Payload>,
    /// Bytes still to be zeroed by writing.
    zeros_left: u64,
    /// A flush comes last.
    then_flush: bool,
}

/// The loop.
pub(super) struct Server {
    epoll: OwnedFd,
    listener: OwnedFd,
    queue: Box<dyn DiskQueue>,
    geometry: Geometry,
    export: Export,
    options: ExportOptions,
    clients: HashMap<u64, Connection>,
    next_client: u64,
    active: HashMap<u64, Active>,
    next_token: u64,
    at_disk: usize,
    /// For the disk, when it has room.
    backlog: VecDeque<Request>,
    buffers: Buffers,
    zeros: LentSlice,
    /// Vectors to be used again.
    vectors: Vec<Vec<Segment>>,
    done: Vec<Done>,
    accept_again: Option<Instant>,
}

impl Server {
    pub(super) fn new(
        listener: OwnedFd,
        stop: &WakeFd,
        queue: Box<dyn DiskQueue>,
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
            queue,
            geometry,
            export,
            options,
            clients: HashMap::new(),
            next_client: FIRST_CLIENT,
            active: HashMap::new(),
            next_token: 0,
            at_disk: 0,
            backlog: VecDeque::new(),
            buffers: Buffers::default(),
            zeros: Mapping::private(ZEROS)?.lent(),
            vectors: vec![],
            done: vec![],
            accept_again: None,
        })
    }

    /// Serves, until it is told to stop.
    ///
    /// # Errors
    ///
    /// When events cannot be waited for.
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
            let mut touched = vec![];
            for event in &events {
                let flags = event.flags;
                match event.data.u64() {
                    STOP => return Ok(()),
                    LISTENER => self.accept(),
                    DISK => {}
                    client if flags.intersects(GONE) => {
                        self.lose(client, &io::ErrorKind::UnexpectedEof.into());
                    }
                    client => {
                        self.read_from(client);
                        touched.push(client);
                    }
                }
            }
            self.turn(&mut touched);
            self.expire();
        }
    }

    /// Starts what came in, answers what is done, until neither is left.
    fn turn(&mut self, touched: &mut Vec<u64>) {
        loop {
            self.submit_backlog();
            self.queue.kick();
            let mut done = std::mem::take(&mut self.done);
            self.queue.reap(&mut done);
            let idle = done.is_empty();
            for done in done.drain(..) {
                touched.extend(self.take_done(done));
            }
            self.done = done;
            touched.sort_unstable();
            touched.dedup();
            for client in touched.drain(..) {
                self.attend(client);
            }
            if idle && (self.backlog.is_empty() || self.at_disk > 0) {
                return;
            }
        }
    }

    /// Until when the loop may sleep.
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
                // It would be told again at once, and for ever.
                let _ = epoll::delete(&self.epoll, &self.listener);
                self.accept_again = Some(Instant::now() + PAUSE);
                return;
            }
            // Whoever it was is gone.
            Err(_) => return,
        };
        if self.clients.len() >= self.options.clients_max {
            tracing::warn!("{} clients use the disk: one more is sent away", self.clients.len());
            return;
        }
        let id = self.next_client;
        let deadline = Instant::now() + self.options.handshake;
        let mut client = Connection::new(stream, self.export.clone(), deadline);
        client.interest = (true, false);
        let data = epoll::EventData::new_u64(id);
        if epoll::add(&self.epoll, &client.stream, data, epoll::EventFlags::IN).is_err() {
            return;
        }
        self.next_client += 1;
        self.clients.insert(id, client);
        self.attend(id);
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
                    if received == Received::Nothing {
                        return;
                    }
                }
                Err(error) => return self.lose(id, &error),
            }
        }
    }

    /// Takes the requests of a client that are here, as far as it may have more in flight.
    fn take_requests(&mut self, id: u64) {
        loop {
            let all: usize = self.clients.values().map(Connection::held).sum();
            let Some(client) = self.clients.get_mut(&id) else { return };
            if all > BYTES_MAX && client.held() > 0 {
                return;
            }
            match client.next(&mut self.buffers) {
                Ok(Some(wanted)) => self.start(id, wanted),
                Ok(None) => return,
                Err(error) => return self.lose(id, &error),
            }
        }
    }

    /// Sends a client its answers; then there may be room for more of its requests.
    fn attend(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if let Err(error) = client.flush(&mut self.buffers) {
            return self.lose(id, &error);
        }
        // Those that were held back, and are here already.
        self.take_requests(id);
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.is_over() {
            self.remove(id);
            return;
        }
        let interest = (client.wants_to_read(), client.wants_to_write());
        if interest != client.interest {
            client.interest = interest;
            let mut flags = epoll::EventFlags::empty();
            flags.set(epoll::EventFlags::IN, interest.0);
            flags.set(epoll::EventFlags::OUT, interest.1);
            let data = epoll::EventData::new_u64(id);
            if let Err(error) = epoll::modify(&self.epoll, &client.stream, data, flags) {
                self.lose(id, &error.into());
            }
        }
    }

    fn lose(&mut self, id: u64, why: &io::Error) {
        match why.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => tracing::debug!("a client of the disk is gone"),
            _ => tracing::info!("a client of the disk is cut off: {why}"),
        }
        self.remove(id);
    }

    /// What the client has at the disk goes on, and its answers are dropped.
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
        let late = |client: &Connection| client.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<u64> =
            self.clients.iter().filter(|(_, client)| late(client)).map(|(id, _)| *id).collect();
        for id in late {
            self.lose(id, &io::ErrorKind::TimedOut.into());
        }
    }

    fn start(&mut self, client: u64, wanted: Wanted) {
        let Wanted { request, command, payload } = wanted;
        let len = u64::from(request.len);
        let writes_zeros =
            matches!(command, Command::WriteZeroes { .. }) && !self.geometry.write_zeroes;
        let then_flush = match command {
            Command::Trim { fua } | Command::WriteZeroes { fua } => fua,
            _ => false,
        };
        let zeros_left = if writes_zeros { len } else { 0 };
        let token = self.next_token;
        self.next_token += 1;
        let active = Active { client, request, payload, zeros_left, then_flush };
        let op = match command {
            Command::Read => Op::Read,
            Command::Write { fua } => Op::Write { fua },
            Command::Trim { .. } => Op::Discard { secure: false },
            Command::WriteZeroes { .. } if writes_zeros => Op::Write { fua: false },
            Command::WriteZeroes { .. } => Op::WriteZeroes,
            Command::Flush | Command::BlockStatus | Command::Disconnect => Op::Flush,
        };
        self.go_on(token, active, op);
    }

    /// Sends the next step of a request to the disk.
    fn go_on(&mut self, token: u64, mut active: Active, op: Op) {
        let ClientRequest { offset, len, .. } = active.request;
        let (mut offset, mut len) = (offset, u64::from(len));
        let mut segments = self.vectors.pop().unwrap_or_default();
        if op == Op::Flush {
            (offset, len) = (0, 0);
        } else if active.zeros_left > 0 {
            offset += len - active.zeros_left;
            len = active.zeros_left.min(ZEROS as u64);
            active.zeros_left -= len;
            let len = usize::try_from(len).unwrap_or(ZEROS);
            segments.extend(self.zeros.slice(0, len).map(Segment::from));
        } else if let Some(payload) = &active.payload {
            segments.push(payload.bytes.clone().into());
        }
        self.active.insert(token, active);
        self.backlog.push_back(Request { token, op, offset, len, segments });
    }

    fn submit_backlog(&mut self) {
        while self.at_disk < self.options.depth as usize {
            let Some(request) = self.backlog.pop_front() else { return };
            self.at_disk += 1;
            self.queue.submit(request);
        }
    }

    /// Returns the client that has an answer coming.
    fn take_done(&mut self, done: Done) -> Option<u64> {
        let Done { token, result, mut segments } = done;
        self.at_disk = self.at_disk.saturating_sub(1);
        segments.clear();
        self.vectors.push(segments);
        let mut active = self.active.remove(&token)?;
        if result.is_ok() && active.zeros_left > 0 {
            self.go_on(token, active, Op::Write { fua: false });
            return None;
        }
        if result.is_ok() && active.then_flush {
            active.then_flush = false;
            self.go_on(token, active, Op::Flush);
            return None;
        }
        let Active { client: id, request, payload, .. } = active;
        match self.clients.get_mut(&id) {
            Some(client) => client.answer(&request, payload, result, &mut self.buffers),
            None => payload.into_iter().for_each(|payload| self.buffers.give_back(payload)),
        }
        Some(id)
    }
}
