//! Page access: reads and writes a peer's granted pages in every access mode.
//!
//! A backend collects the ranges of a round and calls [`PageAccess::read`] once, or writes with
//! [`PageAccess::begin_write`]. The fast paths look pages up with [`PageAccess::page`] instead and
//! validate all look-ups with [`PageAccess::settle`].

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Access, CopyList, GrantStatus, Grantee, Gref, RoundPlace, WindowRound};

use crate::batch::{GrantBatches, part_of};
use crate::mode::Mode;
use crate::staging::StagingTable;
use crate::window::unmark;

/// Maximum length of a range of a staged page that is copied. A copy of a few cache lines costs less than
/// a reference to the page.
const STAGED_COPY_MAX: u16 = 256;

/// Range of a peer's page to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub gref: Gref,
    pub offset: u16,
    /// Length in bytes. The parser of the slot has validated that the range lies inside the page.
    pub len: u16,
    /// Offset in the scratch buffer for copied bytes. The offsets ascend, and the ranges do not overlap.
    pub at: usize,
}

/// Location of the bytes of a [`ReadRange`].
#[derive(Clone, Debug)]
pub enum ReadData {
    /// Copy at `at` in the scratch buffer.
    Copied,
    /// Range of the peer's page itself.
    Mapped(LentSlice),
}

/// Source bytes of a write to a peer's page.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    Private(&'a [u8]),
    /// Bytes of another peer's page: the slice, the offset and the length.
    Lent(&'a LentSlice, usize, usize),
}

impl Source<'_> {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Source::Private(bytes) => bytes.len(),
            Source::Lent(_, _, len) => *len,
        }
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Access to the pages of one peer, for one ring.
pub struct PageAccess<G> {
    batches: GrantBatches<G>,
    mode: Mode,
    /// Slot of each element of a batch of copies.
    slots: Vec<usize>,
    /// Grant window that the peer made for this ring.
    window: Option<WindowRound>,
    /// Positions of a batch's pages in the grant window; an error for references outside of it.
    places: Vec<Result<RoundPlace, GrantStatus>>,
}

impl<G: Grantee> PageAccess<G> {
    /// Makes the access to the pages of `grantee`'s peer in `mode`.
    pub fn new(grantee: G, mode: Mode) -> PageAccess<G> {
        PageAccess {
            batches: GrantBatches::new(grantee),
            mode,
            slots: Vec::new(),
            window: None,
            places: Vec::new(),
        }
    }

    /// Adds the grant window that the peer made for this ring. Only [`Mode::Window`] uses it.
    #[must_use]
    pub fn with_window(self, window: Option<WindowRound>) -> PageAccess<G> {
        PageAccess { window: window.filter(|_| self.mode == Mode::Window), ..self }
    }

    /// Returns `true` if every page is mapped for its I/O.
    #[inline]
    pub fn maps(&self) -> bool {
        matches!(self.mode, Mode::Map | Mode::Persistent)
    }

    /// Returns the access mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns true if [`PageAccess::page`] can find pages.
    #[inline]
    pub fn has_pages(&self, staged: &StagingTable) -> bool {
        match self.mode {
            Mode::Copy | Mode::Map | Mode::Persistent => false,
            Mode::Staging => !staged.is_empty(),
            Mode::Window => self.window.is_some() || !staged.is_empty(),
        }
    }

    /// Looks up the page of `gref`; `None` if the mode needs an operation of the platform for it.
    ///
    /// The caller may prefetch from the page. It may use bytes or write only after [`PageAccess::settle`]
    /// returned true.
    // Called once a packet from other crates, where a mere hint left a call that cost 4 % at 64 bytes.
    #[inline(always)]
    pub fn page<'a>(
        &'a self,
        gref: Gref,
        access: Access,
        staged: &'a StagingTable,
    ) -> Option<&'a LentSlice> {
        match self.mode {
            Mode::Staging => staged.get(gref, access),
            Mode::Window => match (&self.window, unmark(gref)) {
                (Some(window), Some(gref)) => window.page(gref, access).ok(),
                _ => staged.get(gref, access),
            },
            Mode::Copy | Mode::Map | Mode::Persistent => None,
        }
    }

    /// Validates the look-ups since the last call. If it returns false, the caller uses [`PageAccess::read`]
    /// or [`PageAccess::begin_write`] instead, which return a status for each page.
    #[inline]
    pub fn settle(&self) -> bool {
        self.window.as_ref().is_none_or(WindowRound::settle)
    }

    /// Ends the use of all pages that were looked up. The caller notifies the peer only after this.
    #[inline]
    pub fn end(&mut self) {
        if let Some(window) = &mut self.window {
            window.end();
        }
    }

    /// Looks up the pages of a batch in the grant window.
    fn find_places(&mut self, pages: impl Iterator<Item = (Gref, Access)>) {
        self.places.clear();
        if let Some(window) = &self.window {
            // Page 0 exists in no grant window.
            let tables = pages.map(|(gref, access)| (unmark(gref).unwrap_or(Gref(0)), access));
            window.begin_settled(tables, &mut self.places);
        }
    }

    /// Reads every range, and appends one result for each to `data`. `staged` are the pages that the peer
    /// staged.
    pub fn read(
        &mut self,
        ranges: &[ReadRange],
        staged: &StagingTable,
        scratch: &mut [u8],
        data: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        match self.mode {
            Mode::Copy => self.read_by_copy(ranges, scratch, data),
            Mode::Map | Mode::Persistent => self.read_by_map(ranges, data),
            Mode::Staging | Mode::Window => self.read_staged(ranges, staged, scratch, data),
        }
    }

    fn read_staged(
        &mut self,
        ranges: &[ReadRange],
        staged: &StagingTable,
        scratch: &mut [u8],
        data: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        let base = data.len();
        self.slots.clear();
        self.find_places(ranges.iter().map(|range| (range.gref, Access::ReadOnly)));
        let tables = PageTables { window: self.window.as_ref(), places: &self.places, staged };
        for (slot, range) in ranges.iter().enumerate() {
            match tables.page(slot, range.gref, Access::ReadOnly) {
                Ok(Some(page)) => data.push(read_from(page, range, scratch)),
                Ok(None) => {
                    self.slots.push(slot);
                    data.push(Ok(ReadData::Copied));
                }
                Err(status) => data.push(Err(status)),
            }
        }
        if !self.slots.is_empty() {
            self.read_unstaged(ranges, scratch, &mut data[base..]);
        }
    }

    /// Copies the ranges whose indices are in `self.slots`.
    #[cold]
    fn read_unstaged(
        &mut self,
        ranges: &[ReadRange],
        scratch: &mut [u8],
        data: &mut [Result<ReadData, GrantStatus>],
    ) {
        let mut list = self.batches.ops.begin();
        let (mut rest, mut consumed) = (scratch, 0usize);
        self.slots.retain(|&slot| {
            let range = &ranges[slot];
            let status = carve(&mut rest, &mut consumed, range).and_then(|into| {
                list.read(range.gref, range.offset, into).map_err(|_| GrantStatus::BadCopyArg)
            });
            if let Err(status) = status {
                data[slot] = Err(status);
            }
            status.is_ok()
        });
        self.batches.grantee.copy(list);
        for (slot, status) in self.slots.iter().zip(self.batches.ops.statuses()) {
            if *status != GrantStatus::Okay {
                data[*slot] = Err(*status);
            }
        }
    }

    fn read_by_copy(
        &mut self,
        ranges: &[ReadRange],
        scratch: &mut [u8],
        data: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        self.slots.clear();
        let base = data.len();
        let mut list = self.batches.ops.begin();
        let (mut rest, mut consumed) = (scratch, 0usize);
        for (slot, range) in ranges.iter().enumerate() {
            let status = carve(&mut rest, &mut consumed, range).and_then(|into| {
                list.read(range.gref, range.offset, into).map_err(|_| GrantStatus::BadCopyArg)
            });
            if status.is_ok() {
                self.slots.push(slot);
            }
            data.push(status.map(|()| ReadData::Copied));
        }
        self.batches.grantee.copy(list);
        for (slot, status) in self.slots.iter().zip(self.batches.ops.statuses()) {
            if *status != GrantStatus::Okay {
                data[base + slot] = Err(*status);
            }
        }
    }

    fn read_by_map(&mut self, ranges: &[ReadRange], data: &mut Vec<Result<ReadData, GrantStatus>>) {
        self.batches.map(ranges.iter().map(|range| (range.gref, Access::ReadOnly)));
        for (range, page) in ranges.iter().zip(self.batches.mapped.drain(..)) {
            let part = page.and_then(|page| part_of(page, range.offset, range.len));
            data.push(part.map(ReadData::Mapped));
        }
    }

    /// Begins a write to `pages`, in this order. `staged` are the pages that the peer staged.
    pub fn begin_write<'r, 'bytes>(
        &'r mut self,
        pages: &[Gref],
        staged: &'r StagingTable,
    ) -> WriteBatch<'r, 'bytes, G> {
        self.slots.clear();
        let writable = pages.iter().map(|gref| (*gref, Access::ReadWrite));
        if self.maps() {
            self.batches.map(writable.clone());
        } else {
            self.batches.list(writable.clone());
        }
        self.find_places(writable);
        let window = self.window.as_ref();
        let tables = PageTables { window, places: &self.places, staged };
        let looks = match self.mode {
            Mode::Copy | Mode::Map | Mode::Persistent => false,
            Mode::Staging => !staged.is_empty(),
            Mode::Window => window.is_some() || !staged.is_empty(),
        };
        let list = (!self.maps()).then(|| self.batches.ops.begin());
        WriteBatch {
            list,
            tables: looks.then_some(tables),
            grantee: &mut self.batches.grantee,
            slots: &mut self.slots,
            pages: &self.batches.pages,
            mapped: &mut self.batches.mapped,
            written: 0,
        }
    }

    /// Stores the errors of the last batch of copies.
    fn fold(&self, statuses: &mut [GrantStatus]) {
        for (slot, status) in self.slots.iter().zip(self.batches.ops.statuses()) {
            if *status != GrantStatus::Okay {
                statuses[*slot] = *status;
            }
        }
    }

    /// Appends one status for each page of the last [`PageAccess::begin_write`]. Call it after
    /// [`WriteBatch::finish`].
    pub fn write_statuses(&self, statuses: &mut Vec<GrantStatus>) {
        let base = statuses.len();
        match self.mode {
            Mode::Copy | Mode::Staging | Mode::Window => {
                statuses.resize(base + self.batches.pages.len(), GrantStatus::Okay);
                self.fold(&mut statuses[base..]);
                let tables = self.batches.pages.iter().zip(&self.places).zip(&mut statuses[base..]);
                for (((gref, _), place), status) in tables {
                    if let (Some(_), Err(why)) = (unmark(*gref), place) {
                        *status = *why;
                    }
                }
            }
            Mode::Map | Mode::Persistent => statuses.extend(
                self.batches
                    .mapped
                    .iter()
                    .map(|m| m.as_ref().err().copied().unwrap_or(GrantStatus::Okay)),
            ),
        }
    }

    /// Unmaps the pages of the last write. Call it after [`PageAccess::write_statuses`].
    pub fn end_write(&mut self) {
        self.batches.mapped.clear();
    }
}

/// Sources of page look-ups: the grant window and the staging table.
#[derive(Clone, Copy)]
struct PageTables<'r> {
    window: Option<&'r WindowRound>,
    /// Positions of the batch's pages in the grant window.
    places: &'r [Result<RoundPlace, GrantStatus>],
    staged: &'r StagingTable,
}

impl<'r> PageTables<'r> {
    /// Looks up page number `slot` of the batch; `None` if it is in no table.
    #[inline]
    fn page(
        &self,
        slot: usize,
        gref: Gref,
        access: Access,
    ) -> Result<Option<&'r LentSlice>, GrantStatus> {
        if let (Some(window), Some(_)) = (self.window, unmark(gref)) {
            let place = self.places.get(slot).copied().unwrap_or(Err(GrantStatus::GeneralError))?;
            return Ok(window.at(place));
        }
        Ok(self.staged.get(gref, access))
    }
}

/// Reads a range of a staged page: copies a short one, and returns a slice of a longer one.
#[inline]
fn read_from(
    page: &LentSlice,
    range: &ReadRange,
    scratch: &mut [u8],
) -> Result<ReadData, GrantStatus> {
    let (offset, len) = (usize::from(range.offset), usize::from(range.len));
    let bad = |_| GrantStatus::BadCopyArg;
    if range.len > STAGED_COPY_MAX {
        return page.slice(offset, len).map(ReadData::Mapped).map_err(bad);
    }
    let into = scratch.get_mut(range.at..range.at + len).ok_or(GrantStatus::BadCopyArg)?;
    page.copy_to(offset, into).map(|()| ReadData::Copied).map_err(bad)
}

#[inline]
fn write_to(
    page: &LentSlice,
    offset: usize,
    source: Source<'_>,
) -> Result<(), ringfence_memory::OutOfRange> {
    match source {
        Source::Private(bytes) => page.copy_from(offset, bytes),
        Source::Lent(src, from, len) => page.copy_from_lent(offset, src, from, len),
    }
}

/// Splits the bytes of `range` off the rest of the scratch buffer.
fn carve<'b>(
    rest: &mut &'b mut [u8],
    consumed: &mut usize,
    range: &ReadRange,
) -> Result<&'b mut [u8], GrantStatus> {
    let skip = range.at.checked_sub(*consumed).ok_or(GrantStatus::BadCopyArg)?;
    let len = usize::from(range.len);
    let whole = core::mem::take(rest);
    let Some((taken, left)) = whole.split_at_mut_checked(skip + len) else {
        return Err(GrantStatus::BadCopyArg);
    };
    *rest = left;
    *consumed = range.at + len;
    Ok(&mut taken[skip..])
}

/// Batch of writes to a peer's pages.
pub struct WriteBatch<'r, 'bytes, G> {
    list: Option<CopyList<'r, 'bytes>>,
    tables: Option<PageTables<'r>>,
    grantee: &'r mut G,
    slots: &'r mut Vec<usize>,
    pages: &'r [(Gref, Access)],
    mapped: &'r mut Vec<Result<LentSlice, GrantStatus>>,
    /// Number of bytes that this process itself has written, to looked-up or mapped pages.
    written: u64,
}

impl<'bytes, G: Grantee> WriteBatch<'_, 'bytes, G> {
    /// Writes `source` at `offset` of page number `slot` of the list given to [`PageAccess::begin_write`]. The
    /// statuses report a range that does not fit the page, and a page that is not accessible.
    pub fn put(&mut self, slot: usize, offset: usize, source: Source<'bytes>) {
        if offset + source.len() > PAGE_SIZE {
            debug_assert!(false, "the caller splits at page boundaries");
            return;
        }
        match &mut self.list {
            Some(list) => {
                let (Some(&(gref, _)), Ok(at)) = (self.pages.get(slot), u16::try_from(offset))
                else {
                    return;
                };
                match self.tables.map_or(Ok(None), |w| w.page(slot, gref, Access::ReadWrite)) {
                    Ok(Some(page)) => {
                        // The range lies inside the page, which is writable.
                        self.written += source.len() as u64;
                        let _ = write_to(page, offset, source);
                        return;
                    }
                    // `write_statuses` reports the error.
                    Err(_) => return,
                    Ok(None) => {}
                }
                let added = match source {
                    Source::Private(bytes) => list.write(gref, at, bytes),
                    Source::Lent(lent, from, len) => list.write_lent(gref, at, lent, from, len),
                };
                if added.is_ok() {
                    self.slots.push(slot);
                }
            }
            None => self.put_mapped(slot, offset, source),
        }
    }

    fn put_mapped(&mut self, slot: usize, offset: usize, source: Source<'bytes>) {
        let Some(page) = self.mapped.get_mut(slot) else { return };
        let Ok(lent) = page else { return };
        self.written += source.len() as u64;
        if write_to(lent, offset, source).is_err() {
            *page = Err(GrantStatus::BadCopyArg);
        }
    }

    /// Executes the remaining copies; returns the number of bytes that this process copied itself.
    pub fn finish(mut self) -> u64 {
        // If every page was looked up, no copies remain.
        if let Some(list) = self.list.take()
            && (self.tables.is_none() || !self.slots.is_empty())
        {
            self.grantee.copy(list);
        }
        self.written
    }
}
