//! One connection to a server.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;

use ringfence_memory::{LentSlice, ReadList, WriteList};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::address::NbdAddress;
use crate::nbd::agree::{ClientHandshake, Progress, Settled};
use crate::nbd::numbers::{REQUEST, command};
use crate::nbd::replies::{Answer, Expect, Replies};

/// Bytes read at once.
const INPUT: usize = 128 << 10;

/// Bytes of the handshake that wait to be understood: more than any message of it has.
const HANDSHAKE_MAX: usize = 64 << 10;

/// Where to connect to.
#[derive(Clone)]
pub(super) enum Place {
    Tcp(Vec<SocketAddr>),
    Unix(SocketAddrUnix),
}

/// A server and the disk that is wanted of it.
#[derive(Clone)]
pub(super) struct Target {
    place: Place,
    name: String,
}

impl Target {
    /// Finds out where a server is. Names are looked up once: looking up may block.
    pub(super) fn resolve(address: &NbdAddress) -> io::Result<Target> {
        let place = match address {
            NbdAddress::Tcp { host, port, .. } => {
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                if addresses.is_empty() {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
                }
                Place::Tcp(addresses)
            }
            NbdAddress::Unix { path, .. } => Place::Unix(SocketAddrUnix::new(path.as_path())?),
        };
        Ok(Target { place, name: address.name().to_owned() })
    }
}

enum Phase {
    Handshake(Box<ClientHandshake>),
    Ready(Replies),
}

/// A request on its way.
struct Outgoing {
    header: [u8; 28],
    payload: Vec<LentSlice>,
    /// Bytes of both that are gone.
    sent: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.header.len() + self.payload.iter().map(LentSlice::len).sum::<usize>()
    }
}

/// A request, as it is sent.
pub(super) struct Sending {
    pub(super) cookie: u64,
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) payload: Vec<LentSlice>,
}

/// One connection.
pub(super) struct Link {
    stream: OwnedFd,
    phase: Phase,
    /// What came in the handshake and is not whole.
    held: Vec<u8>,
    /// What is to be said in the handshake.
    text: Vec<u8>,
    out: VecDeque<Outgoing>,
    input: Box<[u8]>,
    /// The connection is not there yet.
    connecting: bool,
}

impl Link {
    /// Begins to connect.
    pub(super) fn connect(target: &Target) -> io::Result<Link> {
        let (stream, connecting) = match &target.place {
            Place::Unix(path) => begin(AddressFamily::UNIX, path)?,
            Place::Tcp(addresses) => {
                let mut last = io::Error::from(io::ErrorKind::NotFound);
                let mut begun = None;
                // One that is refused at once makes way for the next.
                for address in addresses {
                    let family = match address {
                        SocketAddr::V4(_) => AddressFamily::INET,
                        SocketAddr::V6(_) => AddressFamily::INET6,
                    };
                    match begin(family, address) {
                        Ok(stream) => {
                            begun = Some(stream);
                            break;
                        }
                        Err(error) => last = error,
                    }
                }
                let (stream, connecting) = begun.ok_or(last)?;
                sockopt::set_tcp_nodelay(&stream, true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                (stream, connecting)
            }
        };
        let handshake = ClientHandshake::new(&target.name, false)?;
        Ok(Link {
            stream,
            phase: Phase::Handshake(Box::new(handshake)),
            held: vec![],
            text: vec![],
            out: VecDeque::new(),
            input: vec![0; INPUT].into(),
            connecting,
        })
    }

    pub(super) fn stream(&self) -> &OwnedFd {
        &self.stream
    }

    /// Whether it should be told when the socket takes more.
    pub(super) fn wants_to_write(&self) -> bool {
        self.connecting || !self.text.is_empty() || !self.out.is_empty()
    }

    /// Requests that were sent and have no answer.
    pub(super) fn open(&self) -> usize {
        match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Ready(replies) => replies.open(),
        }
    }

    /// Queues a request.
    pub(super) fn send(&mut self, sending: Sending) {
        let Sending { cookie, kind, flags, offset, len, payload } = sending;
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
            let read = kind == command::READ;
            replies.expect(cookie, if read { Expect::Data { offset, len } } else { Expect::Done });
        }
        self.out.push_back(Outgoing { header, payload, sent: 0 });
    }

    /// Sends and receives what can be without waiting; `Some` when the handshake is over.
    ///
    /// # Errors
    ///
    /// When the connection is of no more use.
    pub(super) fn drive(
        &mut self,
        mut each: impl FnMut(Answer<'_>),
    ) -> io::Result<Option<Settled>> {
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
            let mut list = ReadList::new();
            list.push(&mut self.input).map_err(io::Error::other)?;
            let read = match list.read(&self.stream) {
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
                    settled = settled.or(self.shake_hands(&mut each)?);
                }
            }
            // A short read was all there is.
            if read < INPUT && !self.wants_to_write() {
                return Ok(settled);
            }
        }
    }

    fn shake_hands(&mut self, mut each: impl FnMut(Answer<'_>)) -> io::Result<Option<Settled>> {
        loop {
            let Phase::Handshake(handshake) = &mut self.phase else { return Ok(None) };
            let (used, progress) = handshake.feed(&self.held, &mut self.text)?;
            self.held.drain(..used);
            match progress {
                Progress::Ready(settled) => {
                    let mut replies = Replies::new(settled.structured);
                    let early = std::mem::take(&mut self.held);
                    replies.feed(&early, &mut each)?;
                    self.phase = Phase::Ready(replies);
                    return Ok(Some(settled));
                }
                Progress::StartTls => {
                    return Err(io::Error::new(io::ErrorKind::Unsupported, "no TLS here"));
                }
                Progress::More if used == 0 && self.held.len() > HANDSHAKE_MAX => {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                Progress::More if used == 0 => return Ok(None),
                Progress::More => {}
            }
        }
    }

    /// Sends what the socket takes.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while !self.text.is_empty() || !self.out.is_empty() {
            let mut list = WriteList::new();
            if !self.text.is_empty() {
                list.push(&self.text).map_err(io::Error::other)?;
            }
            'full: for outgoing in &self.out {
                let header = outgoing.header.get(outgoing.sent..).unwrap_or(&[]);
                if list.push(header).is_err() {
                    break;
                }
                let mut skip = outgoing.sent.saturating_sub(outgoing.header.len());
                for piece in &outgoing.payload {
                    let from = skip.min(piece.len());
                    skip -= from;
                    if list.push_lent(piece, from, piece.len() - from).is_err() {
                        break 'full;
                    }
                }
            }
            match list.write(&self.stream) {
                Ok(written) => self.written(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn written(&mut self, written: usize) {
        let text = written.min(self.text.len());
        self.text.drain(..text);
        let mut written = written - text;
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

    /// Says good-bye, if that can be said at once.
    pub(super) fn farewell(mut self) {
        if matches!(self.phase, Phase::Ready(_)) && self.out.is_empty() {
            let (kind, payload) = (command::DISCONNECT, vec![]);
            self.send(Sending { cookie: 0, kind, flags: 0, offset: 0, len: 0, payload });
            let _ = self.write();
        }
    }
}

/// A socket that begins to connect, and whether that goes on.
fn begin(
    family: AddressFamily,
    address: &impl rustix::net::addr::SocketAddrArg,
) -> io::Result<(OwnedFd, bool)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&stream, address) {
        Ok(()) => Ok((stream, false)),
        Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok((stream, true)),
        Err(error) => Err(error.into()),
    }
}
