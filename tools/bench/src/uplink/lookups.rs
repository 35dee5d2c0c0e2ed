//! Rows of look-ups in bulk: hundreds of queries at once to a name server that answers late.
//!
//! The name server is the host's own, at its loopback, so every peer forwards the queries: Ringfence by the stand-in in
//! the guest's `resolv.conf`, pasta by `--dns-forward`, slirp4netns by its own address for that. A query without an answer
//! is sent again as the C library does.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;

use super::end::{CaseResult, histogram, nanos};

/// Number of queries that are sent at once.
pub(super) const LOOKUPS: usize = 500;
/// Size of the name server's receive buffer in bytes.
const BUFFER: usize = 8 << 20;
/// Time after which the name server answers.
const DELAY: Duration = Duration::from_millis(300);
/// Time until a query is sent again, and number of times that it is sent (`RES_TIMEOUT`, `RES_DFLRETRY`).
const TIMEOUT: Duration = Duration::from_secs(5);
const TIMES: u32 = 2;
/// Bytes of a header, and flags of an answer without an error.
const HEADER: usize = 12;
const ANSWER: [u8; 2] = [0x81, 0x80];

/// Name server of the host's namespace, and the file that names it.
pub(super) struct NameServer(PathBuf);

impl NameServer {
    /// Starts the name server, and makes it that of this mount namespace, which is private to the benchmark. `run` runs a
    /// command.
    pub(super) fn start(run: fn(&[&str]) -> anyhow::Result<()>) -> anyhow::Result<NameServer> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).context("the name server")?;
        // All queries at once exceed the default size.
        sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER).context("SO_RCVBUFFORCE")?;
        let file =
            std::env::temp_dir().join(format!("ringfence-bench-resolv-{}", std::process::id()));
        std::fs::write(&file, "nameserver 127.0.0.1\n").context("writing resolv.conf")?;
        let file = NameServer(file);
        run(&["mount", "--bind", &file.0.to_string_lossy(), "/etc/resolv.conf"])?;
        std::thread::spawn(move || serve(&socket, DELAY));
        Ok(file)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        // The mount ends with the benchmark's namespace.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Answers each query after `delay`, without end.
fn serve(socket: &UdpSocket, delay: Duration) {
    std::thread::scope(|scope| {
        let (sender, queries) = mpsc::channel::<(Instant, Vec<u8>, SocketAddr)>();
        scope.spawn(move || {
            for (due, mut query, client) in queries {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                if let Some(flags) = query.get_mut(2..4) {
                    flags.copy_from_slice(&ANSWER);
                }
                // A client that has gone needs no answer.
                let _ = socket.send_to(&query, client);
            }
        });
        let mut bytes = [0; 1500];
        while let Ok((len, client)) = socket.recv_from(&mut bytes) {
            let query = (Instant::now() + delay, bytes[..len].to_vec(), client);
            if sender.send(query).is_err() {
                return;
            }
        }
    });
}

/// Returns the first name server of `resolv.conf`.
fn own_server() -> anyhow::Result<IpAddr> {
    let text = std::fs::read_to_string("/etc/resolv.conf").context("reading resolv.conf")?;
    let mut servers = text.lines().filter_map(|line| line.strip_prefix("nameserver "));
    let server = servers.next().context("resolv.conf names no server")?;
    server.trim().parse().with_context(|| format!("the name server {server}"))
}

/// Returns the query number `number`: for an address of a name of its own.
fn query(number: usize) -> Vec<u8> {
    let name = format!("n{number}");
    let id = u16::try_from(number % (1 << 16)).unwrap_or_default().to_be_bytes();
    let mut query = [&id[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    query.push(u8::try_from(name.len()).unwrap_or_default());
    query.extend(name.bytes());
    query.extend(b"\x05bench\x07example\0\0\x01\0\x01");
    query
}

/// Sends `count` queries at once, each from a socket of its own, and waits for the answers.
pub(super) fn look_up(count: usize, server: Option<IpAddr>) -> anyhow::Result<CaseResult> {
    let ip = server.map_or_else(own_server, Ok)?;
    let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { [0; 16].into() };
    ask(count, SocketAddr::new(ip, 53), any)
}

fn ask(count: usize, server: SocketAddr, any: IpAddr) -> anyhow::Result<CaseResult> {
    let open = |_| {
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_nonblocking(true)?;
        socket.connect(server)?;
        Ok(socket)
    };
    let sockets = (0..count).map(open).collect::<std::io::Result<Vec<_>>>();
    let sockets = sockets.context("sockets for queries")?;
    let mut waiting: Vec<usize> = (0..count).collect();
    let (begun, mut times) = (Instant::now(), histogram()?);
    let mut came = CaseResult { sent: count as u64, ..CaseResult::default() };
    for _ in 0..TIMES {
        for &number in &waiting {
            // One that is lost is sent again.
            let _ = sockets[number].send(&query(number));
        }
        let until = Instant::now() + TIMEOUT;
        while !waiting.is_empty() && Instant::now() < until {
            let fd = |number: &usize| PollFd::new(&sockets[*number], PollFlags::IN);
            let mut fds: Vec<_> = waiting.iter().map(fd).collect();
            wait_any(&mut fds, Some(until)).context("waiting for answers")?;
            let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let mut ready = is_ready.into_iter();
            waiting.retain(|&number| {
                if !ready.next().unwrap_or(false) {
                    return true;
                }
                let mut bytes = [0; 1500];
                let Ok(len) = sockets[number].recv(&mut bytes) else { return true };
                let is_answer = len >= HEADER && bytes[2..4] == ANSWER;
                if is_answer {
                    times.saturating_record(nanos(begun.elapsed()));
                    came.arrived += 1;
                    came.bytes += len as u64;
                }
                // A refusal is no answer, and the resolver would ask no more.
                false
            });
        }
    }
    came.nanos = nanos(begun.elapsed()).max(1);
    let counts = times.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value()));
    came.times = counts.collect();
    ensure!(came.arrived > 0, "no query was answered");
    Ok(came)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_query_is_answered_after_the_delay() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = socket.local_addr().unwrap();
        let delay = Duration::from_millis(20);
        std::thread::spawn(move || serve(&socket, delay));
        let came = ask(100, server, Ipv4Addr::LOCALHOST.into()).unwrap();
        assert_eq!((came.sent, came.arrived), (100, 100));
        let (first, _) = came.times[0];
        assert!(first >= nanos(delay) && came.nanos >= first, "{came:?}");
        assert_eq!(came.times.iter().map(|(_, count)| count).sum::<u64>(), 100);
    }
}
