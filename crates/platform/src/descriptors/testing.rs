//! A descriptor whose close blocks.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;

/// A TCP connection on loopback whose peer does not read: closing the last reference to it waits for
/// `SO_LINGER` seconds.
pub(crate) struct Lingering {
    pub(crate) _listener: TcpListener,
    /// The end that does not read. Its drop ends the wait.
    pub(crate) _reader: TcpStream,
    /// The end whose close blocks.
    pub(crate) fd: OwnedFd,
}

impl Lingering {
    pub(crate) fn new() -> Lingering {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        sockopt::set_socket_linger(&writer, Some(Duration::from_secs(3600))).unwrap();
        Lingering { _listener: listener, _reader: reader, fd: writer.into() }
    }
}
