//! `ringfence-bench seeds redesigned`: the experiments of the redesigned grant mechanism.
//!
//! # Theory of operation
//!
//! Streams, guests and readings are those of `bench gso` ([`super::gso`]), with unsegmented
//! super-packets. Every round measures each experiment in each mode; a ratio to the original mechanism
//! is taken within a round, and medians are reported. The frontends of the stream's guests count the
//! reuse of grants. The time to revoke a page is measured between two domains ([`revoke`]).

pub(super) mod args;
pub(crate) mod report;
mod revoke;

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence_hostnet::out::Out;
use ringfence_sys::namespaces::{self, Fresh};

use self::args::{RedesignedArgs, RedesignedExperiment};
use self::report::{ExperimentCase, RedesignedReport};
use super::gso::args::{StreamPath, StreamSetup};
use super::gso::case::StreamCase;
use crate::harness::{Runs, Summary, progress};

/// Runs every experiment and prints the report.
pub(super) fn run(args: &RedesignedArgs) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let experiments = args.experiments(root);
    ensure!(!experiments.is_empty(), "receive and transmit need root; guest-guest does not");
    if root && experiments.iter().any(|experiment| *experiment != RedesignedExperiment::GuestGuest)
    {
        // A namespace of its own isolates the benchmark and the host's network from each other.
        namespaces::unshare(Fresh::MountNetIpcUts)
            .context("a network namespace for the driver domain's side of the switch")?;
    }
    let report =
        RedesignedReport { rows: streams(args, &experiments)?, revokes: revoke::measure()? };
    let mut out = Out;
    if args.json {
        report.json()?.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    } else {
        write!(out, "{}", report.text())?;
    }
    if let Some(path) = &args.html {
        report.page().write(path)?;
    }
    Ok(())
}

/// Measures every experiment in each mode.
fn streams(
    args: &RedesignedArgs,
    experiments: &[RedesignedExperiment],
) -> anyhow::Result<Vec<Summary<ExperimentCase>>> {
    let case = |experiment, modes| ExperimentCase {
        experiment,
        stream: StreamCase {
            path: path_of(experiment),
            setup: StreamSetup::Whole,
            modes,
            revocation: args.revocation,
            length: args.seconds,
        },
    };
    let cases: Vec<ExperimentCase> = experiments
        .iter()
        .flat_map(|&experiment| {
            args.modes(experiment).into_iter().map(move |modes| case(experiment, modes))
        })
        .collect();
    let progress = progress(cases.len() * args.rounds as usize);
    let runs = Runs::measure(&cases, args.rounds, &progress, |_, _| Ok(()))?;
    let row = |case| runs.summary(case, |other| other.is_original_of(case));
    Ok(cases.iter().map(row).collect())
}

fn path_of(experiment: RedesignedExperiment) -> StreamPath {
    match experiment {
        RedesignedExperiment::Receive => StreamPath::DriverGuest,
        RedesignedExperiment::Transmit => StreamPath::GuestDriver,
        RedesignedExperiment::GuestGuest => StreamPath::GuestGuest,
    }
}
