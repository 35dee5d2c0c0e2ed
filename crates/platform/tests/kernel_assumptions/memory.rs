//! Arena files and raw mappings of them, as granter and grantee have them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

pub(crate) const PAGE: usize = 4096;

/// Seals of an arena's files.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates a memfd of `pages` pages with the given seals.
pub(crate) fn memfd(pages: usize, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("assumption", flags).unwrap();
    rustix::fs::ftruncate(&fd, (pages * PAGE) as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Creates a file with the size and seals of an arena.
pub(crate) fn arena(pages: usize) -> OwnedFd {
    memfd(pages, SEALS)
}

/// Opens the file of `fd` again through /proc, with another mode.
pub(crate) fn reopen(fd: impl AsFd, mode: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty())
}

/// Punches a hole over `count` pages from page `first`: frees their content.
pub(crate) fn punch(fd: impl AsFd, first: usize, count: usize) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, flags, (first * PAGE) as u64, (count * PAGE) as u64)
}

/// Shared mapping. Its bytes are accessed as atomic words only.
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
    /// Maps `pages` pages of `fd` from page `first` on.
    pub(crate) fn new(fd: impl AsFd, first: usize, pages: usize, write: bool) -> Mapped {
        Mapped::try_new(fd, first, pages, write).unwrap()
    }

    /// Maps pages, as [`Mapped::new`] does, and returns the kernel's error.
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

    /// Maps one page of memory that this process shares with its children.
    pub(crate) fn anonymous() -> Mapped {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = core::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap_anonymous(anywhere, PAGE, protection, MapFlags::SHARED) };
        Mapped { start: start.unwrap().cast(), len: PAGE }
    }

    /// Takes ownership of a mapping that was created or moved by hand.
    ///
    /// # Safety
    ///
    /// The range is mapped and readable, and nothing else owns it.
    pub(crate) unsafe fn adopt(start: *mut u8, len: usize) -> Mapped {
        Mapped { start, len }
    }

    /// Releases ownership without unmapping. Returns the address and the length.
    pub(crate) fn into_address(self) -> (*mut u8, usize) {
        let parts = (self.start, self.len);
        core::mem::forget(self);
        parts
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.start
    }

    /// Returns the first word of a page.
    pub(crate) fn word(&self, page: usize) -> &AtomicU64 {
        assert!((page + 1) * PAGE <= self.len);
        // SAFETY: inside the mapping, aligned to the page, and only ever accessed as an atomic.
        unsafe { AtomicU64::from_ptr(self.start.add(page * PAGE).cast()) }
    }

    /// Returns all words of the first page.
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
