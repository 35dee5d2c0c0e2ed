//! Messages of a client: one at a time from its socket, and their answers.
//!
//! A client sends a message whole, and its files with the header. A message of which only a part is there is a fault.

// #syscall uplink,disk,card sendto: answers to a hypervisor
// #syscall disk recvfrom: payload of a message
// #syscall disk sendmsg: the file of an in-flight log for a hypervisor

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use ringfence_platform::Counters;
use ringfence_sys::descriptors::{Descriptors, MessageError, take_of_stream};
use ringfence_wire::vhost_user::{self, FILES_MAX, HEADER_LEN, Header, PAYLOAD_MAX, Request};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::device::RequestAnswer;
use super::fault::ClientFault;

/// Message of a client.
#[derive(Debug)]
pub struct Message {
    pub header: Header,
    pub request: Request,
    /// Files that came with it.
    pub files: Descriptors,
}

/// Result of an attempt to receive a message.
#[derive(Debug)]
pub enum Incoming {
    Message(Message),
    /// No message is there.
    Nothing,
    /// The client has closed its connection.
    Gone,
}

/// Receives the next message of a client, without waiting. System calls are counted in `system`.
///
/// # Errors
///
/// Returns [`ClientFault`] for a message that is not whole, or cannot be parsed.
pub fn receive(client: &OwnedFd, system: &Counters) -> Result<Incoming, ClientFault> {
    system.syscalls.add(2);
    let mut bytes = [0; HEADER_LEN];
    let received = match take_of_stream(client, &mut bytes, FILES_MAX) {
        Ok(received) if received.bytes == 0 => return Ok(Incoming::Gone),
        Ok(received) => received,
        Err(MessageError::System(Errno::AGAIN | Errno::INTR)) => return Ok(Incoming::Nothing),
        Err(MessageError::System(Errno::CONNRESET)) => return Ok(Incoming::Gone),
        Err(error) => return Err(error.into()),
    };
    let partial = |bytes, len| ClientFault::Partial { bytes, len };
    if received.bytes < HEADER_LEN {
        return Err(partial(received.bytes, HEADER_LEN));
    }
    let header = Header::parse(&bytes)?;
    let mut space = [0; PAYLOAD_MAX];
    let payload = &mut space[..header.len];
    if header.len > 0 {
        let bytes = match rustix::net::recv(client, &mut *payload, RecvFlags::DONTWAIT) {
            Ok((_, bytes)) => bytes,
            Err(_) => 0,
        };
        if bytes < header.len {
            return Err(partial(bytes, header.len));
        }
    }
    let request = Request::parse(header.request, payload)?;
    tracing::debug!("vhost-user: {request:?}");
    Ok(Incoming::Message(Message { header, request, files: received.descriptors }))
}

/// Answers a message, if it has an answer or `acknowledges` and the client asks for one. Returns `false` if the client has
/// closed its connection.
///
/// # Errors
///
/// Returns [`ClientFault`] if the answer cannot be sent whole: the client does not read.
pub fn answer(
    client: &OwnedFd,
    header: &Header,
    answer: &RequestAnswer,
    acknowledges: bool,
    system: &Counters,
) -> Result<bool, ClientFault> {
    let mut file = None;
    let bytes = match answer {
        RequestAnswer::Word(word) => vhost_user::reply_word(header.request, *word),
        RequestAnswer::State(state) => vhost_user::reply_state(header.request, *state),
        RequestAnswer::Config(part, config) => {
            vhost_user::reply_config(header.request, *part, config)
        }
        RequestAnswer::Inflight(area, log) => {
            file = Some(log.as_fd());
            vhost_user::reply_inflight(header.request, *area)
        }
        RequestAnswer::Done if header.needs_reply && acknowledges => {
            vhost_user::reply_word(header.request, 0)
        }
        RequestAnswer::Done => return Ok(true),
    };
    system.syscalls.add(1);
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = match file {
        None => rustix::net::send(client, &bytes, flags),
        Some(file) => {
            let files = [file];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            rustix::net::sendmsg(client, &[IoSlice::new(&bytes)], &mut control, flags)
        }
    };
    match sent {
        Ok(sent) if sent == bytes.len() => Ok(true),
        Ok(sent) => Err(ClientFault::Partial { bytes: sent, len: bytes.len() }),
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(false),
        Err(source) => Err(ClientFault::System { what: "answering", source }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use ringfence_wire::vhost_user::{number, request};

    use super::*;
    use crate::testing::{memfd, send_with, state, words};

    #[test]
    fn files_belong_to_the_message_that_they_came_with() {
        let (near, far) = UnixStream::pair().unwrap();
        let (near, file) = (OwnedFd::from(near), memfd(4096).unwrap());
        let call = words(&[0]);
        // All are there before the first one is received.
        for (number, payload, has_file) in [
            (number::GET_FEATURES, &[][..], false),
            (number::SET_VRING_NUM, &state(0, 16), false),
            (number::SET_VRING_CALL, &call, true),
            (number::SET_OWNER, &[], false),
        ] {
            let files = [file.as_fd()];
            let files = if has_file { &files[..] } else { &[] };
            send_with(&far, &request(number, false, payload), files).unwrap();
        }
        let mut found = Vec::new();
        while let Incoming::Message(message) = receive(&near, &Counters::default()).unwrap() {
            found.push((message.header.request, message.files.len()));
        }
        let wanted = [
            (number::GET_FEATURES, 0),
            (number::SET_VRING_NUM, 0),
            (number::SET_VRING_CALL, 1),
            (number::SET_OWNER, 0),
        ];
        assert_eq!(found, wanted);
    }
}
