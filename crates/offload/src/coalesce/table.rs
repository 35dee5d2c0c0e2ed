//! Table of flows with an open packet.

use ringfence_base::numbers::bounded;

/// Entries per set of the flow table.
pub const SET: usize = 8;

/// Set-associative table from flows to groups.
#[derive(Clone, Debug)]
pub(super) struct Table {
    sets: Vec<[Slot; SET]>,
    /// Set if the table has entries.
    used: bool,
}

/// Entry: the hash of a flow and its open group.
type Slot = Option<(u32, u32)>;

impl Table {
    pub(super) fn new(flows: usize) -> Self {
        Self { sets: vec![[None; SET]; flows.div_ceil(SET).max(1)], used: false }
    }

    #[inline]
    fn set(&mut self, hash: u32) -> &mut [Slot; SET] {
        let sets = bounded(self.sets.len(), u32::MAX);
        &mut self.sets[(hash % sets) as usize]
    }

    /// Returns the open group with this hash for which `is_match` returns `true`.
    pub(super) fn find(&mut self, hash: u32, is_match: impl Fn(u32) -> bool) -> Option<u32> {
        let mut found = self.set(hash).iter().flatten();
        found.find(|&&(other, group)| other == hash && is_match(group)).map(|&(_, group)| group)
    }

    /// Removes `group`, so that no frame joins it.
    pub(super) fn close(&mut self, hash: u32, group: u32) {
        for slot in self.set(hash) {
            if *slot == Some((hash, group)) {
                *slot = None;
            }
        }
    }

    /// Adds a group; a full set evicts its oldest entry.
    pub(super) fn open(&mut self, hash: u32, group: u32) {
        self.used = true;
        // `None` sorts before any group, and group numbers rise with time.
        if let Some(slot) = self.set(hash).iter_mut().min_by_key(|slot| slot.map(|(_, g)| g)) {
            *slot = Some((hash, group));
        }
    }

    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.used) {
            self.sets.fill([None; SET]);
        }
    }
}
