//! Pins: addresses that answers for allowed names contained, for as long as the answers are valid.
//!
//! The table is bounded by addresses, by the names of each, and by pins of all addresses. When it is full, the address
//! that expires first makes room.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeSet, HashMap};

use smallvec::SmallVec;

use crate::name::HostName;

/// Minimum lifetime of a pin: programs connect some time after the answer, and to several addresses in a row.
pub const LIFE_MIN: Duration = Duration::from_secs(60);
/// Maximum lifetime of a pin.
pub const LIFE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Default maximum number of addresses.
pub const ADDRESSES_MAX: usize = 16_384;
/// Maximum number of names of an address.
pub const NAMES_MAX: usize = 64;
/// Maximum number of pins, as a multiple of that of addresses, beside one address with all its names. A pin with its name
/// takes at most some 350 bytes.
pub const PINS_EACH: usize = 4;

/// Returns the lifetime of a pin for the time to live of a record, in seconds. A value with the highest bit
/// set counts as zero (RFC 2181, 8).
pub fn life(ttl: u32) -> Duration {
    let ttl = if ttl > i32::MAX.unsigned_abs() { 0 } else { ttl };
    Duration::from_secs(ttl.into()).clamp(LIFE_MIN, LIFE_MAX)
}

#[derive(Clone, Debug)]
struct Pin {
    name: HostName,
    until: Duration,
}

/// Table of pinned addresses. Times are those of the caller's clock.
#[derive(Debug)]
pub struct Pins {
    by_address: HashMap<IpAddr, SmallVec<[Pin; 1]>>,
    /// Time at which the last pin of an address expires.
    by_end: BTreeSet<(Duration, IpAddr)>,
    /// Number of pins of all addresses.
    count: usize,
    max: usize,
}

impl Default for Pins {
    fn default() -> Self {
        Pins::new(ADDRESSES_MAX)
    }
}

impl Pins {
    /// Creates an empty table of at most `max` addresses.
    pub fn new(max: usize) -> Pins {
        Pins { by_address: HashMap::new(), by_end: BTreeSet::new(), count: 0, max: max.max(1) }
    }

    /// Returns the number of addresses.
    pub fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Returns `true` if no address is pinned.
    pub fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    /// Returns the number of addresses with a pin that has not expired.
    pub fn in_force(&self, now: Duration) -> usize {
        self.by_end.iter().rev().take_while(|(end, _)| *end > now).count()
    }

    /// Pins an address to a name until `now` plus `life`. A longer pin stays.
    pub fn add(&mut self, name: &HostName, ip: IpAddr, life: Duration, now: Duration) {
        if !self.by_address.contains_key(&ip) {
            self.expire(now);
            if self.by_address.len() >= self.max {
                self.evict();
            }
        }
        while self.count >= self.max * PINS_EACH + NAMES_MAX {
            self.evict();
        }
        let pins = self.by_address.entry(ip).or_default();
        let end_before = pins.iter().map(|pin| pin.until).max();
        let until = now.saturating_add(life);
        match pins.iter_mut().find(|pin| pin.name == *name) {
            Some(pin) => pin.until = pin.until.max(until),
            None => {
                let before = pins.len();
                pins.retain(|pin| pin.until > now);
                if pins.len() >= NAMES_MAX
                    && let Some(first) = (0..pins.len()).min_by_key(|&at| pins[at].until)
                {
                    pins.swap_remove(first);
                }
                pins.push(Pin { name: name.clone(), until });
                self.count = self.count + pins.len() - before;
            }
        }
        let end = pins.iter().map(|pin| pin.until).max();
        if end != end_before {
            end_before.map(|before| self.by_end.remove(&(before, ip)));
            end.map(|end| self.by_end.insert((end, ip)));
        }
    }

    /// Removes the addresses whose pins have all expired.
    fn expire(&mut self, now: Duration) {
        while self.by_end.first().is_some_and(|(end, _)| *end <= now) {
            self.evict();
        }
    }

    /// Removes the address that expires first.
    fn evict(&mut self) {
        let Some((_, first)) = self.by_end.pop_first() else { return };
        let removed = self.by_address.remove(&first).unwrap_or_default();
        self.count -= removed.len();
    }

    /// Iterates over the names to which an address is pinned.
    pub fn names(&self, ip: IpAddr, now: Duration) -> impl Iterator<Item = &HostName> {
        let pins = self.by_address.get(&ip).into_iter().flatten();
        pins.filter(move |pin| pin.until > now).map(|pin| &pin.name)
    }
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn ip(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(0x0800_0000 + number).into()
    }

    fn names(pins: &Pins, number: u32, now: Duration) -> Vec<String> {
        pins.names(ip(number), now).map(HostName::to_string).collect()
    }

    #[test]
    fn lifetime_is_bounded_below_and_above() {
        assert_eq!(life(0), LIFE_MIN);
        assert_eq!(life(300), Duration::from_secs(300));
        assert_eq!(life(i32::MAX.unsigned_abs()), LIFE_MAX);
        for invalid in [1 << 31, u32::MAX] {
            assert_eq!(life(invalid), LIFE_MIN);
        }
    }

    #[test]
    fn pin_expires_and_longer_pin_stays() {
        let mut pins = Pins::default();
        pins.add(&name("a.org"), ip(1), 100 * SECOND, SECOND);
        pins.add(&name("a.org"), ip(1), 10 * SECOND, 2 * SECOND);
        pins.add(&name("b.org"), ip(1), 10 * SECOND, 2 * SECOND);
        assert_eq!(names(&pins, 1, 3 * SECOND), ["a.org", "b.org"]);
        assert_eq!(names(&pins, 1, 12 * SECOND), ["a.org"]);
        pins.add(&name("c.org"), ip(2), 10 * SECOND, 2 * SECOND);
        assert_eq!([2, 12, 101].map(|now| pins.in_force(now * SECOND)), [2, 1, 0]);
        assert_eq!(names(&pins, 1, 101 * SECOND), [""; 0]);
        assert_eq!(names(&pins, 3, 3 * SECOND), [""; 0]);
    }

    #[test]
    fn table_at_its_limit_evicts_what_expires_first() {
        let mut pins = Pins::new(3);
        for number in 0..100_000_u32 {
            pins.add(&name("a.org"), ip(number % 1000), LIFE_MIN + SECOND * (number % 7), SECOND);
            assert!(pins.len() <= 3);
        }
        let mut pins = Pins::new(2);
        pins.add(&name("a.org"), ip(1), 100 * SECOND, SECOND);
        pins.add(&name("a.org"), ip(2), 50 * SECOND, SECOND);
        pins.add(&name("a.org"), ip(3), 70 * SECOND, SECOND);
        assert_eq!([1, 2, 3].map(|n| names(&pins, n, SECOND).len()), [1, 0, 1]);
        for number in 0..1000 {
            pins.add(&name(&format!("n{number}.org")), ip(1), 100 * SECOND, SECOND);
        }
        assert_eq!(names(&pins, 1, SECOND).len(), NAMES_MAX);
    }

    #[test]
    fn million_names_take_bounded_memory() {
        let mut pins = Pins::new(1024);
        for number in 0..1_000_000_u32 {
            let host = name(&format!("n{number}.org"));
            pins.add(&host, ip(number % 2000), life(number % 1000), SECOND * (number / 10_000));
            assert!(pins.len() <= 1024 && pins.count <= 1024 * PINS_EACH + NAMES_MAX);
        }
        let held: usize = pins.by_address.values().map(SmallVec::len).sum();
        let room: usize = pins.by_address.values().map(SmallVec::capacity).sum();
        assert!(held == pins.count && room <= 4 * held + 1024, "{held} pins in {room} places");
        // The last name is known: a flood evicts older ones only.
        let last = names(&pins, 999_999 % 2000, SECOND * 99);
        assert!(last.iter().any(|known| known == "n999999.org"), "{last:?}");
    }

    proptest! {
        #[test]
        fn both_indices_agree(steps in prop::collection::vec((0..6_u32, 0..4_u32, 0..50_u64), 0..80)) {
            let mut pins = Pins::new(4);
            let mut now = Duration::ZERO;
            for (address, host, life) in steps {
                now += SECOND;
                pins.add(&name(&format!("h{host}.org")), ip(address), SECOND * u32::try_from(life).unwrap(), now);
                prop_assert_eq!(pins.by_end.len(), pins.by_address.len());
                prop_assert_eq!(pins.count, pins.by_address.values().map(SmallVec::len).sum::<usize>());
                prop_assert!(pins.count <= 4 * PINS_EACH + NAMES_MAX);
                for (end, address) in &pins.by_end {
                    let latest = pins.by_address[address].iter().map(|pin| pin.until).max();
                    prop_assert_eq!(latest, Some(*end));
                }
            }
        }
    }
}
