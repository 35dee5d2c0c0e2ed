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

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence_access::window::Revocation;
use ringfence_sys::namespaces::{self, Fresh};

use args::{GsoArgs, Path, Setup};
use case::{Case, Modes};
pub(crate) use report::published_text;
use report::{Measured, Row};

use ringfence_hostnet::out::Out;

/// Runs every row and prints it.
pub(super) fn run(args: &GsoArgs) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let paths = args.paths(root);
    if paths.iter().any(|path| path.needs_root()) {
        ensure!(
            root,
            "the paths guest-driver and driver-guest need root (an interface for the driver domain's \
             side): choose --paths guest-guest,loopback"
        );
        // A namespace of its own isolates the benchmark and the host's network from each other.
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
            let case = Case {
                path,
                setup,
                modes: Modes::both(args.mode),
                revocation: Revocation::Plain,
                number: runs.len(),
            };
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
