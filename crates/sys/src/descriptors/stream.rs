//! Stream sockets that take bytes and no descriptors.

// #syscall all setsockopt 1=SOL_SOCKET 2=83: SO_PASSRIGHTS: no descriptors may be sent to this end
// #syscall all getsockopt 1=SOL_SOCKET: the family of a socket
// #syscall all sendto,recvfrom: bytes
// #syscall all recvmsg: a look at bytes that may come with descriptors

use std::io::IoSliceMut;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, sockopt};

use super::{dispose, dispose_socket};

/// Socket option of Linux 6.16: this end takes descriptors. On by default; an accepted socket has it as
/// its listener had it when the peer connected.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Makes the kernel refuse descriptors that a peer would send to `socket`, a Unix socket. Returns
/// `false` if this kernel cannot (before Linux 6.16).
///
/// # Errors
///
/// `ENOTSOCK` or `EOPNOTSUPP` if `socket` is no Unix socket.
pub fn refuse_descriptors(socket: impl AsFd) -> Result<bool, Errno> {
    if sockopt::socket_domain(&socket)? != AddressFamily::UNIX {
        return Err(Errno::OPNOTSUPP);
    }
    let off: libc::c_int = 0;
    let bytes = size_of_val(&off).try_into().map_err(|_| Errno::INVAL)?;
    // SAFETY: the kernel reads `bytes` bytes of `off`, which lives until the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            bytes,
        )
    };
    if done == 0 {
        return Ok(true);
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        // A filter of system calls that does not know the option counts as a kernel without it.
        Some(Errno::NOPROTOOPT | Errno::PERM) => Ok(false),
        Some(errno) => Err(errno),
        None => Err(Errno::INVAL),
    }
}

/// Outcomes of a call of [`ByteSocket::receive`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamReceived {
    /// Number of bytes, at least one.
    Bytes(usize),
    Empty,
    /// The other end is closed.
    Closed,
    /// The peer sent descriptors. They stay in the queue, and the socket is unusable.
    Descriptors,
}

/// End of a Unix stream socket that takes bytes and no descriptors.
///
/// The peer may have sent descriptors before this end refused them. So the first reads look before they
/// take, until they have seen the whole queue once. On a kernel that cannot refuse descriptors every read does.
/// An end whose queue may hold descriptors is disposed of, not closed.
#[derive(Debug)]
pub struct ByteSocket {
    socket: ManuallyDrop<OwnedFd>,
    /// The kernel refuses descriptors for this end.
    refuses: bool,
    /// The whole queue was seen after that, and held none.
    is_clean: AtomicBool,
}

impl ByteSocket {
    /// Wraps the end `socket`. Disposes of anything but a Unix socket.
    ///
    /// # Errors
    ///
    /// `ENOTSOCK` or `EOPNOTSUPP` if `socket` is no Unix socket.
    pub fn new(socket: OwnedFd) -> Result<ByteSocket, Errno> {
        match refuse_descriptors(&socket) {
            Ok(refuses) => Ok(ByteSocket {
                socket: ManuallyDrop::new(socket),
                refuses,
                is_clean: AtomicBool::new(false),
            }),
            Err(errno) => {
                dispose(socket);
                Err(errno)
            }
        }
    }

    /// Receives bytes into `buffer`, which is not empty. Never blocks.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<StreamReceived, Errno> {
        // Only a hint to this end: the kernel orders the queue.
        let wanted = if self.is_clean.load(Ordering::Relaxed) {
            buffer.len()
        } else {
            match self.look(buffer)? {
                StreamReceived::Bytes(bytes) => bytes,
                other => return Ok(other),
            }
        };
        match rustix::net::recv(&*self.socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(StreamReceived::Closed),
            Ok((_, bytes)) => Ok(StreamReceived::Bytes(bytes)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(StreamReceived::Empty),
            Err(errno) => Err(errno),
        }
    }

    /// Looks at what is there. Exactly as many bytes as this returns can be taken: what comes later may
    /// have descriptors.
    fn look(&self, buffer: &mut [u8]) -> Result<StreamReceived, Errno> {
        let room = buffer.len();
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let mut into = [IoSliceMut::new(buffer)];
        let mut none = RecvAncillaryBuffer::default();
        match rustix::net::recvmsg(&*self.socket, &mut into, &mut none, flags) {
            Ok(got) if got.flags.contains(ReturnFlags::CTRUNC) => Ok(StreamReceived::Descriptors),
            Ok(got) if got.bytes == 0 => Ok(StreamReceived::Closed),
            Ok(got) => {
                // Less than there is room for is all that there was.
                if got.bytes < room {
                    self.is_clean.store(self.refuses, Ordering::Relaxed);
                }
                Ok(StreamReceived::Bytes(got.bytes))
            }
            Err(Errno::CONNRESET) => Ok(StreamReceived::Closed),
            Err(Errno::AGAIN) => {
                self.is_clean.store(self.refuses, Ordering::Relaxed);
                Ok(StreamReceived::Empty)
            }
            Err(Errno::INTR) => Ok(StreamReceived::Empty),
            Err(errno) => Err(errno),
        }
    }

    /// Sends as much of `bytes` as there is room for, without blocking; a closed end raises no signal.
    ///
    /// # Errors
    ///
    /// The system's; `EAGAIN` if there is no room.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        rustix::net::send(&*self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }
}

impl AsFd for ByteSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ByteSocket {
    fn drop(&mut self) {
        // SAFETY: the field is taken out once, here, and not used again.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        if !self.is_clean.load(Ordering::Relaxed) {
            dispose_socket(socket);
        }
    }
}
