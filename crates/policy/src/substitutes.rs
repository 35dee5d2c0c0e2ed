//! Substitute addresses: stand for names that only an upstream proxy resolves.
//!
//! A guest behind a proxy asks for a name and gets an address of its own for it, from ranges that no network routes. Its
//! connection to that address leads to the name, at the proxy:
//!
//! ```text
//! query a.org ──> answer: 198.18.1.0 (assign) ──> connection to 198.18.1.0 (acquire) ──> CONNECT a.org ──> end (release)
//! ```
//!
//! The table is bounded. An address is given to another name only when no connection uses it, and [`LIFE`] after its last
//! answer or connection. Until then a full table has no address for new names. Each address rests as long as
//! possible before it gets another name.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use std::collections::{BTreeSet, HashMap};

use crate::dns::{Code, Query};
use crate::name::HostName;

/// First address and prefix length of the substitutes: the ranges for benchmarks (RFC 2544, RFC 5180).
const V4: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);
const V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0), 48);

/// Addresses in these ranges at which a guest asks for names, if it has no other name server. They stand for no name.
pub const NAME_SERVERS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 18, 0, 53)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0x53)),
];

/// Default maximum number of names.
pub const NAMES_MAX: usize = 32_768;
/// Time for which an address keeps its name after the last answer, and after the last connection.
pub const LIFE: Duration = Duration::from_secs(600);
/// Time to live of answers, in seconds.
pub const TTL: u32 = 60;
/// Numbers of addresses within their range.
const FIRST: u32 = 256;
const LAST: u32 = (1 << 17) - 2;

/// Returns `true` for addresses of the ranges of substitutes.
pub fn is_substitute(ip: IpAddr) -> bool {
    offset(ip).is_some()
}

/// Returns the offset of an address in its range. That of an address beyond all numbers is `u32::MAX`.
fn offset(ip: IpAddr) -> Option<u32> {
    match ip {
        IpAddr::V4(ip) => {
            let offset = ip.to_bits().checked_sub(V4.0.to_bits())?;
            (offset >> (32 - V4.1) == 0).then_some(offset)
        }
        IpAddr::V6(ip) => {
            let offset = ip.to_bits().checked_sub(V6.0.to_bits())?;
            (offset >> (128 - V6.1) == 0).then(|| u32::try_from(offset).unwrap_or(u32::MAX))
        }
    }
}

/// Returns `true` for names that a proxy could read as an address, or as itself: `localhost`, and names whose last label is a
/// number, such as `0x7f000001`.
pub fn is_misleading(name: &HostName) -> bool {
    let last = name.as_str().rsplit('.').next().unwrap_or_default();
    let is_number = match last.strip_prefix("0x") {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => last.bytes().all(|byte| byte.is_ascii_digit()),
    };
    last == "localhost" || is_number
}

/// Name of a substitute address.
#[derive(Debug)]
struct Entry {
    name: HostName,
    /// Number of connections that use it.
    uses: usize,
    /// Time until which it keeps its name if no connection uses it.
    until: Duration,
}

/// Substitute addresses of one guest. Times are those of the caller's clock.
#[derive(Debug)]
pub struct Substitutes {
    by_name: HashMap<HostName, u32>,
    by_number: HashMap<u32, Entry>,
    /// Ends of the entries that no connection uses.
    by_end: BTreeSet<(Duration, u32)>,
    /// Number of the next address.
    next: u32,
    max: usize,
    /// Families of the guest's addresses: IPv4, IPv6.
    families: [bool; 2],
    /// Time of the last call.
    now: Duration,
}

impl Substitutes {
    /// Creates an empty table of at most `max` names for a guest with addresses of these families, IPv4 first.
    pub fn new(max: usize, families: [bool; 2]) -> Substitutes {
        Substitutes {
            by_name: HashMap::new(),
            by_number: HashMap::new(),
            by_end: BTreeSet::new(),
            next: FIRST,
            max: max.clamp(1, NAMES_MAX),
            families,
            now: Duration::ZERO,
        }
    }

    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns `true` if no name has an address.
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// Writes the answer to a query that the policy allows. Names that a proxy could read as an address do not exist.
    pub fn answer(&mut self, query: &Query, now: Duration) -> Vec<u8> {
        let Some(name) = query.name() else { return query.reply(Code::Refused) };
        if is_misleading(name) {
            return query.reply(Code::NxDomain);
        }
        let [has_v4, has_v6] = self.families;
        let is_wanted = if query.is_for_v4() { has_v4 } else { query.is_for_addresses() && has_v6 };
        if !is_wanted {
            return query.reply(Code::NoData);
        }
        let Some(number) = self.assign(name, now) else { return query.reply(Code::ServFail) };
        let address: IpAddr = match query.is_for_v4() {
            true => Ipv4Addr::from_bits(V4.0.to_bits() | number).into(),
            false => Ipv6Addr::from_bits(V6.0.to_bits() | u128::from(number)).into(),
        };
        query.address_reply(address, TTL)
    }

    /// Returns the number of the name's addresses, which it keeps for [`LIFE`] at least. `None` if the table is full of names in
    /// use.
    fn assign(&mut self, name: &HostName, now: Duration) -> Option<u32> {
        self.now = now;
        if let Some(&number) = self.by_name.get(name) {
            self.keep(number);
            return Some(number);
        }
        if self.by_number.len() >= self.max {
            let &(until, oldest) = self.by_end.first()?;
            if until > now {
                return None;
            }
            self.by_end.pop_first();
            if let Some(entry) = self.by_number.remove(&oldest) {
                self.by_name.remove(&entry.name);
            }
        }
        // There are more numbers than names.
        while self.by_number.contains_key(&self.next) {
            self.advance();
        }
        let number = self.next;
        self.advance();
        let until = now.saturating_add(LIFE);
        self.by_number.insert(number, Entry { name: name.clone(), uses: 0, until });
        self.by_name.insert(name.clone(), number);
        self.by_end.insert((until, number));
        Some(number)
    }

    fn advance(&mut self) {
        self.next = if self.next >= LAST { FIRST } else { self.next + 1 };
    }

    /// Prolongs the life of an entry.
    fn keep(&mut self, number: u32) {
        let Some(entry) = self.by_number.get_mut(&number) else { return };
        let until = self.now.saturating_add(LIFE).max(entry.until);
        if entry.uses == 0 {
            self.by_end.remove(&(entry.until, number));
            self.by_end.insert((until, number));
        }
        entry.until = until;
    }

    /// Returns the name of an address.
    pub fn name(&self, ip: IpAddr) -> Option<&HostName> {
        self.by_number.get(&offset(ip)?).map(|entry| &entry.name)
    }

    /// Counts a connection to an address, which keeps its name until [`Substitutes::release`]. Returns `false` if it has none.
    pub fn acquire(&mut self, ip: IpAddr, now: Duration) -> bool {
        self.now = now;
        let Some(number) = offset(ip) else { return false };
        let Some(entry) = self.by_number.get_mut(&number) else { return false };
        entry.uses += 1;
        self.by_end.remove(&(entry.until, number));
        true
    }

    /// Ends a connection that [`Substitutes::acquire`] has counted.
    pub fn release(&mut self, ip: IpAddr) {
        let Some(number) = offset(ip) else { return };
        let Some(entry) = self.by_number.get_mut(&number) else { return };
        entry.uses = entry.uses.saturating_sub(1);
        self.keep(number);
    }
}

#[cfg(test)]
mod tests;
