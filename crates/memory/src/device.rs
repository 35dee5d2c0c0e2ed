//! Memory that a device of the kernel reaches by address: kernel vhost's, for one.
//!
//! # Contract
//!
//! A device is told addresses by what is written into its rings, and writes where it is told to. So the
//! numbers themselves must be trustworthy, not just whoever passes them on:
//!
//! * A [`DeviceRange`] that may be written lies in lent memory, where no Rust reference can be. One that may
//!   be read lies there or in a [`SendArea`]. Nothing else makes one, outside of `unsafe`.
//! * A [`DeviceRegion`] keeps its memory mapped. Whoever gives a device its table of regions keeps them for
//!   as long as the device can use it; a range outside all regions is refused by the device.
//!
//! Addresses are numbers here and are never turned back into pointers.

use core::fmt;
use core::ptr::NonNull;
use std::io;
use std::sync::Arc;

use crate::lent::{OutOfRange, Owner};
use crate::mapping::Reservation;

/// What a device may do with a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceAccess {
    /// Read it.
    Read,
    /// Write it.
    Write,
}

/// Where regions begin whose addresses are told to kernel vhost: no address of a process is as high.
pub const FIRST_IO_ADDRESS: u64 = 1 << 60;

/// Addresses above those of any kernel belong to nobody, either.
const LAST_IO_ADDRESS: u64 = (1 << 62) - 1;

/// A range of memory as a device is told of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRange {
    address: u64,
    len: u32,
    access: DeviceAccess,
}

impl DeviceRange {
    /// A range at an address of the device's: one of ours, or one that an I/O translation table turns
    /// into one of ours.
    ///
    /// # Safety
    ///
    /// Where the device reaches memory of this process by that address, it is lent memory, or, for
    /// [`DeviceAccess::Read`], memory of a [`SendArea`].
    pub unsafe fn new(address: u64, len: u32, access: DeviceAccess) -> DeviceRange {
        DeviceRange { address, len, access }
    }

    /// `len` octets at an I/O address, as a device behind an address space is told of them; `None` below
    /// [`FIRST_IO_ADDRESS`], where addresses of this process may be.
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

    /// The first octet's address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Octets.
    pub fn len(self) -> u32 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// What the device may do.
    pub fn access(self) -> DeviceAccess {
        self.access
    }

    /// The first `len` octets, and the others; `None` when there are fewer.
    pub fn split_at(self, len: u32) -> Option<(DeviceRange, DeviceRange)> {
        let rest = self.len.checked_sub(len)?;
        let first = DeviceRange { len, ..self };
        Some((first, DeviceRange { address: self.address + u64::from(len), len: rest, ..self }))
    }
}

/// Memory that a device may be given access to. It stays mapped while this lives.
#[derive(Clone)]
pub struct DeviceRegion {
    owner: Arc<dyn Owner>,
    address: u64,
    len: u64,
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
        DeviceRegion { owner, address: start.addr().get() as u64, len: len as u64, writable }
    }

    /// Whether a device may be told to write it: no Rust reference points there.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// A part of it, which keeps the whole mapped.
    ///
    /// # Errors
    ///
    /// [`OutOfRange::Bounds`] when it does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<DeviceRegion, OutOfRange> {
        let size = usize::try_from(self.len).unwrap_or(usize::MAX);
        if offset > size || len > size - offset {
            return Err(OutOfRange::Bounds { offset, len, size });
        }
        let (address, len) = (self.address + offset as u64, len as u64);
        Ok(DeviceRegion { owner: Arc::clone(&self.owner), address, len, writable: self.writable })
    }

    /// The first octet's address in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Octets.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether all of `range` lies inside, by addresses of this process.
    pub fn contains(&self, range: DeviceRange) -> bool {
        let offset = range.address.wrapping_sub(self.address);
        offset <= self.len && u64::from(range.len) <= self.len - offset
    }

    /// The handle that keeps the memory mapped.
    pub fn owner(&self) -> &Arc<dyn Owner> {
        &self.owner
    }
}

/// Private memory that a device may read and cannot write: what is to be sent is put together in it, by
/// ordinary references.
///
/// While a device reads a range, whoever changes it changes what is sent, and nothing else.
pub struct SendArea {
    area: Arc<Reservation>,
}

impl fmt::Debug for SendArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendArea({} bytes)", self.area.len)
    }
}

impl SendArea {
    /// Memory of `len` bytes (a multiple of the page size), zeroed, aligned to a page.
    ///
    /// # Errors
    ///
    /// The kernel's; `len` zero is invalid.
    pub fn new(len: usize) -> io::Result<SendArea> {
        Ok(SendArea { area: Arc::new(Reservation::private(len)?) })
    }

    /// Bytes in the area.
    pub fn len(&self) -> usize {
        self.area.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.area.len == 0
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the reservation maps exactly this range, zeroed at first, for as long as &self; it is
        // private to this value, which is not Clone, and is written only through &mut self: no writable
        // DeviceRange of it is ever made.
        unsafe { core::slice::from_raw_parts(self.area.start.as_ptr(), self.area.len) }
    }

    /// All bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and &mut self is the only way to them. What a device reads meanwhile is
        // its own affair: it reads in the kernel, by address.
        unsafe { core::slice::from_raw_parts_mut(self.area.start.as_ptr(), self.area.len) }
    }

    /// A range for a device to read.
    ///
    /// # Errors
    ///
    /// [`OutOfRange::Bounds`] when it does not lie inside, or is longer than a device can be told.
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

    /// All of the area, for a device's table of what it may reach.
    pub fn device_region(&self) -> DeviceRegion {
        DeviceRegion::new(Arc::clone(&self.area) as _, self.area.start, self.area.len, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LentSlice;

    #[test]
    fn ranges_lie_inside_what_they_were_made_from() {
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
    fn what_is_only_to_be_sent_is_never_writable() {
        let area = SendArea::new(4096).unwrap();
        assert_eq!(area.device_range(0, 4096).unwrap().access(), DeviceAccess::Read);
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let read_only = crate::Mapping::new(&fd, 0, 4096, crate::Protection::ReadOnly).unwrap();
        let refused = read_only.lent().device_range(0, 1, DeviceAccess::Write);
        assert_eq!(refused, Err(OutOfRange::ReadOnly));
    }

    #[test]
    fn a_region_says_whether_it_may_be_written_and_so_do_its_parts() {
        let lent = LentSlice::anonymous(8192).device_region();
        let area = SendArea::new(8192).unwrap().device_region();
        assert!(lent.is_writable() && !area.is_writable());
        let part = area.slice(4096, 4096).unwrap();
        assert_eq!((part.address() - area.address(), part.len()), (4096, 4096));
        assert!(!part.is_writable());
        assert!(area.slice(4097, 4096).is_err() && area.slice(usize::MAX, 2).is_err());
    }

    #[test]
    fn a_region_keeps_its_memory() {
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
