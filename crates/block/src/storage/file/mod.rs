//! A disk that is a file or a block device.
//!
//! # How a request becomes system calls
//!
//! A request is a job (`job.rs`): a small machine that says what is to be done next, and is told what
//! came of it. It knows of partial transfers, of bounce buffers, of what the file system cannot do
//! and what is done instead. Two engines run jobs: one through io_uring (`uring.rs`), where many
//! steps start with one system call, and one with threads that block (`pool.rs`), for kernels and
//! sandboxes that refuse io_uring. Both do exactly what the job says, so that they cannot differ.
//!
//! # Bounce buffers
//!
//! With O_DIRECT the device reads the guest's page itself. The guest may change it meanwhile. Most
//! storage does not mind: what is written is one or the other, and it is the guest's own disk. Storage
//! that computes a checksum of what it writes does mind: the checksum is then of other bytes than
//! those written, and the block cannot be read any more. There ([`Bounce::Auto`]) the bytes are
//! copied to private memory first. They are too where O_DIRECT asks for an alignment that the
//! guest's memory does not have.
//!
//! # Who else has the file
//!
//! Opening takes an exclusive lock (`flock`; shared for a disk that is read-only). The lock belongs
//! to the open file, which I/O in flight holds: after a crash the next daemon gets the disk when the
//! last write of the one before is over, and no sooner, so that none of these can overtake its own.

mod bounce;
mod facts;
mod job;
mod options;
mod pool;
mod uring;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Once};

use ringfence_memory::{LentSlice, Mapping};

pub use facts::{DirectRules, FileFacts, FileKind, OpenFile, OpenFileError};
pub use options::{Bounce, CacheMode, Engine, FileOptions, UnknownOption};

use super::{Discard, Disk, DiskQueue, Geometry};
use job::Policy;

/// Bytes of zeros that are written at once where a file system cannot zero a range.
const ZEROS: usize = 256 << 10;

/// A disk that is a file or a block device.
pub struct FileDisk {
    file: Arc<OwnedFd>,
    facts: FileFacts,
    policy: Policy,
    engine: Engine,
}

impl FileDisk {
    /// Opens and locks `path`.
    ///
    /// # Errors
    ///
    /// [`OpenFileError`] says what is in the way.
    pub fn open(path: &Path, options: &FileOptions) -> Result<FileDisk, OpenFileError> {
        let opened = OpenFile::open(path, options)?;
        FileDisk::new(opened, options).map_err(|source| OpenFileError::System {
            what: "reserving memory",
            path: path.to_owned(),
            source,
        })
    }

    /// A disk of a file that was opened, perhaps by another process.
    ///
    /// # Errors
    ///
    /// When there is no memory.
    pub fn new(opened: OpenFile, options: &FileOptions) -> io::Result<FileDisk> {
        let OpenFile { file, facts } = opened;
        let zeros: LentSlice = Mapping::private(ZEROS)?.lent();
        let policy = Policy::new(&facts, options, zeros);
        Ok(FileDisk { file: Arc::new(file), facts, policy, engine: options.engine })
    }

    /// What was found out about the file.
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }

    fn threads(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let queue = pool::PoolQueue::new(Arc::clone(&self.file), self.policy.clone(), depth)?;
        Ok(Box::new(queue))
    }
}

/// Whether an error says that io_uring is not to be had here at all.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EINVAL))
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
            rotational: facts.rotational,
        }
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        static SAID: Once = Once::new();
        if self.engine == Engine::Threads {
            return self.threads(depth);
        }
        match uring::UringQueue::new(Arc::clone(&self.file), self.policy.clone(), depth) {
            Ok(queue) => Ok(Box::new(queue)),
            Err(error) if self.engine == Engine::Auto && is_refused(&error) => {
                SAID.call_once(|| {
                    tracing::warn!(
                        "io_uring is refused here ({error}): disks are served by threads, which is \
                         slower (see sysctl kernel.io_uring_disabled)"
                    );
                });
                self.threads(depth)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
