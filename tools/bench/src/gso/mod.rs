//! `ringfence-bench gso`: benefit of forwarding super-packets unsegmented.
//!
//! # Theory of operation
//!
//! ```text
//!  guest-guest    run ── end send          run ── end receive
//!                  kernel, TAP, netfront ── driver domain ── netfront, TAP, kernel
//!  guest-driver   run --host-tap ── end send      end receive, beside the switch
//!  driver-guest   run --host-tap ── end receive   end send, beside the switch
//!  loopback       run ── both ends over lo
//! ```
//!
//! The guests are those of `ringfence run`; the stream is TCP of their kernels; its ends are this
//! program (`end`). Each run of a row has a switch and guests of its own (`case`). At the beginning and
//! at the end of the measured time the benchmark reads the receiver's progress, the driver domain's
//! counters, and the CPU time of all descendant processes (`cpu`).
//!
//! Every round measures all rows, so that interference affects all of them alike; ratios are taken
//! within a round.
//!
//! The driver domain's side of the switch is an interface in this process's network namespace. The
//! process therefore enters a new namespace before it starts anything.

pub mod args;
pub(super) mod case;
pub(super) mod cpu;
pub mod end;
pub(super) mod report;

use anyhow::{Context, ensure};
use ringfence_access::window::Revocation;
use ringfence_sys::namespaces::{self, Fresh};

use args::{GsoArgs, StreamSetup};
use case::{Modes, StreamCase};

use crate::harness::{Format, Report, Runs, progress};

/// Runs every row and prints it.
pub(super) fn run(args: &GsoArgs) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let paths = args.paths(root);
    if paths.iter().any(|path| path.needs_root()) {
        ensure!(
            root,
            "all paths but guest-guest need root (an interface for the driver domain's side, and the \
             guest's loopback interface): choose --paths guest-guest"
        );
        // A namespace of its own isolates the benchmark and the host's network from each other.
        namespaces::unshare(Fresh::MountNetIpcUts)
            .context("a network namespace for the driver domain's side of the switch")?;
    } else if !root && args.paths.is_empty() && !args.json {
        eprintln!("ringfence: without root there is no path but guest-guest");
    }
    let case = |path, setup| StreamCase {
        path,
        setup,
        modes: Modes::both(args.mode),
        revocation: Revocation::Plain,
        length: args.seconds,
    };
    let cases: Vec<StreamCase> = paths
        .iter()
        .flat_map(|&path| args.setups().into_iter().map(move |setup| case(path, setup)))
        .collect();
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(report::layout(), Format::of(args.json))?.beside(&progress);
    Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(
            &runs.summary(case, |other| {
                (other.path, other.setup) == (case.path, StreamSetup::BASELINE)
            }),
        )
    })?;
    report.end()
}
