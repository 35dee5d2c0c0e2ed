//! Client and server of the cases that `bench uplink` measures.
//!
//! The server is a thread of the benchmark beside the host's loopback, or a process in the guest for
//! connections from outside. The client, a process in the guest or a thread, runs one case and
//! reports the result as a line of JSON.
//!
//! Each connection begins with a line of JSON that names its purpose ([`Work`]), or with an HTTP request that has it in
//! a field of its own, if the client knows the server by a name.

use std::io::{BufRead, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hdrhistogram::Histogram;
use ringfence_sys::datagrams::{self, Wait};
use rustix::io::Errno;
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, sockopt};
use serde::{Deserialize, Serialize};

use super::lookups;
use super::names::{self, Names, Target, Targets};
use super::slow;
use crate::messages::{self, say};

/// Bytes that one read or write of a stream handles, the size that other tools use.
const BUFFER: usize = 128 << 10;
/// Datagrams sent or received by one call.
const DATAGRAMS: usize = 32;
/// Time limit for the path to the host to come up, and for any other single step.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a page of the HTTP server.
const PAGE: usize = 16 << 10;
/// Field of an HTTP request that names a connection's purpose.
const WORK_FIELD: &str = "Work: ";
/// Bytes of a request and of its answer.
const SMALL: usize = 64;

/// Purpose of a connection, sent by the client as its first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    /// Receive to the end of the stream, then report the number of bytes.
    Take,
    /// Receive for `length`, with a receive buffer of this many bytes unless it is 0 and with a pause after the first
    /// bytes, then report the number of bytes.
    TakeSlowly { buffer: usize, pause: Duration, length: Duration },
    /// Send until the connection ends.
    Send,
    /// Send back all that arrives.
    Echo,
    /// Answer requests for a page.
    Pages,
    /// Count datagrams to the same port; report the number when asked.
    Count,
    /// Send datagrams of `size` bytes to the first sender for `length`; report their number.
    Datagrams { size: usize, length: Duration },
}

/// Workload of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// Bulk data in one or several streams
    TcpStream,
    /// Datagrams as fast as they can be sent
    UdpStream,
    /// A request and its answer, on one connection
    TcpRr,
    /// A connection for each request and its answer
    TcpCrr,
    /// Pages of 16 KiB over connections that are kept
    Http,
    /// Bulk data to a receiver with a small window, with a pause, or behind a slow link
    SlowPeer,
    /// Hundreds of look-ups at once, at a name server that answers late
    BulkDns,
}

/// Parameters of one case, passed to the client on its command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CaseSpec {
    pub(super) kind: WorkloadKind,
    pub(super) to: SocketAddr,
    /// Set if the data flows from the server to the client.
    pub(super) down: bool,
    pub(super) streams: usize,
    /// Bytes of a datagram, or of the server's receive buffer.
    pub(super) size: usize,
    pub(super) length: Duration,
    /// Pause of the server after the first bytes.
    #[serde(default)]
    pub(super) pause: Duration,
    /// Names whose addresses are used instead of `to`.
    pub(super) names: Option<Names>,
    /// Name server of look-ups, if it is not that of `resolv.conf`.
    #[serde(default)]
    pub(super) name_server: Option<IpAddr>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CaseResult {
    /// Nanoseconds from the first byte to the last, measured by the receiver.
    pub(super) nanos: u64,
    pub(super) bytes: u64,
    pub(super) sent: u64,
    pub(super) arrived: u64,
    /// Latency histogram: pairs of nanoseconds and count.
    pub(super) times: Vec<(u64, u64)>,
    /// Retransmission timeouts of the client's kernel.
    #[serde(default)]
    pub(super) timeouts: u64,
}

/// Message of a client or server process to the benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum EndMessage {
    /// The server listens on this port.
    Listening(u16),
    /// The client reached the server; the measurement begins.
    Begins,
    /// The case ended with this result.
    Done(Box<CaseResult>),
    /// The process failed, with the reason.
    Failed(String),
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Runs a client in a process of its own. Returns the exit status.
pub(super) fn client_main(order: &str) -> u8 {
    let begins = || say(&EndMessage::Begins);
    let came = serde_json::from_str(order).context("an order").and_then(|o| ask(&o, begins));
    let said = came.and_then(|came| say(&EndMessage::Done(Box::new(came))));
    messages::exit_status(said, EndMessage::Failed)
}

/// Runs a server in a process of its own. Returns the exit status.
pub(super) fn server_main(port: u16) -> u8 {
    let served = EndServer::bind(port).and_then(|server| {
        say(&EndMessage::Listening(server.port))?;
        server.serve()
    });
    messages::exit_status(served, EndMessage::Failed)
}

/// Runs a server and a name server in a process of its own. Returns the exit status.
pub(super) fn outside_main(port: u16) -> u8 {
    std::thread::spawn(|| {
        if let Err(error) = names::serve_names() {
            // A benchmark that is gone needs no message.
            let _ = say(&EndMessage::Failed(ringfence_hostnet::causes::causes(&error)));
        }
    });
    server_main(port)
}

/// Server on one port of every address, TCP and UDP.
pub(super) struct EndServer {
    listener: TcpListener,
    pub(super) port: u16,
}

impl EndServer {
    /// Binds a port; 0 lets the kernel choose one.
    pub(super) fn bind(port: u16) -> anyhow::Result<EndServer> {
        let listener = TcpListener::bind(("0.0.0.0", port)).context("listening")?;
        let port = listener.local_addr()?.port();
        Ok(EndServer { listener, port })
    }

    /// Accepts connections without end and serves each in a thread of its own.
    pub(super) fn serve(self) -> anyhow::Result<()> {
        loop {
            let (stream, _) = self.listener.accept().context("accepting")?;
            let port = self.port;
            std::thread::Builder::new().name("serve".to_owned()).spawn(move || {
                // The client may end its connection at any time.
                let _ = serve(stream, port);
            })?;
        }
    }
}

fn serve(stream: TcpStream, port: u16) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    if line.starts_with("GET ") {
        line = work_of_request(&mut stream)?;
    }
    match serde_json::from_str(&line)? {
        Work::Take => {
            let came = take(&mut stream, None)?;
            answer(stream.get_mut(), &came)
        }
        Work::TakeSlowly { buffer, pause, length } => {
            if buffer > 0 {
                sockopt::set_socket_recv_buffer_size(stream.get_ref(), buffer)?;
            }
            // The reader has bytes already that came with the first line.
            let begun = Instant::now();
            stream.fill_buf()?;
            std::thread::sleep(pause);
            let came = take(&mut stream, Some(begun + length))?;
            answer(stream.get_mut(), &CaseResult { nanos: nanos(begun.elapsed()), ..came })?;
            // The client closes the connection. A reset before that could overtake the answer.
            let _ = take(&mut stream, Some(Instant::now() + PATIENCE));
            Ok(())
        }
        Work::Send => send(stream.get_mut(), None),
        Work::Echo => echo(&mut stream),
        Work::Pages => pages(&mut stream),
        Work::Count => {
            let socket = UdpSocket::bind(("0.0.0.0", port)).context("a socket for datagrams")?;
            let counting = std::thread::spawn(move || count(&socket, &|| false));
            answer(stream.get_mut(), &CaseResult::default())?;
            // The client writes a line when it has sent all its datagrams.
            stream.read_line(&mut line)?;
            let came = counting.join().map_err(|_| anyhow::anyhow!("a thread that counts"))??;
            answer(stream.get_mut(), &came)
        }
        Work::Datagrams { size, length } => {
            let socket = UdpSocket::bind(("0.0.0.0", port)).context("a socket for datagrams")?;
            answer(stream.get_mut(), &CaseResult::default())?;
            socket.set_read_timeout(Some(PATIENCE))?;
            let (_, client) = socket.recv_from(&mut [0; SMALL])?;
            socket.connect(client)?;
            let sent = shoot(&socket, size, length)?;
            answer(stream.get_mut(), &CaseResult { sent, ..CaseResult::default() })
        }
    }
}

/// Reads the fields of a request. Returns the value of the field that names the connection's purpose.
fn work_of_request(stream: &mut impl BufRead) -> anyhow::Result<String> {
    let mut work = String::new();
    for _ in 0..16 {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        if line == "\r\n" {
            return Ok(work);
        }
        if let Some(value) = line.strip_prefix(WORK_FIELD) {
            value.trim().clone_into(&mut work);
        }
    }
    bail!("a request that is too long")
}

/// Returns the first bytes of a connection.
fn opening(target: &Target, work: Work) -> anyhow::Result<String> {
    let work = serde_json::to_string(&work)?;
    Ok(match &target.name {
        None => format!("{work}\n"),
        Some(name) => {
            let host = format!("{name}:{}", target.to.port());
            format!("GET / HTTP/1.1\r\nHost: {host}\r\n{WORK_FIELD}{work}\r\n\r\n")
        }
    })
}

fn answer(stream: &mut TcpStream, came: &CaseResult) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(came)?;
    line.push('\n');
    Ok(stream.write_all(line.as_bytes())?)
}

fn hear(stream: &mut impl BufRead) -> anyhow::Result<CaseResult> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("the server said {line:?}"))
}

/// Counts the bytes of a stream to its end or to the deadline.
fn take(stream: &mut impl Read, until: Option<Instant>) -> anyhow::Result<CaseResult> {
    let mut buffer = vec![0; BUFFER];
    let (mut bytes, mut first) = (0, None);
    loop {
        let n = stream.read(&mut buffer).context("receiving")?;
        let now = Instant::now();
        let first = *first.get_or_insert(now);
        bytes += n as u64;
        if n == 0 || until.is_some_and(|until| now >= until) {
            return Ok(CaseResult {
                nanos: nanos(now - first).max(1),
                bytes,
                ..CaseResult::default()
            });
        }
    }
}

/// Sends until the deadline. Without one, sends until the peer closes the connection.
fn send(stream: &mut TcpStream, until: Option<Instant>) -> anyhow::Result<()> {
    let buffer = vec![0x5a; BUFFER];
    while until.is_none_or(|until| Instant::now() < until) {
        if let Err(error) = stream.write_all(&buffer) {
            return if until.is_none() { Ok(()) } else { Err(error).context("sending") };
        }
    }
    Ok(())
}

fn echo(stream: &mut BufReader<TcpStream>) -> anyhow::Result<()> {
    let mut bytes = [0; SMALL];
    loop {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            n => stream.get_mut().write_all(&bytes[..n])?,
        }
    }
}

/// Serves the part of HTTP that is measured: requests without a body for one page.
fn pages(stream: &mut BufReader<TcpStream>) -> anyhow::Result<()> {
    let mut page = format!("HTTP/1.1 200 OK\r\nContent-Length: {PAGE}\r\n\r\n").into_bytes();
    page.extend(std::iter::repeat_n(b'.', PAGE));
    loop {
        let mut lines = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line)? == 0 {
                return Ok(());
            }
            ensure!(lines < 64 && line.len() < 4096, "a request that is too long");
            lines += 1;
            if line == "\r\n" {
                break;
            }
        }
        stream.get_mut().write_all(&page)?;
    }
}

/// Sends datagrams for `length`. Returns the number sent.
fn shoot(socket: &UdpSocket, size: usize, length: Duration) -> anyhow::Result<u64> {
    let bytes = vec![0x5a; size];
    let parts = [IoSlice::new(&bytes)];
    let until = Instant::now() + length;
    let mut sent = 0;
    while Instant::now() < until {
        let mut controls = [(); DATAGRAMS].map(|()| SendAncillaryBuffer::new(&mut []));
        let mut messages = controls.each_mut().map(|control| MMsgHdr::new(&parts, control));
        match rustix::net::sendmmsg(socket, &mut messages, SendFlags::empty()) {
            Ok(count) => sent += count as u64,
            // The peer has not bound its socket yet, or has closed it.
            Err(Errno::CONNREFUSED | Errno::NOBUFS) => {}
            Err(error) => return Err(error).context("sending datagrams"),
        }
    }
    Ok(sent)
}

/// Counts datagrams until none has arrived for [`SILENCE`](count) or `ended` returns `true`.
fn count(socket: &UdpSocket, ended: &dyn Fn() -> bool) -> anyhow::Result<CaseResult> {
    /// Time without a datagram that ends the count.
    const SILENCE: Duration = Duration::from_millis(500);
    let mut rooms = vec![[0; 2048]; DATAGRAMS];
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let begun = Instant::now();
    let (mut came, mut first, mut last) = (CaseResult::default(), None, begun);
    loop {
        let mut bytes = 0;
        let buffers = rooms.iter_mut().map(|room| &mut room[..]);
        match datagrams::receive(socket, buffers, Wait::ForOne, |_, one| bytes += one.len as u64) {
            Ok(count) => {
                last = Instant::now();
                first.get_or_insert(last);
                came.arrived += count as u64;
                came.bytes += bytes;
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                let patience = if first.is_some() { SILENCE } else { PATIENCE };
                if last.elapsed() > patience || first.is_some() && ended() {
                    came.nanos = nanos(last - first.unwrap_or(begun));
                    return Ok(came);
                }
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error).context("counting datagrams"),
        }
    }
}

/// Opens a connection for `work`. Retries while the guest's network is still coming up.
fn connect(target: &Target, work: Work) -> anyhow::Result<BufReader<TcpStream>> {
    let until = Instant::now() + PATIENCE;
    let to = target.to;
    let mut stream = loop {
        match TcpStream::connect_timeout(&to, Duration::from_secs(2)) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > until => {
                return Err(error).with_context(|| format!("connecting to {to}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    stream.set_nodelay(true)?;
    stream.write_all(opening(target, work)?.as_bytes())?;
    Ok(BufReader::new(stream))
}

/// Runs one case; calls `begins` once the server has been reached.
pub(super) fn ask(
    order: &CaseSpec,
    begins: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<CaseResult> {
    let targets = &Targets::find(order.to, order.names)?;
    // The first connection waits until the path is up.
    drop(connect(targets.of(0), Work::Echo)?);
    begins()?;
    match order.kind {
        WorkloadKind::TcpStream => in_parallel(order, targets, stream),
        WorkloadKind::UdpStream => datagrams(order, targets),
        WorkloadKind::TcpRr => in_parallel(order, targets, |order, to| requests(order, to, false)),
        WorkloadKind::TcpCrr => in_parallel(order, targets, |order, to| requests(order, to, true)),
        WorkloadKind::Http => in_parallel(order, targets, fetch_pages),
        WorkloadKind::SlowPeer => slow_stream(order, targets),
        WorkloadKind::BulkDns => lookups::look_up(order.streams, order.name_server),
    }
}

/// Runs the case in one thread for each stream. Returns the sum of their results.
fn in_parallel(
    order: &CaseSpec,
    targets: &Targets,
    one: fn(&CaseSpec, &Targets) -> anyhow::Result<CaseResult>,
) -> anyhow::Result<CaseResult> {
    let all: Vec<anyhow::Result<CaseResult>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..order.streams).map(|_| scope.spawn(move || one(order, targets))).collect();
        let lost = || Err(anyhow::anyhow!("a thread is lost"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    });
    let mut sum = CaseResult::default();
    for came in all {
        let came = came?;
        sum.nanos = sum.nanos.max(came.nanos);
        sum.bytes += came.bytes;
        sum.sent += came.sent;
        sum.arrived += came.arrived;
        sum.times.extend(came.times);
    }
    Ok(sum)
}

fn stream(order: &CaseSpec, targets: &Targets) -> anyhow::Result<CaseResult> {
    // The measured time starts when the connection is open.
    if order.down {
        let mut stream = connect(targets.of(0), Work::Send)?;
        return take(&mut stream, Some(Instant::now() + order.length));
    }
    let mut stream = connect(targets.of(0), Work::Take)?;
    send(stream.get_mut(), Some(Instant::now() + order.length))?;
    stream.get_mut().shutdown(std::net::Shutdown::Write)?;
    hear(&mut stream)
}

/// Sends to a receiver that is slow. Its time includes the pause, and ends with bytes under way: a window shorter than a
/// segment is filled once in 200 ms, so their rest could take minutes.
fn slow_stream(order: &CaseSpec, targets: &Targets) -> anyhow::Result<CaseResult> {
    let before = slow::timeouts().unwrap_or(0);
    let work = Work::TakeSlowly { buffer: order.size, pause: order.pause, length: order.length };
    let mut stream = connect(targets.of(0), work)?;
    let mut sending = stream.get_ref().try_clone()?;
    let came = std::thread::scope(|scope| {
        scope.spawn(move || send(&mut sending, None));
        let came = hear(&mut stream);
        // The thread ends with an error of its write.
        let _ = stream.get_ref().shutdown(std::net::Shutdown::Both);
        came
    })?;
    Ok(CaseResult { timeouts: slow::timeouts().unwrap_or(0) - before, ..came })
}

fn datagrams(order: &CaseSpec, targets: &Targets) -> anyhow::Result<CaseResult> {
    let (size, length) = (order.size, order.length);
    let work = if order.down { Work::Datagrams { size, length } } else { Work::Count };
    let mut control = connect(targets.of(0), work)?;
    let local = control.get_ref().local_addr()?.ip();
    // The server has bound its socket when it answers.
    hear(&mut control)?;
    let socket = UdpSocket::bind((local, 0)).context("a socket")?;
    socket.connect(order.to)?;
    if order.down {
        socket.send(&[1; SMALL])?;
        let mut came = count(&socket, &|| false)?;
        came.sent = hear(&mut control)?.sent;
        return Ok(came);
    }
    let sent = shoot(&socket, size, length)?;
    control.get_mut().write_all(b"all\n")?;
    Ok(CaseResult { sent, ..hear(&mut control)? })
}

/// Returns an empty histogram of nanoseconds with three significant digits.
pub(super) fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).context("a histogram")
}

fn timed(
    order: &CaseSpec,
    mut once: impl FnMut() -> anyhow::Result<u64>,
) -> anyhow::Result<CaseResult> {
    let mut times = histogram()?;
    let (begun, mut came) = (Instant::now(), CaseResult::default());
    while begun.elapsed() < order.length {
        let asked = Instant::now();
        came.bytes += once()?;
        times.saturating_record(nanos(asked.elapsed()));
        came.arrived += 1;
    }
    came.nanos = nanos(begun.elapsed());
    came.sent = came.arrived;
    let counts = times.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value()));
    came.times = counts.collect();
    Ok(came)
}

fn requests(
    order: &CaseSpec,
    targets: &Targets,
    each_connects: bool,
) -> anyhow::Result<CaseResult> {
    let mut kept = if each_connects { None } else { Some(connect(targets.of(0), Work::Echo)?) };
    let mut connection = 0;
    timed(order, || {
        let target = targets.of(connection);
        connection += 1;
        let mut fresh = if each_connects { Some(connect(target, Work::Echo)?) } else { None };
        let Some(stream) = kept.as_mut().or(fresh.as_mut()) else { bail!("no connection") };
        stream.get_mut().write_all(&[7; SMALL])?;
        stream.read_exact(&mut [0; SMALL])?;
        Ok(2 * SMALL as u64)
    })
}

fn fetch_pages(order: &CaseSpec, targets: &Targets) -> anyhow::Result<CaseResult> {
    let mut stream = connect(targets.of(0), Work::Pages)?;
    let mut page = vec![0; PAGE];
    timed(order, || {
        let request = b"GET /page HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\n\r\n";
        stream.get_mut().write_all(request)?;
        loop {
            let mut line = String::new();
            ensure!(stream.read_line(&mut line)? > 0, "the server has gone");
            if line == "\r\n" {
                break;
            }
        }
        stream.read_exact(&mut page)?;
        Ok(PAGE as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_over_loopback_reports_bytes_and_time() {
        let server = EndServer::bind(0).unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], server.port));
        std::thread::spawn(move || server.serve());
        let length = Duration::from_millis(200);
        let order = CaseSpec {
            kind: WorkloadKind::TcpStream,
            to,
            down: false,
            streams: 2,
            size: 64,
            length,
            pause: Duration::ZERO,
            names: None,
            name_server: None,
        };
        for kind in [
            WorkloadKind::TcpStream,
            WorkloadKind::TcpRr,
            WorkloadKind::TcpCrr,
            WorkloadKind::Http,
            WorkloadKind::UdpStream,
            WorkloadKind::SlowPeer,
        ] {
            for down in [false, true] {
                let came = ask(&CaseSpec { kind, down, ..order }, || Ok(())).unwrap();
                assert!(came.bytes > 0 && came.nanos > 0, "{kind:?} {down}: {came:?}");
                if kind == WorkloadKind::UdpStream {
                    assert!(came.arrived <= came.sent, "{came:?}");
                }
            }
        }
    }

    #[test]
    fn connection_to_a_name_begins_with_a_request_for_it() {
        let to = SocketAddr::from(([127, 0, 0, 1], 80));
        let named = opening(&Target { to, name: Some("a.example".into()) }, Work::Echo).unwrap();
        assert!(named.starts_with("GET / HTTP/1.1\r\nHost: a.example:80\r\n"), "{named}");
        let mut fields = named.split_once("\r\n").unwrap().1.as_bytes();
        assert_eq!(work_of_request(&mut fields).unwrap(), "\"Echo\"");
        assert_eq!(opening(&Target { to, name: None }, Work::Echo).unwrap(), "\"Echo\"\n");
        assert!(work_of_request(&mut &b"x\r\n"[..]).is_err());
    }
}
