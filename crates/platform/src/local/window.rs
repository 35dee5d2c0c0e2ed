//! Grant windows between processes: the engine `arena`.
//!
//! A window is an arena with its own table, created as for ordinary grants and passed to the grantee as a
//! whole. The table says which pages the grantee *may* use; the window is the memory that it *can* reach.
//! Revocation is one-sided because the granter destroys a page's content, in every mapping of every
//! process, before it uses the page again. The destruction is deferred until then, so one call punches
//! many neighbouring pages.
//!
//! [`LocalEngine`] is the granter's end; [`open`] maps the grantee's, a [`WindowView`].

use std::os::fd::RawFd;
use std::sync::Arc;

use ringfence_memory::{Mapping, PAGE_SIZE, Protection};
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::{DomId, Gref};

use super::arena::{self, ArenaFault, ArenaFiles, ArenaShape};
use super::pages::{PageSize, Pages};
use crate::error::PlatformError;
use crate::grants::RevokeError;
use crate::table::{LentTable, TableWords, issue, try_revoke};
use crate::window::{Engine, EngineFacts, EnginePage, GranterTable, IssueError};
use crate::window::{WindowError, WindowHandle, WindowShape, WindowView};

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

/// Grants of a window in a table that both sides map.
pub(super) struct LocalEngine {
    grantee: DomId,
    handle: WindowHandle,
    table: LentTable,
}

/// Creates a window. Returns the files for the grantee as the second value.
pub(super) fn create(
    grantee: DomId,
    handle: WindowHandle,
    shape: WindowShape,
    counters: Arc<Counters>,
) -> Result<(GranterTable<LocalEngine>, ArenaFiles), PlatformError> {
    let bad = |why: ArenaFault| why.of(grantee);
    let arena_shape = ArenaShape::from(shape);
    arena_shape.check().map_err(bad)?;
    let new = arena::create(arena_shape)?;
    let table = arena::map_table(&new.own, arena_shape, true).map_err(bad)?;
    let map = |file, count| {
        let pages = Pages::new(file, count, PageSize::Small);
        pages.map_err(|e| PlatformError::system("mapping a window", e))
    };
    let pages = [map(new.own.writable, shape.writable)?, map(new.own.read_only, shape.read_only)?];
    let engine = LocalEngine { grantee, handle, table };
    Ok((GranterTable::new(engine, grantee, shape, pages, counters), new.handed_over))
}

impl Engine for LocalEngine {
    const FACTS: EngineFacts = EngineFacts {
        name: "arena",
        one_sided: true,
        in_flight: "goes on in the page that was; what is put into the window later is another page",
        cost: "issue and revoke: stores to shared memory; before a page is used again: a hole punched, for many pages at once",
    };
    const CUTS_OFF: bool = false;

    fn issue(&mut self, gref: Gref, page: &EnginePage<'_>) -> Result<(), IssueError> {
        issue(&self.table, gref, self.grantee, page.frame, page.access);
        Ok(())
    }

    fn revoke(&mut self, gref: Gref) -> Result<(), RevokeError> {
        if try_revoke(&self.table, gref) { Ok(()) } else { Err(RevokeError::Busy) }
    }

    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        grefs.iter().for_each(|gref| self.table.set_entry(*gref, 0));
        Ok(())
    }

    fn is_held(&self, gref: Gref) -> bool {
        self.table.status(gref) > 0
    }

    fn handle(&self) -> WindowHandle {
        self.handle
    }

    /// Keeps the window: the next program of the grantee opens the same files.
    fn renew(&mut self) -> Result<bool, WindowError> {
        Ok(false)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
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
