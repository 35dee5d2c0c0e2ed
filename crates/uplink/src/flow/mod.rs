//! Conversations by their addresses: a bounded table in which the longest idle one makes room.
//!
//! Every protocol has a table of its own. An entry is found by its [`Key`] when a packet comes, and
//! by its [`FlowId`] when an event or a timer does. Keys are hashed with a random secret, so a guest
//! that chooses ports and addresses cannot choose collisions.
//!
//! Conversations that the guest began and those from outside ([`Origin`]) have limits and orders of
//! their own: strangers evict strangers, and no conversation of the guest's.
//!
//! Entries are in the order in which they were last [touched](Table::touch). Each may have one
//! deadline; a deadline that is put off costs nothing until the old one has come.

#[cfg(test)]
mod tests;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::{BTreeSet, HashMap};

use crate::host::{Owner, OwnerKind};

/// What tells conversations of a protocol apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    /// The guest's end.
    pub guest: SocketAddr,
    /// The other end, as the guest sees it.
    pub remote: SocketAddr,
}

impl Key {
    /// The conversation between two ends.
    pub fn new(guest: (IpAddr, u16), remote: (IpAddr, u16)) -> Key {
        Key { guest: guest.into(), remote: remote.into() }
    }
}

/// An entry of a table: its place, and how many others were there before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FlowId {
    index: u32,
    generation: u32,
}

impl FlowId {
    /// As owner of a socket.
    pub fn owner(self, kind: OwnerKind) -> Owner {
        Owner { kind, index: self.index, generation: self.generation }
    }
}

/// The side that began a conversation. Each has a part of the table that the other cannot use up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The guest.
    Guest,
    /// A client of a forwarded port.
    Outside,
}

/// No neighbour in the order of use.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry<V> {
    key: Key,
    value: V,
    origin: Origin,
    /// The one used before this one, and after it.
    older: u32,
    newer: u32,
    deadline: Option<Duration>,
    /// When the table will look at the entry: never later than `deadline`.
    look_at: Option<Duration>,
}

#[derive(Debug)]
struct Place<V> {
    generation: u32,
    entry: Option<Entry<V>>,
}

/// The entries of one origin, in the order of their use.
#[derive(Debug)]
struct Order {
    oldest: u32,
    newest: u32,
    count: usize,
    limit: usize,
}

impl Order {
    fn new(limit: usize) -> Order {
        Order { oldest: NONE, newest: NONE, count: 0, limit: limit.min(1 << 24) }
    }
}

/// Conversations. See the [module](self).
#[derive(Debug)]
pub struct Table<V> {
    places: Vec<Place<V>>,
    free: Vec<u32>,
    by_key: HashMap<Key, u32>,
    looks: BTreeSet<(Duration, u32)>,
    guest: Order,
    outside: Order,
}

impl<V> Table<V> {
    /// A table of at most `limit` entries of the guest's (one, where it is 0), and none from outside;
    /// nothing is allocated before there are some.
    pub fn new(limit: usize) -> Table<V> {
        Table::with_outside(limit, 0)
    }

    /// A table of at most `limit` entries of the guest's, and `outside` from outside.
    pub fn with_outside(limit: usize, outside: usize) -> Table<V> {
        Table {
            places: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            looks: BTreeSet::new(),
            guest: Order::new(limit.max(1)),
            outside: Order::new(outside),
        }
    }

    fn order(&self, origin: Origin) -> &Order {
        match origin {
            Origin::Guest => &self.guest,
            Origin::Outside => &self.outside,
        }
    }

    fn order_mut(&mut self, origin: Origin) -> &mut Order {
        match origin {
            Origin::Guest => &mut self.guest,
            Origin::Outside => &mut self.outside,
        }
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Returns `true` if an entry of this origin has to go before another one is added.
    pub fn is_full(&self, origin: Origin) -> bool {
        let order = self.order(origin);
        order.count >= order.limit
    }

    /// The entry of a key.
    pub fn find(&self, key: &Key) -> Option<FlowId> {
        let &index = self.by_key.get(key)?;
        Some(FlowId { index, generation: self.place(index)?.generation })
    }

    /// The entry that owns a socket, if it is still there.
    pub fn owned_by(&self, owner: Owner) -> Option<FlowId> {
        let place = self.place(owner.index)?;
        place.entry.as_ref()?;
        (place.generation == owner.generation)
            .then_some(FlowId { index: owner.index, generation: owner.generation })
    }

    /// The longest idle entry of this origin.
    pub fn oldest(&self, origin: Origin) -> Option<FlowId> {
        let index = self.order(origin).oldest;
        let generation = self.place(index)?.generation;
        Some(FlowId { index, generation })
    }

    /// An entry's origin.
    pub fn origin(&self, id: FlowId) -> Option<Origin> {
        self.entry(id).map(|entry| entry.origin)
    }

    /// Adds an entry, the most recently used. `None` when the table is full or has the key already;
    /// the value is dropped then.
    pub fn insert(&mut self, key: Key, value: V, origin: Origin) -> Option<FlowId> {
        if self.is_full(origin) || self.by_key.contains_key(&key) {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.places.len()).ok()?;
                self.places.push(Place { generation: 0, entry: None });
                index
            }
        };
        self.by_key.insert(key, index);
        let (older, newer) = (NONE, NONE);
        let entry = Entry { key, value, origin, older, newer, deadline: None, look_at: None };
        let place = self.place_mut(index)?;
        place.entry = Some(entry);
        let generation = place.generation;
        self.link_newest(index, origin);
        self.order_mut(origin).count += 1;
        Some(FlowId { index, generation })
    }

    /// Removes an entry.
    pub fn remove(&mut self, id: FlowId) -> Option<(Key, V)> {
        let origin = self.origin(id)?;
        self.unlink(id.index, origin);
        self.order_mut(origin).count -= 1;
        let place = self.place_mut(id.index)?;
        let entry = place.entry.take()?;
        place.generation = (place.generation + 1) & Owner::GENERATION_MASK;
        if let Some(at) = entry.look_at {
            self.looks.remove(&(at, id.index));
        }
        self.by_key.remove(&entry.key);
        self.free.push(id.index);
        Some((entry.key, entry.value))
    }

    /// An entry's value.
    pub fn get(&self, id: FlowId) -> Option<&V> {
        self.entry(id).map(|entry| &entry.value)
    }

    /// An entry's value, to be changed.
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut V> {
        self.entry_mut(id).map(|entry| &mut entry.value)
    }

    /// An entry's key.
    pub fn key(&self, id: FlowId) -> Option<Key> {
        self.entry(id).map(|entry| entry.key)
    }

    /// The entry is in use: it is the last that will have to make room.
    pub fn touch(&mut self, id: FlowId) {
        let Some(origin) = self.origin(id) else { return };
        if self.order(origin).newest != id.index {
            self.unlink(id.index, origin);
            self.link_newest(id.index, origin);
        }
    }

    /// Sets or removes an entry's deadline.
    pub fn set_deadline(&mut self, id: FlowId, deadline: Option<Duration>) {
        let Some(entry) = self.entry_mut(id) else { return };
        entry.deadline = deadline;
        let (Some(deadline), look_at) = (deadline, entry.look_at) else { return };
        if look_at.is_some_and(|at| at <= deadline) {
            return;
        }
        entry.look_at = Some(deadline);
        if let Some(at) = look_at {
            self.looks.remove(&(at, id.index));
        }
        self.looks.insert((deadline, id.index));
    }

    /// When [`take_due`](Self::take_due) is to be called again.
    pub fn next_look(&self) -> Option<Duration> {
        self.looks.first().map(|&(at, _)| at)
    }

    /// An entry whose deadline has come; it has none any more.
    pub fn take_due(&mut self, now: Duration) -> Option<FlowId> {
        loop {
            let &(at, index) = self.looks.first()?;
            if at > now {
                return None;
            }
            self.looks.pop_first();
            let place = self.place_mut(index)?;
            let generation = place.generation;
            let entry = place.entry.as_mut()?;
            entry.look_at = None;
            match entry.deadline {
                Some(deadline) if deadline <= now => {
                    entry.deadline = None;
                    return Some(FlowId { index, generation });
                }
                Some(later) => {
                    entry.look_at = Some(later);
                    self.looks.insert((later, index));
                }
                None => {}
            }
        }
    }

    /// All entries.
    pub fn ids(&self) -> impl Iterator<Item = FlowId> {
        (0u32..).zip(&self.places).filter_map(|(index, place)| {
            place.entry.as_ref()?;
            Some(FlowId { index, generation: place.generation })
        })
    }

    /// The entries of one origin.
    pub fn ids_of(&self, origin: Origin) -> impl Iterator<Item = FlowId> {
        self.ids().filter(move |id| self.origin(*id) == Some(origin))
    }

    fn place(&self, index: u32) -> Option<&Place<V>> {
        self.places.get(usize::try_from(index).ok()?)
    }

    fn place_mut(&mut self, index: u32) -> Option<&mut Place<V>> {
        self.places.get_mut(usize::try_from(index).ok()?)
    }

    fn entry(&self, id: FlowId) -> Option<&Entry<V>> {
        let place = self.place(id.index)?;
        if place.generation == id.generation { place.entry.as_ref() } else { None }
    }

    fn entry_mut(&mut self, id: FlowId) -> Option<&mut Entry<V>> {
        let place = self.place_mut(id.index)?;
        if place.generation == id.generation { place.entry.as_mut() } else { None }
    }

    fn entry_at(&mut self, index: u32) -> Option<&mut Entry<V>> {
        self.place_mut(index)?.entry.as_mut()
    }

    fn unlink(&mut self, index: u32, origin: Origin) {
        let Some(entry) = self.entry_at(index) else { return };
        let (older, newer) = (entry.older, entry.newer);
        (entry.older, entry.newer) = (NONE, NONE);
        match self.entry_at(older) {
            Some(entry) => entry.newer = newer,
            None => self.order_mut(origin).oldest = newer,
        }
        match self.entry_at(newer) {
            Some(entry) => entry.older = older,
            None => self.order_mut(origin).newest = older,
        }
    }

    fn link_newest(&mut self, index: u32, origin: Origin) {
        let before = self.order(origin).newest;
        if let Some(entry) = self.entry_at(index) {
            (entry.older, entry.newer) = (before, NONE);
        }
        match self.entry_at(before) {
            Some(entry) => entry.newer = index,
            None => self.order_mut(origin).oldest = index,
        }
        self.order_mut(origin).newest = index;
    }
}
