//! Region table: a guest's region of an I/O address space, as a grant table.

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::io;
use std::sync::Arc;

use ringfence_memory::{
    DeviceAccess, DeviceRange, DeviceRegion, LentSlice, Mapping, PAGE_SIZE, Protection,
};
use ringfence_sys::numbers::bounded;

use super::AddressSpace;
use ringfence_platform::window::{EngineFacts, Held, IssueError};
use ringfence_platform::{
    Access, Counters, DomId, Gref, PageId, RevokeError, TranslationTable, WindowHandle, WindowShape,
};

/// Base and size of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionShape {
    /// I/O address of reference 0, a multiple of the page size.
    pub base: u64,
    /// Numbers of pages and entries.
    pub window: WindowShape,
    /// Page size in bytes: [`PAGE_SIZE`], or a multiple of it for a table of blocks.
    pub page: u32,
}

impl RegionShape {
    /// Returns the I/O address of the page under `gref`; `None` if the table has no such entry. The users of a
    /// table compute device addresses with it.
    pub fn address(&self, gref: Gref) -> Option<u64> {
        let first = Gref::FIRST_FREE.0;
        let known = gref.0.checked_sub(first).is_some_and(|at| at < self.window.entries);
        let offset = u64::from(gref.0) * u64::from(self.page);
        known.then(|| self.base.checked_add(offset)).flatten()
    }

    /// Returns a part of the page under `gref`, for a descriptor. The result is `None` if the table has no
    /// such entry, the part does not lie inside the page, or the address is below
    /// [`FIRST_IO_ADDRESS`](ringfence_memory::FIRST_IO_ADDRESS).
    pub fn range(
        &self,
        gref: Gref,
        offset: u32,
        len: u32,
        access: DeviceAccess,
    ) -> Option<DeviceRange> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.page);
        let address = self.address(gref).filter(|_| inside)?;
        DeviceRange::io(address.checked_add(u64::from(offset))?, len, access)
    }
}

/// States of a page: ready to issue, issued, or revoked and not yet zeroed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RegionPageState {
    Fresh,
    Issued,
    Stale,
}

/// Memory of a table.
enum Backing {
    /// Memory allocated for the table.
    Own(LentSlice),
    /// Memory of an owner that stores only data for the device there.
    Area(DeviceRegion),
}

/// Granter's table over its region.
///
/// The table has its own memory, or covers an area of another owner ([`RegionTable::over`]). In the
/// second case it only controls the device's access: [`TranslationTable::memory`] returns `None`, and no
/// content is zeroed.
pub struct RegionTable {
    grantee: DomId,
    handle: WindowHandle,
    region: RegionShape,
    space: Arc<dyn AddressSpace>,
    memory: Backing,
    states: Vec<RegionPageState>,
    generations: Vec<u32>,
    entries: Vec<Option<PageId>>,
    counters: Arc<Counters>,
}

impl RegionTable {
    /// Makes a table for `grantee`, which drives the device. No other table may use the region's addresses.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, and `InvalidInput` for an unaligned base, a region that exceeds the address
    /// space, a page size other than [`PAGE_SIZE`], or a region without pages.
    pub fn new(
        grantee: DomId,
        handle: WindowHandle,
        region: RegionShape,
        space: Arc<dyn AddressSpace>,
        counters: Arc<Counters>,
    ) -> io::Result<RegionTable> {
        let bytes = bytes_of(&region).filter(|_| region.page as usize == PAGE_SIZE);
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        // Shared memory, not private memory: after a fork, the device's pages must remain those of this process.
        let file = rustix::fs::memfd_create("ringfence-region", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        let memory = Backing::Own(Mapping::new(&file, 0, bytes, Protection::ReadWrite)?.lent());
        Ok(RegionTable::with(grantee, handle, region, space, memory, counters))
    }

    /// Makes a table over an area of memory, whose pages are the area's consecutive blocks. Issuing maps a
    /// block. The table zeroes nothing: the owner of the area ensures that it holds only data for the device.
    ///
    /// # Errors
    ///
    /// Returns `InvalidInput` for an invalid region, an area shorter than the blocks, and writable pages in a
    /// read-only area.
    pub fn over(
        grantee: DomId,
        region: RegionShape,
        area: DeviceRegion,
        space: Arc<dyn AddressSpace>,
        counters: Arc<Counters>,
    ) -> io::Result<RegionTable> {
        let fits = bytes_of(&region).is_some_and(|bytes| bytes as u64 <= area.len());
        if !fits || (region.window.writable > 0 && !area.is_writable()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // No grantee opens this table by its handle.
        let handle = WindowHandle(u32::MAX);
        Ok(RegionTable::with(grantee, handle, region, space, Backing::Area(area), counters))
    }

    fn with(
        grantee: DomId,
        handle: WindowHandle,
        region: RegionShape,
        space: Arc<dyn AddressSpace>,
        memory: Backing,
        counters: Arc<Counters>,
    ) -> RegionTable {
        let pages = region.window.pages() as usize;
        RegionTable {
            grantee,
            handle,
            region,
            space,
            memory,
            states: vec![RegionPageState::Fresh; pages],
            generations: vec![0; pages],
            entries: vec![None; region.window.entries as usize],
            counters,
        }
    }

    /// Returns the base and size of the region.
    pub fn region(&self) -> RegionShape {
        self.region
    }

    fn slot(&mut self, gref: Gref) -> Option<&mut Option<PageId>> {
        let at = gref.0.checked_sub(Gref::FIRST_FREE.0)?;
        self.entries.get_mut(at as usize)
    }

    fn state(&mut self, page: PageId) -> Option<&mut RegionPageState> {
        self.states.get_mut(page.0 as usize)
    }

    /// Removes the device's access to the page under `gref`.
    fn unmap(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        let page = self.slot(gref).and_then(|slot| *slot).ok_or(RevokeError::NotIssued)?;
        let address = self.region.address(gref).ok_or(RevokeError::NotIssued)?;
        self.counters.syscalls.add(1);
        self.space.unmap(address).map_err(|error| RevokeError::System(errno(&error)))?;
        if let Some(slot) = self.slot(gref) {
            *slot = None;
        }
        if let Some(state) = self.state(page) {
            *state = RegionPageState::Stale;
        }
        self.counters.window_revokes.add(1);
        Ok(page)
    }

    /// Gives the device access to a page.
    fn map(&self, address: u64, page: PageId, access: Access) -> io::Result<()> {
        let len = self.region.page as usize;
        let offset = page.0 as usize * len;
        let outside = |_| io::Error::from(io::ErrorKind::InvalidInput);
        match &self.memory {
            Backing::Own(memory) => {
                let page = memory.slice(offset, len).map_err(outside)?;
                self.space.map(address, &page, access)
            }
            Backing::Area(area) => {
                let block = area.slice(offset, len).map_err(outside)?;
                self.space.map_region(address, &block, access)
            }
        }
    }

    /// Zeroes a page that no device can access.
    fn empty(&mut self, page: PageId) -> Result<(), RevokeError> {
        if let Some(memory) = self.memory(page) {
            memory.zero(0, PAGE_SIZE).map_err(|_| RevokeError::NotIssued)?;
        }
        if let Some(generation) = self.generations.get_mut(page.0 as usize) {
            *generation = generation.wrapping_add(1);
        }
        if let Some(state) = self.state(page) {
            *state = RegionPageState::Fresh;
        }
        self.counters.window_scrubs.add(1);
        Ok(())
    }
}

impl TranslationTable for RegionTable {
    fn engine(&self) -> EngineFacts {
        self.space.engine()
    }

    fn grantee(&self) -> DomId {
        self.grantee
    }

    fn handle(&self) -> WindowHandle {
        self.handle
    }

    fn shape(&self) -> WindowShape {
        self.region.window
    }

    fn memory(&self, page: PageId) -> Option<LentSlice> {
        self.region.window.access_of(page)?;
        match &self.memory {
            Backing::Own(memory) => memory.slice(page.0 as usize * PAGE_SIZE, PAGE_SIZE).ok(),
            Backing::Area(_) => None,
        }
    }

    fn generation(&self, page: PageId) -> u32 {
        self.generations.get(page.0 as usize).copied().unwrap_or(0)
    }

    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError> {
        match self.state(page) {
            None => Err(RevokeError::NotIssued),
            Some(RegionPageState::Fresh) => Ok(()),
            Some(RegionPageState::Issued) => Err(RevokeError::Busy),
            Some(RegionPageState::Stale) => self.empty(page),
        }
    }

    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError> {
        let WindowShape { entries, .. } = self.region.window;
        let none = IssueError::NoEntry { gref, entries };
        match self.slot(gref) {
            None => return Err(none),
            Some(Some(_)) => return Err(IssueError::Taken { gref }),
            Some(None) => {}
        }
        let pages = self.region.window.pages();
        let kind = self.region.window.access_of(page).ok_or(IssueError::NoPage { page, pages })?;
        if kind != access {
            return Err(IssueError::Access { page, kind });
        }
        if self.state(page).copied() != Some(RegionPageState::Fresh) {
            return Err(IssueError::NotFresh { page });
        }
        let address = self.region.address(gref).ok_or(none)?;
        self.counters.syscalls.add(1);
        let mapped = self.map(address, page, access);
        mapped.map_err(|error| IssueError::System(errno(&error)))?;
        if let Some(slot) = self.slot(gref) {
            *slot = Some(page);
        }
        if let Some(state) = self.state(page) {
            *state = RegionPageState::Issued;
        }
        self.counters.window_issues.add(1);
        Ok(())
    }

    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        self.unmap(gref)
    }

    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        for gref in grefs {
            match self.unmap(*gref) {
                Ok(page) => self.empty(page)?,
                Err(RevokeError::NotIssued) => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    fn scrub(&mut self) -> Result<u32, RevokeError> {
        let pages = (0u32..).zip(&self.states);
        let stale: Vec<u32> = pages
            .filter(|(_, state)| **state == RegionPageState::Stale)
            .map(|(page, _)| page)
            .collect();
        for page in &stale {
            self.empty(PageId(*page))?;
        }
        Ok(bounded(stale.len(), u32::MAX))
    }

    fn held(&mut self) -> Held {
        Held::default()
    }
}

impl Drop for RegionTable {
    /// Removes all access of the device. Pages that the kernel does not unmap stay mapped in the address
    /// space until the device is closed.
    fn drop(&mut self) {
        let grefs: Vec<Gref> = self.region.window.grefs().collect();
        for gref in grefs {
            let _ = self.unmap(gref);
        }
    }
}

/// Returns the size of a region's memory in bytes; `None` for an invalid region.
fn bytes_of(region: &RegionShape) -> Option<usize> {
    let (page, window) = (region.page as usize, region.window);
    let whole = page > 0 && page.is_multiple_of(PAGE_SIZE) && window.pages() > 0;
    let last = window.grefs().next_back().and_then(|gref| region.address(gref))?;
    let fits = last.checked_add(u64::from(region.page)).is_some();
    let aligned = region.base.is_multiple_of(PAGE_SIZE as u64);
    if whole && fits && aligned { page.checked_mul(window.pages() as usize) } else { None }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(rustix::io::Errno::INVAL.raw_os_error())
}
