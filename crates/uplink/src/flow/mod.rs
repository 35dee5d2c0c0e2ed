//! Flow table: a bounded table of flows by their addresses, with least-recently-used eviction.
//!
//! Each protocol has a table of its own. A packet finds its entry by [`FlowKey`]; an event or a timer by
//! [`FlowId`]. Keys are hashed with a random secret, so a guest that chooses addresses and ports cannot
//! force collisions.
//!
//! Flows that the guest opened and flows from outside ([`Origin`]) have separate limits and separate usage
//! lists: flows from outside never evict a flow of the guest.
//!
//! Entries are ordered by their last `touch`. Each may have one deadline. Postponing a
//! deadline costs nothing until the old one is reached.

#[cfg(test)]
mod tests;

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::{BTreeSet, HashMap};

use crate::host::{Owner, OwnerKind};

/// Addresses and ports that identify a flow of a protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowKey {
    /// Address and port of the guest.
    pub guest: SocketAddr,
    /// Address and port of the other end, as the guest sees them.
    pub remote: SocketAddr,
}

/// Handle of an entry: its index and generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FlowId {
    index: u32,
    generation: u32,
}

impl FlowId {
    /// Returns the owner tag for a socket of this flow.
    pub fn owner(self, kind: OwnerKind) -> Owner {
        Owner { kind, index: self.index, generation: self.generation }
    }
}

/// Sides that open flows. Each has a part of the table that the other cannot use up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Flow opened by the guest.
    Guest,
    /// Flow opened by a client of a forwarded port.
    Outside,
}

/// List end: no older or newer entry.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct FlowEntry<V> {
    key: FlowKey,
    value: V,
    origin: Origin,
    /// Index of the next older and the next newer entry.
    older: u32,
    newer: u32,
    deadline: Option<Duration>,
    /// Time of the entry's timer, never later than `deadline`.
    timer_at: Option<Duration>,
}

#[derive(Debug)]
struct EntrySlot<V> {
    generation: u32,
    entry: Option<FlowEntry<V>>,
}

/// Usage list of one origin, from the least to the most recently used entry.
#[derive(Debug)]
struct UsageList {
    oldest: u32,
    newest: u32,
    count: usize,
    limit: usize,
}

impl UsageList {
    fn new(limit: usize) -> UsageList {
        UsageList { oldest: NONE, newest: NONE, count: 0, limit: limit.min(1 << 24) }
    }
}

/// Table of flows. See the [module](self).
#[derive(Debug)]
pub struct FlowTable<V> {
    slots: Vec<EntrySlot<V>>,
    free: Vec<u32>,
    by_key: HashMap<FlowKey, u32>,
    timers: BTreeSet<(Duration, u32)>,
    guest: UsageList,
    outside: UsageList,
}

impl<V> FlowTable<V> {
    /// Creates a table of at most `limit` entries of the guest, at least one, and none from outside. Memory is
    /// allocated as entries are added.
    pub fn new(limit: usize) -> FlowTable<V> {
        FlowTable::with_outside(limit, 0)
    }

    /// Creates a table of at most `limit` entries of the guest and `outside` entries from outside.
    pub fn with_outside(limit: usize, outside: usize) -> FlowTable<V> {
        FlowTable {
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            timers: BTreeSet::new(),
            guest: UsageList::new(limit.max(1)),
            outside: UsageList::new(outside),
        }
    }

    fn usage(&self, origin: Origin) -> &UsageList {
        match origin {
            Origin::Guest => &self.guest,
            Origin::Outside => &self.outside,
        }
    }

    fn usage_mut(&mut self, origin: Origin) -> &mut UsageList {
        match origin {
            Origin::Guest => &mut self.guest,
            Origin::Outside => &mut self.outside,
        }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Returns `true` if there is no entry.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Returns `true` if an entry of this origin must be removed before another one is added.
    pub fn is_full(&self, origin: Origin) -> bool {
        let usage = self.usage(origin);
        usage.count >= usage.limit
    }

    /// Returns the entry of a key.
    pub fn find(&self, key: &FlowKey) -> Option<FlowId> {
        let &index = self.by_key.get(key)?;
        Some(FlowId { index, generation: self.slot(index)?.generation })
    }

    /// Returns the entry that owns a socket, if it still exists.
    pub fn owned_by(&self, owner: Owner) -> Option<FlowId> {
        let slot = self.slot(owner.index)?;
        slot.entry.as_ref()?;
        (slot.generation == owner.generation)
            .then_some(FlowId { index: owner.index, generation: owner.generation })
    }

    /// Returns the least recently used entry of this origin.
    pub fn oldest(&self, origin: Origin) -> Option<FlowId> {
        let index = self.usage(origin).oldest;
        let generation = self.slot(index)?.generation;
        Some(FlowId { index, generation })
    }

    /// Returns the origin of an entry.
    pub fn origin(&self, id: FlowId) -> Option<Origin> {
        self.entry(id).map(|entry| entry.origin)
    }

    /// Inserts an entry as the most recently used one. Returns `None`, and drops the value, if the table is
    /// full or has the key.
    pub fn insert(&mut self, key: FlowKey, value: V, origin: Origin) -> Option<FlowId> {
        if self.is_full(origin) || self.by_key.contains_key(&key) {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).ok()?;
                self.slots.push(EntrySlot { generation: 0, entry: None });
                index
            }
        };
        self.by_key.insert(key, index);
        let (older, newer) = (NONE, NONE);
        let entry = FlowEntry { key, value, origin, older, newer, deadline: None, timer_at: None };
        let slot = self.slot_mut(index)?;
        slot.entry = Some(entry);
        let generation = slot.generation;
        self.link_newest(index, origin);
        self.usage_mut(origin).count += 1;
        Some(FlowId { index, generation })
    }

    /// Removes an entry and returns its key and value.
    pub fn remove(&mut self, id: FlowId) -> Option<(FlowKey, V)> {
        let origin = self.origin(id)?;
        self.unlink(id.index, origin);
        self.usage_mut(origin).count -= 1;
        let slot = self.slot_mut(id.index)?;
        let entry = slot.entry.take()?;
        slot.generation = (slot.generation + 1) & Owner::GENERATION_MASK;
        if let Some(at) = entry.timer_at {
            self.timers.remove(&(at, id.index));
        }
        self.by_key.remove(&entry.key);
        self.free.push(id.index);
        Some((entry.key, entry.value))
    }

    /// Returns the value of an entry.
    pub fn get(&self, id: FlowId) -> Option<&V> {
        self.entry(id).map(|entry| &entry.value)
    }

    /// Returns the value of an entry, mutable.
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut V> {
        self.entry_mut(id).map(|entry| &mut entry.value)
    }

    /// Returns the key of an entry.
    pub fn key(&self, id: FlowId) -> Option<FlowKey> {
        self.entry(id).map(|entry| entry.key)
    }

    /// Marks an entry as the most recently used one.
    pub fn touch(&mut self, id: FlowId) {
        let Some(origin) = self.origin(id) else { return };
        if self.usage(origin).newest != id.index {
            self.unlink(id.index, origin);
            self.link_newest(id.index, origin);
        }
    }

    /// Sets or removes the deadline of an entry.
    pub fn set_deadline(&mut self, id: FlowId, deadline: Option<Duration>) {
        let Some(entry) = self.entry_mut(id) else { return };
        entry.deadline = deadline;
        let (Some(deadline), timer_at) = (deadline, entry.timer_at) else { return };
        if timer_at.is_some_and(|at| at <= deadline) {
            return;
        }
        entry.timer_at = Some(deadline);
        if let Some(at) = timer_at {
            self.timers.remove(&(at, id.index));
        }
        self.timers.insert((deadline, id.index));
    }

    /// Returns the time at which [`take_due`](Self::take_due) must be called next. It may be too early.
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// Returns an entry whose deadline has passed, and removes the deadline.
    pub fn take_due(&mut self, now: Duration) -> Option<FlowId> {
        loop {
            let &(at, index) = self.timers.first()?;
            if at > now {
                return None;
            }
            self.timers.pop_first();
            let slot = self.slot_mut(index)?;
            let generation = slot.generation;
            let entry = slot.entry.as_mut()?;
            entry.timer_at = None;
            match entry.deadline {
                Some(deadline) if deadline <= now => {
                    entry.deadline = None;
                    return Some(FlowId { index, generation });
                }
                Some(later) => {
                    entry.timer_at = Some(later);
                    self.timers.insert((later, index));
                }
                None => {}
            }
        }
    }

    /// Iterates over all entries.
    pub fn ids(&self) -> impl Iterator<Item = FlowId> {
        (0u32..).zip(&self.slots).filter_map(|(index, slot)| {
            slot.entry.as_ref()?;
            Some(FlowId { index, generation: slot.generation })
        })
    }

    /// Iterates over the entries of one origin.
    pub fn ids_of(&self, origin: Origin) -> impl Iterator<Item = FlowId> {
        self.ids().filter(move |id| self.origin(*id) == Some(origin))
    }

    fn slot(&self, index: u32) -> Option<&EntrySlot<V>> {
        self.slots.get(usize::try_from(index).ok()?)
    }

    fn slot_mut(&mut self, index: u32) -> Option<&mut EntrySlot<V>> {
        self.slots.get_mut(usize::try_from(index).ok()?)
    }

    fn entry(&self, id: FlowId) -> Option<&FlowEntry<V>> {
        let slot = self.slot(id.index)?;
        if slot.generation == id.generation { slot.entry.as_ref() } else { None }
    }

    fn entry_mut(&mut self, id: FlowId) -> Option<&mut FlowEntry<V>> {
        let slot = self.slot_mut(id.index)?;
        if slot.generation == id.generation { slot.entry.as_mut() } else { None }
    }

    fn entry_at(&mut self, index: u32) -> Option<&mut FlowEntry<V>> {
        self.slot_mut(index)?.entry.as_mut()
    }

    fn unlink(&mut self, index: u32, origin: Origin) {
        let Some(entry) = self.entry_at(index) else { return };
        let (older, newer) = (entry.older, entry.newer);
        (entry.older, entry.newer) = (NONE, NONE);
        match self.entry_at(older) {
            Some(entry) => entry.newer = newer,
            None => self.usage_mut(origin).oldest = newer,
        }
        match self.entry_at(newer) {
            Some(entry) => entry.older = older,
            None => self.usage_mut(origin).newest = older,
        }
    }

    fn link_newest(&mut self, index: u32, origin: Origin) {
        let before = self.usage(origin).newest;
        if let Some(entry) = self.entry_at(index) {
            (entry.older, entry.newer) = (before, NONE);
        }
        match self.entry_at(before) {
            Some(entry) => entry.newer = index,
            None => self.usage_mut(origin).oldest = index,
        }
        self.usage_mut(origin).newest = index;
    }
}
