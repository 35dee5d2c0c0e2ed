//! Messages with descriptors, over a socket that keeps message boundaries, and bytes of a stream with descriptors.

// #syscall all recvmsg: a message with its descriptors, or a look at it
// #syscall all recvfrom: taking a message that was looked at out of the queue

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use super::Descriptors;
use super::disposal::{MESSAGE_FDS_MAX, PEER_PENDING_MAX};

/// Maximum number of descriptors that a protocol of Ringfence sends with a message.
const FDS_MAX: usize = 64;

/// Message that a socket received, with its descriptors.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// Bytes in the caller's buffer. 0: the other end is closed, or sent an empty message.
    pub bytes: usize,
    /// Descriptors that came with it, at most as many as the caller takes.
    pub descriptors: Descriptors,
}

/// Reasons for which no message was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MessageError {
    /// More descriptors than the caller takes. The message is still in the queue: the socket is to be
    /// [disposed of](super::dispose), not closed.
    #[error("a message with more than {limit} descriptors")]
    Descriptors { limit: usize },
    /// More bytes than the buffer has. The message is still in the queue, as above.
    #[error("a message of more than {limit} bytes")]
    Bytes { limit: usize },
    /// Too many descriptors that came over this socket are not closed yet. The message is still in the
    /// queue, as above.
    #[error("more than {limit} descriptors that are not closed yet")]
    Pending { limit: usize },
    /// The system refused; `EAGAIN` when no message is there.
    #[error(transparent)]
    System(#[from] Errno),
}

/// Receives one message with at most `fds_max` descriptors, without blocking. `socket` must keep
/// message boundaries, and nobody else may read from it.
///
/// # Errors
///
/// [`MessageError`]. After any but [`MessageError::System`] the socket is to be disposed of.
pub fn receive_message(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds_max: usize,
) -> Result<ReceivedMessage, MessageError> {
    let looked = look(&socket, buffer, fds_max)?;
    // The duplicates are held: the references that the kernel drops here are not the last ones.
    match rustix::net::recv(&socket, &mut [0_u8; 0][..], RecvFlags::DONTWAIT) {
        Ok(_) | Err(Errno::CONNRESET) => Ok(looked),
        Err(errno) => Err(errno.into()),
    }
}

/// Receives at most as many bytes of a stream as `buffer` has, without blocking, with the at most `fds_max` descriptors that
/// came with these bytes, and with no others. A look at the queue would go on to descriptors of later bytes, so here every
/// descriptor is taken, also those that are too many, and disposed of then.
///
/// # Errors
///
/// [`MessageError`]. The bytes are no longer in the queue. After any but [`MessageError::System`] the socket is to be
/// disposed of.
pub fn take_of_stream(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds_max: usize,
) -> Result<ReceivedMessage, MessageError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut into = [IoSliceMut::new(buffer)];
    let got = rustix::net::recvmsg(&socket, &mut into, &mut control, flags)?;
    let descriptors = checked(&mut control, &socket, got.flags, fds_max)?;
    Ok(ReceivedMessage { bytes: got.bytes, descriptors })
}

/// Returns the descriptors of a message that came over `socket`, unless they are too many.
fn checked(
    control: &mut RecvAncillaryBuffer<'_>,
    socket: impl AsFd,
    flags: ReturnFlags,
    fds_max: usize,
) -> Result<Descriptors, MessageError> {
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let descriptors = Descriptors::received(fds, socket);
    if descriptors.is_over_allowance() {
        return Err(MessageError::Pending { limit: PEER_PENDING_MAX });
    }
    if flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > fds_max {
        return Err(MessageError::Descriptors { limit: fds_max });
    }
    Ok(descriptors)
}

/// Looks at the next message, and leaves it in the queue.
fn look(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds_max: usize,
) -> Result<ReceivedMessage, MessageError> {
    let limit = buffer.len();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let room = rustix::cmsg_space!(ScmRights(fds_max.clamp(1, FDS_MAX)));
    let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
    let mut into = [IoSliceMut::new(buffer)];
    let got = rustix::net::recvmsg(&socket, &mut into, &mut control, flags)?;
    let descriptors = checked(&mut control, &socket, got.flags, fds_max)?;
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(MessageError::Bytes { limit });
    }
    Ok(ReceivedMessage { bytes: got.bytes, descriptors })
}
