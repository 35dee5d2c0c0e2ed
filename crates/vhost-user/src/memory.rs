//! Memory of a virtual machine, as its hypervisor passes it: one table of regions.
//!
//! Descriptors and rings reach memory by a look-up in this table alone. A region has a start in each address space from
//! which addresses come: that of descriptors and that of the hypervisor. Another one, such as offsets in a pool, is one
//! more start.

use std::os::fd::{AsFd, OwnedFd};

use ringfence_memory::{LentSlice, Mapping, Protection};
use ringfence_sys::descriptors::{Descriptors, identity};
use ringfence_wire::vhost_user::MemoryRegion;
use rustix::fs::{AtFlags, SealFlags, StatxFlags};
use rustix::io::Errno;

use super::fault::ClientFault;
use super::pool::{Files, HandedOver, PoolRule};

/// Mapped region of a guest's memory.
#[derive(Debug)]
struct Region {
    /// First address as descriptors name it.
    guest: u64,
    /// First address in the address space of the hypervisor.
    user: u64,
    lent: LentSlice,
}

/// Memory that a hypervisor shares with the device. Empty until it does.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
    handed_over: Option<HandedOver>,
}

impl GuestMemory {
    /// Maps regions of files, one for each.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`] if a region does not lie in its file or in 64 bits, or cannot be mapped, or if `rule` does
    /// not admit them all. Nothing is mapped of files that are too large for the rule.
    pub(super) fn map(
        regions: &[MemoryRegion],
        files: Descriptors,
        rule: PoolRule,
    ) -> Result<GuestMemory, ClientFault> {
        if files.len() != regions.len() {
            return Err(ClientFault::Files { count: files.len(), needed: regions.len() });
        }
        let mut seen = Files::default();
        let mut sizes = Vec::with_capacity(regions.len());
        for (region, file) in regions.iter().zip(files.each()) {
            let failed = |errno: Errno| ClientFault::Map { source: errno.into() };
            let size = size_of(file).map_err(failed)?;
            seen.add(region, identity(file).map_err(failed)?, size);
            sizes.push(size);
        }
        seen.check(rule)?;
        let all = regions.iter().zip(files.each()).zip(sizes);
        let mapped = all.map(|((region, file), size)| map(region, file, size));
        let regions = mapped.collect::<Result<Vec<_>, _>>()?;
        let handed_over = seen.accept(rule, regions.iter().map(|region| &region.lent))?;
        Ok(GuestMemory { regions, handed_over })
    }

    /// Returns the extent of the memory. `None` while there is none.
    pub fn handed_over(&self) -> Option<HandedOver> {
        self.handed_over
    }

    /// Returns the addresses of descriptors at which regions begin, and their lengths in bytes.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u64, usize)> {
        self.regions.iter().map(|region| (region.guest, region.lent.len()))
    }

    /// Returns the memory at an address of a descriptor: a slice, and the offset in it of `len` bytes.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Unmapped`] if they do not lie in one region.
    pub fn at(&self, address: u64, len: usize) -> Result<(&LentSlice, usize), ClientFault> {
        let found = self.regions.iter().find_map(|region| {
            let offset = offset_in(address, region.guest, region.lent.len())?;
            (len <= region.lent.len() - offset).then_some((&region.lent, offset))
        });
        found.ok_or(ClientFault::Unmapped { address, len })
    }

    /// Returns the memory from an address of the hypervisor's up to the end of the region.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Unmapped`] if no region has the address.
    pub(super) fn at_user(&self, address: u64) -> Result<LentSlice, ClientFault> {
        let found = self.regions.iter().find_map(|region| {
            let offset = offset_in(address, region.user, region.lent.len())?;
            region.lent.slice(offset, region.lent.len() - offset).ok()
        });
        found.ok_or(ClientFault::Unmapped { address, len: 1 })
    }
}

/// Returns the offset of an address in a region, if it lies there.
fn offset_in(address: u64, start: u64, len: usize) -> Option<usize> {
    let offset = usize::try_from(address.checked_sub(start)?).ok()?;
    (offset < len).then_some(offset)
}

/// Returns the size of a file in bytes. The call asks no file server.
// #syscall uplink,disk,card,proxy,shield statx 2+AT_EMPTY_PATH: size of a virtual machine's memory
pub(crate) fn size_of(file: impl AsFd) -> Result<u64, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(rustix::fs::statx(file, c"", flags, StatxFlags::SIZE)?.stx_size)
}

/// Maps a region of a file of `size` bytes.
fn map(region: &MemoryRegion, file: impl AsFd, size: u64) -> Result<Region, ClientFault> {
    let &MemoryRegion { guest, len, user, offset } = region;
    let invalid = || ClientFault::Region { address: guest, len };
    let ends = [guest, user, offset].map(|start| start.checked_add(len));
    let [Some(_), Some(_), Some(end)] = ends else { return Err(invalid()) };
    if len == 0 || end > size {
        return Err(invalid());
    }
    let bounded = |number: u64| usize::try_from(number).map_err(|_| invalid());
    // The whole file: pages of a huge-page file cannot be mapped or unmapped in part.
    let mapping = Mapping::new(file, 0, bounded(size)?, Protection::ReadWrite);
    let mapping = mapping.map_err(|source| ClientFault::Map { source })?;
    let lent = mapping.lent().slice(bounded(offset)?, bounded(len)?);
    Ok(Region { guest, user, lent: lent.map_err(|_| invalid())? })
}

/// Maps `len` bytes of a file of at most `limit` bytes, which must be sealed against shrinking.
// #syscall disk,shield fcntl 1=F_GET_SEALS: a file of a hypervisor that cannot shrink
pub(super) fn map_file(
    file: impl AsFd,
    offset: u64,
    len: u64,
    limit: u64,
) -> Result<LentSlice, ClientFault> {
    let size = size_of(&file).map_err(|errno| ClientFault::Map { source: errno.into() })?;
    if size > limit {
        return Err(ClientFault::Region { address: offset, len: size });
    }
    let seals = rustix::fs::fcntl_get_seals(&file);
    if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Err(ClientFault::Unsealed);
    }
    let region = MemoryRegion { guest: 0, len, user: 0, offset };
    map(&region, file, size).map(|region| region.lent)
}

/// Returns the only file of a message.
pub(super) fn only(files: Descriptors) -> Result<OwnedFd, ClientFault> {
    match files.exactly() {
        Ok([file]) => Ok(file),
        Err(count) => Err(ClientFault::Files { count, needed: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_refused_unless_it_lies_in_its_file_and_in_64_bits() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let mapped = |guest, len, user, offset| {
            let region = MemoryRegion { guest, len, user, offset };
            map(&region, &file, size_of(&file).unwrap()).map(|found| found.lent.len())
        };
        assert_eq!(mapped(0, 4096, 0, 4096).unwrap(), 4096);
        let high = u64::MAX - 100;
        for (guest, len, user, offset) in [
            (0, 0, 0, 0),
            (0, 8193, 0, 0),
            (0, 8192, 0, 1),
            (0, 4096, 0, 8192),
            (high, 4096, 0, 0),
            (0, 4096, high, 0),
            (0, 4096, 0, high),
        ] {
            let refused = mapped(guest, len, user, offset);
            assert!(matches!(refused, Err(ClientFault::Region { .. })), "{refused:?}");
        }
    }
}
