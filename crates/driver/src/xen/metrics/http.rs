//! HTTP server of the exporter: answers `GET /metrics`.
//!
//! One thread serves one connection at a time, and one request on each. A client has [`CLIENT_TIMEOUT`]
//! for its request and the answer, and may send [`REQUEST_MAX`] bytes. A slow client delays only other
//! clients of the exporter, and only for that time. The control thread is asked at most once in
//! [`ANSWER_LIFETIME`]. Requests within that time get the same answer.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::refuse_descriptors;

use super::render::{CONTENT_TYPE, render};
use crate::xen::config::Listen;
use crate::xen::status::Snapshot;

/// Time that a client has for its request and the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which an answer is used again.
const ANSWER_LIFETIME: Duration = Duration::from_secs(1);
/// Maximum size of a request in bytes.
const REQUEST_MAX: usize = 8192;
/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 64;

/// Reasons for which the exporter cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("cannot listen at {at} for requests for metrics: {source}")]
    Listen { at: String, source: io::Error },
    #[error("cannot start the thread that answers requests for metrics: {0}")]
    Thread(#[source] io::Error),
}

enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

/// Handle of the exporter. Its thread runs until the process exits.
#[derive(Debug)]
pub struct Exporter(());

impl Exporter {
    /// Listens, and starts the thread. `ask` returns a snapshot, or `None` if the daemon does not answer.
    ///
    /// # Errors
    ///
    /// Returns [`ExporterError`] if the address cannot be used or no thread can be started.
    pub fn start(
        listen: &Listen,
        ask: impl Fn() -> Option<Snapshot> + Send + 'static,
    ) -> Result<Exporter, ExporterError> {
        let (listener, at) = match listen {
            Listen::Unix(path) => (bind(path), format!("unix:{}", path.display())),
            Listen::Loopback(address) => {
                (TcpListener::bind(address).map(Listener::Tcp), address.to_string())
            }
        };
        let listener = listener.map_err(|source| ExporterError::Listen { at, source })?;
        std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || serve(&listener, Answers { ask, last: None }))
            .map_err(ExporterError::Thread)?;
        Ok(Exporter(()))
    }
}

/// Listens at `path`. Replaces a socket that an earlier process left there.
fn bind(path: &Path) -> io::Result<Listener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    refuse_descriptors(&listener)?;
    // Metrics of guests are only for the administrator.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(Listener::Unix(listener, path.to_owned()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            // The file may have been removed by another process.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Last answer, and the source of new ones.
struct Answers<F> {
    ask: F,
    last: Option<(Instant, String)>,
}

impl<F: Fn() -> Option<Snapshot>> Answers<F> {
    /// Returns the metrics, or `None` if the daemon does not answer.
    fn metrics(&mut self) -> Option<&str> {
        self.last.take_if(|(made, _)| made.elapsed() >= ANSWER_LIFETIME);
        if self.last.is_none() {
            let snapshot = (self.ask)()?;
            self.last = Some((Instant::now(), render(&snapshot)));
        }
        self.last.as_ref().map(|(_, text)| text.as_str())
    }
}

fn serve<F: Fn() -> Option<Snapshot>>(listener: &Listener, mut answers: Answers<F>) {
    loop {
        let answered = match listener {
            Listener::Unix(listener, _) => {
                listener.accept().map(|(client, _)| answer(&mut Client::Unix(client), &mut answers))
            }
            Listener::Tcp(listener) => {
                listener.accept().map(|(client, _)| answer(&mut Client::Tcp(client), &mut answers))
            }
        };
        match answered {
            // An error means that the client disconnected or was too slow.
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "no request for metrics was accepted");
                // The process may have no descriptors left: wait before the next try.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

enum Client {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Client {
    /// Limits the waits of the next read and write to the time until `deadline`.
    fn wait_until(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match self {
            Client::Unix(stream) => {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            }
            Client::Tcp(stream) => {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            }
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Client::Unix(stream) => stream.read(into),
            Client::Tcp(stream) => stream.read(into),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Client::Unix(stream) => stream.write(from),
            Client::Tcp(stream) => stream.write(from),
        }
    }
}

fn answer<F: Fn() -> Option<Snapshot>>(
    client: &mut Client,
    answers: &mut Answers<F>,
) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    let reply = match request(client, deadline)? {
        Request::Metrics { body } => match answers.metrics() {
            Some(text) => response("200 OK", CONTENT_TYPE, text, body),
            None => plain("503 Service Unavailable", "the daemon does not answer; see its log\n"),
        },
        Request::Method => plain("405 Method Not Allowed", "only GET is understood\n"),
        Request::Path => plain("404 Not Found", "metrics are at /metrics\n"),
        Request::Invalid => plain("400 Bad Request", "that is no request of HTTP/1\n"),
    };
    let mut rest = reply.as_slice();
    while !rest.is_empty() {
        client.wait_until(deadline)?;
        match client.write(rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => rest = rest.get(n..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Parsed request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    Metrics { body: bool },
    Method,
    Path,
    Invalid,
}

fn request(client: &mut Client, deadline: Instant) -> io::Result<Request> {
    let mut bytes = [0; REQUEST_MAX];
    let mut len = 0;
    loop {
        client.wait_until(deadline)?;
        match client.read(&mut bytes[len..])? {
            0 => return Ok(Request::Invalid),
            n => len += n,
        }
        if let Some(parsed) = parse_request(&bytes[..len]) {
            return Ok(parsed);
        }
        if len == bytes.len() {
            return Ok(Request::Invalid);
        }
    }
}

/// Parses a request. Returns `None` while it is incomplete.
pub(super) fn parse_request(bytes: &[u8]) -> Option<Request> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(status) if status.is_partial() => None,
        Ok(_) => {
            let path = request.path.unwrap_or_default().split('?').next();
            Some(match request.method {
                _ if path != Some("/metrics") => Request::Path,
                Some("GET") => Request::Metrics { body: true },
                Some("HEAD") => Request::Metrics { body: false },
                _ => Request::Method,
            })
        }
        Err(_) => Some(Request::Invalid),
    }
}

fn plain(status: &str, body: &str) -> Vec<u8> {
    response(status, "text/plain; charset=utf-8", body, true)
}

fn response(status: &str, content_type: &str, body: &str, with_body: bool) -> Vec<u8> {
    let mut text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         Allow: GET, HEAD\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if with_body {
        text.push_str(body);
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use ringfence_sys::descriptors::testing::assert_descriptors_are_refused;

    use super::*;

    #[test]
    fn descriptor_to_the_metrics_socket_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.sock");
        let _listener = bind(&path).unwrap();
        assert_descriptors_are_refused(UnixStream::connect(&path).unwrap());
    }
}
