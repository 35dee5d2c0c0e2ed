//! Files of disk images, for the image formats of the crate `imago`.
//!
//! The crate does its I/O through its trait `Storage`, whose methods are `unsafe`: a caller must keep to the alignment
//! and to the order of writes. [`ImageStorage`] implements them with the safe trait [`ImageFile`], so that crates without
//! `unsafe` provide files of their own.

use core::fmt;
use std::io::{self, IoSlice, IoSliceMut};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;

/// Alignment of requests to a file, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alignment {
    /// Alignment of memory addresses.
    pub memory: usize,
    /// Alignment of offsets and lengths.
    pub request: usize,
}

impl Alignment {
    /// Alignment of a file that is used through the page cache.
    pub const NONE: Alignment = Alignment { memory: 1, request: 1 };
}

/// File that an image format reads and writes.
pub trait ImageFile: fmt::Debug + Send + Sync + 'static {
    /// Returns the alignment that every request of the format has.
    fn alignment(&self) -> Alignment;

    /// Returns the size of the file in bytes.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn size(&self) -> io::Result<u64>;

    /// Fills the buffers with the bytes from `offset` on. Bytes behind the end of the file are zero.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn read_at(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()>;

    /// Writes all of the buffers to `offset`. The file grows if necessary.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn write_at(&self, buffers: &mut [IoSlice<'_>], offset: u64) -> io::Result<()>;

    /// Makes a range read as zeros, allocated or not.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes all completed writes durable.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    fn sync(&self) -> io::Result<()>;
}

/// Storage of an image format on an [`ImageFile`].
#[derive(Debug)]
pub struct ImageStorage<F> {
    file: F,
    helper: CommonStorageHelper,
}

impl<F> ImageStorage<F> {
    /// Wraps a file for the library of an image format.
    pub fn new(file: F) -> ImageStorage<F> {
        ImageStorage { file, helper: CommonStorageHelper::default() }
    }

    /// Returns the file that was wrapped.
    pub fn file(&self) -> &F {
        &self.file
    }
}

impl<F: fmt::Debug> fmt::Display for ImageStorage<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl<F: ImageFile> Storage for ImageStorage<F> {
    fn mem_align(&self) -> usize {
        self.file.alignment().memory
    }

    fn req_align(&self) -> usize {
        self.file.alignment().request
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    unsafe fn pure_readv(&self, buffers: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        self.file.read_at(&mut buffers.into_inner(), offset)
    }

    unsafe fn pure_writev(&self, buffers: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.file.write_at(&mut buffers.into_inner(), offset)
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        self.file.write_zeroes(offset, len)
    }

    fn flush(&self) -> io::Result<()> {
        // A file has no buffers of its own.
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn settle_writes(&self) -> io::Result<()> {
        // Every call returns after its I/O.
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}
