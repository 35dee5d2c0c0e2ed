#![forbid(unsafe_code)]
//! `ringfence-bench`: benchmarks of Ringfence's data path in place.
//!
//! # Theory of operation
//!
//! ```text
//!  ringfence-bench net (parent: hub, orders, table)
//!    ├── internal bench-domain   backend:  netback ── sink (tx) or generator (rx)
//!    └── internal bench-domain   frontend: netfront ── generator (tx) or sink (rx)
//! ```
//!
//! For each row of the table the parent starts two new processes, each on a core of its own if there
//! are two. They connect as any frontend and backend do: store, handshake, rings, grants, event
//! channels. The generator then sends packets at the rate at which the rings accept them. The sink
//! verifies each one (`packet`).
//!
//! A row has two *phases*: the warm-up and the measured one. The generator marks the last packet of a
//! phase. The sink's phase ends with that packet, the generator's when every packet is completed. No
//! packet is in flight at the end of a phase, so totals can be compared. The domains read their
//! counters at both ends of their phase (`usage`).
//!
//! Cases, rounds, columns and reports are those of all benchmarks (`harness`).
//!
//! After the second phase the backend measures the bare kernel copy that mode `copy` consists of
//! (`bare`), on the same core.

mod affinity;
pub mod agents;
pub mod args;
mod bare;
mod beside;
pub mod block;
pub mod cli;
mod copy;
mod cores;
pub mod cost;
mod domain;
pub mod full_report;
pub mod grant;
pub mod gso;
mod harness;
pub mod hostile;
mod hub;
pub mod idle;
pub mod iommu;
pub mod latency;
mod messages;
mod net;
mod orders;
mod packet;
pub mod params;
mod peers;
mod perf;
mod pressure;
mod processes;
mod redesigned;
mod report;
mod staging;
mod storage_daemon;
pub mod uplink;
mod usage;
pub mod vhost_user;
mod work;
mod xen;

use ringfence_hostnet::causes::causes;

use args::{BenchCommand, SeedExperiment, SeedsArgs};
use cli::{Cli, Command, InternalRole};
use harness::STATUS_BENCH_FAILED;

/// Runs the command. Returns the exit status.
pub fn main_with(cli: Cli) -> u8 {
    match cli.command {
        Command::Bench(command) => main(&command),
        Command::Internal { role } => match role {
            InternalRole::BenchDomain => domain::main(),
            InternalRole::BenchHostile => hostile::process_main(),
            InternalRole::BenchCost => cost::process::main(),
            InternalRole::BenchBlock => block::domain::main(),
            InternalRole::BenchGsoEnd { role } => gso::end::main(&role),
            InternalRole::BenchLatencyEnd { role } => latency::end::main(role),
            InternalRole::BenchUplinkEnd { role, congestion, what } => {
                uplink::end_main(&role, &congestion, &what)
            }
            InternalRole::HostileGuest(args) => agents::hostile_guest(&args),
            InternalRole::Conformance(args) => agents::conformance(&args),
            InternalRole::ControlRing(args) => agents::control_ring(&args),
            InternalRole::DiskFrontend(args) => agents::disk_frontend(&args),
        },
    }
}

/// Runs a benchmark. Returns the exit status.
fn main(command: &BenchCommand) -> u8 {
    let outcome = match command {
        BenchCommand::Net(args) => net::run(args),
        BenchCommand::Hostile(args) => hostile::run(args),
        BenchCommand::Tail(args) => hostile::tail::run(args),
        BenchCommand::Cost(args) => cost::run(args),
        BenchCommand::Block(args) => block::run(args),
        BenchCommand::Seeds(args) => seeds(args),
        BenchCommand::Gso(args) => gso::run(args),
        BenchCommand::Idle(args) => idle::run(args),
        BenchCommand::Latency(args) => latency::run(args),
        BenchCommand::Grant(args) => grant::run(args),
        BenchCommand::Copy(args) => copy::run(args),
        BenchCommand::Pressure(args) => pressure::run(args),
        BenchCommand::Uplink(args) => uplink::run(args),
        BenchCommand::VhostUser(args) => vhost_user::run(args),
        BenchCommand::Report(args) => full_report::run(args),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) if ringfence_hostnet::out::is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence-bench: {}", causes(&error));
            STATUS_BENCH_FAILED
        }
    }
}

/// Runs an experiment, and prints its rows that were measured on Xen.
fn seeds(args: &SeedsArgs) -> anyhow::Result<()> {
    let on_xen = args.xen.as_deref().map(xen::Measurements::read).transpose()?;
    let experiment = &args.experiment;
    match experiment {
        SeedExperiment::Persistent(args) => block::seeds::run(args),
        SeedExperiment::Iommu(args) => iommu::run(args),
        SeedExperiment::Staging(args) => staging::run(args),
        SeedExperiment::Redesigned(args) => redesigned::run(args),
        SeedExperiment::Vhost(args) => uplink::links::run(args),
        SeedExperiment::Gso(args) => gso::run(args),
    }?;
    on_xen.map_or(Ok(()), |rows| rows.print(experiment.name(), experiment.json()))
}
