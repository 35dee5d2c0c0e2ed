//! Packet rows of the hostile benchmark: effect of a rule-breaking neighbour on a victim's packets.

use std::time::Duration;

use anyhow::{bail, ensure};
use ringfence_testkit::hostile::behaviour::Behaviour;

use super::args::HostileArgs;
use super::burden::{Burden, burden_columns};
use super::orders::{Arrivals, HostileAnswer, RowCommand};
use super::process::Process;
use super::scene::{Cores, Scene, SceneSpec, WARM_UP};
use crate::harness::{
    Attempt, Case, Format, Layout, Report, Runs, Summary, Value, left, progress, right,
};

/// Runs the packet rows and prints them.
pub(super) fn run(args: &HostileArgs, rows: &[Behaviour], cores: Cores) -> anyhow::Result<()> {
    let cases: Vec<_> =
        rows.iter().map(|&behaviour| PacketCase { args, cores, behaviour }).collect();
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(layout(), Format::of(args.json))?.beside(&progress);
    let runs = Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(&runs.summary(case, |other| other.behaviour == Behaviour::Honest))
    })?;
    let damaged: u64 = runs.all().map(|run| run.victim_damaged).sum();
    ensure!(damaged == 0, "{damaged} packets of the victim's were damaged or came twice");
    report.end()
}

/// Result of one run. Rates are packets a second.
#[derive(Clone, Debug)]
struct PacketRun {
    victim_pps: f64,
    victim_drops: u64,
    victim_damaged: u64,
    neighbour_pps: f64,
    /// Cores that the victim used.
    victim_cpu: f64,
    burden: Burden,
}

/// Returns the columns of a row: a neighbour's runs, each with the honest run of the same round.
fn layout<'a>() -> Layout<Summary<PacketCase<'a>>> {
    let layout = Layout::new()
        .column(
            "behaviour",
            |row: &Summary<PacketCase<'_>>| Value::json(&row.case.behaviour),
            left("neighbour", 17),
        )
        .field("mode", |row| row.case.args.mode.name())
        .field("size", |row| row.case.args.size)
        .field("seconds", |row| row.case.args.seconds.as_secs_f64())
        .field("rounds", |row| row.runs.len())
        .column(
            "victim_pps",
            |row| row.median(|run| run.victim_pps),
            right("kpps", 9).unit(1e3).digits(1),
        )
        .column("ratio", |row| row.ratio(|run| run.victim_pps), right("ratio", 6).digits(2))
        .column("victim_drops", |row| row.sum(|run| run.victim_drops), right("lost", 6))
        .field("victim_damaged", |row| row.sum(|run| run.victim_damaged))
        .column(
            "neighbour_pps",
            |row| row.median(|run| run.neighbour_pps),
            right("its kpps", 9).unit(1e3).digits(1),
        )
        .column("victim_cpu", |row| row.median(|run| run.victim_cpu), right("cpu", 7).digits(2));
    burden_columns(layout, |run| &run.burden).legend(LEGEND)
}

const LEGEND: &str = "\
`kpps`: packets of the victim's that arrived and were verified, thousands a second; `ratio`: to what
it gets beside an honest neighbour. No packet of the victim's was damaged; `lost` ones were dropped.
`cpu`, `its cpu`, `driver`: cores that the victim, the neighbour and the driver domain used. `rss KiB`,
`fds`: what the driver domain's memory and descriptors grew by. All columns: docs/perf/howto.md";

/// Packet row: one neighbour beside the victim.
#[derive(Clone)]
struct PacketCase<'a> {
    args: &'a HostileArgs,
    cores: Cores,
    behaviour: Behaviour,
}

impl Case for PacketCase<'_> {
    type Measured = PacketRun;

    fn name(&self) -> String {
        self.behaviour.name()
    }

    fn failure(&self) -> String {
        format!("neighbour {}", self.name())
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<PacketRun> {
        let scene = Scene::start(&SceneSpec {
            size: self.args.size,
            mode: self.args.mode,
            cores: self.cores,
            behaviour: self.behaviour,
            asks: false,
            number: attempt.number,
        })?;
        if self.args.verbose {
            attempt.progress.suspend(|| {
                eprintln!("{}: {}", self.behaviour.name(), scene.processes());
            });
        }
        scene.measure(self.args.seconds)
    }
}

impl Scene {
    fn measure(&self, length: Duration) -> anyhow::Result<PacketRun> {
        std::thread::sleep(WARM_UP);
        let neighbour = || self.neighbour.as_ref().map(Process::footprint).transpose();
        let before = (self.driver.footprint()?, self.victim.footprint()?, neighbour()?);
        let from = self.arrived()?;
        std::thread::sleep(length);
        let to = self.arrived()?;
        let after = (self.driver.footprint()?, self.victim.footprint()?, neighbour()?);
        self.victim.check()?;
        self.neighbour.as_ref().map_or(Ok(()), Process::check)?;
        let rules = self.charges()?;
        let seconds = Duration::from_nanos(to.at.saturating_sub(from.at).max(1)).as_secs_f64();
        let a_second = |count: u64| count as f64 / seconds;
        let cores = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64() / seconds;
        let neighbour_cpu = before.2.zip(after.2).map_or(0.0, |(b, a)| cores(b.cpu, a.cpu));
        Ok(PacketRun {
            victim_pps: a_second(to.verified - from.verified),
            victim_drops: to.missing - from.missing,
            victim_damaged: to.damaged,
            neighbour_pps: a_second(to.others - from.others),
            victim_cpu: cores(before.1.cpu, after.1.cpu),
            burden: Burden {
                neighbour_cpu,
                driver_cpu: cores(before.0.cpu, after.0.cpu),
                driver_rss_kib_growth: after.0.rss_kib - before.0.rss_kib,
                driver_fds_growth: after.0.fds - before.0.fds,
                rules,
            },
        })
    }

    fn arrived(&self) -> anyhow::Result<Arrivals> {
        match self.driver.ask(RowCommand::Arrived)? {
            HostileAnswer::Arrived(arrivals) => Ok(arrivals),
            other => bail!("the driver domain said {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: HostileArgs,
    }

    fn run(victim_pps: f64) -> PacketRun {
        PacketRun {
            victim_pps,
            victim_drops: 1,
            victim_damaged: 0,
            neighbour_pps: 0.0,
            victim_cpu: 0.5,
            burden: Burden {
                neighbour_cpu: 0.5,
                driver_cpu: 1.0,
                driver_rss_kib_growth: 4,
                driver_fds_growth: 0,
                rules: BTreeMap::from([("rule".to_owned(), 2)]),
            },
        }
    }

    fn row<'a>(args: &'a HostileArgs, runs: &[f64], honest: &[f64]) -> Summary<PacketCase<'a>> {
        let cores = Cores { driver: None, victim: None, neighbour: None };
        let case = PacketCase { args, cores, behaviour: Behaviour::EventStorm };
        let [runs, baseline] = [runs, honest].map(|all| all.iter().map(|pps| run(*pps)).collect());
        Summary { case, runs, baseline }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let args = CommandLine::parse_from(["hostile", "--seconds", "1"]).args;
        let row = row(&args, &[90.0, 800.0, 9.9], &[100.0, 1000.0, 10.0]);
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        assert_eq!((&json["victim_pps"], &json["ratio"]), (&90.0.into(), &0.9.into()));
        assert_eq!((&json["victim_drops"], &json["rules"]["rule"]), (&3.into(), &6.into()));
        assert_eq!((&json["rounds"], &json["seconds"]), (&3.into(), &1.0.into()));
        assert_eq!((&json["behaviour"], &json["mode"]), (&"event-storm".into(), &"copy".into()));
        assert_eq!(args.seconds, Duration::from_secs(1));
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let args = CommandLine::parse_from(["hostile"]).args;
        let line = layout().line(&row(&args, &[1e5], &[1e5]));
        let (before, _) = line.split_once("  rule 2").unwrap();
        let heading = layout().heading();
        let (expected, _) = heading.split_once("  what").unwrap();
        assert_eq!(before.len(), expected.len(), "{line}");
    }
}
