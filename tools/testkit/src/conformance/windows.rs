//! Conformance suite of the engines of [`TranslationTable`].
//!
//! The suite is for implementations of an engine. [`WindowSuite`] acts as the granter on a table, and a
//! [`WindowPeer`] accesses what was granted: a program that has the window mapped, a device, or a kernel
//! thread. The suite compares the peer's results with the content of the memory.

mod remote;

use core::sync::atomic::Ordering::SeqCst;

use ringfence_memory::{LentSlice, OutOfRange, PAGE_SIZE};

use super::outcome::{CaseReport, Outcome, Summary};
use ringfence_platform::window::IssueError;
use ringfence_platform::{
    Access, Gref, PageId, RevokeError, TranslationTable, WindowShape, WindowView,
};

/// Grantee of a window under test.
pub trait WindowPeer {
    /// Tries to read the first eight bytes (native byte order) of the page under `gref`. Returns `None` if
    /// the access was refused or found nothing.
    ///
    /// # Errors
    ///
    /// Returns a message if the peer could not try.
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String>;

    /// Tries to write `tag` to the page under `gref`. The result of the access is not reported.
    ///
    /// # Errors
    ///
    /// Returns a message if the peer could not try.
    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String>;
}

/// Correct program that has the grant window mapped.
pub struct WindowProgram(pub WindowView);

impl WindowProgram {
    /// Calls `act` with the memory and the offset of the page, if it is granted for `access`.
    fn access<T>(
        &mut self,
        gref: Gref,
        access: Access,
        act: impl FnOnce(&LentSlice, usize) -> Result<T, OutOfRange>,
    ) -> Result<Option<T>, String> {
        let mut out = Vec::new();
        self.0.begin([(gref, access)].into_iter(), &mut out);
        let Some(Ok(place)) = out.pop() else { return Ok(None) };
        let (memory, offset) = self.0.memory(place);
        let done = act(memory, offset);
        self.0.end(gref);
        done.map(Some).map_err(|error| error.to_string())
    }
}

impl WindowPeer for WindowProgram {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        self.access(gref, Access::ReadOnly, |memory, offset| memory.load_u64(offset, SeqCst))
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        let store = |memory: &LentSlice, offset| memory.store_u64(offset, tag, SeqCst);
        self.access(gref, Access::ReadWrite, store).map(drop)
    }
}

/// Minimum shape of a table for the suite: two pages of each kind, three entries.
pub const LEAST: WindowShape = WindowShape { writable: 2, read_only: 2, entries: 3 };

/// Table under test with its peer.
pub struct WindowSuite<'a> {
    /// Granter's end of the window, with nothing issued.
    pub table: &'a mut dyn TranslationTable,
    /// Table of another granter for the same grantee.
    pub neighbour: &'a mut dyn TranslationTable,
    /// Grantee that accesses the pages of `table`.
    pub peer: &'a mut dyn WindowPeer,
}

type Verdict = Result<(), String>;
type Case = (&'static str, fn(&mut WindowSuite<'_>) -> Verdict);

macro_rules! require {
    ($holds:expr, $($said:tt)*) => {
        if !$holds {
            return Err(format!($($said)*));
        }
    };
}

macro_rules! cases {
    ($($name:ident,)*) => { [$((stringify!($name), $name as fn(&mut WindowSuite<'_>) -> Verdict),)*] };
}

const CASES: [Case; 14] = cases![
    the_engine_says_what_it_promises,
    what_was_not_issued_is_not_reached,
    what_was_issued_is_read,
    what_was_issued_for_writing_is_written,
    what_was_issued_for_reading_is_not_written,
    every_entry_leads_to_its_page,
    what_is_beyond_the_table_is_refused,
    what_cannot_be_issued_is_refused,
    a_revoked_page_is_not_reached,
    a_revoked_page_keeps_its_content_for_the_granter,
    a_stale_page_is_not_issued_before_it_is_fresh,
    a_reference_used_again_leads_to_the_new_page_alone,
    force_takes_every_page_and_destroys_its_content,
    a_neighbour_is_not_reached,
];

impl WindowSuite<'_> {
    /// Runs every case, and calls `report` after each.
    pub fn run(&mut self, report: &mut dyn FnMut(CaseReport)) -> Summary {
        let mut summary = Summary::default();
        for (name, case) in CASES {
            let verdict = self.begin().and_then(|()| case(self));
            let outcome = verdict.map_or_else(Outcome::Failed, |()| Outcome::Passed);
            summary.count(&outcome);
            report(CaseReport { name, outcome });
        }
        summary
    }

    /// Revokes the pages that the previous case left issued, and empties all pages.
    fn begin(&mut self) -> Verdict {
        for table in [&mut *self.table, &mut *self.neighbour] {
            let all: Vec<Gref> = table.shape().grefs().collect();
            table.revoke_forced(&all).map_err(|e| format!("taking everything back: {e}"))?;
            table.scrub().map_err(|e| format!("making everything fresh: {e}"))?;
            for page in 0..table.shape().pages() {
                let memory = table.memory(PageId(page)).ok_or("a page without memory")?;
                memory.zero(0, PAGE_SIZE).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    fn page(&self, access: Access, n: usize) -> Result<PageId, String> {
        let mut pages = self.table.shape().pages_for(access);
        pages.nth(n).ok_or_else(|| format!("the table has too few pages for {access:?}"))
    }

    fn gref(&self, n: usize) -> Result<Gref, String> {
        self.table.shape().grefs().nth(n).ok_or_else(|| "the table has too few entries".to_owned())
    }

    fn put(&self, page: PageId, tag: u64) -> Verdict {
        put(&*self.table, page, tag)
    }

    fn tag(&self, page: PageId) -> Result<u64, String> {
        tag(&*self.table, page)
    }

    fn issue(&mut self, gref: Gref, page: PageId) -> Verdict {
        issue(self.table, gref, page)
    }

    fn revoke(&mut self, gref: Gref) -> Result<PageId, String> {
        self.table.revoke(gref).map_err(|e| format!("revoking {gref}: {e}"))
    }

    /// Fills the first page of its kind with `tag` and issues it under the first reference.
    fn lend(&mut self, access: Access, tag: u64) -> Result<(Gref, PageId), String> {
        let (gref, page) = (self.gref(0)?, self.page(access, 0)?);
        self.put(page, tag)?;
        self.issue(gref, page)?;
        Ok((gref, page))
    }

    /// Checks that the peer reads `expected` under `gref`.
    fn reads(&mut self, gref: Gref, expected: u64) -> Verdict {
        let read = self.peer.read(gref)?;
        require!(read == Some(expected), "under {gref} the peer read {read:x?}, not {expected:#x}");
        Ok(())
    }

    /// Checks that the peer does not read `secret` under `gref`, and that its write does not reach `page`.
    fn reaches_nothing(&mut self, gref: Gref, page: PageId, secret: u64) -> Verdict {
        let read = self.peer.read(gref)?;
        require!(read != Some(secret), "the peer read under {gref} what it was not granted");
        let before = self.tag(page)?;
        self.peer.write(gref, !secret)?;
        let after = self.tag(page)?;
        require!(after == before, "the peer wrote under {gref}, where it was not granted anything");
        Ok(())
    }
}

fn put(table: &dyn TranslationTable, page: PageId, tag: u64) -> Verdict {
    let memory = table.memory(page).ok_or("no such page")?;
    memory.store_u64(0, tag, SeqCst).map_err(|e| e.to_string())
}

fn tag(table: &dyn TranslationTable, page: PageId) -> Result<u64, String> {
    let memory = table.memory(page).ok_or("no such page")?;
    memory.load_u64(0, SeqCst).map_err(|e| e.to_string())
}

fn issue(table: &mut dyn TranslationTable, gref: Gref, page: PageId) -> Verdict {
    let access = table.shape().access_of(page).ok_or("no such page")?;
    let issued = table.issue(gref, page, access);
    issued.map_err(|e| format!("issuing page {} under {gref}: {e}", page.0))
}

fn the_engine_says_what_it_promises(suite: &mut WindowSuite<'_>) -> Verdict {
    let facts = suite.table.engine();
    for text in [facts.name, facts.in_flight, facts.cost] {
        require!(!text.is_empty(), "an empty text in {facts:?}");
    }
    require!(facts.one_sided, "the suite is for engines that ask nobody");
    Ok(())
}

fn what_was_not_issued_is_not_reached(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = (suite.gref(0)?, suite.page(Access::ReadWrite, 0)?);
    suite.put(page, 0x51)?;
    suite.reaches_nothing(gref, page, 0x51)
}

fn what_was_issued_is_read(suite: &mut WindowSuite<'_>) -> Verdict {
    for (n, access) in [Access::ReadWrite, Access::ReadOnly].into_iter().enumerate() {
        let (gref, page) = (suite.gref(n)?, suite.page(access, 0)?);
        suite.put(page, 0x71 + n as u64)?;
        suite.issue(gref, page)?;
        suite.reads(gref, 0x71 + n as u64)?;
    }
    Ok(())
}

fn what_was_issued_for_writing_is_written(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 1)?;
    suite.peer.write(gref, 0x77)?;
    let found = suite.tag(page)?;
    require!(found == 0x77, "the peer wrote 0x77, and {found:#x} is there");
    Ok(())
}

fn what_was_issued_for_reading_is_not_written(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadOnly, 0x75)?;
    suite.reads(gref, 0x75)?;
    suite.peer.write(gref, 0x76)?;
    let found = suite.tag(page)?;
    require!(found == 0x75, "the peer wrote a page granted for reading: {found:#x} is there");
    Ok(())
}

fn every_entry_leads_to_its_page(suite: &mut WindowSuite<'_>) -> Verdict {
    let grefs: Vec<Gref> = suite.table.shape().grefs().collect();
    let pages: Vec<PageId> = (0..suite.table.shape().pages()).map(PageId).collect();
    // In reverse order, so that no reference equals its page's number by chance.
    let pairs: Vec<(Gref, PageId)> = grefs.into_iter().zip(pages.into_iter().rev()).collect();
    for (gref, page) in &pairs {
        suite.put(*page, 0x100 + u64::from(page.0))?;
        suite.issue(*gref, *page)?;
    }
    for (gref, page) in pairs {
        suite.reads(gref, 0x100 + u64::from(page.0))?;
    }
    Ok(())
}

fn what_is_beyond_the_table_is_refused(suite: &mut WindowSuite<'_>) -> Verdict {
    let shape = suite.table.shape();
    let (page, beyond) =
        (suite.page(Access::ReadWrite, 0)?, Gref(Gref::FIRST_FREE.0 + shape.entries));
    for gref in [Gref(0), beyond, Gref(u32::MAX)] {
        let refused = suite.table.issue(gref, page, Access::ReadWrite);
        require!(matches!(refused, Err(IssueError::NoEntry { .. })), "{gref}: {refused:?}");
        require!(suite.table.revoke(gref).is_err(), "{gref} was revoked");
        let read = suite.peer.read(gref)?;
        require!(read.is_none(), "the peer read {read:x?} under {gref}, beyond the table");
    }
    Ok(())
}

fn what_cannot_be_issued_is_refused(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 1)?;
    let (next, other) = (suite.gref(1)?, suite.page(Access::ReadWrite, 1)?);
    let table = &mut *suite.table;
    let pages = table.shape().pages();
    for (gref, page, access, expected) in [
        (gref, other, Access::ReadWrite, IssueError::Taken { gref }),
        (next, page, Access::ReadWrite, IssueError::NotFresh { page }),
        (
            next,
            other,
            Access::ReadOnly,
            IssueError::Access { page: other, kind: Access::ReadWrite },
        ),
        (next, PageId(pages), Access::ReadOnly, IssueError::NoPage { page: PageId(pages), pages }),
    ] {
        let refused = table.issue(gref, page, access);
        require!(refused == Err(expected), "{refused:?}, not {expected:?}");
    }
    require!(table.revoke(next) == Err(RevokeError::NotIssued), "what was refused is there");
    Ok(())
}

fn a_revoked_page_is_not_reached(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 0x51)?;
    suite.reads(gref, 0x51)?;
    suite.revoke(gref)?;
    suite.table.prepare(page).map_err(|e| e.to_string())?;
    suite.put(page, 0x52)?;
    suite.reaches_nothing(gref, page, 0x52)
}

fn a_revoked_page_keeps_its_content_for_the_granter(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 1)?;
    suite.peer.write(gref, 0x99)?;
    let revoked = suite.revoke(gref)?;
    require!(revoked == page, "page {} was revoked", revoked.0);
    let found = suite.tag(page)?;
    require!(found == 0x99, "the content is {found:#x}");
    require!(suite.table.revoke(gref) == Err(RevokeError::NotIssued), "revoked twice");
    Ok(())
}

fn a_stale_page_is_not_issued_before_it_is_fresh(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 0x51)?;
    let generation = suite.table.generation(page);
    suite.revoke(gref)?;
    let refused = suite.table.issue(gref, page, Access::ReadWrite);
    require!(refused == Err(IssueError::NotFresh { page }), "issued as it was: {refused:?}");
    suite.table.prepare(page).map_err(|e| e.to_string())?;
    let now = suite.table.generation(page);
    require!(now == generation.wrapping_add(1), "generation {generation}, then {now}");
    let left = suite.tag(page)?;
    require!(left == 0, "{left:#x} is left in a fresh page");
    suite.put(page, 0x63)?;
    suite.issue(gref, page)?;
    suite.reads(gref, 0x63)
}

fn a_reference_used_again_leads_to_the_new_page_alone(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 0x51)?;
    suite.reads(gref, 0x51)?;
    suite.revoke(gref)?;
    let other = suite.page(Access::ReadWrite, 1)?;
    suite.put(other, 0x61)?;
    suite.issue(gref, other)?;
    suite.reads(gref, 0x61)?;
    suite.peer.write(gref, 0x62)?;
    let found = (suite.tag(page)?, suite.tag(other)?);
    require!(found == (0x51, 0x62), "the old page and the new one hold {found:x?}");
    Ok(())
}

fn force_takes_every_page_and_destroys_its_content(suite: &mut WindowSuite<'_>) -> Verdict {
    let grefs: Vec<Gref> = suite.table.shape().grefs().collect();
    let pages: Vec<PageId> = (0..suite.table.shape().pages()).map(PageId).collect();
    for (gref, page) in grefs.iter().zip(&pages) {
        suite.put(*page, 0x51)?;
        suite.issue(*gref, *page)?;
    }
    suite.reads(suite.gref(0)?, 0x51)?;
    suite.table.revoke_forced(&grefs).map_err(|e| e.to_string())?;
    require!(suite.table.held().pages == 0, "pages are held that nobody uses");
    for (gref, page) in grefs.iter().zip(&pages) {
        let left = suite.tag(*page)?;
        require!(left == 0, "{left:#x} is left of the content under {gref}");
    }
    let (gref, page) = (suite.gref(0)?, suite.page(Access::ReadWrite, 0)?);
    suite.put(page, 0x53)?;
    suite.reaches_nothing(gref, page, 0x53)
}

fn a_neighbour_is_not_reached(suite: &mut WindowSuite<'_>) -> Verdict {
    let (gref, page) = suite.lend(Access::ReadWrite, 0x41)?;
    let theirs = suite.neighbour.shape().pages_for(Access::ReadWrite).next().ok_or("no page")?;
    put(suite.neighbour, theirs, 0x42)?;
    issue(suite.neighbour, gref, theirs)?;
    suite.reads(gref, 0x41)?;
    suite.peer.write(gref, 0x43)?;
    let found = (suite.tag(page)?, tag(suite.neighbour, theirs)?);
    require!(found == (0x43, 0x42), "own page and the neighbour's hold {found:x?}");
    suite.revoke(gref)?;
    suite.table.prepare(page).map_err(|e| e.to_string())?;
    suite.reaches_nothing(gref, page, 0x42)?;
    let theirs = tag(suite.neighbour, theirs)?;
    require!(theirs == 0x42, "the neighbour's page holds {theirs:#x}");
    Ok(())
}
