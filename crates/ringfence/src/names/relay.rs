//! Queries that no guest can answer: they are passed on, as they are, to the host's name servers, and
//! what those answer is passed back, as it is.
//!
//! Each query has a socket of its own, connected to one server at a time, from a port that the kernel
//! picks: so only that server can answer, and whoever would forge an answer must guess port and number.
//! A server that says nothing within [`TRY`] makes room for the next one; each is asked twice. A client
//! that asked over TCP wants an answer that is too long for a datagram, so its query goes on over TCP.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most queries under way at a time. Each is a descriptor.
const ASKED_MAX: usize = 128;
/// The most of them over TCP: each is a thread.
const OVER_TCP_MAX: usize = 8;
/// How long a server has to answer.
const TRY: Duration = Duration::from_millis(2500);
/// How often each server is asked.
const ROUNDS: usize = 2;
/// Octets of the longest answer.
const ANSWER_MAX: usize = 65_535;
/// Octets of the header of a message.
const HEADER: usize = 12;

/// The name servers, and what they were asked by clients `C`.
pub(super) struct Relay<C> {
    servers: Vec<SocketAddr>,
    asked: Vec<Asked<C>>,
}

struct Asked<C> {
    client: C,
    query: Vec<u8>,
    way: Way,
    /// How many servers were asked before this one, the same one again included.
    tries: usize,
    until: Instant,
}

enum Way {
    Datagrams(UdpSocket),
    /// The end of what a thread writes its answer into.
    Thread(UnixStream, Vec<u8>),
}

impl Way {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Way::Datagrams(socket) => socket.as_fd(),
            Way::Thread(pipe, _) => pipe.as_fd(),
        }
    }

    /// The answer, if it has come.
    fn hear(&mut self, query: &[u8]) -> io::Result<Option<Vec<u8>>> {
        match self {
            Way::Datagrams(socket) => {
                let mut buffer = vec![0; ANSWER_MAX];
                let length = socket.recv(&mut buffer)?;
                buffer.truncate(length);
                // One to an earlier query of a socket that had this port, or a forged one.
                Ok(is_answer_to(&buffer, query).then_some(buffer))
            }
            Way::Thread(pipe, heard) => {
                // What the thread wrote is bounded by its own length.
                match pipe.read_to_end(heard) {
                    Ok(_) if is_answer_to(heard, query) => Ok(Some(core::mem::take(heard))),
                    Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) => Err(error),
                }
            }
        }
    }
}

/// Whether a message has the number of a query, and says that it is an answer.
fn is_answer_to(message: &[u8], query: &[u8]) -> bool {
    message.len() >= HEADER && message.get(..2) == query.get(..2) && message[2] & 0x80 != 0
}

impl<C: Copy> Relay<C> {
    /// A relay to these servers; `None` where there are none.
    pub(super) fn new(servers: Vec<SocketAddr>) -> Option<Relay<C>> {
        (!servers.is_empty()).then_some(Relay { servers, asked: Vec::new() })
    }

    /// Passes a query on. One more than can be under way is forgotten: the client will ask again.
    pub(super) fn ask(&mut self, query: &[u8], client: C, over_tcp: bool) {
        let threads = self.asked.iter().filter(|asked| matches!(asked.way, Way::Thread(..)));
        if self.asked.len() >= ASKED_MAX || over_tcp && threads.count() >= OVER_TCP_MAX {
            return;
        }
        if let Some(asked) = self.try_from(0, query, client, over_tcp) {
            self.asked.push(asked);
        }
    }

    /// Asks the first server, from the `tries`-th on, that can be asked at all.
    fn try_from(&self, tries: usize, query: &[u8], client: C, over_tcp: bool) -> Option<Asked<C>> {
        for tries in tries..self.servers.len() * ROUNDS {
            let server = self.servers[tries % self.servers.len()];
            let way = if over_tcp { by_stream(server, query) } else { by_datagram(server, query) };
            if let Ok(way) = way {
                let until = Instant::now() + TRY;
                return Some(Asked { client, query: query.to_vec(), way, tries, until });
            }
        }
        None
    }

    /// What to wait for.
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.asked.iter().map(|asked| asked.way.fd())
    }

    /// When to look even if nothing comes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.asked.iter().map(|asked| asked.until).min()
    }

    /// The answers that have come. Where a server is late, the next one is asked.
    pub(super) fn replies(&mut self) -> Vec<(C, Vec<u8>)> {
        let mut replies = Vec::new();
        for mut asked in core::mem::take(&mut self.asked) {
            let goes_on = match asked.way.hear(&asked.query) {
                Ok(Some(answer)) => {
                    replies.push((asked.client, answer));
                    continue;
                }
                Ok(None) => true,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            };
            if goes_on && Instant::now() < asked.until {
                self.asked.push(asked);
            } else {
                let over_tcp = matches!(asked.way, Way::Thread(..));
                let again = self.try_from(asked.tries + 1, &asked.query, asked.client, over_tcp);
                self.asked.extend(again);
            }
        }
        replies
    }
}

fn by_datagram(server: SocketAddr, query: &[u8]) -> io::Result<Way> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(server)?;
    socket.set_nonblocking(true)?;
    socket.send(query)?;
    Ok(Way::Datagrams(socket))
}

/// On a thread of its own, which ends within [`TRY`] of each step.
fn by_stream(server: SocketAddr, query: &[u8]) -> io::Result<Way> {
    let (ours, mut theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let length = u16::try_from(query.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let message = [&length.to_be_bytes()[..], query].concat();
    let mut ask = move || -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&server, TRY)?;
        stream.set_read_timeout(Some(TRY))?;
        stream.set_write_timeout(Some(TRY))?;
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
    Ok(Way::Thread(ours, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A message of this number, an answer if `answers`.
    fn message(number: u8, answers: bool, length: usize) -> Vec<u8> {
        let mut message = vec![7; length];
        message[..3].copy_from_slice(&[0, number, if answers { 0x81 } else { 1 }]);
        message
    }

    fn replies(relay: &mut Relay<u32>) -> Vec<(u32, Vec<u8>)> {
        for _ in 0..2000 {
            let replies = relay.replies();
            if !replies.is_empty() {
                return replies;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no answer came");
    }

    #[test]
    fn a_query_goes_on_as_it_is_and_so_does_the_answer() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut relay = Relay::new(vec![server.local_addr().unwrap()]).unwrap();
        relay.ask(&message(1, false, 40), 10, false);
        let mut buffer = [0; 100];
        let (length, from) = server.recv_from(&mut buffer).unwrap();
        assert!(buffer[..length] == message(1, false, 40)[..]);
        // Neither another number nor a query is an answer.
        for wrong in [message(2, true, 50), message(1, false, 50), vec![0, 1, 0x81]] {
            server.send_to(&wrong, from).unwrap();
        }
        server.send_to(&message(1, true, 3000), from).unwrap();
        assert!(replies(&mut relay) == [(10, message(1, true, 3000))]);
        assert!(relay.deadline().is_none() && relay.sockets().next().is_none());
    }

    #[test]
    fn a_server_that_cannot_be_reached_makes_room_for_the_next() {
        // Bound and dropped: nobody is there, which the kernel says at once.
        let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut relay = Relay::new(vec![gone, server.local_addr().unwrap()]).unwrap();
        relay.ask(&message(3, false, 30), 1, false);
        let answer = std::thread::spawn(move || {
            let (_, from) = server.recv_from(&mut [0; 100]).unwrap();
            server.send_to(&message(3, true, 60), from).unwrap();
        });
        assert!(replies(&mut relay) == [(1, message(3, true, 60))]);
        answer.join().unwrap();
    }

    #[test]
    fn a_long_answer_comes_over_tcp() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut relay = Relay::new(vec![server.local_addr().unwrap()]).unwrap();
        relay.ask(&message(5, false, 30), 4, true);
        let answer = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.read_exact(&mut [0; 32]).unwrap();
            let long = message(5, true, 40_000);
            stream.write_all(&40_000_u16.to_be_bytes()).unwrap();
            stream.write_all(&long).unwrap();
        });
        assert!(replies(&mut relay) == [(4, message(5, true, 40_000))]);
        answer.join().unwrap();
    }

    #[test]
    fn what_is_under_way_is_bounded() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut relay = Relay::new(vec![server.local_addr().unwrap()]).unwrap();
        for client in 0..1000 {
            relay.ask(&message(1, false, 30), client, false);
        }
        assert_eq!(relay.sockets().count(), ASKED_MAX);
        assert!(Relay::<u32>::new(Vec::new()).is_none());
    }
}
