//! One client.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ringfence_memory::{ReadList, WriteList};

use super::buffers::{Buffers, Payload};
use crate::protocol::offer::{Agreed, Export, Progress, ServerHandshake, greeting};
use crate::protocol::serve::{
    ClientRequest, Command, REQUEST_LEN, ReplyHeader, parse_request, reply_allocated, reply_data,
    reply_end,
};
use crate::protocol::{Offer, error_of};

/// Bytes read from the socket at once: an option of the handshake, or some thousand requests.
const INPUT: usize = 64 << 10;

/// Bytes of payload that one client may have in flight, beyond its first request.
const BYTES_MAX: usize = 32 << 20;

/// Requests that one client may have in flight.
const REQUESTS_MAX: usize = 512;

/// Replies sent with one system call: a header and a payload each.
const REPLIES: usize = 16;

enum Phase {
    Handshake(ServerHandshake),
    Transmission(Agreed),
}

/// A request of a client that goes to the disk.
pub(super) struct Wanted {
    pub(super) request: ClientRequest,
    pub(super) command: Command,
    pub(super) payload: Option<Payload>,
}

/// A write of which the payload is not whole yet.
struct Arriving {
    wanted: Wanted,
    have: usize,
}

struct Outgoing {
    header: ReplyHeader,
    payload: Option<Payload>,
    /// Bytes of both that are gone.
    sent: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.header.len() + self.payload.as_ref().map_or(0, |payload| payload.bytes.len())
    }
}

/// One client.
pub(super) struct Connection {
    pub(super) stream: OwnedFd,
    phase: Phase,
    offer: Offer,
    /// Until when the handshake must be over.
    pub(super) deadline: Option<Instant>,
    input: Box<[u8]>,
    /// What came and was not looked at: a range of `input`.
    start: usize,
    end: usize,
    /// Bytes of payload that nobody wants.
    skip: u32,
    arriving: Option<Arriving>,
    text: Vec<u8>,
    out: VecDeque<Outgoing>,
    /// Requests that have no answer on its way yet.
    in_flight: usize,
    /// Bytes of payloads, of requests and answers.
    held: usize,
    /// It said good-bye, or hung up: no more requests.
    leaving: bool,
    /// As the kernel was told what is of interest: reading, writing.
    pub(super) interest: (bool, bool),
}

/// What came of reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Received {
    /// There may be more.
    Some,
    /// There is nothing more, for now.
    Nothing,
}

impl Connection {
    pub(super) fn new(stream: OwnedFd, export: Export, deadline: Instant) -> Connection {
        Connection {
            stream,
            offer: export.offer,
            phase: Phase::Handshake(ServerHandshake::new(export)),
            deadline: Some(deadline),
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            skip: 0,
            arriving: None,
            text: greeting().to_vec(),
            out: VecDeque::new(),
            in_flight: 0,
            held: 0,
            leaving: false,
            interest: (false, false),
        }
    }

    /// Whether it may have more in flight.
    pub(super) fn may_ask(&self) -> bool {
        self.held <= BYTES_MAX
            && self.in_flight < REQUESTS_MAX
            && self.out.len() < 2 * REQUESTS_MAX
            && self.text.len() < INPUT
    }

    /// Bytes of payloads.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Whether its socket is to be read.
    pub(super) fn wants_to_read(&self) -> bool {
        // What is held back may fill the buffer.
        let room = self.end - self.start < self.input.len() || self.arriving.is_some();
        !self.leaving && self.may_ask() && room
    }

    /// Whether something is to be sent.
    pub(super) fn wants_to_write(&self) -> bool {
        !self.out.is_empty() || !self.text.is_empty()
    }

    /// Whether all was said, and nothing is to come.
    pub(super) fn is_over(&self) -> bool {
        self.leaving && self.in_flight == 0 && !self.wants_to_write()
    }

    /// One read from the socket: into a payload that is arriving, and behind it.
    ///
    /// # Errors
    ///
    /// When the client is gone.
    pub(super) fn receive(&mut self) -> io::Result<Received> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let behind = self.input.len() - self.end;
        let mut list = ReadList::new();
        let mut room = 0;
        // What arrives belongs to the payload only if nothing waits in front of it.
        if let (Some(arriving), true) = (&self.arriving, self.end == 0)
            && let Some(payload) = &arriving.wanted.payload
        {
            room = payload.bytes.len() - arriving.have;
            list.push_lent(&payload.bytes, arriving.have, room).map_err(io::Error::other)?;
        }
        list.push(&mut self.input[self.end..]).map_err(io::Error::other)?;
        let wanted = room + behind;
        let read = match list.read(&self.stream) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(Received::Nothing);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Received::Some),
            Err(error) => return Err(error),
        };
        if read == 0 && wanted > 0 {
            // It hung up. What it asked for is done, but it is not there to hear of it.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(arriving) = &mut self.arriving {
            arriving.have += read.min(room);
        }
        self.end += read.saturating_sub(room);
        Ok(if read < wanted { Received::Nothing } else { Received::Some })
    }

    /// The next request that came in whole, as far as the client may have one more.
    ///
    /// # Errors
    ///
    /// When the client broke the protocol, or memory is short.
    pub(super) fn next(&mut self, buffers: &mut Buffers) -> io::Result<Option<Wanted>> {
        loop {
            if let Phase::Handshake(_) = self.phase {
                if !self.shake_hands()? {
                    return Ok(None);
                }
                continue;
            }
            let skipped = (self.skip as usize).min(self.end - self.start);
            self.start += skipped;
            self.skip -= u32::try_from(skipped).unwrap_or(0);
            if self.skip > 0 || self.leaving {
                return Ok(None);
            }
            if self.arriving.is_some() {
                return self.arrive();
            }
            if !self.may_ask() {
                return Ok(None);
            }
            let Some((bytes, _)) = self.input[self.start..self.end].split_first_chunk() else {
                return Ok(None);
            };
            let bytes: [u8; REQUEST_LEN] = *bytes;
            self.start += REQUEST_LEN;
            if let Some(wanted) = self.request(&bytes, buffers)? {
                return Ok(Some(wanted));
            }
        }
    }

    /// Goes on with the handshake; says whether it got anywhere.
    fn shake_hands(&mut self) -> io::Result<bool> {
        let Phase::Handshake(handshake) = &mut self.phase else { return Ok(false) };
        if self.leaving || self.text.len() >= INPUT {
            return Ok(false);
        }
        let (used, progress) = handshake.feed(&self.input[self.start..self.end], &mut self.text)?;
        self.start += used;
        match progress {
            Progress::More => return Ok(used > 0),
            Progress::Transmission(agreed) => {
                self.phase = Phase::Transmission(agreed);
                self.deadline = None;
            }
            Progress::Aborted => {
                self.leaving = true;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A request without its payload: `None` when it is answered already, or its payload is not
    /// here yet.
    fn request(
        &mut self,
        bytes: &[u8; REQUEST_LEN],
        buffers: &mut Buffers,
    ) -> io::Result<Option<Wanted>> {
        let Phase::Transmission(agreed) = self.phase else { return Ok(None) };
        let request = parse_request(bytes, &self.offer, agreed)?;
        let ClientRequest { cookie, len, structured, payload, .. } = request;
        let command = match request.command {
            Ok(Command::Disconnect) => {
                self.leaving = true;
                return Ok(None);
            }
            Ok(Command::BlockStatus) => {
                self.send(reply_allocated(cookie, len), None);
                return Ok(None);
            }
            Ok(command) => command,
            Err(number) => {
                self.skip = payload;
                self.send(reply_end(cookie, number, structured), None);
                return Ok(None);
            }
        };
        let needs = matches!(command, Command::Read | Command::Write { .. });
        let payload = if needs { Some(buffers.take(len)?) } else { None };
        if needs {
            self.held += len as usize;
        }
        self.in_flight += 1;
        let wanted = Wanted { request, command, payload };
        if let Command::Write { .. } = command {
            self.arriving = Some(Arriving { wanted, have: 0 });
            return Ok(None);
        }
        Ok(Some(wanted))
    }

    /// Moves what came of a payload to where it belongs; the request, if that is all of it.
    fn arrive(&mut self) -> io::Result<Option<Wanted>> {
        let Some(arriving) = &mut self.arriving else { return Ok(None) };
        let Some(payload) = &arriving.wanted.payload else { return Ok(None) };
        let left = payload.bytes.len() - arriving.have;
        let here = &self.input[self.start..self.end];
        let here = &here[..here.len().min(left)];
        payload.bytes.copy_from(arriving.have, here).map_err(io::Error::other)?;
        self.start += here.len();
        arriving.have += here.len();
        if here.len() < left {
            return Ok(None);
        }
        Ok(self.arriving.take().map(|arriving| arriving.wanted))
    }

    fn send(&mut self, header: ReplyHeader, payload: Option<Payload>) {
        self.out.push_back(Outgoing { header, payload, sent: 0 });
    }

    /// A request is over: its answer is on its way.
    pub(super) fn answer(
        &mut self,
        request: &ClientRequest,
        payload: Option<Payload>,
        result: Result<(), i32>,
        buffers: &mut Buffers,
    ) {
        self.in_flight -= 1;
        let ClientRequest { cookie, offset, len, structured, .. } = *request;
        let is_read = request.command == Ok(Command::Read);
        match (result, payload) {
            (Ok(()), Some(payload)) if is_read => {
                self.send(reply_data(cookie, offset, len, structured), Some(payload));
            }
            (result, payload) => {
                if let Some(payload) = payload {
                    self.held -= payload.bytes.len();
                    buffers.give_back(payload);
                }
                let number = result.map_or_else(error_of, |()| 0);
                self.send(reply_end(cookie, number, structured), None);
            }
        }
    }

    /// Sends what there is to say, as far as the client takes it.
    ///
    /// # Errors
    ///
    /// When the client is gone.
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
            // Nothing else is said during the handshake.
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
