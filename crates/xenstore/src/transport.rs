//! Non-blocking bytes over whatever descriptor the store is reached by.

// #syscall driver,frontend,daemon fstat,read,write,sendto,recvfrom: the store's connection, a socket or a device
// #syscall driver,frontend,daemon fcntl 1=F_GETFL: O_NONBLOCK
// #syscall driver,frontend,daemon fcntl 1=F_SETFL: O_NONBLOCK

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{Errno, read, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A byte stream that is never waited for.
#[derive(Debug)]
pub(super) enum Stream {
    /// A stream socket. Each call says that it must not block: `O_NONBLOCK` belongs to the open
    /// file, which whoever made the socket may still hold and change.
    Socket(OwnedFd),
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
        if FileType::from_raw_mode(fstat(&fd)?.st_mode) == FileType::Socket {
            return Ok(Stream::Socket(fd));
        }
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Stream::Device(fd))
    }

    /// Reads what is there into `buffer`, which is not empty. Descriptors that come along a socket
    /// are closed by the kernel.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Moved, Errno> {
        let outcome = match self {
            Stream::Socket(fd) => recv(fd, &mut *buffer, RecvFlags::DONTWAIT).map(|(len, _)| len),
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
            Stream::Socket(fd) => send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
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
            Stream::Socket(fd) | Stream::Device(fd) => fd.as_fd(),
        }
    }
}
