//! State machine of a window's pages and references, for every engine with memory of its own.
//!
//! [`GranterTable`] keeps the state of each page and of each reference, and owns the window's memory. An
//! [`Engine`] makes and breaks the grantee's access. The local engine writes entries into shared memory. The
//! engine of Xen makes hypercalls.

use std::os::fd::RawFd;
use std::sync::Arc;

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_sys::counters::Counters;
use ringfence_sys::numbers::bounded;
use ringfence_wire::grant::{Access, DomId, Gref};

use super::translation::TranslationTable;
use super::translation::{
    EngineFacts, Held, IssueError, PageId, WindowError, WindowHandle, WindowShape,
};
use crate::grants::RevokeError;
use crate::local::pages::Pages;

/// Maximum number of stale pages made fresh together with the requested one.
const SCRUB_AT_ONCE: usize = 256;

/// Number of reserved references, which no table uses.
const RESERVED: u32 = Gref::FIRST_FREE.0;

/// Page as an engine issues it.
pub(crate) struct EnginePage<'a> {
    /// Number of the page among those of its kind.
    pub(crate) frame: u32,
    pub(crate) memory: &'a LentSlice,
    pub(crate) access: Access,
}

/// Enforcement of the grants of one window.
pub(crate) trait Engine: Send {
    /// Guarantees of the engine.
    const FACTS: EngineFacts;

    /// Set if no access of the grantee reaches a page after its revocation. Then a stale page is made fresh by
    /// zeroing it. Otherwise its memory is exchanged.
    const CUTS_OFF: bool;

    /// Makes an access possible. Nothing is issued under `gref`.
    fn issue(&mut self, gref: Gref, page: &EnginePage<'_>) -> Result<(), IssueError>;

    /// Makes one attempt to end the access under `gref`.
    fn revoke(&mut self, gref: Gref) -> Result<(), RevokeError>;

    /// Ends the access under each of `grefs`, which are issued and sorted. After an error the grantee
    /// can begin no new use, or the caller retries.
    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError>;

    /// Returns `true` if the grantee still claims a use under `gref` that was revoked by force.
    fn is_held(&self, gref: Gref) -> bool;

    /// Returns the present name of the window.
    fn handle(&self) -> WindowHandle;

    /// Prepares the window for another program of the grantee. Returns `true` if this ended every grant.
    fn renew(&mut self) -> Result<bool, WindowError>;

    /// Returns the open descriptors of the engine.
    fn descriptors(&self) -> Vec<RawFd>;
}

/// State of a page; see [`crate::window`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WindowPageState {
    Fresh,
    Issued,
    Stale,
    /// Revoked by force under this reference, which the grantee still claims to use.
    Held(Gref),
}

/// State of a reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WindowEntry {
    Free,
    Issued(PageId),
    Held(PageId),
}

/// Granter's end of a window.
pub(crate) struct GranterTable<E> {
    engine: E,
    grantee: DomId,
    shape: WindowShape,
    writable: Pages,
    read_only: Pages,
    states: Vec<WindowPageState>,
    entries: Vec<WindowEntry>,
    stale: Vec<PageId>,
    held: u32,
    counters: Arc<Counters>,
}

impl<E: Engine> GranterTable<E> {
    /// Creates the table of a window with nothing issued. The pages have to be as many as `shape` says.
    pub(crate) fn new(
        engine: E,
        grantee: DomId,
        shape: WindowShape,
        [writable, read_only]: [Pages; 2],
        counters: Arc<Counters>,
    ) -> GranterTable<E> {
        GranterTable {
            engine,
            grantee,
            shape,
            writable,
            read_only,
            states: vec![WindowPageState::Fresh; shape.pages() as usize],
            entries: vec![WindowEntry::Free; shape.entries as usize],
            stale: Vec::new(),
            held: 0,
            counters,
        }
    }

    /// Returns the pages of a page's kind, and its number among them.
    fn place(&self, page: PageId) -> Option<(&Pages, u32)> {
        match self.shape.access_of(page)? {
            Access::ReadWrite => Some((&self.writable, page.0)),
            Access::ReadOnly => Some((&self.read_only, page.0 - self.shape.writable)),
        }
    }

    fn entry(&self, gref: Gref) -> Option<WindowEntry> {
        let at = gref.0.checked_sub(RESERVED)?;
        self.entries.get(at as usize).copied()
    }

    fn set_entry(&mut self, gref: Gref, entry: WindowEntry) {
        if let Some(known) = self.entries.get_mut(gref.0.saturating_sub(RESERVED) as usize) {
            *known = entry;
        }
    }

    fn state(&self, page: PageId) -> Option<WindowPageState> {
        self.states.get(page.0 as usize).copied()
    }

    fn set_state(&mut self, page: PageId, state: WindowPageState) {
        if let Some(known) = self.states.get_mut(page.0 as usize) {
            *known = state;
        }
    }

    /// Destroys the content of `pages` and advances their generations. Returns the pages that the kernel still holds
    /// for the grantee and kept in the file, sorted: they stay stale.
    fn punch(&mut self, pages: &[PageId]) -> Result<Vec<PageId>, RevokeError> {
        let mut kept = Vec::new();
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let first = if access == Access::ReadWrite { 0 } else { self.shape.writable };
            let of_kind = pages.iter().filter(|page| self.shape.access_of(**page) == Some(access));
            let mut numbers: Vec<u32> = of_kind.map(|page| page.0 - first).collect();
            let kind = match access {
                Access::ReadWrite => &mut self.writable,
                Access::ReadOnly => &mut self.read_only,
            };
            let punched = kind.punch(&mut numbers)?;
            self.counters.syscalls.add(punched.calls);
            kept.extend(punched.kept.into_iter().map(|number| PageId(first + number)));
            kind.next_generation(&numbers);
        }
        self.counters.window_scrubs.add((pages.len() - kept.len()) as u64);
        Ok(kept)
    }

    /// Punches `pages`, which are stale and listed nowhere. Lists those again that were kept.
    fn refresh(&mut self, mut pages: Vec<PageId>) -> Result<u32, RevokeError> {
        let kept = match self.punch(&pages) {
            Ok(kept) => kept,
            Err(why) => {
                self.stale.append(&mut pages);
                return Err(why);
            }
        };
        pages.retain(|page| kept.binary_search(page).is_err());
        pages.iter().for_each(|page| self.set_state(*page, WindowPageState::Fresh));
        self.stale.extend(kept);
        Ok(bounded(pages.len(), u32::MAX))
    }

    /// Zeroes `pages`, which no access of the grantee reaches, and advances their generations.
    fn zero(&mut self, pages: &[PageId]) -> Result<(), RevokeError> {
        for page in pages {
            let memory = self.memory(*page).ok_or(RevokeError::NotIssued)?;
            let zeroed = memory.zero(0, PAGE_SIZE);
            debug_assert!(zeroed.is_ok(), "a page has {PAGE_SIZE} bytes");
            let first = self.shape.writable;
            match self.shape.access_of(*page) {
                Some(Access::ReadOnly) => self.read_only.next_generation(&[page.0 - first]),
                _ => self.writable.next_generation(&[page.0]),
            }
        }
        self.counters.window_scrubs.add(pages.len() as u64);
        Ok(())
    }

    /// Frees the page held under `gref` if the grantee has ended its use. Returns `false` if it has not.
    fn reclaim(&mut self, gref: Gref) -> bool {
        let Some(WindowEntry::Held(page)) = self.entry(gref) else { return true };
        if self.engine.is_held(gref) {
            return false;
        }
        // A correct grantee may have written into the page until it ended the use.
        self.set_entry(gref, WindowEntry::Free);
        self.set_state(page, WindowPageState::Stale);
        self.stale.push(page);
        self.held = self.held.saturating_sub(1);
        true
    }
}

impl<E: Engine> TranslationTable for GranterTable<E> {
    fn engine(&self) -> EngineFacts {
        E::FACTS
    }

    fn grantee(&self) -> DomId {
        self.grantee
    }

    fn handle(&self) -> WindowHandle {
        self.engine.handle()
    }

    fn shape(&self) -> WindowShape {
        self.shape
    }

    fn memory(&self, page: PageId) -> Option<LentSlice> {
        let (kind, number) = self.place(page)?;
        kind.slice(number).ok()
    }

    fn generation(&self, page: PageId) -> u32 {
        self.place(page).map_or(0, |(kind, number)| kind.generation(number))
    }

    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError> {
        match self.state(page) {
            Some(WindowPageState::Fresh) => return Ok(()),
            None => return Err(RevokeError::NotIssued),
            Some(WindowPageState::Issued) => return Err(RevokeError::Busy),
            Some(WindowPageState::Held(gref)) if !self.reclaim(gref) => {
                return Err(RevokeError::Busy);
            }
            Some(WindowPageState::Stale | WindowPageState::Held(_)) => {}
        }
        if E::CUTS_OFF {
            self.stale.retain(|stale| *stale != page);
            self.zero(&[page])?;
            self.set_state(page, WindowPageState::Fresh);
            return Ok(());
        }
        // The requested page, and those that became stale last: they are likely neighbours.
        let mut now = self.stale.split_off(self.stale.len().saturating_sub(SCRUB_AT_ONCE));
        if !now.contains(&page) {
            self.stale.retain(|stale| *stale != page);
            now.push(page);
        }
        self.refresh(now)?;
        // The kernel may hold the page for the grantee: a part of a huge page that is pinned.
        if self.state(page) == Some(WindowPageState::Fresh) {
            Ok(())
        } else {
            Err(RevokeError::Busy)
        }
    }

    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError> {
        match self.entry(gref) {
            None => return Err(IssueError::NoEntry { gref, entries: self.shape.entries }),
            Some(WindowEntry::Issued(_)) => return Err(IssueError::Taken { gref }),
            Some(WindowEntry::Held(_)) if !self.reclaim(gref) => {
                return Err(IssueError::Held { gref });
            }
            Some(WindowEntry::Free | WindowEntry::Held(_)) => {}
        }
        let pages = self.shape.pages();
        let kind = self.shape.access_of(page).ok_or(IssueError::NoPage { page, pages })?;
        if kind != access {
            return Err(IssueError::Access { page, kind });
        }
        if self.state(page) != Some(WindowPageState::Fresh) {
            return Err(IssueError::NotFresh { page });
        }
        let (kind, frame) = self.place(page).ok_or(IssueError::NoPage { page, pages })?;
        let memory = kind.slice(frame).map_err(|_| IssueError::NoPage { page, pages })?;
        self.engine.issue(gref, &EnginePage { frame, memory: &memory, access })?;
        self.set_entry(gref, WindowEntry::Issued(page));
        self.set_state(page, WindowPageState::Issued);
        self.counters.window_issues.add(1);
        Ok(())
    }

    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        let Some(WindowEntry::Issued(page)) = self.entry(gref) else {
            return Err(RevokeError::NotIssued);
        };
        self.engine.revoke(gref)?;
        self.set_entry(gref, WindowEntry::Free);
        self.set_state(page, WindowPageState::Stale);
        self.stale.push(page);
        self.counters.window_revokes.add(1);
        Ok(page)
    }

    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        let mut pages: Vec<(Gref, PageId)> = grefs
            .iter()
            .filter_map(|gref| match self.entry(*gref) {
                Some(WindowEntry::Issued(page)) => Some((*gref, page)),
                _ => None,
            })
            .collect();
        // Revoke a reference that is listed twice only once.
        pages.sort_unstable_by_key(|(gref, _)| *gref);
        pages.dedup();
        let issued: Vec<Gref> = pages.iter().map(|(gref, _)| *gref).collect();
        self.engine.revoke_forced(&issued)?;
        let just_pages: Vec<PageId> = pages.iter().map(|(_, page)| *page).collect();
        let kept = self.punch(&just_pages)?;
        for (gref, page) in pages {
            self.counters.window_revokes.add(1);
            if self.engine.is_held(gref) {
                self.set_entry(gref, WindowEntry::Held(page));
                self.set_state(page, WindowPageState::Held(gref));
                self.held += 1;
                continue;
            }
            self.set_entry(gref, WindowEntry::Free);
            if kept.binary_search(&page).is_ok() {
                self.set_state(page, WindowPageState::Stale);
                self.stale.push(page);
            } else {
                self.set_state(page, WindowPageState::Fresh);
            }
        }
        Ok(())
    }

    fn scrub(&mut self) -> Result<u32, RevokeError> {
        let stale = core::mem::take(&mut self.stale);
        self.refresh(stale)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all = [&self.writable, &self.read_only].map(Pages::descriptor).to_vec();
        all.extend(self.engine.descriptors());
        all
    }

    fn renew(&mut self) -> Result<(), WindowError> {
        if self.engine.renew()? {
            for entry in &mut self.entries {
                if let WindowEntry::Issued(page) = core::mem::replace(entry, WindowEntry::Free)
                    && let Some(state) = self.states.get_mut(page.0 as usize)
                {
                    *state = WindowPageState::Stale;
                    self.stale.push(page);
                }
            }
        }
        Ok(())
    }

    fn held(&mut self) -> Held {
        if self.held > 0 {
            let held = |entry: &WindowEntry| matches!(entry, WindowEntry::Held(_));
            let grefs: Vec<Gref> = (RESERVED..)
                .zip(&self.entries)
                .filter_map(|(number, entry)| held(entry).then_some(Gref(number)))
                .collect();
            grefs.into_iter().for_each(|gref| {
                self.reclaim(gref);
            });
        }
        Held { pages: self.held }
    }
}
