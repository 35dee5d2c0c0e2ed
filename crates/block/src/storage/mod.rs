//! What a disk is to whoever serves it.
//!
//! A [`Disk`] is open and shared by everyone that serves it; each of them does I/O through a
//! [`DiskQueue`] of its own, which is asynchronous: requests are submitted, started together, and
//! reaped when they are done, in any order. Nothing is implied about the order of two requests in
//! flight at the same time: whoever needs one waits for the first before it submits the second.

use std::io;
use std::os::fd::BorrowedFd;

use ringfence_memory::LentSlice;

pub mod file;
pub mod folders;
pub mod memory;
pub mod signature;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;

/// What an open disk is like. It does not change while the disk is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes there are; a multiple of `sector_size`.
    pub bytes: u64,
    /// The unit of length and alignment of every request: 512 or 4096.
    pub sector_size: u32,
    /// The unit below which the medium itself must read before it writes.
    pub physical_sector_size: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// Writes may be lost with the power until [`Op::Flush`] has been done.
    pub flush: bool,
    /// Whether and how ranges can be given up.
    pub discard: Option<Discard>,
    /// Whether [`Op::WriteZeroes`] is served.
    pub write_zeroes: bool,
    /// Whether seeking costs time.
    pub rotational: bool,
}

/// How ranges of a disk can be given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Discard {
    /// Bytes of the unit that is given up at once.
    pub granularity: u32,
    /// Offset in bytes of the first such unit.
    pub alignment: u32,
    /// Whether the content can be made unreadable for certain.
    pub secure: bool,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Fill the segments from the disk.
    Read,
    /// Write the segments to the disk.
    Write {
        /// Done only when it would survive a loss of power.
        fua: bool,
    },
    /// Every write that was done before this was submitted survives a loss of power afterwards.
    Flush,
    /// The content of the range is of no more use.
    Discard {
        /// It must not be readable afterwards.
        secure: bool,
    },
    /// The range reads as zeros afterwards.
    WriteZeroes,
}

/// A piece of the bytes of a request: lent pages, or private ones of the same type. Exactly the
/// bytes to transfer.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The bytes; they stay mapped while the request holds them.
    pub memory: LentSlice,
    /// The name under which the memory they lie in was taken by [`DiskQueue::register`], if it was.
    pub registered: Option<u64>,
}

impl From<LentSlice> for Segment {
    fn from(memory: LentSlice) -> Segment {
        Segment { memory, registered: None }
    }
}

/// One request to a disk.
#[derive(Debug)]
pub struct Request {
    /// The submitter's own name for it; comes back in [`Done`].
    pub token: u64,
    /// What is to be done.
    pub op: Op,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes; for reads and writes the sum of the segments.
    pub len: u64,
    /// Where the bytes are. The vector comes back in [`Done`] to be used again.
    pub segments: Vec<Segment>,
}

impl Request {
    /// The answer to this request.
    pub fn done(self, result: Result<(), i32>) -> Done {
        Done { token: self.token, result, segments: self.segments }
    }
}

/// Whether a disk of `bytes` in sectors of `sector_size` may take `request` at all: the errno if not.
///
/// Whoever submits checks too, and knows better what to say. This keeps a slip there from reaching
/// the medium.
pub fn check_request(
    request: &Request,
    bytes: u64,
    sector_size: u32,
    read_only: bool,
) -> Result<(), i32> {
    let Request { op, offset, len, ref segments, .. } = *request;
    if op == Op::Flush {
        // It has no range.
        return Ok(());
    }
    if read_only && op != Op::Read {
        return Err(libc::EROFS);
    }
    let sector = u64::from(sector_size);
    if !offset.is_multiple_of(sector) || !len.is_multiple_of(sector) {
        return Err(libc::EINVAL);
    }
    if offset.checked_add(len).is_none_or(|end| end > bytes) {
        return Err(if op == Op::Read { libc::EIO } else { libc::ENOSPC });
    }
    let given =
        segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.memory.len() as u64));
    let wanted = match op {
        Op::Read | Op::Write { .. } => len,
        Op::Flush | Op::Discard { .. } | Op::WriteZeroes => 0,
    };
    if given != Some(wanted) {
        return Err(libc::EINVAL);
    }
    if op == Op::Read && !segments.iter().all(|segment| segment.memory.is_writable()) {
        return Err(libc::EFAULT);
    }
    Ok(())
}

/// A request that is over.
#[derive(Debug)]
pub struct Done {
    /// As in [`Request`].
    pub token: u64,
    /// All of it was done, or the errno of why not.
    pub result: Result<(), i32>,
    /// As in [`Request`].
    pub segments: Vec<Segment>,
}

/// A disk that is open; shared by whoever serves its queues.
pub trait Disk: Send + Sync {
    /// What it is like.
    fn geometry(&self) -> Geometry;

    /// A queue for one thread, with at most `depth` requests in flight.
    ///
    /// # Errors
    ///
    /// When the system has no room for it.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>>;

    /// Queues there can be at the same time. A flush through one of them covers what was done
    /// through all.
    fn queues_max(&self) -> u32 {
        u32::MAX
    }
}

/// One thread's way to a disk.
///
/// Dropping a queue waits until nothing it was given is in flight.
pub trait DiskQueue: Send {
    /// Takes a request; it starts at the next [`DiskQueue::kick`] at the latest. The submitter
    /// keeps to the depth it asked for, and has checked range and alignment against the geometry;
    /// a request that breaks either is done with an error.
    fn submit(&mut self, request: Request);

    /// Starts what was submitted.
    fn kick(&mut self);

    /// Appends what is over. Never blocks.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// Readable when [`DiskQueue::reap`] would find something that was not yet over when it was last
    /// called. So whoever kicked, reaps once before it sleeps: a disk that is done at once does not
    /// say so again.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Offers memory that many requests will use, under a name of the caller's, for the kernel to
    /// keep hold of. A hint: the answer is whether it was taken.
    ///
    /// The kernel keeps the pages that lie there *now*. A name therefore stands for one reference
    /// in one generation, and is unregistered before the pages are unmapped, purged or taken back:
    /// I/O through a registration into a page that was replaced reports success and is lost.
    fn register(&mut self, _name: u64, _memory: &LentSlice) -> bool {
        false
    }

    /// Lets go of what was registered as `name`. When this returns, nothing holds it but requests
    /// in flight.
    fn unregister(&mut self, _name: u64) {}
}
