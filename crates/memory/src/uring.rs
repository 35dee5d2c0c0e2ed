//! Asynchronous I/O on one file, by io_uring.
//!
//! The kernel reads and writes the memory of an operation after the call that started it has
//! returned. So a [`Uring`] owns what an operation needs: the [`LentSlice`]s (which keep their
//! mappings), and the list of ranges that it showed to the kernel. Both stay where they are until the
//! kernel has said that the operation is over; a ring that is dropped waits for that first. That is
//! the invariant behind every `unsafe` in here:
//!
//! > **I1** What an entry on the submission queue points to belongs to the slot whose number is the
//! > entry's user data, and a slot is emptied only when its completion was taken from the ring.
//!
//! There are as many slots as entries on the submission queue, so that a push always finds room, and
//! the completion queue (twice as long) never overflows.
//!
//! Memory can be registered: the kernel looks its pages up once, and holds them. It holds the pages,
//! not the addresses: see [`Uring::register`].

// #syscall none: a sandboxed process makes no ring; threads serve its disks

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};

use crate::lent::LentSlice;

/// Most operations in flight in one ring.
const DEPTH_MAX: u32 = 4096;

/// Ranges that the kernel takes in one operation.
const RANGES_MAX: usize = 1024;

/// An operation that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// As it was given when the operation was started.
    pub token: u64,
    /// Bytes transferred, zero where there are none to transfer, or the errno.
    pub result: Result<u32, i32>,
}

/// What an operation in flight needs (I1).
struct Slot {
    token: u64,
    in_flight: bool,
    memory: Vec<LentSlice>,
    ranges: Vec<libc::iovec>,
}

// SAFETY: the ranges are addresses for the kernel, made from the slices beside them, which are Send;
// nothing in this process dereferences them.
unsafe impl Send for Slot {}

/// One file, and the I/O that is in flight on it. Used by one thread at a time.
pub struct Uring {
    ring: IoUring,
    /// The ring holds the file by number 0; the handle is for whoever asks.
    file: Arc<OwnedFd>,
    slots: Vec<Slot>,
    /// Numbers of the slots that are free.
    free: Vec<u32>,
    /// Entries that were queued since the kernel was last told.
    queued: u32,
    /// Memory that is registered, by its number.
    registered: Vec<Option<LentSlice>>,
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Uring {
    /// A ring on which `depth` operations on `file` can be in flight.
    ///
    /// # Errors
    ///
    /// The kernel's: `ENOSYS` where it has no io_uring, `EPERM` where the caller may not use it,
    /// `ENOMEM` beyond the limit of locked memory of a kernel older than 5.12.
    pub fn new(file: Arc<OwnedFd>, depth: u32) -> io::Result<Uring> {
        let depth = depth.clamp(1, DEPTH_MAX);
        // Completions are looked at when the thread comes by: no interrupt for each (5.19).
        let ring =
            IoUring::builder().setup_coop_taskrun().setup_taskrun_flag().build(depth).or_else(
                |error| match errno(&error) {
                    libc::EINVAL => IoUring::new(depth),
                    _ => Err(error),
                },
            )?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let empty = |_| Slot { token: 0, in_flight: false, memory: vec![], ranges: vec![] };
        Ok(Uring {
            ring,
            file,
            slots: (0..depth).map(empty).collect(),
            free: (0..depth).rev().collect(),
            queued: 0,
            registered: vec![],
        })
    }

    /// The file.
    pub fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Operations that can still be started.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Reads from `offset` of the file into `memory`, one piece after the other; takes the pieces
    /// out of the vector. `false` if there is no room, or there are more than 1024 pieces, or one of
    /// them is read-only: then nothing was done.
    #[must_use]
    pub fn read(&mut self, token: u64, offset: u64, memory: &mut Vec<LentSlice>) -> bool {
        if memory.iter().any(|piece| !piece.is_writable()) {
            return false;
        }
        self.vectored(token, memory, |at, ranges, count| match count {
            1 => {
                // SAFETY: there is one range.
                let one = unsafe { *ranges };
                let len = u32::try_from(one.iov_len).ok()?;
                Some(opcode::Read::new(at, one.iov_base.cast(), len).offset(offset).build())
            }
            _ => Some(opcode::Readv::new(at, ranges, count).offset(offset).build()),
        })
    }

    /// Writes `memory` to `offset` of the file; as [`Uring::read`]. `sync`: over only when the bytes
    /// would survive a loss of power.
    #[must_use]
    pub fn write(
        &mut self,
        token: u64,
        offset: u64,
        memory: &mut Vec<LentSlice>,
        sync: bool,
    ) -> bool {
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        self.vectored(token, memory, |at, ranges, count| match count {
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

    /// As [`Uring::read`], of one piece that lies in the memory registered as `buffer`. `false` also
    /// when it does not.
    #[must_use]
    pub fn read_fixed(&mut self, token: u64, offset: u64, piece: &LentSlice, buffer: u16) -> bool {
        let Some(len) = self.fixed_len(piece, buffer) else { return false };
        let Ok(start) = piece.at_mut(0, piece.len()) else { return false };
        let entry = opcode::ReadFixed::new(types::Fixed(0), start.as_ptr(), len, buffer);
        self.hold_one(token, piece, entry.offset(offset).build())
    }

    /// As [`Uring::write`], of one piece that lies in the memory registered as `buffer`. `false` also
    /// when it does not.
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
        let entry = opcode::WriteFixed::new(types::Fixed(0), start, len, buffer);
        self.hold_one(token, piece, entry.offset(offset).rw_flags(flags).build())
    }

    /// Makes everything that was written durable (`fdatasync`). `false` if there is no room.
    #[must_use]
    pub fn sync(&mut self, token: u64) -> bool {
        let entry = opcode::Fsync::new(types::Fixed(0)).flags(types::FsyncFlags::DATASYNC).build();
        self.hold(token, entry)
    }

    /// `fallocate` with these flags. `false` if there is no room.
    #[must_use]
    pub fn fallocate(&mut self, token: u64, mode: u32, offset: u64, len: u64) -> bool {
        let Ok(mode) = i32::try_from(mode) else { return false };
        let entry = opcode::Fallocate::new(types::Fixed(0), len).offset(offset).mode(mode).build();
        self.hold(token, entry)
    }

    /// Starts what was queued: one system call.
    ///
    /// # Errors
    ///
    /// `EAGAIN` and `EBUSY` when the kernel has no room just now: call again after taking
    /// completions. What was queued stays so.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.queued > 0 {
            match self.ring.submit() {
                Ok(taken) => {
                    self.queued = self.queued.saturating_sub(u32::try_from(taken).unwrap_or(0));
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

    /// Hands over what is over, and lets go of its memory. Never blocks.
    pub fn complete(&mut self, mut each: impl FnMut(Completion)) {
        if self.ring.submission().taskrun() {
            // Completions wait for this thread to come into the kernel.
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

    /// Prepares for `count` registered memories, each empty at first.
    ///
    /// # Errors
    ///
    /// The kernel's (`EINVAL` before 5.19), and `EBUSY` the second time.
    pub fn prepare_registration(&mut self, count: u16) -> io::Result<()> {
        self.ring.submitter().register_buffers_sparse(u32::from(count))?;
        self.registered = vec![None; usize::from(count)];
        Ok(())
    }

    /// Registers `memory` under the number `buffer`, in place of what had that number.
    ///
    /// The kernel holds the pages that lie there now, and goes on using them whatever is mapped
    /// there later. It is the caller's to unregister before the pages are given back: nothing is
    /// unsafe about it otherwise, but what is read arrives nowhere.
    ///
    /// # Errors
    ///
    /// The kernel's: `ENOMEM` over the limit of locked memory, `EFAULT` for pages that it cannot hold
    /// (grants mapped by gntdev).
    pub fn register(&mut self, buffer: u16, memory: &LentSlice) -> io::Result<()> {
        let start = memory.at_mut(0, memory.len()).map_err(io::Error::other)?;
        let range = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: memory.len() };
        let slot =
            self.registered.get_mut(usize::from(buffer)).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is mapped and writable during the call, in which the kernel takes
        // references to its pages. It needs no mapping afterwards.
        unsafe {
            self.ring.submitter().register_buffers_update(u32::from(buffer), &[range], None)
        }?;
        *slot = Some(memory.clone());
        Ok(())
    }

    /// Empties the number `buffer`. I/O in flight keeps the pages until it is over; none that starts
    /// later gets them.
    pub fn unregister(&mut self, buffer: u16) {
        let Some(slot) = self.registered.get_mut(usize::from(buffer)) else { return };
        if slot.take().is_none() {
            return;
        }
        let none = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty range names no memory. Should the kernel refuse, the number is not used
        // again by us until it is registered anew: `fixed_len` looks at our own list.
        let _ = unsafe {
            self.ring.submitter().register_buffers_update(u32::from(buffer), &[none], None)
        };
    }

    /// Bytes of `piece`, if it lies in what is registered as `buffer`.
    fn fixed_len(&self, piece: &LentSlice, buffer: u16) -> Option<u32> {
        let whole = self.registered.get(usize::from(buffer))?.as_ref()?;
        let first = whole.at(0, whole.len()).ok()?.addr().get();
        let start = piece.at(0, piece.len()).ok()?.addr().get();
        let inside = start >= first && start - first <= whole.len();
        (inside && piece.len() <= whole.len() - (start - first))
            .then(|| u32::try_from(piece.len()).ok())?
    }

    fn vectored(
        &mut self,
        token: u64,
        memory: &mut Vec<LentSlice>,
        entry: impl FnOnce(types::Fixed, *const libc::iovec, u32) -> Option<squeue::Entry>,
    ) -> bool {
        if memory.is_empty() || memory.len() > RANGES_MAX {
            return false;
        }
        let Some(number) = self.free.pop() else { return false };
        let slot = &mut self.slots[number as usize];
        core::mem::swap(&mut slot.memory, memory);
        for piece in &slot.memory {
            // The slice is not asked whether it may be written: `read` did.
            let Ok(start) = piece.at(0, piece.len()) else { continue };
            let range = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: piece.len() };
            slot.ranges.push(range);
        }
        // The ranges are not moved while the slot is in flight: nothing pushes to them (I1).
        let count = u32::try_from(slot.ranges.len()).unwrap_or(0);
        match entry(types::Fixed(0), slot.ranges.as_ptr(), count) {
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

    fn hold_one(&mut self, token: u64, piece: &LentSlice, entry: squeue::Entry) -> bool {
        let Some(number) = self.free.pop() else { return false };
        self.slots[number as usize].memory.push(piece.clone());
        self.push(number, token, entry);
        true
    }

    /// For operations that name no memory.
    fn hold(&mut self, token: u64, entry: squeue::Entry) -> bool {
        let Some(number) = self.free.pop() else { return false };
        self.push(number, token, entry);
        true
    }

    /// Queues an entry whose memory, if any, the slot `number` has (I1).
    fn push(&mut self, number: u32, token: u64, entry: squeue::Entry) {
        let slot = &mut self.slots[number as usize];
        slot.token = token;
        slot.in_flight = true;
        let entry = entry.user_data(u64::from(number));
        // SAFETY: the file is registered with this ring, and by I1 the memory stays valid until the
        // completion, because the slot is in flight from here on.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are at least as many entries as slots, and what is on the queue has a slot.
        debug_assert!(pushed.is_ok());
        self.queued += 1;
    }
}

/// `IORING_ENTER_GETEVENTS` (`io_uring.h`).
const ENTER_GETEVENTS: u32 = 1;

impl AsFd for Uring {
    /// Readable while there are completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as the ring is.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // I1: the kernel may still use what the slots have.
        while self.free.len() < self.slots.len() {
            let waited = self.ring.submit_and_wait(1);
            if let Err(error) = waited
                && !matches!(errno(&error), libc::EINTR | libc::EAGAIN | libc::EBUSY)
            {
                // The ring cannot be asked. Rather lose the memory than free it under an I/O.
                for slot in self.slots.drain(..).filter(|slot| slot.in_flight) {
                    core::mem::forget(slot);
                }
                return;
            }
            self.complete(drop);
        }
        let _ = self.ring.submitter().unregister_files();
    }
}

#[cfg(test)]
mod tests;
