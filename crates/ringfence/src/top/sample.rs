//! Samples: the counters and levels of guests, their devices and uplinks, of fronts and of driver domains, at one moment.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

/// Counters or levels by their name.
pub(super) type Counts = BTreeMap<String, u64>;

/// Kinds of items. The names are those of `ringfence top --json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Guest,
    Vif,
    Vbd,
    Uplink,
    /// Session of `pasta` or `passt`.
    Front,
    /// Driver domain of a switch, or the daemon.
    Driver,
}

impl Kind {
    pub(super) const ALL: [Kind; 6] =
        [Kind::Guest, Kind::Vif, Kind::Vbd, Kind::Uplink, Kind::Front, Kind::Driver];

    /// Returns the name of several items.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Kind::Guest => "guests",
            Kind::Vif => "vifs",
            Kind::Vbd => "vbds",
            Kind::Uplink => "uplinks",
            Kind::Front => "fronts",
            Kind::Driver => "drivers",
        }
    }
}

/// One item of a sample. The field names are those of `ringfence top --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Item {
    pub(super) kind: Kind,
    pub(super) name: String,
    /// Name of the guest that it belongs to. A guest's own is empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) guest: String,
    /// Switch, bridge, storage or link.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) place: String,
    /// Key of the guest that it belongs to, or its own.
    #[serde(skip)]
    pub(super) owner: String,
    /// Running totals.
    pub(super) counters: Counts,
    /// Numbers that rise and fall.
    pub(super) levels: Counts,
    /// Rules of the protocols that the guest broke.
    pub(super) rules: Counts,
}

impl Item {
    /// Creates an item without numbers. `owner` is the key of its guest.
    pub(super) fn new(kind: Kind, name: &str, owner: &str) -> Item {
        Item {
            kind,
            name: name.to_owned(),
            guest: String::new(),
            place: String::new(),
            owner: owner.to_owned(),
            counters: Counts::new(),
            levels: Counts::new(),
            rules: Counts::new(),
        }
    }

    /// Returns the key by which the item of an earlier sample is found.
    pub(super) fn key(&self) -> (Kind, &str, &str) {
        (self.kind, &self.owner, &self.name)
    }

    /// Returns the sum of these counters.
    pub(super) fn total(&self, names: &[&str]) -> u64 {
        sum(&self.counters, names)
    }

    /// Returns the sum of these levels.
    pub(super) fn level(&self, names: &[&str]) -> u64 {
        sum(&self.levels, names)
    }

    /// Returns the number of dropped frames and packets.
    pub(super) fn drops(&self) -> u64 {
        self.counters.iter().filter(|(name, _)| is_drop(name)).map(|(_, count)| count).sum()
    }
}

/// Returns `true` for a counter of dropped frames or packets.
pub(super) fn is_drop(name: &str) -> bool {
    name.starts_with("drop")
}

fn sum(counts: &Counts, names: &[&str]) -> u64 {
    names.iter().filter_map(|name| counts.get(*name)).fold(0, |sum, n| sum.saturating_add(*n))
}

/// All items at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) items: Vec<Item>,
    /// Sources that did not answer, for the user.
    pub(super) remarks: Vec<String>,
}

impl Sample {
    /// Adds a guest, with the sums over its devices and its uplink, and these items.
    pub(super) fn add_guest(&mut self, mut guest: Item, parts: Vec<Item>) {
        for part in &parts {
            add_to_guest(&mut guest, part);
        }
        self.items.push(guest);
        self.items.extend(parts);
    }
}

/// Adds the numbers of a part to those of its guest. Directions are the guest's: a switch receives what a guest sends.
fn add_to_guest(guest: &mut Item, part: &Item) {
    let of_kind: &[(&str, &[&str])] = match part.kind {
        Kind::Vif => &[
            ("sent_bytes", &["rx_bytes"]),
            ("received_bytes", &["tx_bytes"]),
            ("frames", &["rx_frames", "tx_frames"]),
        ],
        Kind::Vbd => &[("read_bytes", &["read_bytes"]), ("written_bytes", &["written_bytes"])],
        Kind::Uplink => &[
            ("uplink_sent_bytes", super::columns::UPLINK_SENT),
            ("uplink_received_bytes", super::columns::UPLINK_RECEIVED),
            ("egress_denied", super::columns::DENIED),
        ],
        _ => &[],
    };
    let mut add = |name: &str, count: u64| {
        if count > 0 {
            *guest.counters.entry(name.to_owned()).or_default() += count;
        }
    };
    for (name, counters) in of_kind {
        add(name, part.total(counters));
    }
    add("drops", part.drops());
    let levels = [
        ("queue", part.level(super::columns::QUEUED)),
        ("pages_mapped", part.level(super::columns::MAPPED)),
    ];
    for (name, level) in levels.into_iter().filter(|(_, level)| *level > 0) {
        *guest.levels.entry(name.to_owned()).or_default() += level;
    }
    for (rule, count) in &part.rules {
        *guest.rules.entry(rule.clone()).or_default() += count;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::item;
    use super::*;

    #[test]
    fn guest_has_the_sums_over_its_devices_and_its_uplink() {
        let mut sample = Sample { at: Instant::now(), items: vec![], remarks: vec![] };
        let mut vif = item(Kind::Vif, "vif2.0", &[("rx_bytes", 7), ("drop_runt", 2)]);
        vif.levels.insert("requests_waiting".to_owned(), 3);
        vif.rules.insert("tx_producer_overflow".to_owned(), 1);
        let mut vbd = item(Kind::Vbd, "vbd2.0", &[("read_bytes", 512)]);
        vbd.levels.insert("requests_in_flight".to_owned(), 4);
        let uplink = item(Kind::Uplink, "uplink", &[("tcp_bytes_in", 5), ("drop_local", 1)]);
        sample.add_guest(item(Kind::Guest, "web", &[]), vec![vif, vbd, uplink]);
        let guest = &sample.items[0];
        assert_eq!(sample.items.len(), 4);
        assert_eq!(guest.total(&["sent_bytes", "read_bytes", "uplink_sent_bytes"]), 7 + 512 + 5);
        assert_eq!((guest.drops(), guest.level(&["queue"])), (3, 7));
        assert_eq!(guest.rules.values().sum::<u64>(), 1);
    }
}
