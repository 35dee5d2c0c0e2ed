//! Storage backends: the traits that a disk implementation provides to blkback and to NBD exports.
//!
//! A [`Disk`] is open and shared by all its users. Each user does I/O through a [`DiskQueue`] of its own,
//! which is asynchronous: `submit` adds requests, `kick` starts them together, `reap` returns those that
//! completed, in any order. Two requests in flight have no order. A user that needs one waits for the first
//! before it submits the second.

use core::ops::Range;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_memory::LentSlice;

mod below;
pub mod extents;
pub mod failure;
pub mod file;
pub mod folders;
pub mod memory;
pub mod qcow2;
mod qcow2_header;
pub mod signature;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
mod threads;

/// Properties of an open disk. They do not change while the disk is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size in bytes, a multiple of `sector_size`.
    pub bytes: u64,
    /// Unit of length and alignment of every request in bytes: 512 or 4096.
    pub sector_size: u32,
    /// Smallest unit in bytes that the medium writes without reading it first.
    pub physical_sector_size: u32,
    /// Set if the disk cannot be written.
    pub read_only: bool,
    /// Set if completed writes may be lost with the power until [`Op::Flush`].
    pub flush: bool,
    /// Properties of discards, or `None` if the disk has no discard.
    pub discard: Option<Discard>,
    /// Set if [`Op::WriteZeroes`] is supported.
    pub write_zeroes: bool,
    /// Set if [`Op::Extents`] is supported.
    pub extents: bool,
    /// Set if seeking takes time.
    pub rotational: bool,
}

/// Properties of the discards of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Discard {
    /// Unit of discards in bytes.
    pub granularity: u32,
    /// Offset in bytes of the first unit of discards.
    pub alignment: u32,
    /// Set if secure discards are supported.
    pub secure: bool,
}

/// Operation on a range of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Reads from the disk into the segments.
    Read,
    /// Writes the segments to the disk.
    Write {
        /// Completes only when the data survives a loss of power.
        fua: bool,
    },
    /// Makes all writes durable that completed before this request was submitted.
    Flush,
    /// Discards the content of the range.
    Discard {
        /// Makes the old content unreadable.
        secure: bool,
    },
    /// Writes zeros to the range.
    WriteZeroes {
        /// Storage of the range stays, or becomes, allocated. Otherwise the disk frees it if it can.
        allocate: bool,
    },
    /// Stores the list of the extents of the range in the segments ([`extents::ExtentList`]).
    Extents,
}

/// Memory of a part of a request: exactly the bytes to transfer, in lent pages or in private memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Memory of the segment. It stays mapped while the request holds it.
    pub memory: LentSlice,
    /// Name under which [`DiskQueue::register`] accepted the memory that contains the segment.
    pub registered: Option<u64>,
}

impl From<LentSlice> for Segment {
    fn from(memory: LentSlice) -> Segment {
        Segment { memory, registered: None }
    }
}

/// Request to a disk.
#[derive(Debug)]
pub struct Request {
    /// Token of the submitter, returned in [`Done`].
    pub token: u64,
    pub op: Op,
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Length in bytes; for reads and writes the sum of the segments. The segments of a query of extents have
    /// [`extents::LIST_BYTES`].
    pub len: u64,
    /// Memory of the data. [`Done`] returns the vector for reuse.
    pub segments: Vec<Segment>,
}

impl Request {
    /// Returns the bytes of the disk that the request is about.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.len)
    }

    /// Creates the result of this request.
    pub fn done(self, result: Result<(), i32>) -> Done {
        Done { token: self.token, result, segments: self.segments }
    }
}

/// Checks a request against the geometry of the disk. Returns the errno if the request is invalid.
///
/// Submitters validate requests too, with more specific errors. This check keeps a defect there from
/// reaching the medium.
pub fn check_request(
    request: &Request,
    bytes: u64,
    sector_size: u32,
    read_only: bool,
) -> Result<(), i32> {
    let Request { op, offset, len, ref segments, .. } = *request;
    if op == Op::Flush {
        // A flush has no range.
        return Ok(());
    }
    let reads = matches!(op, Op::Read | Op::Extents);
    if read_only && !reads {
        return Err(libc::EROFS);
    }
    let sector = u64::from(sector_size);
    if !offset.is_multiple_of(sector) || !len.is_multiple_of(sector) {
        return Err(libc::EINVAL);
    }
    if offset.checked_add(len).is_none_or(|end| end > bytes) {
        return Err(if reads { libc::EIO } else { libc::ENOSPC });
    }
    let given =
        segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.memory.len() as u64));
    let wanted = match op {
        Op::Read | Op::Write { .. } => len,
        Op::Extents => extents::LIST_BYTES,
        Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => 0,
    };
    if given != Some(wanted) {
        return Err(libc::EINVAL);
    }
    if reads && !segments.iter().all(|segment| segment.memory.is_writable()) {
        return Err(libc::EFAULT);
    }
    Ok(())
}

/// Completion of a request: its token, and success or an error number.
#[derive(Debug)]
pub struct Done {
    pub token: u64,
    /// Success of the whole request, or the errno of the failure.
    pub result: Result<(), i32>,
    /// Segments of the request, for reuse.
    pub segments: Vec<Segment>,
}

/// Engine that executes the I/O of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueEngine {
    IoUring,
    Threads,
}

/// Open disk, shared by the users of its queues.
pub trait Disk: Send + Sync {
    /// Returns the properties of the disk.
    fn geometry(&self) -> Geometry;

    /// Creates a queue for one thread, with at most `depth` requests in flight.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no memory or no descriptor for the queue.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>>;

    /// Returns the maximum number of queues at the same time. A flush on one of them covers the writes
    /// completed on all.
    fn queues_max(&self) -> u32 {
        u32::MAX
    }

    /// Returns the changes that are possible while the disk is in use, if there are any.
    fn live(&self) -> Option<&dyn LiveDisk> {
        None
    }
}

/// Changes of a disk that is in use. Its users replace it by the disk that results.
pub trait LiveDisk {
    /// Returns the size in bytes that the storage has now, in whole sectors.
    ///
    /// # Errors
    ///
    /// Returns the system's error, or an error for storage of which only another program knows the size.
    fn storage_bytes(&self) -> io::Result<u64>;

    /// Enlarges the storage.
    ///
    /// # Errors
    ///
    /// Returns the system's error, or an error for storage that only another program enlarges.
    fn enlarge(&self, bytes: u64) -> io::Result<()>;

    /// Creates a disk of `bytes` bytes on the same storage. The caller uses one of both at a time.
    ///
    /// # Errors
    ///
    /// Returns an error for a size that is no multiple of a sector or smaller than before, and for storage whose size does
    /// not change while it is in use.
    fn resized(&self, bytes: u64) -> io::Result<Arc<dyn Disk>>;

    /// Gives up the locks for writing: the storage is the backing file of another disk from now on.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn become_backing(&self) -> io::Result<()>;
}

/// Queue of one thread to a disk.
///
/// Dropping a queue waits until none of its requests is in flight.
pub trait DiskQueue: Send {
    /// Adds a request, which starts at the next [`DiskQueue::kick`] at the latest. The submitter keeps to
    /// the depth of the queue and to the geometry of the disk; an invalid request completes with an error.
    fn submit(&mut self, request: Request);

    /// Starts the submitted requests.
    fn kick(&mut self);

    /// Appends the results of completed requests to `done`. Never blocks.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// Returns a file that is readable when requests completed since the last [`DiskQueue::reap`]. A caller
    /// reaps once after `kick` before it sleeps: a request that completes at once does not raise the event.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Registers memory that many requests will use, under a name of the caller, with the kernel. Returns
    /// `true` if the queue accepted it; a queue may ignore the hint.
    ///
    /// The kernel keeps the pages that are mapped at the time of the call. A name therefore stands for one
    /// grant in one generation. The caller unregisters it before the pages are unmapped, freed or revoked:
    /// I/O through a registration of a replaced page reports success and is lost.
    fn register(&mut self, _name: u64, _memory: &LentSlice) -> bool {
        false
    }

    /// Ends a registration. After the call only requests in flight hold the memory.
    fn unregister(&mut self, _name: u64) {}

    /// Returns the engine that executes the I/O, for disks that have several.
    fn engine(&self) -> Option<QueueEngine> {
        None
    }
}
