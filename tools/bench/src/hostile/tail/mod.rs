//! `ringfence-bench tail`: latency of an honest guest alone, beside an honest neighbour, and beside each hostile one.
//!
//! ```text
//!  victim ──▶ netfront ── ring ── netback ──▶ switch ──▶ verifying port
//!     ◀─────────────────────────────────────────────────── answer          (driver domain)
//! ```
//!
//! The scene is that of `ringfence-bench hostile`. The victim has one packet in flight and sleeps until its answer
//! comes (`asking`). A neighbour that has the victim's core yields to it: the kernel's scheduler shares cores, and the
//! driver domain alone is measured. Quantiles are compared with those of the guest alone in the same round.

pub mod args;
pub(super) mod asking;

use anyhow::{bail, ensure};
use ringfence_testkit::hostile::behaviour::Behaviour;

use self::args::TailArgs;
use super::orders::{HostileAnswer, RoundTrips, RowCommand};
use super::process::Process;
use super::scene::{Cores, Scene, SceneSpec, WARM_UP};
use crate::harness::{
    Attempt, Case, Format, Layout, Report, Runs, Summary, Value, left, progress, right,
};

/// Maximum ratio of p99.9 beside a hostile neighbour to p99.9 alone.
const GOAL: f64 = 1.5;

/// Runs every row and prints it.
pub(crate) fn run(args: &TailArgs) -> anyhow::Result<()> {
    let cores = Cores::find()?;
    let rows = args.rows();
    let cases: Vec<_> = rows.iter().map(|&behaviour| TailCase { args, cores, behaviour }).collect();
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(layout(), Format::of(args.json))?.beside(&progress);
    Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(&runs.summary(case, |other| other.behaviour == Behaviour::Absent))
    })?;
    report.end()
}

/// Latency of one run in microseconds.
#[derive(Clone, Debug)]
struct TailRun {
    requests: u64,
    lost: u64,
    /// p50, p99 and p99.9.
    us: [f64; 3],
    max_us: f64,
}

impl TailRun {
    fn of(trips: &RoundTrips) -> anyhow::Result<TailRun> {
        ensure!(trips.answered > 0, "no packet of the victim's was answered");
        Ok(TailRun {
            requests: trips.answered,
            lost: trips.lost,
            us: trips.quantiles.map(|nanos| nanos as f64 / 1e3),
            max_us: trips.longest as f64 / 1e3,
        })
    }
}

/// Neighbour beside a guest that asks.
#[derive(Clone)]
struct TailCase<'a> {
    args: &'a TailArgs,
    cores: Cores,
    behaviour: Behaviour,
}

impl Case for TailCase<'_> {
    type Measured = TailRun;

    fn name(&self) -> String {
        self.behaviour.name()
    }

    fn failure(&self) -> String {
        format!("neighbour {}", self.name())
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<TailRun> {
        let scene = Scene::start(&SceneSpec {
            size: self.args.size,
            mode: self.args.mode,
            cores: self.cores,
            behaviour: self.behaviour,
            asks: true,
            number: attempt.number,
        })?;
        let asked = |length| match scene.victim.ask_for(RowCommand::Ask(length), length)? {
            HostileAnswer::Asked(trips) => Ok(trips),
            other => bail!("the victim said {other:?}"),
        };
        asked(WARM_UP)?;
        let run = TailRun::of(&asked(self.args.seconds)?)?;
        scene.neighbour.as_ref().map_or(Ok(()), Process::check)?;
        // A victim that is charged with its neighbour's violations is a failure.
        scene.charges()?;
        Ok(run)
    }
}

fn layout<'a>() -> Layout<Summary<TailCase<'a>>> {
    let ratio = |row: &Summary<TailCase<'a>>, at: usize| row.ratio(|run| run.us[at]);
    Layout::new()
        .column(
            "behaviour",
            |row: &Summary<TailCase<'_>>| Value::json(&row.case.behaviour),
            left("neighbour", 17),
        )
        .field("mode", |row| row.case.args.mode.name())
        .field("size", |row| row.case.args.size)
        .field("seconds", |row| row.case.args.seconds.as_secs_f64())
        .field("rounds", |row| row.runs.len())
        .column("requests", |row| row.sum(|run| run.requests), right("requests", 9))
        .column("lost", |row| row.sum(|run| run.lost), right("lost", 5))
        .column("p50_us", |row| row.median(|run| run.us[0]), right("p50", 8).digits(1))
        .column("p99_us", |row| row.median(|run| run.us[1]), right("p99", 8).digits(1))
        .column("p999_us", |row| row.median(|run| run.us[2]), right("p99.9", 8).digits(1))
        .column("max_us", |row| row.median(|run| run.max_us), right("max", 9).digits(1))
        .column("p50_ratio", move |row| ratio(row, 0), right("by p50", 7).digits(2))
        .column("p99_ratio", move |row| ratio(row, 1), right("by p99", 7).digits(2))
        .column("p999_ratio", move |row| ratio(row, 2), right("by p99.9", 8).digits(2))
        .column("within_goal", move |row| ratio(row, 2) <= GOAL, left("goal", 4))
        .legend(format!(
            "Microseconds from a packet of the victim's to its answer, medians of the rounds. `by`: the same quantile as a\n\
             multiple of that of the guest alone (absent), in the same round. `goal`: p99.9 is at most {GOAL} times that alone."
        ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: TailArgs,
    }

    fn run(us: f64) -> TailRun {
        TailRun { requests: 10, lost: 1, us: [us / 4.0, us / 2.0, us], max_us: us }
    }

    fn row<'a>(args: &'a TailArgs, runs: &[f64], alone: &[f64]) -> Summary<TailCase<'a>> {
        let cores = Cores { driver: None, victim: None, neighbour: None };
        let case = TailCase { args, cores, behaviour: Behaviour::EventStorm };
        let [runs, baseline] = [runs, alone].map(|all| all.iter().map(|us| run(*us)).collect());
        Summary { case, runs, baseline }
    }

    #[test]
    fn quantiles_are_compared_with_those_alone_in_the_same_round() {
        let args = CommandLine::parse_from(["tail"]).args;
        let row = row(&args, &[150.0, 30.0, 8.0], &[100.0, 10.0, 8.0]);
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        for (field, value) in [
            ("behaviour", "event-storm".into()),
            ("p999_us", serde_json::Value::from(30.0)),
            ("p50_us", 7.5.into()),
            ("p999_ratio", 1.5.into()),
            ("within_goal", true.into()),
            ("requests", 30.into()),
            ("lost", 3.into()),
        ] {
            assert_eq!(json[field], value, "{field}: {json}");
        }
        assert_eq!(layout().line(&row).len(), layout().heading().len(), "{}", layout().line(&row));
    }

    #[test]
    fn guest_without_an_answer_is_an_error() {
        let quantiles = [10_000, 50_000, 90_500];
        let trips = RoundTrips { answered: 1000, lost: 3, quantiles, longest: 91_000 };
        let run = TailRun::of(&trips).unwrap();
        assert_eq!((run.us, run.max_us), ([10.0, 50.0, 90.5], 91.0));
        assert!(TailRun::of(&RoundTrips::default()).is_err());
    }
}
