//! Connection to a server: socket, TLS, handshake and framing of requests.

// #syscall daemon socket 0=AF_UNIX: a disk's server
// #syscall daemon socket 0=AF_INET: a disk's server, and finding it by its name
// #syscall daemon socket 0=AF_INET6: a disk's server, and finding it by its name
// #syscall daemon connect,getpeername: a disk's server
// #syscall daemon sendmmsg,getsockname,uname: finding a server by its name (the C library)
// #syscall daemon ioctl 1=0x541b: FIONREAD: finding a server by its name (the C library)
// #syscall daemon setsockopt 1=IPPROTO_TCP 2=TCP_NODELAY: requests are not held back
// #syscall daemon setsockopt 1=SOL_SOCKET 2=SO_KEEPALIVE: noticing that a server is gone

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ringfence_block::storage::folders::{FolderError, Folders};
use ringfence_memory::{LentSlice, ReadList, WriteList};
use ringfence_sys::descriptors::refuse_descriptors;
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::address::NbdAddress;
use super::dial::Dialer;
use super::host::Host;
use super::tls::{Tls, TlsClient};
use crate::protocol::ProtocolError;
use crate::protocol::agree::{ClientHandshake, ClientProgress, Negotiated};
use crate::protocol::numbers::{REQUEST, command};
use crate::protocol::replies::{Expect, Replies, ReplyContent};

/// Maximum number of bytes per read.
const INPUT: usize = 128 << 10;

/// Maximum number of unparsed handshake bytes: more than any message has.
const HANDSHAKE_MAX: usize = 64 << 10;

/// Maximum number of bytes encrypted at once.
const ENCRYPTED_MAX: usize = 64 << 10;

#[derive(Clone)]
pub(super) enum Endpoint {
    Tcp(Host),
    Unix(PathBuf),
    /// Socket below an allowed folder.
    UnixBelow(PathBuf, Folders),
    /// Connections from another process.
    Handed(Arc<Dialer>),
}

impl Endpoint {
    /// Returns the endpoint of an address. With `folders`, a Unix socket must lie below one of them at each
    /// connection.
    pub(super) fn of(address: &NbdAddress, folders: Option<&Folders>) -> Endpoint {
        match (address, folders) {
            (NbdAddress::Unix { path, .. }, Some(folders)) => {
                Endpoint::UnixBelow(path.clone(), folders.clone())
            }
            (NbdAddress::Unix { path, .. }, None) => Endpoint::Unix(path.clone()),
            (NbdAddress::Tcp { host, port, .. }, _) => Endpoint::Tcp(Host::new(host, *port)),
        }
    }

    /// Starts to connect to a Unix socket. Returns `true` with the socket if the connection is not established yet.
    /// Other endpoints block, and are `Unsupported` here.
    fn begin(&self) -> io::Result<(OwnedFd, bool)> {
        match self {
            Endpoint::Handed(_) | Endpoint::Tcp(_) => Err(io::ErrorKind::Unsupported.into()),
            Endpoint::Unix(path) => begin_at(path),
            Endpoint::UnixBelow(path, folders) => begin_below(path, folders),
        }
    }

    /// Connects. Blocks until the connection is established, at most until `until` beside the look-up of a name.
    ///
    /// # Errors
    ///
    /// Returns the error of the socket, or `TimedOut`.
    pub(super) fn connect(&self, until: Instant) -> io::Result<OwnedFd> {
        if let Endpoint::Tcp(host) = self {
            return host.connect(until);
        }
        let (stream, connecting) = self.begin()?;
        if connecting {
            let mut writable = [PollFd::new(&stream, PollFlags::OUT)];
            if wait_any(&mut writable, Some(until))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            sockopt::socket_error(&stream)??;
        }
        Ok(stream)
    }
}

/// Server and export to connect to.
#[derive(Clone)]
pub(super) struct NbdTarget {
    pub(super) endpoint: Endpoint,
    pub(super) name: String,
    /// TLS settings; with them, an unencrypted connection is refused.
    pub(super) tls: Option<TlsClient>,
}

enum Phase {
    Handshake(Box<ClientHandshake>),
    Ready(Replies),
}

/// Request that is being sent.
struct Outgoing {
    header: [u8; 28],
    payload: Vec<LentSlice>,
    /// Number of bytes of header and payload that were sent.
    sent: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.header.len() + self.payload.iter().map(LentSlice::len).sum::<usize>()
    }
}

/// Fields of a request to send.
pub(super) struct OutgoingRequest {
    pub(super) cookie: u64,
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) payload: Vec<LentSlice>,
}

/// Connection to a server.
pub(super) struct NbdLink {
    stream: OwnedFd,
    /// TLS session, once established.
    tls: Option<Tls>,
    /// TLS settings to use as soon as the server agrees.
    encrypt: Option<TlsClient>,
    phase: Phase,
    /// Received handshake bytes that are not parsed.
    held: Vec<u8>,
    /// Handshake bytes to send.
    handshake_out: Vec<u8>,
    out: VecDeque<Outgoing>,
    input: Box<[u8]>,
    /// Set until the connection is established.
    connecting: bool,
}

impl NbdLink {
    /// Starts a connection to a server at a Unix socket.
    pub(super) fn connect(target: &NbdTarget) -> io::Result<NbdLink> {
        let (stream, connecting) = target.endpoint.begin()?;
        NbdLink::over(stream, connecting, target)
    }

    /// Starts the handshake on a socket that is connected or connecting.
    pub(super) fn over(
        stream: OwnedFd,
        connecting: bool,
        target: &NbdTarget,
    ) -> io::Result<NbdLink> {
        let handshake = ClientHandshake::new(&target.name, target.tls.is_some())?;
        let mut link = NbdLink::in_phase(stream, Phase::Handshake(Box::new(handshake)));
        (link.connecting, link.encrypt) = (connecting, target.tls.clone());
        Ok(link)
    }

    /// Continues an unencrypted connection after a handshake by another process.
    pub(super) fn settled(stream: OwnedFd, settled: &Negotiated) -> NbdLink {
        NbdLink::in_phase(stream, Phase::Ready(Replies::new(settled.structured)))
    }

    fn in_phase(stream: OwnedFd, phase: Phase) -> NbdLink {
        // Fails on TCP sockets, which carry no descriptors.
        let _ = refuse_descriptors(&stream);
        NbdLink {
            stream,
            tls: None,
            encrypt: None,
            phase,
            held: vec![],
            handshake_out: vec![],
            out: VecDeque::new(),
            input: vec![0; INPUT].into(),
            connecting: false,
        }
    }

    /// Returns the socket if no state beside it is needed to continue the connection.
    pub(super) fn into_stream(self) -> Option<OwnedFd> {
        let idle = self.out.is_empty() && self.handshake_out.is_empty() && self.open() == 0;
        (idle && self.tls.is_none()).then_some(self.stream)
    }

    pub(super) fn stream(&self) -> &OwnedFd {
        &self.stream
    }

    /// Returns `true` if the socket must be polled for writing.
    pub(super) fn wants_to_write(&self) -> bool {
        let encrypted = self.tls.as_ref().is_some_and(Tls::wants_to_write);
        self.connecting || encrypted || !self.handshake_out.is_empty() || !self.out.is_empty()
    }

    /// Returns the number of requests without a complete reply.
    pub(super) fn open(&self) -> usize {
        match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Ready(replies) => replies.open(),
        }
    }

    /// Queues a request for sending.
    pub(super) fn send(&mut self, sending: OutgoingRequest) {
        let OutgoingRequest { cookie, kind, flags, offset, len, payload } = sending;
        let mut header = [0; 28];
        header[..4].copy_from_slice(&REQUEST.to_be_bytes());
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&kind.to_be_bytes());
        header[8..16].copy_from_slice(&cookie.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..].copy_from_slice(&len.to_be_bytes());
        if let Phase::Ready(replies) = &mut self.phase
            && kind != command::DISCONNECT
        {
            let expect = match kind {
                command::READ => Expect::Data { offset, len },
                command::BLOCK_STATUS => Expect::Extents(len),
                _ => Expect::Done,
            };
            replies.expect(cookie, expect);
        }
        self.out.push_back(Outgoing { header, payload, sent: 0 });
    }

    /// Sends and receives without blocking. Returns the result of the handshake when it completes.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection cannot be used any more.
    pub(super) fn drive(
        &mut self,
        each: impl FnMut(ReplyContent<'_>),
    ) -> io::Result<Option<Negotiated>> {
        self.exchange(each).map_err(|error| match (&self.phase, &self.tls) {
            (Phase::Handshake(_), Some(tls)) => tls.explain(error),
            _ => error,
        })
    }

    fn exchange(
        &mut self,
        mut each: impl FnMut(ReplyContent<'_>),
    ) -> io::Result<Option<Negotiated>> {
        if self.connecting {
            sockopt::socket_error(&self.stream)??;
            if rustix::net::getpeername(&self.stream).is_err() {
                return Ok(None);
            }
            self.connecting = false;
        }
        let mut settled = None;
        loop {
            self.write()?;
            let read = match self.read() {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(settled),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            match &mut self.phase {
                Phase::Ready(replies) => replies.feed(&self.input[..read], &mut each)?,
                Phase::Handshake(_) => {
                    self.held.extend_from_slice(&self.input[..read]);
                    settled = settled.or(self.continue_handshake(&mut each)?);
                }
            }
            // Without TLS records, a short read means that the socket is empty.
            if read < INPUT && self.tls.is_none() && !self.wants_to_write() {
                return Ok(settled);
            }
        }
    }

    fn read(&mut self) -> io::Result<usize> {
        if let Some(tls) = &mut self.tls {
            return tls.read(&self.stream, &mut self.input);
        }
        let mut list = ReadList::new();
        list.push(&mut self.input).map_err(io::Error::other)?;
        list.read(&self.stream)
    }

    /// Starts TLS after the server agreed.
    fn start_tls(&mut self) -> io::Result<()> {
        if !self.held.is_empty() {
            return Err(ProtocolError::Injected { len: self.held.len() as u64 }.into());
        }
        let client = self.encrypt.take().ok_or(io::ErrorKind::InvalidData)?;
        self.tls = Some(client.start()?);
        if let Phase::Handshake(handshake) = &mut self.phase {
            handshake.encrypted(&mut self.handshake_out);
        }
        Ok(())
    }

    fn continue_handshake(
        &mut self,
        mut each: impl FnMut(ReplyContent<'_>),
    ) -> io::Result<Option<Negotiated>> {
        loop {
            let Phase::Handshake(handshake) = &mut self.phase else { return Ok(None) };
            let (used, progress) = handshake.feed(&self.held, &mut self.handshake_out)?;
            self.held.drain(..used);
            match progress {
                ClientProgress::Ready(settled) => {
                    let mut replies = Replies::new(settled.structured);
                    let early = std::mem::take(&mut self.held);
                    replies.feed(&early, &mut each)?;
                    self.phase = Phase::Ready(replies);
                    return Ok(Some(settled));
                }
                ClientProgress::StartTls => {
                    self.start_tls()?;
                    return Ok(None);
                }
                ClientProgress::More if used == 0 && self.held.len() > HANDSHAKE_MAX => {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                ClientProgress::More if used == 0 => return Ok(None),
                ClientProgress::More => {}
            }
        }
    }

    /// Sends queued bytes until the socket is full.
    pub(super) fn write(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            match tls.flush(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                other => other?,
            }
        }
        while !self.handshake_out.is_empty() || !self.out.is_empty() {
            let written = match &mut self.tls {
                None => outgoing_list(&self.handshake_out, &self.out)?.write(&self.stream),
                Some(tls) => {
                    let plain = outgoing_bytes(&self.handshake_out, &self.out)?;
                    tls.write(&self.stream, &plain)
                }
            };
            match written {
                Ok(written) => self.written(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn written(&mut self, written: usize) {
        let handshake_out = written.min(self.handshake_out.len());
        self.handshake_out.drain(..handshake_out);
        let mut written = written - handshake_out;
        while let Some(first) = self.out.front_mut() {
            let step = written.min(first.len() - first.sent);
            first.sent += step;
            written -= step;
            if first.sent < first.len() {
                return;
            }
            self.out.pop_front();
        }
    }

    /// Sends a disconnect request if nothing else is queued, and closes the connection.
    pub(super) fn disconnect(mut self) {
        if matches!(self.phase, Phase::Ready(_)) && self.out.is_empty() {
            let (kind, payload) = (command::DISCONNECT, vec![]);
            self.send(OutgoingRequest { cookie: 0, kind, flags: 0, offset: 0, len: 0, payload });
            let _ = self.write();
        }
    }
}

/// Returns the next bytes to send as a scatter-gather list.
fn outgoing_list<'a>(
    handshake_out: &'a [u8],
    out: &'a VecDeque<Outgoing>,
) -> io::Result<WriteList<'a>> {
    let mut list = WriteList::new();
    if !handshake_out.is_empty() {
        list.push(handshake_out).map_err(io::Error::other)?;
    }
    for outgoing in out {
        let header = outgoing.header.get(outgoing.sent..).unwrap_or(&[]);
        if list.push(header).is_err() {
            return Ok(list);
        }
        let mut skip = outgoing.sent.saturating_sub(outgoing.header.len());
        for piece in &outgoing.payload {
            let from = skip.min(piece.len());
            skip -= from;
            if list.push_lent(piece, from, piece.len() - from).is_err() {
                return Ok(list);
            }
        }
    }
    Ok(list)
}

/// Returns a copy of the next bytes to send: encryption reads them more than once.
fn outgoing_bytes(handshake_out: &[u8], out: &VecDeque<Outgoing>) -> io::Result<Vec<u8>> {
    let mut bytes = handshake_out.to_vec();
    for outgoing in out {
        bytes.extend(outgoing.header.get(outgoing.sent..).unwrap_or(&[]));
        let mut skip = outgoing.sent.saturating_sub(outgoing.header.len());
        for piece in &outgoing.payload {
            let from = skip.min(piece.len());
            skip -= from;
            let room = ENCRYPTED_MAX.saturating_sub(bytes.len()).min(piece.len() - from);
            let at = bytes.len();
            bytes.resize(at + room, 0);
            piece.copy_to(from, &mut bytes[at..]).map_err(io::Error::other)?;
            if bytes.len() >= ENCRYPTED_MAX {
                return Ok(bytes);
            }
        }
    }
    Ok(bytes)
}

/// Starts to connect to the socket at `path`, which must lie below an allowed folder. The socket is opened
/// once, so the socket that was checked is the one connected to.
fn begin_below(path: &Path, folders: &Folders) -> io::Result<(OwnedFd, bool)> {
    let (socket, real) = folders.open(path, OFlags::PATH).map_err(|error| match error {
        FolderError::System { source, .. } => source,
        elsewhere @ FolderError::Elsewhere { .. } => {
            io::Error::new(io::ErrorKind::PermissionDenied, elsewhere)
        }
    })?;
    begin_opened(&socket, &real)
}

/// Starts to connect to the socket at `path`, which may be longer than the address of a socket.
fn begin_at(path: &Path) -> io::Result<(OwnedFd, bool)> {
    match SocketAddrUnix::new(path) {
        Ok(address) => begin(AddressFamily::UNIX, &address),
        Err(rustix::io::Errno::NAMETOOLONG) => {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            begin_opened(&rustix::fs::open(path, flags, Mode::empty())?, path)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Starts to connect to a socket that was opened by its path.
fn begin_opened(socket: &OwnedFd, path: &Path) -> io::Result<(OwnedFd, bool)> {
    if FileType::from_raw_mode(rustix::fs::fstat(socket)?.st_mode) != FileType::Socket {
        let why = format!("{} is no socket", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let opened = format!("/proc/self/fd/{}", socket.as_raw_fd());
    begin(AddressFamily::UNIX, &SocketAddrUnix::new(opened)?)
}

/// Creates a socket and starts to connect. Returns `true` if the connection is not established yet.
pub(super) fn begin(
    family: AddressFamily,
    address: &impl rustix::net::addr::SocketAddrArg,
) -> io::Result<(OwnedFd, bool)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Before the server can send. Fails on TCP sockets, which carry no descriptors.
    let _ = refuse_descriptors(&stream);
    match rustix::net::connect(&stream, address) {
        Ok(()) => Ok((stream, false)),
        Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok((stream, true)),
        Err(error) => Err(error.into()),
    }
}
