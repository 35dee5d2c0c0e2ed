//! DNS stub of one guest: UDP and TCP on the guest's loopback, one thread.
//!
//! A query for a known name is answered at once. One for an unknown guest waits for its
//! announcement. All others go to the [`DnsForwarder`], and so do names of one label while they wait: the first of the two
//! that knows the name answers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::answer::{Answer, AnswerableQuery, QUERY_MAX, Question, Rejected};
use super::forwarder::{DnsForwarder, failure};
use super::listening::something_listens;
use super::source::{ANNOUNCE_AFTER, HOLD_TIME, NameSource};
use crate::name_files::SharedNameFiles;
use ringfence_hostnet::interface::ResolverConfig;
use ringfence_hostnet::name_files::ServerOptions;
use ringfence_sys::poll::wait_any;

/// Maximum number of queries held back. Only the guest's own programs can reach the limits.
const WAITING_MAX: usize = 256;
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of queries read in a row from one socket.
const BATCH: usize = 512;
/// Size of a socket's receive buffer in bytes, as far as the kernel permits it.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Time limit for a silent connection.
const IDLE: Duration = Duration::from_secs(10);
/// Interval between lookups of names that clients wait for, if the source reports no changes.
const LOOKUP_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between checks whether the command listens.
const LISTENING_CHECK: Duration = Duration::from_millis(25);

/// Name that a guest announces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// Name in lower case.
    pub name: String,
    /// Addresses at which other guests reach it.
    pub addresses: Vec<IpAddr>,
}

/// DNS server with bound sockets. It answers once it runs.
pub struct Stub {
    source: Box<dyn NameSource>,
    switch: String,
    own: Option<Own>,
    announce_by: Option<Instant>,
    sockets: Vec<(UdpSocket, TcpListener)>,
    connections: Vec<TcpClient>,
    waiting: Vec<Waiting>,
    /// Number of the next query that is held back.
    next_waiting: u64,
    /// Forwarder for other names. `None` without name servers.
    forwarder: Option<DnsForwarder<QueryOrigin>>,
    /// Search domains of the host.
    search: Vec<String>,
    /// Files that depend on the guests' names, and the resolver of the host.
    files: Option<SharedNameFiles>,
    /// Version of the resolver in use.
    version: u64,
}

/// Query that is held back.
struct Waiting {
    number: u64,
    request: AnswerableQuery,
    name: String,
    client: QueryOrigin,
    until: Instant,
    /// Answer of the name servers, which do not know the name.
    negative: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
enum QueryOrigin {
    /// Client at this address, on the socket with this index.
    Udp(usize, SocketAddr),
    /// Connection with this number.
    Tcp(u64),
    /// Client of the query with this number, which is held back.
    Waiting(u64),
}

/// TCP client. Each message follows its length in two bytes (RFC 1035, section 4.2.2).
struct TcpClient {
    number: u64,
    stream: TcpStream,
    received: Vec<u8>,
    last_heard: Instant,
}

impl std::fmt::Debug for Stub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stub")
            .field("switch", &self.switch)
            .field("own", &self.own)
            .finish_non_exhaustive()
    }
}

impl Stub {
    /// Binds port 53 of 127.0.0.53 and, unless `resolver_is_ours`, of 127.0.0.1. `resolver` is for names that are no
    /// guest's, until `files` has a newer one.
    ///
    /// # Errors
    ///
    /// Fails if the port is in use.
    pub fn bind(
        source: Box<dyn NameSource>,
        switch: &str,
        own: Option<Own>,
        resolver_is_ours: bool,
        resolver: Option<&ResolverConfig>,
        files: Option<SharedNameFiles>,
    ) -> io::Result<Stub> {
        let mut addresses = vec![Ipv4Addr::new(127, 0, 0, 53)];
        if !resolver_is_ours {
            addresses.push(Ipv4Addr::LOCALHOST);
        }
        let sockets = addresses.into_iter().map(|ip| Stub::bind_at((ip, 53).into()));
        Ok(Stub {
            source,
            switch: switch.to_owned(),
            own,
            announce_by: None,
            sockets: sockets.collect::<io::Result<_>>()?,
            connections: Vec::new(),
            waiting: Vec::new(),
            next_waiting: 0,
            forwarder: resolver.and_then(|resolver| DnsForwarder::new(servers(resolver))),
            search: Vec::new(),
            files,
            version: 0,
        })
    }

    fn bind_at(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
        let udp = UdpSocket::bind(address)?;
        udp.set_nonblocking(true)?;
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&udp, RECEIVE_BUFFER);
        let tcp = TcpListener::bind(udp.local_addr()?)?;
        tcp.set_nonblocking(true)?;
        Ok((udp, tcp))
    }

    /// Answers queries on a new thread. Call it after the start of the command: from then on the
    /// stub checks whether to announce this guest's name.
    ///
    /// # Errors
    ///
    /// Fails if no thread can be created.
    pub fn run_in_background(mut self) -> io::Result<()> {
        self.announce_by = self.own.is_some().then(|| Instant::now() + ANNOUNCE_AFTER);
        self.hide_host_entries()?;
        // The thread ends with the process, or when the source is lost. The guest ends then, too.
        std::thread::Builder::new().name("names".into()).spawn(move || {
            let mut number = 0;
            while self.round(&mut number).is_ok() {}
        })?;
        Ok(())
    }

    /// Waits for work and does one round of it.
    fn round(&mut self, number: &mut u64) -> io::Result<()> {
        let deadline = self.deadline();
        let mut fds = Vec::new();
        for (udp, tcp) in &self.sockets {
            fds.push(PollFd::new(udp, PollFlags::IN));
            fds.push(PollFd::new(tcp, PollFlags::IN));
        }
        fds.extend(self.connections.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        let changes = self.source.changes();
        let at = fds.len();
        fds.extend(changes.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let asked = self.forwarder.iter().flat_map(DnsForwarder::sockets);
        fds.extend(asked.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
        wait_any(&mut fds, deadline)?;
        let changed = changes.is_some() && fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        if changed {
            self.source.acknowledge()?;
            self.hide_host_entries()?;
        }
        self.follow_resolver();
        self.announce_when_due()?;
        for at in 0..self.sockets.len() {
            self.read_datagrams(at);
            self.accept_connections(at, number);
        }
        self.read_streams();
        self.answer_waiting();
        for (client, reply) in
            self.forwarder.iter_mut().flat_map(DnsForwarder::replies).collect::<Vec<_>>()
        {
            self.deliver(client, reply);
        }
        Ok(())
    }

    /// Leaves the names of guests out of the host's entries in the hosts file.
    fn hide_host_entries(&mut self) -> io::Result<()> {
        if let Some(files) = &self.files {
            let names = self.source.names()?;
            if let Err(error) = files.set_guests(names) {
                tracing::debug!(%error, "the hosts file cannot be written");
            }
        }
        Ok(())
    }

    /// Uses the name servers, options and search domains that the host has now.
    fn follow_resolver(&mut self) {
        let files = self.files.as_ref();
        let newer = files.and_then(|files| files.newer_resolver(&mut self.version));
        let Some(resolver) = newer else { return };
        let (options, _) = ServerOptions::split(&resolver.options);
        if self.forwarder.is_none() {
            self.forwarder = DnsForwarder::new(servers(&resolver));
        }
        if let Some(forwarder) = &mut self.forwarder {
            forwarder.configure(servers(&resolver), options);
        }
        self.search = resolver.search;
    }

    fn deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let announce = self.announce_by.map(|_| now + LISTENING_CHECK);
        let waiting = (!self.waiting.is_empty()).then(|| now + LOOKUP_INTERVAL);
        let idle = self.connections.iter().map(|connection| connection.last_heard + IDLE).min();
        let forwarder = self.forwarder.as_ref().and_then(DnsForwarder::deadline);
        [announce, waiting, idle, forwarder].into_iter().flatten().min()
    }

    fn announce_when_due(&mut self) -> io::Result<()> {
        let (Some(own), Some(by)) = (&self.own, self.announce_by) else { return Ok(()) };
        if Instant::now() < by && !something_listens() {
            return Ok(());
        }
        self.announce_by = None;
        self.source.announce(&own.name, &own.addresses)
    }

    fn read_datagrams(&mut self, at: usize) {
        let mut buffer = [0; QUERY_MAX + 1];
        for _ in 0..BATCH {
            // An error means that no datagram is there, or reports a client that is gone.
            let Ok((length, from)) = self.sockets[at].0.recv_from(&mut buffer) else { break };
            self.handle(&buffer[..length], QueryOrigin::Udp(at, from));
        }
    }

    fn accept_connections(&mut self, at: usize, number: &mut u64) {
        for _ in 0..BATCH {
            let Ok((stream, _)) = self.sockets[at].1.accept() else { break };
            if self.connections.len() >= CONNECTIONS_MAX || stream.set_nonblocking(true).is_err() {
                continue;
            }
            *number = number.wrapping_add(1);
            let last_heard = Instant::now();
            let received = Vec::new();
            self.connections.push(TcpClient { number: *number, stream, received, last_heard });
        }
    }

    fn read_streams(&mut self) {
        let mut connections = std::mem::take(&mut self.connections);
        let mut received = Vec::new();
        connections.retain_mut(|connection| {
            let goes_on = connection.read(&mut received);
            goes_on && connection.last_heard.elapsed() < IDLE
        });
        self.connections = connections;
        for (number, bytes) in received {
            self.handle(&bytes, QueryOrigin::Tcp(number));
        }
    }

    fn handle(&mut self, bytes: &[u8], client: QueryOrigin) {
        let request = match AnswerableQuery::parse(bytes, &self.switch) {
            Ok(request) => request,
            Err(Rejected::Reply(reply)) => return self.send(client, &reply),
            Err(Rejected::Ignore) => return,
        };
        let answer = match request.question().clone() {
            Question::Guest(name) | Question::Short(name) => match self.lookup(&name) {
                Ok(addresses) if addresses.is_empty() => {
                    if self.waiting.len() < WAITING_MAX {
                        return self.hold(request, name, client, bytes);
                    }
                    Answer::Failure
                }
                Ok(addresses) => Answer::Addresses(addresses),
                Err(_) => Answer::Failure,
            },
            Question::Localhost => {
                Answer::Addresses(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()])
            }
            Question::Reverse(address) => match self.reverse(address) {
                Ok(Some(name)) => Answer::Name(name),
                Ok(None) if self.forward(bytes, client) => return,
                Ok(None) => Answer::NoSuchName,
                Err(_) => Answer::Failure,
            },
            Question::Foreign => match self.guest_below_search(&request) {
                Some(addresses) => Answer::Addresses(addresses),
                None if self.forward(bytes, client) => return,
                None => Answer::NoSuchName,
            },
        };
        let reply = request.reply(&answer);
        self.send(client, &reply);
    }

    /// Holds a query back until a guest has the name. Queries the name servers for a name of one label.
    fn hold(&mut self, request: AnswerableQuery, name: String, client: QueryOrigin, query: &[u8]) {
        let number = self.next_waiting;
        self.next_waiting = number.wrapping_add(1);
        let mut negative = None;
        if matches!(request.question(), Question::Short(_))
            && let Some(forwarder) = &mut self.forwarder
        {
            let over_tcp = matches!(client, QueryOrigin::Tcp(_));
            if !forwarder.forward(query, QueryOrigin::Waiting(number), over_tcp) {
                negative = failure(query.to_vec());
            }
        }
        let until = Instant::now() + HOLD_TIME;
        self.waiting.push(Waiting { number, request, name, client, until, negative });
    }

    /// Returns the addresses of the guest whose name was queried below a search domain of the host.
    fn guest_below_search(&mut self, request: &AnswerableQuery) -> Option<Vec<IpAddr>> {
        let name = request.label_below(&self.search)?;
        self.lookup(&name).ok().filter(|addresses| !addresses.is_empty())
    }

    /// Forwards a query to the name servers. One that cannot be forwarded is answered by SERVFAIL. Returns `false` if there
    /// are no name servers.
    fn forward(&mut self, query: &[u8], client: QueryOrigin) -> bool {
        let over_tcp = matches!(client, QueryOrigin::Tcp(_));
        let Some(forwarder) = &mut self.forwarder else { return false };
        if !forwarder.forward(query, client, over_tcp)
            && let Some(reply) = failure(query.to_vec())
        {
            self.send(client, &reply);
        }
        true
    }

    /// Sends an answer of the name servers to its client. An error to a query that is held back waits with it.
    fn deliver(&mut self, client: QueryOrigin, reply: Vec<u8>) {
        let QueryOrigin::Waiting(number) = client else { return self.send(client, &reply) };
        let Some(at) = self.waiting.iter().position(|held| held.number == number) else { return };
        // The response code of RFC 1035, section 4.1.1; 0 also for a name without such records.
        let is_known = reply.get(3).is_some_and(|code| code & 0x0f == 0);
        if is_known {
            let held = self.waiting.swap_remove(at);
            self.send(held.client, &reply);
        } else {
            self.waiting[at].negative = Some(reply);
        }
    }

    /// Looks up a name. The guest's own name is known before it is announced.
    fn lookup(&mut self, name: &str) -> io::Result<Vec<IpAddr>> {
        match &self.own {
            Some(own) if own.name == name => Ok(own.addresses.clone()),
            _ => self.source.lookup(name),
        }
    }

    fn reverse(&mut self, address: IpAddr) -> io::Result<Option<String>> {
        match &self.own {
            Some(own) if own.addresses.contains(&address) => Ok(Some(own.name.clone())),
            _ if address.is_loopback() => Ok(Some("localhost".into())),
            _ => self.source.reverse(address),
        }
    }

    fn answer_waiting(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let now = Instant::now();
        for mut held in waiting {
            let answer = match self.source.lookup(&held.name) {
                Ok(addresses) if addresses.is_empty() && now < held.until => {
                    self.waiting.push(held);
                    continue;
                }
                Ok(addresses) if addresses.is_empty() => {
                    if let Some(reply) = held.negative.take() {
                        self.send(held.client, &reply);
                        continue;
                    }
                    Answer::NoSuchName
                }
                Ok(addresses) => Answer::Addresses(addresses),
                Err(_) => Answer::Failure,
            };
            let reply = held.request.reply(&answer);
            self.send(held.client, &reply);
        }
    }

    /// Sends a reply if the client still exists.
    fn send(&mut self, client: QueryOrigin, reply: &[u8]) {
        match client {
            QueryOrigin::Udp(at, to) => {
                let _ = self.sockets[at].0.send_to(reply, to);
            }
            // Replies to held queries go to their clients (`deliver`).
            QueryOrigin::Waiting(_) => {}
            QueryOrigin::Tcp(number) => {
                let found = self.connections.iter().position(|c| c.number == number);
                let Some(at) = found else { return };
                if !self.connections[at].send(reply) {
                    self.connections.swap_remove(at);
                }
            }
        }
    }
}

/// Returns the addresses of the name servers.
fn servers(resolver: &ResolverConfig) -> Vec<SocketAddr> {
    resolver.name_servers.iter().map(|ip| (*ip, 53).into()).collect()
}

impl TcpClient {
    /// Reads available data and extracts whole messages. Returns `false` when the connection ends.
    fn read(&mut self, received: &mut Vec<(u64, Vec<u8>)>) -> bool {
        let mut buffer = [0; 2 + QUERY_MAX];
        match io::Read::read(&mut self.stream, &mut buffer) {
            Ok(0) => return false,
            Ok(length) => {
                self.received.extend_from_slice(&buffer[..length]);
                self.last_heard = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(_) => return false,
        }
        while let [high, low, rest @ ..] = &self.received[..] {
            let length = usize::from(u16::from_be_bytes([*high, *low]));
            if length > QUERY_MAX {
                return false;
            }
            let Some(message) = rest.get(..length) else { break };
            received.push((self.number, message.to_vec()));
            self.received.drain(..2 + length);
        }
        true
    }

    /// Writes a reply. Returns `false` if the client does not accept it, which ends the connection.
    fn send(&mut self, reply: &[u8]) -> bool {
        let Ok(length) = u16::try_from(reply.len()) else { return false };
        let message = [&length.to_be_bytes()[..], reply].concat();
        rustix::net::send(self.stream.as_fd(), &message, rustix::net::SendFlags::NOSIGNAL)
            .is_ok_and(|sent| sent == message.len())
    }
}

#[cfg(test)]
mod tests;
