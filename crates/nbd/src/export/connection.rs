//! Connection of one client of an export: input parsing, limits, reply queue.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ringfence_block::storage::Geometry;
use ringfence_block::storage::extents::ExtentState;
use ringfence_memory::{ReadList, WriteList};
use ringfence_sys::numbers::{bounded, usize_from};

use super::buffers::{Buffers, Payload};
use super::status::{self, Walk};
use super::unaligned::Span;
use crate::protocol::offer::{Agreed, Export, ServerHandshake, ServerProgress, greeting};
use crate::protocol::serve::{
    ClientRequest, NbdCommand, REQUEST_LEN, ReplyHeader, parse_request, reply_allocated,
    reply_data, reply_end, reply_extent, reply_status,
};
use crate::protocol::{Offer, error_of};

/// Length in bytes of the input buffer: an option of the handshake, or some thousand requests.
const INPUT: usize = 64 << 10;

/// Maximum number of payload bytes of one client in flight, beyond its first request.
const BYTES_MAX: usize = 32 << 20;

/// Maximum number of requests of one client in flight.
const REQUESTS_MAX: usize = 512;

/// Maximum number of replies per system call, of a header and a payload each.
const REPLIES: usize = 16;

enum Phase {
    Handshake(ServerHandshake),
    Transmission(Agreed),
}

/// Request of a client for the disk.
pub(super) struct DiskRequest {
    pub(super) request: ClientRequest,
    pub(super) command: NbdCommand,
    pub(super) payload: Option<Payload>,
}

/// Write whose payload is not complete yet.
struct PendingWrite {
    wanted: DiskRequest,
    have: usize,
}

struct Outgoing {
    header: ReplyHeader,
    payload: Option<Payload>,
    /// Number of bytes of header and payload that were sent.
    sent: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.header.len() + self.payload.as_ref().map_or(0, |payload| payload.bytes.len())
    }
}

pub(super) struct ExportConnection {
    pub(super) stream: OwnedFd,
    phase: Phase,
    offer: Offer,
    /// Sector size of the disk in bytes.
    sector_size: u32,
    /// Set if the disk knows its extents.
    extents: bool,
    /// Extents for the next query, after a query for one.
    walk: Option<Walk>,
    /// End of the handshake timeout; `None` after the handshake.
    pub(super) deadline: Option<Instant>,
    input: Box<[u8]>,
    /// Received bytes that are not parsed, as a range of `input`.
    start: usize,
    end: usize,
    /// Number of payload bytes to skip.
    skip: u32,
    pending_write: Option<PendingWrite>,
    text: Vec<u8>,
    out: VecDeque<Outgoing>,
    /// Number of requests without a queued reply.
    in_flight: usize,
    /// Number of payload bytes of requests and replies.
    held: usize,
    /// Set after a disconnect request or abort: no more requests are read.
    leaving: bool,
    /// Set if the disk has no room for this client.
    refused: bool,
    /// Interest registered with epoll: reading, writing.
    pub(super) interest: Interest,
}

/// Events of a socket that the server waits for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Interest {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

/// Result of a read from the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReceivedCommand {
    /// The socket may have more data.
    Some,
    /// The socket has no more data for now.
    Nothing,
}

impl ExportConnection {
    pub(super) fn new(
        stream: OwnedFd,
        export: Export,
        geometry: &Geometry,
        deadline: Instant,
    ) -> ExportConnection {
        ExportConnection {
            stream,
            sector_size: geometry.sector_size,
            extents: geometry.extents,
            walk: None,
            offer: export.offer,
            phase: Phase::Handshake(ServerHandshake::new(export)),
            deadline: Some(deadline),
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            skip: 0,
            pending_write: None,
            text: greeting().to_vec(),
            out: VecDeque::new(),
            in_flight: 0,
            held: 0,
            leaving: false,
            refused: false,
            interest: Interest::default(),
        }
    }

    /// Creates the connection of a client that may not use the disk. It learns why when it chooses the export.
    pub(super) fn refused(
        stream: OwnedFd,
        export: Export,
        geometry: &Geometry,
        deadline: Instant,
        why: String,
    ) -> ExportConnection {
        let handshake = ServerHandshake::new(export.clone()).refusing(why);
        let connection = ExportConnection::new(stream, export, geometry, deadline);
        ExportConnection { phase: Phase::Handshake(handshake), refused: true, ..connection }
    }

    /// Returns `true` if the disk has no room for this client.
    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Returns `true` if the client may have more requests in flight.
    pub(super) fn may_ask(&self) -> bool {
        self.held <= BYTES_MAX
            && self.in_flight < REQUESTS_MAX
            && self.out.len() < 2 * REQUESTS_MAX
            && self.text.len() < INPUT
    }

    /// Returns the number of payload bytes in flight.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Returns `true` if the socket should be read.
    pub(super) fn wants_to_read(&self) -> bool {
        // Requests that are held back may fill the input buffer.
        let room = self.end - self.start < self.input.len() || self.pending_write.is_some();
        !self.leaving && self.may_ask() && room
    }

    /// Returns `true` if there are bytes to send.
    pub(super) fn wants_to_write(&self) -> bool {
        !self.out.is_empty() || !self.text.is_empty()
    }

    /// Returns `true` if all replies were sent and no request follows.
    pub(super) fn is_over(&self) -> bool {
        self.leaving && self.in_flight == 0 && !self.wants_to_write()
    }

    /// Reads once from the socket: into an incomplete payload, then into the input buffer.
    ///
    /// # Errors
    ///
    /// Returns the error of the socket, or `UnexpectedEof` after the client closed it.
    pub(super) fn receive(&mut self) -> io::Result<ReceivedCommand> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let behind = self.input.len() - self.end;
        let mut list = ReadList::new();
        let mut room = 0;
        // Received bytes belong to the payload only if the input buffer is empty.
        if let (Some(pending_write), true) = (&self.pending_write, self.end == 0)
            && let Some(payload) = &pending_write.wanted.payload
        {
            room = payload.bytes.len() - pending_write.have;
            list.push_lent(&payload.bytes, pending_write.have, room).map_err(io::Error::other)?;
        }
        list.push(&mut self.input[self.end..]).map_err(io::Error::other)?;
        let wanted = room + behind;
        let read = match list.read(&self.stream) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(ReceivedCommand::Nothing);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                return Ok(ReceivedCommand::Some);
            }
            Err(error) => return Err(error),
        };
        if read == 0 && wanted > 0 {
            // The client closed the connection. Its requests complete, but their replies are dropped.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(pending_write) = &mut self.pending_write {
            pending_write.have += read.min(room);
        }
        self.end += read.saturating_sub(room);
        Ok(if read < wanted { ReceivedCommand::Nothing } else { ReceivedCommand::Some })
    }

    /// Returns the next complete request, if the limits allow one. `changes` is the number of changes of the disk.
    ///
    /// # Errors
    ///
    /// Returns an error if the client violated the protocol or there is no memory.
    pub(super) fn next(
        &mut self,
        changes: u64,
        buffers: &mut Buffers,
    ) -> io::Result<Option<DiskRequest>> {
        loop {
            if let Phase::Handshake(_) = self.phase {
                if !self.continue_handshake()? {
                    return Ok(None);
                }
                continue;
            }
            let skipped = usize_from(self.skip).min(self.end - self.start);
            self.start += skipped;
            self.skip -= bounded(skipped, self.skip);
            if self.skip > 0 || self.leaving {
                return Ok(None);
            }
            if self.pending_write.is_some() {
                return self.fill_payload();
            }
            if !self.may_ask() {
                return Ok(None);
            }
            let Some((bytes, _)) = self.input[self.start..self.end].split_first_chunk() else {
                return Ok(None);
            };
            let bytes: [u8; REQUEST_LEN] = *bytes;
            self.start += REQUEST_LEN;
            if let Some(wanted) = self.request(&bytes, changes, buffers)? {
                return Ok(Some(wanted));
            }
        }
    }

    /// Continues the handshake. Returns `true` if it made progress.
    fn continue_handshake(&mut self) -> io::Result<bool> {
        let Phase::Handshake(handshake) = &mut self.phase else { return Ok(false) };
        if self.leaving || self.text.len() >= INPUT {
            return Ok(false);
        }
        let (used, progress) = handshake.feed(&self.input[self.start..self.end], &mut self.text)?;
        self.start += used;
        match progress {
            ServerProgress::More => return Ok(used > 0),
            ServerProgress::Transmission(agreed) => {
                self.phase = Phase::Transmission(agreed);
                self.deadline = None;
            }
            ServerProgress::Aborted => {
                self.leaving = true;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Handles a request without its payload. Returns `None` if it was answered, or if its payload is
    /// incomplete.
    fn request(
        &mut self,
        bytes: &[u8; REQUEST_LEN],
        changes: u64,
        buffers: &mut Buffers,
    ) -> io::Result<Option<DiskRequest>> {
        let Phase::Transmission(agreed) = self.phase else { return Ok(None) };
        let request = parse_request(bytes, &self.offer, agreed)?;
        let ClientRequest { cookie, len, structured, payload, .. } = request;
        let command = match request.command {
            Ok(NbdCommand::Disconnect) => {
                self.leaving = true;
                return Ok(None);
            }
            Ok(NbdCommand::BlockStatus { .. }) if !self.extents => {
                self.send(reply_allocated(cookie, len), None);
                return Ok(None);
            }
            Ok(command) => {
                if let Some((len, state)) = self.walk_on(&request, changes) {
                    self.send(reply_extent(cookie, len, state), None);
                    return Ok(None);
                }
                command
            }
            Err(number) => {
                self.skip = payload;
                self.send(reply_end(cookie, number, structured), None);
                return Ok(None);
            }
        };
        let span = match command {
            NbdCommand::Read | NbdCommand::Write { .. } => Some(Span::of(&request)),
            NbdCommand::BlockStatus { .. } => Some(status::BUFFER),
            _ => None,
        };
        let payload = span.map(|span| buffers.take(span, self.sector_size)).transpose()?;
        self.held += payload.as_ref().map_or(0, |payload| payload.bytes.len());
        self.in_flight += 1;
        let wanted = DiskRequest { request, command, payload };
        if let NbdCommand::Write { .. } = command {
            self.pending_write = Some(PendingWrite { wanted, have: 0 });
            return Ok(None);
        }
        Ok(Some(wanted))
    }

    /// Copies received bytes into the incomplete payload. Returns the request once the payload is complete.
    fn fill_payload(&mut self) -> io::Result<Option<DiskRequest>> {
        let Some(pending_write) = &mut self.pending_write else { return Ok(None) };
        let Some(payload) = &pending_write.wanted.payload else { return Ok(None) };
        let left = payload.bytes.len() - pending_write.have;
        let here = &self.input[self.start..self.end];
        let here = &here[..here.len().min(left)];
        payload.bytes.copy_from(pending_write.have, here).map_err(io::Error::other)?;
        self.start += here.len();
        pending_write.have += here.len();
        if here.len() < left {
            return Ok(None);
        }
        Ok(self.pending_write.take().map(|pending_write| pending_write.wanted))
    }

    fn send(&mut self, header: ReplyHeader, payload: Option<Payload>) {
        self.out.push_back(Outgoing { header, payload, sent: 0 });
    }

    /// Returns the extent at the begin of a query, if the client goes on where its last query ended.
    fn walk_on(&mut self, request: &ClientRequest, changes: u64) -> Option<(u32, ExtentState)> {
        let is_for_one = matches!(request.command, Ok(NbdCommand::BlockStatus { one: true }));
        self.walk.as_mut().filter(|_| is_for_one)?.answer(request, changes)
    }

    /// Queues the reply of a completed request. `changes` is the number of changes of the disk at its start.
    pub(super) fn answer(
        &mut self,
        request: &ClientRequest,
        payload: Option<Payload>,
        result: Result<(), i32>,
        changes: u64,
        buffers: &mut Buffers,
    ) {
        self.in_flight -= 1;
        let ClientRequest { cookie, offset, len, structured, .. } = *request;
        let is_read = request.command == Ok(NbdCommand::Read);
        let is_query = matches!(request.command, Ok(NbdCommand::BlockStatus { .. }));
        match (result, payload) {
            (Ok(()), Some(mut payload)) if is_query => {
                let before = payload.bytes.len();
                let (count, walk) =
                    status::encode(request, self.sector_size, changes, &mut payload);
                self.walk = walk;
                self.held -= before - payload.bytes.len();
                if count > 0 {
                    return self.send(reply_status(cookie, count), Some(payload));
                }
                self.held -= payload.bytes.len();
                buffers.give_back(payload);
                self.send(reply_allocated(cookie, len), None);
            }
            (Ok(()), Some(payload)) if is_read => {
                self.send(reply_data(cookie, offset, len, structured), Some(payload));
            }
            (result, payload) => {
                if let Some(payload) = payload {
                    self.held -= payload.bytes.len();
                    buffers.give_back(payload);
                }
                let number = result.map_or_else(error_of, |()| 0);
                // A disk that cannot tell now: the whole range may have data.
                let unknown = is_query && result == Err(libc::EOPNOTSUPP);
                let allocated = unknown.then(|| reply_allocated(cookie, len));
                let ended = || reply_end(cookie, number, structured);
                self.send(allocated.unwrap_or_else(ended), None);
            }
        }
    }

    /// Sends queued bytes until the socket is full.
    ///
    /// # Errors
    ///
    /// Returns the error of the socket.
    pub(super) fn flush(&mut self, buffers: &mut Buffers) -> io::Result<()> {
        while self.wants_to_write() {
            match self.write_some() {
                Ok(written) => self.written(written, buffers),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_some(&self) -> io::Result<usize> {
        let mut list = WriteList::new();
        if !self.text.is_empty() {
            // During the handshake there are no replies.
            list.push(&self.text).map_err(io::Error::other)?;
            return list.write(&self.stream);
        }
        for outgoing in self.out.iter().take(REPLIES) {
            let header = outgoing.header.get(outgoing.sent..).unwrap_or(&[]);
            list.push(header).map_err(io::Error::other)?;
            if let Some(payload) = &outgoing.payload {
                let from = outgoing.sent.saturating_sub(outgoing.header.len());
                let len = payload.bytes.len() - from;
                list.push_lent(&payload.bytes, from, len).map_err(io::Error::other)?;
            }
        }
        list.write(&self.stream)
    }

    fn written(&mut self, mut written: usize, buffers: &mut Buffers) {
        if !self.text.is_empty() {
            self.text.drain(..written.min(self.text.len()));
            return;
        }
        while let Some(first) = self.out.front_mut() {
            let step = written.min(first.len() - first.sent);
            first.sent += step;
            written -= step;
            if first.sent < first.len() {
                return;
            }
            if let Some(payload) = self.out.pop_front().and_then(|gone| gone.payload) {
                self.held -= payload.bytes.len();
                buffers.give_back(payload);
            }
        }
    }
}
