//! Non-blocking bytes over whatever descriptor the store is reached by.

// #syscall daemon read,write: the store's device
// #syscall daemon fcntl 1=F_GETFL: O_NONBLOCK
// #syscall daemon fcntl 1=F_SETFL: O_NONBLOCK

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::net::sockopt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_sys::descriptors::{ByteSocket, Received};

/// A byte stream that is never waited for.
#[derive(Debug)]
pub(super) enum Stream {
    /// A stream socket. Each call says that it must not block: `O_NONBLOCK` belongs to the open
    /// file, which whoever made the socket may still hold and change.
    Socket(ByteSocket),
    /// A device, opened by this process and set to `O_NONBLOCK`.
    Device(OwnedFd),
}

/// What became of an attempt to move bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moved {
    /// So many bytes, at least one.
    Bytes(usize),
    /// None now; wait for the descriptor.
    NotNow,
    /// The other side is gone.
    Closed,
}

impl Stream {
    /// A stream over `fd`.
    pub(super) fn new(fd: OwnedFd) -> Result<Stream, Errno> {
        // Asks no file system, unlike fstat: the descriptor may come from another domain.
        if sockopt::socket_type(&fd) != Err(Errno::NOTSOCK) {
            return Ok(Stream::Socket(ByteSocket::new(fd)?));
        }
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Stream::Device(fd))
    }

    /// Reads what is there into `buffer`, which is not empty. A peer that sends descriptors along has
    /// broken the protocol (`EBADMSG`).
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Moved, Errno> {
        let outcome = match self {
            Stream::Socket(socket) => {
                return match socket.receive(buffer)? {
                    Received::Bytes(len) => Ok(Moved::Bytes(len)),
                    Received::Empty => Ok(Moved::NotNow),
                    Received::Closed => Ok(Moved::Closed),
                    Received::Descriptors => Err(Errno::BADMSG),
                };
            }
            Stream::Device(fd) => read(fd, &mut *buffer),
        };
        match outcome {
            Ok(0) | Err(Errno::CONNRESET) => Ok(Moved::Closed),
            Ok(len) => Ok(Moved::Bytes(len)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Moved::NotNow),
            Err(errno) => Err(errno),
        }
    }

    /// Sends as much of `bytes`, which are not none, as goes.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<Moved, Errno> {
        let outcome = match self {
            Stream::Socket(socket) => socket.send(bytes),
            Stream::Device(fd) => write(fd, bytes),
        };
        match outcome {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(Moved::NotNow),
            Ok(len) => Ok(Moved::Bytes(len)),
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(Moved::Closed),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Socket(socket) => socket.as_fd(),
            Stream::Device(fd) => fd.as_fd(),
        }
    }
}
