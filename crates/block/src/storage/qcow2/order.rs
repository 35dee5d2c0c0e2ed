//! Order of the metadata writes of an image.
//!
//! An image is consistent if each cluster that a table refers to has a refcount of at least 1; a cluster with a refcount
//! and no reference is merely lost space. So a refcount must reach the file before the reference. The library orders
//! entries of L2 tables so, but writes an entry of the L1 table, or of the refcount table, while the refcount of the
//! table that it refers to may be in its cache alone. A process that was killed then left a corrupt image.
//!
//! [`WriteOrder::write`] sees every metadata write before the file does:
//!
//! | write | before it |
//! |---|---|
//! | entry of the L1 table or of the refcount table | the refcount of its target is set in the file if it is 0 there; then a sync |
//! | refcount block, L2 table | a sync, if writes of another kind are not durable |
//! | header | a sync |
//!
//! The syncs keep the order in a loss of power. Without them ([`Durability::Killed`]) the order holds for a process that
//! is killed. Entries are written only by threads that hold the disk exclusively, so a refcount is read and set without
//! another write between.
//!
//! [`WriteOrder::check_tables`] sees every L2 table that the library reads. It refuses one that refers to a cluster without a
//! refcount block: to free such a cluster makes the library's search for a free one call itself without an end.

// #syscall driver,disk,daemon fdatasync: the order of tables and counts of an image

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringfence_sys::numbers::usize_from;

use super::file::MemberFile;
use crate::storage::qcow2_header::Header;

/// Bits of an entry that are an offset in the file.
const OFFSET_MASK: u64 = 0x00FF_FFFF_FFFF_FE00;

/// Bit of an entry of an L2 table for compressed clusters.
const COMPRESSED: u64 = 1 << 62;

/// Place in the header of the offset of the refcount table and its number of clusters.
const TABLE_FIELDS: core::ops::Range<u64> = 48..60;

/// Event that the order of writes survives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Durability {
    /// A loss of power.
    PowerLoss,
    /// The end of the process.
    Killed,
}

/// Kind of a metadata write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Refcount block.
    Refcounts,
    /// L2 table.
    Mappings,
    /// Entry of the L1 table or of the refcount table, or header.
    Pointers,
}

/// Order of the metadata writes of one image.
pub(super) struct WriteOrder {
    cluster_bits: u32,
    refcount_order: u32,
    /// Range of the L1 table in bytes. The table never moves.
    l1: (u64, u64),
    durability: Durability,
    /// Set if clusters of data are in another file, which has no refcounts.
    data_file: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Range of the refcount table in bytes.
    refcount_table: (u64, u64),
    /// Indices of the entries of the refcount table that have a block.
    covered: HashSet<u64>,
    /// Offsets of refcount blocks and of L2 tables.
    blocks: HashSet<u64>,
    mappings: HashSet<u64>,
    /// Kind of the writes since the last sync.
    unsynced: Option<Kind>,
    /// Number of metadata writes.
    writes: u64,
}

impl State {
    /// Reads the refcount table.
    fn load_blocks(&mut self, file: &MemberFile) -> io::Result<()> {
        let found = targets(file, self.refcount_table)?;
        self.covered = found.keys().copied().collect();
        self.blocks = found.into_values().collect();
        Ok(())
    }
}

impl WriteOrder {
    /// Creates the order of an image. [`WriteOrder::load`] completes it.
    pub(super) fn new(header: &Header, durability: Durability) -> WriteOrder {
        let state = State { refcount_table: header.refcount_table, ..State::default() };
        WriteOrder {
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            l1: (header.l1.0, header.l1.1 * 8),
            durability,
            data_file: header.data_file.is_some(),
            state: Mutex::new(state),
        }
    }

    /// Reads the tables of the file.
    pub(super) fn load(&self, file: &MemberFile) -> io::Result<()> {
        let mut state = self.lock();
        state.mappings = targets(file, self.l1)?.into_values().collect();
        state.load_blocks(file)?;
        let (start, len) = state.refcount_table;
        match self.has_blocks(&state, start, len) {
            true => Ok(()),
            false => Err(io::Error::other("the refcount table of the image has no refcounts")),
        }
    }

    /// Returns `true` if each cluster of a range of the file has a refcount block.
    fn has_blocks(&self, state: &State, start: u64, len: u64) -> bool {
        let bits = 2 * self.cluster_bits + 3 - self.refcount_order;
        let last = start.saturating_add(len.max(1) - 1) >> bits;
        (start >> bits..=last).all(|entry| state.covered.contains(&entry))
    }

    /// Checks the L2 tables in bytes that were read from an offset of the file.
    ///
    /// # Errors
    ///
    /// Returns an error if a table refers to a cluster without a refcount block.
    pub(super) fn check_tables(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.data_file {
            return Ok(());
        }
        let state = self.lock();
        let cluster = 1u64 << self.cluster_bits;
        let end = offset.saturating_add(bytes.len() as u64);
        let mut at = offset.next_multiple_of(cluster);
        while at < end {
            if state.mappings.contains(&at) {
                let table =
                    &bytes[usize_from(at - offset)..usize_from(end.min(at + cluster) - offset)];
                self.check_table(&state, table, at)?;
            }
            at += cluster;
        }
        Ok(())
    }

    fn check_table(&self, state: &State, table: &[u8], at: u64) -> io::Result<()> {
        // In an entry of compressed clusters, the number of further sectors follows the offset.
        let place_bits = 62 - (self.cluster_bits - 8);
        for entry in table.as_chunks::<8>().0.iter().map(|entry| u64_of(entry)) {
            let (start, len) = match entry & COMPRESSED {
                0 => (entry & OFFSET_MASK, 1 << self.cluster_bits),
                _ => {
                    let sectors = (entry & (COMPRESSED - 1)) >> place_bits;
                    (entry & ((1 << place_bits) - 1), (sectors + 1) * 512)
                }
            };
            if start != 0 && !self.has_blocks(state, start, len) {
                return Err(io::Error::other(format!(
                    "the table at {at} of the image refers to {start}, which has no refcount"
                )));
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of metadata writes before a sync.
    pub(super) fn before_sync(&self) -> u64 {
        self.lock().writes
    }

    /// Forgets the kind of the writes that a sync made durable, unless there were more since it began.
    pub(super) fn after_sync(&self, writes: u64) {
        let mut state = self.lock();
        if state.writes == writes {
            state.unsynced = None;
        }
    }

    /// Writes to the file, after everything that must come first.
    pub(super) fn write(
        &self,
        file: &MemberFile,
        buffers: &mut [IoSlice<'_>],
        offset: u64,
    ) -> io::Result<()> {
        let len: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let written = (offset, len);
        let mut state = self.lock();
        let entries = [(self.l1, Kind::Mappings), (state.refcount_table, Kind::Refcounts)]
            .map(|(table, of)| (intersection(written, table), table, of));
        let moves =
            intersection(written, (TABLE_FIELDS.start, TABLE_FIELDS.end - TABLE_FIELDS.start)).1
                > 0;
        let points = moves || entries.iter().any(|((_, len), ..)| *len > 0);
        let kind = match () {
            () if points => Some(Kind::Pointers),
            () if state.blocks.contains(&offset) => Some(Kind::Refcounts),
            () if state.mappings.contains(&offset) => Some(Kind::Mappings),
            () => None,
        };
        let Some(kind) = kind else {
            drop(state);
            return file.write_all(buffers, offset);
        };
        let mut found = vec![];
        for ((start, len), table, of) in entries {
            for (place, target) in new_entries(buffers, offset, (start, len)) {
                let own = (of == Kind::Refcounts).then_some(((place - table.0) / 8, target));
                self.ensure_refcount(file, state.refcount_table, target, own)?;
                found.push((of, target, own));
            }
        }
        let must_sync = points || state.unsynced.is_some_and(|other| other != kind);
        if must_sync && self.durability == Durability::PowerLoss {
            rustix::fs::fdatasync(file)?;
        }
        file.write_all(buffers, offset)?;
        state.unsynced = Some(kind);
        state.writes += 1;
        for (of, target, own) in found {
            state.covered.extend(own.map(|(entry, _)| entry));
            let set = if of == Kind::Mappings { &mut state.mappings } else { &mut state.blocks };
            set.insert(target);
        }
        if moves {
            self.move_table(file, &mut state)?;
        }
        Ok(())
    }

    /// Reads the place of the refcount table anew.
    fn move_table(&self, file: &MemberFile, state: &mut State) -> io::Result<()> {
        let mut fields = [0; 12];
        file.read_unaligned(&mut fields, TABLE_FIELDS.start)?;
        let (offset, clusters) = fields.split_at(8);
        let offset = u64_of(offset);
        let clusters = clusters.try_into().map_or(0, u32::from_be_bytes);
        let table = (offset, u64::from(clusters) << self.cluster_bits);
        if table != state.refcount_table {
            state.refcount_table = table;
            state.load_blocks(file)?;
        }
        Ok(())
    }

    /// Sets the refcount of the cluster at `target` to 1 in the file if it is 0 there. `own` is an entry of the refcount
    /// table that is not written yet: its index and value.
    fn ensure_refcount(
        &self,
        file: &MemberFile,
        table: (u64, u64),
        target: u64,
        own: Option<(u64, u64)>,
    ) -> io::Result<()> {
        let index = target >> self.cluster_bits;
        let per_block_bits = self.cluster_bits + 3 - self.refcount_order;
        let (entry, within) = (index >> per_block_bits, index & ((1 << per_block_bits) - 1));
        let block = match own {
            Some((place, block)) if place == entry => block,
            _ if entry >= table.1 / 8 => return Ok(()),
            _ => {
                let mut bytes = [0; 8];
                file.read_unaligned(&mut bytes, table.0 + entry * 8)?;
                u64_of(&bytes) & OFFSET_MASK
            }
        };
        if block == 0 {
            return Ok(());
        }
        let bit = within << self.refcount_order;
        let width = 1usize << self.refcount_order;
        let mut bytes = [0; 8];
        let refcount = &mut bytes[..width.div_ceil(8)];
        let place = block + bit / 8;
        file.read_unaligned(refcount, place)?;
        let shift = bit % 8;
        let is_zero = match width {
            ..8 => (refcount[0] >> shift) & ((1 << width) - 1) == 0,
            _ => refcount.iter().all(|byte| *byte == 0),
        };
        if !is_zero {
            return Ok(());
        }
        match (width, refcount.last_mut()) {
            (..8, Some(byte)) => *byte |= 1 << shift,
            (_, Some(byte)) => *byte = 1,
            (_, None) => {}
        }
        file.write_unaligned(refcount, place)
    }
}

/// Returns the entries other than 0 in the part `range` of the buffers: place in the file and target.
fn new_entries(buffers: &[IoSlice<'_>], offset: u64, range: (u64, u64)) -> Vec<(u64, u64)> {
    let (start, len) = range;
    let skip = usize_from(start - offset.min(start));
    let bytes = buffers.iter().flat_map(|buffer| buffer.iter().copied());
    let bytes: Vec<u8> = bytes.skip(skip).take(usize_from(len)).collect();
    let entries = bytes.as_chunks::<8>().0.iter().map(|entry| u64_of(entry) & OFFSET_MASK);
    let places = (0..).map(|number| start + number * 8);
    places.zip(entries).filter(|(_, target)| *target != 0).collect()
}

/// Reads the entries of a table other than 0: target by index.
fn targets(file: &MemberFile, table: (u64, u64)) -> io::Result<HashMap<u64, u64>> {
    let mut found = HashMap::new();
    let mut chunk = vec![0; 1 << 16];
    let mut done = 0;
    while done < table.1 {
        let len = usize_from((table.1 - done).min(chunk.len() as u64));
        file.read_unaligned(&mut chunk[..len], table.0 + done)?;
        let entries = chunk[..len].as_chunks::<8>().0.iter();
        let entries = entries.map(|entry| u64_of(entry) & OFFSET_MASK);
        found.extend((done / 8..).zip(entries).filter(|(_, target)| *target != 0));
        done += len as u64;
    }
    Ok(found)
}

/// Returns the common part of two ranges, each an offset and a length.
fn intersection(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    let start = one.0.max(other.0);
    let end = one.0.saturating_add(one.1).min(other.0.saturating_add(other.1));
    (start, end.saturating_sub(start))
}

fn u64_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::os::unix::fs::FileExt;

    use ringfence_sys::images::ImageFile;

    use super::super::file::tests::member;
    use super::*;

    const CLUSTER: u64 = 4096;

    /// Image of clusters of 4096 bytes: refcount table in cluster 1, block in 2, L1 table in 3. Refcounts have
    /// 2^`refcount_order` bits and are 0.
    fn image(refcount_order: u32) -> (tempfile::TempDir, std::fs::File, MemberFile) {
        let (directory, file, member) = member(16 * 4096);
        file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER).unwrap();
        file.write_all_at(&CLUSTER.to_be_bytes(), TABLE_FIELDS.start).unwrap();
        file.write_all_at(&1u32.to_be_bytes(), TABLE_FIELDS.start + 8).unwrap();
        let header = Header {
            version: 3,
            cluster_bits: 12,
            bytes: 1 << 20,
            l1: (3 * CLUSTER, 1),
            refcount_table: (CLUSTER, CLUSTER),
            refcount_order,
            lazy_refcounts: false,
            backing: None,
            data_file: None,
        };
        let order = WriteOrder::new(&header, Durability::PowerLoss);
        (directory, file, member.with_order(order).unwrap())
    }

    fn write(member: &MemberFile, bytes: &[u8], offset: u64) {
        member.write_at(&mut [IoSlice::new(bytes)], offset).unwrap();
    }

    fn block(file: &std::fs::File) -> Vec<u8> {
        let mut block = vec![0; 4096];
        file.read_exact_at(&mut block, 2 * CLUSTER).unwrap();
        block
    }

    #[test]
    fn refcount_is_in_the_file_before_its_reference() {
        // Bits of a refcount, and the bytes of cluster 5's.
        for (order, place, wanted) in [
            (0, 0, &[1 << 5][..]),
            (1, 1, &[1 << 2]),
            (3, 5, &[1]),
            (4, 10, &[0, 1]),
            (6, 40, &[0, 0, 0, 0, 0, 0, 0, 1]),
        ] {
            let (_directory, file, member) = image(order);
            write(&member, &((5 * CLUSTER) | (1 << 63)).to_be_bytes(), 3 * CLUSTER);
            let found = block(&file);
            assert_eq!(&found[place..place + wanted.len()], wanted, "order {order}");
            let others = found.iter().filter(|byte| **byte != 0).count();
            assert_eq!(others, 1, "order {order}: no other refcount changes");
        }
    }

    #[test]
    fn refcount_that_is_set_is_kept() {
        let (_directory, file, member) = image(4);
        file.write_all_at(&7u16.to_be_bytes(), 2 * CLUSTER + 10).unwrap();
        write(&member, &(5 * CLUSTER).to_be_bytes(), 3 * CLUSTER);
        assert_eq!(block(&file)[10..12], [0, 7]);
    }

    #[test]
    fn refcount_of_new_block_is_in_the_block_itself_or_in_an_older_one() {
        let (_directory, file, member) = image(4);
        // A block in cluster 5, which the block in cluster 2 covers.
        write(&member, &(5 * CLUSTER).to_be_bytes(), CLUSTER + 8);
        assert_eq!(block(&file)[10..12], [0, 1]);
        // A block that covers itself.
        let own = 2 * 2048 * CLUSTER;
        write(&member, &own.to_be_bytes(), CLUSTER + 16);
        let mut refcount = [0; 2];
        file.read_exact_at(&mut refcount, own).unwrap();
        assert_eq!(refcount, [0, 1]);
    }

    #[test]
    fn table_that_refers_to_cluster_without_refcount_block_is_not_read() {
        // The block in cluster 2 has the refcounts of clusters 0 to 2047.
        let (_directory, file, member) = image(4);
        write(&member, &(5 * CLUSTER).to_be_bytes(), 3 * CLUSTER);
        let read = |offset: u64, len: usize| {
            let mut bytes = vec![0; len];
            member.read_at(&mut [IoSliceMut::new(&mut bytes)], offset)
        };
        let compressed =
            |cluster: u64, sectors: u64| COMPRESSED | (sectors << 58) | (cluster * CLUSTER);
        for (entry, is_valid) in [
            (2047 * CLUSTER, true),
            (2048 * CLUSTER, false),
            ((2048 * CLUSTER) | 1, false),
            ((1 << 63) | (1 << 55), false),
            (compressed(2047, 7), true),
            (compressed(2047, 8), false),
            (compressed(1 << 40, 0), false),
        ] {
            file.write_all_at(&entry.to_be_bytes(), 5 * CLUSTER + 4088).unwrap();
            assert_eq!(read(5 * CLUSTER, 4096).is_ok(), is_valid, "{entry:#x}");
            assert_eq!(
                read(4 * CLUSTER, 3 * 4096).is_ok(),
                is_valid,
                "{entry:#x}: in a longer read"
            );
            assert!(read(6 * CLUSTER, 4096).is_ok());
        }
        // With another block the reference is valid.
        file.write_all_at(&(2048 * CLUSTER).to_be_bytes(), 5 * CLUSTER + 4088).unwrap();
        write(&member, &(7 * CLUSTER).to_be_bytes(), CLUSTER + 8);
        assert!(read(5 * CLUSTER, 4096).is_ok());
    }

    #[test]
    fn moved_refcount_table_is_followed() {
        let (_directory, file, member) = image(4);
        write(&member, &(6 * CLUSTER).to_be_bytes(), 8 * CLUSTER);
        let fields = [&(8 * CLUSTER).to_be_bytes()[..], &1u32.to_be_bytes()].concat();
        write(&member, &fields, TABLE_FIELDS.start);
        write(&member, &(5 * CLUSTER).to_be_bytes(), 3 * CLUSTER);
        assert_eq!(block(&file)[10..12], [0, 0], "the old block");
        let mut refcount = [0; 2];
        file.read_exact_at(&mut refcount, 6 * CLUSTER + 10).unwrap();
        assert_eq!(refcount, [0, 1]);
    }
}
