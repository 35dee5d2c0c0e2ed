//! Report of `ringfence-bench pressure`: the readings, the outcome and its verdict, text, JSON and page.

use std::fmt::Write;

use serde::Serialize;

use crate::harness::{Axis, Page, Plot, Series};

/// Time limit for the shrink in seconds: two periods of pressure stall information plus two readings.
const SHRUNK_WITHIN: f64 = 4.5;
/// Maximum time without progress of the stream, in seconds.
const GAP_MAX: f64 = 5.0;

/// Phases of the experiment, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// The stream has not begun to be measured; memory is unlimited.
    Before,
    /// The stream flows and memory is sufficient.
    Calm,
    /// The limit is below the memory in use.
    Pressed,
    /// The limit is lifted again.
    Lifted,
}

/// Reading of all counters at one moment; sizes in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Reading {
    pub(super) seconds: f64,
    pub(super) phase: Phase,
    /// Memory charged to the control group.
    pub(super) current: u64,
    /// Resident memory of the frontends.
    pub(super) rss: u64,
    /// Shared memory of the group: pages of grant windows.
    pub(super) pool: u64,
    /// Bytes the receiver has counted.
    #[serde(rename = "octets")]
    pub(super) bytes: u64,
}

/// Readings and totals of one experiment.
#[derive(Default)]
pub(super) struct PressureReport {
    pub(super) readings: Vec<Reading>,
    pub(super) high: u64,
    /// Stall time before the pressure, in microseconds.
    pub(super) stalled_before: u64,
    pub(super) stalled: u64,
    pub(super) killed: u64,
}

/// Summary of a report.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PressureOutcome {
    experiment: &'static str,
    high: u64,
    pool_before: u64,
    /// Minimum while the limit applies.
    pool_pressed: u64,
    /// Time until shared memory first was half of `pool_before`.
    shrunk_after_seconds: Option<f64>,
    pool_lifted: u64,
    stalled_ms: u64,
    longest_gap_seconds: f64,
    #[serde(rename = "octets_pressed")]
    bytes_pressed: u64,
    killed: u64,
}

impl PressureOutcome {
    /// Returns a sentence for each criterion that the outcome violates.
    pub(super) fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.shrunk_after_seconds.is_none_or(|after| after > SHRUNK_WITHIN) {
            wrong.push(format!(
                "the windows did not shrink by half within two windows of time: {} KiB, then {} KiB \
                 (tasks stood still for {} ms)",
                self.pool_before >> 10,
                self.pool_pressed >> 10,
                self.stalled_ms
            ));
        }
        if self.bytes_pressed == 0 || self.longest_gap_seconds > GAP_MAX {
            wrong.push(format!("the stream stood still for {:.1} s", self.longest_gap_seconds));
        }
        if self.killed > 0 {
            wrong.push(format!("{} processes were killed for want of memory", self.killed));
        }
        if self.pool_lifted < self.pool_pressed * 3 / 2 {
            wrong.push(format!("the windows did not grow again: {} KiB", self.pool_lifted >> 10));
        }
        wrong
    }
}

impl PressureReport {
    fn of(&self, phase: Phase) -> impl Iterator<Item = &Reading> {
        self.readings.iter().filter(move |reading| reading.phase == phase)
    }

    /// Returns the maximum of a counter within a phase.
    pub(super) fn most(&self, phase: Phase, of: fn(&Reading) -> u64) -> u64 {
        self.of(phase).map(of).max().unwrap_or(0)
    }

    /// Summarizes the readings of all phases.
    pub(super) fn outcome(&self) -> PressureOutcome {
        let pool_before = self.most(Phase::Calm, |reading| reading.pool);
        let cut = self.of(Phase::Calm).last().map_or(0.0, |reading| reading.seconds);
        let small = self.of(Phase::Pressed).find(|reading| reading.pool * 2 <= pool_before);
        let pressed: Vec<&Reading> = self.of(Phase::Pressed).collect();
        let bytes = |reading: Option<&&Reading>| reading.map_or(0, |reading| reading.bytes);
        let (mut longest, mut since) = (0.0f64, cut);
        for pair in pressed.windows(2) {
            if pair[1].bytes > pair[0].bytes {
                since = pair[1].seconds;
            }
            longest = longest.max(pair[1].seconds - since);
        }
        PressureOutcome {
            experiment: "pressure",
            high: self.high,
            pool_before,
            pool_pressed: pressed.iter().map(|reading| reading.pool).min().unwrap_or(0),
            shrunk_after_seconds: small.map(|reading| reading.seconds - cut),
            pool_lifted: self.most(Phase::Lifted, |reading| reading.pool),
            stalled_ms: self.stalled / 1000,
            longest_gap_seconds: longest,
            bytes_pressed: bytes(pressed.last()).saturating_sub(bytes(pressed.first())),
            killed: self.killed,
        }
    }

    /// Returns a line for each reading, and one for the outcome.
    pub(super) fn json(&self) -> anyhow::Result<Vec<String>> {
        let readings = self.readings.iter().map(serde_json::to_string);
        let outcome = serde_json::to_string(&self.outcome());
        Ok(readings.chain([outcome]).collect::<Result<_, _>>()?)
    }

    fn rows(&self) -> Vec<[String; 2]> {
        let PressureOutcome {
            high,
            pool_before,
            pool_pressed,
            shrunk_after_seconds,
            pool_lifted,
            stalled_ms,
            longest_gap_seconds,
            bytes_pressed,
            killed,
            ..
        } = self.outcome();
        let kib = |size: u64| format!("{} KiB", size >> 10);
        let after =
            shrunk_after_seconds.map_or_else(|| "never".to_owned(), |s| format!("{s:.1} s"));
        [
            ("memory.high under pressure", kib(high)),
            ("windows before", kib(pool_before)),
            ("windows under pressure", kib(pool_pressed)),
            ("half of what they were after", after),
            ("windows when it was lifted", kib(pool_lifted)),
            ("tasks stood still under pressure", format!("{stalled_ms} ms")),
            ("arrived under pressure", format!("{} MiB", bytes_pressed >> 20)),
            ("longest time without any", format!("{longest_gap_seconds:.1} s")),
            ("killed for want of memory", killed.to_string()),
        ]
        .map(|(name, value)| [name.to_owned(), value])
        .to_vec()
    }

    /// Returns the outcome as text for a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for [name, value] in self.rows() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<34} {value:>12}");
        }
        text
    }

    /// Returns a page with the outcome and plots.
    pub(super) fn page(&self) -> anyhow::Result<Page> {
        let mut page = Page::new("Windows under memory pressure");
        page.text(
            "Two guests' frontends and their driver domain in one control group, and a TCP stream from one guest \
             to the other. Memory is plenty, then cut to less than was used, then plenty again.",
        );
        let rows: Vec<Vec<String>> = self.rows().into_iter().map(Vec::from).collect();
        page.facts("Outcome", &rows);
        let mut plot = |title: &str, unit, series| {
            page.plot(&Plot {
                title: title.to_owned(),
                x: Axis::linear("seconds"),
                y: Axis::linear(unit),
                series,
            })
        };
        plot(
            "Memory",
            "MiB",
            vec![
                self.series("the control group", |reading| reading.current),
                self.series("resident in frontends", |reading| reading.rss),
                self.high_over_time(),
            ],
        )?;
        plot("Pages of windows", "MiB", vec![self.series("shared", |reading| reading.pool)])?;
        plot("Arrived", "MiB", vec![self.series("bytes", |reading| reading.bytes)])?;
        Ok(page)
    }

    fn series(&self, name: &str, of: fn(&Reading) -> u64) -> Series {
        let points = self.readings.iter().map(|reading| (reading.seconds, mebibytes(of(reading))));
        Series::new(name, points.collect())
    }

    fn high_over_time(&self) -> Series {
        let points = self.of(Phase::Pressed).map(|reading| (reading.seconds, mebibytes(self.high)));
        Series::new("memory.high", points.collect())
    }
}

fn mebibytes(bytes: u64) -> f64 {
    // The rounding error is below the resolution of the plot.
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    let bytes = bytes as f64;
    bytes / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a report of four phases of ten seconds with these sizes of the windows in MiB.
    fn report(pools: [u64; 4]) -> PressureReport {
        let phases = [Phase::Before, Phase::Calm, Phase::Pressed, Phase::Lifted];
        let reading = |n: u8| {
            let at = usize::from(n / 10);
            let (phase, pool) = (phases[at], pools[at] << 20);
            let (seconds, bytes) = (f64::from(n), u64::from(n) << 20);
            Reading { seconds, phase, current: 50 << 20, rss: 9 << 20, pool, bytes }
        };
        PressureReport {
            readings: (0..40).map(reading).collect(),
            high: 25 << 20,
            ..PressureReport::default()
        }
    }

    #[test]
    fn shrink_in_time_and_regrowth_pass_every_criterion() {
        let report = report([4, 4, 1, 3]);
        let outcome = report.outcome();
        assert!(outcome.wrong().is_empty(), "{:?}", outcome.wrong());
        assert_eq!((outcome.pool_before, outcome.pool_pressed), (4 << 20, 1 << 20));
        assert_eq!(outcome.shrunk_after_seconds, Some(1.0));
        assert_eq!(outcome.bytes_pressed, 9 << 20);
        let lines = report.json().unwrap();
        assert_eq!(lines.len(), 41);
        assert!(lines[40].contains("\"killed\":0"), "{}", lines[40]);
        assert!(report.text().contains("windows under pressure"), "{}", report.text());
        assert!(report.page().unwrap().finish().contains("<svg"));
    }

    #[test]
    fn each_violated_criterion_is_named() {
        for (pools, why) in [([4, 4, 3, 5], "did not shrink"), ([4, 4, 1, 1], "did not grow")] {
            let wrong = report(pools).outcome().wrong();
            assert!(wrong.len() == 1 && wrong[0].contains(why), "{wrong:?}");
        }
        let killed = PressureReport { killed: 2, ..report([4, 4, 1, 4]) };
        assert!(killed.outcome().wrong()[0].contains("2 processes were killed"));
        let mut still = report([4, 4, 1, 4]);
        still.readings.iter_mut().skip(22).for_each(|reading| reading.bytes = 22 << 20);
        assert!(still.outcome().wrong()[0].contains("stood still for"));
    }
}
