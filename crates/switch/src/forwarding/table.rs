//! Forwarding database (FDB): the port of each learned address, with a share of entries for each port.
//!
//! # Theory of operation
//!
//! The table holds [`CAPACITY`] addresses. Half of that is set aside: every port there can be has
//! [`GUARANTEED`] of its own. The other half is a pool from which a port gets more when it is
//! attached, if it asks for more and there are any. So the sum of the shares never exceeds the
//! capacity, and a port that uses up its share replaces its own addresses in turn (the oldest
//! first, as long as none was forgotten in between); it cannot make the switch forget anybody else's.
//!
//! Invariants:
//! * an address has one entry, and that entry's place in its port's list holds that address;
//! * a port's list is never longer than its share;
//! * a fixed address is in no list, does not age and does not move.

use std::collections::HashMap;

use super::{AGEING_SECONDS, AttachError, Mac, PORTS_MAX, PortIndex, PortPolicy, SWEEP_SECONDS};

/// Maximum number of learned addresses; fixed ones are not counted.
pub const CAPACITY: usize = 4096;

/// Addresses that each port may always have.
pub const GUARANTEED: usize = CAPACITY / 2 / PORTS_MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    port: PortIndex,
    /// Index in the port's list; `None` for a fixed address.
    place: Option<usize>,
    /// Second in which the address was last used.
    seen: u64,
    /// Second in which this table itself last saw the address, not another worker's.
    here: u64,
}

#[derive(Debug)]
struct Share {
    limit: usize,
    fixed: Option<Mac>,
    /// Learned addresses. Once it is as long as the limit, `next` goes round it.
    list: Vec<Mac>,
    next: usize,
}

/// Result of learning a source address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Learned {
    /// The port may use the address. It need not be stored, which causes flooding at worst.
    Known,
    /// The address belongs to another port, or the port has another fixed address.
    Spoofed,
}

/// Forwarding database. See the [module](self).
#[derive(Debug)]
pub struct MacTable {
    entries: HashMap<Mac, Entry>,
    ports: Vec<Option<Share>>,
    pool: usize,
    /// Announcements for the other tables of the same ports; `None` if there are none.
    news: Option<Vec<(Mac, PortIndex)>>,
}

impl Default for MacTable {
    fn default() -> Self {
        Self::new()
    }
}

impl MacTable {
    /// Creates an empty table and allocates all storage it will need.
    pub fn new() -> MacTable {
        MacTable {
            // Twice the room: removals then never make it grow.
            entries: HashMap::with_capacity(2 * (CAPACITY + PORTS_MAX)),
            ports: (0..PORTS_MAX).map(|_| None).collect(),
            pool: CAPACITY - GUARANTEED * PORTS_MAX,
            news: None,
        }
    }

    /// Returns the number of known addresses, fixed ones included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if no address is known.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the maximum number of addresses that are learned behind `port`.
    pub fn share(&self, port: PortIndex) -> usize {
        self.ports.get(port.get()).and_then(Option::as_ref).map_or(0, |share| share.limit)
    }

    /// Allocates the share of a port.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError::BadIndex`] or [`AttachError::MacTaken`].
    pub fn attach(&mut self, port: PortIndex, policy: &PortPolicy) -> Result<(), AttachError> {
        if !matches!(self.ports.get(port.get()), Some(None)) {
            return Err(AttachError::BadIndex(port));
        }
        let mut limit = 0;
        match policy.mac {
            Some(mac) => self.fix(mac, port)?,
            None => {
                let wanted = usize::from(policy.addresses);
                let more = wanted.saturating_sub(GUARANTEED).min(self.pool);
                self.pool -= more;
                limit = wanted.min(GUARANTEED) + more;
            }
        }
        let share = Share { limit, fixed: policy.mac, list: Vec::with_capacity(limit), next: 0 };
        self.ports[port.get()] = Some(share);
        Ok(())
    }

    /// Releases the share of a port and removes its addresses.
    pub fn detach(&mut self, port: PortIndex) {
        let Some(share) = self.ports.get_mut(port.get()).and_then(Option::take) else { return };
        self.pool += share.limit.saturating_sub(GUARANTEED);
        for mac in share.fixed.iter().chain(&share.list) {
            self.entries.remove(mac);
        }
    }

    /// Records announcements of learned addresses from now on.
    pub fn keep_news(&mut self) {
        self.news.get_or_insert_default();
    }

    /// Returns the announcements: addresses that are new or have moved, and at each sweep those in use.
    pub fn news(&mut self) -> impl Iterator<Item = (Mac, PortIndex)> + Clone + '_ {
        let news = self.news.as_deref().unwrap_or_default();
        news.iter().copied()
    }

    /// Removes all announcements, after they were sent.
    pub fn clear_news(&mut self) {
        if let Some(news) = &mut self.news {
            news.clear();
        }
    }

    /// Applies the announcement of another table that saw `mac` behind `port`.
    pub fn hear_of(&mut self, mac: Mac, port: PortIndex, now: u64) -> Learned {
        let news = self.news.take();
        let here = self.entries.get(&mac).filter(|entry| entry.port == port);
        let here = here.map_or(0, |entry| entry.here);
        let learned = self.learn(mac, port, now);
        if let Some(entry) = self.entries.get_mut(&mac).filter(|entry| entry.port == port) {
            entry.here = here;
        }
        self.news = news;
        learned
    }

    /// Learns that `port` used `mac`.
    pub fn learn(&mut self, mac: Mac, port: PortIndex, now: u64) -> Learned {
        let Some(share) = self.ports.get(port.get()).and_then(Option::as_ref) else {
            return Learned::Spoofed;
        };
        if let Some(fixed) = share.fixed {
            return if fixed == mac { Learned::Known } else { Learned::Spoofed };
        }
        match self.entries.get_mut(&mac) {
            Some(entry) if entry.port == port => (entry.seen, entry.here) = (now, now),
            Some(Entry { place: None, .. }) => return Learned::Spoofed,
            Some(_) if share.limit == 0 => {}
            Some(_) => {
                self.remove(&mac);
                self.insert(mac, port, now);
            }
            None => self.insert(mac, port, now),
        }
        Learned::Known
    }

    /// Returns the port of `mac`. An expired address is removed.
    pub fn find(&mut self, mac: &Mac, now: u64) -> Option<PortIndex> {
        let entry = self.entries.get(mac)?;
        if entry.place.is_some() && is_old(entry, now) {
            self.remove(mac);
            return None;
        }
        Some(entry.port)
    }

    /// Removes all expired addresses.
    pub fn sweep(&mut self, now: u64) {
        for port in 0..self.ports.len() {
            let mut place = 0;
            while let Some(mac) = self.listed(port, place) {
                match self.entries.get(&mac) {
                    // The last address of the list moves to the index of the removed one.
                    Some(entry) if is_old(entry, now) => self.remove(&mac),
                    Some(Entry { port, here, .. }) if now.saturating_sub(*here) < SWEEP_SECONDS => {
                        place += 1;
                        self.news.iter_mut().for_each(|news| news.push((mac, *port)));
                    }
                    _ => place += 1,
                }
            }
        }
    }

    fn listed(&self, port: usize, place: usize) -> Option<Mac> {
        self.ports[port].as_ref()?.list.get(place).copied()
    }

    fn fix(&mut self, mac: Mac, port: PortIndex) -> Result<(), AttachError> {
        match self.entries.get(&mac) {
            Some(Entry { place: None, .. }) => return Err(AttachError::MacTaken(mac)),
            Some(_) => self.remove(&mac),
            None => {}
        }
        self.entries.insert(mac, Entry { port, place: None, seen: 0, here: 0 });
        Ok(())
    }

    fn insert(&mut self, mac: Mac, port: PortIndex, now: u64) {
        let Some(share) = self.ports.get_mut(port.get()).and_then(Option::as_mut) else { return };
        if share.limit == 0 {
            return;
        }
        let place = if share.list.len() < share.limit {
            share.list.push(mac);
            share.list.len() - 1
        } else {
            let place = share.next % share.limit;
            share.next = place + 1;
            self.entries.remove(&share.list[place]);
            share.list[place] = mac;
            place
        };
        self.entries.insert(mac, Entry { port, place: Some(place), seen: now, here: now });
        if let Some(news) = &mut self.news {
            news.push((mac, port));
        }
    }

    /// Removes a learned address; a fixed one stays.
    fn remove(&mut self, mac: &Mac) {
        let Some(&Entry { port, place: Some(place), .. }) = self.entries.get(mac) else { return };
        self.entries.remove(mac);
        let Some(share) = self.ports.get_mut(port.get()).and_then(Option::as_mut) else { return };
        share.list.swap_remove(place);
        if let Some(entry) = share.list.get(place).and_then(|moved| self.entries.get_mut(moved)) {
            entry.place = Some(place);
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let mut listed = 0;
        for (port, share) in self.ports.iter().enumerate() {
            let Some(share) = share else { continue };
            assert!(share.list.len() <= share.limit);
            listed += share.list.len() + usize::from(share.fixed.is_some());
            for (place, mac) in share.list.iter().enumerate() {
                let entry = self.entries[mac];
                assert_eq!((entry.port.get(), entry.place), (port, Some(place)));
            }
        }
        assert_eq!(listed, self.entries.len());
        let shares: usize = self.ports.iter().flatten().map(|s| s.limit.max(GUARANTEED)).sum();
        let absent = self.ports.iter().filter(|port| port.is_none()).count();
        assert_eq!(shares + absent * GUARANTEED + self.pool, CAPACITY);
    }
}

fn is_old(entry: &Entry, now: u64) -> bool {
    now.saturating_sub(entry.seen) > AGEING_SECONDS
}
