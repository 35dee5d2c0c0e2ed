//! `ringfence-bench gso`: what leaving super-packets whole is worth.
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
//! The guests are those of `ringfence run`, in every respect; the stream is TCP of their kernels; its
//! ends are this program (`end`). Each run of a row has a switch and guests of its own (`case`). While
//! the stream flows, at the beginning and at the end of the measured time, the receiver is asked how
//! much has arrived, the driver domain for its counters, and the kernel for the processor time of
//! every process below this one (`cpu`).
//!
//! Rows are measured in turns, all of them in each round, so that what else the machine does hits all
//! of them alike; ratios are taken within a round.
//!
//! The driver domain's side of the switch is an interface in this process's network namespace, so it
//! leaves the host's for a fresh one before anything is started.

pub mod args;
pub(super) mod case;
pub(super) mod cpu;
pub mod end;
pub(super) mod report;

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence_sys::namespaces::{self, Fresh};

use args::{GsoArgs, Path, Setup};
use case::Case;
use report::{Measured, Row};

use ringfence::out::Out;

/// Runs every row.
pub(super) fn run(args: &GsoArgs) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let paths = args.paths(root);
    if paths.iter().any(|path| path.needs_root()) {
        ensure!(
            root,
            "the paths guest-driver and driver-guest need root (an interface for the driver domain's \
             side): choose --paths guest-guest,loopback"
        );
        // Nothing of it is seen in the host's network, and nothing of that disturbs it.
        namespaces::unshare(Fresh::MountNetIpcUts)
            .context("a network namespace for the driver domain's side of the switch")?;
    } else if !root && args.paths.is_empty() && !args.json {
        eprintln!("ringfence: without root there is no guest-driver and no driver-guest");
    }
    let rows: Vec<(Path, Setup)> = paths
        .iter()
        .flat_map(|&path| args.setups().into_iter().map(move |setup| (path, setup)))
        .collect();
    measure(args, &rows)
}

fn measure(args: &GsoArgs, rows: &[(Path, Setup)]) -> anyhow::Result<()> {
    let mut out = Out;
    let progress = super::progress(rows.len() * args.rounds as usize);
    if !args.json {
        writeln!(out, "{}", report::heading())?;
    }
    let mut runs: Vec<Measured> = Vec::new();
    for round in 1..=args.rounds {
        for &(path, setup) in rows {
            let name = format!("{} {}", path.name(), setup.name());
            progress.set_message(format!("round {round}: {name}"));
            let case = Case { path, setup, mode: args.mode, number: runs.len() };
            runs.push(case.run(args.seconds).context(name)?);
            progress.inc(1);
            if round == args.rounds {
                let row = Row::new(path, setup, args.mode, &runs);
                let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
                progress.suspend(|| writeln!(out, "{line}"))?;
            }
        }
    }
    progress.finish_and_clear();
    if !args.json {
        writeln!(out, "{}", report::legend())?;
    }
    Ok(())
}
