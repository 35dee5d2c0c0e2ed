//! Report of the gso benchmark: rows as text and JSON.

use ringfence_driver::switchboard::{DriverStats, WindowLevels};

use super::args::{StreamPath, StreamSetup};
use super::case::StreamCase;
use super::cpu::Split;
use crate::harness::{Layout, Summary, Value, left, right};

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
        // Absent if the platform has copied nothing.
        let by_platform =
            |stats: &DriverStats| stats.path.get("grant_copy_bytes").copied().unwrap_or(0);
        let grant_copies = by_platform(after).saturating_sub(by_platform(before));
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

/// Returns the published ratio of a throughput to the one with an MTU of 1500 bytes and one slot a packet.
fn published(path: StreamPath, setup: StreamSetup) -> Option<f64> {
    // Mbit/s in "TCP/Generic Segmentation Offload and Its Application in Xen".
    let (small, jumbo, whole) = match path {
        StreamPath::GuestDriver => (1228.08, Some(3097.49), 3208.41),
        StreamPath::GuestGuest => (323.91, None, 1678.52),
        StreamPath::DriverGuest | StreamPath::Loopback => return None,
    };
    let larger: f64 = match setup {
        StreamSetup::Small => return None,
        StreamSetup::Jumbo => jumbo?,
        StreamSetup::Whole => whole,
    };
    Some(larger / small)
}

/// Returns the published ratio for a row that was measured on Xen. The row's setup is a backend and the setup of this
/// benchmark.
pub(crate) fn published_text(experiment: &str, setup: &str) -> Option<String> {
    let path = match experiment {
        "guest-dom0" => StreamPath::GuestDriver,
        "guest-guest" => StreamPath::GuestGuest,
        _ => return None,
    };
    let known = [StreamSetup::Jumbo, StreamSetup::Whole];
    let known = known.into_iter().find(|known| setup.ends_with(&known.name()))?;
    Some(format!("throughput {:.2}", published(path, known)?))
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamRun {
    /// Bytes of the stream that the receiver counted.
    pub(crate) bytes: u64,
    pub(crate) nanos: u64,
    pub(crate) cpu_ns: u64,
    /// Part of the CPU time that frontends and driver domain used.
    pub(crate) split: Split,
    pub(crate) moved: Moved,
    /// Counters of the whole run, read after the stream has stopped.
    pub(crate) total: Moved,
    /// Uses of grants by guests in mode window. Without such guests there are none.
    pub(crate) reuse: WindowLevels,
}

impl StreamRun {
    pub(crate) fn gbps(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.nanos as f64
    }

    /// Returns the CPU time of all processes in nanoseconds for each received kilobyte.
    pub(crate) fn cost(&self) -> f64 {
        self.per_kb(self.cpu_ns)
    }

    /// Converts a time to nanoseconds for each received kilobyte.
    pub(crate) fn per_kb(&self, nanos: u64) -> f64 {
        nanos as f64 * 1e3 / self.bytes.max(1) as f64
    }
}

/// Returns the columns of a row: the runs of a path and setup, with those of the baseline. Rates are medians, counters
/// are sums.
pub(super) fn layout() -> Layout<Summary<StreamCase>> {
    Layout::new()
        .column("path", |row: &Summary<StreamCase>| row.case.path.name(), left("path", 12))
        .column("setup", |row| row.case.setup.name(), left("setup", 11))
        .field("mode", |row| row.case.modes.receiver.name())
        .field("mtu", |row| row.case.setup.mtu())
        .field("rounds", |row| row.runs.len())
        .field("seconds", |row| row.runs.iter().map(|run| run.nanos as f64 / 1e9).sum::<f64>())
        .column("gbps", |row| row.median(StreamRun::gbps), right("Gbit/s", 7).digits(2))
        .column("ratio", |row| row.ratio(StreamRun::gbps), right("ratio", 6).digits(2))
        .field("published_ratio", |row| Value::if_some(published(row.case.path, row.case.setup)))
        .column("frames", |row| row.sum(|run| run.moved.frames), right("frames", 9))
        .column("segments_made", |row| row.sum(|run| run.moved.segments_made), right("segments", 9))
        .column(
            "checksums_computed",
            |row| row.sum(|run| run.moved.checksums_computed),
            right("checksums", 9),
        )
        .column("frames_whole", |row| row.sum(|run| run.moved.frames_whole), right("whole", 9))
        .column(
            "frames_coalesced",
            |row| row.sum(|run| run.moved.frames_coalesced),
            right("joined", 8),
        )
        .column("frames_dropped", |row| row.sum(|run| run.moved.dropped), right("dropped", 7))
        .column("copies_per_packet", copies, right("copies", 7).digits(2))
        .column("cpu_ns_per_kb", |row| row.median(StreamRun::cost), right("cpu ns/kB", 9).digits(1))
        .legend(LEGEND)
}

/// Returns the number of times that the driver domain copied each byte, in whole runs: while a stream flows, the counters of
/// several threads belong to different moments.
fn copies(row: &Summary<StreamCase>) -> f64 {
    let bytes = row.sum(|run| run.total.bytes).max(1);
    row.sum(|run| run.total.copied_bytes) as f64 / bytes as f64
}

const LEGEND: &str = "\
`ratio`: to mtu1500 on the same path, in the same round. `frames`: through the switch, both ways.
`segments`, `checksums`: made by the driver domain; `whole`: super-packets that it passed on as they
came; `joined`: frames that became part of a larger one there. `copies`: how often the driver domain
copied each byte. `cpu`: of all processes, guests included. All columns: docs/perf/howto.md";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ringfence_access::Mode;
    use ringfence_access::window::Revocation;

    use super::super::case::Modes;
    use super::*;

    fn run(bytes: u64) -> StreamRun {
        let moved = Moved { frames: 10, bytes: 1000, copied_bytes: 2000, ..Moved::default() };
        let (nanos, cpu_ns, split) = (1_000_000_000, 2_000_000, Split::default());
        let total = Moved { bytes: 4000, copied_bytes: 8000, ..Moved::default() };
        StreamRun { bytes, nanos, cpu_ns, split, moved, total, reuse: WindowLevels::default() }
    }

    fn row(setup: StreamSetup, runs: &[u64], baseline: &[u64]) -> Summary<StreamCase> {
        let case = StreamCase {
            path: StreamPath::Loopback,
            setup,
            modes: Modes::both(Mode::Copy),
            revocation: Revocation::Plain,
            length: Duration::ZERO,
        };
        let of = |bytes: &[u64]| bytes.iter().map(|bytes| run(*bytes)).collect();
        Summary { case, runs: of(runs), baseline: of(baseline) }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let row = row(StreamSetup::Whole, &[5000, 14_000, 16_000], &[1000, 2000, 4000]);
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        let near = |field: &str, expected: f64| {
            let is = json[field].as_f64().unwrap();
            assert!((is / expected - 1.0).abs() < 1e-9, "{field}: {is} is not {expected}");
        };
        near("rounds", 3.0);
        near("frames", 30.0);
        near("copies_per_packet", 2.0);
        near("ratio", 5.0);
        near("gbps", 14_000.0 * 8.0 / 1e9);
        near("cpu_ns_per_kb", 2e6 / 14.0);
        assert_eq!((&json["path"], &json["mode"]), (&"loopback".into(), &"copy".into()));
    }

    #[test]
    fn ratio_of_the_baseline_to_itself_is_one() {
        let json = layout().json(&row(StreamSetup::Small, &[5, 6], &[5, 6])).unwrap();
        assert!(json.contains("\"ratio\":1.0"), "{json}");
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
        let line = layout().line(&row(StreamSetup::Jumbo, &[], &[]));
        assert_eq!(line.len(), layout().heading().len());
        assert_eq!(line.split_whitespace().count(), 12);
    }
}
