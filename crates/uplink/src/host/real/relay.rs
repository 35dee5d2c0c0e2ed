//! Relays of Linux: `splice(2)` moves bytes from one socket to the other through a pipe. The process never reads them.
//!
//! ```text
//! client ──splice──> pipe ──splice──> inner       end of stream: shutdown(inner)
//! client <──splice── pipe <──splice── inner       end of stream: shutdown(client)
//! ```

// #syscall uplink splice: relays between two sockets
// #syscall uplink pipe2: pipes of relays
// #syscall uplink fcntl 1=F_SETPIPE_SZ: longer pipes of relays

use core::net::SocketAddr;
use core::time::Duration;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_sys::counters::Counter;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::RealHost;
use crate::counters::UplinkCounters;
use crate::host::relay::{Pipe, Progress, Relay, RelayEvents, RelayHost};
use crate::host::{Owner, OwnerKind, Readiness};

/// Wanted length of a pipe in bytes. Users with many pipes get shorter ones.
const PIPE_LEN: usize = 512 << 10;
/// Maximum of bytes that one call carries in each direction.
const BUDGET: usize = 2 << 20;
/// Maximum of pipes that are kept for the next relays. A relay has two.
pub(super) const PIPES_MAX: usize = 16;
/// Events watched on each socket.
const WATCHED: EventFlags = EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP);

impl RelayHost for RealHost {
    fn connect_inner(
        &mut self,
        owner: Owner,
        inner: &OwnedFd,
        to: SocketAddr,
    ) -> Result<(), Errno> {
        sockopt::set_tcp_nodelay(inner, true)?;
        match rustix::net::connect(inner, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        self.counters.syscalls.add(3);
        let data = epoll::EventData::new_u64(owner.to_word());
        epoll::add(&self.epoll, inner, data, WATCHED | EventFlags::ET)
    }

    fn open_inner(&mut self, is_v4: bool) -> Result<OwnedFd, Errno> {
        self.counters.syscalls.add(1);
        let family = if is_v4 { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
    }

    fn reset(&mut self, client: OwnedFd) {
        // The option and the close.
        self.counters.syscalls.add(2);
        let _ = sockopt::set_socket_linger(&client, Some(Duration::ZERO));
    }

    fn connected(&mut self, inner: &OwnedFd, events: Readiness) -> Result<bool, Errno> {
        if events.failed || events.read_closed {
            self.counters.syscalls.add(1);
            sockopt::socket_error(inner)??;
        }
        // A socket has no room before it is connected.
        Ok(events.writable)
    }

    fn join(
        &mut self,
        owner: Owner,
        client: OwnedFd,
        inner: OwnedFd,
    ) -> Result<Box<dyn Relay>, (OwnedFd, Errno)> {
        let pipes = self.pipe().and_then(|out| Ok((out, self.pipe()?)));
        let (out, back) = match pipes {
            Ok((out, back)) => (Direction::new(out), Direction::new(back)),
            Err(errno) => return Err((client, errno)),
        };
        self.count();
        let outer = Owner { kind: OwnerKind::RelayOuter, ..owner };
        let data = epoll::EventData::new_u64(outer.to_word());
        match epoll::add(&self.epoll, &client, data, WATCHED | EventFlags::ET) {
            Ok(()) => {
                let counters = Arc::clone(&self.counters);
                Ok(Box::new(Spliced { client, inner, out, back, counters }))
            }
            Err(errno) => Err((client, errno)),
        }
    }

    fn recycle(&mut self, relay: Box<dyn Relay>) {
        let pipes = relay.into_pipes();
        // Those that are not kept are closed, both ends of each.
        let kept = pipes.len().min(PIPES_MAX.saturating_sub(self.pipes.len()));
        self.counters.syscalls.add(2 * (2 - kept as u64));
        self.pipes.extend(pipes.into_iter().take(kept));
    }
}

impl RealHost {
    /// Returns a pipe of an earlier relay, or makes one.
    fn pipe(&mut self) -> Result<Pipe, Errno> {
        if let Some(pipe) = self.pipes.pop() {
            return Ok(pipe);
        }
        self.counters.syscalls.add(2);
        make_pipe()
    }
}

/// One direction: its pipe and state.
struct Direction {
    reader: OwnedFd,
    writer: OwnedFd,
    /// Number of bytes in the pipe.
    held: usize,
    /// Set after the end of the source's stream.
    has_ended: bool,
    /// Set after the end was passed on.
    is_shut: bool,
    /// Set if more may be possible without an event.
    may_go_on: bool,
}

fn make_pipe() -> Result<Pipe, Errno> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // A shorter pipe works, too.
    let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE_LEN);
    Ok((reader, writer))
}

impl Direction {
    fn new((reader, writer): Pipe) -> Direction {
        let (has_ended, is_shut, may_go_on) = (false, false, true);
        Direction { reader, writer, held: 0, has_ended, is_shut, may_go_on }
    }

    /// Returns `true` if these events of its ends, or what is left to do, can move bytes.
    fn can_go_on(&self, from: Readiness, to: Readiness) -> bool {
        let has_input = from.readable || from.read_closed;
        let has_room = to.writable && self.held > 0;
        self.may_go_on || has_input || has_room || from.failed || to.failed
    }

    /// Moves bytes, unless neither an event nor what is left to do asks for it. Returns the number of bytes that have
    /// arrived.
    fn advance_after(
        &mut self,
        from: RelaySide<'_>,
        to: RelaySide<'_>,
        calls: &Calls<'_>,
    ) -> Result<usize, Errno> {
        if !self.can_go_on(from.events, to.events) {
            return Ok(0);
        }
        let (moved, more) = self.advance(from.socket, to.socket, calls)?;
        self.may_go_on = more;
        Ok(moved)
    }

    /// Moves bytes until both ends wait, or the budget is used up. Returns the number of bytes that have arrived,
    /// and `true` if more may be possible.
    fn advance(
        &mut self,
        from: &OwnedFd,
        to: &OwnedFd,
        calls: &Calls<'_>,
    ) -> Result<(usize, bool), Errno> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let mut moved = 0;
        while moved < BUDGET {
            let mut is_waiting = true;
            if !self.has_ended {
                calls.counter.add(1);
                match rustix::pipe::splice(from, None, &self.writer, None, PIPE_LEN, flags) {
                    Ok(0) => self.has_ended = true,
                    Ok(taken) => {
                        self.held += taken;
                        is_waiting = false;
                    }
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
            if self.held > 0 {
                calls.counter.add(1);
                match rustix::pipe::splice(&self.reader, None, to, None, self.held, flags) {
                    Ok(given) => {
                        self.held -= given.min(self.held);
                        moved += given;
                        is_waiting = false;
                    }
                    // The event of the writable socket continues.
                    Err(Errno::AGAIN) => return Ok((moved, false)),
                    Err(Errno::INTR) => is_waiting = false,
                    Err(errno) => return Err(errno),
                }
            }
            if self.has_ended && self.held == 0 {
                if !self.is_shut {
                    self.is_shut = true;
                    // After the end of both directions the sockets are closed, which tells the other end the same.
                    if !calls.is_last {
                        calls.counter.add(1);
                        rustix::net::shutdown(to, Shutdown::Write)?;
                    }
                }
                return Ok((moved, false));
            }
            if is_waiting {
                return Ok((moved, false));
            }
        }
        Ok((moved, true))
    }
}

/// System calls of a direction.
#[derive(Clone, Copy)]
struct Calls<'a> {
    counter: &'a Counter,
    /// Set if the other direction has ended.
    is_last: bool,
}

/// Socket at one end of a relay, with its events.
#[derive(Clone, Copy)]
struct RelaySide<'a> {
    socket: &'a OwnedFd,
    events: Readiness,
}

/// Two sockets joined by two pipes.
struct Spliced {
    client: OwnedFd,
    inner: OwnedFd,
    out: Direction,
    back: Direction,
    counters: Arc<UplinkCounters>,
}

impl Relay for Spliced {
    fn advance(&mut self, events: RelayEvents) -> Progress {
        let client = RelaySide { socket: &self.client, events: events.client };
        let inner = RelaySide { socket: &self.inner, events: events.inner };
        let counter = &self.counters.syscalls;
        let calls = Calls { counter, is_last: self.back.is_shut };
        let moved = self.out.advance_after(client, inner, &calls);
        let calls = Calls { counter, is_last: self.out.is_shut };
        let moved =
            moved.and_then(|out| Ok((out, self.back.advance_after(inner, client, &calls)?)));
        match moved {
            Ok(_) if self.out.is_shut && self.back.is_shut => Progress::Ended,
            Ok((out, back)) => {
                let (out, back) = (out as u64, back as u64);
                if self.out.may_go_on || self.back.may_go_on {
                    Progress::More(out, back)
                } else {
                    Progress::Waiting(out, back)
                }
            }
            Err(_) => {
                // The other end learns of the failure by a reset, as it would without a relay.
                self.counters.syscalls.add(2);
                for socket in [&self.client, &self.inner] {
                    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
                }
                Progress::Ended
            }
        }
    }

    fn ended_streams(&self) -> (bool, bool) {
        (self.out.is_shut, self.back.is_shut)
    }

    fn into_pipes(self: Box<Self>) -> Vec<Pipe> {
        self.counters.syscalls.add(2);
        let directions = [self.out, self.back].into_iter();
        let empty = directions.filter(|direction| direction.held == 0);
        empty.map(|direction| (direction.reader, direction.writer)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    const OWNER: Owner = Owner { kind: OwnerKind::Relay, index: 3, generation: 1 };

    fn unconnected() -> OwnedFd {
        use rustix::net::socket_with;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap()
    }

    /// Waits for events of the relay.
    fn wait(host: &mut RealHost) -> RelayEvents {
        let (mut ready, mut events) = (Vec::new(), RelayEvents::default());
        while ready.is_empty() {
            host.poll(&mut ready, None).unwrap();
        }
        ready.into_iter().for_each(|event| events.add(event));
        events
    }

    /// Returns a host, the client's end, the server's end, and the relay between them.
    fn joined() -> (RealHost, TcpStream, TcpStream, Box<dyn Relay>) {
        let mut host = RealHost::new(Arc::<UplinkCounters>::default()).unwrap();
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(outside.local_addr().unwrap()).unwrap();
        let accepted = outside.accept().unwrap().0;
        accepted.set_nonblocking(true).unwrap();
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let inner = unconnected();
        host.connect_inner(OWNER, &inner, server.local_addr().unwrap()).unwrap();
        let mut events = Readiness::default();
        while !host.connected(&inner, events).unwrap() {
            events = wait(&mut host).inner;
        }
        let served = server.accept().unwrap().0;
        let relay = host.join(OWNER, accepted.into(), inner).unwrap_or_else(|(_, e)| panic!("{e}"));
        (host, client, served, relay)
    }

    #[test]
    fn bytes_and_ends_of_both_directions_are_carried() {
        let (mut host, mut client, mut served, mut relay) = joined();
        let noise: Vec<u8> =
            (0..5_000_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        let sent = noise.clone();
        let server = std::thread::spawn(move || {
            let mut heard = Vec::new();
            served.read_to_end(&mut heard).unwrap();
            served.write_all(&heard).unwrap();
        });
        let client = std::thread::spawn(move || {
            client.write_all(&sent).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
            let mut heard = Vec::new();
            client.read_to_end(&mut heard).unwrap();
            heard
        });
        let mut events = RelayEvents::default();
        loop {
            events = match relay.advance(events) {
                Progress::Waiting(..) => wait(&mut host),
                Progress::More(..) => RelayEvents::default(),
                Progress::Ended => break,
            };
        }
        drop(relay);
        assert!(client.join().unwrap() == noise, "other bytes came back");
        server.join().unwrap();
    }

    #[test]
    fn direction_without_an_event_is_left_alone() {
        let readable = Readiness { readable: true, writable: true, ..Readiness::default() };
        let writable = Readiness { writable: true, ..Readiness::default() };
        let mut direction = Direction::new(make_pipe().unwrap());
        assert!(direction.can_go_on(Readiness::default(), Readiness::default()), "the first time");
        direction.may_go_on = false;
        assert!(direction.can_go_on(readable, Readiness::default()));
        assert!(!direction.can_go_on(writable, readable), "nothing waits for room");
        direction.held = 1;
        assert!(direction.can_go_on(Readiness::default(), readable));
    }

    /// Carries one request and one answer, and both ends.
    fn exchange(parts: (RealHost, TcpStream, TcpStream, Box<dyn Relay>)) -> RealHost {
        let (mut host, mut client, mut served, mut relay) = parts;
        let mut carry = |relay: &mut Box<dyn Relay>| {
            let events = wait(&mut host);
            relay.advance(events)
        };
        assert_eq!(relay.advance(RelayEvents::default()), Progress::Waiting(0, 0));
        client.write_all(b"request").unwrap();
        while carry(&mut relay) != Progress::Waiting(7, 0) {}
        served.read_exact(&mut [0; 7]).unwrap();
        served.write_all(b"answer").unwrap();
        while carry(&mut relay) != Progress::Waiting(0, 6) {}
        client.read_exact(&mut [0; 6]).unwrap();
        drop(client);
        // Until the client's end is passed on.
        served.set_nonblocking(true).unwrap();
        while !matches!(served.read(&mut [0]), Ok(0)) {
            assert_eq!(carry(&mut relay), Progress::Waiting(0, 0));
        }
        drop(served);
        while carry(&mut relay) != Progress::Ended {}
        host.recycle(relay);
        host
    }

    #[test]
    fn pipes_of_a_relay_serve_the_next_one() {
        let host = exchange(joined());
        assert_eq!(host.pipes.len(), 2);
        let (mut again, client, served, _) = joined();
        again.pipes = host.pipes;
        let before = again.counters.syscalls.get();
        // The sockets of another relay are joined by the pipes that are left.
        let relay = again.join(Owner { index: 4, ..OWNER }, client.into(), served.into());
        assert_eq!(again.counters.syscalls.get() - before, 1, "the epoll alone");
        drop(relay.unwrap_or_else(|(_, errno)| panic!("{errno}")));
    }

    #[test]
    fn pipe_that_holds_bytes_is_not_kept() {
        let (mut host, _client, _served, relay) = joined();
        host.recycle(relay);
        assert_eq!(host.pipes.len(), 2);
        let (first, second) = (make_pipe().unwrap(), make_pipe().unwrap());
        let (mut out, back) = (Direction::new(first), Direction::new(second));
        out.held = 1;
        let (client, inner) = (unconnected(), unconnected());
        let counters = Arc::clone(&host.counters);
        host.recycle(Box::new(Spliced { client, inner, out, back, counters }));
        assert_eq!(host.pipes.len(), 3);
    }

    #[test]
    fn calls_of_a_relay_are_counted() {
        let parts = joined();
        let counters = Arc::clone(&parts.0.counters);
        let before = counters.syscalls.get();
        exchange(parts);
        let calls = counters.syscalls.get() - before;
        // Ten of splice at least, one shutdown, two closes. Some events come later than their bytes, with further looks.
        assert!(calls >= 13 + 4, "{calls}");
    }

    #[test]
    fn refused_connection_is_reported() {
        let mut host = RealHost::new(Arc::<UplinkCounters>::default()).unwrap();
        // No process listens on this port. One that was just released may be another test's by now.
        let inner = unconnected();
        if host.connect_inner(OWNER, &inner, "127.0.0.1:1".parse().unwrap()).is_ok() {
            let events = wait(&mut host).inner;
            assert!(host.connected(&inner, events).is_err());
        }
    }

    #[test]
    fn reset_of_one_end_resets_the_other() {
        let (mut host, mut client, served, mut relay) = joined();
        sockopt::set_socket_linger(&served, Some(Duration::ZERO)).unwrap();
        drop(served);
        let mut events = RelayEvents::default();
        while relay.advance(events) != Progress::Ended {
            events = wait(&mut host);
        }
        drop(relay);
        let error = client.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}
