//! Block lending: maps only those parts of a link's memory for the device that are in use.
//!
//! Memory is mapped in *blocks*: a receive buffer, a page of short frames, the room of a long frame. A block is
//! mapped before its address is given to the device; the address encodes the mapping's reference. After
//! completion the block stays mapped, since the same few blocks are reused and mapping them again then costs
//! nothing ([`ReuseCache`]). Without reuse it is unmapped at once.

use std::io;
use std::sync::Arc;

use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_access::window::reuse::ReuseCache;
use ringfence_memory::FIRST_IO_ADDRESS;
use ringfence_memory::{DeviceAccess, DeviceRange, DeviceRegion};
use ringfence_platform::{Access, Counters, DomId, PageId, WindowShape};

use super::receive::BUFFER;
use crate::frame_ring::{FrameRing, LONG_ROOM};

/// Size of a block of short frames, in bytes.
const PAGE: usize = ringfence_memory::PAGE_SIZE;

/// Parts of its memory that a link maps for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protection {
    /// Receive buffers and frame ring, in a fixed memory table.
    #[default]
    Fixed,
    /// Receive buffers and frame ring, in the translation table that the finer modes use.
    Coarse,
    /// Blocks in use, and blocks that were used and will be again.
    Fine,
    /// Blocks in use only.
    FineWithoutReuse,
}

impl Protection {
    /// Returns `true` if the device's addresses are translated.
    pub(super) fn is_translated(self) -> bool {
        self != Protection::Fixed
    }
}

/// Blocks of one memory area.
pub(super) struct Blocks {
    table: RegionTable,
    cache: ReuseCache,
    access: Access,
    reuse: bool,
}

impl core::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Blocks({:?})", self.table.region())
    }
}

impl Blocks {
    /// Creates blocks of `bytes` bytes in an area. The device may write them if the area is writable. `number`
    /// separates the areas of one address space.
    fn new(
        area: DeviceRegion,
        bytes: usize,
        number: u64,
        reuse: bool,
        space: &Arc<dyn AddressSpace>,
        system: &Arc<Counters>,
    ) -> io::Result<Blocks> {
        let none = || io::Error::from(io::ErrorKind::InvalidInput);
        let page = u32::try_from(bytes).map_err(|_| none())?;
        let count = area.len().checked_div(u64::from(page)).ok_or_else(none)?;
        let count = u32::try_from(count).map_err(|_| none())?;
        let (access, writable, read_only) = match area.is_writable() {
            true => (Access::ReadWrite, count, 0),
            false => (Access::ReadOnly, 0, count),
        };
        let window = WindowShape { writable, read_only, entries: count };
        let base = FIRST_IO_ADDRESS + (number << 40);
        let region = RegionShape { base, window, page };
        let (space, system) = (Arc::clone(space), Arc::clone(system));
        // Domain 0: the kernel drives the device.
        let table = RegionTable::over(DomId(0), region, area, space, system)?;
        Ok(Blocks { table, cache: ReuseCache::new(window), access, reuse })
    }

    /// Maps a part of a block for one use by the device. Returns `None` if the system refuses.
    pub(super) fn lend(&mut self, block: usize, offset: usize, len: usize) -> Option<DeviceRange> {
        let block = PageId(u32::try_from(block).ok()?);
        let gref = match self.cache.again(block) {
            Some(gref) => gref,
            None => self.cache.first(&mut self.table, block).ok()?,
        };
        let access = match self.access {
            Access::ReadWrite => DeviceAccess::Write,
            Access::ReadOnly => DeviceAccess::Read,
        };
        let (offset, len) = (u32::try_from(offset).ok()?, u32::try_from(len).ok()?);
        self.table.region().range(gref, offset, len, access)
    }

    /// Ends one use of a block by the device.
    pub(super) fn release(&mut self, block: usize) {
        let Ok(block) = u32::try_from(block).map(PageId) else { return };
        self.cache.over(block);
        if !self.reuse {
            // A page with another frame in flight is unmapped together with that one.
            let _ = self.cache.purge(&mut self.table, block);
        }
    }
}

/// Blocks of a frame ring.
#[derive(Debug)]
pub(super) struct FrameBlocks {
    short: Blocks,
    long: Blocks,
    /// Offset of the long rooms.
    short_bytes: usize,
}

impl FrameBlocks {
    /// Returns the blocks that contain an offset of the ring's memory, the block's index, and the offset in it.
    fn find(&mut self, offset: usize) -> (&mut Blocks, usize, usize) {
        match offset.checked_sub(self.short_bytes) {
            Some(offset) => (&mut self.long, offset / LONG_ROOM, offset % LONG_ROOM),
            None => (&mut self.short, offset / PAGE, offset % PAGE),
        }
    }

    /// Maps a frame of `len` bytes at `offset` of the ring's memory.
    pub(super) fn lend(&mut self, offset: usize, len: usize) -> Option<DeviceRange> {
        let (blocks, block, inside) = self.find(offset);
        blocks.lend(block, inside, len)
    }

    /// Ends the use of the frame at `offset`.
    pub(super) fn release(&mut self, offset: usize) {
        let (blocks, block, _) = self.find(offset);
        blocks.release(block);
    }
}

/// Blocks that a link maps one by one; empty if all its memory stays mapped.
#[derive(Debug, Default)]
pub(super) struct Lending {
    pub(super) receive: Option<Blocks>,
    pub(super) send: Option<FrameBlocks>,
}

impl Lending {
    /// Creates the blocks of a link's memory.
    pub(super) fn new(
        buffers: DeviceRegion,
        frames: &FrameRing,
        reuse: bool,
        space: &Arc<dyn AddressSpace>,
        system: &Arc<Counters>,
    ) -> io::Result<Lending> {
        let (area, shape) = (frames.region(), frames.shape());
        let part = |offset, len| area.slice(offset, len).map_err(io::Error::other);
        let short_bytes = shape.short_bytes();
        let (short, long) =
            (part(0, short_bytes)?, part(short_bytes, shape.bytes() - short_bytes)?);
        let blocks = |area, bytes, number| Blocks::new(area, bytes, number, reuse, space, system);
        Ok(Lending {
            receive: Some(blocks(buffers, BUFFER, 0)?),
            send: Some(FrameBlocks {
                short: blocks(short, PAGE, 1)?,
                long: blocks(long, LONG_ROOM, 2)?,
                short_bytes,
            }),
        })
    }
}
