//! One interface over the modes.

use core::fmt;
use core::str::FromStr;

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{
    Access, CopyList, CopyOps, GrantStatus, Grantee, Gref, RoundPlace, WindowRound,
};

use crate::staging::StagingTable;
use crate::window::unmark;

/// Ranges of staged pages of at most so many bytes are copied rather than referred to: a copy of
/// a few cache lines costs less than keeping track of where they are.
const STAGED_COPY_MAX: u16 = 256;

/// How pages are reached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// The platform copies; nothing is mapped.
    Copy,
    /// Pages are mapped for each I/O and unmapped after it.
    Map,
    /// Pages that the peer staged stay mapped and are looked up; the others are copied.
    Staging,
    /// Pages of the peer's windows are looked up; the others are reached as in [`Mode::Staging`].
    Window,
}

impl Mode {
    /// Every mode of this build.
    pub const ALL: [Mode; 4] = [Mode::Copy, Mode::Map, Mode::Staging, Mode::Window];

    /// The name used on the command line and in the store.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Copy => "copy",
            Mode::Map => "map",
            Mode::Staging => "staging",
            Mode::Window => "window",
        }
    }

    /// What it means, in a line for people.
    pub fn meaning(self) -> &'static str {
        match self {
            Mode::Copy => "the kernel copies each slot; nothing is mapped",
            Mode::Map => "each page is mapped for its I/O and unmapped after it",
            Mode::Staging => "pages that the guest staged stay mapped; what it did not is copied",
            Mode::Window => {
                "the guest issues and revokes pages of a window that is mapped whole, alone"
            }
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no mode.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no mode; this build has copy, map, staging and window")]
pub struct UnknownMode(String);

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(word: &str) -> Result<Mode, UnknownMode> {
        Mode::ALL
            .into_iter()
            .find(|m| m.name() == word)
            .ok_or_else(|| UnknownMode(word.chars().take(32).collect()))
    }
}

/// A range of a peer's page that is to be read.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    /// The page.
    pub gref: Gref,
    /// First byte in it.
    pub offset: u16,
    /// Bytes; the range lies inside the page (validated by whoever parsed the slot).
    pub len: u16,
    /// Where in the scratch buffer the bytes go if they are copied; ranges ascend and do not
    /// overlap.
    pub at: usize,
}

/// Where the bytes of a [`ReadRange`] are.
#[derive(Clone, Debug)]
pub enum ReadData {
    /// At `at` in the scratch buffer.
    Copied,
    /// In the peer's page: exactly the range that was wanted.
    Mapped(LentSlice),
}

/// Bytes to be written into a peer's page.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Private bytes.
    Private(&'a [u8]),
    /// Bytes of another peer's page: offset and length.
    Lent(&'a LentSlice, usize, usize),
}

impl Source<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Source::Private(bytes) => bytes.len(),
            Source::Lent(_, _, len) => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The way to one peer's pages.
pub struct PageAccess<G> {
    grantee: G,
    mode: Mode,
    ops: CopyOps,
    /// For each element of a batch of copies, the slot it belongs to.
    slots: Vec<usize>,
    pages: Vec<(Gref, Access)>,
    mapped: Vec<Result<LentSlice, GrantStatus>>,
    /// The window that the peer made for this ring.
    window: Option<WindowRound>,
    /// Where in it the pages of a batch are; those of other references are in no place.
    places: Vec<Result<RoundPlace, GrantStatus>>,
}

impl<G: Grantee> PageAccess<G> {
    /// Reaches the pages of `grantee`'s peer by `mode`.
    pub fn new(grantee: G, mode: Mode) -> PageAccess<G> {
        PageAccess {
            grantee,
            mode,
            ops: CopyOps::new(),
            slots: Vec::new(),
            pages: Vec::new(),
            mapped: Vec::new(),
            window: None,
            places: Vec::new(),
        }
    }

    /// The same, with the window that the peer made for this ring, which counts in [`Mode::Window`].
    #[must_use]
    pub fn with_window(self, window: Option<WindowRound>) -> PageAccess<G> {
        PageAccess { window: window.filter(|_| self.mode == Mode::Window), ..self }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether there are pages that can be reached without an operation ([`PageAccess::page`]).
    #[inline]
    pub fn has_pages(&self, staged: &StagingTable) -> bool {
        match self.mode {
            Mode::Copy | Mode::Map => false,
            Mode::Staging => !staged.is_empty(),
            Mode::Window => self.window.is_some() || !staged.is_empty(),
        }
    }

    /// The page of `gref`, where it can be reached without an operation of the platform's: this is the
    /// look-up that the modes differ in.
    ///
    /// Nothing that is read there counts, and nothing may be written, before [`PageAccess::settle`] said so.
    #[inline]
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
            Mode::Copy | Mode::Map => None,
        }
    }

    /// Whether all that was looked up since the last time may be used. If not, look it up again with
    /// [`PageAccess::read`] or [`PageAccess::begin_write`], which say what became of each.
    #[inline]
    pub fn settle(&self) -> bool {
        self.window.as_ref().is_none_or(WindowRound::settle)
    }

    /// Nothing that was looked up is used any more. Tell the peer that its I/O is over after this.
    #[inline]
    pub fn end(&mut self) {
        if let Some(window) = &mut self.window {
            window.end();
        }
    }

    /// Looks up those pages of a batch that are in the window.
    fn find_places(&mut self, pages: impl Iterator<Item = (Gref, Access)>) {
        self.places.clear();
        if let Some(window) = &self.window {
            // No window has a page 0.
            let within = pages.map(|(gref, access)| (unmark(gref).unwrap_or(Gref(0)), access));
            window.begin_settled(within, &mut self.places);
        }
    }

    /// Reads every range of `wants`; appends one result for each to `reached`. `staged` are the pages
    /// that the peer staged.
    pub fn read(
        &mut self,
        wants: &[ReadRange],
        staged: &StagingTable,
        scratch: &mut [u8],
        reached: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        match self.mode {
            Mode::Copy => self.read_by_copy(wants, scratch, reached),
            Mode::Map => self.read_by_map(wants, reached),
            Mode::Staging | Mode::Window => self.read_staged(wants, staged, scratch, reached),
        }
    }

    fn read_staged(
        &mut self,
        wants: &[ReadRange],
        staged: &StagingTable,
        scratch: &mut [u8],
        reached: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        let base = reached.len();
        self.slots.clear();
        self.find_places(wants.iter().map(|want| (want.gref, Access::ReadOnly)));
        let within = Within { window: self.window.as_ref(), places: &self.places, staged };
        for (slot, want) in wants.iter().enumerate() {
            match within.page(slot, want.gref, Access::ReadOnly) {
                Ok(Some(page)) => reached.push(read_from(page, want, scratch)),
                Ok(None) => {
                    self.slots.push(slot);
                    reached.push(Ok(ReadData::Copied));
                }
                Err(status) => reached.push(Err(status)),
            }
        }
        if !self.slots.is_empty() {
            self.read_unstaged(wants, scratch, &mut reached[base..]);
        }
    }

    /// Copies those of `wants` that `self.slots` names.
    #[cold]
    fn read_unstaged(
        &mut self,
        wants: &[ReadRange],
        scratch: &mut [u8],
        reached: &mut [Result<ReadData, GrantStatus>],
    ) {
        let mut list = self.ops.begin();
        let (mut rest, mut consumed) = (scratch, 0usize);
        self.slots.retain(|&slot| {
            let want = &wants[slot];
            let status = carve(&mut rest, &mut consumed, want).and_then(|into| {
                list.read(want.gref, want.offset, into).map_err(|_| GrantStatus::BadCopyArg)
            });
            if let Err(status) = status {
                reached[slot] = Err(status);
            }
            status.is_ok()
        });
        self.grantee.copy(list);
        for (slot, status) in self.slots.iter().zip(self.ops.statuses()) {
            if *status != GrantStatus::Okay {
                reached[*slot] = Err(*status);
            }
        }
    }

    fn read_by_copy(
        &mut self,
        wants: &[ReadRange],
        scratch: &mut [u8],
        reached: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        self.slots.clear();
        let base = reached.len();
        let mut list = self.ops.begin();
        let (mut rest, mut consumed) = (scratch, 0usize);
        for (slot, want) in wants.iter().enumerate() {
            let status = carve(&mut rest, &mut consumed, want).and_then(|into| {
                list.read(want.gref, want.offset, into).map_err(|_| GrantStatus::BadCopyArg)
            });
            if status.is_ok() {
                self.slots.push(slot);
            }
            reached.push(status.map(|()| ReadData::Copied));
        }
        self.grantee.copy(list);
        for (slot, status) in self.slots.iter().zip(self.ops.statuses()) {
            if *status != GrantStatus::Okay {
                reached[base + slot] = Err(*status);
            }
        }
    }

    fn read_by_map(
        &mut self,
        wants: &[ReadRange],
        reached: &mut Vec<Result<ReadData, GrantStatus>>,
    ) {
        self.pages.clear();
        self.pages.extend(wants.iter().map(|w| (w.gref, Access::ReadOnly)));
        self.mapped.clear();
        self.grantee.map(&self.pages, &mut self.mapped);
        for (want, page) in wants.iter().zip(self.mapped.drain(..)) {
            let range = page.and_then(|page| {
                page.slice(want.offset.into(), want.len.into()).map_err(|_| GrantStatus::BadCopyArg)
            });
            reached.push(range.map(ReadData::Mapped));
        }
    }

    /// Begins to write into `pages`, in the order given. `staged` are the pages that the peer staged.
    pub fn begin_write<'r, 'bytes>(
        &'r mut self,
        pages: &[Gref],
        staged: &'r StagingTable,
    ) -> WriteBatch<'r, 'bytes, G> {
        self.slots.clear();
        self.mapped.clear();
        if self.mode == Mode::Map {
            self.pages.clear();
            self.pages.extend(pages.iter().map(|gref| (*gref, Access::ReadWrite)));
            self.grantee.map(&self.pages, &mut self.mapped);
        }
        self.pages.clear();
        self.pages.extend(pages.iter().map(|gref| (*gref, Access::ReadWrite)));
        self.find_places(pages.iter().map(|gref| (*gref, Access::ReadWrite)));
        let window = self.window.as_ref();
        let within = Within { window, places: &self.places, staged };
        let looks = match self.mode {
            Mode::Copy | Mode::Map => false,
            Mode::Staging => !staged.is_empty(),
            Mode::Window => window.is_some() || !staged.is_empty(),
        };
        let list = (self.mode != Mode::Map).then(|| self.ops.begin());
        WriteBatch {
            list,
            within: looks.then_some(within),
            grantee: &mut self.grantee,
            slots: &mut self.slots,
            pages: &self.pages,
            mapped: &mut self.mapped,
            written: 0,
        }
    }

    /// The statuses of the copies of the last batch that was written.
    fn fold(&self, statuses: &mut [GrantStatus]) {
        for (slot, status) in self.slots.iter().zip(self.ops.statuses()) {
            if *status != GrantStatus::Okay {
                statuses[*slot] = *status;
            }
        }
    }

    /// Appends one status for each page of the last [`PageAccess::begin_write`]. Call after
    /// [`WriteBatch::finish`].
    pub fn write_statuses(&self, statuses: &mut Vec<GrantStatus>) {
        let base = statuses.len();
        match self.mode {
            Mode::Copy | Mode::Staging | Mode::Window => {
                statuses.resize(base + self.pages.len(), GrantStatus::Okay);
                self.fold(&mut statuses[base..]);
                let within = self.pages.iter().zip(&self.places).zip(&mut statuses[base..]);
                for (((gref, _), place), status) in within {
                    if let (Some(_), Err(why)) = (unmark(*gref), place) {
                        *status = *why;
                    }
                }
            }
            Mode::Map => statuses.extend(
                self.mapped.iter().map(|m| m.as_ref().err().copied().unwrap_or(GrantStatus::Okay)),
            ),
        }
    }

    /// Removes what the last write mapped. Call after [`PageAccess::write_statuses`].
    pub fn end_write(&mut self) {
        self.mapped.clear();
    }
}

/// Pages that are reached by a look-up.
#[derive(Clone, Copy)]
struct Within<'r> {
    window: Option<&'r WindowRound>,
    /// Of each page of the batch.
    places: &'r [Result<RoundPlace, GrantStatus>],
    staged: &'r StagingTable,
}

impl<'r> Within<'r> {
    /// The page in place `slot` of the batch; `None` when it is not reached by a look-up.
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

/// The range of a staged page: copied if it is short.
#[inline]
fn read_from(
    page: &LentSlice,
    want: &ReadRange,
    scratch: &mut [u8],
) -> Result<ReadData, GrantStatus> {
    let (offset, len) = (usize::from(want.offset), usize::from(want.len));
    let bad = |_| GrantStatus::BadCopyArg;
    if want.len > STAGED_COPY_MAX {
        return page.slice(offset, len).map(ReadData::Mapped).map_err(bad);
    }
    let into = scratch.get_mut(want.at..want.at + len).ok_or(GrantStatus::BadCopyArg)?;
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

/// Takes the bytes of `want` out of the scratch buffer that is left.
fn carve<'b>(
    rest: &mut &'b mut [u8],
    consumed: &mut usize,
    want: &ReadRange,
) -> Result<&'b mut [u8], GrantStatus> {
    let skip = want.at.checked_sub(*consumed).ok_or(GrantStatus::BadCopyArg)?;
    let len = usize::from(want.len);
    let whole = core::mem::take(rest);
    let Some((taken, left)) = whole.split_at_mut_checked(skip + len) else {
        return Err(GrantStatus::BadCopyArg);
    };
    *rest = left;
    *consumed = want.at + len;
    Ok(&mut taken[skip..])
}

/// Bytes on their way into a peer's pages.
pub struct WriteBatch<'r, 'bytes, G> {
    list: Option<CopyList<'r, 'bytes>>,
    within: Option<Within<'r>>,
    grantee: &'r mut G,
    slots: &'r mut Vec<usize>,
    pages: &'r [(Gref, Access)],
    mapped: &'r mut Vec<Result<LentSlice, GrantStatus>>,
    /// Bytes written so far by this process itself, to pages that are looked up or mapped.
    written: u64,
}

impl<'bytes, G: Grantee> WriteBatch<'_, 'bytes, G> {
    /// Puts `source` at `offset` of the page in place `slot` of the list given at the beginning.
    /// A range that does not fit the page, or a page that cannot be reached, shows in the
    /// statuses.
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
                match self.within.map_or(Ok(None), |w| w.page(slot, gref, Access::ReadWrite)) {
                    Ok(Some(page)) => {
                        // The range lies inside the page, which is writable.
                        self.written += source.len() as u64;
                        let _ = write_to(page, offset, source);
                        return;
                    }
                    // The statuses say why.
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

    /// Carries the writes out; returns how many bytes this process copied itself.
    pub fn finish(mut self) -> u64 {
        // Where everything was looked up, nothing is left to be done.
        if let Some(list) = self.list.take()
            && (self.within.is_none() || !self.slots.is_empty())
        {
            self.grantee.copy(list);
        }
        self.written
    }
}
