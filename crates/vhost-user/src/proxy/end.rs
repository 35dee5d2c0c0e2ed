//! One end of a connection: receives whole messages, and sends one at a time. It never waits.
//!
//! A message can arrive in pieces. Its descriptors come with the header; a descriptor with a later byte is a fault.

// #syscall proxy,shield sendmsg: a message of a hypervisor or its backend, with its descriptors

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::{Descriptors, MessageError, dispose_socket, take_of_stream};
use ringfence_wire::vhost_user::{FILES_MAX, HEADER_LEN, Header};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::fault::ProxyFault;

/// Time limit for the rest of a message.
pub const HALF_MAX: Duration = Duration::from_secs(5);

/// Message as it came, with a header that was checked.
#[derive(Debug)]
pub struct ProxyMessage {
    pub header: Header,
    pub payload: Vec<u8>,
    pub files: Descriptors,
}

/// Message to be sent.
#[derive(Debug)]
pub struct Outgoing {
    bytes: Vec<u8>,
    files: Descriptors,
    sent: usize,
}

impl Outgoing {
    /// Creates a message. Its files go with the first byte.
    pub fn new(bytes: Vec<u8>, files: Descriptors) -> Outgoing {
        Outgoing { bytes, files, sent: 0 }
    }

    /// Returns the bytes of the message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the files of the message.
    pub fn files(&self) -> &Descriptors {
        &self.files
    }
}

/// Kind of the messages that an end receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Request,
    Answer,
}

/// Result of an attempt to receive.
#[derive(Debug)]
pub(crate) enum Incoming {
    Message(ProxyMessage),
    /// No whole message is there.
    Nothing,
    /// The peer has closed its connection.
    Gone,
}

/// Message of which a part has come.
#[derive(Debug)]
struct Partial {
    bytes: Vec<u8>,
    header: Option<Header>,
    files: Descriptors,
    since: Instant,
}

/// End of a connection.
#[derive(Debug)]
pub struct End {
    socket: OwnedFd,
    partial: Option<Partial>,
    outgoing: Option<Outgoing>,
}

impl End {
    pub(crate) fn new(socket: OwnedFd) -> End {
        End { socket, partial: None, outgoing: None }
    }

    /// Closes the connection without waiting, and what is in its queue.
    pub(crate) fn close(self) {
        dispose_socket(self.socket);
    }

    /// Returns `true` while a message waits for room.
    pub(crate) fn is_full(&self) -> bool {
        self.outgoing.is_some()
    }

    /// Puts a message into the place for one, which must be free.
    pub(crate) fn send(&mut self, message: Outgoing) {
        debug_assert!(self.outgoing.is_none(), "one message at a time");
        self.outgoing = Some(message);
    }

    /// Returns the time at which half of a message is a fault.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.partial.as_ref().map(|partial| partial.since + HALF_MAX)
    }

    /// Checks that the rest of a message is not overdue.
    pub(crate) fn check_time(&self, now: Instant) -> Result<(), ProxyFault> {
        match &self.partial {
            Some(partial) if partial.since + HALF_MAX <= now => {
                let len = partial.header.map_or(HEADER_LEN, |header| HEADER_LEN + header.len);
                let (bytes, seconds) = (partial.bytes.len(), HALF_MAX.as_secs());
                Err(ProxyFault::Partial { bytes, len, seconds })
            }
            _ => Ok(()),
        }
    }

    /// Sends as much as there is room for. Returns `false` if the peer has closed its connection.
    pub(crate) fn flush(&mut self) -> Result<bool, ProxyFault> {
        while let Some(message) = &mut self.outgoing {
            let files: Vec<_> = match message.sent {
                0 => message.files.each().collect(),
                _ => Vec::new(),
            };
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&files));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let rest = [IoSlice::new(&message.bytes[message.sent..])];
            match rustix::net::sendmsg(&self.socket, &rest, &mut control, flags) {
                Ok(sent) => message.sent += sent,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(true),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
                Err(source) => return Err(ProxyFault::System { what: "sending", source }),
            }
            if message.sent == message.bytes.len() {
                self.outgoing = None;
            }
        }
        Ok(true)
    }

    /// Receives what is there of the next message.
    pub(crate) fn receive(&mut self, kind: Kind) -> Result<Incoming, ProxyFault> {
        let new = || Partial {
            bytes: Vec::new(),
            header: None,
            files: Descriptors::default(),
            since: Instant::now(),
        };
        let mut partial = self.partial.take().unwrap_or_else(new);
        loop {
            let have = partial.bytes.len();
            let wanted = match partial.header {
                None => HEADER_LEN,
                Some(header) => HEADER_LEN + header.len,
            };
            if have == wanted
                && let Some(header) = partial.header
            {
                let payload = partial.bytes.split_off(HEADER_LEN);
                let files = partial.files;
                return Ok(Incoming::Message(ProxyMessage { header, payload, files }));
            }
            // Descriptors come with the first byte.
            let files_max = if have == 0 { FILES_MAX } else { 0 };
            partial.bytes.resize(wanted, 0);
            let received = take_of_stream(&self.socket, &mut partial.bytes[have..], files_max);
            let received = match received {
                Ok(received) if received.bytes == 0 => return Ok(Incoming::Gone),
                Ok(received) => received,
                Err(MessageError::System(Errno::CONNRESET)) => return Ok(Incoming::Gone),
                Err(MessageError::System(Errno::AGAIN | Errno::INTR)) => {
                    partial.bytes.truncate(have);
                    self.partial = (have > 0).then_some(partial);
                    return Ok(Incoming::Nothing);
                }
                Err(error) => return Err(error.into()),
            };
            partial.bytes.truncate(have + received.bytes);
            if have == 0 {
                partial.files = received.descriptors;
            }
            if partial.header.is_none()
                && let Some(bytes) = partial.bytes.first_chunk()
            {
                partial.header = Some(match kind {
                    Kind::Request => Header::parse(bytes)?,
                    Kind::Answer => Header::parse_answer(bytes)?,
                });
            }
        }
    }
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
