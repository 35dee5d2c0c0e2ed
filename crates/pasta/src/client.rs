//! Sockets by which clients change ports of a session, and their clients: what `--api-socket` and `--conf-path` have in
//! common. No call blocks.

use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use ringfence_hostnet::socket_file;

/// Time within which a client sends its whole request.
const CLIENT_TIME: Duration = Duration::from_secs(10);

/// Creates a listening socket at `path`, which does not block. A socket that an earlier process left there is replaced.
/// Only its user can connect.
pub(super) fn listen(option: &str, path: &Path) -> anyhow::Result<UnixListener> {
    let what = || format!("{option} {}", path.display());
    if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
        std::fs::remove_file(path).with_context(what)?;
    }
    socket_file::bind(path).with_context(what)
}

/// Client that has not sent its whole request yet.
#[derive(Debug)]
pub(super) struct SocketClient {
    pub(super) stream: UnixStream,
    /// Bytes that have arrived.
    pub(super) bytes: Vec<u8>,
    /// End of the client's time.
    pub(super) until: Instant,
}

/// Result of reading from a client once.
pub(super) enum ClientRead {
    /// More bytes.
    Read,
    /// End of the stream.
    End,
    /// Nothing yet.
    Waiting,
    /// Connection that failed, or whose time is over.
    Gone,
}

impl SocketClient {
    /// Starts the time of a client that has connected.
    pub(super) fn new(stream: UnixStream) -> io::Result<SocketClient> {
        stream.set_nonblocking(true)?;
        Ok(SocketClient { stream, bytes: Vec::new(), until: Instant::now() + CLIENT_TIME })
    }

    /// Reads at most 4096 bytes that have arrived.
    pub(super) fn read(&mut self) -> ClientRead {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return ClientRead::End,
                Ok(read) => {
                    self.bytes.extend_from_slice(&buffer[..read]);
                    return ClientRead::Read;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let is_over = Instant::now() >= self.until;
                    return if is_over { ClientRead::Gone } else { ClientRead::Waiting };
                }
                Err(_) => return ClientRead::Gone,
            }
        }
    }
}
