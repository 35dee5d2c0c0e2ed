//! Memory that a kernel device reaches by address, for example kernel vhost.
//!
//! # Contract
//!
//! A device reads addresses from its rings and accesses them. So the numbers themselves must be trustworthy:
//!
//! * A writable [`DeviceRange`] lies in lent memory, where no Rust reference can point. A readable one lies
//!   there or in a [`SendArea`]. Safe code cannot construct any other range.
//! * A [`DeviceRegion`] keeps its memory mapped. The code that gives a device its table of regions keeps them
//!   for as long as the device can use them. The device refuses a range outside all regions.
//!
//! Addresses are numbers here and are never converted back to pointers.

use core::fmt;
use core::ptr::NonNull;
use std::io;
use std::sync::Arc;

use crate::lent::{OutOfRange, Owner};
use crate::mapping::MappedRange;

/// Access of a device to a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceAccess {
    Read,
    Write,
}

/// Lowest address of regions in the I/O address space of kernel vhost. No address of a process is as high.
pub const FIRST_IO_ADDRESS: u64 = 1 << 60;

/// Highest I/O address. Addresses above it belong to a kernel.
const LAST_IO_ADDRESS: u64 = (1 << 62) - 1;

/// Memory range in the address space of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRange {
    address: u64,
    len: u32,
    access: DeviceAccess,
}

impl DeviceRange {
    /// Creates a range at an address of the device: an address of this process, or one that an I/O translation
    /// table maps to such an address.
    ///
    /// # Safety
    ///
    /// If the device reaches memory of this process by that address, the memory must be lent memory, or, for
    /// [`DeviceAccess::Read`], memory of a [`SendArea`].
    pub unsafe fn new(address: u64, len: u32, access: DeviceAccess) -> DeviceRange {
        DeviceRange { address, len, access }
    }

    /// Returns a range of `len` bytes at an I/O address, for a device behind an address space. Returns `None`
    /// below [`FIRST_IO_ADDRESS`], where addresses of this process may be.
    pub fn io(address: u64, len: u32, access: DeviceAccess) -> Option<DeviceRange> {
        let last = address.checked_add(u64::from(len))?;
        if address < FIRST_IO_ADDRESS || last > LAST_IO_ADDRESS {
            return None;
        }
        // SAFETY: no memory of a process has such an address, so a device reaches memory of this process by it
        // only where an address space leads it there; and that leads to what was mapped as a `DeviceRegion`,
        // which the device may write only if it is lent memory.
        Some(unsafe { DeviceRange::new(address, len, access) })
    }

    /// Returns the address of the first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn len(self) -> u32 {
        self.len
    }

    /// Returns `true` if the range has no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the access of the device.
    pub fn access(self) -> DeviceAccess {
        self.access
    }

    /// Splits the range after `len` bytes; returns `None` if it is shorter.
    pub fn split_at(self, len: u32) -> Option<(DeviceRange, DeviceRange)> {
        let rest = self.len.checked_sub(len)?;
        let first = DeviceRange { len, ..self };
        Some((first, DeviceRange { address: self.address + u64::from(len), len: rest, ..self }))
    }
}

/// Memory region for a device's memory table. The memory stays mapped while this value lives.
#[derive(Clone)]
pub struct DeviceRegion {
    owner: Arc<dyn Owner>,
    address: u64,
    len: usize,
    writable: bool,
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRegion({} bytes)", self.len)
    }
}

impl DeviceRegion {
    pub(crate) fn new(
        owner: Arc<dyn Owner>,
        start: NonNull<u8>,
        len: usize,
        writable: bool,
    ) -> DeviceRegion {
        DeviceRegion { owner, address: start.addr().get() as u64, len, writable }
    }

    /// Returns `true` if a device may write the region: no Rust reference points there.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns a part of the region, which keeps the whole region mapped.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<DeviceRegion, OutOfRange> {
        let size = self.len;
        if offset > size || len > size - offset {
            return Err(OutOfRange::Bounds { offset, len, size });
        }
        let address = self.address + offset as u64;
        Ok(DeviceRegion { owner: Arc::clone(&self.owner), address, len, writable: self.writable })
    }

    /// Returns the address of the first byte in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Returns `true` if the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `true` if the region contains all of `range`, by addresses of this process.
    pub fn contains(&self, range: DeviceRange) -> bool {
        let offset = range.address.wrapping_sub(self.address);
        offset <= self.len() && u64::from(range.len) <= self.len() - offset
    }

    /// Returns the owner that keeps the memory mapped.
    pub fn owner(&self) -> &Arc<dyn Owner> {
        &self.owner
    }
}

/// Private memory that a device may read and cannot write. The caller builds data to be sent in it, through
/// ordinary references.
///
/// Changes to a range while a device reads it affect only the data sent.
pub struct SendArea {
    area: Arc<MappedRange>,
}

impl fmt::Debug for SendArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendArea({} bytes)", self.area.len)
    }
}

impl SendArea {
    /// Maps `len` bytes (a multiple of the page size), zeroed and aligned to a page.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; a `len` of zero is invalid.
    pub fn new(len: usize) -> io::Result<SendArea> {
        Ok(SendArea { area: Arc::new(MappedRange::private(len)?) })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.area.len
    }

    /// Returns `true` if the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.area.len == 0
    }

    /// Returns all bytes of the area.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has exactly this range, initially zeroed, for as long as &self. It is private to
        // this value, which is not Clone, and is written only through &mut self: no writable DeviceRange of it is
        // ever made.
        unsafe { core::slice::from_raw_parts(self.area.start.as_ptr(), self.area.len) }
    }

    /// Returns all bytes of the area for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and &mut self is the only access to them. A device reads in the kernel, by
        // address, and gets old or new bytes.
        unsafe { core::slice::from_raw_parts_mut(self.area.start.as_ptr(), self.area.len) }
    }

    /// Returns a range for a device to read.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange::Bounds`] if it does not lie inside or is longer than a device range can be.
    pub fn device_range(&self, offset: usize, len: usize) -> Result<DeviceRange, OutOfRange> {
        let size = self.area.len;
        let out = OutOfRange::Bounds { offset, len, size };
        if offset > size || len > size - offset {
            return Err(out);
        }
        let address = (self.area.start.addr().get() + offset) as u64;
        let len = u32::try_from(len).map_err(|_| out)?;
        Ok(DeviceRange { address, len, access: DeviceAccess::Read })
    }

    /// Returns the whole area as a region for a device's memory table.
    pub fn device_region(&self) -> DeviceRegion {
        DeviceRegion::new(Arc::clone(&self.area) as _, self.area.start, self.area.len, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LentSlice;

    #[test]
    fn device_range_outside_slice_is_rejected() {
        let lent = LentSlice::anonymous(8192).slice(4096, 4096).unwrap();
        let region = lent.device_region();
        let range = lent.device_range(96, 4000, DeviceAccess::Write).unwrap();
        assert_eq!((range.address() - region.address(), range.len()), (96, 4000));
        assert!(region.contains(range));
        assert!(lent.device_range(97, 4000, DeviceAccess::Read).is_err());
        assert!(lent.device_range(usize::MAX, 2, DeviceAccess::Read).is_err());
        let (first, rest) = range.split_at(4000).unwrap();
        assert!(rest.is_empty() && region.contains(first) && region.contains(rest));
        assert_eq!(range.split_at(4001), None);
        let area = SendArea::new(4096).unwrap();
        assert!(!region.contains(area.device_range(0, 1).unwrap()));
        assert!(area.device_range(1, 4096).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files in memory")]
    fn writable_range_of_send_area_or_read_only_slice_is_rejected() {
        let area = SendArea::new(4096).unwrap();
        assert_eq!(area.device_range(0, 4096).unwrap().access(), DeviceAccess::Read);
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let read_only = crate::Mapping::new(&fd, 0, 4096, crate::Protection::ReadOnly).unwrap();
        let refused = read_only.lent().device_range(0, 1, DeviceAccess::Write);
        assert_eq!(refused, Err(OutOfRange::ReadOnly));
    }

    #[test]
    fn region_parts_keep_writability() {
        let lent = LentSlice::anonymous(8192).device_region();
        let area = SendArea::new(8192).unwrap().device_region();
        assert!(lent.is_writable() && !area.is_writable());
        let part = area.slice(4096, 4096).unwrap();
        assert_eq!((part.address() - area.address(), part.len()), (4096, 4096));
        assert!(!part.is_writable());
        assert!(area.slice(4097, 4096).is_err() && area.slice(usize::MAX, 2).is_err());
    }

    #[test]
    fn region_keeps_memory_mapped() {
        let mut area = SendArea::new(4096).unwrap();
        area.bytes_mut()[4095] = 7;
        let region = area.device_region().slice(4095, 1).unwrap();
        let weak = Arc::downgrade(&area.area);
        drop(area);
        assert!(weak.upgrade().is_some());
        drop(region);
        assert!(weak.upgrade().is_none());
    }
}
