//! Report of the packet benchmark: rows as text and JSON.

use ringfence_access::Mode;
use ringfence_net::staging::TxStaging;

use super::params::{Direction, HUGE_PAGES, ORDINARY_PAGES, Verify};
use super::usage::Usage;
use crate::harness::{Layout, Value, left, right};

/// Row of the packet benchmark: one mode, direction and packet size.
#[derive(Clone, Debug)]
pub(super) struct PacketRow {
    pub(super) mode: Mode,
    pub(super) direction: Direction,
    pub(super) size: u32,
    pub(super) queues: u32,
    pub(super) oversubscribed: bool,
    pub(super) staging: TxStaging,
    pub(super) verify: Verify,
    pub(super) packets: u64,
    /// Time from before the first packet was sent until the last one was verified.
    pub(super) nanos: u64,
    pub(super) backend: Usage,
    pub(super) frontend: Usage,
    /// Time of one bare kernel copy of a packet.
    pub(super) bare_copy_ns: f64,
    /// System calls that perf has counted.
    pub(super) perf_syscalls: Option<u64>,
    /// Round trip of a cache line between the two cores, before and after the row.
    pub(super) core_round_trip_ns: Option<[f64; 2]>,
    /// Set if the frontend lends huge pages.
    pub(super) huge_pages: bool,
}

impl PacketRow {
    /// Returns the counters of both domains together.
    fn usage(&self) -> Usage {
        self.backend.plus(&self.frontend)
    }

    fn per_packet(&self, count: u64) -> f64 {
        count as f64 / self.packets.max(1) as f64
    }

    /// Returns how often each byte was part of `bytes`.
    fn per_byte(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.packets.max(1) as f64 * f64::from(self.size))
    }

    fn seconds(&self) -> f64 {
        self.nanos.max(1) as f64 / 1e9
    }

    /// Returns the packets a second.
    pub(super) fn pps(&self) -> f64 {
        self.packets.max(1) as f64 / self.seconds()
    }

    fn gbps(&self) -> f64 {
        self.packets.max(1) as f64 * f64::from(self.size) * 8.0 / self.seconds() / 1e9
    }

    pub(super) fn grant_ops_per_packet(&self) -> f64 {
        let usage = self.usage();
        self.per_packet(usage.maps + usage.unmaps + usage.copies)
    }

    pub(super) fn syscalls_per_packet(&self) -> f64 {
        self.per_packet(self.usage().syscalls)
    }

    pub(super) fn copies_per_packet(&self) -> f64 {
        self.per_byte(self.usage().copied_bytes)
    }

    pub(super) fn cpu_ns_per_packet(&self) -> f64 {
        self.per_packet(self.usage().cpu_ns)
    }

    pub(super) fn wakeups_per_packet(&self) -> f64 {
        self.per_packet(self.usage().wakeups)
    }

    /// Returns the part of the time that one bare kernel copy for each packet takes.
    pub(super) fn bare_copy_share(&self) -> f64 {
        self.bare_copy_ns * self.packets.max(1) as f64 / self.nanos.max(1) as f64
    }

    fn memory(&self) -> &'static str {
        if self.huge_pages { HUGE_PAGES } else { ORDINARY_PAGES }
    }

    /// Returns the remarks on the row, for the end of its line.
    fn notes(&self) -> String {
        let mut notes = String::new();
        if self.huge_pages {
            notes.push_str("   huge pages");
        }
        if self.queues > 1 {
            notes += &format!("   {} queues", self.queues);
        }
        if self.oversubscribed {
            notes.push_str("   oversubscribed: more polling threads than cores");
        }
        if let Some(perf) = self.perf_syscalls.map(|count| self.per_packet(count)) {
            let off = 100.0 * (self.syscalls_per_packet() - perf) / perf.max(f64::MIN_POSITIVE);
            notes += &format!("   perf counts {perf:.4} system calls ({off:+.2} %)");
        }
        notes
    }
}

/// First columns of the table.
const ORDER: [&str; 8] = [
    "mode",
    "direction",
    "size",
    "pps",
    "gbps",
    "grant_ops_per_packet",
    "syscalls_per_packet",
    "copies_per_packet",
];

/// Returns the columns of a row. Counters are those of both domains together.
pub(super) fn layout() -> Layout<PacketRow> {
    Layout::new()
        .column("mode", |row: &PacketRow| row.mode.name(), left("mode", 5))
        .column("direction", |row| Value::json(&row.direction), left("dir", 3))
        .column("size", |row| row.size, right("size", 6))
        .field("queues", |row| row.queues)
        .field("staging", |row| row.staging.name())
        .field("verify", |row| Value::json(&row.verify))
        .field("packets", |row| row.packets)
        .field("seconds", PacketRow::seconds)
        .column("pps", PacketRow::pps, right("kpps", 9).unit(1e3).digits(1))
        .column("gbps", PacketRow::gbps, right("Gbit/s", 7).digits(2))
        .column(
            "grant_ops_per_packet",
            PacketRow::grant_ops_per_packet,
            right("grant ops", 9).digits(3),
        )
        .column(
            "syscalls_per_packet",
            PacketRow::syscalls_per_packet,
            right("syscalls", 8).digits(4),
        )
        .column(
            "faults_per_packet",
            |row| row.per_packet(row.usage().faults),
            right("faults", 7).digits(4),
        )
        .column("copies_per_packet", PacketRow::copies_per_packet, right("copies", 7).digits(3))
        .column("cpu_ns_per_packet", PacketRow::cpu_ns_per_packet, right("cpu ns", 8))
        .column(
            "kernel_thread_cpu_ns_per_packet",
            |row| row.per_packet(row.usage().kernel_thread_cpu_ns),
            right("kthread ns", 10),
        )
        .column("wakeups_per_packet", PacketRow::wakeups_per_packet, right("wakeups", 8).digits(5))
        // A run with an unverified packet fails before this.
        .field("verified", |_| true)
        .field("grant_copies", |row| row.usage().copies)
        .field("grant_maps", |row| row.usage().maps)
        .field("grant_unmaps", |row| row.usage().unmaps)
        .field("notifications_per_packet", |row| row.per_packet(row.usage().notifications))
        .field("verify_copies_per_packet", |row| row.per_byte(row.usage().fetched_bytes))
        .column("bare_copy_ns", |row| row.bare_copy_ns, right("bare ns", 8))
        .column("bare_copy_share", PacketRow::bare_copy_share, right("share", 6).digits(2))
        .field("oversubscribed", |row| row.oversubscribed)
        .field("perf_syscalls_per_packet", |row| {
            Value::if_some(row.perf_syscalls.map(|count| row.per_packet(count)))
        })
        .field("memory", PacketRow::memory)
        .written(
            "core_round_trip_ns",
            |row| row.core_round_trip_ns.map_or(Value::Omitted, |times| Value::json(&times)),
            right("cores ns", 9),
            |row| {
                let times = row.core_round_trip_ns;
                times.map_or("-".to_owned(), |[before, after]| format!("{before:.0}-{after:.0}"))
            },
        )
        .order(&ORDER)
        .tail("", PacketRow::notes)
        .legend(LEGEND)
}

const LEGEND: &str = "\
Every packet was verified: none lost, repeated, out of order or damaged.
From `grant ops` to `wakeups`: for each packet, both domains together. `copies`: how often each byte
was copied. `bare ns`: one bare kernel copy of that size (pread for tx, pwrite for rx); `share`: the
part of the time that one such copy for each packet takes. `kthread ns` is part of `cpu ns`; it is 0
because no thread of the kernel works for the data path. `cores ns`: a cache line's round trip between
the two cores, before and after the row; rows compare only where it is alike. All columns: docs/perf/howto.md";

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> PacketRow {
        PacketRow {
            mode: Mode::Copy,
            direction: Direction::Tx,
            size: 1000,
            queues: 1,
            oversubscribed: false,
            staging: TxStaging::Off,
            verify: Verify::Full,
            packets: 2000,
            nanos: 1_000_000,
            backend: Usage {
                copies: 2000,
                copied_bytes: 2_000_000,
                syscalls: 1000,
                cpu_ns: 1_500_000,
                ..Usage::default()
            },
            frontend: Usage { copied_bytes: 2_000_000, cpu_ns: 500_000, ..Usage::default() },
            bare_copy_ns: 300.0,
            perf_syscalls: None,
            core_round_trip_ns: Some([80.0, 400.0]),
            huge_pages: false,
        }
    }

    #[test]
    fn row_figures_are_per_packet_and_second() {
        let row = row();
        assert_eq!((row.pps(), row.gbps()), (2e6, 16.0));
        assert_eq!((row.grant_ops_per_packet(), row.syscalls_per_packet()), (1.0, 0.5));
        assert_eq!((row.copies_per_packet(), row.cpu_ns_per_packet()), (2.0, 1000.0));
        assert!((row.bare_copy_share() - 0.6).abs() < 1e-9, "{}", row.bare_copy_share());
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let line = layout().line(&row());
        assert_eq!(line.len(), layout().heading().len(), "{line}");
        let cells = line.split_whitespace().count();
        // One heading is two words, six more have a unit.
        assert_eq!(cells, 15);
        let huge = PacketRow { huge_pages: true, ..row() };
        assert_eq!(layout().line(&huge), format!("{line}   huge pages"));
    }

    #[test]
    fn json_omits_what_was_not_measured() {
        let json = layout().json(&PacketRow { core_round_trip_ns: None, ..row() }).unwrap();
        assert!(!json.contains("core_round_trip_ns") && !json.contains("perf_syscalls"), "{json}");
        let json = layout().json(&PacketRow { perf_syscalls: Some(1000), ..row() }).unwrap();
        assert!(json.contains("\"perf_syscalls_per_packet\":0.5"), "{json}");
        assert!(json.contains("\"core_round_trip_ns\":[80.0,400.0]"), "{json}");
    }
}
