//! What of a link's memory the device reaches, where that is not all of it all the time.
//!
//! # Theory of operation
//!
//! Memory goes to and fro in *blocks*: a receive buffer; a page of short frames; the room of a long one. A block is
//! lent before the device is told of it, and the device's address of it says under which reference. When the
//! device is done, the block stays lent, since the same few are used again and again, and lending it the
//! next time costs nothing ([`ReuseCache`]); or, where that is not wanted, it is taken back at once.

use std::io;
use std::sync::Arc;

use ringfence_access::iommu::{AddressSpace, RegionShape, RegionTable};
use ringfence_access::window::reuse::ReuseCache;
use ringfence_memory::FIRST_IO_ADDRESS;
use ringfence_memory::{DeviceAccess, DeviceRange, DeviceRegion};
use ringfence_platform::{Access, Counters, DomId, PageId, WindowShape};

use super::receive::BUFFER;
use crate::link::vhost_net::frames::{FrameRing, LONG_ROOM};

/// Octets of a block of short frames.
const PAGE: usize = ringfence_memory::PAGE_SIZE;

/// How much of its memory a link lends the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protection {
    /// Receive buffers and the ring of frames, once and for all, by a table that does not change.
    #[default]
    Fixed,
    /// The same, by the table of translations that the finer ones use.
    Coarse,
    /// What is with the device, and what was and will soon be again.
    Fine,
    /// What is with the device, and nothing else.
    FineWithoutReuse,
}

impl Protection {
    /// Whether addresses go through a table of translations.
    pub(super) fn is_translated(self) -> bool {
        self != Protection::Fixed
    }
}

/// The blocks of one area.
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
    /// Blocks of so many octets in an area, for the device to write if the area may be written. `number` tells
    /// areas of one space apart.
    fn new(
        area: DeviceRegion,
        octets: usize,
        number: u64,
        reuse: bool,
        space: &Arc<dyn AddressSpace>,
        system: &Arc<Counters>,
    ) -> io::Result<Blocks> {
        let none = || io::Error::from(io::ErrorKind::InvalidInput);
        let page = u32::try_from(octets).map_err(|_| none())?;
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
        // The kernel drives the device.
        let table = RegionTable::over(DomId(0), region, area, space, system)?;
        Ok(Blocks { table, cache: ReuseCache::new(window), access, reuse })
    }

    /// A part of a block, for one more use by the device; `None` when the system refuses.
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

    /// The device is done with one use of a block.
    pub(super) fn over(&mut self, block: usize) {
        let Ok(block) = u32::try_from(block).map(PageId) else { return };
        self.cache.over(block);
        if !self.reuse {
            // A page with another frame that is under way is taken back with that one.
            let _ = self.cache.purge(&mut self.table, block);
        }
    }
}

/// The blocks of a ring of frames.
#[derive(Debug)]
pub(super) struct FrameBlocks {
    short: Blocks,
    long: Blocks,
    /// Where the long ones begin.
    short_octets: usize,
}

impl FrameBlocks {
    /// The blocks that octets at an offset of the ring's memory are in, the block's number there, and the
    /// offset in it.
    fn find(&mut self, offset: usize) -> (&mut Blocks, usize, usize) {
        match offset.checked_sub(self.short_octets) {
            Some(offset) => (&mut self.long, offset / LONG_ROOM, offset % LONG_ROOM),
            None => (&mut self.short, offset / PAGE, offset % PAGE),
        }
    }

    /// A frame of `len` octets at `offset` of the ring's memory.
    pub(super) fn lend(&mut self, offset: usize, len: usize) -> Option<DeviceRange> {
        let (blocks, block, inside) = self.find(offset);
        blocks.lend(block, inside, len)
    }

    /// The device is done with the frame at `offset`.
    pub(super) fn over(&mut self, offset: usize) {
        let (blocks, block, _) = self.find(offset);
        blocks.over(block);
    }
}

/// What a link lends block by block; nothing where all is lent at all times.
#[derive(Debug, Default)]
pub(super) struct Lending {
    pub(super) receive: Option<Blocks>,
    pub(super) send: Option<FrameBlocks>,
}

impl Lending {
    /// All blocks of a link's memory.
    pub(super) fn new(
        buffers: DeviceRegion,
        frames: &FrameRing,
        reuse: bool,
        space: &Arc<dyn AddressSpace>,
        system: &Arc<Counters>,
    ) -> io::Result<Lending> {
        let (area, shape) = (frames.region(), frames.shape());
        let part = |offset, len| area.slice(offset, len).map_err(io::Error::other);
        let short_octets = shape.short_bytes();
        let (short, long) =
            (part(0, short_octets)?, part(short_octets, shape.bytes() - short_octets)?);
        let blocks = |area, octets, number| Blocks::new(area, octets, number, reuse, space, system);
        Ok(Lending {
            receive: Some(blocks(buffers, BUFFER, 0)?),
            send: Some(FrameBlocks {
                short: blocks(short, PAGE, 1)?,
                long: blocks(long, LONG_ROOM, 2)?,
                short_octets,
            }),
        })
    }
}
