//! `ringfence-bench seeds redesigned`: the experiments of the redesigned grant mechanism.
//!
//! # Theory of operation
//!
//! Streams, guests and readings are those of `bench gso` ([`super::gso`]), with unsegmented
//! super-packets. Every round measures each experiment in each mode; a ratio to the original mechanism
//! is taken within a round, and medians are reported. The frontends of the stream's guests count the
//! reuse of grants. The time to revoke a page is measured between two domains ([`revoke`]).

pub(super) mod args;
mod report;
mod revoke;

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence_hostnet::out::Out;
use ringfence_sys::namespaces::{self, Fresh};

use self::args::{Experiment, RedesignedArgs};
pub(crate) use self::report::published_text;
use self::report::{MeasuredRun, Report};
use super::gso::args::{Path, Setup};
use super::gso::case::{Case, Modes};

/// Runs every experiment and prints the report.
pub(super) fn run(args: &RedesignedArgs) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let experiments = args.experiments(root);
    ensure!(!experiments.is_empty(), "receive and transmit need root; guest-guest does not");
    if root && experiments.iter().any(|experiment| *experiment != Experiment::GuestGuest) {
        // A namespace of its own isolates the benchmark and the host's network from each other.
        namespaces::unshare(Fresh::MountNetIpcUts)
            .context("a network namespace for the driver domain's side of the switch")?;
    }
    let runs = streams(args, &experiments)?;
    let report = Report { runs, revokes: revoke::measure()? };
    let mut out = Out;
    if args.json {
        report.json()?.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    } else {
        write!(out, "{}", report.text())?;
    }
    if let Some(path) = &args.html {
        report.page()?.write(path)?;
    }
    Ok(())
}

fn streams(args: &RedesignedArgs, experiments: &[Experiment]) -> anyhow::Result<Vec<MeasuredRun>> {
    let rows: Vec<(Experiment, Modes)> = experiments
        .iter()
        .flat_map(|&experiment| {
            args.modes(experiment).into_iter().map(move |modes| (experiment, modes))
        })
        .collect();
    let progress = super::progress(rows.len() * args.rounds as usize);
    let mut runs = Vec::new();
    for round in 1..=args.rounds {
        for &(experiment, modes) in &rows {
            let name = format!("{} {}", experiment.name(), experiment.name_of(modes));
            progress.set_message(format!("round {round}: {name}"));
            let case = Case {
                path: path_of(experiment),
                setup: Setup::Whole,
                modes,
                revocation: args.revocation,
                number: runs.len(),
            };
            let measured = case.run(args.seconds).context(name)?;
            runs.push(MeasuredRun { round, experiment, modes, measured });
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(runs)
}

fn path_of(experiment: Experiment) -> Path {
    match experiment {
        Experiment::Receive => Path::DriverGuest,
        Experiment::Transmit => Path::GuestDriver,
        Experiment::GuestGuest => Path::GuestGuest,
    }
}
