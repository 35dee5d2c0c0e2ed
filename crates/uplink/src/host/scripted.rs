//! Scripted host: sockets in memory, for tests and fuzz targets. The port selects the behaviour.
//!
//! | port of the other end | behaviour |
//! |---|---|
//! | [`REFUSES`] | refuses connections; datagrams to it fail |
//! | [`SILENT`] | never answers: a connection stays half open, datagrams are lost |
//! | [`PROXY`] | answers the first bytes as an HTTP proxy that opens a connection; its server sends the request first, then echoes |
//! | [`NARROW`] | echoes datagrams, and has a path of another MTU |
//! | any other | echoes data, and closes when the guest does |
//!
//! Tests can open more flows than a process has descriptors, and a fuzz target needs no kernel.

// #syscall none: for tests

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::numbers::bounded;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::datagrams::{Datagram, DatagramHost, DatagramSocket, Failure, ROOM, ReceiveBuffer, Via};
use super::listen::{ListenHost, Listener};
use super::relay::{Relay, RelayHost};
use super::{
    Close, Host, Owner, Piece, Readiness, Ready, RunnerFile, SendRoom, Socket, TcpHost, UrgentMark,
};
use crate::packet::Marks;
use crate::udp::multicast::service::Group;

/// Port that refuses connections.
pub const REFUSES: u16 = 7;
/// Port that never answers.
pub const SILENT: u16 = 9;
/// Port of a proxy.
pub const PROXY: u16 = 13;
/// Port behind a path that carries packets of 1300 bytes.
pub const NARROW: u16 = 11;
/// Maximum of bytes in a socket's queue.
const QUEUE: usize = 64 << 10;
/// Maximum of datagrams in a socket's queue.
const DATAGRAMS: usize = 32;

#[derive(Debug)]
struct ScriptedSocket {
    owner: Owner,
    queue: VecDeque<u8>,
    ended: bool,
    wants_room: bool,
    /// The next bytes are a request to a proxy.
    is_asked: bool,
    error: Option<Errno>,
}

type Events = Arc<Mutex<VecDeque<Ready>>>;

fn report(events: &Events, owner: Owner, what: Readiness) {
    let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
    events.push_back(Ready { owner, what });
}

const READABLE: Readiness =
    Readiness { readable: true, writable: false, read_closed: false, urgent: false, failed: false };

/// Host of scripted sockets.
#[derive(Debug)]
pub struct ScriptedHost {
    sockets: Vec<Option<ScriptedSocket>>,
    free: Vec<u32>,
    events: Events,
    never: WakeFd,
    /// Maximum number of TCP sockets.
    limit: usize,
    pub own: Vec<IpAddr>,
    /// Addresses from which datagrams leave, while they are own ones. The first one is used.
    pub sources: Arc<Mutex<Vec<IpAddr>>>,
}

impl ScriptedHost {
    /// Creates a host with at most `limit` TCP sockets at a time.
    ///
    /// # Errors
    ///
    /// Returns an error if no descriptor is free for [`Host::wait_fd`], which never becomes readable.
    pub fn new(limit: usize) -> Result<ScriptedHost, Errno> {
        let never = WakeFd::new().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        let (sockets, free) = (Vec::new(), Vec::new());
        let own = Vec::new();
        let (events, sources) = (Events::default(), Arc::default());
        Ok(ScriptedHost { sockets, free, events, never, limit, own, sources })
    }

    /// Returns a function that replaces the addresses from which datagrams leave, and reports it.
    pub fn addresses(&self) -> impl Fn(Vec<IpAddr>) + use<> {
        let (events, sources) = (Arc::clone(&self.events), Arc::clone(&self.sources));
        move |addresses| {
            *sources.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
            report(&events, Owner::ADDRESSES, Readiness::default());
        }
    }

    /// Returns the address from which a new socket sends.
    fn source(&self) -> Option<IpAddr> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).first().copied()
    }

    fn entry(&mut self, socket: &Socket) -> Result<&mut ScriptedSocket, Errno> {
        let index = usize::try_from(socket.0).map_err(|_| Errno::BADF)?;
        self.sockets.get_mut(index).and_then(Option::as_mut).ok_or(Errno::BADF)
    }
}

impl TcpHost for ScriptedHost {
    fn connect(&mut self, owner: Owner, to: SocketAddr) -> Result<Socket, Errno> {
        if self.sockets.len() - self.free.len() >= self.limit {
            return Err(Errno::MFILE);
        }
        let error = (to.port() == REFUSES).then_some(Errno::CONNREFUSED);
        if to.port() != SILENT {
            let what =
                Readiness { writable: true, failed: error.is_some(), ..Readiness::default() };
            report(&self.events, owner, what);
        }
        let queue = VecDeque::new();
        let (ended, wants_room, is_asked) = (false, false, to.port() == PROXY);
        let entry = Some(ScriptedSocket { owner, queue, ended, wants_room, is_asked, error });
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.sockets.push(None);
                u32::try_from(self.sockets.len() - 1).map_err(|_| Errno::NFILE)?
            }
        };
        if let Some(free) = usize::try_from(index).ok().and_then(|i| self.sockets.get_mut(i)) {
            *free = entry;
        }
        Ok(Socket(index))
    }

    fn adopt(&mut self, _owner: Owner, _file: OwnedFd) -> Result<Socket, Errno> {
        Err(Errno::ACCESS)
    }

    fn peek_limit(&self) -> u32 {
        u32::MAX
    }

    fn peek(
        &mut self,
        socket: &Socket,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Errno> {
        let entry = self.entry(socket)?;
        let mut bytes = entry.queue.iter().skip(offset).copied();
        let mut read = 0;
        for byte in into.iter_mut().flat_map(|slice| slice.iter_mut()) {
            let Some(next) = bytes.next() else { break };
            *byte = next;
            read += 1;
        }
        if read == 0 && !entry.ended { Err(Errno::AGAIN) } else { Ok(read) }
    }

    fn discard(&mut self, socket: &Socket, len: usize) -> Result<usize, Errno> {
        let entry = self.entry(socket)?;
        let len = len.min(entry.queue.len());
        entry.queue.drain(..len);
        if len > 0 && core::mem::take(&mut entry.wants_room) {
            let owner = entry.owner;
            let what = Readiness { writable: true, ..Readiness::default() };
            report(&self.events, owner, what);
        }
        Ok(len)
    }

    fn urgent_mark(&mut self, _socket: &Socket) -> UrgentMark {
        UrgentMark::None
    }

    fn send(
        &mut self,
        socket: &Socket,
        pieces: &[Piece<'_>],
        _urgent: bool,
    ) -> Result<usize, Errno> {
        let entry = self.entry(socket)?;
        let mut room = QUEUE - entry.queue.len();
        let before = room;
        for piece in pieces {
            let (mut at, start) = (0, piece.start);
            let end = start + piece.len;
            for part in piece.frame.pieces() {
                let from = start.saturating_sub(at).min(part.len());
                let to = end.saturating_sub(at).min(part.len()).min(from + room);
                if from < to {
                    part.for_each_piece_of(from..to, |bytes| entry.queue.extend(bytes));
                    room -= to - from;
                }
                at += part.len();
            }
        }
        let owner = entry.owner;
        if before == room && pieces.iter().any(|piece| piece.len > 0) {
            return Err(Errno::AGAIN);
        }
        report(&self.events, owner, READABLE);
        Ok(before - room)
    }

    fn send_bytes(&mut self, socket: &Socket, bytes: &[u8]) -> Result<usize, Errno> {
        let entry = self.entry(socket)?;
        let count = bytes.len().min(QUEUE - entry.queue.len());
        if count == 0 {
            return Err(Errno::AGAIN);
        }
        if core::mem::take(&mut entry.is_asked) {
            entry.queue.extend(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n");
        }
        entry.queue.extend(&bytes[..count]);
        let owner = entry.owner;
        report(&self.events, owner, READABLE);
        Ok(count)
    }

    fn send_room(&mut self, socket: &Socket) -> SendRoom {
        let used = self.entry(socket).map_or(QUEUE, |entry| entry.queue.len());
        SendRoom { used: bounded(used, u32::MAX), limit: bounded(QUEUE, u32::MAX) }
    }

    fn unacknowledged(&mut self, socket: &Socket) -> u32 {
        self.entry(socket).map_or(0, |entry| bounded(entry.queue.len(), u32::MAX))
    }

    fn set_class(&mut self, _socket: &Socket, _class: u8) {}

    fn await_room(&mut self, socket: &Socket) {
        if let Ok(entry) = self.entry(socket) {
            entry.wants_room = true;
        }
    }

    fn shut_down(&mut self, socket: &Socket) {
        if let Ok(entry) = self.entry(socket) {
            entry.ended = true;
            let (owner, what) = (entry.owner, Readiness { read_closed: true, ..READABLE });
            report(&self.events, owner, what);
        }
    }

    fn error(&mut self, socket: &Socket) -> Option<Errno> {
        self.entry(socket).ok()?.error.take()
    }

    fn close(&mut self, socket: Socket, _how: Close) {
        let entry = usize::try_from(socket.0).ok().and_then(|i| self.sockets.get_mut(i));
        if entry.and_then(Option::take).is_some() {
            self.free.push(socket.0);
        }
    }
}

impl DatagramHost for ScriptedHost {
    fn open_udp(
        &mut self,
        owner: Owner,
        _from: u16,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        match to.port() {
            REFUSES => Err(Errno::NETUNREACH),
            port => {
                let mut echo = Echo::new(owner, port == SILENT, &self.events);
                echo.path_mtu = (port == NARROW).then_some(1300);
                echo.at = self.source();
                Ok(Box::new(echo))
            }
        }
    }

    fn open_echo(
        &mut self,
        owner: Owner,
        _id: u16,
        _to: IpAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        let mut echo = Echo::new(owner, false, &self.events);
        echo.at = self.source();
        Ok(Box::new(echo))
    }

    fn open_question(
        &mut self,
        owner: Owner,
        _from: u16,
        _group: &Group,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        Ok(Box::new(Echo::new(owner, true, &self.events)))
    }

    fn share_udp(&mut self, _owner: Owner, _socket: &mut dyn DatagramSocket) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn routes_freely(&self, to: IpAddr) -> bool {
        !to.is_loopback() && !self.own.contains(&to)
    }

    fn connect_udp(
        &mut self,
        _owner: Owner,
        _socket: OwnedFd,
        _to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        Err(Errno::ACCESS)
    }

    fn adopt_udp(
        &mut self,
        _owner: Owner,
        _socket: OwnedFd,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        Err(Errno::ACCESS)
    }
}

/// Socket that returns the datagrams it sends.
struct Echo {
    owner: Owner,
    silent: bool,
    held: VecDeque<Vec<u8>>,
    events: Events,
    path_mtu: Option<u32>,
    at: Option<IpAddr>,
}

impl Echo {
    fn new(owner: Owner, silent: bool, events: &Events) -> Echo {
        let (held, events) = (VecDeque::new(), Arc::clone(events));
        Echo { owner, silent, held, events, path_mtu: None, at: None }
    }
}

impl DatagramSocket for Echo {
    fn send(&mut self, bytes: &[u8], segment: Option<u16>, _via: Option<Via>) -> Result<(), Errno> {
        let each = segment.map_or(bytes.len(), usize::from).max(1);
        let room = DATAGRAMS - self.held.len();
        if !self.silent {
            self.held.extend(bytes.chunks(each).take(room).map(<[u8]>::to_vec));
            report(&self.events, self.owner, READABLE);
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Result<bool, Errno> {
        if self.held.is_empty() {
            return Err(Errno::AGAIN);
        }
        buffer.prepare(1);
        if let Some(bytes) = self.held.pop_front() {
            let len = bytes.len().min(ROOM);
            buffer.bytes[..len].copy_from_slice(&bytes[..len]);
            buffer.datagrams.push(Datagram {
                bytes: 0..len,
                segment: None,
                from: None,
                to: None,
                class: 0,
                hops: None,
            });
        }
        Ok(self.held.is_empty())
    }

    fn error(&mut self, _bytes: &mut [u8]) -> Option<Failure> {
        None
    }

    fn set_marks(&mut self, _marks: Marks) {}

    fn path_mtu(&self) -> Option<u32> {
        self.path_mtu
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.at.map(|ip| SocketAddr::new(ip, 9))
    }
}

impl ListenHost for ScriptedHost {
    fn listen(&mut self, _owner: Owner, _socket: OwnedFd) -> Result<Box<dyn Listener>, Errno> {
        Err(Errno::ACCESS)
    }
}

impl RelayHost for ScriptedHost {
    fn connect_inner(
        &mut self,
        _owner: Owner,
        _inner: &OwnedFd,
        _to: SocketAddr,
    ) -> Result<(), Errno> {
        Err(Errno::ACCESS)
    }

    fn open_inner(&mut self, _is_v4: bool) -> Result<OwnedFd, Errno> {
        Err(Errno::ACCESS)
    }

    fn reset(&mut self, _client: OwnedFd) {}

    fn connected(&mut self, _inner: &OwnedFd, _events: Readiness) -> Result<bool, Errno> {
        Err(Errno::ACCESS)
    }

    fn join(
        &mut self,
        _owner: Owner,
        client: OwnedFd,
        _inner: OwnedFd,
    ) -> Result<Box<dyn Relay>, (OwnedFd, Errno)> {
        Err((client, Errno::ACCESS))
    }

    fn recycle(&mut self, _relay: Box<dyn Relay>) {}
}

impl Host for ScriptedHost {
    /// Appends the events without a wait.
    fn poll(&mut self, ready: &mut Vec<Ready>, _: Option<Duration>) -> Result<(), Errno> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let count = events.len().min(128);
        ready.extend(events.drain(..count));
        Ok(())
    }

    fn watch_runner(
        &mut self,
        _: RunnerFile,
        _: BorrowedFd<'_>,
        _: EventFlags,
    ) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.contains(&ip) || sources.contains(&ip)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}
