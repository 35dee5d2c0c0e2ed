//! Page access of one ring: makes the bytes of a request available to the disk.
//!
//! [`Pages::reach`] turns the segments of a request into lent memory, by the [`Mode`] of the device. It
//! returns a [`PageHold`], which the queue gives back when the request ends. Indirect descriptors are
//! copied once, before they are parsed.

use core::time::Duration;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_access::persistent::{
    Found, Leaving, PersistentCounters, PersistentLimits, PersistentTable, Use,
};
use ringfence_access::window::unmark;
use ringfence_memory::{LentSlice, page_aligned};
use ringfence_platform::{Access, CopyOps, GrantStatus, Grantee, Gref, WindowPlace, WindowView};
use ringfence_wire::blkif::{Direction, SEGMENTS_PER_PAGE, SegmentRange};

use super::bounce::BounceBuffers;
use crate::storage::{DiskQueue, Segment};

/// Reasons for which the pages of a request are not accessible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PageError {
    /// Too many pages are mapped; the request can be tried again when others end.
    Later,
    /// Page is not accessible at all.
    Failed(GrantStatus),
}

/// Page references of one request, held while the disk works on it.
#[derive(Debug, Default)]
pub(super) struct PageHold {
    uses: Vec<Use>,
    /// Pages of the grant window in use.
    within: Vec<Gref>,
    /// Bounce buffer, and the guest's segments that it stands for.
    bounce: Option<(LentSlice, Vec<SegmentRange>)>,
}

/// Time of a look-up, and the disk queue at which new pages are registered.
struct LookUp<'a> {
    now: Duration,
    disk: &'a mut dyn DiskQueue,
}

/// Page access of one ring.
pub(super) struct Pages<G> {
    grantee: G,
    mode: Mode,
    /// Set if pages are kept mapped.
    keeps: bool,
    table: PersistentTable,
    /// Grant window of the ring.
    window: Option<WindowView>,
    /// Position in the grant window by segment; an error for segments of other pages.
    places: Vec<Result<WindowPlace, GrantStatus>>,
    buffers: BounceBuffers,
    ops: CopyOps,
    scratch: Vec<u8>,
    wanted: Vec<(Gref, Access)>,
    mapped: Vec<Result<LentSlice, GrantStatus>>,
    found: Vec<Option<Segment>>,
    leaving: Vec<Leaving>,
    spare: Vec<PageHold>,
}

impl<G: Grantee> Pages<G> {
    /// Creates the page access of a ring. `keeps` has the limits of persistent pages, if the frontend agreed
    /// to them.
    pub(super) fn new(
        grantee: G,
        mode: Mode,
        keeps: Option<PersistentLimits>,
        window: Option<WindowView>,
    ) -> Pages<G> {
        Pages {
            grantee,
            mode,
            keeps: keeps.is_some(),
            table: PersistentTable::new(keeps.unwrap_or_default()),
            window,
            places: Vec::new(),
            buffers: BounceBuffers::default(),
            ops: CopyOps::new(),
            scratch: Vec::new(),
            wanted: Vec::new(),
            mapped: Vec::new(),
            found: Vec::new(),
            leaving: Vec::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn persistent(&self) -> &Arc<PersistentCounters> {
        self.table.counters()
    }

    /// Returns the number of persistent pages.
    pub(super) fn kept(&self) -> usize {
        self.table.len()
    }

    /// Copies `bytes` bytes of indirect descriptors from `pages` into `into`, each page once.
    pub(super) fn descriptors(
        &mut self,
        pages: &[Gref],
        bytes: usize,
        now: Duration,
        into: &mut Vec<u8>,
    ) -> Result<(), GrantStatus> {
        into.clear();
        into.resize(bytes, 0);
        for (gref, part) in pages.iter().zip(into.chunks_mut(SEGMENTS_PER_PAGE * 8)) {
            if let (Some(window), Some(gref)) = (&mut self.window, unmark(*gref)) {
                copy_within(window, gref, &mut self.places, part)?;
                continue;
            }
            if self.keeps
                && let Found::Kept { hold, page, .. } =
                    self.table.look_up(&mut self.grantee, *gref, now)
            {
                let copied = page.copy_to(0, part);
                self.table.release(hold);
                copied.map_err(|_| GrantStatus::BadCopyArg)?;
                continue;
            }
            let mut list = self.ops.begin();
            list.read(*gref, 0, part).map_err(|_| GrantStatus::BadCopyArg)?;
            self.grantee.copy(list);
            first_failure(self.ops.statuses())?;
        }
        Ok(())
    }

    /// Makes the bytes of `ranges` accessible and appends them to `out` in order.
    pub(super) fn reach(
        &mut self,
        ranges: &[SegmentRange],
        direction: Direction,
        now: Duration,
        disk: &mut dyn DiskQueue,
        out: &mut Vec<Segment>,
    ) -> Result<PageHold, PageError> {
        let mut held = self.spare.pop().unwrap_or_default();
        let reached = match self.mode {
            Mode::Copy => self.copy_in(ranges, direction, &mut held, out),
            _ if !self.keeps && self.window.is_none() => self.map(ranges, direction, out),
            Mode::Map | Mode::Persistent | Mode::Staging | Mode::Window => {
                self.look_up(ranges, direction, LookUp { now, disk }, &mut held, out)
            }
        };
        match reached {
            Ok(()) => Ok(held),
            Err(why) => {
                out.clear();
                self.release(held);
                Err(why)
            }
        }
    }

    /// Maps the pages of `wanted` for one request.
    fn map_wanted(&mut self) -> Result<(), PageError> {
        self.mapped.clear();
        self.grantee.map(&self.wanted, &mut self.mapped);
        let worst = self.mapped.iter().filter_map(|page| page.as_ref().err());
        // A page that is not granted outranks one that only does not fit now.
        let failed = worst.clone().find(|status| **status != GrantStatus::NoSpace);
        let outcome = match (failed, worst.clone().next()) {
            (Some(status), _) => Err(PageError::Failed(*status)),
            (None, Some(_)) => Err(PageError::Later),
            (None, None) => Ok(()),
        };
        if outcome.is_err() {
            self.mapped.clear();
        }
        outcome
    }

    fn map(
        &mut self,
        ranges: &[SegmentRange],
        direction: Direction,
        out: &mut Vec<Segment>,
    ) -> Result<(), PageError> {
        self.wanted.clear();
        self.wanted.extend(ranges.iter().map(|range| (range.gref(), access_for(direction))));
        self.map_wanted()?;
        for (range, page) in ranges.iter().zip(self.mapped.drain(..)) {
            let part = page.and_then(|page| cut(&page, *range));
            out.push(Segment::from(part.map_err(PageError::Failed)?));
        }
        Ok(())
    }

    /// Begins the use of those pages of a request that lie in the grant window.
    fn enter(
        &mut self,
        ranges: &[SegmentRange],
        direction: Direction,
        held: &mut PageHold,
    ) -> Result<(), PageError> {
        self.places.clear();
        let Some(window) = &mut self.window else { return Ok(()) };
        let access = access_for(direction);
        // No window has a page 0.
        let within = |range: &SegmentRange| (unmark(range.gref()).unwrap_or(Gref(0)), access);
        window.begin(ranges.iter().map(within), &mut self.places);
        let mut failed = Ok(());
        for (range, place) in ranges.iter().zip(&self.places) {
            match (unmark(range.gref()), place) {
                (Some(gref), Ok(_)) => held.within.push(gref),
                (Some(_), Err(status)) => failed = Err(PageError::Failed(*status)),
                (None, _) => {}
            }
        }
        failed
    }

    /// Returns the bytes of segment number `slot` of a request, if they lie in the grant window.
    fn within(&self, slot: usize, range: SegmentRange) -> Option<Result<LentSlice, GrantStatus>> {
        let place = (*self.places.get(slot)?).ok()?;
        let (memory, at) = self.window.as_ref()?.memory(place);
        let part = memory.slice(at + usize::from(range.offset()), range.len().into());
        Some(part.map_err(|_| GrantStatus::BadCopyArg))
    }

    fn look_up(
        &mut self,
        ranges: &[SegmentRange],
        direction: Direction,
        LookUp { now, disk }: LookUp<'_>,
        held: &mut PageHold,
        out: &mut Vec<Segment>,
    ) -> Result<(), PageError> {
        self.found.clear();
        self.wanted.clear();
        self.enter(ranges, direction, held)?;
        for (slot, range) in ranges.iter().enumerate() {
            if let Some(part) = self.within(slot, *range) {
                self.found.push(Some(Segment::from(part.map_err(PageError::Failed)?)));
                continue;
            }
            let looked = match self.keeps {
                true => self.table.look_up(&mut self.grantee, range.gref(), now),
                false => Found::Over,
            };
            let Found::Kept { hold, page, name, fresh, mut marked } = looked else {
                self.wanted.push((range.gref(), access_for(direction)));
                self.found.push(None);
                continue;
            };
            if fresh && disk.register(name, &page) {
                self.table.mark(&hold);
                marked = true;
            }
            held.uses.push(hold);
            let memory = cut(&page, *range).map_err(PageError::Failed)?;
            self.found.push(Some(Segment { memory, registered: marked.then_some(name) }));
        }
        if !self.wanted.is_empty() {
            self.map_wanted()?;
        }
        let mut others = self.mapped.drain(..);
        for (range, found) in ranges.iter().zip(self.found.drain(..)) {
            let segment = match found {
                Some(segment) => segment,
                None => {
                    let page = others.next().unwrap_or(Err(GrantStatus::GeneralError));
                    let part = page.and_then(|page| cut(&page, *range));
                    Segment::from(part.map_err(PageError::Failed)?)
                }
            };
            out.push(segment);
        }
        Ok(())
    }

    fn copy_in(
        &mut self,
        ranges: &[SegmentRange],
        direction: Direction,
        held: &mut PageHold,
        out: &mut Vec<Segment>,
    ) -> Result<(), PageError> {
        let total = ranges.iter().map(|range| usize::from(range.len())).sum();
        let private = self.buffers.take(total);
        if direction == Direction::Write {
            let scratch = page_aligned(&mut self.scratch, total);
            let mut list = self.ops.begin();
            let mut rest = &mut *scratch;
            for range in ranges {
                let (part, left) = rest.split_at_mut(range.len().into());
                rest = left;
                let added = list.read(range.gref(), range.offset(), part);
                added.map_err(|_| PageError::Failed(GrantStatus::BadCopyArg))?;
            }
            self.grantee.copy(list);
            first_failure(self.ops.statuses()).map_err(PageError::Failed)?;
            let copied = private.copy_from(0, scratch);
            copied.map_err(|_| PageError::Failed(GrantStatus::BadCopyArg))?;
        }
        let whole = private.slice(0, total).map_err(|_| PageError::Failed(GrantStatus::BadCopyArg));
        out.push(Segment::from(whole?));
        held.bounce = Some((private, ranges.to_vec()));
        Ok(())
    }

    /// Copies read data from the bounce buffer to the guest's pages.
    pub(super) fn copy_out(&mut self, held: &PageHold) -> Result<(), GrantStatus> {
        let Some((private, ranges)) = &held.bounce else { return Ok(()) };
        let mut list = self.ops.begin();
        let mut at = 0;
        for range in ranges {
            let len = usize::from(range.len());
            let added = list.write_lent(range.gref(), range.offset(), private, at, len);
            added.map_err(|_| GrantStatus::BadCopyArg)?;
            at += len;
        }
        self.grantee.copy(list);
        first_failure(self.ops.statuses())
    }

    /// Releases the pages of a request that ended. The caller has dropped all handles to them.
    pub(super) fn release(&mut self, mut held: PageHold) {
        for hold in held.uses.drain(..) {
            self.table.release(hold);
        }
        for gref in held.within.drain(..) {
            if let Some(window) = &mut self.window {
                window.end(gref);
            }
        }
        if let Some((private, _)) = held.bounce.take() {
            self.buffers.give_back(private);
        }
        self.spare.push(held);
    }

    /// Unmaps pages that were idle for too long.
    pub(super) fn tidy(&mut self, now: Duration, disk: &mut dyn DiskQueue) {
        if self.keeps {
            self.table.tidy(now, &mut self.leaving);
            forget(&mut self.leaving, disk);
        }
    }

    /// Unmaps all idle pages and frees spare buffers.
    pub(super) fn shrink(&mut self, disk: &mut dyn DiskQueue) {
        self.table.shrink(&mut self.leaving);
        forget(&mut self.leaving, disk);
        self.buffers.clear();
    }
}

/// Unregisters pages at the disk, then unmaps them.
fn forget(leaving: &mut Vec<Leaving>, disk: &mut dyn DiskQueue) {
    for page in leaving.drain(..) {
        if page.marked {
            disk.unregister(page.name);
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

/// Returns the access that the backend needs: a read from the disk writes the guest's page.
fn access_for(direction: Direction) -> Access {
    match direction {
        Direction::Read => Access::ReadWrite,
        Direction::Write => Access::ReadOnly,
    }
}

fn cut(page: &LentSlice, range: SegmentRange) -> Result<LentSlice, GrantStatus> {
    page.slice(range.offset().into(), range.len().into()).map_err(|_| GrantStatus::BadCopyArg)
}

fn first_failure(statuses: &[GrantStatus]) -> Result<(), GrantStatus> {
    statuses.iter().find(|status| **status != GrantStatus::Okay).map_or(Ok(()), |bad| Err(*bad))
}
