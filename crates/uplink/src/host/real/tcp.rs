//! TCP sockets of Linux: connect, peek, discard, send.

// #syscall uplink socket 0=AF_INET 1&0xf=SOCK_STREAM: TCP
// #syscall uplink socket 0=AF_INET6 1&0xf=SOCK_STREAM: TCP
// #syscall uplink connect: connections that the guest opens
// #syscall uplink recvmsg,sendmsg: peeking; data of the guest
// #syscall uplink sendto: first bytes of a connection under an egress policy; bytes that waited for room
// #syscall uplink ppoll: urgent data, end of the stream
// #syscall uplink shutdown: the guest has closed its direction
// #syscall uplink setsockopt 1=IPPROTO_TCP: options of TCP
// #syscall uplink setsockopt 1=IPPROTO_IP: traffic class of a connection
// #syscall uplink setsockopt 1=IPPROTO_IPV6: traffic class of a connection
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_LINGER: resets
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_KEEPALIVE: dead peers
// #syscall uplink setsockopt 1=SOL_SOCKET 2=SO_OOBINLINE: urgent data
// #syscall uplink getsockopt 1=SOL_SOCKET: errors
// #syscall uplink getsockopt 1=IPPROTO_TCP: state of a connection

use core::net::SocketAddr;
use core::time::Duration;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

use arrayvec::ArrayVec;
use ringfence_memory::WriteList;
use ringfence_sys::numbers::usize_from;
use ringfence_sys::poll::timespec;
use ringfence_sys::socket;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvAncillaryBuffer, RecvFlags, SocketFlags, SocketType, sockopt};

use super::errors::errno;
use super::{PEEK_AGAIN_MAX, RealHost};
use crate::host::{Close, Owner, Piece, SendRoom, Socket, TcpHost, UrgentMark};
use crate::link::RESERVE_MAX;

/// Events watched on each TCP socket.
const WATCHED: EventFlags =
    EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP).union(EventFlags::PRI);

/// Flag of `send` for urgent data.
const MSG_OOB: i32 = 1;

/// Returns `true` if the kernel supports `SO_PEEK_OFF` for TCP.
pub(super) fn kernel_has_peek_offset() -> bool {
    let Ok(probe) = net::socket(net::AddressFamily::INET, SocketType::STREAM, None) else {
        return false;
    };
    socket::set_peek_offset(&probe, 0).is_ok()
}

/// Sets the options of a listening socket, which its connections inherit: no delay, and those of [`prepare`].
pub(super) fn prepare_listening(file: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(file, true)?;
    prepare(file)
}

/// Sets the options that a connection needs from the beginning: urgent data inline, keep-alive.
fn prepare(file: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_socket_oobinline(file, true)?;
    sockopt::set_socket_keepalive(file, true)
}

/// Maximum of spare sockets of one address family.
const SPARES_MAX: usize = 4;
/// Number of system calls that open one socket.
const SYSCALLS_OPEN: u64 = 3;

/// State of the option `TCP_NODELAY` of a connection. Nagle's algorithm delays a short segment only while others are in
/// flight. So the first data of a connection leaves at once without the option, and many connections have no other data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoDelay {
    /// Nothing was sent yet.
    AfterFirst,
    /// The option is set before the next data is sent.
    Due,
    Set,
}

/// Spare sockets: opened and configured ahead of the next connections.
#[derive(Debug, Default)]
pub(super) struct Spares {
    v4: ArrayVec<OwnedFd, SPARES_MAX>,
    v6: ArrayVec<OwnedFd, SPARES_MAX>,
    /// Number of sockets to open again, as many as were used: IPv4, IPv6.
    wanted: (usize, usize),
}

impl Spares {
    /// Returns the spare sockets of a family and the number to open.
    fn of(&mut self, v4: bool) -> (&mut ArrayVec<OwnedFd, SPARES_MAX>, &mut usize) {
        if v4 { (&mut self.v4, &mut self.wanted.0) } else { (&mut self.v6, &mut self.wanted.1) }
    }
}

fn open_socket(v4: bool) -> Result<OwnedFd, Errno> {
    let family = if v4 { net::AddressFamily::INET } else { net::AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let file = net::socket_with(family, SocketType::STREAM, flags, None)?;
    prepare(&file)?;
    Ok(file)
}

impl TcpHost for RealHost {
    fn connect(&mut self, owner: Owner, to: SocketAddr) -> Result<Socket, Errno> {
        let (spares, wanted) = self.spares.of(to.is_ipv4());
        *wanted += 1;
        let file = match spares.pop() {
            Some(file) => file,
            None => {
                self.counters.syscalls.add(SYSCALLS_OPEN);
                open_socket(to.is_ipv4())?
            }
        };
        if let Some(source) = self.source(to.ip()) {
            source.apply(&file)?;
        }
        self.count();
        match net::connect(&file, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {
                self.register(owner, file, WATCHED, NoDelay::AfterFirst)
            }
            Err(errno) => Err(errno),
        }
    }

    fn adopt(&mut self, owner: Owner, file: OwnedFd) -> Result<Socket, Errno> {
        self.register(owner, file, WATCHED, NoDelay::Set)
    }

    fn peek_limit(&self) -> u32 {
        if self.has_peek_offset { u32::MAX } else { PEEK_AGAIN_MAX }
    }

    fn peek(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno> {
        if !self.has_peek_offset {
            return self.peek_from_front(socket, offset, into);
        }
        let entry = self.entry(socket)?;
        if entry.peek_at.unwrap_or(0) != offset {
            let at = u32::try_from(offset).map_err(|_| Errno::INVAL)?;
            socket::set_peek_offset(&entry.file, at).map_err(errno)?;
            entry.peek_at = Some(offset);
            self.count();
        }
        self.count();
        let entry = self.entry(socket)?;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let n = net::recvmsg(&entry.file, into, &mut RecvAncillaryBuffer::default(), flags)?.bytes;
        entry.peek_at = entry.peek_at.map(|at| at + n);
        Ok(n)
    }

    fn discard(&mut self, socket: &Socket, len: usize) -> Result<usize, Errno> {
        self.count();
        let entry = self.entry(socket)?;
        let n = socket::discard(&entry.file, len).map_err(errno)?;
        entry.peek_at = entry.peek_at.map(|at| at.saturating_sub(n));
        Ok(n)
    }

    fn urgent_mark(&mut self, socket: &Socket) -> UrgentMark {
        self.count();
        let Ok(file) = self.file(socket) else { return UrgentMark::None };
        if socket::at_urgent_mark(file) {
            return UrgentMark::Here;
        }
        self.count();
        match self.is_polled(socket, PollFlags::PRI) {
            Ok(true) => UrgentMark::Ahead,
            Ok(false) | Err(_) => UrgentMark::None,
        }
    }

    fn send(
        &mut self,
        socket: &Socket,
        pieces: &[Piece<'_>],
        urgent: bool,
    ) -> Result<usize, Errno> {
        self.count();
        let mut list = WriteList::new();
        for piece in pieces {
            let range = piece.start..piece.start + piece.len;
            if piece.frame.gather_range(range, &mut list).is_err() {
                break;
            }
        }
        let flags = if urgent { MSG_OOB } else { 0 };
        self.set_no_delay(socket)?;
        list.send(self.file(socket)?, flags).map_err(errno)
    }

    fn send_bytes(&mut self, socket: &Socket, bytes: &[u8]) -> Result<usize, Errno> {
        self.count();
        self.set_no_delay(socket)?;
        rustix::net::send(self.file(socket)?, bytes, rustix::net::SendFlags::NOSIGNAL)
    }

    fn send_room(&mut self, socket: &Socket) -> SendRoom {
        self.count();
        let queue = self.file(socket).and_then(|file| socket::send_queue(file).map_err(errno));
        queue.map_or(SendRoom::default(), |queue| SendRoom { used: queue.used, limit: queue.limit })
    }

    fn unacknowledged(&mut self, socket: &Socket) -> u32 {
        self.count();
        let queued = self.file(socket).and_then(|file| socket::unacknowledged(file).map_err(errno));
        queued.unwrap_or(0)
    }

    fn set_class(&mut self, socket: &Socket, class: u8) {
        self.count();
        let Ok(file) = self.file(socket) else { return };
        // A socket of IPv4 refuses the first of the two. One of IPv6 accepts the other, without an effect.
        let _ = sockopt::set_ipv6_tclass(file, class.into())
            .or_else(|_| sockopt::set_ip_tos(file, class));
    }

    fn await_room(&mut self, socket: &Socket) {
        self.count();
        let Ok(owner) = self.entry(socket).map(|entry| entry.owner) else { return };
        if let Ok(file) = self.file(socket) {
            // Modifying an entry makes the kernel poll the socket again, which arms its report of room. It
            // cannot fail for a socket that is in the epoll.
            let data = epoll::EventData::new_u64(owner.to_word());
            let _ = epoll::modify(&self.epoll, file, data, WATCHED | EventFlags::ET);
        }
    }

    fn shut_down(&mut self, socket: &Socket) {
        self.count();
        if let Ok(file) = self.file(socket) {
            // A socket that cannot be shut down is closed already; an event reports that.
            let _ = net::shutdown(file, net::Shutdown::Write);
        }
    }

    fn error(&mut self, socket: &Socket) -> Option<Errno> {
        self.count();
        let file = self.file(socket).ok()?;
        match sockopt::socket_error(file) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno),
        }
    }

    fn close(&mut self, socket: Socket, how: Close) {
        self.count();
        let Some(entry) = self.unregister(socket) else { return };
        if how == Close::Reset {
            self.count();
            // Without the option the close is an orderly one, which does no harm.
            let _ = sockopt::set_socket_linger(&entry.file, Some(Duration::ZERO));
        }
    }
}

impl RealHost {
    /// Sets `TCP_NODELAY` before the second data of a connection.
    fn set_no_delay(&mut self, socket: &Socket) -> Result<(), Errno> {
        let entry = self.entry(socket)?;
        match entry.no_delay {
            NoDelay::Set => return Ok(()),
            NoDelay::AfterFirst => entry.no_delay = NoDelay::Due,
            NoDelay::Due => {
                entry.no_delay = NoDelay::Set;
                // Without the option, data is late but arrives.
                let _ = sockopt::set_tcp_nodelay(&entry.file, true);
                self.count();
            }
        }
        Ok(())
    }

    /// Opens as many spare sockets as were used since the last call, up to the maximum.
    pub(super) fn make_spares(&mut self) {
        for v4 in [true, false] {
            let (spares, wanted) = self.spares.of(v4);
            let count = core::mem::take(wanted).min(spares.remaining_capacity());
            for _ in 0..count {
                self.counters.syscalls.add(SYSCALLS_OPEN);
                // Without a spare socket, `connect` opens one and returns the error.
                let Ok(file) = open_socket(v4) else { return };
                self.spares.of(v4).0.push(file);
            }
        }
    }

    /// Peeks from the front of the queue; the first `offset` bytes go to a scratch buffer.
    fn peek_from_front(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno> {
        debug_assert!(offset <= PEEK_AGAIN_MAX as usize, "no further than the reach of a peek");
        let seen = self.peek_behind(socket, offset, into)?;
        if seen > 0 {
            return Ok(seen);
        }
        self.count();
        if !self.is_polled(socket, PollFlags::RDHUP | PollFlags::HUP)? {
            return Err(Errno::AGAIN);
        }
        // The end has arrived, perhaps with bytes that came after the first peek.
        self.peek_behind(socket, offset, into)
    }

    /// Peeks at the bytes behind the first `offset` ones. Returns 0 if there are none.
    fn peek_behind(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno> {
        self.count();
        let mut scratch = core::mem::take(&mut self.scratch);
        scratch.resize(usize_from(PEEK_AGAIN_MAX), 0);
        let seen = scratch.get_mut(..offset).ok_or(Errno::INVAL).and_then(|scratch| {
            let mut list = ArrayVec::<IoSliceMut<'_>, { RESERVE_MAX + 1 }>::new();
            list.push(IoSliceMut::new(scratch));
            list.extend(into.iter_mut().take(RESERVE_MAX).map(|slice| IoSliceMut::new(slice)));
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let file = self.file(socket)?;
            Ok(net::recvmsg(file, &mut list, &mut RecvAncillaryBuffer::default(), flags)?.bytes)
        });
        self.scratch = scratch;
        Ok(seen?.saturating_sub(offset))
    }

    /// Returns `true` if any of `flags` holds for a socket now.
    fn is_polled(&self, socket: &Socket, flags: PollFlags) -> Result<bool, Errno> {
        let file = self.file(socket)?;
        let mut fds = [PollFd::new(&file, flags)];
        poll(&mut fds, Some(&timespec(Duration::ZERO)))?;
        Ok(fds[0].revents().intersects(flags))
    }
}
