//! Adversary domain: raw hub messages and a raw arena, for tests that break one rule at a time.
//!
//! [`RawDomain`] sends hub messages word by word; [`RawArena`] lets a test set every word of an arena. The
//! module follows the description of the protocol (`docs/local-platform.md`) and shares no code with the
//! implementation under test.

// #syscall none: a peer of tests, which breaks the rules

pub mod pin;
pub mod process;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_sys::descriptors::testing::send_raw;
use ringfence_sys::poll::wait_readable;
use ringfence_wire::grant::{DomId, RawGrantEntry, flags};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown};

use super::ArenaShape;
use ringfence_xenstore::{StoreClient, StoreError};

/// Kinds of request, with their arguments.
pub mod kind {
    /// Argument: the wanted number, or all ones.
    pub const HELLO: u32 = 1;
    /// No argument; returns a store connection.
    pub const STORE: u32 = 2;
    /// Arguments: peer, writable pages, read-only pages, references, window. Four files.
    pub const LEND: u32 = 3;
    /// Arguments: granter and window.
    pub const FETCH: u32 = 4;
    /// Argument: the domain that may bind.
    pub const ALLOC: u32 = 5;
    /// Arguments: domain and port.
    pub const BIND: u32 = 6;
    /// Argument: port to close.
    pub const CLOSE: u32 = 7;
}

/// Numbers of the hub's refusals.
pub mod refusal {
    pub const MALFORMED: u32 = 1;
    pub const DESCRIPTORS: u32 = 2;
    pub const QUOTA: u32 = 3;
    pub const NOT_FOUND: u32 = 4;
    pub const NOT_PERMITTED: u32 = 5;
    pub const IN_USE: u32 = 6;
}

/// Seals that every file of an arena must have.
pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Maximum time for a reply of the hub.
const WITHIN: Duration = Duration::from_secs(5);

/// Maximum number of descriptors sent or received with a message.
const FDS_MAX: usize = 64;

/// Failures of a request that a hostile domain sends to the hub by hand.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    /// Refusal of the hub, with its number.
    #[error("refusal {0}")]
    Refused(u32),
    #[error("the hub closed the connection")]
    Closed,
    /// No reply in time, or an invalid one.
    #[error("no answer")]
    Silence,
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RawError {
    /// Returns the number of the refusal.
    pub fn refused(&self) -> Option<u32> {
        match self {
            RawError::Refused(number) => Some(*number),
            _ => None,
        }
    }
}

/// Adversary domain that sends hub messages word by word.
#[derive(Debug)]
pub struct RawDomain {
    /// Connection to the hub.
    pub socket: OwnedFd,
    /// Number of the domain after HELLO.
    pub domid: DomId,
    seq: u32,
}

impl RawDomain {
    /// Creates a domain that has sent no message.
    pub fn silent(socket: OwnedFd) -> RawDomain {
        RawDomain { socket, domid: DomId(u16::MAX), seq: 0 }
    }

    /// Sends HELLO and waits for the reply.
    ///
    /// # Errors
    ///
    /// Returns [`RawError`] if HELLO fails.
    pub fn join(socket: OwnedFd) -> Result<RawDomain, RawError> {
        let mut domain = RawDomain::silent(socket);
        let (args, _) = domain.call(kind::HELLO, &[u32::MAX], &[])?;
        domain.domid = DomId(u16::try_from(args[0]).map_err(|_| RawError::Silence)?);
        Ok(domain)
    }

    /// Sends one request without waiting for the reply.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn ask(&mut self, kind: u32, args: &[u32], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.seq += 1;
        let mut words = [0u32; 8];
        (words[0], words[1]) = (kind, self.seq);
        words[2..2 + args.len()].copy_from_slice(args);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        send_raw(&self.socket, &bytes, fds)
    }

    /// Receives the next message of the hub: eight words and descriptors.
    ///
    /// # Errors
    ///
    /// Returns [`RawError::Closed`], [`RawError::Silence`] or the system's error.
    pub fn receive(&self) -> Result<([u32; 8], Vec<OwnedFd>), RawError> {
        if !wait_readable(&self.socket, Some(WITHIN))? {
            return Err(RawError::Silence);
        }
        let mut bytes = [0u8; 32];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut bytes)];
        let got = match rustix::net::recvmsg(&self.socket, &mut into, &mut control, flags) {
            Ok(got) => got,
            Err(rustix::io::Errno::CONNRESET) => return Err(RawError::Closed),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        if got.bytes == 0 {
            return Err(RawError::Closed);
        }
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let mut words = [0u32; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*chunk);
        }
        Ok((words, fds))
    }

    /// Sends one request and waits for its reply.
    ///
    /// # Errors
    ///
    /// Returns [`RawError`] for a refusal or a missing reply.
    pub fn call(
        &mut self,
        kind: u32,
        args: &[u32],
        fds: &[BorrowedFd<'_>],
    ) -> Result<([u32; 5], Vec<OwnedFd>), RawError> {
        self.ask(kind, args, fds)?;
        let (words, fds) = self.receive()?;
        let [answered, seq, status, rest @ ..] = words;
        if (answered, seq) != (kind | 0x8000_0000, self.seq) {
            return Err(RawError::Silence);
        }
        if status == 0 { Ok((rest, fds)) } else { Err(RawError::Refused(status)) }
    }

    fn one_fd(fds: Vec<OwnedFd>) -> Result<OwnedFd, RawError> {
        fds.into_iter().next().ok_or(RawError::Silence)
    }

    /// Opens a store connection as a socket.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`].
    pub fn store_socket(&mut self) -> Result<OwnedFd, RawError> {
        Self::one_fd(self.call(kind::STORE, &[], &[])?.1)
    }

    /// Opens a store connection with a correct client.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`] and of the client.
    pub fn store(&mut self) -> Result<StoreClient, RawError> {
        Ok(StoreClient::new(self.store_socket()?)?)
    }

    /// Allocates a channel that `peer` may bind.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`].
    pub fn alloc(&mut self, peer: DomId) -> Result<RawChannel, RawError> {
        let (args, fds) = self.call(kind::ALLOC, &[u32::from(peer.0)], &[])?;
        Ok(RawChannel { port: args[0], socket: Self::one_fd(fds)? })
    }

    /// Binds a channel that `peer` allocated.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`].
    pub fn bind(&mut self, peer: DomId, port: u32) -> Result<RawChannel, RawError> {
        let (args, fds) = self.call(kind::BIND, &[u32::from(peer.0), port], &[])?;
        Ok(RawChannel { port: args[0], socket: Self::one_fd(fds)? })
    }

    /// Hands an arena to the hub without any check.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`].
    pub fn lend(&mut self, peer: DomId, arena: &RawArena) -> Result<(), RawError> {
        self.lend_window(peer, arena, 0)
    }

    /// Hands an arena to the hub as a grant window of that name, without any check.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`].
    pub fn lend_window(
        &mut self,
        peer: DomId,
        arena: &RawArena,
        window: u32,
    ) -> Result<(), RawError> {
        let ArenaShape { writable, read_only, references } = arena.shape;
        let args = [u32::from(peer.0), writable, read_only, references, window];
        let fds = arena.handed_over.each_ref().map(AsFd::as_fd);
        self.call(kind::LEND, &args, &fds).map(|_| ())
    }

    /// Fetches the arena of `granter`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RawDomain::call`] and of mapping the files.
    pub fn fetch(&mut self, granter: DomId) -> Result<RawArena, RawError> {
        let (args, fds) = self.call(kind::FETCH, &[u32::from(granter.0)], &[])?;
        let [writable, read_only, references, ..] = args;
        let shape = ArenaShape { writable, read_only, references };
        let files = <[OwnedFd; 4]>::try_from(fds).map_err(|_| RawError::Silence)?;
        Ok(RawArena::from_files(shape, files)?)
    }
}

/// One end of an event channel.
#[derive(Debug)]
pub struct RawChannel {
    /// Number of the end in its domain.
    pub port: u32,
    /// Local socket of the channel.
    pub socket: OwnedFd,
}

impl RawChannel {
    /// Notifies once. Errors are ignored: the other end may have closed the socket.
    pub fn notify(&self) {
        let _ = send_raw(&self.socket, &[1], &[]);
    }

    /// Notifies until the socket is full. Returns the number of bytes sent.
    pub fn fill(&self) -> usize {
        let mut sent = 0;
        for bytes in [&[1u8; 4096][..], &[1]] {
            while send_raw(&self.socket, bytes, &[]).is_ok() {
                sent += bytes.len();
            }
        }
        sent
    }

    /// Shuts down one direction, or both.
    pub fn shut(&self, how: Shutdown) {
        let _ = rustix::net::shutdown(&self.socket, how);
    }

    /// Reads pending notifications. Returns `true` if there were any.
    pub fn take(&self) -> bool {
        let mut bytes = [0u8; 4096];
        rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT)
            .is_ok_and(|(_, n)| n > 0)
    }
}

/// Four files in the roles of an arena, mapped in this process.
#[derive(Debug)]
pub struct RawArena {
    /// Announced sizes of the arena.
    pub shape: ArenaShape,
    /// Files for the peer: writable pages, read-only pages, table, status words.
    pub handed_over: [OwnedFd; 4],
    own: Vec<OwnedFd>,
    views: [LentSlice; 4],
}

/// Creates a memfd with that size and those seals.
///
/// # Errors
///
/// Returns the system's error.
pub fn memfd(bytes: u64, seals: SealFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("raw", flags)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}

/// Opens the same file again in another mode.
///
/// # Errors
///
/// Returns the system's error.
pub fn reopened(fd: &OwnedFd, mode: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty())?)
}

/// Returns the sizes of the four files of an arena of that shape, in bytes.
pub fn file_bytes(shape: ArenaShape) -> [u64; 4] {
    let pages = |n: u64| n.max(1).next_multiple_of(PAGE_SIZE as u64);
    [
        pages(u64::from(shape.writable) * 4096),
        pages(u64::from(shape.read_only) * 4096),
        pages(u64::from(shape.references) * 8),
        pages(u64::from(shape.references) * 4),
    ]
}

fn whole(file: &OwnedFd, protection: Protection) -> io::Result<LentSlice> {
    let bytes = usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(io::Error::other)?;
    Ok(Mapping::new(file, 0, bytes, protection)?.lent())
}

impl RawArena {
    /// Creates an arena that breaks no rule and grants nothing.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn new(shape: ArenaShape) -> io::Result<RawArena> {
        let mut own = Vec::new();
        for bytes in file_bytes(shape) {
            own.push(memfd(bytes, SEALS)?);
        }
        let handed_over = [
            own[0].try_clone()?,
            reopened(&own[1], OFlags::RDONLY)?,
            reopened(&own[2], OFlags::RDONLY)?,
            own[3].try_clone()?,
        ];
        let view = |i: usize| whole(&own[i], Protection::ReadWrite);
        let views = [view(0)?, view(1)?, view(2)?, view(3)?];
        Ok(RawArena { shape, handed_over, own, views })
    }

    /// Creates the grantee's view: its descriptors limit the protection of the mappings.
    fn from_files(shape: ArenaShape, files: [OwnedFd; 4]) -> io::Result<RawArena> {
        let view = |i: usize, protection| whole(&files[i], protection);
        let (write, read) = (Protection::ReadWrite, Protection::ReadOnly);
        let views = [view(0, write)?, view(1, read)?, view(2, read)?, view(3, write)?];
        Ok(RawArena { shape, handed_over: files, own: Vec::new(), views })
    }

    /// Returns a page that the peer may write.
    ///
    /// # Errors
    ///
    /// Fails if there is no such page.
    pub fn writable(&self, page: u32) -> io::Result<LentSlice> {
        self.views[0].slice(page as usize * PAGE_SIZE, PAGE_SIZE).map_err(io::Error::other)
    }

    /// Returns a page that the peer may only read.
    ///
    /// # Errors
    ///
    /// Fails if there is no such page.
    pub fn read_only(&self, page: u32) -> io::Result<LentSlice> {
        self.views[1].slice(page as usize * PAGE_SIZE, PAGE_SIZE).map_err(io::Error::other)
    }

    /// Returns the table, for another thread.
    pub fn table(&self) -> LentSlice {
        self.views[2].clone()
    }

    /// Duplicates the arena, for another thread.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn duplicate(&self) -> io::Result<RawArena> {
        let [a, b, c, d] = self.handed_over.each_ref().map(OwnedFd::try_clone);
        let own = self.own.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let handed_over = [a?, b?, c?, d?];
        Ok(RawArena { shape: self.shape, handed_over, own, views: self.views.clone() })
    }

    /// Writes an entry of the table.
    pub fn set_entry(&self, gref: u32, entry: RawGrantEntry) {
        let stored = self.views[2].store_u64(gref as usize * 8, entry.0.to_le(), SeqCst);
        debug_assert!(stored.is_ok(), "a reference of the table");
    }

    /// Reads an entry of the table.
    pub fn entry(&self, gref: u32) -> RawGrantEntry {
        RawGrantEntry(u64::from_le(self.views[2].load_u64(gref as usize * 8, SeqCst).unwrap_or(0)))
    }

    /// Grants a page under a reference.
    pub fn grant(&self, gref: u32, to: DomId, frame: u32, read_only: bool) {
        let read_only = if read_only { flags::READ_ONLY } else { 0 };
        let bits = flags::PERMIT_ACCESS | read_only;
        self.set_entry(gref, RawGrantEntry::from_fields(bits, to.0, frame));
    }

    /// Writes a status word, which a correct granter never does.
    pub fn set_status(&self, gref: u32, uses: u32) {
        let stored = self.views[3].store_u32(gref as usize * 4, uses, SeqCst);
        debug_assert!(stored.is_ok(), "a reference of the table");
    }

    /// Reads a status word.
    pub fn status(&self, gref: u32) -> u32 {
        self.views[3].load_u32(gref as usize * 4, SeqCst).unwrap_or(0)
    }

    /// Attempts to take a page back as a granter does: clears its entry, and restores it if the
    /// grantee uses the page. Returns `true` if the page is the granter's again.
    pub fn take_back(&self, gref: u32) -> bool {
        let entry = self.entry(gref);
        self.set_entry(gref, RawGrantEntry::INVALID);
        let is_free = self.status(gref) == 0;
        if !is_free {
            self.set_entry(gref, entry);
        }
        is_free
    }

    /// Punches pages out of the writable or the read-only file.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn punch(&self, read_only: bool, first: u32, count: u32) -> io::Result<()> {
        let role = usize::from(read_only);
        let file = self.own.get(role).unwrap_or(&self.handed_over[role]);
        let (offset, bytes) = (u64::from(first) * 4096, u64::from(count) * 4096);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(file, flags, offset, bytes)?)
    }
}
