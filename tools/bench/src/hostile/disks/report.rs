//! Report of the disk rows: text and JSON.

use std::collections::BTreeMap;

use ringfence_access::Mode;
use serde::Serialize;

use super::super::report::{charges, told};
use super::behaviour::DiskBehaviour;
use super::{BLOCK, DEPTH};
use crate::median;

/// Result of one run of one row.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) behaviour: DiskBehaviour,
    pub(super) victim_iops: f64,
    pub(super) victim_p99_us: f64,
    pub(super) neighbour_iops: f64,
    pub(super) neighbour_cpu: f64,
    pub(super) driver_cpu: f64,
    pub(super) driver_rss_kib_growth: i64,
    pub(super) driver_fds_growth: i64,
    pub(super) rules: BTreeMap<String, u64>,
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    behaviour: String,
    mode: &'static str,
    block: u32,
    depth: u16,
    seconds: f64,
    rounds: usize,
    victim_iops: f64,
    ratio: f64,
    victim_p99_us: f64,
    neighbour_iops: f64,
    neighbour_cpu: f64,
    driver_cpu: f64,
    driver_rss_kib_growth: i64,
    driver_fds_growth: i64,
    rules: BTreeMap<String, u64>,
}

impl Row {
    /// Builds the row of a behaviour from its runs, each with the honest run of the same round.
    pub(super) fn new(runs: &[(&Measured, &Measured)], mode: Mode, seconds: f64) -> Row {
        let of = |figure: fn(&Measured) -> f64| median(runs.iter().map(|(run, _)| figure(run)));
        let most = |figure: fn(&Measured) -> i64| {
            runs.iter().map(|(run, _)| figure(run)).max().unwrap_or_default()
        };
        let ratio = |(run, honest): &(&Measured, &Measured)| {
            run.victim_iops / honest.victim_iops.max(f64::MIN_POSITIVE)
        };
        Row {
            behaviour: runs.first().map_or_else(String::new, |(run, _)| run.behaviour.name()),
            mode: mode.name(),
            block: BLOCK,
            depth: DEPTH,
            seconds,
            rounds: runs.len(),
            victim_iops: of(|run| run.victim_iops),
            ratio: median(runs.iter().map(ratio)),
            victim_p99_us: of(|run| run.victim_p99_us),
            neighbour_iops: of(|run| run.neighbour_iops),
            neighbour_cpu: of(|run| run.neighbour_cpu),
            driver_cpu: of(|run| run.driver_cpu),
            driver_rss_kib_growth: most(|run| run.driver_rss_kib_growth),
            driver_fds_growth: most(|run| run.driver_fds_growth),
            rules: charges(runs.iter().map(|(run, _)| &run.rules)),
        }
    }

    /// Formats the row as a line of the table.
    pub(super) fn line(&self) -> String {
        let line = format!(
            "{:<23} {:>8.1} {:>6.2} {:>8.0} {:>9.1} {:>7.2} {:>7.2} {:>8} {:>4}  {}",
            self.behaviour,
            self.victim_iops / 1e3,
            self.ratio,
            self.victim_p99_us,
            self.neighbour_iops / 1e3,
            self.neighbour_cpu,
            self.driver_cpu,
            self.driver_rss_kib_growth,
            self.driver_fds_growth,
            told(&self.rules),
        );
        line.trim_end().to_owned()
    }
}

/// Returns the heading of the table.
pub(super) fn heading() -> String {
    format!(
        "{:<23} {:>8} {:>6} {:>8} {:>9} {:>7} {:>7} {:>8} {:>4}  {}",
        "neighbour",
        "kiops",
        "ratio",
        "p99 us",
        "its kiops",
        "its cpu",
        "driver",
        "rss KiB",
        "fds",
        "what it was charged with",
    )
}

/// Legend below the table.
pub(super) const LEGEND: &str = "\
`kiops`: random reads of 4 KiB of the victim's, each checked, thousands a second; `ratio`: to what it gets
beside an honest neighbour; `p99 us`: how long 99 of 100 of them took at most. Every answer that a hostile
neighbour got was the right one. `its kiops`: requests of the neighbour's that were answered. `rss KiB`,
`fds`: what the driver domain's memory and descriptors grew by. All columns: docs/perf/howto.md";

#[cfg(test)]
mod tests {
    use super::*;

    fn run(behaviour: DiskBehaviour, victim_iops: f64) -> Measured {
        Measured {
            behaviour,
            victim_iops,
            victim_p99_us: 100.0,
            neighbour_iops: 7.0,
            neighbour_cpu: 0.5,
            driver_cpu: 1.0,
            driver_rss_kib_growth: 4,
            driver_fds_growth: 0,
            rules: BTreeMap::from([("rule".to_owned(), 2)]),
        }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let honest = [100.0, 1000.0, 10.0].map(|iops| run(DiskBehaviour::Honest, iops));
        let storm = [90.0, 800.0, 9.9].map(|iops| run(DiskBehaviour::EventStorm, iops));
        let pairs: Vec<_> = storm.iter().zip(&honest).collect();
        let row = Row::new(&pairs, Mode::Copy, 1.0);
        assert_eq!((row.victim_iops, row.ratio), (90.0, 0.9));
        assert_eq!((row.rules["rule"], row.rounds), (6, 3));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(
            (&json["behaviour"], &json["mode"]),
            (&"disk-event-storm".into(), &"copy".into())
        );
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let honest = run(DiskBehaviour::Honest, 1e5);
        let line = Row::new(&[(&honest, &honest)], Mode::Map, 1.0).line();
        let (before, _) = line.split_once("  rule 2").unwrap();
        let heading = heading();
        let (expected, _) = heading.split_once("  what").unwrap();
        assert_eq!(before.len(), expected.len(), "{line}");
    }
}
