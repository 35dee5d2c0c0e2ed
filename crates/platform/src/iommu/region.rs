//! A guest's region of an I/O address space, as a table of grants.

use std::io;
use std::sync::Arc;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};

use super::AddressSpace;
use crate::window::{EngineFacts, Held, IssueError};
use crate::{
    Access, Counters, DomId, Gref, PageId, RevokeError, TranslationTable, WindowHandle, WindowShape,
};

/// Where a region begins and how large it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionShape {
    /// The I/O address of reference 0: a multiple of the page size.
    pub base: u64,
    /// Pages and entries.
    pub window: WindowShape,
}

impl RegionShape {
    /// The I/O address of the page under `gref`; `None` if the table has no such entry. What a user of the
    /// table makes a device's address of: it is all the look-up there is.
    pub fn address(&self, gref: Gref) -> Option<u64> {
        let first = Gref::FIRST_FREE.0;
        let known = gref.0.checked_sub(first).is_some_and(|at| at < self.window.entries);
        let offset = u64::from(gref.0) * PAGE_SIZE as u64;
        known.then(|| self.base.checked_add(offset)).flatten()
    }
}

/// Where a page is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Fresh,
    Issued,
    Stale,
}

/// The granter's table over its region. The memory is its own: private pages of this process.
pub struct RegionTable {
    grantee: DomId,
    handle: WindowHandle,
    region: RegionShape,
    space: Arc<dyn AddressSpace>,
    memory: LentSlice,
    states: Vec<State>,
    generations: Vec<u32>,
    entries: Vec<Option<PageId>>,
    counters: Arc<Counters>,
}

impl RegionTable {
    /// Makes a table for `grantee`, who drives the device. Nobody else may use the region's addresses.
    ///
    /// # Errors
    ///
    /// The kernel's; `EINVAL` for a base that is no multiple of a page, a region that has no addresses left
    /// for its entries, or one without pages.
    pub fn new(
        grantee: DomId,
        handle: WindowHandle,
        region: RegionShape,
        space: Arc<dyn AddressSpace>,
        counters: Arc<Counters>,
    ) -> io::Result<RegionTable> {
        let pages = region.window.pages() as usize;
        let last = region.window.grefs().next_back().and_then(|gref| region.address(gref));
        let fits = last.is_some_and(|last| last.checked_add(PAGE_SIZE as u64).is_some());
        if !region.base.is_multiple_of(PAGE_SIZE as u64) || !fits || pages == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // Shared memory, not private: pages that a device holds must stay this process's after a fork.
        let file = rustix::fs::memfd_create("ringfence-region", rustix::fs::MemfdFlags::CLOEXEC)?;
        let bytes = pages * PAGE_SIZE;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        let memory = Mapping::new(&file, 0, bytes, Protection::ReadWrite)?.lent();
        Ok(RegionTable {
            grantee,
            handle,
            region,
            space,
            memory,
            states: vec![State::Fresh; pages],
            generations: vec![0; pages],
            entries: vec![None; region.window.entries as usize],
            counters,
        })
    }

    /// Where it is.
    pub fn region(&self) -> RegionShape {
        self.region
    }

    fn slot(&mut self, gref: Gref) -> Option<&mut Option<PageId>> {
        let at = gref.0.checked_sub(Gref::FIRST_FREE.0)?;
        self.entries.get_mut(at as usize)
    }

    fn state(&mut self, page: PageId) -> Option<&mut State> {
        self.states.get_mut(page.0 as usize)
    }

    /// Takes the page under `gref` away from the device.
    fn unmap(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        let page = self.slot(gref).and_then(|slot| *slot).ok_or(RevokeError::NotIssued)?;
        let address = self.region.address(gref).ok_or(RevokeError::NotIssued)?;
        self.counters.syscalls.add(1);
        self.space.unmap(address).map_err(|error| RevokeError::System(errno(&error)))?;
        if let Some(slot) = self.slot(gref) {
            *slot = None;
        }
        if let Some(state) = self.state(page) {
            *state = State::Stale;
        }
        self.counters.window_revokes.add(1);
        Ok(page)
    }

    /// Empties a page that no device reaches.
    fn empty(&mut self, page: PageId) -> Result<(), RevokeError> {
        let Some(memory) = self.memory(page) else { return Err(RevokeError::NotIssued) };
        memory.zero(0, PAGE_SIZE).map_err(|_| RevokeError::NotIssued)?;
        if let Some(generation) = self.generations.get_mut(page.0 as usize) {
            *generation = generation.wrapping_add(1);
        }
        if let Some(state) = self.state(page) {
            *state = State::Fresh;
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
        self.memory.slice(page.0 as usize * PAGE_SIZE, PAGE_SIZE).ok()
    }

    fn generation(&self, page: PageId) -> u32 {
        self.generations.get(page.0 as usize).copied().unwrap_or(0)
    }

    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError> {
        match self.state(page) {
            None => Err(RevokeError::NotIssued),
            Some(State::Fresh) => Ok(()),
            Some(State::Issued) => Err(RevokeError::Busy),
            Some(State::Stale) => self.empty(page),
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
        if self.state(page).copied() != Some(State::Fresh) {
            return Err(IssueError::NotFresh { page });
        }
        let address = self.region.address(gref).ok_or(none)?;
        let memory = self.memory(page).ok_or(IssueError::NoPage { page, pages })?;
        self.counters.syscalls.add(1);
        let mapped = self.space.map(address, &memory, access);
        mapped.map_err(|error| IssueError::System(errno(&error)))?;
        if let Some(slot) = self.slot(gref) {
            *slot = Some(page);
        }
        if let Some(state) = self.state(page) {
            *state = State::Issued;
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
        let stale: Vec<u32> =
            pages.filter(|(_, state)| **state == State::Stale).map(|(page, _)| page).collect();
        for page in &stale {
            self.empty(PageId(*page))?;
        }
        Ok(u32::try_from(stale.len()).unwrap_or(u32::MAX))
    }

    fn held(&mut self) -> Held {
        Held::default()
    }
}

impl Drop for RegionTable {
    /// The device loses what it was granted. What the kernel does not take away stays mapped here, by the
    /// space, until the device itself is closed.
    fn drop(&mut self) {
        let grefs: Vec<Gref> = self.region.window.grefs().collect();
        for gref in grefs {
            let _ = self.unmap(gref);
        }
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(rustix::io::Errno::INVAL.raw_os_error())
}

#[cfg(test)]
mod tests;
