//! Columns of each kind: their heads, their values, and how these are written.

use ringfence_hostnet::text::{byte_count, printable};

use super::model::Row;
use super::sample::{Kind, is_drop};

/// Counters of the payload that an uplink's guest sent.
pub(super) const UPLINK_SENT: &[&str] = &["tcp_bytes_in", "udp_bytes_in"];
/// Counters of the payload that an uplink's guest received.
pub(super) const UPLINK_RECEIVED: &[&str] = &["tcp_bytes_out", "udp_bytes_out"];
/// Counters of denials of an egress policy.
pub(super) const DENIED: &[&str] =
    &["egress_denied", "egress_hellos_denied", "egress_queries_refused", "egress_rebinding"];
const ALLOWED: &[&str] = &["egress_allowed", "egress_queries"];
/// Levels of requests that wait for this side.
pub(super) const QUEUED: &[&str] = &["requests_waiting", "requests_in_flight"];
/// Levels of a guest's pages that stay mapped.
pub(super) const MAPPED: &[&str] = &["pages_staged", "pages_mapped"];
/// Size of a page in bytes.
const PAGE: u64 = 4096;

/// Column of a table.
pub(super) struct Column {
    pub(super) head: &'static str,
    value: Value,
}

/// Value of a column.
enum Value {
    Name,
    Guest,
    Place,
    /// Bytes a second by which these counters rise.
    Bytes(&'static [&'static str]),
    /// Rises a second of these counters.
    Rate(&'static [&'static str]),
    /// Dropped frames and packets a second.
    Drops,
    /// Reason of most of the drops.
    Reason,
    /// Sum of these counters.
    Total(&'static [&'static str]),
    /// Sum of these counters less that of others.
    Left(&'static [&'static str], &'static [&'static str]),
    /// Sum of these levels.
    Level(&'static [&'static str]),
    /// Sum of these levels of pages, as bytes.
    Pages(&'static [&'static str]),
    /// Pages that a driver domain has mapped, as bytes.
    MappedNow,
    /// Rule violations.
    Rules,
}

/// Value of a cell for the order of rows.
#[derive(Debug, PartialEq)]
pub(super) enum Order {
    Text(String),
    Number(f64),
    None,
}

/// Text of a cell, safe for a terminal, and its value.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) order: Order,
}

impl Column {
    /// Returns `true` for numbers, which are aligned to the right.
    pub(super) fn is_number(&self) -> bool {
        !matches!(self.value, Value::Name | Value::Guest | Value::Place | Value::Reason)
    }

    /// Returns `true` for numbers that tell of a problem unless they are zero.
    pub(super) fn warns(&self) -> bool {
        matches!(self.value, Value::Drops | Value::Rules | Value::Reason)
            || matches!(self.value, Value::Total(names) if names == DENIED || names == ["egress_denied"])
    }

    /// Returns the cell of a row.
    pub(super) fn cell(&self, row: &Row) -> Cell {
        let item = &row.item;
        let is_in = |names: &'static [&'static str]| move |name: &str| names.contains(&name);
        match self.value {
            Value::Name => text_cell(&item.name),
            Value::Guest => text_cell(&item.guest),
            Value::Place => text_cell(&item.place),
            Value::Bytes(names) => rate_cell(row.rate(is_in(names)), byte_rate),
            Value::Rate(names) => rate_cell(row.rate(is_in(names)), short_rate),
            Value::Drops => rate_cell(row.rate(is_drop), short_rate),
            Value::Reason => {
                let drops = item.counters.iter().filter(|(name, _)| is_drop(name));
                let most = drops.max_by_key(|(_, count)| **count);
                text_cell(most.map_or("", |(name, _)| name.trim_start_matches("drop_")))
            }
            Value::Total(names) => number_cell(item.total(names)),
            Value::Left(more, less) => {
                number_cell(item.total(more).saturating_sub(item.total(less)))
            }
            Value::Level(names) => number_cell(item.level(names)),
            Value::Pages(names) => bytes_cell(item.level(names)),
            Value::MappedNow => bytes_cell(
                item.total(&["grant_maps"]).saturating_sub(item.total(&["grant_unmaps"])),
            ),
            Value::Rules => number_cell(item.rules.values().sum()),
        }
    }
}

fn text_cell(text: &str) -> Cell {
    let text = printable(text);
    let order = if text.is_empty() { Order::None } else { Order::Text(text.to_lowercase()) };
    Cell { text, order }
}

fn number_cell(count: u64) -> Cell {
    Cell { text: short_count(count), order: number(count) }
}

fn bytes_cell(pages: u64) -> Cell {
    let bytes = pages.saturating_mul(PAGE);
    Cell { text: byte_count(bytes), order: number(bytes) }
}

fn rate_cell(rate: Option<f64>, text: impl Fn(f64) -> String) -> Cell {
    match rate {
        Some(rate) => Cell { text: text(rate), order: Order::Number(rate) },
        None => Cell { text: "-".to_owned(), order: Order::None },
    }
}

#[allow(clippy::cast_precision_loss, reason = "the order of rows")]
fn number(count: u64) -> Order {
    Order::Number(count as f64)
}

/// Returns a rate without its fraction.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are positive")]
fn whole(rate: f64) -> u64 {
    rate.round() as u64
}

/// Formats a rate of bytes for a column.
pub(super) fn byte_rate(rate: f64) -> String {
    byte_count(whole(rate))
}

/// Formats a rate for a column: small ones with a digit behind the point.
pub(super) fn short_rate(rate: f64) -> String {
    if rate > 0.0 && rate < 9.95 { format!("{rate:.1}") } else { short_count(whole(rate)) }
}

/// Formats a number for a column: from 10,000 on in thousands, millions and so on.
pub(super) fn short_count(count: u64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let (mut count, mut unit) = (count, 0);
    while count >= 10_000 && unit + 1 < UNITS.len() {
        count /= 1000;
        unit += 1;
    }
    format!("{count}{}", UNITS[unit])
}

const fn column(head: &'static str, value: Value) -> Column {
    Column { head, value }
}

const GUESTS: &[Column] = &[
    column("GUEST", Value::Name),
    column("SENT/s", Value::Bytes(&["sent_bytes"])),
    column("RECEIVED/s", Value::Bytes(&["received_bytes"])),
    column("DROPS/s", Value::Drops),
    column("RULES", Value::Rules),
    column("UP/s", Value::Bytes(&["uplink_sent_bytes"])),
    column("DOWN/s", Value::Bytes(&["uplink_received_bytes"])),
    column("DENIED", Value::Total(&["egress_denied"])),
    column("READ/s", Value::Bytes(&["read_bytes"])),
    column("WRITTEN/s", Value::Bytes(&["written_bytes"])),
    column("QUEUE", Value::Level(&["queue"])),
    column("LENT", Value::Pages(&["pages_lent"])),
    column("MAPPED", Value::Pages(&["pages_mapped"])),
    column("FRAMES/s", Value::Rate(&["frames"])),
    column("SWITCH", Value::Place),
];
const VIFS: &[Column] = &[
    column("VIF", Value::Name),
    column("GUEST", Value::Guest),
    column("SENT/s", Value::Bytes(&["rx_bytes"])),
    column("RECEIVED/s", Value::Bytes(&["tx_bytes"])),
    column("FRAMES/s", Value::Rate(&["rx_frames", "tx_frames"])),
    column("DROPS/s", Value::Drops),
    column("MOST FOR", Value::Reason),
    column("QUEUE", Value::Level(QUEUED)),
    column("BUFFERS", Value::Level(&["buffers_posted"])),
    column("RULES", Value::Rules),
    column("STAGED", Value::Pages(&["pages_staged"])),
    column("DELAYED/s", Value::Rate(&["rate_limited"])),
    column("HOLD-UPS/s", Value::Rate(&["hold_ups"])),
    column("WAKE-UPS/s", Value::Rate(&["wakeups"])),
    column("PLACE", Value::Place),
];
const VBDS: &[Column] = &[
    column("VBD", Value::Name),
    column("GUEST", Value::Guest),
    column("READ/s", Value::Bytes(&["read_bytes"])),
    column("WRITTEN/s", Value::Bytes(&["written_bytes"])),
    column("REQUESTS/s", Value::Rate(&["reads", "writes", "flushes", "discards", "zeroes"])),
    column("QUEUE", Value::Level(QUEUED)),
    column("MAPPED", Value::Pages(&["pages_mapped"])),
    column("FAILED", Value::Total(&["failed"])),
    column("RULES", Value::Rules),
    column("STORAGE", Value::Place),
];
const TCP_OPEN: Value = Value::Left(&["tcp_opened", "tcp_accepted"], &["tcp_closed"]);
const UPLINKS: &[Column] = &[
    column("UPLINK", Value::Name),
    column("UP/s", Value::Bytes(UPLINK_SENT)),
    column("DOWN/s", Value::Bytes(UPLINK_RECEIVED)),
    column("TCP", TCP_OPEN),
    column("NEW/s", Value::Rate(&["tcp_opened", "tcp_accepted", "udp_opened", "udp_accepted"])),
    column("DROPS/s", Value::Drops),
    column("MOST FOR", Value::Reason),
    column("ALLOWED", Value::Total(ALLOWED)),
    column("DENIED", Value::Total(DENIED)),
    column("PINS", Value::Level(&["pins"])),
    column("FRAMES/s", Value::Rate(&["frames_in", "frames_out"])),
    column("CALLS/s", Value::Rate(&["syscalls"])),
    column("ADDRESS", Value::Place),
];
const FRONTS: &[Column] = &[
    column("FRONT", Value::Name),
    column("UP/s", Value::Bytes(UPLINK_SENT)),
    column("DOWN/s", Value::Bytes(UPLINK_RECEIVED)),
    column("TCP", TCP_OPEN),
    column("NEW/s", Value::Rate(&["tcp_opened", "tcp_accepted", "udp_opened", "udp_accepted"])),
    column("DROPS/s", Value::Drops),
    column("MOST FOR", Value::Reason),
    column("DENIED", Value::Total(DENIED)),
    column("SEEN", Value::Pages(&["pages_seen"])),
    column("PROGRAM", Value::Place),
];
const DRIVERS: &[Column] = &[
    column("DRIVER", Value::Name),
    column("GUESTS", Value::Level(&["guests"])),
    column("MAPS/s", Value::Rate(&["grant_maps"])),
    column("UNMAPS/s", Value::Rate(&["grant_unmaps"])),
    column("COPIES/s", Value::Rate(&["grant_copies"])),
    column("COPIED/s", Value::Bytes(&["grant_copy_bytes"])),
    column("MAPPED", Value::MappedNow),
    column("CALLS/s", Value::Rate(&["syscalls"])),
    column("WAKE-UPS/s", Value::Rate(&["wakeups"])),
    column("EVENTS/s", Value::Rate(&["notifications"])),
    column("RULES", Value::Rules),
];

/// Returns the columns of a kind, the most important first.
pub(super) fn columns_of(kind: Kind) -> &'static [Column] {
    match kind {
        Kind::Guest => GUESTS,
        Kind::Vif => VIFS,
        Kind::Vbd => VBDS,
        Kind::Uplink => UPLINKS,
        Kind::Front => FRONTS,
        Kind::Driver => DRIVERS,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::item;
    use super::*;

    #[test]
    fn numbers_fit_a_column() {
        for (count, text) in [(0, "0"), (9_999, "9999"), (10_000, "10k"), (u64::MAX, "18446744T")] {
            assert_eq!(short_count(count), text);
        }
        assert_eq!([0.0, 0.25, 9.94, 9.96].map(short_rate), ["0", "0.2", "9.9", "10"]);
    }

    #[test]
    fn control_characters_of_names_are_replaced() {
        let mut hostile = item(Kind::Guest, "a\u{1b}[2J\u{202e}", &[]);
        hostile.place = "x\ny".to_owned();
        let row = Row { item: hostile, rates: None };
        for column in columns_of(Kind::Guest) {
            let text = column.cell(&row).text;
            assert!(!text.chars().any(|c| c.is_control() || c == '\u{202e}'), "{text:?}");
        }
    }

    #[test]
    fn reason_of_drops_is_the_most_frequent_one() {
        let counts = [("drop_runt", 1), ("drop_port_full", 5), ("rx_frames", 90)];
        let row = Row { item: item(Kind::Vif, "vif2.0", &counts), rates: None };
        let reason = columns_of(Kind::Vif).iter().find(|column| column.head == "MOST FOR").unwrap();
        assert_eq!(reason.cell(&row).text, "port_full");
    }

    #[test]
    fn mapped_pages_of_a_driver_domain_are_those_not_unmapped() {
        let counts = [("grant_maps", 12), ("grant_unmaps", 2)];
        let row = Row { item: item(Kind::Driver, "blue", &counts), rates: None };
        let mapped = columns_of(Kind::Driver).iter().find(|column| column.head == "MAPPED");
        assert_eq!(mapped.unwrap().cell(&row).text, "40 KiB");
    }
}
