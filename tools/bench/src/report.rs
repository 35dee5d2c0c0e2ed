//! Report of the packet benchmark: rows as text and JSON.

use ringfence_access::Mode;
use ringfence_net::staging::TxStaging;
use serde::Serialize;

use super::params::{Direction, HUGE_PAGES, ORDINARY_PAGES, Verify};
use super::usage::Usage;

/// Result of one row.
pub(super) struct Measured {
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
    pub(super) bare_copy_ns: f64,
    pub(super) perf_syscalls: Option<u64>,
    /// Round trip of a cache line between the two cores, before and after the row.
    pub(super) core_round_trip_ns: Option<[f64; 2]>,
    /// Set if the frontend lends huge pages.
    pub(super) huge_pages: bool,
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) mode: &'static str,
    pub(super) direction: Direction,
    pub(super) size: u32,
    pub(super) queues: u32,
    /// Pages that stay mapped: `off`, `full`, `header`.
    pub(super) staging: &'static str,
    pub(super) verify: Verify,
    pub(super) packets: u64,
    pub(super) seconds: f64,
    pub(super) pps: f64,
    pub(super) gbps: f64,
    pub(super) grant_ops_per_packet: f64,
    pub(super) syscalls_per_packet: f64,
    pub(super) faults_per_packet: f64,
    pub(super) copies_per_packet: f64,
    pub(super) cpu_ns_per_packet: f64,
    pub(super) kernel_thread_cpu_ns_per_packet: f64,
    pub(super) wakeups_per_packet: f64,
    // Fields below are not printed by every version.
    pub(super) verified: bool,
    pub(super) grant_copies: u64,
    pub(super) grant_maps: u64,
    pub(super) grant_unmaps: u64,
    pub(super) notifications_per_packet: f64,
    pub(super) verify_copies_per_packet: f64,
    pub(super) bare_copy_ns: f64,
    pub(super) bare_copy_share: f64,
    /// Set if there are more polling threads than cores.
    pub(super) oversubscribed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) perf_syscalls_per_packet: Option<f64>,
    /// Kind of the pages that the frontend lends.
    pub(super) memory: &'static str,
    /// Absent if both sides share a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) core_round_trip_ns: Option<[f64; 2]>,
}

impl Row {
    pub(super) fn new(measured: &Measured) -> Row {
        // The figures are sums of both domains.
        let usage = measured.backend.plus(&measured.frontend);
        let packets = measured.packets.max(1) as f64;
        let per_packet = |count: u64| count as f64 / packets;
        let seconds = measured.nanos.max(1) as f64 / 1e9;
        let bytes = packets * f64::from(measured.size);
        Row {
            mode: measured.mode.name(),
            direction: measured.direction,
            size: measured.size,
            queues: measured.queues,
            staging: measured.staging.name(),
            verify: measured.verify,
            packets: measured.packets,
            seconds,
            pps: packets / seconds,
            gbps: bytes * 8.0 / seconds / 1e9,
            grant_ops_per_packet: per_packet(usage.maps + usage.unmaps + usage.copies),
            syscalls_per_packet: per_packet(usage.syscalls),
            faults_per_packet: per_packet(usage.faults),
            copies_per_packet: usage.copied_bytes as f64 / bytes,
            cpu_ns_per_packet: per_packet(usage.cpu_ns),
            kernel_thread_cpu_ns_per_packet: per_packet(usage.kernel_thread_cpu_ns),
            wakeups_per_packet: per_packet(usage.wakeups),
            // A run with an unverified packet fails before this.
            verified: true,
            grant_copies: usage.copies,
            grant_maps: usage.maps,
            grant_unmaps: usage.unmaps,
            notifications_per_packet: per_packet(usage.notifications),
            verify_copies_per_packet: usage.fetched_bytes as f64 / bytes,
            bare_copy_ns: measured.bare_copy_ns,
            oversubscribed: measured.oversubscribed,
            bare_copy_share: measured.bare_copy_ns * packets / measured.nanos.max(1) as f64,
            perf_syscalls_per_packet: measured.perf_syscalls.map(per_packet),
            core_round_trip_ns: measured.core_round_trip_ns,
            memory: if measured.huge_pages { HUGE_PAGES } else { ORDINARY_PAGES },
        }
    }

    /// Formats the row as a line of the table.
    pub(super) fn line(&self) -> String {
        let mut line = format!(
            "{:<5} {:<3} {:>6} {:>9.1} {:>7.2} {:>9.3} {:>8.4} {:>7.3} {:>7.4} {:>8.0} {:>10.0} {:>8.5} {:>8.0} {:>6.2} {:>9}",
            self.mode,
            self.direction.to_string(),
            self.size,
            self.pps / 1e3,
            self.gbps,
            self.grant_ops_per_packet,
            self.syscalls_per_packet,
            self.copies_per_packet,
            self.faults_per_packet,
            self.cpu_ns_per_packet,
            self.kernel_thread_cpu_ns_per_packet,
            self.wakeups_per_packet,
            self.bare_copy_ns,
            self.bare_copy_share,
            self.core_round_trip_ns
                .map_or("-".to_owned(), |[before, after]| format!("{before:.0}-{after:.0}")),
        );
        if self.memory == HUGE_PAGES {
            line.push_str("   huge pages");
        }
        if self.queues > 1 {
            line.push_str(&format!("   {} queues", self.queues));
        }
        if self.oversubscribed {
            line.push_str("   oversubscribed: more polling threads than cores");
        }
        if let Some(perf) = self.perf_syscalls_per_packet {
            let off = 100.0 * (self.syscalls_per_packet - perf) / perf.max(f64::MIN_POSITIVE);
            line.push_str(&format!("   perf counts {perf:.4} system calls ({off:+.2} %)"));
        }
        line
    }
}

/// Returns the heading of the table.
pub(super) fn heading() -> String {
    format!(
        "{:<5} {:<3} {:>6} {:>9} {:>7} {:>9} {:>8} {:>7} {:>7} {:>8} {:>10} {:>8} {:>8} {:>6} {:>9}",
        "mode",
        "dir",
        "size",
        "kpps",
        "Gbit/s",
        "grant ops",
        "syscalls",
        "copies",
        "faults",
        "cpu ns",
        "kthread ns",
        "wakeups",
        "bare ns",
        "share",
        "cores ns"
    )
}

/// Returns the legend below the table.
pub(super) fn legend() -> &'static str {
    "\
Every packet was verified: none lost, repeated, out of order or damaged.
From `grant ops` to `wakeups`: for each packet, both domains together. `copies`: how often each byte
was copied. `bare ns`: one bare kernel copy of that size (pread for tx, pwrite for rx); `share`: the
part of the time that one such copy for each packet takes. `kthread ns` is part of `cpu ns`; it is 0
because no thread of the kernel works for the data path. `cores ns`: a cache line's round trip between
the two cores, before and after the row; rows compare only where it is alike. All columns: docs/perf/howto.md"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
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
        let row = Row::new(&measured());
        assert_eq!((row.pps, row.gbps), (2e6, 16.0));
        assert_eq!((row.grant_ops_per_packet, row.syscalls_per_packet), (1.0, 0.5));
        assert_eq!((row.copies_per_packet, row.cpu_ns_per_packet), (2.0, 1000.0));
        assert!((row.bare_copy_share - 0.6).abs() < 1e-9, "{}", row.bare_copy_share);
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let line = Row::new(&measured()).line();
        assert_eq!(line.len(), heading().len(), "{line}");
        let cells = line.split_whitespace().count();
        // One heading is two words, six more have a unit.
        assert_eq!(cells, 15);
        let huge = Row::new(&Measured { huge_pages: true, ..measured() });
        assert_eq!(huge.line(), format!("{line}   huge pages"));
    }
}
