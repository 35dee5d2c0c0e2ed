//! Byte stream to the store: non-blocking reads and writes on a socket or a device.

// #syscall daemon read,write: the store's device
// #syscall daemon fcntl 1=F_GETFL: O_NONBLOCK
// #syscall daemon fcntl 1=F_SETFL: O_NONBLOCK

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::net::sockopt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_sys::descriptors::{ByteSocket, StreamReceived};

/// Non-blocking byte stream of a client or server.
#[derive(Debug)]
pub(super) enum Stream {
    /// Stream socket. Each call asks for non-blocking I/O, because `O_NONBLOCK` belongs to the open file,
    /// which the creator of the socket may still hold and change.
    Socket(ByteSocket),
    /// Device that this process opened and set to `O_NONBLOCK`.
    Device(OwnedFd),
}

/// Outcomes of a read or write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transfer {
    /// Number of bytes that were moved; at least one.
    Bytes(usize),
    /// Nothing can be moved until the descriptor is ready.
    WouldBlock,
    /// The peer closed the stream.
    Closed,
}

impl Stream {
    /// Creates a stream over `fd`.
    pub(super) fn new(fd: OwnedFd) -> Result<Stream, Errno> {
        // Unlike fstat, this needs no file system: the descriptor may come from another domain.
        if sockopt::socket_type(&fd) != Err(Errno::NOTSOCK) {
            return Ok(Stream::Socket(ByteSocket::new(fd)?));
        }
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Stream::Device(fd))
    }

    /// Reads available bytes into `buffer`, which is not empty. A peer that sends descriptors violates the
    /// protocol (`EBADMSG`).
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Transfer, Errno> {
        let outcome = match self {
            Stream::Socket(socket) => {
                return match socket.receive(buffer)? {
                    StreamReceived::Bytes(len) => Ok(Transfer::Bytes(len)),
                    StreamReceived::Empty => Ok(Transfer::WouldBlock),
                    StreamReceived::Closed => Ok(Transfer::Closed),
                    StreamReceived::Descriptors => Err(Errno::BADMSG),
                };
            }
            Stream::Device(fd) => read(fd, &mut *buffer),
        };
        match outcome {
            Ok(0) | Err(Errno::CONNRESET) => Ok(Transfer::Closed),
            Ok(len) => Ok(Transfer::Bytes(len)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Transfer::WouldBlock),
            Err(errno) => Err(errno),
        }
    }

    /// Sends as many of `bytes`, which are not empty, as the descriptor accepts.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<Transfer, Errno> {
        let outcome = match self {
            Stream::Socket(socket) => socket.send(bytes),
            Stream::Device(fd) => write(fd, bytes),
        };
        match outcome {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(Transfer::WouldBlock),
            Ok(len) => Ok(Transfer::Bytes(len)),
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(Transfer::Closed),
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
