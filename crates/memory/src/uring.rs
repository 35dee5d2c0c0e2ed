//! Asynchronous I/O on one file, by io_uring.
//!
//! The kernel accesses the memory of an operation after the submitting call has returned. So a [`Uring`] owns
//! everything that an operation needs: the [`LentSlice`]s (which keep their mappings) and the list of ranges
//! that the kernel reads. Both stay in place until the kernel completes the operation. Dropping a ring waits for
//! that first. Every `unsafe` block here relies on this invariant:
//!
//! > **I1** Memory that a submission queue entry points to belongs to the slot whose number is the entry's user
//! > data. A slot is emptied only when its completion was taken from the ring.
//!
//! There are as many slots as submission queue entries, so a push always finds room. The completion queue is
//! twice as long and never overflows.
//!
//! Registered memory saves page lookups: the kernel resolves its pages once and holds them. It holds the pages,
//! not the addresses; see [`Uring::register`].
//!
//! A process in a sandbox takes its rings from an [`UringPool`], and gives each back when it is dropped.

// #syscall driver,disk,daemon io_uring_enter 3-0xfffffffe 4==0: disks; the ring allows what the list does (`pool.rs`)

mod pool;

use core::mem::ManuallyDrop;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};

use crate::lent::LentSlice;

pub use pool::UringPool;

/// Maximum operations in flight in one ring.
const DEPTH_MAX: u32 = 4096;

/// Maximum ranges of one operation.
const RANGES_MAX: usize = 1024;

/// Result of a completed operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Token given when the operation was started.
    pub token: u64,
    /// Bytes transferred (zero for operations without data), or the errno.
    pub result: Result<u32, i32>,
}

/// Resources of an operation in flight (I1).
struct Slot {
    token: u64,
    in_flight: bool,
    memory: Vec<LentSlice>,
    ranges: Vec<libc::iovec>,
}

// SAFETY: the ranges are addresses for the kernel, made from the slices in the same slot, which are Send. No
// code in this process dereferences them.
unsafe impl Send for Slot {}

/// io_uring for one file, with its operations in flight. Used by one thread at a time.
pub struct Uring {
    ring: ManuallyDrop<IoUring>,
    /// Owner of the ring, which gets it back. Without one the ring is closed.
    pool: Option<Arc<UringPool>>,
    /// File of all operations. Entries name its descriptor, and the file is not registered: a registered file
    /// stays open until the kernel has torn down the ring of a killed process, which takes seconds under load,
    /// and the file's lock stays with it. So does an operation in flight, but only until it completes.
    file: Arc<OwnedFd>,
    slots: Vec<Slot>,
    /// Numbers of the free slots.
    free: Vec<u32>,
    /// Entries queued since the last successful submission.
    queued: usize,
    /// Registered memory by buffer number.
    registered: Vec<Option<LentSlice>>,
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Makes a ring of `depth` entries.
fn build(depth: u32, is_disabled: bool) -> io::Result<IoUring> {
    let builder = || {
        let mut builder = IoUring::builder();
        if is_disabled {
            builder.setup_r_disabled();
        }
        builder
    };
    // The thread polls for completions, so no interrupt is needed for each (5.19).
    builder().setup_coop_taskrun().setup_taskrun_flag().build(depth).or_else(|error| {
        match errno(&error) {
            libc::EINVAL => builder().build(depth),
            _ => Err(error),
        }
    })
}

impl Uring {
    /// Creates a ring for up to `depth` operations in flight on `file`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `ENOSYS` without io_uring, `EPERM` if the caller may not use it, `ENOMEM`
    /// beyond the limit of locked memory (kernels before 5.12).
    pub fn new(file: Arc<OwnedFd>, depth: u32) -> io::Result<Uring> {
        let depth = depth.clamp(1, DEPTH_MAX);
        Ok(Uring::on(build(depth, false)?, file, depth, None))
    }

    /// Uses a ring without operations, which has at least `depth` entries.
    fn on(ring: IoUring, file: Arc<OwnedFd>, depth: u32, pool: Option<Arc<UringPool>>) -> Uring {
        let empty = |_| Slot { token: 0, in_flight: false, memory: vec![], ranges: vec![] };
        Uring {
            ring: ManuallyDrop::new(ring),
            pool,
            file,
            slots: (0..depth).map(empty).collect(),
            free: (0..depth).rev().collect(),
            queued: 0,
            registered: vec![],
        }
    }

    /// Returns the ring's file.
    pub fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    fn target(&self) -> types::Fd {
        types::Fd(self.file.as_raw_fd())
    }

    /// Returns the number of operations that can still be started.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Queues a read from `offset` of the file into the slices of `memory`, in order. Takes the slices out of the
    /// vector. Returns `false` and changes nothing if there is no free slot, a slice is read-only, or `memory` has no
    /// slice or more than 1024.
    #[must_use]
    pub fn read(&mut self, token: u64, offset: u64, memory: &mut Vec<LentSlice>) -> bool {
        if memory.iter().any(|piece| !piece.is_writable()) {
            return false;
        }
        self.queue_vectored(token, memory, |at, ranges, count| match count {
            1 => {
                // SAFETY: there is one range.
                let one = unsafe { *ranges };
                let len = u32::try_from(one.iov_len).ok()?;
                Some(opcode::Read::new(at, one.iov_base.cast(), len).offset(offset).build())
            }
            _ => Some(opcode::Readv::new(at, ranges, count).offset(offset).build()),
        })
    }

    /// Queues a write of `memory` to `offset` of the file, as [`Uring::read`] does. With `sync`, the operation
    /// completes only when the bytes are durable.
    #[must_use]
    pub fn write(
        &mut self,
        token: u64,
        offset: u64,
        memory: &mut Vec<LentSlice>,
        sync: bool,
    ) -> bool {
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        self.queue_vectored(token, memory, |at, ranges, count| match count {
            1 => {
                // SAFETY: there is one range.
                let one = unsafe { *ranges };
                let len = u32::try_from(one.iov_len).ok()?;
                let base = one.iov_base.cast_const().cast();
                let write = opcode::Write::new(at, base, len).offset(offset);
                Some(write.rw_flags(flags).build())
            }
            _ => {
                Some(opcode::Writev::new(at, ranges, count).offset(offset).rw_flags(flags).build())
            }
        })
    }

    /// Queues a read into one slice that lies in the memory registered as `buffer`. Otherwise as [`Uring::read`].
    /// Returns `false` also if the slice lies elsewhere.
    #[must_use]
    pub fn read_fixed(&mut self, token: u64, offset: u64, piece: &LentSlice, buffer: u16) -> bool {
        let Some(len) = self.fixed_len(piece, buffer) else { return false };
        let Ok(start) = piece.at_mut(0, piece.len()) else { return false };
        let entry = opcode::ReadFixed::new(self.target(), start.as_ptr(), len, buffer);
        self.queue_with_memory(token, piece, entry.offset(offset).build())
    }

    /// Queues a write of one slice that lies in the memory registered as `buffer`. Otherwise as [`Uring::write`].
    /// Returns `false` also if the slice lies elsewhere.
    #[must_use]
    pub fn write_fixed(
        &mut self,
        token: u64,
        offset: u64,
        piece: &LentSlice,
        buffer: u16,
        sync: bool,
    ) -> bool {
        let Some(len) = self.fixed_len(piece, buffer) else { return false };
        let Ok(start) = piece.at(0, piece.len()) else { return false };
        let start = start.as_ptr().cast_const();
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        let entry = opcode::WriteFixed::new(self.target(), start, len, buffer);
        self.queue_with_memory(token, piece, entry.offset(offset).rw_flags(flags).build())
    }

    /// Queues an `fdatasync`. Returns `false` if there is no free slot.
    #[must_use]
    pub fn sync(&mut self, token: u64) -> bool {
        let entry = opcode::Fsync::new(self.target()).flags(types::FsyncFlags::DATASYNC).build();
        self.queue(token, entry)
    }

    /// Queues a `fallocate` with the flags `mode`. Returns `false` if there is no free slot.
    #[must_use]
    pub fn fallocate(&mut self, token: u64, mode: u32, offset: u64, len: u64) -> bool {
        let Ok(mode) = i32::try_from(mode) else { return false };
        let entry = opcode::Fallocate::new(self.target(), len).offset(offset).mode(mode).build();
        self.queue(token, entry)
    }

    /// Submits all queued operations in one system call.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` or `EBUSY` if the kernel has no room: call again after taking completions. Operations
    /// that were not submitted stay queued.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.queued > 0 {
            match self.ring.submit() {
                Ok(taken) => {
                    self.queued = self.queued.saturating_sub(taken);
                    if taken == 0 {
                        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Passes every completed operation to `each` and releases its memory. Never blocks.
    pub fn complete(&mut self, mut each: impl FnMut(Completion)) {
        if self.ring.submission().taskrun() {
            // The kernel posts completions when this thread enters it.
            // SAFETY: the call passes no memory.
            let _ = unsafe { self.ring.submitter().enter::<()>(0, 0, ENTER_GETEVENTS, None) };
        }
        let Uring { ring, slots, free, .. } = self;
        for entry in ring.completion() {
            let Ok(number) = u32::try_from(entry.user_data()) else { continue };
            let Some(slot) = slots.get_mut(number as usize).filter(|slot| slot.in_flight) else {
                continue;
            };
            slot.in_flight = false;
            slot.memory.clear();
            slot.ranges.clear();
            free.push(number);
            let result = u32::try_from(entry.result()).map_err(|_| -entry.result());
            each(Completion { token: slot.token, result });
        }
    }

    /// Prepares `count` buffer numbers for registration, all empty.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `EINVAL` before 5.19, `EBUSY` for a second call. Fails with `EACCES` for a ring of
    /// a pool.
    pub fn prepare_registration(&mut self, count: u16) -> io::Result<()> {
        if self.pool.is_some() {
            return Err(io::Error::from_raw_os_error(libc::EACCES));
        }
        self.ring.submitter().register_buffers_sparse(u32::from(count))?;
        self.registered = vec![None; usize::from(count)];
        Ok(())
    }

    /// Registers `memory` as the buffer number `buffer` and replaces its previous memory.
    ///
    /// The kernel holds the pages that are mapped there now, and continues to use them after the mapping changes.
    /// The caller must unregister before it gives the pages back. A missing call is not unsafe, but data read
    /// afterwards is lost.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `ENOMEM` beyond the limit of locked memory, `EFAULT` for pages that it cannot
    /// hold (grants mapped by gntdev).
    pub fn register(&mut self, buffer: u16, memory: &LentSlice) -> io::Result<()> {
        let start = memory.at_mut(0, memory.len()).map_err(io::Error::other)?;
        let range = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: memory.len() };
        let slot =
            self.registered.get_mut(usize::from(buffer)).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is mapped and writable during the call, in which the kernel takes references to its
        // pages. The kernel needs no mapping afterwards.
        unsafe {
            self.ring.submitter().register_buffers_update(u32::from(buffer), &[range], None)
        }?;
        *slot = Some(memory.clone());
        Ok(())
    }

    /// Unregisters the buffer number `buffer`. Operations in flight keep the pages until they complete; later
    /// operations cannot use them.
    pub fn unregister(&mut self, buffer: u16) {
        let Some(slot) = self.registered.get_mut(usize::from(buffer)) else { return };
        if slot.take().is_none() {
            return;
        }
        let none = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty range names no memory. If the kernel refuses the call, `fixed_len` still refuses the
        // number until it is registered again, because it uses our own list.
        let _ = unsafe {
            self.ring.submitter().register_buffers_update(u32::from(buffer), &[none], None)
        };
    }

    /// Returns the length of `piece` if it lies in the memory registered as `buffer`.
    fn fixed_len(&self, piece: &LentSlice, buffer: u16) -> Option<u32> {
        let whole = self.registered.get(usize::from(buffer))?.as_ref()?;
        let first = whole.at(0, whole.len()).ok()?.addr().get();
        let start = piece.at(0, piece.len()).ok()?.addr().get();
        let inside = start >= first && start - first <= whole.len();
        (inside && piece.len() <= whole.len() - (start - first))
            .then(|| u32::try_from(piece.len()).ok())?
    }

    fn queue_vectored(
        &mut self,
        token: u64,
        memory: &mut Vec<LentSlice>,
        entry: impl FnOnce(types::Fd, *const libc::iovec, u32) -> Option<squeue::Entry>,
    ) -> bool {
        if memory.is_empty() || memory.len() > RANGES_MAX {
            return false;
        }
        let Some(number) = self.free.pop() else { return false };
        let target = self.target();
        let slot = &mut self.slots[number as usize];
        core::mem::swap(&mut slot.memory, memory);
        let mut count = 0;
        for piece in &slot.memory {
            // `read` has checked that the slice is writable.
            let Ok(start) = piece.at(0, piece.len()) else { continue };
            let range = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: piece.len() };
            slot.ranges.push(range);
            count += 1;
        }
        // The ranges do not move while the slot is in flight: no code pushes to them (I1).
        match entry(target, slot.ranges.as_ptr(), count) {
            Some(entry) => {
                self.push(number, token, entry);
                true
            }
            None => {
                core::mem::swap(&mut slot.memory, memory);
                slot.ranges.clear();
                self.free.push(number);
                false
            }
        }
    }

    fn queue_with_memory(&mut self, token: u64, piece: &LentSlice, entry: squeue::Entry) -> bool {
        let Some(number) = self.free.pop() else { return false };
        self.slots[number as usize].memory.push(piece.clone());
        self.push(number, token, entry);
        true
    }

    /// Queues an operation without memory.
    fn queue(&mut self, token: u64, entry: squeue::Entry) -> bool {
        let Some(number) = self.free.pop() else { return false };
        self.push(number, token, entry);
        true
    }

    /// Queues an entry; the slot `number` holds its memory, if any (I1).
    fn push(&mut self, number: u32, token: u64, entry: squeue::Entry) {
        let slot = &mut self.slots[number as usize];
        slot.token = token;
        slot.in_flight = true;
        let entry = entry.user_data(u64::from(number));
        // SAFETY: the file is open while this ring lives. By I1 the memory stays valid until the completion, because
        // the slot is in flight from here on.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are at least as many entries as slots, and every queued entry has a slot.
        debug_assert!(pushed.is_ok());
        self.queued += 1;
    }
}

/// Flag `IORING_ENTER_GETEVENTS` of `linux/io_uring.h`.
const ENTER_GETEVENTS: u32 = 1;

impl AsFd for Uring {
    /// Returns a descriptor that is readable while there are completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor stays open while the ring lives.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Uring {
    /// Waits until no operation is in flight. Returns `false` if the ring has failed.
    fn drain(&mut self) -> bool {
        // I1: the kernel may still access the memory of slots in flight.
        while self.free.len() < self.slots.len() {
            let waited = self.ring.submit_and_wait(1);
            if let Err(error) = waited
                && !matches!(errno(&error), libc::EINTR | libc::EAGAIN | libc::EBUSY)
            {
                // The ring has failed. Leak the memory rather than free it under an I/O.
                for slot in self.slots.drain(..).filter(|slot| slot.in_flight) {
                    core::mem::forget(slot);
                }
                return false;
            }
            self.complete(drop);
        }
        true
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let is_usable = self.drain();
        // SAFETY: the ring is not used after this: its only other user, `drain`, has returned.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if let Some(pool) = self.pool.take().filter(|_| is_usable) {
            pool.give_back(ring);
        }
    }
}

// Miri has no io_uring.
#[cfg(test)]
#[cfg(not(miri))]
mod tests;
