//! Grants that an IOMMU enforces: the engines `vfio` and `iotlb` of a
//! [`TranslationTable`](ringfence_platform::TranslationTable).
//!
//! # Theory of operation
//!
//! A device names memory by *I/O addresses*, and reaches what its address space says is there. The space is
//! laid out as a grant table (the redesigned grant mechanism's section on IOMMUs): each guest has a *region*
//! of it, and what is granted under reference `g` is the page at
//!
//! ```text
//!     base of the region + g * 4096
//! ```
//!
//! so the driver domain makes a device's address from a reference without asking anybody. The driver domain
//! has a region of its own, for its rings and whatever it lets the device reach of its own memory.
//!
//! [`AddressSpace`] is one device's (or one group's) space: [`vfio`] that of a real IOMMU, [`iotlb`] that of
//! kernel vhost, whose worker looks addresses up in a table of the kernel's. [`RegionTable`] is a guest's
//! region in it: issue maps a page, revoke unmaps it, and the kernel makes both hold. A guest served by
//! several devices has a table for each.
//!
//! A table can also be made over memory that is somebody's already, an area in which frames are put together,
//! and have larger pages: *blocks*, each mapped and unmapped as one ([`RegionTable::over`]).
//!
//! # What a revocation means here
//!
//! The kernel returns from unmapping when the device can begin no new access by that address: no peer is
//! asked. So revoke is one-sided, is never busy, and nothing is ever held. What the device moved before, it
//! moved; the page's content stays the granter's to read until it is made fresh, which empties it.

mod region;

use std::io;

use ringfence_memory::{DeviceRegion, LentSlice};

use ringfence_platform::Access;
use ringfence_platform::window::EngineFacts;
use ringfence_sys::iotlb::IotlbSpace;

pub use region::{RegionShape, RegionTable};

/// What a device can reach, by I/O addresses.
pub trait AddressSpace: Send + Sync {
    /// What engine it makes of a table.
    fn engine(&self) -> EngineFacts;

    /// Makes `memory` (whole pages) what is at `address` and after it; keeps it mapped in this process as
    /// long as the device can reach it.
    ///
    /// # Errors
    ///
    /// The kernel's: `EEXIST` where something is mapped there already; `ENOSPC` where the space's entries are
    /// used up; `EPERM` for memory that cannot be written and is to be.
    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()>;

    /// As [`AddressSpace::map_region`], of lent memory.
    ///
    /// # Errors
    ///
    /// As there.
    fn map(&self, address: u64, memory: &LentSlice, access: Access) -> io::Result<()> {
        self.map_region(address, &memory.device_region(), access)
    }

    /// Takes what was mapped at `address` away, all of it. After it returns, the device begins no access by
    /// these addresses.
    ///
    /// # Errors
    ///
    /// The kernel's; `ENOENT` where nothing was mapped by [`AddressSpace::map`]. The device may still reach
    /// it then.
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
