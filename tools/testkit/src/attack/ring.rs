//! Attacks through an io_uring, whose operations no filter of system calls sees.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use super::{Window, Word, own};

/// Creates an io_uring, whose operations bypass system call filters.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn io_uring() -> io::Result<OwnedFd> {
    // struct io_uring_params is 120 bytes; zeroes select the defaults.
    let mut parameters = [0u8; 120];
    call!(SYS_io_uring_setup, 1, parameters.as_mut_ptr()).map(own)
}

/// Enters an io_uring with flags that its owner does not need.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn enter_ring_with_flags(ring: BorrowedFd<'_>) -> io::Result<()> {
    /// Flag `IORING_ENTER_SQ_WAKEUP` of `linux/io_uring.h`.
    const WAKE_UP: u32 = 1 << 1;
    let none = ptr::null::<u8>();
    call!(SYS_io_uring_enter, ring.as_raw_fd(), 0, 0, WAKE_UP, none, 0).map(drop)
}

/// Registers something with an io_uring. The arguments are invalid, so that a call that is not denied fails.
///
/// # Errors
///
/// Returns the kernel's error if it denies the call.
pub fn register_with_ring(ring: BorrowedFd<'_>, what: u32) -> io::Result<()> {
    match call!(SYS_io_uring_register, ring.as_raw_fd(), what, ptr::null::<u8>(), 0) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// Returns an io_uring among the open descriptors of this process.
pub fn find_ring() -> Option<OwnedFd> {
    let is_ring =
        |number: &RawFd| call!(SYS_io_uring_enter, *number, 0, 0, 0, ptr::null::<u8>(), 0).is_ok();
    let found = (3..1024).find(is_ring)?;
    // SAFETY: the call makes no change; the copy is this function's own.
    let copy = unsafe { libc::fcntl(found, libc::F_DUPFD_CLOEXEC, 3) };
    (copy >= 0).then(|| own(copy.into()))
}

/// Memory of an io_uring, for entries of any content.
pub struct RingMemory {
    ring: OwnedFd,
    layout: RingLayout,
    queues: Window,
    entries: Window,
    /// Mask of the submission queue.
    mask: u32,
    /// Offset of the array of the submission queue.
    array: usize,
}

/// Offsets of the fields of a ring in bytes, which differ between kernels.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    sq_tail: usize,
    sq_entries: usize,
    cq_head: usize,
    cq_tail: usize,
    cq_entries: usize,
    completions: usize,
}

impl RingLayout {
    /// Returns the layout of this kernel's rings. `None` if it refuses rings to this process.
    pub fn learn() -> Option<RingLayout> {
        // `struct io_uring_params`: `sq_off` is at word 10, `cq_off` at word 20.
        let mut words = [0u32; 30];
        call!(SYS_io_uring_setup, 1, words.as_mut_ptr()).map(own).ok()?;
        let at = |word: usize| words[word] as usize;
        let (sq_tail, sq_entries) = (at(11), at(13));
        let (cq_head, cq_tail, cq_entries, completions) = (at(20), at(21), at(23), at(25));
        Some(RingLayout { sq_tail, sq_entries, cq_head, cq_tail, cq_entries, completions })
    }
}

impl RingMemory {
    /// Maps a ring, as its owner does.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn map(ring: OwnedFd, layout: RingLayout) -> io::Result<RingMemory> {
        /// Offset of the entries in the ring's file (`IORING_OFF_SQES`).
        const ENTRIES: libc::off_t = 0x1000_0000;
        // The kernel chooses the address; it refuses a hint.
        let head = Window::at(0, ring.as_fd(), 4096, true, 0)?;
        let (sq, cq) = (head.number(layout.sq_entries), head.number(layout.cq_entries));
        // The array begins at a cache line.
        let array = (layout.completions + 16 * cq as usize).next_multiple_of(64);
        let queues = Window::at(0, ring.as_fd(), array + 4 * sq as usize, true, 0)?;
        let entries = Window::at(0, ring.as_fd(), 64 * sq as usize, true, ENTRIES)?;
        Ok(RingMemory { ring, layout, queues, entries, mask: sq.saturating_sub(1), array })
    }

    /// Returns the ring's file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Submits an entry of 64 bytes and returns its result. An operation that is still in progress counts as
    /// success.
    ///
    /// # Errors
    ///
    /// Returns the error of the operation, or that of the call.
    pub fn submit(&self, entry: &[u64; 8]) -> io::Result<i32> {
        // Completions of earlier operations that were in progress do not count.
        self.queues.put(self.layout.cq_head, &[self.queues.number(self.layout.cq_tail)]);
        let tail = self.queues.number(self.layout.sq_tail);
        let slot = (tail & self.mask) as usize;
        self.entries.put(slot * 64, entry);
        self.queues.put(self.array + slot * 4, &[tail & self.mask]);
        self.queues.put(self.layout.sq_tail, &[tail.wrapping_add(1)]);
        call!(SYS_io_uring_enter, self.ring.as_raw_fd(), 1, 0, 0, ptr::null::<u8>(), 0)?;
        let done = self.queues.number(self.layout.cq_head);
        if self.queues.number(self.layout.cq_tail) == done {
            return Ok(0);
        }
        let last = self.queues.number(self.layout.cq_entries) - 1;
        let at = self.layout.completions + 16 * (done & last) as usize;
        let result = self.queues.number(at + 8).cast_signed();
        self.queues.put(self.layout.cq_head, &[done.wrapping_add(1)]);
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
    }
}

/// Returns an entry that opens the root directory.
pub fn open_entry() -> [u64; 8] {
    let at = u64::from(libc::AT_FDCWD.cast_unsigned());
    let path = c"/".as_ptr().expose_provenance() as u64;
    let flags = u64::from(libc::O_DIRECTORY.cast_unsigned());
    [OPENAT | at << 32, 0, path, flags << 32, 0, 0, 0, 0]
}

/// Returns an entry that makes a socket.
pub fn socket_entry() -> [u64; 8] {
    let family = u64::from(libc::AF_UNIX.cast_unsigned());
    let kind = u64::from(libc::SOCK_DGRAM.cast_unsigned());
    [SOCKET | family << 32, kind, 0, 0, 0, 0, 0, 0]
}

/// Returns an entry with the operation `code` and flags on no file.
pub fn plain_entry(code: u8, flags: u8) -> [u64; 8] {
    [u64::from(code) | u64::from(flags) << 8 | 0xffff_ffff << 32, 0, 0, 0, 0, 0, 0, 0]
}

/// Number of `IORING_OP_OPENAT` in `linux/io_uring.h`.
const OPENAT: u64 = 18;
/// Number of `IORING_OP_SOCKET` in `linux/io_uring.h`.
const SOCKET: u64 = 45;
