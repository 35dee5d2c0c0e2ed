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

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::RealHost;
use crate::host::relay::{Progress, Relay, RelayEvents, RelayHost};
use crate::host::{Owner, OwnerKind, Readiness};

/// Wanted length of a pipe in bytes. Users with many pipes get shorter ones.
const PIPE_LEN: usize = 512 << 10;
/// Maximum of bytes that one call carries in each direction.
const BUDGET: usize = 2 << 20;
/// Events watched on each socket.
const WATCHED: EventFlags = EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP);

impl RelayHost for RealHost {
    fn connect_inner(
        &mut self,
        owner: Owner,
        inner: &OwnedFd,
        to: SocketAddr,
    ) -> Result<(), Errno> {
        rustix::io::ioctl_fionbio(inner, true)?;
        sockopt::set_tcp_nodelay(inner, true)?;
        match rustix::net::connect(inner, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        self.counters.syscalls.add(4);
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
        self.counters.syscalls.add(1);
        let _ = sockopt::set_socket_linger(&client, Some(Duration::ZERO));
    }

    fn connected(&mut self, inner: &OwnedFd) -> Result<bool, Errno> {
        self.counters.syscalls.add(2);
        sockopt::socket_error(inner)??;
        match rustix::net::getpeername(inner) {
            Ok(_) => Ok(true),
            Err(Errno::NOTCONN) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn join(
        &mut self,
        owner: Owner,
        client: OwnedFd,
        inner: OwnedFd,
    ) -> Result<Box<dyn Relay>, (OwnedFd, Errno)> {
        let pipes = pipe().and_then(|out| Ok((out, pipe()?)));
        let (out, back) = match pipes {
            Ok(pipes) => pipes,
            Err(errno) => return Err((client, errno)),
        };
        self.counters.syscalls.add(5);
        let outer = Owner { kind: OwnerKind::RelayOuter, ..owner };
        let data = epoll::EventData::new_u64(outer.to_word());
        match epoll::add(&self.epoll, &client, data, WATCHED | EventFlags::ET) {
            Ok(()) => Ok(Box::new(Spliced { client, inner, out, back })),
            Err(errno) => Err((client, errno)),
        }
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

fn pipe() -> Result<Direction, Errno> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // A shorter pipe works, too.
    let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE_LEN);
    let (has_ended, is_shut, may_go_on) = (false, false, true);
    Ok(Direction { reader, writer, held: 0, has_ended, is_shut, may_go_on })
}

impl Direction {
    /// Returns `true` if these events of its ends, or what is left to do, can move bytes.
    fn can_go_on(&self, from: Readiness, to: Readiness) -> bool {
        let has_input = from.readable || from.read_closed;
        let has_room = to.writable && self.held > 0;
        self.may_go_on || has_input || has_room || from.failed || to.failed
    }

    /// Moves bytes, unless neither an event nor what is left to do asks for it. Returns the number of bytes that have
    /// arrived.
    fn advance_after(&mut self, from: RelaySide<'_>, to: RelaySide<'_>) -> Result<usize, Errno> {
        if !self.can_go_on(from.events, to.events) {
            return Ok(0);
        }
        let (moved, more) = self.advance(from.socket, to.socket)?;
        self.may_go_on = more;
        Ok(moved)
    }

    /// Moves bytes until both ends wait, or the budget is used up. Returns the number of bytes that have arrived,
    /// and `true` if more may be possible.
    fn advance(&mut self, from: &OwnedFd, to: &OwnedFd) -> Result<(usize, bool), Errno> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let mut moved = 0;
        while moved < BUDGET {
            let mut is_waiting = true;
            if !self.has_ended {
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
                    rustix::net::shutdown(to, Shutdown::Write)?;
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
}

impl Relay for Spliced {
    fn advance(&mut self, events: RelayEvents) -> Progress {
        let client = RelaySide { socket: &self.client, events: events.client };
        let inner = RelaySide { socket: &self.inner, events: events.inner };
        let moved = self.out.advance_after(client, inner);
        let moved = moved.and_then(|out| Ok((out, self.back.advance_after(inner, client)?)));
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
                for socket in [&self.client, &self.inner] {
                    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
                }
                Progress::Ended
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::UplinkCounters;
    use crate::host::Host;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;

    const OWNER: Owner = Owner { kind: OwnerKind::Relay, index: 3, generation: 1 };

    fn unconnected() -> OwnedFd {
        use rustix::net::socket_with;
        socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
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
        while !host.connected(&inner).unwrap() {
            wait(&mut host);
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
        let mut direction = pipe().unwrap();
        assert!(direction.can_go_on(Readiness::default(), Readiness::default()), "the first time");
        direction.may_go_on = false;
        assert!(direction.can_go_on(readable, Readiness::default()));
        assert!(!direction.can_go_on(writable, readable), "nothing waits for room");
        direction.held = 1;
        assert!(direction.can_go_on(Readiness::default(), readable));
    }

    #[test]
    fn refused_connection_is_reported() {
        let mut host = RealHost::new(Arc::<UplinkCounters>::default()).unwrap();
        // No process listens on this port. One that was just released may be another test's by now.
        let inner = unconnected();
        if host.connect_inner(OWNER, &inner, "127.0.0.1:1".parse().unwrap()).is_ok() {
            wait(&mut host);
            assert!(host.connected(&inner).is_err());
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
