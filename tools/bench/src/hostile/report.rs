//! Report of the packet rows: text and JSON.

use std::collections::BTreeMap;

use ringfence_access::Mode;
use serde::Serialize;

use super::super::median;
use super::args::Behaviour;

/// Result of one run of one row.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) behaviour: Behaviour,
    pub(super) victim_pps: f64,
    pub(super) victim_drops: u64,
    pub(super) victim_damaged: u64,
    pub(super) neighbour_pps: f64,
    pub(super) victim_cpu: f64,
    pub(super) neighbour_cpu: f64,
    pub(super) driver_cpu: f64,
    pub(super) driver_rss_kib_growth: i64,
    pub(super) driver_fds_growth: i64,
    pub(super) rules: BTreeMap<String, u64>,
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    behaviour: Behaviour,
    mode: &'static str,
    size: u32,
    seconds: f64,
    rounds: usize,
    victim_pps: f64,
    ratio: f64,
    victim_drops: u64,
    victim_damaged: u64,
    neighbour_pps: f64,
    victim_cpu: f64,
    neighbour_cpu: f64,
    driver_cpu: f64,
    driver_rss_kib_growth: i64,
    driver_fds_growth: i64,
    rules: BTreeMap<String, u64>,
}

/// Sums the charges of all runs of a row by rule.
pub(super) fn charges<'a>(
    runs: impl Iterator<Item = &'a BTreeMap<String, u64>>,
) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (rule, count) in runs.flatten() {
        *all.entry(rule.clone()).or_default() += count;
    }
    all
}

/// Formats the charges for a line of the table, the most frequent first.
pub(super) fn told(charges: &BTreeMap<String, u64>) -> String {
    let mut rules: Vec<_> = charges.iter().collect();
    rules.sort_by_key(|(_, count)| core::cmp::Reverse(**count));
    let rules: Vec<_> = rules.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
    rules.join(", ")
}

impl Row {
    /// Builds the row of a behaviour from its runs, each with the honest run of the same round.
    pub(super) fn new(runs: &[(&Measured, &Measured)], mode: Mode, size: u32, seconds: f64) -> Row {
        let of = |figure: fn(&Measured) -> f64| median(runs.iter().map(|(run, _)| figure(run)));
        let sum = |figure: fn(&Measured) -> u64| runs.iter().map(|(run, _)| figure(run)).sum();
        let most = |figure: fn(&Measured) -> i64| {
            runs.iter().map(|(run, _)| figure(run)).max().unwrap_or_default()
        };
        let ratio = |(run, honest): &(&Measured, &Measured)| {
            run.victim_pps / honest.victim_pps.max(f64::MIN_POSITIVE)
        };
        Row {
            behaviour: runs.first().map_or(Behaviour::Absent, |(run, _)| run.behaviour),
            mode: mode.name(),
            size,
            seconds,
            rounds: runs.len(),
            victim_pps: of(|run| run.victim_pps),
            ratio: median(runs.iter().map(ratio)),
            victim_drops: sum(|run| run.victim_drops),
            victim_damaged: sum(|run| run.victim_damaged),
            neighbour_pps: of(|run| run.neighbour_pps),
            victim_cpu: of(|run| run.victim_cpu),
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
            "{:<17} {:>9.1} {:>6.2} {:>6} {:>9.1} {:>7.2} {:>7.2} {:>7.2} {:>8} {:>4}  {}",
            self.behaviour.name(),
            self.victim_pps / 1e3,
            self.ratio,
            self.victim_drops,
            self.neighbour_pps / 1e3,
            self.victim_cpu,
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
        "{:<17} {:>9} {:>6} {:>6} {:>9} {:>7} {:>7} {:>7} {:>8} {:>4}  {}",
        "neighbour",
        "kpps",
        "ratio",
        "lost",
        "its kpps",
        "cpu",
        "its cpu",
        "driver",
        "rss KiB",
        "fds",
        "what it was charged with",
    )
}

/// Returns the legend below the table.
pub(super) fn legend() -> &'static str {
    "\
`kpps`: packets of the victim's that arrived and were verified, thousands a second; `ratio`: to what
it gets beside an honest neighbour. No packet of the victim's was damaged; `lost` ones were dropped.
`cpu`, `its cpu`, `driver`: cores that the victim, the neighbour and the driver domain used. `rss KiB`,
`fds`: what the driver domain's memory and descriptors grew by. All columns: docs/perf/howto.md"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(behaviour: Behaviour, victim_pps: f64) -> Measured {
        Measured {
            behaviour,
            victim_pps,
            victim_drops: 1,
            victim_damaged: 0,
            neighbour_pps: 0.0,
            victim_cpu: 0.5,
            neighbour_cpu: 0.5,
            driver_cpu: 1.0,
            driver_rss_kib_growth: 4,
            driver_fds_growth: 0,
            rules: BTreeMap::from([("rule".to_owned(), 2)]),
        }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let honest = [100.0, 1000.0, 10.0].map(|pps| run(Behaviour::Honest, pps));
        let storm = [90.0, 800.0, 9.9].map(|pps| run(Behaviour::EventStorm, pps));
        let pairs: Vec<_> = storm.iter().zip(&honest).collect();
        let row = Row::new(&pairs, Mode::Copy, 64, 1.0);
        assert_eq!((row.victim_pps, row.ratio), (90.0, 0.9));
        assert_eq!((row.victim_drops, row.rules["rule"], row.rounds), (3, 6, 3));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!((&json["behaviour"], &json["mode"]), (&"event-storm".into(), &"copy".into()));
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let honest = run(Behaviour::Honest, 1e5);
        let line = Row::new(&[(&honest, &honest)], Mode::Map, 64, 1.0).line();
        let (before, _) = line.split_once("  rule 2").unwrap();
        let heading = heading();
        let (expected, _) = heading.split_once("  what").unwrap();
        assert_eq!(before.len(), expected.len(), "{line}");
    }
}
