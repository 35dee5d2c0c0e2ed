//! Arena files and raw mappings of them, as both sides of a pair have them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

pub(crate) const PAGE: usize = 4096;

/// The seals of an arena's files.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A memfd with these seals.
pub(crate) fn memfd(pages: usize, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("assumption", flags).unwrap();
    rustix::fs::ftruncate(&fd, (pages * PAGE) as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// An arena's file.
pub(crate) fn arena(pages: usize) -> OwnedFd {
    memfd(pages, SEALS)
}

/// The same file, opened again through /proc.
pub(crate) fn reopen(fd: impl AsFd, mode: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty())
}

/// Takes the content of pages away.
pub(crate) fn punch(fd: impl AsFd, first: usize, count: usize) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, flags, (first * PAGE) as u64, (count * PAGE) as u64)
}

/// A shared mapping. Its bytes are only touched as atomic words.
pub(crate) struct Mapped {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is of the process, not of a thread, and is only accessed atomically.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value, which hands out no reference into it.
        unsafe { rustix::mm::munmap(self.start.cast(), self.len) }.unwrap();
    }
}

impl Mapped {
    /// Maps pages of `fd` from page `first` on.
    pub(crate) fn new(fd: impl AsFd, first: usize, pages: usize, write: bool) -> Mapped {
        Mapped::try_new(fd, first, pages, write).unwrap()
    }

    /// The same, or why not.
    pub(crate) fn try_new(
        fd: impl AsFd,
        first: usize,
        pages: usize,
        write: bool,
    ) -> rustix::io::Result<Mapped> {
        let protection = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let (len, offset) = (pages * PAGE, (first * PAGE) as u64);
        let anywhere = core::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap(anywhere, len, protection, MapFlags::SHARED, fd, offset) }?;
        Ok(Mapped { start: start.cast(), len })
    }

    /// Memory that is shared with the children of this process.
    pub(crate) fn anonymous() -> Mapped {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = core::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap_anonymous(anywhere, PAGE, protection, MapFlags::SHARED) };
        Mapped { start: start.unwrap().cast(), len: PAGE }
    }

    /// A mapping that was made or moved by hand.
    ///
    /// # Safety
    ///
    /// The range is mapped, readable, and belongs to nothing else.
    pub(crate) unsafe fn adopt(start: *mut u8, len: usize) -> Mapped {
        Mapped { start, len }
    }

    /// Gives up ownership: whoever takes the address has it now.
    pub(crate) fn into_address(self) -> (*mut u8, usize) {
        let parts = (self.start, self.len);
        core::mem::forget(self);
        parts
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.start
    }

    /// The first word of a page.
    pub(crate) fn word(&self, page: usize) -> &AtomicU64 {
        assert!((page + 1) * PAGE <= self.len);
        // SAFETY: inside the mapping, aligned to the page, and only ever accessed as an atomic.
        unsafe { AtomicU64::from_ptr(self.start.add(page * PAGE).cast()) }
    }

    /// All words of the first page.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the first page is mapped, aligned, and only ever accessed as atomics.
        unsafe { core::slice::from_raw_parts(self.start.cast(), PAGE / 8) }
    }

    pub(crate) fn get(&self, page: usize) -> u64 {
        self.word(page).load(SeqCst)
    }

    pub(crate) fn set(&self, page: usize, value: u64) {
        self.word(page).store(value, SeqCst);
    }
}
