//! Forwarding database (FDB): the port of each address, with a share of entries for each port.
//!
//! # Theory of operation
//!
//! The database holds [`CAPACITY`] learned addresses. Half of them are reserved: [`GUARANTEED`] for each
//! possible port. The other half is a pool. A port whose policy asks for more gets them from the pool when it
//! is attached, as far as there are any. So the sum of the shares never exceeds the capacity. A port that
//! has used up its share replaces its own addresses, the oldest first as long as none was removed in
//! between. It cannot evict an address of another port.
//!
//! # Invariants
//!
//! * An address has one entry, and the entry's position in its port's list holds that address.
//! * A port's list is never longer than its share.
//! * A fixed address is in no list, does not age and does not move.

use std::collections::HashMap;

use super::{AGEING_SECONDS, AttachError, Mac, PORTS_MAX, PortIndex, PortPolicy, SWEEP_SECONDS};

/// Maximum number of learned addresses; fixed ones are not counted.
pub const CAPACITY: usize = 4096;

/// Number of addresses that are reserved for each port.
pub const GUARANTEED: usize = CAPACITY / 2 / PORTS_MAX;

/// Entry of one address.
#[derive(Clone, Copy, Debug)]
struct AddressEntry {
    port: PortIndex,
    /// Index in the port's list; `None` for a fixed address.
    position: Option<usize>,
    /// Second of the last use of the address on any worker.
    seen: u64,
    /// Second of the last use of the address on this table's worker.
    seen_here: u64,
}

/// Share of a port in the database.
#[derive(Debug)]
struct AddressShare {
    limit: usize,
    fixed: Option<Mac>,
    /// Learned addresses.
    list: Vec<Mac>,
    /// Position of the address to replace next, once the list is as long as the limit.
    next: usize,
}

/// Result of learning a source address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Learned {
    /// Address that the port may use. If the share of the port is zero, the address is not stored, and
    /// frames to it are flooded.
    Known,
    /// Address that is fixed on another port, or is not the fixed address of this port. Also any address of
    /// a port that is not attached.
    Spoofed,
}

/// Forwarding database. See the [module](self).
#[derive(Debug)]
pub struct MacTable {
    entries: HashMap<Mac, AddressEntry>,
    ports: Vec<Option<AddressShare>>,
    /// Number of addresses that are left in the pool.
    pool: usize,
    /// Announcements for the other tables of the same ports; `None` if none are recorded.
    announcements: Option<Vec<(Mac, PortIndex)>>,
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
            // With twice the room, the map does not grow after removals.
            entries: HashMap::with_capacity(2 * (CAPACITY + PORTS_MAX)),
            ports: (0..PORTS_MAX).map(|_| None).collect(),
            pool: CAPACITY - GUARANTEED * PORTS_MAX,
            announcements: None,
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

    /// Returns the share of `port`: the maximum number of addresses that are learned behind it.
    pub fn share(&self, port: PortIndex) -> usize {
        self.ports.get(port.get()).and_then(Option::as_ref).map_or(0, |share| share.limit)
    }

    /// Allocates the share of a port.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError::BadIndex`] if the port is attached or out of range, [`AttachError::MacTaken`]
    /// if another port has the fixed address.
    pub fn attach(&mut self, port: PortIndex, policy: &PortPolicy) -> Result<(), AttachError> {
        if !matches!(self.ports.get(port.get()), Some(None)) {
            return Err(AttachError::BadIndex(port));
        }
        let mut limit = 0;
        match policy.mac {
            Some(mac) => self.insert_fixed(mac, port)?,
            None => {
                let wanted = usize::from(policy.addresses);
                let more = wanted.saturating_sub(GUARANTEED).min(self.pool);
                self.pool -= more;
                limit = wanted.min(GUARANTEED) + more;
            }
        }
        let share =
            AddressShare { limit, fixed: policy.mac, list: Vec::with_capacity(limit), next: 0 };
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
    pub fn record_announcements(&mut self) {
        self.announcements.get_or_insert_default();
    }

    /// Returns the announcements: addresses that are new or have moved, and at each sweep those in use.
    pub fn announcements(&mut self) -> impl Iterator<Item = (Mac, PortIndex)> + Clone + '_ {
        let announcements = self.announcements.as_deref().unwrap_or_default();
        announcements.iter().copied()
    }

    /// Removes all announcements, after they were sent.
    pub fn clear_announcements(&mut self) {
        if let Some(announcements) = &mut self.announcements {
            announcements.clear();
        }
    }

    /// Applies an announcement: another table of the same ports learned `mac` behind `port`.
    pub fn apply_announcement(&mut self, mac: Mac, port: PortIndex, now: u64) -> Learned {
        let announcements = self.announcements.take();
        let seen_here = self.entries.get(&mac).filter(|entry| entry.port == port);
        let seen_here = seen_here.map_or(0, |entry| entry.seen_here);
        let learned = self.learn(mac, port, now);
        if let Some(entry) = self.entries.get_mut(&mac).filter(|entry| entry.port == port) {
            entry.seen_here = seen_here;
        }
        self.announcements = announcements;
        learned
    }

    /// Learns `mac` behind `port`, or refuses it if it is spoofed.
    pub fn learn(&mut self, mac: Mac, port: PortIndex, now: u64) -> Learned {
        let Some(share) = self.ports.get(port.get()).and_then(Option::as_ref) else {
            return Learned::Spoofed;
        };
        if let Some(fixed) = share.fixed {
            return if fixed == mac { Learned::Known } else { Learned::Spoofed };
        }
        match self.entries.get_mut(&mac) {
            Some(entry) if entry.port == port => (entry.seen, entry.seen_here) = (now, now),
            Some(AddressEntry { position: None, .. }) => return Learned::Spoofed,
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
        if entry.position.is_some() && is_old(entry, now) {
            self.remove(mac);
            return None;
        }
        Some(entry.port)
    }

    /// Removes all expired addresses.
    pub fn sweep(&mut self, now: u64) {
        for port in 0..self.ports.len() {
            let mut position = 0;
            while let Some(mac) = self.listed(port, position) {
                match self.entries.get(&mac) {
                    // The last address of the list moves to the index of the removed one.
                    Some(entry) if is_old(entry, now) => self.remove(&mac),
                    Some(AddressEntry { port, seen_here, .. })
                        if now.saturating_sub(*seen_here) < SWEEP_SECONDS =>
                    {
                        position += 1;
                        self.announcements
                            .iter_mut()
                            .for_each(|announcements| announcements.push((mac, *port)));
                    }
                    _ => position += 1,
                }
            }
        }
    }

    /// Returns the learned address at `position` of a port's list.
    fn listed(&self, port: usize, position: usize) -> Option<Mac> {
        self.ports[port].as_ref()?.list.get(position).copied()
    }

    /// Adds the fixed address of a port. A learned entry of that address is removed.
    fn insert_fixed(&mut self, mac: Mac, port: PortIndex) -> Result<(), AttachError> {
        match self.entries.get(&mac) {
            Some(AddressEntry { position: None, .. }) => return Err(AttachError::MacTaken(mac)),
            Some(_) => self.remove(&mac),
            None => {}
        }
        self.entries.insert(mac, AddressEntry { port, position: None, seen: 0, seen_here: 0 });
        Ok(())
    }

    /// Adds a learned address. If the share of the port is used up, one of its addresses is removed.
    fn insert(&mut self, mac: Mac, port: PortIndex, now: u64) {
        let Some(share) = self.ports.get_mut(port.get()).and_then(Option::as_mut) else { return };
        if share.limit == 0 {
            return;
        }
        let position = if share.list.len() < share.limit {
            share.list.push(mac);
            share.list.len() - 1
        } else {
            let position = share.next % share.limit;
            share.next = position + 1;
            self.entries.remove(&share.list[position]);
            share.list[position] = mac;
            position
        };
        self.entries.insert(
            mac,
            AddressEntry { port, position: Some(position), seen: now, seen_here: now },
        );
        if let Some(announcements) = &mut self.announcements {
            announcements.push((mac, port));
        }
    }

    /// Removes a learned address; a fixed one stays.
    fn remove(&mut self, mac: &Mac) {
        let Some(&AddressEntry { port, position: Some(position), .. }) = self.entries.get(mac)
        else {
            return;
        };
        self.entries.remove(mac);
        let Some(share) = self.ports.get_mut(port.get()).and_then(Option::as_mut) else { return };
        share.list.swap_remove(position);
        if let Some(entry) = share.list.get(position).and_then(|moved| self.entries.get_mut(moved))
        {
            entry.position = Some(position);
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let mut listed = 0;
        for (port, share) in self.ports.iter().enumerate() {
            let Some(share) = share else { continue };
            assert!(share.list.len() <= share.limit);
            listed += share.list.len() + usize::from(share.fixed.is_some());
            for (position, mac) in share.list.iter().enumerate() {
                let entry = self.entries[mac];
                assert_eq!((entry.port.get(), entry.position), (port, Some(position)));
            }
        }
        assert_eq!(listed, self.entries.len());
        let shares: usize = self.ports.iter().flatten().map(|s| s.limit.max(GUARANTEED)).sum();
        let absent = self.ports.iter().filter(|port| port.is_none()).count();
        assert_eq!(shares + absent * GUARANTEED + self.pool, CAPACITY);
    }
}

fn is_old(entry: &AddressEntry, now: u64) -> bool {
    now.saturating_sub(entry.seen) > AGEING_SECONDS
}
