//! Report of the gso benchmark: rows as text and JSON.

use ringfence_access::Mode;
use ringfence_driver::switchboard::{DriverStats, WindowLevels};
use serde::Serialize;

use super::super::median;
use super::args::{Path, Setup};
use super::cpu::Split;

/// Difference of a driver domain's counters between two readings, summed over all ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) copied_bytes: u64,
    pub(crate) frames_whole: u64,
    pub(crate) frames_coalesced: u64,
    pub(crate) segments_made: u64,
    pub(crate) checksums_computed: u64,
    pub(crate) dropped: u64,
}

impl Moved {
    pub(crate) fn between(before: &DriverStats, after: &DriverStats) -> Moved {
        let ports = |stats: &DriverStats, wanted: &dyn Fn(&str) -> bool| -> u64 {
            let all = stats.ports.values().flatten();
            all.filter(|(name, _)| wanted(name)).map(|(_, count)| count).sum()
        };
        let moved = |wanted: &dyn Fn(&str) -> bool| {
            ports(after, wanted).saturating_sub(ports(before, wanted))
        };
        let counter = |name: &str| moved(&|counted| counted == name);
        let by_platform = |stats: &DriverStats| stats.path.get("grant_copy_bytes").copied();
        let grant_copies = by_platform(after).unwrap_or(0) - by_platform(before).unwrap_or(0);
        Moved {
            frames: counter("rx_frames"),
            bytes: counter("rx_bytes"),
            copied_bytes: grant_copies + counter("copied_bytes"),
            frames_whole: counter("frames_whole"),
            frames_coalesced: counter("frames_coalesced"),
            segments_made: counter("segments_made"),
            checksums_computed: counter("checksums_computed"),
            dropped: moved(&|counted| counted.starts_with("drop_")),
        }
    }
}

/// Returns the uses of grants between two readings, summed over the guests of a stream.
pub(crate) fn reuse_between(before: &[WindowLevels], after: &[WindowLevels]) -> WindowLevels {
    reuse_sum(before.iter().zip(after).map(|(before, after)| WindowLevels {
        reused: after.reused.saturating_sub(before.reused),
        issued: after.issued.saturating_sub(before.issued),
        evicted: after.evicted.saturating_sub(before.evicted),
        ..WindowLevels::default()
    }))
}

/// Returns the sums of uses and evictions.
pub(crate) fn reuse_sum(each: impl Iterator<Item = WindowLevels>) -> WindowLevels {
    each.fold(WindowLevels::default(), |sum, levels| WindowLevels {
        reused: sum.reused + levels.reused,
        issued: sum.issued + levels.issued,
        evicted: sum.evicted + levels.evicted,
        ..sum
    })
}

/// Returns the published ratio for a row that was measured on Xen: that of its throughput to the one with an MTU of
/// 1500 bytes and one slot a packet. The row's setup is a backend and the setup of this benchmark.
pub(crate) fn published_text(experiment: &str, setup: &str) -> Option<String> {
    // Mbit/s in "TCP/Generic Segmentation Offload and Its Application in Xen".
    let (small, jumbo, whole) = match experiment {
        "guest-dom0" => (1228.08, Some(3097.49), 3208.41),
        "guest-guest" => (323.91, None, 1678.52),
        _ => return None,
    };
    let larger: f64 = match setup {
        _ if setup.ends_with(&Setup::Jumbo.name()) => jumbo?,
        _ if setup.ends_with(&Setup::Whole.name()) => whole,
        _ => return None,
    };
    Some(format!("throughput {:.2}", larger / small))
}

/// Result of one run of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) path: Path,
    pub(crate) setup: Setup,
    /// Bytes of the stream that the receiver counted.
    pub(crate) bytes: u64,
    pub(crate) nanos: u64,
    pub(crate) cpu_ns: u64,
    /// Part of the CPU time that frontends and driver domain used.
    pub(crate) split: Split,
    pub(crate) moved: Moved,
    /// Uses of grants by guests in mode window. Without such guests there are none.
    pub(crate) reuse: WindowLevels,
}

impl Measured {
    pub(crate) fn gbps(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.nanos as f64
    }

    /// Converts a time to nanoseconds for each received kilobyte.
    pub(crate) fn per_kb(&self, nanos: u64) -> f64 {
        nanos as f64 * 1e3 / self.bytes.max(1) as f64
    }
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    path: Path,
    setup: Setup,
    mode: &'static str,
    mtu: u16,
    rounds: usize,
    seconds: f64,
    gbps: f64,
    ratio: f64,
    frames: u64,
    segments_made: u64,
    checksums_computed: u64,
    frames_whole: u64,
    frames_coalesced: u64,
    frames_dropped: u64,
    copies_per_packet: f64,
    cpu_ns_per_kb: f64,
}

impl Row {
    /// Builds the row of a path and setup from all runs, which must include the baseline's runs. Rates are
    /// medians, counters are sums.
    pub(super) fn new(path: Path, setup: Setup, mode: Mode, runs: &[Measured]) -> Row {
        let of = |setup| runs.iter().filter(move |run| (run.path, run.setup) == (path, setup));
        let sum = |figure: fn(&Moved) -> u64| of(setup).map(|run| figure(&run.moved)).sum::<u64>();
        let ratios = of(setup)
            .zip(of(Setup::BASELINE))
            .map(|(run, first)| run.gbps() / first.gbps().max(f64::MIN_POSITIVE));
        let per_kb = |run: &Measured| run.per_kb(run.cpu_ns);
        Row {
            path,
            setup,
            mode: mode.name(),
            mtu: setup.mtu(),
            rounds: of(setup).count(),
            seconds: of(setup).map(|run| run.nanos as f64 / 1e9).sum(),
            gbps: median(of(setup).map(Measured::gbps)),
            ratio: median(ratios),
            frames: sum(|m| m.frames),
            segments_made: sum(|m| m.segments_made),
            checksums_computed: sum(|m| m.checksums_computed),
            frames_whole: sum(|m| m.frames_whole),
            frames_coalesced: sum(|m| m.frames_coalesced),
            frames_dropped: sum(|m| m.dropped),
            copies_per_packet: sum(|m| m.copied_bytes) as f64 / sum(|m| m.bytes).max(1) as f64,
            cpu_ns_per_kb: median(of(setup).map(per_kb)),
        }
    }

    /// Formats the row as a line of the table.
    pub(super) fn line(&self) -> String {
        format!(
            "{:<12} {:<11} {:>7.2} {:>6.2} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>7.2} {:>9.1}",
            self.path.name(),
            self.setup.name(),
            self.gbps,
            self.ratio,
            self.frames,
            self.segments_made,
            self.checksums_computed,
            self.frames_whole,
            self.frames_coalesced,
            self.frames_dropped,
            self.copies_per_packet,
            self.cpu_ns_per_kb,
        )
    }
}

/// Returns the heading of the table.
pub(super) fn heading() -> String {
    format!(
        "{:<12} {:<11} {:>7} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>7} {:>9}",
        "path",
        "setup",
        "Gbit/s",
        "ratio",
        "frames",
        "segments",
        "checksums",
        "whole",
        "joined",
        "dropped",
        "copies",
        "cpu ns/kB"
    )
}

/// Returns the legend below the table.
pub(super) fn legend() -> &'static str {
    "\
`ratio`: to mtu1500 on the same path, in the same round. `frames`: through the switch, both ways.
`segments`, `checksums`: made by the driver domain; `whole`: super-packets that it passed on as they
came; `joined`: frames that became part of a larger one there. `copies`: how often the driver domain
copied each byte. `cpu`: of all processes, guests included. All columns: docs/perf/howto.md"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(setup: Setup, bytes: u64) -> Measured {
        let moved = Moved { frames: 10, bytes: 1000, copied_bytes: 2000, ..Moved::default() };
        let path = Path::GuestGuest;
        let (nanos, cpu_ns, split) = (1_000_000_000, 2_000_000, Split::default());
        Measured { path, setup, bytes, nanos, cpu_ns, split, moved, reuse: WindowLevels::default() }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let runs: Vec<Measured> = [(1000, 5000), (2000, 14_000), (4000, 16_000)]
            .into_iter()
            .flat_map(|(a, b)| [measured(Setup::Small, a), measured(Setup::Whole, b)])
            .collect();
        let row = Row::new(Path::GuestGuest, Setup::Whole, Mode::Copy, &runs);
        let near = |is: f64, expected: f64| {
            assert!((is / expected - 1.0).abs() < 1e-9, "{is} is not {expected}");
        };
        assert_eq!((row.rounds, row.frames, row.copies_per_packet), (3, 30, 2.0));
        near(row.ratio, 5.0);
        near(row.gbps, 14_000.0 * 8.0 / 1e9);
        near(row.cpu_ns_per_kb, 2e6 / 14.0);
        let first = Row::new(Path::GuestGuest, Setup::Small, Mode::Copy, &runs);
        assert_eq!(first.ratio, 1.0);
    }

    #[test]
    fn uses_of_grants_are_summed_over_guests() {
        let levels = |reused, issued| WindowLevels { reused, issued, ..WindowLevels::default() };
        let before = [levels(10, 512), levels(20, 512)];
        let after = [levels(1010, 512), levels(2019, 513)];
        let sum = reuse_between(&before, &after);
        assert_eq!((sum.reused, sum.issued), (2999, 1));
        assert_eq!(sum.reused_share(), Some(2999.0 / 3000.0));
        assert_eq!(reuse_between(&[], &[]).reused_share(), None);
    }

    #[test]
    fn counters_are_differences_summed_over_ports() {
        let stats = |n: u64| {
            let port = |k: u64| {
                [("rx_frames", 10), ("drop_port_full", 2), ("segments_made", 3)]
                    .map(|(name, count)| (name.to_owned(), count * n * k))
                    .into()
            };
            DriverStats {
                ports: [("a".to_owned(), port(1)), ("b".to_owned(), port(2))].into(),
                path: [("grant_copy_bytes".to_owned(), 100 * n)].into(),
                ..DriverStats::default()
            }
        };
        let moved = Moved::between(&stats(1), &stats(3));
        let expected =
            Moved { frames: 60, dropped: 12, segments_made: 18, copied_bytes: 200, ..moved };
        assert_eq!(moved, expected);
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let row = Row::new(Path::Loopback, Setup::Jumbo, Mode::Map, &[]);
        assert_eq!(row.line().len(), heading().len());
        assert_eq!(row.line().split_whitespace().count(), 12);
    }
}
