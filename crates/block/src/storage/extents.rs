//! Extents of a disk: which ranges have storage, and which read as zeros.
//!
//! [`Op::Extents`](super::Op::Extents) asks for the extents of a range. The reply is a list of one page, in the form of
//! blkif ([`ringfence_wire::blkif::Extent`]), so that blkback passes it on as the storage made it. The list may end
//! before the range does, but has at least one extent.

// #syscall driver lseek 2=3: SEEK_DATA, where a disk has holes
// #syscall driver lseek 2=4: SEEK_HOLE, where a disk has holes
// #syscall driver lseek 2=2: SEEK_END, whether a disk was truncated

use core::ops::Range;
use std::os::fd::AsFd;

use ringfence_memory::{LentSlice, OutOfRange};
use ringfence_sys::numbers::bounded;
pub use ringfence_wire::blkif::ExtentState;
use ringfence_wire::blkif::{EXTENT_BYTES, EXTENTS_MAX, Extent, SECTOR};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::Segment;

/// Length of a list in bytes.
pub const LIST_BYTES: u64 = (EXTENTS_MAX * EXTENT_BYTES) as u64;

const SECTORS_MAX: u32 = 1 << 31;
/// Maximum length in bytes of one extent: 1 TiB.
const EXTENT_MAX: u64 = SECTORS_MAX as u64 * SECTOR;

/// List of the extents of a range, in whole sectors of the disk.
///
/// Storage may have extents that begin or end inside a sector. A sector with any data counts as data.
#[derive(Debug)]
pub struct ExtentList {
    extents: Vec<(u64, ExtentState)>,
    /// Start of the storage's current run of extents in one state, and the state.
    run: (u64, ExtentState),
    /// Number of extents that the storage gave.
    pushed: usize,
    /// Sector size in bytes.
    sector: u64,
    /// Length of the range in bytes, in whole sectors.
    wanted: u64,
    /// Length in bytes of the storage's extents so far.
    given: u64,
    /// Length in bytes of the extents in the list, in whole sectors.
    listed: u64,
}

impl ExtentList {
    /// Creates the list of a range of `wanted` bytes, on a disk with sectors of `sector` bytes.
    pub fn new(wanted: u64, sector: u32) -> ExtentList {
        let sector = u64::from(sector.max(1));
        let run = (0, ExtentState::DATA);
        ExtentList { extents: vec![], run, pushed: 0, sector, wanted, given: 0, listed: 0 }
    }

    /// Returns `true` if no further extent has an effect.
    pub fn is_full(&self) -> bool {
        // An extent of the storage can become two of the list, or none.
        self.listed >= self.wanted
            || self.extents.len() + 2 > EXTENTS_MAX
            || self.pushed >= 2 * EXTENTS_MAX
    }

    /// Returns the number of bytes from the beginning of the range whose state is known.
    pub fn given(&self) -> u64 {
        self.given
    }

    /// Adds the next `len` bytes of the storage.
    pub fn push(&mut self, len: u64, state: ExtentState) {
        if len == 0 || self.is_full() {
            return;
        }
        if self.run.1 != state {
            self.run = (self.given, state);
        }
        self.pushed += 1;
        self.given = self.given.saturating_add(len).min(self.wanted);
        let up = |at: u64| at.div_ceil(self.sector).saturating_mul(self.sector);
        if state == ExtentState::DATA {
            return self.list(up(self.given), state);
        }
        let (first, end) = (up(self.run.0), self.given - self.given % self.sector);
        self.list(first.min(self.wanted), ExtentState::DATA);
        self.list(end, state);
    }

    /// Extends the list to `end`.
    fn list(&mut self, end: u64, state: ExtentState) {
        let len = end.min(self.wanted).saturating_sub(self.listed);
        if len == 0 {
            return;
        }
        self.listed += len;
        match self.extents.last_mut() {
            Some((last, same)) if *same == state && *last + len <= EXTENT_MAX => *last += len,
            _ => self.extents.push((len.min(EXTENT_MAX), state)),
        }
        if len > EXTENT_MAX {
            // The rest is for the next query.
            self.wanted = self.listed - (len - EXTENT_MAX);
            self.listed = self.wanted;
        }
    }

    /// Stores the list in the segments of a request. A list without extents says that the first sector is data.
    ///
    /// # Errors
    ///
    /// Returns an error if the segments are shorter than [`LIST_BYTES`].
    pub fn store<'a>(
        &self,
        segments: impl Iterator<Item = &'a LentSlice>,
    ) -> Result<(), OutOfRange> {
        let mut bytes = [0; EXTENTS_MAX * EXTENT_BYTES];
        let first = [(self.sector, ExtentState::DATA)];
        let extents: &[_] = if self.extents.is_empty() { &first[..] } else { &self.extents };
        for ((len, state), place) in extents.iter().zip(bytes.as_chunks_mut::<EXTENT_BYTES>().0) {
            let sectors = bounded(len / SECTOR, SECTORS_MAX);
            *place = Extent { sectors, state: *state }.to_bytes();
        }
        let mut at = 0;
        for segment in segments {
            let len = segment.len().min(bytes.len() - at);
            segment.copy_from(0, &bytes[at..at + len])?;
            at += len;
        }
        let (len, size) = (bytes.len(), at);
        if at < len { Err(OutOfRange::Bounds { offset: 0, len, size }) } else { Ok(()) }
    }
}

/// Reads a list that a disk stored: length in bytes and state of each extent.
///
/// # Errors
///
/// Returns an error if the memory is shorter than [`LIST_BYTES`].
pub fn load(memory: &LentSlice) -> Result<Vec<(u64, ExtentState)>, OutOfRange> {
    let mut bytes = [0; EXTENTS_MAX * EXTENT_BYTES];
    memory.copy_to(0, &mut bytes)?;
    let entries =
        bytes.as_chunks::<EXTENT_BYTES>().0.iter().map(|entry| Extent::from_bytes(*entry));
    let used = entries.take_while(|extent| extent.sectors > 0);
    Ok(used.map(|extent| (u64::from(extent.sectors) * SECTOR, extent.state)).collect())
}

/// Finds the extents of a range of a file, in bytes, by `SEEK_DATA` and `SEEK_HOLE`. File systems that cannot
/// tell have data everywhere.
///
/// # Errors
///
/// Returns `EIO` if the file ends before the range does: it was truncated, and cannot be read there.
pub(super) fn of_file(
    file: impl AsFd,
    range: Range<u64>,
    sector: u32,
) -> Result<ExtentList, Errno> {
    find(range, sector, |to| rustix::fs::seek(&file, to))
}

/// Finds extents by `seek`: one call for each change between hole and data.
fn find(
    range: Range<u64>,
    sector: u32,
    mut seek: impl FnMut(SeekFrom) -> Result<u64, Errno>,
) -> Result<ExtentList, Errno> {
    let Range { start: offset, end } = range;
    let mut list = ExtentList::new(end - offset, sector);
    // Set behind a hole: the last call found data there.
    let mut is_data = false;
    while !list.is_full() {
        let at = offset + list.given();
        let data = if is_data { Ok(at) } else { seek(SeekFrom::Data(at)) };
        let (next, state) = match data {
            Ok(data) if data > at => (data, ExtentState::HOLE),
            Ok(_) => (seek(SeekFrom::Hole(at)).unwrap_or(end), ExtentState::DATA),
            // No data from here to the end of the file.
            Err(Errno::NXIO) if seek(SeekFrom::End(0))? >= end => (end, ExtentState::HOLE),
            Err(Errno::NXIO) => return Err(Errno::IO),
            Err(_) => (end, ExtentState::DATA),
        };
        // A file that changes meanwhile may have its next hole right here.
        let next = if next > at { next } else { end };
        is_data = state == ExtentState::HOLE;
        list.push(next.min(end) - at, state);
    }
    Ok(list)
}

/// Returns the memory of segments.
pub(super) fn memory(segments: &[Segment]) -> impl Iterator<Item = &LentSlice> {
    segments.iter().map(|segment| &segment.memory)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DATA: ExtentState = ExtentState::DATA;
    const HOLE: ExtentState = ExtentState::HOLE;

    fn loaded(list: &ExtentList) -> Vec<(u64, ExtentState)> {
        let memory = LentSlice::anonymous(EXTENTS_MAX * EXTENT_BYTES);
        list.store([&memory].into_iter()).unwrap();
        load(&memory).unwrap()
    }

    #[test]
    fn sector_with_any_data_counts_as_data() {
        let mut list = ExtentList::new(8192, 512);
        for (len, state) in [(700, HOLE), (100, DATA), (1000, HOLE), (100, HOLE), (6292, HOLE)] {
            list.push(len, state);
        }
        assert_eq!(loaded(&list), [(512, HOLE), (512, DATA), (7168, HOLE)]);
        let mut tiny = ExtentList::new(4096, 4096);
        tiny.push(100, HOLE);
        assert_eq!(loaded(&tiny), [(4096, DATA)], "a list is never empty");
    }

    #[test]
    fn list_holds_whole_range_of_large_disk_or_its_beginning() {
        let mut list = ExtentList::new(3 << 40, 512);
        list.push(3 << 40, HOLE);
        assert_eq!(loaded(&list), [(1 << 40, HOLE)]);
        let mut many = ExtentList::new(1 << 30, 512);
        for n in 0..2000 {
            many.push(512, if n % 2 == 0 { DATA } else { HOLE });
        }
        assert!(many.is_full());
        let found = loaded(&many);
        assert!((500..=512).contains(&found.len()) && found.iter().all(|(len, _)| *len == 512));
        assert!(list.store([].into_iter()).is_err());
    }

    #[test]
    fn list_of_many_extents_takes_one_seek_for_each() {
        // Data and holes of a MiB in turn.
        const MIB: u64 = 1 << 20;
        let mut calls = 0;
        let seek = |to| {
            calls += 1;
            Ok(match to {
                SeekFrom::Data(at) if !(at / MIB).is_multiple_of(2) => at,
                SeekFrom::Hole(at) if (at / MIB).is_multiple_of(2) => at,
                SeekFrom::Data(at) | SeekFrom::Hole(at) => (at / MIB + 1) * MIB,
                _ => panic!("{to:?}"),
            })
        };
        let list = loaded(&find(0..8000 * MIB, 512, seek).unwrap());
        assert!(list.len() > 500, "{} extents", list.len());
        assert!(list.iter().all(|(len, _)| *len == MIB));
        assert!(calls <= list.len() + 2, "{calls} calls for {} extents", list.len());
    }

    #[test]
    fn truncated_file_is_an_error_and_no_hole() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(loaded(&of_file(&file, 0..1 << 20, 512).unwrap()), [(1 << 20, HOLE)]);
        file.set_len(4096).unwrap();
        assert_eq!(of_file(&file, 0..1 << 20, 512).unwrap_err(), Errno::IO);
    }

    proptest! {
        #[test]
        fn list_never_calls_data_a_hole(
            extents in prop::collection::vec((1u64..5000, any::<bool>()), 1..40),
            sector in prop_oneof![Just(512u32), Just(4096)],
        ) {
            let total: u64 = extents.iter().map(|(len, _)| len).sum();
            let wanted = total.next_multiple_of(u64::from(sector));
            let mut list = ExtentList::new(wanted, sector);
            let mut data = vec![false; usize::try_from(wanted).unwrap()];
            let mut at = 0;
            for (len, is_data) in &extents {
                let len = usize::try_from(*len).unwrap();
                data[at..at + len].fill(*is_data);
                at += len;
                list.push(len as u64, if *is_data { DATA } else { HOLE });
            }
            let mut at = 0;
            for (len, state) in loaded(&list) {
                prop_assert!(len > 0 && len.is_multiple_of(u64::from(sector)));
                let end = at + usize::try_from(len).unwrap();
                prop_assert!(end <= data.len());
                prop_assert!(state == DATA || !data[at..end].contains(&true));
                at = end;
            }
        }
    }
}
