//! Arenas: memory that one domain sets aside for grants to one peer.
//!
//! An arena set is four memfds: pages that the peer may write, pages that it may only read, the grant
//! table (read-only to the peer) and the status words (written by the peer). The holder of a set can
//! access exactly this memory. Pages never move from one peer's arena to another's.
//!
//! The seals are exactly `F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL`. Without `F_SEAL_SHRINK` the peer
//! could shrink the file and cause SIGBUS. Without `F_SEAL_SEAL` it could add `F_SEAL_FUTURE_WRITE`, and
//! the granter could not punch holes. A hugetlb memfd accepts the same seals, but its pages come from a pool that others
//! can empty, and then a punched page raises SIGBUS. The receiver checks seals, size, file system and access mode of
//! every file before it maps anything.
//!
//! The kernel charges memory to the control group that touches a page first: the granter's for pages
//! that it fills, the grantee's for fresh pages that it writes. The arena's size bounds both.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_memory::{Mapping, PAGE_SIZE, Protection};
use ringfence_sys::descriptors::Descriptors;
use ringfence_wire::grant::DomId;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::error::PlatformError;
use crate::table::{ENTRY_BYTES, LentTable, STATUS_BYTES};

/// `statfs` type of tmpfs, the file system of memfds; hugetlb memfds have another type.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Seals of every file of an arena.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Seal that the system may add by policy (`vm.memfd_noexec`); harmless here.
const SEAL_EXEC: u32 = 0x20;

/// Sizes of an arena set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaShape {
    /// Number of pages that the peer may write.
    pub writable: u32,
    /// Number of pages that the peer may only read.
    pub read_only: u32,
    /// Number of grant references, including the eight reserved ones.
    pub references: u32,
}

impl ArenaShape {
    /// Maximum number of pages of one kind in an arena: 64 MiB.
    pub const PAGES_MAX: u32 = 16384;

    /// Returns a shape with one reference for each page, and the eight reserved ones.
    pub fn of(writable: u32, read_only: u32) -> ArenaShape {
        ArenaShape {
            writable,
            read_only,
            references: writable.saturating_add(read_only).saturating_add(8),
        }
    }

    /// Checks that every number is within the limits of this side.
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
        // An empty file cannot be mapped: an unused kind keeps one page that no entry names.
        [
            round(self.writable.max(1) as usize * PAGE_SIZE),
            round(self.read_only.max(1) as usize * PAGE_SIZE),
            round(references * ENTRY_BYTES),
            round(references * STATUS_BYTES),
        ]
    }

    /// Returns the size of all four files in bytes.
    pub fn total_bytes(self) -> usize {
        self.bytes().iter().sum()
    }
}

/// Rules that an arena can break.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum ArenaFault {
    /// Number over the limit of this side.
    #[error("{found} {what}, at most {limit} are allowed")]
    TooLarge {
        /// Counted things, in the plural.
        what: &'static str,
        found: u32,
        limit: u32,
    },
    /// Wrong number of files.
    #[error("{found} files in place of 4")]
    Files { found: usize },
    /// No page or no reference.
    #[error("it has no page or no reference")]
    Empty,
    /// Seals other than exactly those that keep both sides safe.
    #[error("{file} has seals {found:#x}, not exactly {wanted:#x}", wanted = SEALS.bits())]
    Seals {
        file: &'static str,
        /// Result of `F_GET_SEALS`.
        found: u32,
    },
    /// File that has no seals: no memfd.
    #[error("{file} is no memfd")]
    NoMemfd { file: &'static str },
    /// File outside tmpfs, for example a hugetlb memfd.
    #[error("{file} lies on a file system of type {found:#x}, not tmpfs")]
    FileSystem {
        file: &'static str,
        /// File system type, `f_type`.
        found: u64,
    },
    /// File of another size than announced.
    #[error("{file} has {found} bytes, {announced} were announced")]
    Size {
        file: &'static str,
        /// Size of the file in bytes.
        found: u64,
        /// Announced size in bytes.
        announced: u64,
    },
    /// File that is not open in the mode of its role.
    #[error("{file} is not open for what it is for")]
    Mode { file: &'static str },
    /// Error of the system on mapping or inspecting a file (errno).
    #[error("the system refused it (errno {0})")]
    System(i32),
}

impl ArenaFault {
    /// Returns a short constant name, for counters.
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

    /// Returns the error of an arena that `peer` lent, or is to be lent.
    pub(crate) fn of(self, peer: DomId) -> PlatformError {
        PlatformError::BadArena { peer, kind: self.kind(), source: self.into() }
    }
}

/// The four files of an arena set, as one side holds them.
#[derive(Debug)]
pub struct ArenaFiles {
    /// File of pages that the peer may write.
    pub writable: OwnedFd,
    /// File of pages that the peer may only read.
    pub read_only: OwnedFd,
    /// File of the grant table.
    pub table: OwnedFd,
    /// File of the status words.
    pub status: OwnedFd,
}

const ROLES: [&str; 4] =
    ["the writable arena", "the read-only arena", "the grant table", "the status words"];

impl ArenaFiles {
    /// Number of files in a set.
    pub const COUNT: usize = 4;

    pub(crate) fn from_vec(fds: Vec<OwnedFd>) -> Option<ArenaFiles> {
        let [writable, read_only, table, status] = <[OwnedFd; 4]>::try_from(fds).ok()?;
        Some(ArenaFiles { writable, read_only, table, status })
    }

    /// Accepts the files that a peer sent for an arena of this shape. Checks them before any other use;
    /// disposes of all of them if one breaks a rule.
    ///
    /// # Errors
    ///
    /// Returns the first [`ArenaFault`] found.
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
    /// Returns the first [`ArenaFault`] found.
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

// #syscall driver,frontend,card,daemon fcntl 1=F_GET_SEALS: an arena's exact seals
// #syscall driver,frontend,card,daemon fcntl 1=F_GETFL: whether an arena is open for writing
// #syscall driver,frontend,card,daemon fstat: an arena's exact size
// #syscall driver,frontend,card,daemon fstatfs: that an arena is on tmpfs
//
// The seals are checked first: that call enters no file system, and only files of tmpfs and
// hugetlbfs have seals.
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
    let found = rustix::fs::fstat(fd).map_err(system)?.st_size.max(0).cast_unsigned();
    if found != announced {
        return Err(ArenaFault::Size { file, found, announced });
    }
    let mode = rustix::fs::fcntl_getfl(fd).map_err(system)? & OFlags::RWMODE;
    let fits = if write { mode == OFlags::RDWR } else { mode != OFlags::WRONLY };
    if fits { Ok(()) } else { Err(ArenaFault::Mode { file }) }
}

/// New arena set: the granter's files, and the files for the peer.
pub(crate) struct NewArena {
    pub(crate) own: ArenaFiles,
    pub(crate) handed_over: ArenaFiles,
}

/// Creates an arena set. Re-opens two files read-only through `/proc/self/fd`, so it has to run before
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

/// Creates a file of an arena, with its seals.
pub(super) fn sealed_memfd(name: &str, bytes: u64) -> rustix::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    // Access times are unused; without this flag the kernel reads the clock for each copy.
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

/// Maps the grant table and the status words.
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
