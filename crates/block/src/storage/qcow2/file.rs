//! Files of an image chain, as the library of the format reads and writes them.
//!
//! Reads behind the end of a file give zeros: an image may refer to clusters that were never written, and a raw backing
//! file may be shorter than the disk above it.

// #syscall driver,disk,daemon fstat: how long the file of an image is
// #syscall driver,disk,daemon fallocate,fdatasync: clusters that are zeroed or given up, and flushes

use core::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use imago::io_buffers::IoBuffer;
use ringfence_sys::images::{Alignment, ImageFile};
use ringfence_sys::numbers::usize_from;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::order::WriteOrder;
use crate::storage::file::{FileFacts, FileKind};

/// Maximum number of buffers of one system call (`IOV_MAX`).
const BUFFERS_MAX: usize = 1024;

/// Number of zero bytes written at once if the file system cannot zero a range.
const ZEROS: usize = 64 << 10;

/// Mark of a chain, set once nothing may be written to it any more.
pub(super) type Stopped = Arc<OnceLock<()>>;

/// File of one member of a chain.
pub(super) struct MemberFile {
    file: Arc<OwnedFd>,
    facts: FileFacts,
    /// Order of metadata writes, for an image that is written.
    order: Option<WriteOrder>,
    /// Set once nothing may be written any more.
    stopped: Stopped,
}

impl fmt::Debug for MemberFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("file of an image")
    }
}

impl AsFd for MemberFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl MemberFile {
    /// Creates a file whose writes have no order.
    pub(super) fn new(file: OwnedFd, facts: FileFacts, stopped: &Stopped) -> MemberFile {
        let (file, stopped) = (Arc::new(file), Arc::clone(stopped));
        MemberFile { file, facts, order: None, stopped }
    }

    /// Gives the writes of an image an order.
    pub(super) fn with_order(mut self, order: WriteOrder) -> io::Result<MemberFile> {
        order.load(&self)?;
        self.order = Some(order);
        Ok(self)
    }

    /// Returns a second reference to the open file.
    pub(super) fn handle(&self) -> FileHandle {
        FileHandle(Arc::clone(&self.file))
    }

    pub(super) fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// Returns the length of the file in bytes, as it is now.
    fn length(&self) -> io::Result<u64> {
        match self.facts.kind {
            FileKind::Regular => Ok(rustix::fs::fstat(&self.file)?.st_size.max(0).cast_unsigned()),
            FileKind::BlockDevice => Ok(self.facts.bytes),
        }
    }

    /// Fills `bytes` from `offset` on, whatever the alignment.
    pub(super) fn read_unaligned(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut block = Block::around(self.alignment(), offset, bytes.len())?;
        let start = block.start;
        self.read_all(&mut [IoSliceMut::new(block.all())], start)?;
        bytes.copy_from_slice(block.part());
        Ok(())
    }

    /// Reads without regard to the content.
    fn read_all(&self, mut buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        let mut at = offset;
        while !buffers.is_empty() {
            let count = buffers.len().min(BUFFERS_MAX);
            let read = match rustix::io::preadv(&self.file, &mut buffers[..count], at) {
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            at += read as u64;
            IoSliceMut::advance_slices(&mut buffers, read);
            // Behind the end an aligned read would begin at an offset that is not aligned.
            if !buffers.is_empty() && (read == 0 || at >= self.length()?) {
                buffers.iter_mut().for_each(|buffer| buffer.fill(0));
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes `bytes` to `offset`, whatever the alignment. No other write to the same blocks may run.
    pub(super) fn write_unaligned(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut block = Block::around(self.alignment(), offset, bytes.len())?;
        let start = block.start;
        if block.len > bytes.len() {
            self.read_all(&mut [IoSliceMut::new(block.all())], start)?;
        }
        block.part().copy_from_slice(bytes);
        self.write_all(&mut [IoSlice::new(block.all())], start)
    }

    /// Writes without regard to the order.
    pub(super) fn write_all(&self, mut buffers: &mut [IoSlice<'_>], offset: u64) -> io::Result<()> {
        if self.stopped.get().is_some() {
            return Err(Errno::IO.into());
        }
        let mut at = offset;
        while !buffers.is_empty() {
            let count = buffers.len().min(BUFFERS_MAX);
            match rustix::io::pwritev(&self.file, &buffers[..count], at) {
                Ok(0) if buffers.iter().all(|buffer| buffer.is_empty()) => return Ok(()),
                Ok(0) => return Err(Errno::NOSPC.into()),
                Ok(written) => {
                    at += written as u64;
                    IoSlice::advance_slices(&mut buffers, written);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Reference to the open file of a member.
pub(super) struct FileHandle(Arc<OwnedFd>);

impl FileHandle {
    pub(super) fn file(&self) -> &OwnedFd {
        &self.0
    }

    /// Frees the storage of a range, which reads as zeros then. A file system that cannot keeps it.
    pub(super) fn punch(&self, offset: u64, len: u64) {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.0, mode, offset, len);
    }
}

/// Aligned private memory for a part of a file with any alignment.
struct Block {
    memory: IoBuffer,
    /// Offset in the file of the first byte.
    start: u64,
    len: usize,
    /// Position and length of the part.
    part: (usize, usize),
}

impl Block {
    fn around(alignment: Alignment, offset: u64, len: usize) -> io::Result<Block> {
        let unit = alignment.request.max(1);
        let before = usize_from(offset % unit as u64);
        let whole = (before + len).next_multiple_of(unit);
        let memory = IoBuffer::new(whole, alignment.memory.max(1))?;
        Ok(Block { memory, start: offset - before as u64, len: whole, part: (before, len) })
    }

    fn all(&mut self) -> &mut [u8] {
        self.memory.as_mut().into_slice()
    }

    fn part(&mut self) -> &mut [u8] {
        let (start, len) = self.part;
        &mut self.all()[start..start + len]
    }
}

impl ImageFile for MemberFile {
    fn alignment(&self) -> Alignment {
        self.facts.direct.map_or(Alignment::NONE, |rules| Alignment {
            memory: rules.memory as usize,
            request: rules.offset as usize,
        })
    }

    fn size(&self) -> io::Result<u64> {
        self.length()
    }

    fn read_at(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        let mut parts: Vec<_> = buffers.iter_mut().map(|part| IoSliceMut::new(part)).collect();
        self.read_all(&mut parts, offset)?;
        let Some(order) = &self.order else { return Ok(()) };
        let mut at = offset;
        for part in buffers {
            order.check_tables(part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn write_at(&self, buffers: &mut [IoSlice<'_>], offset: u64) -> io::Result<()> {
        match &self.order {
            Some(order) => order.write(self, buffers, offset),
            None => self.write_all(buffers, offset),
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        // The file must grow with its clusters, so its size is not kept.
        match rustix::fs::fallocate(&self.file, FallocateFlags::ZERO_RANGE, offset, len) {
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {}
            other => return other.map_err(io::Error::from),
        }
        let alignment = self.alignment();
        let size = usize_from(len.min(ZEROS as u64));
        let mut zeros = IoBuffer::new(size, alignment.memory.max(1))?;
        zeros.as_mut().into_slice().fill(0);
        let mut done = 0;
        while done < len {
            let step = usize_from((len - done).min(size as u64));
            let bytes = zeros.as_ref_range(0..step).into_slice();
            self.write_all(&mut [IoSlice::new(bytes)], offset + done)?;
            done += step as u64;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let writes = self.order.as_ref().map(WriteOrder::before_sync);
        rustix::fs::fdatasync(&self.file)?;
        if let (Some(order), Some(writes)) = (&self.order, writes) {
            order.after_sync(writes);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::storage::file::{CacheMode, FileOptions, OpenFile};

    /// Creates a file of zeros, and the member of a chain that it is.
    pub(in super::super) fn member(bytes: u64) -> (tempfile::TempDir, File, MemberFile) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(bytes).unwrap();
        let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
        let own = file.try_clone().unwrap().into();
        let OpenFile { file: own, facts, .. } =
            OpenFile::of_image(own, &path, &options, None).unwrap();
        (directory, file, MemberFile::new(own, facts, &Stopped::default()))
    }

    #[test]
    fn bytes_behind_the_end_are_zero() {
        let (_directory, file, member) = member(1000);
        file.write_all_at(&[7; 1000], 0).unwrap();
        let (mut first, mut second) = ([1; 600], [1; 600]);
        let mut buffers = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        member.read_at(&mut buffers, 0).unwrap();
        assert_eq!(first, [7; 600]);
        assert_eq!(second, [[7; 400].as_slice(), &[0; 200]].concat()[..]);
        let mut beyond = [1; 10];
        member.read_unaligned(&mut beyond, 1 << 40).unwrap();
        assert_eq!(beyond, [0; 10]);
    }

    #[test]
    fn zeros_grow_the_file() {
        let (_directory, file, member) = member(1000);
        file.write_all_at(&[7; 1000], 0).unwrap();
        member.write_zeroes(500, 100_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100_500);
        let mut bytes = [1; 600];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [[7; 500].as_slice(), &[0; 100]].concat()[..]);
    }

    #[test]
    fn stopped_chain_is_not_written() {
        let (_directory, file, member) = member(1000);
        member.stopped.set(()).unwrap();
        assert!(member.write_at(&mut [IoSlice::new(&[7; 10])], 0).is_err());
        let mut bytes = [1; 10];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 10]);
    }
}
