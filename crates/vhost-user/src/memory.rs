//! Memory of a virtual machine, as its hypervisor passes it: one table of regions, whole or region by region.
//!
//! Descriptors and rings reach memory by a look-up in this table alone. A region has a start in each address space from
//! which addresses come: that of descriptors and that of the hypervisor. Another one, such as offsets in a pool, is one
//! more start.

use std::os::fd::{AsFd, OwnedFd};

use ringfence_memory::{LentSlice, Mapping, Protection};
use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_wire::vhost_user::MemoryRegion;
use rustix::fs::{AtFlags, SealFlags, StatxFlags};
use rustix::io::Errno;

use super::fault::ClientFault;
use super::pool::{Files, HandedOver, PoolRule};

/// Maximum number of regions that a hypervisor adds one by one. QEMU uses at most as many for each device.
pub(super) const SLOTS_MAX: usize = 256;

/// File of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RegionFile {
    identity: FileIdentity,
    /// Size in bytes.
    size: u64,
}

/// Mapped region of a guest's memory.
#[derive(Debug)]
struct Region {
    place: MemoryRegion,
    file: RegionFile,
    /// The file, from its start to its end.
    whole: LentSlice,
    lent: LentSlice,
}

/// Memory that a hypervisor shares with the device. Empty until it does.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Regions in the order of their first addresses as descriptors name them.
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
        GuestMemory::with(Vec::new(), regions, &files, rule)
    }

    /// Maps one more region.
    ///
    /// # Errors
    ///
    /// As [`GuestMemory::map`], and [`ClientFault::Slots`] for too many. Nothing is mapped then.
    pub(super) fn add(
        &mut self,
        region: MemoryRegion,
        files: Descriptors,
        rule: PoolRule,
    ) -> Result<(), ClientFault> {
        if self.regions.len() >= SLOTS_MAX {
            return Err(ClientFault::Slots { limit: SLOTS_MAX });
        }
        let held = std::mem::take(self).regions;
        *self = GuestMemory::with(held, &[region], &files, rule)?;
        Ok(())
    }

    /// Unmaps a region.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::NoRegion`] if there is none of these addresses and length.
    pub(super) fn remove(
        &mut self,
        region: &MemoryRegion,
        rule: PoolRule,
    ) -> Result<(), ClientFault> {
        let key = |place: &MemoryRegion| (place.guest, place.len, place.user);
        let found = self.regions.iter().position(|held| key(&held.place) == key(region));
        let found = found.ok_or(ClientFault::NoRegion { address: region.guest })?;
        let mut held = std::mem::take(self).regions;
        held.remove(found);
        *self = GuestMemory::with(held, &[], &Descriptors::default(), rule)?;
        Ok(())
    }

    /// Maps regions beside those that are mapped.
    fn with(
        mut held: Vec<Region>,
        regions: &[MemoryRegion],
        files: &Descriptors,
        rule: PoolRule,
    ) -> Result<GuestMemory, ClientFault> {
        if files.len() != regions.len() {
            return Err(ClientFault::Files { count: files.len(), needed: regions.len() });
        }
        let mut seen = Files::default();
        for Region { place, file, .. } in &held {
            seen.add(place, file.identity, file.size);
        }
        let mut new = Vec::with_capacity(regions.len());
        for (place, file) in regions.iter().zip(files.each()) {
            let failed = |errno: Errno| ClientFault::Map { source: errno.into() };
            let found = RegionFile {
                identity: identity(file).map_err(failed)?,
                size: size_of(file).map_err(failed)?,
            };
            seen.add(place, found.identity, found.size);
            new.push((place, file, found));
        }
        seen.check(rule)?;
        for (place, file, found) in new {
            let extent = extent(place, found.size)?;
            let mapped = held.iter().find(|region| region.file == found);
            let whole = match mapped {
                Some(region) => region.whole.clone(),
                None => map_whole(file, found.size)?,
            };
            held.push(Region::new(*place, found, whole, extent)?);
        }
        held.sort_by_key(|region| region.place.guest);
        let handed_over = seen.accept(rule, held.iter().map(|region| &region.lent))?;
        Ok(GuestMemory { regions: held, handed_over })
    }

    /// Returns the extent of the memory. `None` while there is none.
    pub fn handed_over(&self) -> Option<HandedOver> {
        self.handed_over
    }

    /// Returns the addresses of descriptors at which regions begin, and their lengths in bytes.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u64, usize)> {
        self.regions.iter().map(|region| (region.place.guest, region.lent.len()))
    }

    /// Returns the memory at an address of a descriptor: a slice, and the offset in it of `len` bytes. Of regions that
    /// overlap, the one that begins last has the address.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Unmapped`] if they do not lie in one region.
    pub fn at(&self, address: u64, len: usize) -> Result<(&LentSlice, usize), ClientFault> {
        let before = self.regions.partition_point(|region| region.place.guest <= address);
        let found = self.regions[..before].last().and_then(|region| {
            let offset = offset_in(address, region.place.guest, region.lent.len())?;
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
            let offset = offset_in(address, region.place.user, region.lent.len())?;
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

impl Region {
    fn new(
        place: MemoryRegion,
        file: RegionFile,
        whole: LentSlice,
        (offset, len): (usize, usize),
    ) -> Result<Region, ClientFault> {
        let invalid = |_| ClientFault::Region { address: place.guest, len: place.len };
        let lent = whole.slice(offset, len).map_err(invalid)?;
        Ok(Region { place, file, whole, lent })
    }
}

/// Returns the offset and the length of a region in its file of `size` bytes.
fn extent(region: &MemoryRegion, size: u64) -> Result<(usize, usize), ClientFault> {
    let &MemoryRegion { guest, len, user, offset } = region;
    let invalid = || ClientFault::Region { address: guest, len };
    let ends = [guest, user, offset].map(|start| start.checked_add(len));
    let [Some(_), Some(_), Some(end)] = ends else { return Err(invalid()) };
    if len == 0 || end > size {
        return Err(invalid());
    }
    let bounded = |number: u64| usize::try_from(number).map_err(|_| invalid());
    Ok((bounded(offset)?, bounded(len)?))
}

/// Maps a file of `size` bytes. Pages of a huge-page file cannot be mapped or unmapped in part.
fn map_whole(file: impl AsFd, size: u64) -> Result<LentSlice, ClientFault> {
    let failed = |source| ClientFault::Map { source };
    let size = usize::try_from(size).map_err(|_| failed(Errno::FBIG.into()))?;
    Ok(Mapping::new(file, 0, size, Protection::ReadWrite).map_err(failed)?.lent())
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
    let (offset, len) = extent(&MemoryRegion { guest: 0, len, user: 0, offset }, size)?;
    let lent = map_whole(file, size)?.slice(offset, len);
    lent.map_err(|_| ClientFault::Region { address: offset as u64, len: len as u64 })
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
    use crate::testing::memfd;

    #[test]
    fn region_is_refused_unless_it_lies_in_its_file_and_in_64_bits() {
        let region =
            |guest, len, user, offset| extent(&MemoryRegion { guest, len, user, offset }, 8192);
        assert_eq!(region(0, 4096, 0, 4096).unwrap(), (4096, 4096));
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
            let refused = region(guest, len, user, offset);
            assert!(matches!(refused, Err(ClientFault::Region { .. })), "{refused:?}");
        }
    }

    /// Returns a region of one page of a file, with its place there.
    fn page(number: u64) -> MemoryRegion {
        let start = (number + 1) << 20;
        MemoryRegion { guest: start, len: 4096, user: start, offset: number * 4096 }
    }

    fn files(file: &OwnedFd) -> Descriptors {
        vec![file.try_clone().unwrap()].into()
    }

    #[test]
    fn region_that_was_removed_is_not_reached_and_the_others_are() {
        let file = memfd(3 * 4096).unwrap();
        let mut memory = GuestMemory::default();
        for number in [2, 0, 1] {
            memory.add(page(number), files(&file), PoolRule::Any).unwrap();
            rustix::io::pwrite(&file, &[u8::try_from(number).unwrap()], number * 4096).unwrap();
        }
        let read = |memory: &GuestMemory, number: u64| {
            let (lent, offset) = memory.at(page(number).guest, 4096).ok()?;
            lent.fetch::<1>(offset).ok().map(|byte| byte.into_unchecked()[0])
        };
        assert_eq!([0, 1, 2].map(|number| read(&memory, number)), [Some(0), Some(1), Some(2)]);
        assert_eq!(memory.handed_over().map(|found| found.bytes), Some(3 * 4096));
        memory.remove(&page(1), PoolRule::Any).unwrap();
        assert_eq!([0, 1, 2].map(|number| read(&memory, number)), [Some(0), None, Some(2)]);
        assert!(memory.at_user(page(1).user).is_err());
        let again = memory.remove(&page(1), PoolRule::Any).unwrap_err();
        assert!(matches!(again, ClientFault::NoRegion { .. }), "{again}");
        for number in [0, 2] {
            memory.remove(&page(number), PoolRule::Any).unwrap();
        }
        assert_eq!(memory.handed_over(), None);
    }

    #[test]
    fn rule_applies_to_all_regions_together_and_to_files_that_grow() {
        let (first, second) = (memfd(8192).unwrap(), memfd(8192).unwrap());
        let rule = PoolRule::AtMost(12_288);
        let mut memory = GuestMemory::default();
        memory.add(page(0), files(&first), rule).unwrap();
        memory.add(page(1), files(&first), rule).unwrap();
        let refused = memory.add(page(0), files(&second), rule).unwrap_err();
        assert!(matches!(refused, ClientFault::Pool(_)), "{refused}");
        let mut memory = GuestMemory::default();
        memory.add(page(0), files(&first), rule).unwrap();
        rustix::fs::ftruncate(&first, 1 << 20).unwrap();
        let refused = memory.add(page(1), files(&first), rule).unwrap_err();
        assert!(matches!(refused, ClientFault::Pool(_)), "{refused}");
    }

    #[test]
    fn regions_beyond_the_limit_are_refused() {
        let file = memfd(4096).unwrap();
        let mut memory = GuestMemory::default();
        let place = |number: u64| MemoryRegion { offset: 0, ..page(number) };
        for number in 0..SLOTS_MAX as u64 {
            memory.add(place(number), files(&file), PoolRule::Any).unwrap();
        }
        let refused = memory.add(place(SLOTS_MAX as u64), files(&file), PoolRule::Any);
        assert!(matches!(refused, Err(ClientFault::Slots { limit: SLOTS_MAX })), "{refused:?}");
    }
}
