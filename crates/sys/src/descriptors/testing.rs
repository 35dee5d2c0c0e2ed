//! A descriptor whose close blocks, a sender of descriptors, and a check of sockets that take none.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

// #syscall none: for tests

use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

/// A TCP connection on loopback whose peer does not read: closing the last reference to it waits for
/// `SO_LINGER` seconds.
pub struct Lingering {
    /// Keeps the port.
    pub _listener: TcpListener,
    /// The end that does not read. Its drop ends the wait.
    pub _reader: TcpStream,
    /// The end whose close blocks.
    pub fd: OwnedFd,
}

impl Lingering {
    #[allow(clippy::new_without_default, reason = "it opens sockets")]
    /// Opens a connection whose close blocks.
    pub fn new() -> Lingering {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        sockopt::set_socket_linger(&writer, Some(Duration::from_secs(3600))).unwrap();
        Lingering { _listener: listener, _reader: reader, fd: writer.into() }
    }
}

/// Descriptors that one message can carry (`SCM_MAX_FD`).
const FDS_MAX: usize = 253;

/// Sends bytes and descriptors over any socket, without waiting.
///
/// # Errors
///
/// The system's.
pub fn send_raw(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Returns `true` if this kernel must refuse descriptors: Linux 6.16 or later.
pub fn kernel_refuses() -> bool {
    let name = rustix::system::uname();
    let mut numbers = name.release().to_str().unwrap().split(['.', '-']);
    let mut next = || numbers.next().and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
    (next(), next()) >= (6, 16)
}

/// Checks that the other end of `socket`, which is connected, takes no descriptors.
pub fn assert_descriptors_are_refused(socket: impl AsFd) {
    if !kernel_refuses() {
        eprintln!("SKIPPED: this kernel has no SO_PASSRIGHTS (Linux 6.16)");
        return;
    }
    let refused = send_raw(&socket, b"x", &[socket.as_fd()]);
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EPERM));
}
