//! Disk on a file or block device of the host.
//!
//! # Requests and system calls
//!
//! ```text
//! DiskQueue::submit ──> Job (job.rs) ── Step ──> io_uring (uring.rs)
//!                         ^                      or threads (pool.rs)
//!                         └────── result ────────┘
//! ```
//!
//! A job is the state machine of one request: it returns the next step and receives its result. It handles
//! partial transfers, bounce buffers and operations that the file system lacks. Two engines execute steps:
//! io_uring, which starts many with one system call, and a pool of threads that block, for kernels that refuse
//! io_uring. Both execute the same steps. A process in a sandbox makes its rings before the sandbox closes
//! ([`UringPool`]).
//!
//! # Bounce buffers
//!
//! With O_DIRECT the device reads the guest's page itself, and the guest may change it meanwhile. Most
//! storage writes either content, on the guest's own disk. Storage with checksums may write a block whose
//! checksum does not match; the block is unreadable then. In that case ([`Bounce::Auto`]) the data is
//! copied to private memory first. The same happens if the guest's memory lacks the alignment that
//! O_DIRECT requires.
//!
//! # Locking
//!
//! Opening takes an exclusive `flock` (shared for a read-only disk) and the byte locks of QEMU (`lock.rs`). The
//! locks belong to the open file, which I/O in flight holds. After a crash the next daemon gets the disk when
//! the last write of the old one has completed, so no old write can overtake a new one. Rings do not hold the
//! file: only their operations in flight do.

mod bounce;
mod error;
mod facts;
mod growth;
mod job;
mod lock;
mod options;
mod pool;
mod uring;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Once};

use ringfence_memory::{LentSlice, Mapping, Uring, UringPool};
use ringfence_sys::prerequisite::{IO_URING, with_doctor};

pub use error::{LockHolder, OpenFileError};
pub(in crate::storage) use facts::refuse_below_overlay;
pub use facts::{DirectRules, FileDescription, FileFacts, FileKind, OpenFile};
pub use growth::{check_growth, enlarge, grown, measure};
pub use lock::{give_up_writing, lock_backing};
pub use options::{Bounce, CacheMode, Engine, FileOptions, UnknownOption};

use super::{Discard, Disk, DiskQueue, Geometry, LiveDisk};
use job::Policy;
use pool::{FileExecutor, PoolQueue};

/// Number of zero bytes written at once if the file system cannot zero a range.
const ZEROS: usize = 256 << 10;

/// Disk on a file or block device.
pub struct FileDisk {
    file: Arc<OwnedFd>,
    facts: FileFacts,
    policy: Policy,
    engine: Engine,
    /// Rings of the process. Without a pool each queue makes a ring of its own.
    rings: Option<Arc<UringPool>>,
    /// Mark of the process that serves the disk, until the disk is closed.
    mark: Option<Arc<OwnedFd>>,
}

impl FileDisk {
    /// Opens and locks `path`.
    ///
    /// # Errors
    ///
    /// Returns [`OpenFileError`].
    pub fn open(path: &Path, options: &FileOptions) -> Result<FileDisk, OpenFileError> {
        let opened = OpenFile::open(path, options)?;
        FileDisk::new(opened, options).map_err(|source| OpenFileError::System {
            what: "reserving memory",
            path: path.to_owned(),
            source,
        })
    }

    /// Creates a disk on a file that was opened, possibly by another process.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no memory.
    pub fn new(opened: OpenFile, options: &FileOptions) -> io::Result<FileDisk> {
        let OpenFile { file, facts, mark } = opened;
        let mark = mark.map(Arc::new);
        let zeros: LentSlice = Mapping::private(ZEROS)?.lent();
        let policy = Policy::new(&facts, options, zeros);
        let (file, engine) = (Arc::new(file), options.engine);
        Ok(FileDisk { file, facts, policy, engine, rings: None, mark })
    }

    /// Takes the rings of queues from `rings`, in a process whose sandbox makes none.
    pub fn with_rings(self, rings: Arc<UringPool>) -> FileDisk {
        FileDisk { rings: Some(rings), ..self }
    }

    /// Returns the properties of the file.
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// Returns a ring for a queue.
    fn ring(&self, depth: u32) -> Result<Uring, NoRing> {
        let file = Arc::clone(&self.file);
        match &self.rings {
            None => Uring::new(file, depth).map_err(NoRing::System),
            Some(rings) => rings.take(file, depth).ok_or_else(|| NoRing::of(rings)),
        }
    }

    fn threads(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let (file, policy) = (Arc::clone(&self.file), self.policy.clone());
        Ok(Box::new(PoolQueue::new(Arc::new(FileExecutor { file, policy }), depth)?))
    }
}

/// Checks that this process may use io_uring as a sandbox does: sets up a restricted ring, and closes it.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn check_uring() -> io::Result<()> {
    UringPool::new(1, 1).into_refusal().map_or(Ok(()), Err)
}

/// Reasons for which a queue has no ring.
#[derive(Debug, thiserror::Error)]
enum NoRing {
    #[error("{0}")]
    System(io::Error),
    /// The kernel refused the rings of the process.
    #[error("{0}")]
    Refused(String),
    #[error("all rings of this process are in use, or none was made at its start")]
    NoneLeft,
}

impl NoRing {
    /// Returns the reason for which the pool has no ring.
    fn of(rings: &UringPool) -> NoRing {
        rings.refusal().map_or(NoRing::NoneLeft, |error| NoRing::Refused(error.to_string()))
    }

    /// Returns `true` if threads may serve the queue in place of a ring.
    fn allows_threads(&self) -> bool {
        let NoRing::System(error) = self else { return true };
        let refusals = [libc::ENOSYS, libc::EPERM, libc::EACCES, libc::EINVAL];
        error.raw_os_error().is_some_and(|errno| refusals.contains(&errno))
    }
}

impl From<NoRing> for io::Error {
    fn from(error: NoRing) -> io::Error {
        match error {
            NoRing::System(error) => error,
            other => io::Error::other(other.to_string()),
        }
    }
}

impl Disk for FileDisk {
    fn geometry(&self) -> Geometry {
        let facts = &self.facts;
        let discard = self.policy.discard.then_some(Discard {
            granularity: facts.discard_granularity,
            alignment: facts.discard_alignment,
            secure: facts.discard_secure,
        });
        Geometry {
            bytes: facts.bytes,
            sector_size: facts.sector_size,
            physical_sector_size: facts.physical_sector_size,
            read_only: facts.read_only,
            flush: true,
            discard,
            write_zeroes: !facts.read_only,
            extents: facts.kind == FileKind::Regular,
            rotational: facts.rotational,
        }
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        static SAID: Once = Once::new();
        if self.engine == Engine::Threads {
            return self.threads(depth);
        }
        match self.ring(depth) {
            Ok(ring) => Ok(Box::new(uring::UringQueue::new(ring, self.policy.clone())?)),
            Err(error) if self.engine == Engine::Auto && error.allows_threads() => {
                SAID.call_once(|| {
                    let remedy = match error {
                        NoRing::NoneLeft => String::new(),
                        _ => format!("; {}", with_doctor(IO_URING.enable)),
                    };
                    tracing::info!(
                        "no io_uring ({error}): threads serve a disk, which is slower{remedy}"
                    );
                });
                self.threads(depth)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn live(&self) -> Option<&dyn LiveDisk> {
        Some(self)
    }
}

impl LiveDisk for FileDisk {
    fn storage_bytes(&self) -> io::Result<u64> {
        let bytes = growth::measure(&self.file, self.facts.kind)?;
        Ok(bytes - bytes % u64::from(self.facts.sector_size))
    }

    fn enlarge(&self, bytes: u64) -> io::Result<()> {
        growth::enlarge(&self.file, self.facts.kind, bytes)
    }

    fn resized(&self, bytes: u64) -> io::Result<Arc<dyn Disk>> {
        let FileFacts { bytes: before, sector_size, .. } = self.facts;
        if bytes < before || !bytes.is_multiple_of(sector_size.into()) {
            return Err(io::Error::other(format!(
                "{bytes} bytes are no larger disk of sectors of {sector_size} than {before}"
            )));
        }
        let facts = FileFacts { bytes, ..self.facts };
        Ok(Arc::new(FileDisk {
            file: Arc::clone(&self.file),
            facts,
            policy: self.policy.resized(bytes),
            engine: self.engine,
            rings: self.rings.clone(),
            mark: self.mark.clone(),
        }))
    }

    fn become_backing(&self) -> io::Result<()> {
        lock::give_up_writing(&self.file)
    }
}

#[cfg(test)]
mod tests;
