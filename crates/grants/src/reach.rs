//! One interface over the modes.

use core::fmt;
use core::str::FromStr;

use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_platform::{Access, CopyList, CopyOps, GrantStatus, Grantee, Gref};

/// How pages are reached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// The platform copies; nothing is mapped.
    Copy,
    /// Pages are mapped for each I/O and unmapped after it.
    Map,
}

impl Mode {
    /// Every mode of this build.
    pub const ALL: [Mode; 2] = [Mode::Copy, Mode::Map];

    /// The name used on the command line and in the store.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Copy => "copy",
            Mode::Map => "map",
        }
    }

    /// What it means, in a line for people.
    pub fn meaning(self) -> &'static str {
        match self {
            Mode::Copy => "the kernel copies each slot; nothing is mapped",
            Mode::Map => "each page is mapped for its I/O and unmapped after it",
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
#[error("`{0}` is no mode; this build has copy and map")]
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
pub struct Want {
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

/// Where the bytes of a [`Want`] are.
#[derive(Clone, Debug)]
pub enum Reached {
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
pub struct Reach<G> {
    grantee: G,
    mode: Mode,
    ops: CopyOps,
    /// For each element of a batch of copies, the slot it belongs to.
    slots: Vec<usize>,
    pages: Vec<(Gref, Access)>,
    mapped: Vec<Result<LentSlice, GrantStatus>>,
}

impl<G: Grantee> Reach<G> {
    /// Reaches the pages of `grantee`'s peer by `mode`.
    pub fn new(grantee: G, mode: Mode) -> Reach<G> {
        Reach {
            grantee,
            mode,
            ops: CopyOps::new(),
            slots: Vec::new(),
            pages: Vec::new(),
            mapped: Vec::new(),
        }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Reads every range of `wants`; appends one result for each to `reached`.
    pub fn read(
        &mut self,
        wants: &[Want],
        scratch: &mut [u8],
        reached: &mut Vec<Result<Reached, GrantStatus>>,
    ) {
        match self.mode {
            Mode::Copy => self.read_by_copy(wants, scratch, reached),
            Mode::Map => self.read_by_map(wants, reached),
        }
    }

    fn read_by_copy(
        &mut self,
        wants: &[Want],
        scratch: &mut [u8],
        reached: &mut Vec<Result<Reached, GrantStatus>>,
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
            reached.push(status.map(|()| Reached::Copied));
        }
        self.grantee.copy(list);
        for (slot, status) in self.slots.iter().zip(self.ops.statuses()) {
            if *status != GrantStatus::Okay {
                reached[base + slot] = Err(*status);
            }
        }
    }

    fn read_by_map(&mut self, wants: &[Want], reached: &mut Vec<Result<Reached, GrantStatus>>) {
        self.pages.clear();
        self.pages.extend(wants.iter().map(|w| (w.gref, Access::ReadOnly)));
        self.mapped.clear();
        self.grantee.map(&self.pages, &mut self.mapped);
        for (want, page) in wants.iter().zip(self.mapped.drain(..)) {
            let range = page.and_then(|page| {
                page.slice(want.offset.into(), want.len.into()).map_err(|_| GrantStatus::BadCopyArg)
            });
            reached.push(range.map(Reached::Mapped));
        }
    }

    /// Begins to write into `pages`, in the order given.
    pub fn begin_write<'bytes>(&mut self, pages: &[Gref]) -> WriteBatch<'_, 'bytes, G> {
        self.slots.clear();
        self.mapped.clear();
        if self.mode == Mode::Map {
            self.pages.clear();
            self.pages.extend(pages.iter().map(|gref| (*gref, Access::ReadWrite)));
            self.grantee.map(&self.pages, &mut self.mapped);
        }
        self.pages.clear();
        self.pages.extend(pages.iter().map(|gref| (*gref, Access::ReadWrite)));
        let list = (self.mode == Mode::Copy).then(|| self.ops.begin());
        WriteBatch {
            list,
            grantee: &mut self.grantee,
            slots: &mut self.slots,
            pages: &self.pages,
            mapped: &mut self.mapped,
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

    /// Appends one status for each page of the last [`Reach::begin_write`]. Call after
    /// [`WriteBatch::finish`].
    pub fn write_statuses(&self, statuses: &mut Vec<GrantStatus>) {
        let base = statuses.len();
        match self.mode {
            Mode::Copy => {
                statuses.resize(base + self.pages.len(), GrantStatus::Okay);
                self.fold(&mut statuses[base..]);
            }
            Mode::Map => statuses.extend(
                self.mapped.iter().map(|m| m.as_ref().err().copied().unwrap_or(GrantStatus::Okay)),
            ),
        }
    }

    /// Removes what the last write mapped. Call after [`Reach::write_statuses`].
    pub fn end_write(&mut self) {
        self.mapped.clear();
    }
}

/// Takes the bytes of `want` out of the scratch buffer that is left.
fn carve<'b>(
    rest: &mut &'b mut [u8],
    consumed: &mut usize,
    want: &Want,
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
    grantee: &'r mut G,
    slots: &'r mut Vec<usize>,
    pages: &'r [(Gref, Access)],
    mapped: &'r mut Vec<Result<LentSlice, GrantStatus>>,
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
        let copied = match source {
            Source::Private(bytes) => lent.copy_from(offset, bytes),
            Source::Lent(src, from, len) => lent.copy_from_lent(offset, src, from, len),
        };
        if copied.is_err() {
            *page = Err(GrantStatus::BadCopyArg);
        }
    }

    /// Carries the writes out.
    pub fn finish(mut self) {
        if let Some(list) = self.list.take() {
            self.grantee.copy(list);
        }
    }
}
