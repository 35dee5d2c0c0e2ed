//! DNS forwarder: forwards queries that no guest can answer to the host's name servers.
//!
//! Queries and answers are passed on unchanged, but for ids. A query has a socket of its own, connected to one
//! server, with a port that the kernel chooses. Only that server can answer, and an attacker must guess port and query id.
//! Beyond [`SOCKETS_MAX`] sockets for a server, queries share them, each with an id that the forwarder chooses at random; an
//! answer must then repeat the question, too. If a server does not answer in time, the next one is queried; each is
//! queried several times. The host's options say how long and how often ([`ServerOptions`]); without them, the
//! defaults are those of the C library. When no server has answered, the client receives SERVFAIL. A client that queried over
//! TCP expects an answer too long for a datagram, so its query is forwarded over TCP.
//!
//! At most [`PENDING_MAX`] queries are pending. The caller refuses further ones.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_hostnet::name_files::ServerOptions;

/// Maximum number of pending queries.
const PENDING_MAX: usize = 8192;
/// Maximum number of sockets for one server.
const SOCKETS_MAX: usize = 64;
/// Maximum number of pending queries over TCP. Each has a thread.
const OVER_TCP_MAX: usize = 32;
/// Default time limit for the answer of one server (`RES_TIMEOUT` of resolv.h).
const TRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Default number of times that each server is queried (`RES_DFLRETRY`).
const ROUNDS: usize = 2;
/// Maximum length of an answer in bytes.
const ANSWER_MAX: usize = 65_535;
/// Length of a message's header in bytes.
const HEADER: usize = 12;
/// Number of ids that are tried on a shared socket.
const IDS_TRIED: usize = 16;

/// DNS forwarder with its name servers and pending queries of clients `C`.
pub(super) struct DnsForwarder<C> {
    servers: Vec<SocketAddr>,
    options: ServerOptions,
    /// Number of queries so far.
    queries: usize,
    pending: HashMap<usize, PendingQuery<C>>,
    /// Time limits of the pending queries, with their numbers.
    limits: BTreeSet<(Instant, usize)>,
    /// Sockets, by an index that stays.
    sockets: Vec<Option<ServerSocket>>,
    /// Numbers of the queries over TCP.
    over_tcp: Vec<usize>,
    /// Source of ids.
    secret: RandomState,
}

/// Socket that is connected to a server.
struct ServerSocket {
    socket: UdpSocket,
    server: SocketAddr,
    /// Numbers of the pending queries, by the id that the server sees.
    ids: HashMap<u16, usize>,
}

/// Query as a client has sent it.
struct ClientQuery<C> {
    client: C,
    message: Vec<u8>,
}

struct PendingQuery<C> {
    asked: ClientQuery<C>,
    transport: Transport,
    /// Servers when the query came, beginning with the first to be queried.
    servers: Vec<SocketAddr>,
    /// Number of queries sent before this one, to this or other servers.
    tries: usize,
    until: Instant,
}

enum Transport {
    /// Index of a socket, and the id that the server sees.
    Datagrams(usize, u16),
    /// Reading end of a pipe into which the thread writes its answer.
    Thread(UnixStream, Vec<u8>),
}

/// Returns `true` if a message is an answer with this id to the question of a query. One without a question is accepted.
fn is_answer_to(message: &[u8], id: u16, query: &[u8]) -> bool {
    let is_answer = message.len() >= HEADER
        && message.get(..2) == Some(&id.to_be_bytes())
        && message[2] & 0x80 != 0;
    let asked = question(query);
    is_answer
        && (asked.is_none()
            || message.get(4..6) == Some(&[0, 0])
            || question(message).zip(asked).is_some_and(|(a, b)| a.eq_ignore_ascii_case(b)))
}

/// Returns the first question of a message: name, type and class.
fn question(message: &[u8]) -> Option<&[u8]> {
    let mut end = HEADER;
    loop {
        match message.get(end)? {
            0 => break,
            len @ 1..=63 => end += 1 + usize::from(*len),
            _ => return None,
        }
    }
    message.get(HEADER..end + 5)
}

impl<C: Copy> DnsForwarder<C> {
    /// Creates a forwarder to these servers. Returns `None` if there are none.
    pub(super) fn new(servers: Vec<SocketAddr>) -> Option<DnsForwarder<C>> {
        (!servers.is_empty()).then(|| DnsForwarder {
            servers,
            options: ServerOptions::default(),
            queries: 0,
            pending: HashMap::new(),
            limits: BTreeSet::new(),
            sockets: Vec::new(),
            over_tcp: Vec::new(),
            secret: RandomState::new(),
        })
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
        if self.pending.len() >= PENDING_MAX
            || over_tcp && self.over_tcp.len() >= OVER_TCP_MAX
            || query.len() < HEADER
        {
            return false;
        }
        let number = self.queries;
        self.queries = number.wrapping_add(1);
        let mut servers = self.servers.clone();
        if self.options.rotate {
            servers.rotate_left(number % self.servers.len());
        }
        let asked = ClientQuery { client, message: query.to_vec() };
        self.send(number, servers, asked, 0, over_tcp).is_ok()
    }

    /// Sends a query to the first server, from the `tries`-th on, that is reachable. Returns the query if none is.
    fn send(
        &mut self,
        number: usize,
        servers: Vec<SocketAddr>,
        asked: ClientQuery<C>,
        tries: usize,
        over_tcp: bool,
    ) -> Result<(), ClientQuery<C>> {
        let within = self.options.timeout.unwrap_or(TRY_TIMEOUT);
        for tries in tries..servers.len() * self.options.attempts.unwrap_or(ROUNDS) {
            let server = servers[tries % servers.len()];
            let transport = if over_tcp {
                by_stream(server, &asked.message, within)
            } else {
                self.by_datagram(number, server, &asked.message)
            };
            if let Ok(transport) = transport {
                if over_tcp {
                    self.over_tcp.push(number);
                }
                let until = Instant::now() + within;
                self.limits.insert((until, number));
                let query = PendingQuery { asked, transport, servers, tries, until };
                self.pending.insert(number, query);
                return Ok(());
            }
        }
        Err(asked)
    }

    /// Sends a query by a new socket, or by one that it shares with others.
    fn by_datagram(
        &mut self,
        number: usize,
        server: SocketAddr,
        query: &[u8],
    ) -> io::Result<Transport> {
        let of_server = self.sockets.iter().enumerate().filter_map(|(index, one)| {
            one.as_ref().filter(|one| one.server == server).map(|one| (one.ids.len(), index))
        });
        let (count, least) = of_server
            .fold((0, None), |(n, least), one| (n + 1, least.into_iter().chain([one]).min()));
        let own = if count < SOCKETS_MAX {
            self.open(server)
        } else {
            Err(io::ErrorKind::OutOfMemory.into())
        };
        let index = match (own, least) {
            (Ok(index), _) => index,
            (Err(_), Some((_, index))) => index,
            (Err(error), None) => return Err(error),
        };
        let id = self.free_id(index, query).ok_or(io::ErrorKind::AddrInUse)?;
        let socket = self.sockets[index].as_mut().ok_or(io::ErrorKind::NotFound)?;
        let [high, low] = id.to_be_bytes();
        let message = [&[high, low], query.get(2..).unwrap_or_default()].concat();
        socket.ids.insert(id, number);
        if let Err(error) = socket.socket.send(&message) {
            self.release(index, id);
            return Err(error);
        }
        Ok(Transport::Datagrams(index, id))
    }

    /// Opens a socket to a server. Returns its index.
    fn open(&mut self, server: SocketAddr) -> io::Result<usize> {
        let any: IpAddr = if server.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(server)?;
        socket.set_nonblocking(true)?;
        let opened = Some(ServerSocket { socket, server, ids: HashMap::new() });
        let free = self.sockets.iter().position(Option::is_none);
        match free {
            Some(index) => self.sockets[index] = opened,
            None => self.sockets.push(opened),
        }
        Ok(free.unwrap_or(self.sockets.len() - 1))
    }

    /// Returns an id for a query that no other query of the socket has: its own if the socket is new, otherwise a random one.
    fn free_id(&self, index: usize, query: &[u8]) -> Option<u16> {
        let ids = &self.sockets.get(index)?.as_ref()?.ids;
        let own = u16::from_be_bytes([*query.first()?, *query.get(1)?]);
        if ids.is_empty() {
            return Some(own);
        }
        let random = |attempt| {
            let bytes = self.secret.hash_one((self.queries, Instant::now(), attempt)).to_le_bytes();
            u16::from_le_bytes([bytes[0], bytes[1]])
        };
        (0..IDS_TRIED).map(random).find(|id| !ids.contains_key(id))
    }

    /// Forgets a query of a socket. A socket without queries is closed.
    fn release(&mut self, index: usize, id: u16) {
        if let Some(slot) = self.sockets.get_mut(index)
            && let Some(socket) = slot
        {
            socket.ids.remove(&id);
            if socket.ids.is_empty() {
                *slot = None;
            }
        }
    }

    /// Iterates over the descriptors to poll.
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let threads =
            self.over_tcp.iter().filter_map(|number| match &self.pending.get(number)?.transport {
                Transport::Thread(pipe, _) => Some(pipe.as_fd()),
                Transport::Datagrams(..) => None,
            });
        self.sockets.iter().flatten().map(|one| one.socket.as_fd()).chain(threads)
    }

    /// Returns the time at which the next server times out.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.limits.first().map(|(until, _)| *until)
    }

    /// Returns the answers that have arrived. Queries the next server for those that timed out.
    pub(super) fn replies(&mut self) -> Vec<(C, Vec<u8>)> {
        let mut replies = Vec::new();
        let mut buffer = vec![0; ANSWER_MAX];
        for index in 0..self.sockets.len() {
            self.receive(index, &mut buffer, &mut replies);
        }
        for number in self.over_tcp.clone() {
            self.receive_from_thread(number, &mut replies);
        }
        let now = Instant::now();
        while let Some(&(until, number)) = self.limits.first()
            && until <= now
        {
            self.query_next(number, &mut replies);
        }
        replies
    }

    /// Reads the answers of one socket.
    fn receive(&mut self, index: usize, buffer: &mut [u8], replies: &mut Vec<(C, Vec<u8>)>) {
        while let Some(Some(socket)) = self.sockets.get(index) {
            match socket.socket.recv(buffer) {
                Ok(length) => {
                    let message = &buffer[..length];
                    let Some(&[high, low]) = message.first_chunk() else { continue };
                    let id = u16::from_be_bytes([high, low]);
                    let Some(&number) = socket.ids.get(&id) else { continue };
                    let asked = self.pending.get(&number).map(|pending| &pending.asked.message[..]);
                    // An answer to an earlier query from the same port, or a forged one.
                    if !asked.is_some_and(|query| is_answer_to(message, id, query)) {
                        continue;
                    }
                    let mut answer = message.to_vec();
                    if let Some(PendingQuery { asked, .. }) = self.finish(number) {
                        answer[..2].copy_from_slice(&asked.message[..2]);
                        replies.push((asked.client, answer));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // The server is not there.
                    let numbers: Vec<usize> = socket.ids.values().copied().collect();
                    return numbers.into_iter().for_each(|number| self.query_next(number, replies));
                }
            }
        }
    }

    /// Reads the answer of a thread.
    fn receive_from_thread(&mut self, number: usize, replies: &mut Vec<(C, Vec<u8>)>) {
        let Some(pending) = self.pending.get_mut(&number) else { return };
        let Transport::Thread(pipe, heard) = &mut pending.transport else { return };
        // The thread has bounded the length of its answer.
        let has_ended = match pipe.read_to_end(heard) {
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        if !has_ended {
            return;
        }
        let answer = core::mem::take(heard);
        let query = &pending.asked.message;
        let id = u16::from_be_bytes([query[0], query[1]]);
        if !is_answer_to(&answer, id, query) {
            return self.query_next(number, replies);
        }
        if let Some(pending) = self.finish(number) {
            replies.push((pending.asked.client, answer));
        }
    }

    /// Removes a pending query.
    fn finish(&mut self, number: usize) -> Option<PendingQuery<C>> {
        let pending = self.pending.remove(&number)?;
        self.limits.remove(&(pending.until, number));
        match pending.transport {
            Transport::Datagrams(index, id) => self.release(index, id),
            Transport::Thread(..) => self.over_tcp.retain(|one| *one != number),
        }
        Some(pending)
    }

    /// Sends a query to the next server. Without any, its client receives SERVFAIL.
    fn query_next(&mut self, number: usize, replies: &mut Vec<(C, Vec<u8>)>) {
        let Some(pending) = self.finish(number) else { return };
        let over_tcp = matches!(pending.transport, Transport::Thread(..));
        let PendingQuery { asked, servers, tries, .. } = pending;
        if let Err(asked) = self.send(number, servers, asked, tries + 1, over_tcp) {
            replies.extend(failure(asked.message).map(|reply| (asked.client, reply)));
        }
    }
}

/// Turns a query into the answer that no server has answered.
pub(super) fn failure(mut query: Vec<u8>) -> Option<Vec<u8>> {
    /// Response code of RFC 1035, section 4.1.1.
    const SERVER_FAILURE: u8 = 2;
    let [_, _, flags, code, ..] = &mut query[..] else { return None };
    *flags |= 0x80;
    *code = 0x80 | SERVER_FAILURE;
    Some(query)
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
        // The kernel reports at once that no process listens. A port that was bound and closed may be another
        // test's by now.
        let gone = "127.0.0.1:1".parse().unwrap();
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
    fn queries_beyond_the_limit_are_refused_and_share_few_sockets() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![server.local_addr().unwrap()]).unwrap();
        let sent = |forwarder: &mut DnsForwarder<usize>, client| {
            forwarder.forward(&message(1, false, 30), client, false)
        };
        assert!((0..PENDING_MAX).all(|client| sent(&mut forwarder, client)));
        assert!(!sent(&mut forwarder, 0));
        assert_eq!(forwarder.sockets().count(), SOCKETS_MAX);
        assert!(DnsForwarder::<u32>::new(Vec::new()).is_none());
    }

    #[test]
    fn queries_with_one_id_on_shared_sockets_receive_their_own_answers() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut forwarder = DnsForwarder::new(vec![server.local_addr().unwrap()]).unwrap();
        let count = 4 * u32::try_from(SOCKETS_MAX).unwrap();
        // Each query has a name of its own: one label of four bytes.
        let query = |client: u32| {
            let header = [0, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
            [&header[..], &[4], &client.to_be_bytes().map(|byte| byte | 0x40), &[0, 0, 1, 0, 1]]
                .concat()
        };
        let mut heard = Vec::new();
        let mut buffer = [0; 100];
        for client in 0..count {
            assert!(forwarder.forward(&query(client), client, false));
            let (length, from) = server.recv_from(&mut buffer).unwrap();
            heard.push((buffer[..length].to_vec(), from));
        }
        let mut failed = 0;
        for (mut message, from) in heard.into_iter().rev() {
            message[2] |= 0x80;
            // An answer to another question is not accepted.
            let mut other = message.clone();
            other[13] ^= 1;
            server.send_to(&other, from).unwrap();
            server.send_to(&message, from).unwrap();
            for (client, reply) in replies(&mut forwarder) {
                failed += usize::from(reply[..2] != [0, 9] || reply[12..] != query(client)[12..]);
            }
        }
        assert_eq!(failed, 0);
        assert!(forwarder.deadline().is_none() && forwarder.sockets().next().is_none());
    }
}
