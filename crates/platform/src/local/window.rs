//! Grant windows between processes: the engine `arena`.
//!
//! A window is an arena with its own table, created as for ordinary grants and passed to the grantee as a
//! whole. The table says which pages the grantee *may* use; the window is the memory that it *can* reach.
//! Revocation is one-sided because the granter destroys a page's content, in every mapping of every
//! process, before it uses the page again. The destruction is deferred until then, so one call punches
//! many neighbouring pages.
//!
//! [`LocalTable`] is the granter's end; [`open`] maps the grantee's, a [`WindowView`].

use std::os::fd::RawFd;
use std::sync::Arc;

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};

use super::arena::{self, ArenaFault, ArenaFiles, ArenaShape};
use super::granter::Pages;
use crate::table::{LentTable, TableWords, issue, try_revoke};

use crate::window::{EngineFacts, Held, IssueError};
use crate::{
    Access, Counters, DomId, Gref, PageId, PlatformError, RevokeError, TranslationTable,
    WindowHandle, WindowShape, WindowView,
};

/// Maximum number of stale pages made fresh together with the requested one.
const SCRUB_AT_ONCE: usize = 256;

/// Number of reserved references, which no table uses.
const RESERVED: u32 = Gref::FIRST_FREE.0;

impl From<WindowShape> for ArenaShape {
    fn from(shape: WindowShape) -> ArenaShape {
        let WindowShape { writable, read_only, entries } = shape;
        ArenaShape { writable, read_only, references: entries.saturating_add(RESERVED) }
    }
}

impl From<ArenaShape> for WindowShape {
    fn from(shape: ArenaShape) -> WindowShape {
        let ArenaShape { writable, read_only, references } = shape;
        WindowShape { writable, read_only, entries: references.saturating_sub(RESERVED) }
    }
}

/// State of a page; see [`crate::window`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Fresh,
    Issued,
    Stale,
    /// Revoked by force under this reference, which the grantee still claims to use.
    Held(Gref),
}

/// State of a reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    Free,
    Issued(PageId),
    Held(PageId),
}

/// Granter's end of a window.
pub(super) struct LocalTable {
    grantee: DomId,
    handle: WindowHandle,
    shape: WindowShape,
    table: LentTable,
    writable: Pages,
    read_only: Pages,
    states: Vec<State>,
    entries: Vec<Entry>,
    stale: Vec<PageId>,
    held: u32,
    counters: Arc<Counters>,
}

impl LocalTable {
    /// Creates a window. Returns the files for the grantee as the second value.
    pub(super) fn create(
        grantee: DomId,
        handle: WindowHandle,
        shape: WindowShape,
        counters: Arc<Counters>,
    ) -> Result<(LocalTable, ArenaFiles), PlatformError> {
        let bad = |why| PlatformError::bad_arena(grantee, why);
        let arena_shape = ArenaShape::from(shape);
        arena_shape.check().map_err(bad)?;
        let new = arena::create(arena_shape)?;
        let table = arena::map_table(&new.own, arena_shape, true).map_err(bad)?;
        let map = |file, count| {
            Pages::new(file, count).map_err(|e| PlatformError::system("mapping a window", e))
        };
        let this = LocalTable {
            grantee,
            handle,
            shape,
            table,
            writable: map(new.own.writable, shape.writable)?,
            read_only: map(new.own.read_only, shape.read_only)?,
            states: vec![State::Fresh; shape.pages() as usize],
            entries: vec![Entry::Free; shape.entries as usize],
            stale: Vec::new(),
            held: 0,
            counters,
        };
        Ok((this, new.handed_over))
    }

    /// Returns the pages of a page's kind, and its number among them.
    fn place(&mut self, page: PageId) -> Option<(&mut Pages, u32)> {
        match self.shape.access_of(page)? {
            Access::ReadWrite => Some((&mut self.writable, page.0)),
            Access::ReadOnly => Some((&mut self.read_only, page.0 - self.shape.writable)),
        }
    }

    fn entry(&self, gref: Gref) -> Option<Entry> {
        let at = gref.0.checked_sub(RESERVED)?;
        self.entries.get(at as usize).copied()
    }

    fn set_entry(&mut self, gref: Gref, entry: Entry) {
        if let Some(known) = self.entries.get_mut(gref.0.saturating_sub(RESERVED) as usize) {
            *known = entry;
        }
    }

    fn state(&self, page: PageId) -> Option<State> {
        self.states.get(page.0 as usize).copied()
    }

    fn set_state(&mut self, page: PageId, state: State) {
        if let Some(known) = self.states.get_mut(page.0 as usize) {
            *known = state;
        }
    }

    /// Destroys the content of `pages` and advances their generations.
    fn punch(&mut self, pages: &[PageId]) -> Result<(), RevokeError> {
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let first = if access == Access::ReadWrite { 0 } else { self.shape.writable };
            let of_kind = pages.iter().filter(|page| self.shape.access_of(**page) == Some(access));
            let mut numbers: Vec<u32> = of_kind.map(|page| page.0 - first).collect();
            let kind = match access {
                Access::ReadWrite => &mut self.writable,
                Access::ReadOnly => &mut self.read_only,
            };
            let calls = kind.punch(&mut numbers)?;
            self.counters.syscalls.add(calls);
            kind.next_generation(&numbers);
        }
        self.counters.window_scrubs.add(pages.len() as u64);
        Ok(())
    }

    /// Frees the page held under `gref` if the grantee has ended its use. Returns `false` if it has not.
    fn reclaim(&mut self, gref: Gref) -> bool {
        let Some(Entry::Held(page)) = self.entry(gref) else { return true };
        if self.table.status(gref) > 0 {
            return false;
        }
        // A correct grantee may have written into the page until it ended the use.
        self.set_entry(gref, Entry::Free);
        self.set_state(page, State::Stale);
        self.stale.push(page);
        self.held = self.held.saturating_sub(1);
        true
    }
}

impl TranslationTable for LocalTable {
    fn engine(&self) -> EngineFacts {
        EngineFacts {
            name: "arena",
            one_sided: true,
            in_flight: "goes on in the page that was; what is put into the window later is another page",
            cost: "issue and revoke: stores to shared memory; before a page is used again: a hole punched, for many pages at once",
        }
    }

    fn grantee(&self) -> DomId {
        self.grantee
    }

    fn handle(&self) -> WindowHandle {
        self.handle
    }

    fn shape(&self) -> WindowShape {
        self.shape
    }

    fn memory(&self, page: PageId) -> Option<LentSlice> {
        let (kind, number) = match self.shape.access_of(page)? {
            Access::ReadWrite => (&self.writable, page.0),
            Access::ReadOnly => (&self.read_only, page.0 - self.shape.writable),
        };
        kind.slice(number).ok()
    }

    fn generation(&self, page: PageId) -> u32 {
        match self.shape.access_of(page) {
            Some(Access::ReadWrite) => self.writable.generation(page.0),
            Some(Access::ReadOnly) => self.read_only.generation(page.0 - self.shape.writable),
            None => 0,
        }
    }

    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError> {
        match self.state(page) {
            Some(State::Fresh) => return Ok(()),
            None => return Err(RevokeError::NotIssued),
            Some(State::Issued) => return Err(RevokeError::Busy),
            Some(State::Held(gref)) if !self.reclaim(gref) => return Err(RevokeError::Busy),
            Some(State::Stale | State::Held(_)) => {}
        }
        // The requested page, and those that became stale last: they are likely neighbours.
        let mut now = self.stale.split_off(self.stale.len().saturating_sub(SCRUB_AT_ONCE));
        if !now.contains(&page) {
            self.stale.retain(|stale| *stale != page);
            now.push(page);
        }
        if let Err(why) = self.punch(&now) {
            self.stale.append(&mut now);
            return Err(why);
        }
        now.into_iter().for_each(|page| self.set_state(page, State::Fresh));
        Ok(())
    }

    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError> {
        match self.entry(gref) {
            None => return Err(IssueError::NoEntry { gref, entries: self.shape.entries }),
            Some(Entry::Issued(_)) => return Err(IssueError::Taken { gref }),
            Some(Entry::Held(_)) if !self.reclaim(gref) => return Err(IssueError::Held { gref }),
            Some(Entry::Free | Entry::Held(_)) => {}
        }
        let pages = self.shape.pages();
        let kind = self.shape.access_of(page).ok_or(IssueError::NoPage { page, pages })?;
        if kind != access {
            return Err(IssueError::Access { page, kind });
        }
        if self.state(page) != Some(State::Fresh) {
            return Err(IssueError::NotFresh { page });
        }
        let (_, frame) = self.place(page).ok_or(IssueError::NoPage { page, pages })?;
        issue(&self.table, gref, self.grantee, frame, access);
        self.set_entry(gref, Entry::Issued(page));
        self.set_state(page, State::Issued);
        self.counters.window_issues.add(1);
        Ok(())
    }

    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError> {
        let Some(Entry::Issued(page)) = self.entry(gref) else {
            return Err(RevokeError::NotIssued);
        };
        if !try_revoke(&self.table, gref) {
            return Err(RevokeError::Busy);
        }
        self.set_entry(gref, Entry::Free);
        self.set_state(page, State::Stale);
        self.stale.push(page);
        self.counters.window_revokes.add(1);
        Ok(page)
    }

    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        let mut pages = Vec::with_capacity(grefs.len());
        for gref in grefs {
            if let Some(Entry::Issued(page)) = self.entry(*gref) {
                self.table.set_entry(*gref, 0);
                pages.push((*gref, page));
            }
        }
        // Revoke a reference that is listed twice only once.
        pages.sort_unstable_by_key(|(gref, _)| *gref);
        pages.dedup();
        let just_pages: Vec<PageId> = pages.iter().map(|(_, page)| *page).collect();
        self.punch(&just_pages)?;
        for (gref, page) in pages {
            self.counters.window_revokes.add(1);
            if self.table.status(gref) == 0 {
                self.set_entry(gref, Entry::Free);
                self.set_state(page, State::Fresh);
            } else {
                self.set_entry(gref, Entry::Held(page));
                self.set_state(page, State::Held(gref));
                self.held += 1;
            }
        }
        Ok(())
    }

    fn scrub(&mut self) -> Result<u32, RevokeError> {
        let stale = core::mem::take(&mut self.stale);
        if let Err(why) = self.punch(&stale) {
            self.stale = stale;
            return Err(why);
        }
        stale.iter().for_each(|page| self.set_state(*page, State::Fresh));
        Ok(u32::try_from(stale.len()).unwrap_or(u32::MAX))
    }

    fn descriptors(&self) -> Vec<RawFd> {
        [&self.writable, &self.read_only].map(Pages::descriptor).to_vec()
    }

    fn held(&mut self) -> Held {
        if self.held > 0 {
            let held = |entry: &Entry| matches!(entry, Entry::Held(_));
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

/// Verifies and maps the files of a window that was lent to `me`.
pub(super) fn open(
    me: DomId,
    files: &ArenaFiles,
    shape: ArenaShape,
) -> Result<WindowView, ArenaFault> {
    files.verify(shape)?;
    let table = arena::map_table(files, shape, false)?;
    let map = |file: &std::os::fd::OwnedFd, pages: u32, protection| {
        let bytes = pages.max(1) as usize * PAGE_SIZE;
        let mapping = Mapping::new(file, 0, bytes, protection);
        mapping
            .map(|mapping| mapping.lent())
            .map_err(|e| ArenaFault::System(e.raw_os_error().unwrap_or(0)))
    };
    let memory = [
        map(&files.writable, shape.writable, Protection::ReadWrite)?,
        map(&files.read_only, shape.read_only, Protection::ReadOnly)?,
    ];
    Ok(WindowView::new(me, shape.into(), table, memory))
}
