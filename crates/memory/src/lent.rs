//! Handle to lent memory, and marker for unvalidated values.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use crate::copy::{copy_racing, prefetch_read, prefetch_write};
use crate::device::{DeviceAccess, DeviceRange, DeviceRegion};
use crate::mapping::Protection;

/// Owner that keeps lent memory mapped. Dropping the last reference removes the mapping.
pub trait Owner: Send + Sync {}

impl<T: Send + Sync> Owner for T {}

/// Access outside the slice, unaligned, or writing to read-only memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OutOfRange {
    /// Range that ends beyond the slice.
    #[error("{len} bytes at {offset} do not lie inside {size} bytes of lent memory")]
    Bounds {
        /// First byte of the access.
        offset: usize,
        /// Bytes of the access.
        len: usize,
        /// Bytes of the slice.
        size: usize,
    },
    /// Atomic access that is not aligned to its width.
    #[error("an atomic access of {width} bytes at {offset} is not aligned")]
    Unaligned {
        offset: usize,
        /// Width of the access in bytes.
        width: usize,
    },
    /// Memory that the peer lent read-only.
    #[error("lent memory is read-only here")]
    ReadOnly,
}

/// Value fetched once from lent memory and not yet validated.
#[derive(Clone, Copy, Debug)]
pub struct Raw<T>(T);

impl<T> Raw<T> {
    /// Marks `value`, which was fetched once, as not validated.
    pub fn new(value: T) -> Raw<T> {
        Raw(value)
    }

    /// Returns the bytes or fields as the peer wrote them. The caller validates before use.
    pub fn into_unchecked(self) -> T {
        self.0
    }
}

/// Owned handle to a range of lent memory. Clones share the mapping.
#[derive(Clone)]
pub struct LentSlice {
    owner: Arc<dyn Owner>,
    start: NonNull<u8>,
    len: usize,
    protection: Protection,
}

// SAFETY: the pointer is only dereferenced through copies and atomics that allow races, and the
// owner that keeps it mapped is itself Send + Sync.
unsafe impl Send for LentSlice {}
// SAFETY: as above; all access takes &self and is race-tolerant.
unsafe impl Sync for LentSlice {}

impl fmt::Debug for LentSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentSlice({} bytes, {:?})", self.len, self.protection)
    }
}

impl LentSlice {
    /// Creates a handle to `len` bytes at `start`.
    ///
    /// # Safety
    ///
    /// The range must stay mapped with at least `protection` while `owner` lives, and no Rust
    /// reference to any of it may exist during that time.
    pub unsafe fn from_raw(
        owner: Arc<dyn Owner>,
        start: NonNull<u8>,
        len: usize,
        protection: Protection,
    ) -> LentSlice {
        LentSlice { owner, start, len, protection }
    }

    /// Creates zeroed private memory with the interface of lent memory, for tests and models of a peer.
    pub fn anonymous(len: usize) -> LentSlice {
        struct Words(Box<[AtomicU64]>);
        let words = Words((0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect());
        let owner = Arc::new(words);
        let start = NonNull::from(&*owner.0).cast::<u8>();
        LentSlice { owner, start, len, protection: Protection::ReadWrite }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the slice has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `true` if this side may write.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.protection == Protection::ReadWrite
    }

    /// Returns `true` if the slice starts at a multiple of `alignment` bytes.
    pub fn is_aligned_to(&self, alignment: usize) -> bool {
        self.start.addr().get().is_multiple_of(alignment.max(1))
    }

    /// Returns a handle to a part of this slice.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the part does not lie inside.
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> Result<LentSlice, OutOfRange> {
        let start = self.at(offset, len)?;
        Ok(LentSlice { owner: Arc::clone(&self.owner), start, len, protection: self.protection })
    }

    /// Turns the handle into one to a part of the slice. Unlike [`LentSlice::slice`] it does not count the owner again,
    /// which is an atomic operation.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the part does not lie inside.
    #[inline]
    pub fn into_slice(self, offset: usize, len: usize) -> Result<LentSlice, OutOfRange> {
        let start = self.at(offset, len)?;
        Ok(LentSlice { start, len, ..self })
    }

    /// Copies bytes at `offset` into private memory.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the range does not lie inside.
    #[inline]
    pub fn copy_to(&self, offset: usize, private: &mut [u8]) -> Result<(), OutOfRange> {
        let src = self.at(offset, private.len())?;
        // SAFETY: `at` checked the lent range, which the owner keeps mapped; `private` is an
        // exclusive reference, so the two cannot overlap.
        unsafe { copy_racing(src.as_ptr(), private.as_mut_ptr(), private.len()) };
        Ok(())
    }

    /// Copies private bytes to `offset`.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the range does not lie inside or the slice is read-only.
    #[inline]
    pub fn copy_from(&self, offset: usize, private: &[u8]) -> Result<(), OutOfRange> {
        let dst = self.at_mut(offset, private.len())?;
        // SAFETY: `at_mut` checked range and protection; no Rust reference points into lent
        // memory, so `private` lies elsewhere.
        unsafe { copy_racing(private.as_ptr(), dst.as_ptr(), private.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `src_offset` of another lent slice to `offset` of this one. If the ranges
    /// overlap, the resulting content is unspecified.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if either range does not lie inside or this slice is read-only.
    #[inline]
    pub fn copy_from_lent(
        &self,
        offset: usize,
        src: &LentSlice,
        src_offset: usize,
        len: usize,
    ) -> Result<(), OutOfRange> {
        let dst = self.at_mut(offset, len)?;
        let src = src.at(src_offset, len)?;
        // SAFETY: both ranges were checked. `copy_racing` allows overlap: it touches only these ranges, and
        // the content is then unspecified, as after any race.
        unsafe { copy_racing(src.as_ptr(), dst.as_ptr(), len) };
        Ok(())
    }

    /// Hints the processor to load `len` bytes at `offset` into its cache for reading. Reads no byte; a range
    /// outside the slice is ignored.
    #[inline]
    pub fn prefetch(&self, offset: usize, len: usize) {
        if let Ok(at) = self.at(offset, len) {
            prefetch_read(at.as_ptr(), len);
        }
    }

    /// Hints as [`LentSlice::prefetch`] does, for writing.
    #[inline]
    pub fn prefetch_for_writing(&self, offset: usize, len: usize) {
        if let Ok(at) = self.at_mut(offset, len) {
            prefetch_write(at.as_ptr(), len);
        }
    }

    /// Fetches `N` bytes at `offset` once, as a raw value.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the range does not lie inside.
    #[inline]
    pub fn fetch<const N: usize>(&self, offset: usize) -> Result<Raw<[u8; N]>, OutOfRange> {
        let mut bytes = [0; N];
        self.copy_to(offset, &mut bytes)?;
        Ok(Raw(bytes))
    }

    /// Fills `len` bytes at `offset` with zeros.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the range does not lie inside or the slice is read-only.
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), OutOfRange> {
        const ZEROS: [u8; 4096] = [0; 4096];
        self.at_mut(offset, len)?;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROS.len());
            self.copy_from(offset + done, &ZEROS[..step])?;
            done += step;
        }
        Ok(())
    }

    /// Loads the u16 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside or is not aligned.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> Result<u16, OutOfRange> {
        Ok(self.atomic_u16(self.at(offset, 2)?, offset)?.load(order))
    }

    /// Stores the u16 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside, is not aligned, or the slice is read-only.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) -> Result<(), OutOfRange> {
        self.atomic_u16(self.at_mut(offset, 2)?, offset)?.store(value, order);
        Ok(())
    }

    /// Loads the u32 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside or is not aligned.
    #[inline]
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Result<u32, OutOfRange> {
        Ok(self.atomic_u32(self.at(offset, 4)?, offset)?.load(order))
    }

    /// Stores the u32 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside, is not aligned, or the slice is read-only.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Result<(), OutOfRange> {
        self.atomic_u32(self.at_mut(offset, 4)?, offset)?.store(value, order);
        Ok(())
    }

    /// Adds to the u32 at `offset`, wrapping, and returns the old value.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LentSlice::store_u32`].
    pub fn fetch_add_u32(&self, offset: usize, n: u32, order: Ordering) -> Result<u32, OutOfRange> {
        Ok(self.atomic_u32(self.at_mut(offset, 4)?, offset)?.fetch_add(n, order))
    }

    /// Subtracts from the u32 at `offset`, wrapping, and returns the old value.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LentSlice::store_u32`].
    pub fn fetch_sub_u32(&self, offset: usize, n: u32, order: Ordering) -> Result<u32, OutOfRange> {
        Ok(self.atomic_u32(self.at_mut(offset, 4)?, offset)?.fetch_sub(n, order))
    }

    /// Sets these bits of the u32 at `offset`, and returns the old value.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LentSlice::store_u32`].
    pub fn fetch_or_u32(
        &self,
        offset: usize,
        bits: u32,
        order: Ordering,
    ) -> Result<u32, OutOfRange> {
        Ok(self.atomic_u32(self.at_mut(offset, 4)?, offset)?.fetch_or(bits, order))
    }

    /// Loads the u64 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside or is not aligned.
    #[inline]
    pub fn load_u64(&self, offset: usize, order: Ordering) -> Result<u64, OutOfRange> {
        Ok(self.atomic_u64(self.at(offset, 8)?, offset)?.load(order))
    }

    /// Stores the u64 at `offset` (native byte order).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LentSlice::store_u32`].
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) -> Result<(), OutOfRange> {
        self.atomic_u64(self.at_mut(offset, 8)?, offset)?.store(value, order);
        Ok(())
    }

    /// Returns a range of the slice that a device may read or write.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if it does not lie inside or is longer than a device range can be. Also returns it
    /// for writable access to a read-only slice.
    pub fn device_range(
        &self,
        offset: usize,
        len: usize,
        access: DeviceAccess,
    ) -> Result<DeviceRange, OutOfRange> {
        let start = match access {
            DeviceAccess::Read => self.at(offset, len)?,
            DeviceAccess::Write => self.at_mut(offset, len)?,
        };
        let out = OutOfRange::Bounds { offset, len, size: self.len };
        let len = u32::try_from(len).map_err(|_| out)?;
        // SAFETY: the range lies in lent memory, which no Rust reference points to. A range for writing is
        // writable: `at_mut` checked it.
        Ok(unsafe { DeviceRange::new(start.addr().get() as u64, len, access) })
    }

    /// Returns the whole slice as a region for a device's memory table.
    pub fn device_region(&self) -> DeviceRegion {
        DeviceRegion::new(Arc::clone(&self.owner), self.start, self.len, self.is_writable())
    }

    /// Returns the address of a checked range, for system calls of this crate only.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, OutOfRange> {
        if offset > self.len || len > self.len - offset {
            return Err(OutOfRange::Bounds { offset, len, size: self.len });
        }
        // SAFETY: offset <= self.len, so the result stays inside (or one past) the mapping.
        Ok(unsafe { self.start.add(offset) })
    }

    #[inline]
    pub(crate) fn at_mut(&self, offset: usize, len: usize) -> Result<NonNull<u8>, OutOfRange> {
        if self.protection != Protection::ReadWrite {
            return Err(OutOfRange::ReadOnly);
        }
        self.at(offset, len)
    }

    fn atomic_u16(&self, at: NonNull<u8>, offset: usize) -> Result<&AtomicU16, OutOfRange> {
        if !at.cast::<u16>().is_aligned() {
            return Err(OutOfRange::Unaligned { offset, width: 2 });
        }
        // SAFETY: as for atomic_u32.
        Ok(unsafe { AtomicU16::from_ptr(at.as_ptr().cast()) })
    }

    #[inline]
    fn atomic_u32(&self, at: NonNull<u8>, offset: usize) -> Result<&AtomicU32, OutOfRange> {
        if !at.cast::<u32>().is_aligned() {
            return Err(OutOfRange::Unaligned { offset, width: 4 });
        }
        // SAFETY: range and alignment were checked, the owner keeps the page mapped for the life of
        // &self, and an atomic is an UnsafeCell: it asserts nothing about the bytes between accesses.
        // A load from a read-only mapping is a plain aligned load.
        Ok(unsafe { AtomicU32::from_ptr(at.as_ptr().cast()) })
    }

    #[inline]
    fn atomic_u64(&self, at: NonNull<u8>, offset: usize) -> Result<&AtomicU64, OutOfRange> {
        if !at.cast::<u64>().is_aligned() {
            return Err(OutOfRange::Unaligned { offset, width: 8 });
        }
        // SAFETY: as for atomic_u32.
        Ok(unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_outside_slice_is_rejected() {
        let lent = LentSlice::anonymous(4096);
        let mut buf = [0u8; 16];
        assert!(lent.copy_to(4090, &mut buf).is_err());
        assert!(lent.copy_from(usize::MAX, &buf).is_err());
        assert!(lent.load_u32(4094, Ordering::Relaxed).is_err());
        assert!(lent.load_u32(2, Ordering::Relaxed).is_err());
        assert!(lent.slice(1, 4096).is_err());
        assert!(lent.slice(4096, 0).is_ok_and(|s| s.is_empty()));
        assert!(lent.zero(4000, 97).is_err());
    }

    #[test]
    fn subslice_keeps_offset_and_owner() {
        let part = LentSlice::anonymous(4096).slice(100, 50).unwrap();
        part.copy_from(10, b"hello").unwrap();
        assert_eq!(part.fetch::<5>(10).unwrap().into_unchecked(), *b"hello");
        part.zero(10, 5).unwrap();
        assert_eq!(part.fetch::<5>(10).unwrap().into_unchecked(), [0; 5]);
    }
}
