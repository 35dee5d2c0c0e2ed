//! Hub protocol: messages between a domain and its hub, over a `SOCK_SEQPACKET` Unix socket.
//!
//! A message is eight u32, little-endian, and up to four file descriptors. Each request gets exactly one
//! reply with the same kind and sequence number, in order. A request with sequence number 0 gets no
//! reply.
//!
//! ```text
//! request  kind  seq  args[6]
//! reply    kind | 0x8000_0000  seq  status (0 or a refusal)  args[5]
//!
//! HELLO  1  wanted domid (0xFFFF_FFFF: any)            -> domid
//! STORE  2                                             -> + a stream socket, xenstore protocol
//! LEND   3  peer, writable, read-only, references, window (0: the grant arena); four files ->
//! FETCH  4  granter, window                            -> writable, read-only, references + four files
//! ALLOC  5  remote domid                               -> port + socket
//! BIND   6  remote domid, remote port                  -> port + socket
//! CLOSE  7  port                                       ->
//! ```

// #syscall driver,frontend,card,daemon sendmsg,recvmsg: messages of the hub, with descriptors

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use ringfence_sys::descriptors::{Descriptors, MessageError, receive_message};

use crate::error::PlatformError;

/// Size of a message in bytes.
pub(crate) const MESSAGE_BYTES: usize = 32;
/// Maximum number of descriptors with one message.
pub(crate) const FDS_MAX: usize = 4;
/// Bit that marks the kind of a reply.
pub(crate) const REPLY: u32 = 0x8000_0000;
/// Sequence number of a request without a reply.
pub(crate) const UNANSWERED: u32 = 0;
/// Wanted domain id that leaves the choice to the hub.
pub(crate) const ANY_DOMAIN: u32 = u32::MAX;

/// Kinds of request, by their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Hello,
    Store,
    Lend,
    Fetch,
    Alloc,
    Bind,
    Close,
    Unknown(u32),
}

impl Kind {
    pub(crate) fn from_raw(raw: u32) -> Kind {
        match raw {
            1 => Kind::Hello,
            2 => Kind::Store,
            3 => Kind::Lend,
            4 => Kind::Fetch,
            5 => Kind::Alloc,
            6 => Kind::Bind,
            7 => Kind::Close,
            other => Kind::Unknown(other),
        }
    }

    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Kind::Hello => 1,
            Kind::Store => 2,
            Kind::Lend => 3,
            Kind::Fetch => 4,
            Kind::Alloc => 5,
            Kind::Bind => 6,
            Kind::Close => 7,
            Kind::Unknown(other) => other,
        }
    }
}

/// Reasons for which the hub refuses a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Refusal {
    /// Bytes that are no message of this protocol.
    #[error("the message is malformed")]
    Malformed,
    /// Number of descriptors that does not match the message.
    #[error("the message came with the wrong number of descriptors")]
    Descriptors,
    #[error("a quota of this domain is used up")]
    Quota,
    /// Unknown domain, port or arena.
    #[error("there is no such thing")]
    NotFound,
    /// Object of another domain, or a number that this domain may not choose.
    #[error("it is not for this domain")]
    NotPermitted,
    #[error("it is in use already")]
    InUse,
    /// Arena whose files break a rule.
    #[error("the arena breaks a rule")]
    BadArena,
    /// Failed system call of the hub.
    #[error("the system refused")]
    System,
    /// Number of a newer hub.
    #[error("refusal {0}, unknown to this version")]
    Unknown(u32),
}

impl Refusal {
    /// Returns the error of a request `what`, a verb with its object, that the hub refused.
    pub(super) fn to(self, what: &'static str) -> PlatformError {
        PlatformError::Refused { what, source: self.into() }
    }

    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Refusal::Malformed => 1,
            Refusal::Descriptors => 2,
            Refusal::Quota => 3,
            Refusal::NotFound => 4,
            Refusal::NotPermitted => 5,
            Refusal::InUse => 6,
            Refusal::System => 7,
            Refusal::BadArena => 8,
            Refusal::Unknown(n) => n,
        }
    }

    pub(crate) fn from_raw(raw: u32) -> Refusal {
        match raw {
            1 => Refusal::Malformed,
            2 => Refusal::Descriptors,
            3 => Refusal::Quota,
            4 => Refusal::NotFound,
            5 => Refusal::NotPermitted,
            6 => Refusal::InUse,
            7 => Refusal::System,
            8 => Refusal::BadArena,
            n => Refusal::Unknown(n),
        }
    }
}

/// Decoded request or reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HubMessage {
    pub(crate) kind: u32,
    pub(crate) seq: u32,
    pub(crate) args: [u32; 6],
}

impl HubMessage {
    pub(crate) fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        let words = [self.kind, self.seq].into_iter().chain(self.args);
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> HubMessage {
        let mut words = [0u32; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*chunk);
        }
        let [kind, seq, args @ ..] = words;
        HubMessage { kind, seq, args }
    }
}

/// Outcomes of a call of [`receive`].
pub(crate) enum HubReceived {
    Message(HubMessage, Descriptors),
    /// Data that is no message. It may still be in the queue, so the socket must be disposed of.
    Malformed(Refusal),
    /// Closed by the other side.
    Closed,
    /// Empty queue.
    Nothing,
}

/// Receives one message without blocking.
pub(crate) fn receive(socket: impl AsFd) -> HubReceived {
    // One byte more than a message has, so that a longer one is detected.
    let mut bytes = [0u8; MESSAGE_BYTES + 1];
    let got = match receive_message(socket, &mut bytes, FDS_MAX) {
        Ok(got) => got,
        Err(MessageError::Descriptors { .. } | MessageError::Pending { .. }) => {
            return HubReceived::Malformed(Refusal::Descriptors);
        }
        Err(MessageError::Bytes { .. }) => return HubReceived::Malformed(Refusal::Malformed),
        Err(MessageError::System(Errno::AGAIN | Errno::INTR)) => return HubReceived::Nothing,
        Err(MessageError::System(_)) => return HubReceived::Closed,
    };
    if got.bytes == 0 && got.descriptors.is_empty() {
        return HubReceived::Closed;
    }
    match (bytes.first_chunk(), got.bytes) {
        (Some(message), MESSAGE_BYTES) => {
            HubReceived::Message(HubMessage::from_bytes(message), got.descriptors)
        }
        _ => HubReceived::Malformed(Refusal::Malformed),
    }
}

/// Sends one message without blocking.
pub(crate) fn send(
    socket: impl AsFd,
    message: HubMessage,
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let bytes = message.to_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(rustix::io::Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn message_round_trips_through_bytes(kind: u32, seq: u32, args: [u32; 6]) {
            let message = HubMessage { kind, seq, args };
            prop_assert_eq!(HubMessage::from_bytes(&message.to_bytes()), message);
        }

        #[test]
        fn kind_and_refusal_round_trip_for_any_number(raw: u32) {
            prop_assert_eq!(Kind::from_raw(raw).to_raw(), raw);
            prop_assert_eq!(Refusal::from_raw(raw).to_raw(), raw);
        }
    }
}
