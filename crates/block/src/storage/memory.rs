//! Disk in memory, for measurements of the layers above it: each request completes in `submit`.
//!
//! The memory is a memfd, so that discarded ranges return to the system.

// #syscall driver,daemon eventfd2,fallocate: disks in memory; their memory is made before

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::{LentSlice, Mapping, OutOfRange, PAGE_SIZE, Protection};
use ringfence_sys::mailbox::WakeFd;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;

use super::{Discard, Disk, DiskQueue, Done, Geometry, Op, Request, check_request, extents};

struct Content {
    file: OwnedFd,
    bytes: LentSlice,
}

/// Disk in memory. Its content is lost when it is dropped.
pub struct MemoryDisk {
    content: Arc<Content>,
    geometry: Geometry,
}

impl MemoryDisk {
    /// Creates a disk of `bytes` zeros, rounded down to sectors of `sector_size`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, or `InvalidInput` for an empty disk or a sector size other than 512 and 4096.
    pub fn new(bytes: u64, sector_size: u32) -> io::Result<MemoryDisk> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
        if !matches!(sector_size, 512 | 4096) {
            return Err(invalid("a disk has sectors of 512 or 4096 bytes"));
        }
        let bytes = bytes - bytes % u64::from(sector_size);
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        let whole = len.checked_next_multiple_of(PAGE_SIZE).filter(|len| *len > 0);
        let whole = whole.ok_or_else(|| invalid("a disk has at least one sector"))?;
        let file = rustix::fs::memfd_create("disk", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, whole as u64)?;
        let bytes_of = Mapping::new(&file, 0, whole, Protection::ReadWrite)?.lent();
        let discard = Discard { granularity: sector_size.max(4096), alignment: 0, secure: false };
        let geometry = Geometry {
            bytes,
            sector_size,
            physical_sector_size: sector_size,
            read_only: false,
            flush: true,
            discard: Some(discard),
            write_zeroes: true,
            extents: true,
            rotational: false,
        };
        Ok(MemoryDisk { content: Arc::new(Content { file, bytes: bytes_of }), geometry })
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn queue(&self, _depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let never = WakeFd::new()?;
        let (content, geometry) = (Arc::clone(&self.content), self.geometry);
        Ok(Box::new(MemoryQueue { content, geometry, never, ready: vec![] }))
    }
}

struct MemoryQueue {
    content: Arc<Content>,
    geometry: Geometry,
    /// Never readable: no request is ever in flight.
    never: WakeFd,
    ready: Vec<Done>,
}

impl MemoryQueue {
    fn execute(&self, request: &Request) -> Result<(), i32> {
        let Geometry { bytes, sector_size, read_only, .. } = self.geometry;
        check_request(request, bytes, sector_size, read_only)?;
        let at = usize::try_from(request.offset).map_err(|_| libc::EIO)?;
        let len = usize::try_from(request.len).map_err(|_| libc::EIO)?;
        let done = match request.op {
            Op::Read => self.copy(request, at, false),
            Op::Write { .. } => self.copy(request, at, true),
            Op::Flush => Ok(()),
            Op::Discard { secure: true } => return Err(libc::EOPNOTSUPP),
            Op::WriteZeroes { allocate: true } => self.content.bytes.zero(at, len),
            Op::Discard { secure: false } | Op::WriteZeroes { allocate: false } => {
                self.zero(at, len)
            }
            Op::Extents => {
                let range = request.range();
                let list = extents::of_file(&self.content.file, range, sector_size);
                let list = list.map_err(Errno::raw_os_error)?;
                list.store(extents::memory(&request.segments))
            }
        };
        done.map_err(|_| libc::EFAULT)
    }

    fn copy(&self, request: &Request, mut at: usize, write: bool) -> Result<(), OutOfRange> {
        let bytes = &self.content.bytes;
        for segment in &request.segments {
            let (memory, len) = (&segment.memory, segment.memory.len());
            if write {
                bytes.copy_from_lent(at, memory, 0, len)?;
            } else {
                memory.copy_from_lent(0, bytes, at, len)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Zeroes a range. Whole pages return to the system; the bytes at both ends are overwritten.
    fn zero(&self, at: usize, len: usize) -> Result<(), OutOfRange> {
        let (bytes, end) = (&self.content.bytes, at + len);
        let (first, last) = (at.next_multiple_of(PAGE_SIZE), end - end % PAGE_SIZE);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = first < last
            && rustix::fs::fallocate(&self.content.file, mode, first as u64, (last - first) as u64)
                .is_ok();
        if !punched {
            return bytes.zero(at, len);
        }
        bytes.zero(at, first - at)?;
        bytes.zero(last, end - last)
    }
}

impl DiskQueue for MemoryQueue {
    fn submit(&mut self, request: Request) {
        let result = self.execute(&request);
        self.ready.push(request.done(result));
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.ready);
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::testing::conformance;

    #[test]
    fn memory_disk_conforms() {
        conformance::check(&MemoryDisk::new(5 << 20, 512).unwrap(), 5);
        conformance::check(&MemoryDisk::new((5 << 20) + 700, 4096).unwrap(), 6);
    }

    #[test]
    fn empty_disk_and_odd_sector_size_are_refused() {
        assert!(MemoryDisk::new(100, 512).is_err());
        assert!(MemoryDisk::new(1 << 20, 1024).is_err());
    }
}
