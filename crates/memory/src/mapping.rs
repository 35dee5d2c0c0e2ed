//! Mappings of shared files, and reserved address space, as owned values.

// #syscall all mmap 2-PROT_EXEC: mapping lent memory and rings; reserving addresses
// #syscall all munmap: giving mappings back
// #syscall all madvise 2=MADV_DONTDUMP: lent memory stays out of core files
// #syscall all madvise 2=MADV_POPULATE_READ: touching pages ahead of use
// #syscall all madvise 2=MADV_POPULATE_WRITE: touching pages ahead of use

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::lent::{LentSlice, OutOfRange, Owner};
use crate::page::PAGE_SIZE;

/// Length of a huge page in bytes: what x86-64, and aarch64 with pages of 4 KiB, map by one entry.
pub const HUGE_PAGE: usize = 2 << 20;

/// Access of this side to a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    ReadOnly,
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

/// Address range that is unmapped on drop.
pub(crate) struct MappedRange {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

impl MappedRange {
    /// Maps fresh private memory: zeroed, readable and writable.
    pub(crate) fn private(len: usize) -> io::Result<MappedRange> {
        // SAFETY: a fresh mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                len,
                Protection::ReadWrite.flags(),
                MapFlags::PRIVATE,
            )
        }?;
        MappedRange::owned(start, len)
    }

    /// Reserves `len` bytes of address space, which nobody can access.
    fn reserved(len: usize) -> io::Result<MappedRange> {
        // SAFETY: a fresh inaccessible mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        MappedRange::owned(start, len)
    }

    /// Unmaps all but `len` bytes from `skip` on, which the caller takes over.
    fn cut(self, skip: usize, len: usize) -> io::Result<()> {
        let end = skip + len;
        let (start, rest) = (self.start.as_ptr(), self.len - end);
        core::mem::forget(self);
        for (from, bytes) in [(0, skip), (end, rest)] {
            if bytes > 0 {
                // SAFETY: the range belonged to this value, which handed out no reference to it.
                unsafe { rustix::mm::munmap(start.add(from).cast(), bytes) }?;
            }
        }
        Ok(())
    }

    /// Takes over a range that was just mapped. Every access to lent memory goes through such a range, so the
    /// copy routine is chosen here.
    fn owned(start: *mut c_void, len: usize) -> io::Result<MappedRange> {
        crate::copy::choose();
        let zero = || io::Error::other("the kernel mapped address zero");
        Ok(MappedRange { start: NonNull::new(start.cast()).ok_or_else(zero)?, len })
    }
}

// SAFETY: the value is an address and a length; its methods never dereference it.
unsafe impl Send for MappedRange {}
// SAFETY: as above.
unsafe impl Sync for MappedRange {}

impl Drop for MappedRange {
    fn drop(&mut self) {
        // SAFETY: this value mapped the range, and no LentSlice into it is left: each holds a reference to the
        // owner that holds this value.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Shared mapping of a file range.
pub struct Mapping {
    area: Arc<MappedRange>,
    protection: Protection,
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` (both multiples of the page size), shared.
    ///
    /// The caller has checked that the file cannot shrink (seals). Otherwise a later access could raise
    /// SIGBUS.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; a `len` of zero is invalid.
    pub fn new(
        file: impl AsFd,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice affects no other memory.
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
        Ok(Mapping { area: Arc::new(MappedRange::owned(start, len)?), protection })
    }

    /// Maps the first `len` bytes of `file` as [`Mapping::new`] does, at a multiple of [`HUGE_PAGE`]. So the kernel can
    /// map the huge pages of the file, if it has any, as such.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; a `len` of zero is invalid.
    pub fn whole(file: impl AsFd, len: usize, protection: Protection) -> io::Result<Mapping> {
        let room = len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        if len < HUGE_PAGE || !len.is_multiple_of(PAGE_SIZE) {
            return Mapping::new(file, 0, len, protection);
        }
        let reserved = MappedRange::reserved(room)?;
        let skip =
            reserved.start.addr().get().next_multiple_of(HUGE_PAGE) - reserved.start.addr().get();
        // SAFETY: `skip` is less than HUGE_PAGE, so `len` bytes from there on lie in the reservation.
        let start = unsafe { reserved.start.add(skip) };
        // SAFETY: MAP_FIXED replaces only addresses that were reserved above and that nothing else knows.
        unsafe {
            rustix::mm::mmap(
                start.as_ptr().cast(),
                len,
                protection.flags(),
                MapFlags::SHARED | MapFlags::FIXED,
                file,
                0,
            )
        }?;
        reserved.cut(skip, len)?;
        let area = Arc::new(MappedRange::owned(start.as_ptr().cast(), len)?);
        Ok(Mapping { area, protection })
    }

    /// Asks the kernel to back the file by huge pages where this mapping touches it first. The kernel ignores the
    /// advice where the system's settings do not allow it.
    ///
    /// # Errors
    ///
    /// Fails on a kernel without huge pages.
    pub fn advise_huge(&self) -> io::Result<()> {
        let start = self.area.start.as_ptr().cast();
        // SAFETY: the advice is about a mapping of this value, and changes no content.
        unsafe { rustix::mm::madvise(start, self.area.len, Advice::LinuxHugepage) }?;
        Ok(())
    }

    /// Maps `len` bytes (a multiple of the page size) of zeroed private memory, aligned to a page. It serves
    /// system calls that need aligned memory, and callers that need private memory as a [`LentSlice`].
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; a `len` of zero is invalid.
    pub fn private(len: usize) -> io::Result<Mapping> {
        let area = Arc::new(MappedRange::private(len)?);
        Ok(Mapping { area, protection: Protection::ReadWrite })
    }

    /// Returns a handle to the whole mapping.
    pub fn lent(&self) -> LentSlice {
        // SAFETY: the mapping has exactly this range and protection, the handle keeps it alive, and no code makes
        // a reference into it.
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
    /// Returns a handle to `len` bytes from `offset` on. `owner` keeps them mapped and must hold this mapping. A
    /// device that must know when the last handle is gone passes its own owner.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the part does not lie inside.
    ///
    /// # Safety
    ///
    /// `owner` must keep this mapping alive.
    pub unsafe fn part(
        &self,
        owner: Arc<dyn Owner>,
        offset: usize,
        len: usize,
    ) -> Result<LentSlice, OutOfRange> {
        let size = self.area.len;
        if offset > size || len > size - offset {
            return Err(OutOfRange::Bounds { offset, len, size });
        }
        // SAFETY: the check above shows that the offset lies in the mapping.
        let start = unsafe { self.area.start.add(offset) };
        // SAFETY: the range lies in the mapping, whose protection this is. The caller's owner keeps it mapped, and
        // no code makes a reference into it.
        Ok(unsafe { LentSlice::from_raw(owner, start, len, self.protection) })
    }
}

/// Address reservation: reserved virtual address space for mappings of single pages. Pages are mapped one by
/// one and removed in batches, so a batch of any size costs one removal.
#[derive(Clone)]
pub struct AddressReservation {
    shared: Arc<ReservationShared>,
}

struct ReservationShared {
    area: MappedRange,
    /// Free page ranges: (first, count). The list is short, because few batches exist at a time.
    free: Mutex<Vec<(usize, usize)>>,
}

impl AddressReservation {
    /// Reserves address space for `pages` pages.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn new(pages: usize) -> io::Result<AddressReservation> {
        let area = MappedRange::reserved(pages * PAGE_SIZE)?;
        let free = Mutex::new(vec![(0, pages)]);
        Ok(AddressReservation { shared: Arc::new(ReservationShared { area, free }) })
    }

    /// Allocates a run of `pages` pages; returns `None` if no such run is free.
    pub fn batch(&self, pages: usize) -> Option<ReservedPages> {
        let mut free = self.shared.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.iter().position(|&(_, count)| count >= pages)?;
        let (first, count) = free[at];
        if count == pages {
            free.swap_remove(at);
        } else {
            free[at] = (first + pages, count - pages);
        }
        Some(ReservedPages { reservation: Arc::clone(&self.shared), first, pages, used: 0 })
    }
}

/// Run of pages in an [`AddressReservation`], mapped in order and removed together on drop.
pub struct ReservedPages {
    reservation: Arc<ReservationShared>,
    first: usize,
    pages: usize,
    used: usize,
}

impl ReservedPages {
    fn address(&self, page: usize) -> *mut c_void {
        debug_assert!(page <= self.pages);
        // SAFETY: first + page is at most the reservation's number of pages, so the address stays inside.
        unsafe { self.reservation.area.start.as_ptr().add((self.first + page) * PAGE_SIZE).cast() }
    }

    /// Maps `count` pages of `file` at `offset` after the pages already mapped. Returns the index of the first in
    /// the batch.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, or `InvalidInput` beyond the allocated run.
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
        // Writable pages are written at once: one call populates all of them, instead of a fault for each page.
        // (For readable pages the kernel maps neighbours by itself.)
        let populate = match protection {
            Protection::ReadOnly => MapFlags::empty(),
            Protection::ReadWrite => MapFlags::POPULATE,
        };
        // SAFETY: MAP_FIXED replaces only pages of this batch in our own reservation. No handle to them exists
        // yet: they lie behind `used`.
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

    /// Returns a handle to the page at index `place`. `owner` keeps it mapped and must hold this batch.
    ///
    /// # Safety
    ///
    /// [`ReservedPages::map`] mapped the page with at least `protection`, and `owner` must keep this batch alive.
    pub unsafe fn page(
        &self,
        owner: Arc<dyn Owner>,
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

impl Drop for ReservedPages {
    fn drop(&mut self) {
        if self.used > 0 {
            // SAFETY: replaces the batch's own pages by inaccessible ones. Every handle into them held the owner of
            // this batch, so none is left.
            let hidden = unsafe {
                rustix::mm::mmap_anonymous(
                    self.address(0),
                    self.used * PAGE_SIZE,
                    ProtFlags::empty(),
                    MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
                )
            };
            if hidden.is_err() {
                // The pages are still mapped, so their addresses must not be allocated again.
                return;
            }
        }
        let mut free = self.reservation.free.lock().unwrap_or_else(PoisonError::into_inner);
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
    #[cfg_attr(miri, ignore = "miri has no files in memory")]
    fn mappings_of_same_file_share_bytes() {
        let fd = file(2);
        let a = Mapping::new(&fd, 0, 8192, Protection::ReadWrite).unwrap().lent();
        let b = Mapping::new(&fd, 4096, 4096, Protection::ReadOnly).unwrap().lent();
        a.copy_from(4096 + 5, b"abc").unwrap();
        assert_eq!(b.fetch::<3>(5).unwrap().into_unchecked(), *b"abc");
        assert_eq!(b.copy_from(0, b"x"), Err(crate::OutOfRange::ReadOnly));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files in memory")]
    fn whole_mapping_begins_at_multiple_of_huge_page() {
        for pages in [1u64, 511, 512, 513, 1024] {
            let fd = file(pages);
            let len = usize::try_from(pages).unwrap() * PAGE_SIZE;
            let whole = Mapping::whole(&fd, len, Protection::ReadWrite).unwrap();
            let start = whole.area.start.addr().get();
            assert!(len < HUGE_PAGE || start.is_multiple_of(HUGE_PAGE), "{pages}: {start:#x}");
            // Both ends belong to the file, and the ranges around were given back without harm to them.
            let (lent, other) =
                (whole.lent(), Mapping::new(&fd, 0, len, Protection::ReadOnly).unwrap());
            lent.copy_from(0, b"first").unwrap();
            lent.copy_from(len - 4, b"last").unwrap();
            assert_eq!(lent.len(), len);
            assert_eq!(other.lent().fetch::<5>(0).unwrap().into_unchecked(), *b"first");
            assert_eq!(other.lent().fetch::<4>(len - 4).unwrap().into_unchecked(), *b"last");
        }
        assert!(Mapping::whole(file(1), 0, Protection::ReadOnly).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files in memory")]
    fn dropped_batches_are_merged_and_reusable() {
        let fd = file(4);
        let reservation = AddressReservation::new(4).unwrap();
        for _ in 0..50 {
            let mut one = reservation.batch(2).unwrap();
            let mut two = reservation.batch(2).unwrap();
            assert!(reservation.batch(1).is_none());
            one.map(&fd, 0, 2, Protection::ReadOnly).unwrap();
            assert!(one.map(&fd, 0, 1, Protection::ReadOnly).is_err());
            two.map(&fd, 8192, 1, Protection::ReadWrite).unwrap();
            drop(one);
            drop(two);
            assert!(reservation.batch(4).is_some());
        }
    }
}
