//! Which flows have an open packet.

/// Entries that a flow may be in.
pub const SET: usize = 8;

/// A set-associative table from flows to groups.
#[derive(Clone, Debug)]
pub(super) struct Table {
    sets: Vec<[Slot; SET]>,
    /// Whether there is anything in it.
    used: bool,
}

/// The hash of a flow and its open group.
type Slot = Option<(u32, u32)>;

impl Table {
    pub(super) fn new(flows: usize) -> Self {
        Self { sets: vec![[None; SET]; flows.div_ceil(SET).max(1)], used: false }
    }

    fn set(&mut self, hash: u32) -> &mut [Slot; SET] {
        let sets = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        &mut self.sets[(hash % sets) as usize]
    }

    /// The open group of this hash that `is_it`.
    pub(super) fn find(&mut self, hash: u32, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut found = self.set(hash).iter().flatten();
        found.find(|&&(other, group)| other == hash && is_it(group)).map(|&(_, group)| group)
    }

    /// Nothing joins `group` any more.
    pub(super) fn close(&mut self, hash: u32, group: u32) {
        for slot in self.set(hash) {
            if *slot == Some((hash, group)) {
                *slot = None;
            }
        }
    }

    /// Adds a group; if its set is full, the one that was opened first makes room.
    pub(super) fn open(&mut self, hash: u32, group: u32) {
        self.used = true;
        // `None` is less than any group, and groups are numbered in the order of their opening.
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
