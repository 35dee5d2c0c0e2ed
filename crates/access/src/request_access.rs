//! Page access of requests: makes the pages of a disk's request available until its I/O is complete.
//!
//! A backend calls [`RequestAccess::begin`] with the ranges of one request. It appends one part for each to a
//! list, which the backend passes to the disk, and returns a [`PageHold`]. When the I/O is complete, the backend
//! passes the hold and the list to [`RequestAccess::end`]. It answers the request only after that, because the
//! guest then revokes the pages.
//!
//! | mode | `begin` | while the I/O runs | `end` |
//! |---|---|---|---|
//! | `map` | maps all pages of the request in one batch | each part holds the mapping | drops the parts, which **unmaps the pages** |
//! | `persistent` | looks each page up; maps a page that is absent and keeps it | the table counts the use | ends the use. [`RequestAccess::tidy`] and [`RequestAccess::shrink`] unmap the page later |
//! | `window` | raises the status word of each page | the status word is raised | lowers the status word; the window stays mapped |
//! | `copy` | copies the bytes of a write into a bounce buffer | the part is the bounce buffer | keeps the buffer for later requests; nothing was mapped |
//!
//! In `copy`, [`RequestAccess::copy_out`] copies the bytes of a read to the guest between the I/O and `end`. A page
//! that is in neither the table nor the window is accessed as in `map`.
//!
//! A part is an owned value: a page whose part still exists stays mapped, whatever else ends. If one page of a
//! request is not accessible, the whole request fails, and `begin` has released its other pages. Requests of other
//! batches are not affected (XSA-361).

use core::time::Duration;
use std::sync::Arc;

use ringfence_memory::{LentSlice, PAGE_SIZE, page_aligned};
use ringfence_platform::{Access, GrantStatus, Grantee, Gref, WindowPlace, WindowView};

use crate::batch::{GrantBatches, part_of};
use crate::bounce::BounceBuffers;
use crate::mode::Mode;
use crate::persistent::{
    Found, Leaving, PersistentCounters, PersistentLimits, PersistentTable, Use,
};
use crate::window::unmark;

/// Range of a peer's page that a request reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRange {
    pub gref: Gref,
    /// Offset in the page in bytes.
    pub offset: u16,
    /// Length in bytes. The parser of the request has validated that the range lies inside the page.
    pub len: u16,
}

/// Memory of one range of a request, or of all its ranges in [`Mode::Copy`].
#[derive(Clone, Debug)]
pub struct PagePart {
    /// Bytes of the range. The handle keeps a mapped page mapped.
    pub memory: LentSlice,
    /// Name under which a [`PageRegistry`] registered the page.
    pub registered: Option<u64>,
}

impl From<LentSlice> for PagePart {
    fn from(memory: LentSlice) -> PagePart {
        PagePart { memory, registered: None }
    }
}

/// Recipient of pages that stay mapped between requests.
pub trait PageRegistry {
    /// Registers a page under a unique name. Returns `true` if the registry accepted it.
    fn register(&mut self, name: u64, page: &LentSlice) -> bool;

    /// Ends a registration. The page is unmapped after that.
    fn unregister(&mut self, name: u64);
}

/// Reasons for which the pages of a request are not accessible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PageError {
    /// Too many pages are mapped. The request can be tried again when others have ended.
    #[error("too many pages are mapped at this time")]
    Later,
    /// Page that is not accessible.
    #[error("a page of the request is not accessible: {0:?}")]
    Failed(GrantStatus),
}

impl From<GrantStatus> for PageError {
    fn from(status: GrantStatus) -> PageError {
        PageError::Failed(status)
    }
}

/// Uses of pages by one request. The owner returns it to [`RequestAccess::end`].
#[derive(Debug, Default)]
#[must_use]
pub struct PageHold {
    kept: Vec<Use>,
    /// Pages of the grant window in use.
    within: Vec<Gref>,
    bounce: Option<LentSlice>,
}

/// Ranges of one request and their access.
struct Wanted<R> {
    ranges: R,
    access: Access,
}

impl<R: Iterator<Item = PageRange> + Clone> Wanted<R> {
    fn pages(&self) -> impl Iterator<Item = (Gref, Access)> + Clone {
        let access = self.access;
        self.ranges.clone().map(move |range| (range.gref, access))
    }
}

/// Access to the pages of one peer, for the requests of one ring.
pub struct RequestAccess<G> {
    batches: GrantBatches<G>,
    mode: Mode,
    /// Set if pages stay mapped between requests.
    keeps: bool,
    table: PersistentTable,
    window: Option<WindowView>,
    /// Position of each range in the grant window; an error for ranges of other pages.
    places: Vec<Result<WindowPlace, GrantStatus>>,
    buffers: BounceBuffers,
    scratch: Vec<u8>,
    /// Part of each range that was looked up; `None` for ranges of pages that `batches` maps.
    found: Vec<Option<PagePart>>,
    leaving: Vec<Leaving>,
    spare: Vec<PageHold>,
}

impl<G: Grantee> RequestAccess<G> {
    /// Makes the access to the pages of `grantee`'s peer in `mode`. `keeps` has the limits of pages that stay mapped,
    /// if the peer agreed to reuse them.
    pub fn new(grantee: G, mode: Mode, keeps: Option<PersistentLimits>) -> RequestAccess<G> {
        RequestAccess {
            batches: GrantBatches::new(grantee),
            mode,
            keeps: keeps.is_some(),
            table: PersistentTable::new(
                keeps.unwrap_or(PersistentLimits { pages: 0, ..PersistentLimits::default() }),
            ),
            window: None,
            places: Vec::new(),
            buffers: BounceBuffers::default(),
            scratch: Vec::new(),
            found: Vec::new(),
            leaving: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Adds the grant window that the peer made for this ring.
    #[must_use]
    pub fn with_window(self, window: Option<WindowView>) -> RequestAccess<G> {
        RequestAccess { window, ..self }
    }

    /// Returns the totals of the pages that stay mapped.
    pub fn persistent(&self) -> &Arc<PersistentCounters> {
        self.table.counters()
    }

    /// Returns the number of pages that stay mapped.
    pub fn kept(&self) -> usize {
        self.table.len()
    }

    /// Copies the beginning of `pages` into `into`, 4096 bytes a page, and fetches each byte once. `now` is the time
    /// of any monotonic clock.
    ///
    /// # Errors
    ///
    /// Returns the status of the first page that is not accessible.
    pub fn copy_pages(
        &mut self,
        pages: &[Gref],
        now: Duration,
        into: &mut [u8],
    ) -> Result<(), GrantStatus> {
        for (gref, part) in pages.iter().zip(into.chunks_mut(PAGE_SIZE)) {
            if let (Some(window), Some(gref)) = (&mut self.window, unmark(*gref)) {
                copy_within(window, gref, &mut self.places, part)?;
                continue;
            }
            if self.keeps
                && let Found::Kept { hold, page, .. } =
                    self.table.look_up(&mut self.batches.grantee, *gref, now)
            {
                let copied = page.copy_to(0, part);
                self.table.release(hold);
                copied.map_err(|_| GrantStatus::BadCopyArg)?;
                continue;
            }
            let mut list = self.batches.ops.begin();
            list.read(*gref, 0, part).map_err(|_| GrantStatus::BadCopyArg)?;
            self.batches.grantee.copy(list);
            self.batches.copied()?;
        }
        Ok(())
    }

    /// Makes the bytes of a request's `ranges` accessible and appends their parts to `parts`, in order. `access` is
    /// [`Access::ReadOnly`] if the I/O reads the pages, [`Access::ReadWrite`] if it fills them. Pages that are newly
    /// kept are offered to `registry`. `now` is the time of any monotonic clock.
    ///
    /// # Errors
    ///
    /// Returns [`PageError`]. `parts` is empty then, and the request holds no page.
    pub fn begin<T: From<PagePart>>(
        &mut self,
        ranges: impl Iterator<Item = PageRange> + Clone,
        access: Access,
        now: Duration,
        registry: &mut (impl PageRegistry + ?Sized),
        parts: &mut Vec<T>,
    ) -> Result<PageHold, PageError> {
        let wanted = Wanted { ranges, access };
        let mut hold = self.spare.pop().unwrap_or_default();
        let begun = match self.mode {
            Mode::Copy => self.copy_in(&wanted, &mut hold, parts),
            _ if !self.keeps && self.window.is_none() => self.map(&wanted, parts),
            Mode::Map | Mode::Persistent | Mode::Staging | Mode::Window => self
                .look_up(&wanted, now, registry, &mut hold, parts)
                .and_then(|others| self.map_others(&wanted, others, parts)),
        };
        match begun {
            Ok(()) => Ok(hold),
            Err(why) => {
                self.found.clear();
                self.end(hold, parts);
                Err(why)
            }
        }
    }

    /// Copies read data from the bounce buffer to the pages of `ranges`, in [`Mode::Copy`]. In other modes the
    /// pages have the data already.
    ///
    /// # Errors
    ///
    /// Returns the status of the first page that is not accessible.
    pub fn copy_out(
        &mut self,
        hold: &PageHold,
        ranges: impl Iterator<Item = PageRange>,
    ) -> Result<(), GrantStatus> {
        let Some(private) = &hold.bounce else { return Ok(()) };
        let mut list = self.batches.ops.begin();
        let mut at = 0;
        for PageRange { gref, offset, len } in ranges {
            let len = usize::from(len);
            let added = list.write_lent(gref, offset, private, at, len);
            added.map_err(|_| GrantStatus::BadCopyArg)?;
            at += len;
        }
        self.batches.grantee.copy(list);
        self.batches.copied()
    }

    /// Ends the use of a request's pages after its I/O: drops `parts`, all handles to the pages, and releases `hold`.
    /// Pages that were mapped for this request alone are unmapped here. `parts` is empty afterwards.
    pub fn end<T>(&mut self, mut hold: PageHold, parts: &mut Vec<T>) {
        parts.clear();
        for used in hold.kept.drain(..) {
            self.table.release(used);
        }
        for gref in hold.within.drain(..) {
            if let Some(window) = &mut self.window {
                window.end(gref);
            }
        }
        if let Some(private) = hold.bounce.take() {
            self.buffers.give_back(private);
        }
        self.spare.push(hold);
    }

    /// Unmaps kept pages that are due ([`PersistentTable::tidy`]).
    pub fn tidy(&mut self, now: Duration, registry: &mut (impl PageRegistry + ?Sized)) {
        if self.keeps {
            self.table.tidy(now, &mut self.leaving);
            unmap_kept(&mut self.leaving, registry);
        }
    }

    /// Unmaps all kept pages that no request uses, and frees spare buffers.
    pub fn shrink(&mut self, registry: &mut (impl PageRegistry + ?Sized)) {
        self.table.shrink(&mut self.leaving);
        unmap_kept(&mut self.leaving, registry);
        self.buffers.clear();
    }

    /// Sets the maximum number of kept pages ([`PersistentTable::limit`]), and frees spare buffers.
    pub fn limit_kept(&mut self, pages: u16, registry: &mut (impl PageRegistry + ?Sized)) {
        self.table.limit(pages, &mut self.leaving);
        unmap_kept(&mut self.leaving, registry);
        self.buffers.clear();
    }

    /// Mode `copy`: takes a bounce buffer as the only part, and copies the bytes of a write into it.
    fn copy_in<T: From<PagePart>>(
        &mut self,
        wanted: &Wanted<impl Iterator<Item = PageRange> + Clone>,
        hold: &mut PageHold,
        parts: &mut Vec<T>,
    ) -> Result<(), PageError> {
        let total = wanted.ranges.clone().map(|range| usize::from(range.len)).sum();
        let private = hold.bounce.insert(self.buffers.take(total));
        if wanted.access == Access::ReadOnly {
            let scratch = page_aligned(&mut self.scratch, total);
            let mut list = self.batches.ops.begin();
            let mut rest = &mut *scratch;
            for PageRange { gref, offset, len } in wanted.ranges.clone() {
                let (part, left) = rest.split_at_mut(len.into());
                rest = left;
                list.read(gref, offset, part).map_err(|_| GrantStatus::BadCopyArg)?;
            }
            self.batches.grantee.copy(list);
            self.batches.copied()?;
            private.copy_from(0, scratch).map_err(|_| GrantStatus::BadCopyArg)?;
        }
        let whole = private.slice(0, total).map_err(|_| GrantStatus::BadCopyArg)?;
        parts.push(PagePart::from(whole).into());
        Ok(())
    }

    /// Mode `map`: maps every page of a request in one batch. The mappings end when [`RequestAccess::end`] drops
    /// the parts.
    fn map<T: From<PagePart>>(
        &mut self,
        wanted: &Wanted<impl Iterator<Item = PageRange> + Clone>,
        parts: &mut Vec<T>,
    ) -> Result<(), PageError> {
        self.map_batch(wanted.pages())?;
        for (range, page) in wanted.ranges.clone().zip(self.batches.mapped.drain(..)) {
            let part = page.and_then(|page| part_of(page, range.offset, range.len))?;
            parts.push(PagePart::from(part).into());
        }
        Ok(())
    }

    /// Maps pages in one batch, all or none.
    fn map_batch(&mut self, pages: impl Iterator<Item = (Gref, Access)>) -> Result<(), PageError> {
        self.batches.map(pages);
        let failures = self.batches.mapped.iter().filter_map(|page| page.as_ref().err());
        // A page that is not granted outranks one that only does not fit now.
        let failed = failures.clone().find(|status| **status != GrantStatus::NoSpace);
        let outcome = match (failed, failures.clone().next()) {
            (Some(status), _) => Err(PageError::Failed(*status)),
            (None, Some(_)) => Err(PageError::Later),
            (None, None) => Ok(()),
        };
        if outcome.is_err() {
            self.batches.mapped.clear();
        }
        outcome
    }

    /// Modes `persistent` and `window`: looks up every range in the grant window and in the table, and appends the parts
    /// up to the first one of a page that is in neither. The rest is left in `found`. Returns the index of its first range.
    fn look_up<T: From<PagePart>>(
        &mut self,
        wanted: &Wanted<impl Iterator<Item = PageRange> + Clone>,
        now: Duration,
        registry: &mut (impl PageRegistry + ?Sized),
        hold: &mut PageHold,
        parts: &mut Vec<T>,
    ) -> Result<usize, PageError> {
        self.found.clear();
        self.enter_window(wanted, hold)?;
        let mut others = 0;
        for (slot, range) in wanted.ranges.clone().enumerate() {
            match self.find(slot, range, now, registry, hold)? {
                Some(part) if self.found.is_empty() => {
                    parts.push(part.into());
                    others = slot + 1;
                }
                part => self.found.push(part),
            }
        }
        Ok(others)
    }

    /// Returns the part of range number `slot`, if its page is in the grant window or in the table.
    #[inline]
    fn find(
        &mut self,
        slot: usize,
        range: PageRange,
        now: Duration,
        registry: &mut (impl PageRegistry + ?Sized),
        hold: &mut PageHold,
    ) -> Result<Option<PagePart>, PageError> {
        if let Some(part) = self.within(slot, range) {
            return Ok(Some(part?.into()));
        }
        if !self.keeps {
            return Ok(None);
        }
        let looked = self.table.look_up(&mut self.batches.grantee, range.gref, now);
        let Found::Kept { hold: used, page, name, fresh, mut marked } = looked else {
            return Ok(None);
        };
        if fresh && registry.register(name, &page) {
            self.table.mark(&used);
            marked = true;
        }
        hold.kept.push(used);
        let memory = part_of(page, range.offset, range.len)?;
        Ok(Some(PagePart { memory, registered: marked.then_some(name) }))
    }

    /// Maps the pages of those ranges from number `first` on that [`RequestAccess::look_up`] did not find, in one batch,
    /// and appends the parts of all of them in order.
    fn map_others<T: From<PagePart>>(
        &mut self,
        wanted: &Wanted<impl Iterator<Item = PageRange> + Clone>,
        first: usize,
        parts: &mut Vec<T>,
    ) -> Result<(), PageError> {
        if self.found.is_empty() {
            return Ok(());
        }
        let found = core::mem::take(&mut self.found);
        let absent = wanted.pages().skip(first).zip(&found).filter(|(_, part)| part.is_none());
        let mapped = self.map_batch(absent.map(|(page, _)| page));
        self.found = found;
        mapped?;
        let mut others = self.batches.mapped.drain(..);
        for (range, found) in wanted.ranges.clone().skip(first).zip(self.found.drain(..)) {
            let part = match found {
                Some(part) => part,
                None => {
                    let page = others.next().unwrap_or(Err(GrantStatus::GeneralError))?;
                    part_of(page, range.offset, range.len)?.into()
                }
            };
            parts.push(part.into());
        }
        Ok(())
    }

    /// Begins the use of those pages of a request that lie in the grant window.
    fn enter_window(
        &mut self,
        wanted: &Wanted<impl Iterator<Item = PageRange> + Clone>,
        hold: &mut PageHold,
    ) -> Result<(), PageError> {
        self.places.clear();
        let Some(window) = &mut self.window else { return Ok(()) };
        // No window has a page 0.
        let within = wanted.pages().map(|(gref, access)| (unmark(gref).unwrap_or(Gref(0)), access));
        window.begin(within, &mut self.places);
        let mut failed = Ok(());
        for (range, place) in wanted.ranges.clone().zip(&self.places) {
            match (unmark(range.gref), place) {
                (Some(gref), Ok(_)) => hold.within.push(gref),
                (Some(_), Err(status)) => failed = Err(PageError::Failed(*status)),
                (None, _) => {}
            }
        }
        failed
    }

    /// Returns the bytes of range number `slot` of a request, if they lie in the grant window.
    fn within(&self, slot: usize, range: PageRange) -> Option<Result<LentSlice, GrantStatus>> {
        let place = (*self.places.get(slot)?).ok()?;
        let (memory, at) = self.window.as_ref()?.memory(place);
        let part = memory.slice(at + usize::from(range.offset), range.len.into());
        Some(part.map_err(|_| GrantStatus::BadCopyArg))
    }
}

/// Unregisters pages that leave the table, then unmaps them.
fn unmap_kept(leaving: &mut Vec<Leaving>, registry: &mut (impl PageRegistry + ?Sized)) {
    for page in leaving.drain(..) {
        if page.marked {
            registry.unregister(page.name);
        }
    }
}

/// Copies the beginning of a page of the grant window, once.
fn copy_within(
    window: &mut WindowView,
    gref: Gref,
    places: &mut Vec<Result<WindowPlace, GrantStatus>>,
    into: &mut [u8],
) -> Result<(), GrantStatus> {
    places.clear();
    window.begin([(gref, Access::ReadOnly)].into_iter(), places);
    let place = places.pop().unwrap_or(Err(GrantStatus::GeneralError))?;
    let (memory, at) = window.memory(place);
    let copied = memory.copy_to(at, into);
    window.end(gref);
    copied.map_err(|_| GrantStatus::BadCopyArg)
}

#[cfg(test)]
mod tests;
