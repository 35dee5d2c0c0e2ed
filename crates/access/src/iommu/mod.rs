//! Grants that an IOMMU enforces: the engines `vfio` and `iotlb` of a
//! [`TranslationTable`](ringfence_platform::TranslationTable).
//!
//! # Theory of operation
//!
//! A device addresses memory by *I/O addresses*, which its address space translates. The space has the
//! layout of a grant table (the redesigned grant mechanism's section on IOMMUs). Each guest has a *region*
//! of it, and the page granted under reference `g` is at
//!
//! ```text
//!     base of the region + g * 4096
//! ```
//!
//! The driver domain computes a device's address from a reference, without a look-up. It has a region of
//! its own, for its rings and other memory of its own that the device uses.
//!
//! [`AddressSpace`] is the space of one device, or of one group of devices. Engine `vfio` uses a real
//! IOMMU. Engine `iotlb` uses kernel vhost, whose worker looks addresses up in a table of the kernel.
//! [`RegionTable`] is a guest's region in such a space: issue maps a page, revoke unmaps it, and the
//! kernel enforces both. A guest that uses several devices has a table for each.
//!
//! [`RegionTable::over`] makes a table over an existing memory area in which frames are built. Its pages
//! can be larger *blocks*, each mapped and unmapped as a whole.
//!
//! # Revocation
//!
//! The kernel returns from an unmap when the device can begin no new access by that address. No peer takes
//! part, so revoke is one-sided and never busy, and no page stays held. The device may have written the
//! page before. Its content is readable for the granter until the page is prepared again, which zeroes it.

mod region;

use std::io;

use ringfence_memory::{DeviceRegion, LentSlice};

use ringfence_platform::Access;
use ringfence_platform::iotlb::IotlbSpace;
use ringfence_platform::window::EngineFacts;

pub use region::{RegionShape, RegionTable};

/// I/O address space of a device.
pub trait AddressSpace: Send + Sync {
    /// Returns the facts about the engine of a table over this space.
    fn engine(&self) -> EngineFacts;

    /// Maps `memory` (whole pages) at `address`. The space keeps the memory mapped in this process as long as
    /// the device can access it.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `EEXIST` if the range is mapped already, `ENOSPC` if the space has no free
    /// entries, `EPERM` for write access to read-only memory.
    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()>;

    /// Maps lent memory at `address`, as [`AddressSpace::map_region`] does.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`AddressSpace::map_region`].
    fn map(&self, address: u64, memory: &LentSlice, access: Access) -> io::Result<()> {
        self.map_region(address, &memory.device_region(), access)
    }

    /// Unmaps all memory that was mapped at `address`. After it returns, the device begins no access by these
    /// addresses.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, and `ENOENT` if nothing was mapped by [`AddressSpace::map`]. After an error
    /// the device may still have access.
    fn unmap(&self, address: u64) -> io::Result<()>;
}

impl AddressSpace for IotlbSpace {
    fn engine(&self) -> EngineFacts {
        EngineFacts {
            name: "iotlb",
            one_sided: true,
            in_flight: "ends before the revocation returns: the kernel waits for the worker to put the queue down",
            cost: "issue and revoke: a system call each, which takes the locks of the worker's queues",
        }
    }

    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()> {
        IotlbSpace::map_region(self, address, memory, access)
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        IotlbSpace::unmap(self, address)
    }
}
