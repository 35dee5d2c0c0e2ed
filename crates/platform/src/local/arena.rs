//! Arenas: the memory one domain sets aside for lending to one peer.
//!
//! An arena set is four memfds: pages the peer may write, pages it may only read, the grant table
//! (read-only to the peer) and the status words (written by the peer). Whoever holds the set can
//! reach exactly this memory and no other; pages never move from one peer's arena to another's.
//!
//! Seals are `F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL`, exactly: shrinking would turn the peer's
//! accesses into SIGBUS, and without `F_SEAL_SEAL` the peer could add `F_SEAL_FUTURE_WRITE` and
//! keep the granter from punching holes. The receiver checks seals, size, file system and access
//! mode of every file before it maps anything.
//!
//! Memory is charged to the control group of whoever touches a page first: the granter for what it
//! fills, the grantee for what it writes into fresh pages, at most the arena's size.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_memory::{Mapping, PAGE_SIZE, Protection};
use ringfence_sys::descriptors::Descriptors;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use super::table::{ENTRY_BYTES, LentTable, STATUS_BYTES};
use crate::PlatformError;

/// `statfs` type of tmpfs, where memfds live; hugetlb memfds live elsewhere.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The seals every file of an arena carries.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A seal that the system may add by policy (`vm.memfd_noexec`) and that hurts nobody.
const SEAL_EXEC: u32 = 0x20;

/// Sizes of an arena set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaShape {
    /// Pages the peer may write.
    pub writable: u32,
    /// Pages the peer may only read.
    pub read_only: u32,
    /// Grant references, the eight reserved ones included.
    pub references: u32,
}

impl ArenaShape {
    /// Most pages of one kind in an arena: 64 MiB.
    pub const PAGES_MAX: u32 = 16384;

    /// As many references as pages.
    pub fn of(writable: u32, read_only: u32) -> ArenaShape {
        ArenaShape {
            writable,
            read_only,
            references: writable.saturating_add(read_only).saturating_add(8),
        }
    }

    /// Whether every number is within what this side is ready to map.
    pub fn check(self) -> Result<(), ArenaFault> {
        let bound = |what, found: u32, limit| {
            if found > limit { Err(ArenaFault::TooLarge { what, found, limit }) } else { Ok(()) }
        };
        bound("writable pages", self.writable, Self::PAGES_MAX)?;
        bound("read-only pages", self.read_only, Self::PAGES_MAX)?;
        bound("grant references", self.references, 2 * Self::PAGES_MAX + 8)?;
        if self.references <= 8 || self.writable + self.read_only == 0 {
            return Err(ArenaFault::Empty);
        }
        Ok(())
    }

    fn bytes(self) -> [usize; 4] {
        let round = |bytes: usize| bytes.next_multiple_of(PAGE_SIZE);
        let references = self.references as usize;
        // A file of no bytes cannot be mapped: the unused kind keeps one page that no entry names.
        [
            round(self.writable.max(1) as usize * PAGE_SIZE),
            round(self.read_only.max(1) as usize * PAGE_SIZE),
            round(references * ENTRY_BYTES),
            round(references * STATUS_BYTES),
        ]
    }

    /// Bytes of all four files.
    pub fn total_bytes(self) -> usize {
        self.bytes().iter().sum()
    }
}

/// A rule that an arena breaks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum ArenaFault {
    /// More than this side is ready to map.
    #[error("{found} {what}, at most {limit} are allowed")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How many.
        found: u32,
        /// The limit.
        limit: u32,
    },
    /// Not four files.
    #[error("{found} files in place of 4")]
    Files {
        /// How many there are.
        found: usize,
    },
    /// Nothing in it.
    #[error("it has no page or no reference")]
    Empty,
    /// Not exactly the seals that keep both sides safe.
    #[error("{file} has seals {found:#x}, not exactly {wanted:#x}", wanted = SEALS.bits())]
    Seals {
        /// Which file.
        file: &'static str,
        /// `F_GET_SEALS`.
        found: u32,
    },
    /// Not sealable: no memfd.
    #[error("{file} is no memfd")]
    NoMemfd {
        /// Which file.
        file: &'static str,
    },
    /// Not on tmpfs (a hugetlb memfd, say).
    #[error("{file} lies on a file system of type {found:#x}, not tmpfs")]
    FileSystem {
        /// Which file.
        file: &'static str,
        /// `f_type`.
        found: u64,
    },
    /// Not the announced size.
    #[error("{file} has {found} bytes, {announced} were announced")]
    Size {
        /// Which file.
        file: &'static str,
        /// `st_size`.
        found: u64,
        /// Announced.
        announced: u64,
    },
    /// Not open in the mode that goes with its role.
    #[error("{file} is not open for what it is for")]
    Mode {
        /// Which file.
        file: &'static str,
    },
    /// The system refused to map or inspect it (errno).
    #[error("the system refused it (errno {0})")]
    System(i32),
}

impl ArenaFault {
    /// A short constant name, for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            ArenaFault::TooLarge { .. } => "arena_too_large",
            ArenaFault::Files { .. } => "arena_files",
            ArenaFault::Empty => "arena_empty",
            ArenaFault::Seals { .. } => "arena_seals",
            ArenaFault::NoMemfd { .. } => "arena_no_memfd",
            ArenaFault::FileSystem { .. } => "arena_file_system",
            ArenaFault::Size { .. } => "arena_size",
            ArenaFault::Mode { .. } => "arena_mode",
            ArenaFault::System(_) => "arena_system",
        }
    }
}

/// The four files, as one side holds them.
#[derive(Debug)]
pub struct ArenaFiles {
    /// Pages the peer may write.
    pub writable: OwnedFd,
    /// Pages the peer may only read.
    pub read_only: OwnedFd,
    /// Grant table.
    pub table: OwnedFd,
    /// Status words.
    pub status: OwnedFd,
}

const ROLES: [&str; 4] =
    ["the writable arena", "the read-only arena", "the grant table", "the status words"];

impl ArenaFiles {
    /// Number of files.
    pub const COUNT: usize = 4;

    pub(crate) fn from_vec(fds: Vec<OwnedFd>) -> Option<ArenaFiles> {
        let [writable, read_only, table, status] = <[OwnedFd; 4]>::try_from(fds).ok()?;
        Some(ArenaFiles { writable, read_only, table, status })
    }

    /// The files that a peer sent for an arena of this shape. They are checked before any other use, and
    /// disposed of if one breaks a rule.
    ///
    /// # Errors
    ///
    /// The first [`ArenaFault`] found.
    pub(crate) fn receive(fds: Descriptors, shape: ArenaShape) -> Result<ArenaFiles, ArenaFault> {
        shape.check()?;
        let found = fds.len();
        if found != ArenaFiles::COUNT {
            return Err(ArenaFault::Files { found });
        }
        verify_files(fds.each(), shape)?;
        ArenaFiles::from_vec(fds.into_vec()).ok_or(ArenaFault::Files { found })
    }

    pub(crate) fn into_vec(self) -> Vec<OwnedFd> {
        vec![self.writable, self.read_only, self.table, self.status]
    }

    pub(crate) fn each(&self) -> [BorrowedFd<'_>; 4] {
        [self.writable.as_fd(), self.read_only.as_fd(), self.table.as_fd(), self.status.as_fd()]
    }

    /// Checks every rule that a grantee relies on.
    ///
    /// # Errors
    ///
    /// The first [`ArenaFault`] found.
    pub fn verify(&self, shape: ArenaShape) -> Result<(), ArenaFault> {
        shape.check()?;
        verify_files(self.each(), shape)
    }
}

fn verify_files<'a>(
    files: impl IntoIterator<Item = BorrowedFd<'a>>,
    shape: ArenaShape,
) -> Result<(), ArenaFault> {
    let write = [true, false, false, true];
    for (((fd, file), bytes), write) in files.into_iter().zip(ROLES).zip(shape.bytes()).zip(write) {
        verify_file(fd, file, bytes as u64, write)?;
    }
    Ok(())
}

// #syscall driver,frontend,daemon fcntl 1=F_GET_SEALS: an arena's exact seals
// #syscall driver,frontend,daemon fcntl 1=F_GETFL: whether an arena is open for writing
// #syscall driver,frontend,daemon fstat: an arena's exact size
// #syscall driver,frontend,daemon fstatfs: that an arena is on tmpfs
//
// The seals come first: that call asks no file system, and only a file of tmpfs or hugetlbfs has any.
fn verify_file(
    fd: impl AsFd + Copy,
    file: &'static str,
    announced: u64,
    write: bool,
) -> Result<(), ArenaFault> {
    let system = |e: rustix::io::Errno| ArenaFault::System(e.raw_os_error());
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| ArenaFault::NoMemfd { file })?;
    if seals.bits() & !SEAL_EXEC != SEALS.bits() {
        return Err(ArenaFault::Seals { file, found: seals.bits() });
    }
    let found = u64::try_from(rustix::fs::fstatfs(fd).map_err(system)?.f_type).unwrap_or(u64::MAX);
    if found != TMPFS_MAGIC {
        return Err(ArenaFault::FileSystem { file, found });
    }
    let found = u64::try_from(rustix::fs::fstat(fd).map_err(system)?.st_size).unwrap_or(0);
    if found != announced {
        return Err(ArenaFault::Size { file, found, announced });
    }
    let mode = rustix::fs::fcntl_getfl(fd).map_err(system)? & OFlags::RWMODE;
    let fits = if write { mode == OFlags::RDWR } else { mode != OFlags::WRONLY };
    if fits { Ok(()) } else { Err(ArenaFault::Mode { file }) }
}

/// A fresh arena set: the granter's files and those to hand to the peer.
pub(crate) struct NewArena {
    pub(crate) own: ArenaFiles,
    pub(crate) handed_over: ArenaFiles,
}

/// Makes an arena set. Needs `/proc/self/fd` to re-open two files read-only, so it is done before
/// the sandbox closes.
pub(crate) fn create(shape: ArenaShape) -> Result<NewArena, PlatformError> {
    let names = ["ringfence-rw", "ringfence-ro", "ringfence-table", "ringfence-status"];
    let mut own = Vec::new();
    let mut handed_over = Vec::new();
    for ((name, bytes), writable) in
        names.into_iter().zip(shape.bytes()).zip([true, false, false, true])
    {
        let fd = sealed_memfd(name, bytes as u64)
            .map_err(|e| PlatformError::system("making an arena", e))?;
        handed_over.push(hand_over(&fd, writable)?);
        own.push(fd);
    }
    let both = ArenaFiles::from_vec(own).zip(ArenaFiles::from_vec(handed_over));
    let (own, handed_over) = both.ok_or(PlatformError::Disconnected("arena"))?;
    Ok(NewArena { own, handed_over })
}

fn sealed_memfd(name: &str, bytes: u64) -> rustix::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    // Nobody asks when an arena was read; without this the kernel looks at the clock for each copy.
    rustix::fs::fcntl_setfl(&fd, OFlags::NOATIME)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

fn hand_over(fd: &OwnedFd, writable: bool) -> Result<OwnedFd, PlatformError> {
    if writable {
        return fd.try_clone().map_err(|e| PlatformError::system("duplicating an arena", e));
    }
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOATIME, Mode::empty())
        .map_err(|e| PlatformError::system("re-opening an arena read-only through /proc", e))
}

/// A mapped table.
pub(crate) fn map_table(
    files: &ArenaFiles,
    shape: ArenaShape,
    granter: bool,
) -> Result<LentTable, ArenaFault> {
    let [_, _, table, status] = shape.bytes();
    let protection = if granter { Protection::ReadWrite } else { Protection::ReadOnly };
    let map = |fd: &OwnedFd, bytes, protection| {
        Mapping::new(fd, 0, bytes, protection)
            .map_err(|e| ArenaFault::System(e.raw_os_error().unwrap_or(0)))
    };
    let entries = map(&files.table, table, protection)?.lent();
    let status = map(&files.status, status, Protection::ReadWrite)?.lent();
    LentTable::new(entries, status, shape.references).map_err(|_| ArenaFault::Empty)
}
