#![forbid(unsafe_code)]
//! `ringfence-bench`: what the data path costs, measured where it runs.
//!
//! # Theory of operation
//!
//! ```text
//!  ringfence-bench net (parent: hub, orders, table)
//!    ├── internal bench-domain   backend:  netback ── sink (tx) or generator (rx)
//!    └── internal bench-domain   frontend: netfront ── generator (tx) or sink (rx)
//! ```
//!
//! For each row of the table the parent starts two processes afresh, each on a core of its own
//! where there are two. They connect as any frontend and backend do: store, handshake, rings, grants,
//! event channels. Then the generator sends packets as fast as the rings take them, and never more
//! than they take; the sink checks each one (`packet`).
//!
//! A row is two *phases*: warm-up, then the measured one. In each, the generator's last packet is
//! marked; the sink's phase ends with it, the generator's when every packet has been answered. So
//! at the end of a phase nothing is under way, and totals can be compared. Counters are read by the
//! domains themselves at both ends of their phase (`usage`).
//!
//! After the second phase the backend measures the bare kernel copy that mode `copy` is made of
//! (`bare`), on the same core.

pub mod args;
mod bare;
mod beside;
pub mod block;
pub mod cli;
pub mod conformance;
pub mod control;
mod domain;
pub mod grant;
pub mod gso;
pub mod hostile;
pub mod idle;
pub mod iommu;
pub mod latency;
mod net;
mod orders;
mod packet;
mod page;
mod peers;
mod perf;
mod pressure;
mod redesigned;
mod report;
mod said;
mod staging;
pub mod uplink;
mod usage;
mod work;

use std::io::IsTerminal;
use std::time::Duration;

use ringfence::causes::causes;

use args::{BenchCommand, Experiment};
use cli::{Cli, Command, Role};
use indicatif::{ProgressBar, ProgressStyle};

/// Exit status of a benchmark that failed: a packet was lost or damaged, or it could not run.
const STATUS_BENCH_FAILED: u8 = 1;

/// Runs the command; returns the exit status.
pub fn main_with(cli: Cli) -> u8 {
    match cli.command {
        Command::Bench(command) => main(&command),
        Command::Internal { role } => match role {
            Role::BenchDomain => domain::main(),
            Role::BenchHostile => hostile::process_main(),
            Role::BenchBlock => block::domain_main(),
            Role::BenchGsoEnd { role } => gso::end::main(&role),
            Role::BenchLatencyEnd { role } => latency::end::main(role),
            Role::BenchUplinkEnd { role, congestion, what } => {
                uplink::end_main(&role, &congestion, &what)
            }
            Role::HostileGuest(args) => hostile::guest_main(&args),
            Role::Conformance(args) => conformance::main(&args),
            Role::ControlRing(args) => control::main(&args),
        },
    }
}

/// Runs a benchmark; returns the exit status.
fn main(command: &BenchCommand) -> u8 {
    let outcome = match command {
        BenchCommand::Net(args) => net::run(args),
        BenchCommand::Hostile(args) => hostile::run(args),
        BenchCommand::Block(args) => block::run(args),
        BenchCommand::Seeds(args) => match &args.experiment {
            Experiment::Persistent(args) => block::run_seeds(args),
            Experiment::Iommu(args) => iommu::run(args),
            Experiment::Staging(args) => staging::run(args),
            Experiment::Redesigned(args) => redesigned::run(args),
            Experiment::Vhost(args) => uplink::links::run(args),
        },
        BenchCommand::Gso(args) => gso::run(args),
        BenchCommand::Idle(args) => idle::run(args),
        BenchCommand::Latency(args) => latency::run(args),
        BenchCommand::Grant(args) => grant::run(args),
        BenchCommand::Pressure(args) => pressure::run(args),
        BenchCommand::Uplink(args) => uplink::run(args),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) if ringfence::out::is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence-bench: {}", causes(&error));
            STATUS_BENCH_FAILED
        }
    }
}

/// Shown where standard error is a terminal.
fn progress(rows: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(rows as u64);
    // The template is a constant: it is right or wrong for everybody.
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// The middle of them; the lower one of two.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}
