//! Mappings of shared files, each an owned value.

// #syscall all mmap 2-PROT_EXEC: mapping lent memory and rings; reserving addresses
// #syscall all munmap: giving mappings back
// #syscall all madvise 2=MADV_NOHUGEPAGE: lent memory stays in small pages, of which one can be taken back
// #syscall all madvise 2=MADV_DONTDUMP: lent memory stays out of core files
// #syscall all madvise 2=MADV_POPULATE_READ: touching pages ahead of use
// #syscall all madvise 2=MADV_POPULATE_WRITE: touching pages ahead of use

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

use crate::PAGE_SIZE;
use crate::lent::{LentSlice, OutOfRange};

/// What this side may do with a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Read only.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

impl Protection {
    fn flags(self) -> ProtFlags {
        match self {
            Protection::ReadOnly => ProtFlags::READ,
            Protection::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// A range of address space that is unmapped when dropped.
pub(crate) struct Reservation {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

impl Reservation {
    /// Fresh private memory, zeroed, readable and writable.
    pub(crate) fn private(len: usize) -> io::Result<Reservation> {
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                len,
                Protection::ReadWrite.flags(),
                MapFlags::PRIVATE,
            )
        }?;
        Ok(Reservation { start: nonnull(start)?, len })
    }
}

// SAFETY: a reservation is an address and a length; it is never dereferenced by itself.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value and no LentSlice into it is left: each holds a
        // reference to the owner that holds this value.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

fn nonnull(ptr: *mut c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("the kernel mapped address zero"))
}

/// A mapping of a whole range of a file, shared with its other holders.
pub struct Mapping {
    area: Arc<Reservation>,
    protection: Protection,
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` (both multiples of the page size), shared.
    ///
    /// The caller has checked that the file cannot shrink (seals); otherwise a later access could
    /// raise SIGBUS.
    ///
    /// # Errors
    ///
    /// The kernel's; `len` zero is invalid.
    pub fn new(
        file: impl AsFd,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing.
        let start = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                len,
                protection.flags(),
                MapFlags::SHARED,
                file,
                offset,
            )
        }?;
        Ok(Mapping { area: Arc::new(Reservation { start: nonnull(start)?, len }), protection })
    }

    /// Private memory of `len` bytes (a multiple of the page size), zeroed, aligned to a page: where
    /// the kernel wants aligned memory, and for what is handed on as if it were lent.
    ///
    /// # Errors
    ///
    /// The kernel's; `len` zero is invalid.
    pub fn private(len: usize) -> io::Result<Mapping> {
        let area = Arc::new(Reservation::private(len)?);
        Ok(Mapping { area, protection: Protection::ReadWrite })
    }

    /// A handle to the whole mapping.
    pub fn lent(&self) -> LentSlice {
        // SAFETY: the reservation maps exactly this range with this protection, the handle keeps
        // it, and nothing makes a reference into it.
        unsafe {
            LentSlice::from_raw(
                Arc::clone(&self.area) as _,
                self.area.start,
                self.area.len,
                self.protection,
            )
        }
    }
}

impl Mapping {
    /// A handle to `len` bytes from `offset` on, kept mapped by `owner`, which must hold this
    /// mapping: for a device that has to be told when the last handle is gone.
    ///
    /// # Errors
    ///
    /// [`OutOfRange::Bounds`] when the part does not lie inside.
    ///
    /// # Safety
    ///
    /// `owner` keeps this mapping alive.
    pub unsafe fn part(
        &self,
        owner: Arc<dyn crate::Owner>,
        offset: usize,
        len: usize,
    ) -> Result<LentSlice, OutOfRange> {
        let size = self.area.len;
        if offset > size || len > size - offset {
            return Err(OutOfRange::Bounds { offset, len, size });
        }
        // SAFETY: the offset was just checked to lie in the mapping.
        let start = unsafe { self.area.start.add(offset) };
        // SAFETY: the range lies in the mapping, whose protection this is, and the caller's owner
        // keeps it mapped; nothing makes a reference into it.
        Ok(unsafe { LentSlice::from_raw(owner, start, len, self.protection) })
    }
}

/// Reserved address space into which single pages are mapped and from which they are removed in
/// batches, so that a batch of any number of pages costs one removal.
#[derive(Clone)]
pub struct Window {
    shared: Arc<WindowShared>,
}

struct WindowShared {
    area: Reservation,
    /// Page ranges not in use: (first, count). Short: a window sees few batches at a time.
    free: Mutex<Vec<(usize, usize)>>,
}

impl Window {
    /// Reserves room for `pages` pages.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new(pages: usize) -> io::Result<Window> {
        let len = pages * PAGE_SIZE;
        // SAFETY: a fresh inaccessible mapping disturbs nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let area = Reservation { start: nonnull(start)?, len };
        let free = Mutex::new(vec![(0, pages)]);
        Ok(Window { shared: Arc::new(WindowShared { area, free }) })
    }

    /// Takes room for `pages` pages, or `None` when no such run is free.
    pub fn batch(&self, pages: usize) -> Option<WindowBatch> {
        let mut free = self.shared.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.iter().position(|&(_, count)| count >= pages)?;
        let (first, count) = free[at];
        if count == pages {
            free.swap_remove(at);
        } else {
            free[at] = (first + pages, count - pages);
        }
        Some(WindowBatch { window: Arc::clone(&self.shared), first, pages, used: 0 })
    }
}

/// Pages of a [`Window`], mapped one after the other and removed together when dropped.
pub struct WindowBatch {
    window: Arc<WindowShared>,
    first: usize,
    pages: usize,
    used: usize,
}

impl WindowBatch {
    fn address(&self, page: usize) -> *mut c_void {
        debug_assert!(page <= self.pages);
        // SAFETY: first + page <= the window's pages, so the address stays in the reservation.
        unsafe { self.window.area.start.as_ptr().add((self.first + page) * PAGE_SIZE).cast() }
    }

    /// Maps `count` pages of `file` at `offset` behind those already mapped; returns their place
    /// in the batch.
    ///
    /// # Errors
    ///
    /// The kernel's, or `InvalidInput` beyond the room that was taken.
    pub fn map(
        &mut self,
        file: impl AsFd,
        offset: u64,
        count: usize,
        protection: Protection,
    ) -> io::Result<usize> {
        if count == 0 || count > self.pages - self.used {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // What is mapped to be written is written at once: one call brings all of it in, in place of a
        // fault for each page. (For what is read the kernel brings in neighbours by itself.)
        let populate = match protection {
            Protection::ReadOnly => MapFlags::empty(),
            Protection::ReadWrite => MapFlags::POPULATE,
        };
        // SAFETY: MAP_FIXED replaces only pages of our own reservation that this batch owns and to
        // which no handle exists yet (they lie behind `used`).
        unsafe {
            rustix::mm::mmap(
                self.address(self.used),
                count * PAGE_SIZE,
                protection.flags(),
                MapFlags::SHARED | MapFlags::FIXED | populate,
                file,
                offset,
            )
        }?;
        let place = self.used;
        self.used += count;
        Ok(place)
    }

    /// A handle to the page at `place`, kept mapped by `owner`, which must hold this batch.
    ///
    /// # Safety
    ///
    /// The page was mapped by [`WindowBatch::map`] with at least `protection`, and `owner` keeps
    /// this batch alive.
    pub unsafe fn page(
        &self,
        owner: Arc<dyn crate::Owner>,
        place: usize,
        protection: Protection,
    ) -> Option<LentSlice> {
        if place >= self.used {
            return None;
        }
        let start = NonNull::new(self.address(place).cast())?;
        // SAFETY: by the caller's contract.
        Some(unsafe { LentSlice::from_raw(owner, start, PAGE_SIZE, protection) })
    }
}

impl Drop for WindowBatch {
    fn drop(&mut self) {
        if self.used > 0 {
            // SAFETY: replaces the batch's own pages by inaccessible ones; every handle into them
            // held the owner of this batch, so none is left.
            let hidden = unsafe {
                rustix::mm::mmap_anonymous(
                    self.address(0),
                    self.used * PAGE_SIZE,
                    ProtFlags::empty(),
                    MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
                )
            };
            if hidden.is_err() {
                // The pages are still mapped: their room must not be handed out again.
                return;
            }
        }
        let mut free = self.window.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push((self.first, self.pages));
        free.sort_unstable();
        free.dedup_by(|next, run| {
            let adjoins = run.0 + run.1 == next.0;
            if adjoins {
                run.1 += next.1;
            }
            adjoins
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(pages: u64) -> std::os::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, pages * 4096).unwrap();
        fd
    }

    #[test]
    fn two_mappings_of_a_file_share_their_bytes() {
        let fd = file(2);
        let a = Mapping::new(&fd, 0, 8192, Protection::ReadWrite).unwrap().lent();
        let b = Mapping::new(&fd, 4096, 4096, Protection::ReadOnly).unwrap().lent();
        a.copy_from(4096 + 5, b"abc").unwrap();
        assert_eq!(b.fetch::<3>(5).unwrap().into_unchecked(), *b"abc");
        assert_eq!(b.copy_from(0, b"x"), Err(crate::OutOfRange::ReadOnly));
    }

    #[test]
    fn window_room_comes_back_and_merges() {
        let fd = file(4);
        let window = Window::new(4).unwrap();
        for _ in 0..50 {
            let mut one = window.batch(2).unwrap();
            let mut two = window.batch(2).unwrap();
            assert!(window.batch(1).is_none());
            one.map(&fd, 0, 2, Protection::ReadOnly).unwrap();
            assert!(one.map(&fd, 0, 1, Protection::ReadOnly).is_err());
            two.map(&fd, 8192, 1, Protection::ReadWrite).unwrap();
            drop(one);
            drop(two);
            assert!(window.batch(4).is_some());
        }
    }
}
