//! DNS forwarder: forwards queries that no guest can answer to the host's name servers.
//!
//! Queries and answers are passed on unchanged. Each query has its own socket, connected to one
//! server at a time, with a port that the kernel chooses. Only that server can answer, and an
//! attacker must guess port and query id. If a server does not answer in time, the next one is queried; each is
//! queried several times. The host's options say how long and how often ([`ServerOptions`]). When no server has
//! answered, the client receives SERVFAIL. A client that queried over TCP expects an answer too
//! long for a datagram, so its query is forwarded over TCP.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_hostnet::name_files::ServerOptions;

/// Maximum number of pending queries. Each has a descriptor.
const PENDING_MAX: usize = 128;
/// Maximum number of pending queries over TCP. Each has a thread.
const OVER_TCP_MAX: usize = 8;
/// Default time limit for the answer of one server.
const TRY_TIMEOUT: Duration = Duration::from_millis(2500);
/// Default number of times that each server is queried.
const ROUNDS: usize = 2;
/// Maximum length of an answer in bytes.
const ANSWER_MAX: usize = 65_535;
/// Length of a message's header in bytes.
const HEADER: usize = 12;

/// DNS forwarder with its name servers and pending queries of clients `C`.
pub(super) struct DnsForwarder<C> {
    servers: Vec<SocketAddr>,
    options: ServerOptions,
    /// Number of queries so far, for the option `rotate`.
    queries: usize,
    pending: Vec<PendingQuery<C>>,
}

struct PendingQuery<C> {
    client: C,
    query: Vec<u8>,
    transport: Transport,
    /// Servers when the query came, beginning with the first to be queried.
    servers: Vec<SocketAddr>,
    /// Number of queries sent before this one, to this or other servers.
    tries: usize,
    until: Instant,
}

enum Transport {
    Datagrams(UdpSocket),
    /// Reading end of a pipe into which the thread writes its answer.
    Thread(UnixStream, Vec<u8>),
}

impl Transport {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Transport::Datagrams(socket) => socket.as_fd(),
            Transport::Thread(pipe, _) => pipe.as_fd(),
        }
    }

    /// Returns the answer, if it has arrived.
    fn poll_answer(&mut self, query: &[u8]) -> io::Result<Option<Vec<u8>>> {
        match self {
            Transport::Datagrams(socket) => {
                let mut buffer = vec![0; ANSWER_MAX];
                let length = socket.recv(&mut buffer)?;
                buffer.truncate(length);
                // An answer to an earlier query from the same port, or a forged one.
                Ok(is_answer_to(&buffer, query).then_some(buffer))
            }
            Transport::Thread(pipe, heard) => {
                // The thread has bounded the length of its answer.
                match pipe.read_to_end(heard) {
                    Ok(_) if is_answer_to(heard, query) => Ok(Some(core::mem::take(heard))),
                    Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) => Err(error),
                }
            }
        }
    }
}

/// Returns `true` if a message is an answer with the id of a query.
fn is_answer_to(message: &[u8], query: &[u8]) -> bool {
    message.len() >= HEADER && message.get(..2) == query.get(..2) && message[2] & 0x80 != 0
}

impl<C: Copy> DnsForwarder<C> {
    /// Creates a forwarder to these servers. Returns `None` if there are none.
    pub(super) fn new(servers: Vec<SocketAddr>) -> Option<DnsForwarder<C>> {
        let (options, pending) = (ServerOptions::default(), Vec::new());
        (!servers.is_empty()).then_some(DnsForwarder { servers, options, queries: 0, pending })
    }

    /// Sets the options for queries from now on, and the servers unless there are none.
    pub(super) fn configure(&mut self, servers: Vec<SocketAddr>, options: ServerOptions) {
        self.options = options;
        if !servers.is_empty() {
            self.servers = servers;
        }
    }

    /// Forwards a query. Returns `false` if too many are pending, or no server is reachable.
    pub(super) fn forward(&mut self, query: &[u8], client: C, over_tcp: bool) -> bool {
        let threads = self
            .pending
            .iter()
            .filter(|pending| matches!(pending.transport, Transport::Thread(..)));
        if self.pending.len() >= PENDING_MAX || over_tcp && threads.count() >= OVER_TCP_MAX {
            return false;
        }
        let mut servers = self.servers.clone();
        if self.options.rotate {
            servers.rotate_left(self.queries % self.servers.len());
            self.queries = self.queries.wrapping_add(1);
        }
        let pending = self.try_from(0, servers, query, client, over_tcp);
        let is_sent = pending.is_some();
        self.pending.extend(pending);
        is_sent
    }

    /// Sends a query to the first server, from the `tries`-th on, that is reachable.
    fn try_from(
        &self,
        tries: usize,
        servers: Vec<SocketAddr>,
        query: &[u8],
        client: C,
        over_tcp: bool,
    ) -> Option<PendingQuery<C>> {
        let within = self.options.timeout.unwrap_or(TRY_TIMEOUT);
        for tries in tries..servers.len() * self.options.attempts.unwrap_or(ROUNDS) {
            let server = servers[tries % servers.len()];
            let transport = if over_tcp {
                by_stream(server, query, within)
            } else {
                by_datagram(server, query)
            };
            if let Ok(transport) = transport {
                let until = Instant::now() + within;
                return Some(PendingQuery {
                    client,
                    query: query.to_vec(),
                    servers,
                    transport,
                    tries,
                    until,
                });
            }
        }
        None
    }

    /// Iterates over the descriptors to poll.
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.pending.iter().map(|pending| pending.transport.fd())
    }

    /// Returns the time at which the next server times out.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pending.iter().map(|pending| pending.until).min()
    }

    /// Returns the answers that have arrived. Queries the next server for those that timed out.
    pub(super) fn replies(&mut self) -> Vec<(C, Vec<u8>)> {
        let mut replies = Vec::new();
        for mut pending in core::mem::take(&mut self.pending) {
            let goes_on = match pending.transport.poll_answer(&pending.query) {
                Ok(Some(answer)) => {
                    replies.push((pending.client, answer));
                    continue;
                }
                Ok(None) => true,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            };
            if goes_on && Instant::now() < pending.until {
                self.pending.push(pending);
            } else {
                let over_tcp = matches!(pending.transport, Transport::Thread(..));
                let PendingQuery { client, query, servers, tries, .. } = pending;
                match self.try_from(tries + 1, servers, &query, client, over_tcp) {
                    Some(again) => self.pending.push(again),
                    None => replies.extend(failure(query).map(|reply| (client, reply))),
                }
            }
        }
        replies
    }
}

/// Turns a query into the answer that no server has answered.
fn failure(mut query: Vec<u8>) -> Option<Vec<u8>> {
    /// Response code of RFC 1035, section 4.1.1.
    const SERVER_FAILURE: u8 = 2;
    let [_, _, flags, code, ..] = &mut query[..] else { return None };
    *flags |= 0x80;
    *code = 0x80 | SERVER_FAILURE;
    Some(query)
}

fn by_datagram(server: SocketAddr, query: &[u8]) -> io::Result<Transport> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(server)?;
    socket.set_nonblocking(true)?;
    socket.send(query)?;
    Ok(Transport::Datagrams(socket))
}

/// Queries over TCP, on a thread that ends within this time of each step.
fn by_stream(server: SocketAddr, query: &[u8], within: Duration) -> io::Result<Transport> {
    let (ours, mut theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let length = u16::try_from(query.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let message = [&length.to_be_bytes()[..], query].concat();
    let mut ask = move || -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&server, within)?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(within))?;
        stream.write_all(&message)?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut answer = vec![0; u16::from_be_bytes(length).into()];
        stream.read_exact(&mut answer)?;
        theirs.write_all(&answer)
    };
    std::thread::Builder::new().name("names-tcp".into()).spawn(move || {
        if let Err(error) = ask() {
            tracing::debug!(%error, "a name server does not answer over TCP");
        }
    })?;
    Ok(Transport::Thread(ours, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Builds a message with an id, an answer if `answers`.
    fn message(number: u8, answers: bool, length: usize) -> Vec<u8> {
        let mut message = vec![7; length];
        message[..3].copy_from_slice(&[0, number, if answers { 0x81 } else { 1 }]);
        message
    }

    fn replies(forwarder: &mut DnsForwarder<u32>) -> Vec<(u32, Vec<u8>)> {
        for _ in 0..2000 {
            let replies = forwarder.replies();
            if !replies.is_empty() {
                return replies;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no answer came");
    }

    #[test]
    fn query_and_answer_are_forwarded_unchanged() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![server.local_addr().unwrap()]).unwrap();
        forwarder.forward(&message(1, false, 40), 10, false);
        let mut buffer = [0; 100];
        let (length, from) = server.recv_from(&mut buffer).unwrap();
        assert!(buffer[..length] == message(1, false, 40)[..]);
        // A message with another id, or without the answer bit, is no answer.
        for wrong in [message(2, true, 50), message(1, false, 50), vec![0, 1, 0x81]] {
            server.send_to(&wrong, from).unwrap();
        }
        server.send_to(&message(1, true, 3000), from).unwrap();
        assert!(replies(&mut forwarder) == [(10, message(1, true, 3000))]);
        assert!(forwarder.deadline().is_none() && forwarder.sockets().next().is_none());
    }

    #[test]
    fn unreachable_server_is_skipped() {
        // The port was bound and closed, so the kernel reports at once that no process listens.
        let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![gone, server.local_addr().unwrap()]).unwrap();
        forwarder.forward(&message(3, false, 30), 1, false);
        let answer = std::thread::spawn(move || {
            let (_, from) = server.recv_from(&mut [0; 100]).unwrap();
            server.send_to(&message(3, true, 60), from).unwrap();
        });
        assert!(replies(&mut forwarder) == [(1, message(3, true, 60))]);
        answer.join().unwrap();
    }

    #[test]
    fn long_answer_is_relayed_over_tcp() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![server.local_addr().unwrap()]).unwrap();
        forwarder.forward(&message(5, false, 30), 4, true);
        let answer = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.read_exact(&mut [0; 32]).unwrap();
            let long = message(5, true, 40_000);
            stream.write_all(&40_000_u16.to_be_bytes()).unwrap();
            stream.write_all(&long).unwrap();
        });
        assert!(replies(&mut forwarder) == [(4, message(5, true, 40_000))]);
        answer.join().unwrap();
    }

    #[test]
    fn options_choose_the_first_server_and_the_number_of_queries() {
        let servers: Vec<_> = (0..2).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> = servers.iter().map(|s| s.local_addr().unwrap()).collect();
        let mut forwarder = DnsForwarder::new(vec![addresses[1]]).unwrap();
        let timeout = Some(Duration::from_millis(20));
        let options = ServerOptions { timeout, attempts: Some(1), rotate: true };
        forwarder.configure(addresses, options);
        for number in [1, 2, 3] {
            assert!(forwarder.forward(&message(number, false, 30), number.into(), false));
        }
        // Nobody answers. Each query goes to each server once, and then fails.
        let mut failed = Vec::new();
        while failed.len() < 3 {
            failed.extend(replies(&mut forwarder));
        }
        failed.sort();
        for ((client, reply), number) in failed.into_iter().zip([1u8, 2, 3]) {
            assert_eq!((client, &reply[..4]), (number.into(), &[0, number, 0x81, 0x82][..]));
        }
        let first_of = |server: &UdpSocket| {
            let mut buffer = [0; 100];
            let mut numbers = Vec::new();
            server.set_nonblocking(true).unwrap();
            while server.recv_from(&mut buffer).is_ok() {
                numbers.push(buffer[1]);
            }
            (numbers.len(), numbers[0])
        };
        assert_eq!([first_of(&servers[0]), first_of(&servers[1])], [(3, 1), (3, 2)]);
    }

    #[test]
    fn query_beyond_the_limit_is_dropped() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![server.local_addr().unwrap()]).unwrap();
        for client in 0..1000 {
            forwarder.forward(&message(1, false, 30), client, false);
        }
        assert_eq!(forwarder.sockets().count(), PENDING_MAX);
        assert!(DnsForwarder::<u32>::new(Vec::new()).is_none());
    }
}
