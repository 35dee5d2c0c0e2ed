//! Answers `GET /metrics`, and nothing else.
//!
//! One thread, one connection at a time, one request each. A client has [`PATIENCE`] for all of it and
//! may send [`REQUEST_MAX`] octets: whoever is slow or wordy keeps other clients waiting for that long,
//! and nobody else. The daemon itself is asked at most once in [`FRESH`]: who asks more often gets the same
//! answer again.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::refuse_descriptors;

use super::super::config::Listen;
use super::super::status::Snapshot;
use super::{CONTENT_TYPE, render};

/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer is given again.
const FRESH: Duration = Duration::from_secs(1);
/// Octets of a request.
const REQUEST_MAX: usize = 8192;
/// Headers of a request.
const HEADERS_MAX: usize = 64;

/// Why metrics cannot be asked for.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    /// Nothing can be listened at there.
    #[error("cannot listen at {at} for requests for metrics: {source}")]
    Listen {
        /// Where.
        at: String,
        /// Why not.
        source: io::Error,
    },
    /// There is no thread for it.
    #[error("cannot start the thread that answers requests for metrics: {0}")]
    Thread(#[source] io::Error),
}

enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

/// Answers requests as long as the process lives.
#[derive(Debug)]
pub struct Exporter(());

impl Exporter {
    /// Listens, and answers on a thread of its own with what `ask` says; `None` is "not now".
    ///
    /// # Errors
    ///
    /// [`ExporterError`].
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

/// A socket at `path`, in place of what a process before this one may have left there.
fn bind(path: &Path) -> io::Result<Listener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    refuse_descriptors(&listener)?;
    // What is told about guests is for the administrator.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(Listener::Unix(listener, path.to_owned()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            // Somebody may have removed it before.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What is told, and when it was made.
struct Answers<F> {
    ask: F,
    last: Option<(Instant, String)>,
}

impl<F: Fn() -> Option<Snapshot>> Answers<F> {
    /// The metrics, or nothing if the daemon does not answer.
    fn metrics(&mut self) -> Option<&str> {
        self.last.take_if(|(made, _)| made.elapsed() >= FRESH);
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
            // What a client does not wait for it does not get.
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "no request for metrics was accepted");
                // Descriptors may have run out: not again at once.
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
    /// Lets reads and writes wait until `deadline` and no longer.
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
    let deadline = Instant::now() + PATIENCE;
    let reply = match request(client, deadline)? {
        Asked::Metrics { body } => match answers.metrics() {
            Some(text) => response("200 OK", CONTENT_TYPE, text, body),
            None => plain("503 Service Unavailable", "the daemon does not answer; see its log\n"),
        },
        Asked::Method => plain("405 Method Not Allowed", "only GET is understood\n"),
        Asked::Path => plain("404 Not Found", "metrics are at /metrics\n"),
        Asked::Nonsense => plain("400 Bad Request", "that is no request of HTTP/1\n"),
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    Metrics { body: bool },
    Method,
    Path,
    Nonsense,
}

fn request(client: &mut Client, deadline: Instant) -> io::Result<Asked> {
    let mut bytes = [0; REQUEST_MAX];
    let mut len = 0;
    loop {
        client.wait_until(deadline)?;
        match client.read(&mut bytes[len..])? {
            0 => return Ok(Asked::Nonsense),
            n => len += n,
        }
        if let Some(asked) = understand(&bytes[..len]) {
            return Ok(asked);
        }
        if len == bytes.len() {
            return Ok(Asked::Nonsense);
        }
    }
}

/// What a request is for; `None` while it goes on.
pub(super) fn understand(bytes: &[u8]) -> Option<Asked> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(status) if status.is_partial() => None,
        Ok(_) => {
            let path = request.path.unwrap_or_default().split('?').next();
            Some(match request.method {
                _ if path != Some("/metrics") => Asked::Path,
                Some("GET") => Asked::Metrics { body: true },
                Some("HEAD") => Asked::Metrics { body: false },
                _ => Asked::Method,
            })
        }
        Err(_) => Some(Asked::Nonsense),
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
