//! Command line of the program: benchmarks and internal processes.

use clap::{Parser, Subcommand};
use ringfence_testkit::agents::conformance::ConformanceArgs;
use ringfence_testkit::agents::disk_frontend::DiskFrontendArgs;
use ringfence_testkit::agents::hostile_guest::HostileGuestArgs;

use crate::agents::ControlRingCommand;
use crate::args::BenchCommand;

/// Measures the cost of Ringfence's data path
#[derive(Debug, Parser)]
#[command(name = "ringfence-bench", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// Benchmark or process to run.
    #[command(subcommand)]
    pub command: Command,
}

/// Benchmark, or process of one.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Benchmark to run.
    #[command(flatten)]
    Bench(BenchCommand),
    /// Processes of benchmarks and tests
    #[command(hide = true)]
    Internal {
        #[command(subcommand)]
        role: InternalRole,
    },
}

/// Processes that benchmarks and the scenarios of `cargo xtask vm` start.
#[derive(Debug, Subcommand)]
pub enum InternalRole {
    /// One side of a benchmark
    BenchDomain,
    /// One process of a benchmark with hostile guests
    BenchHostile,
    /// One process of a benchmark of components
    BenchCost,
    /// One process of a benchmark of disks
    BenchBlock,
    /// One end of a stream of a benchmark
    BenchGsoEnd {
        #[command(subcommand)]
        role: crate::gso::end::StreamRole,
    },
    /// One end of a request-response benchmark
    BenchLatencyEnd {
        #[command(subcommand)]
        role: crate::latency::end::LatencyRole,
    },
    /// One end of the connections of an uplink benchmark
    BenchUplinkEnd {
        /// `client`, `server` or `outside`.
        role: String,
        /// TCP congestion control to choose.
        congestion: String,
        /// Case of a client, as JSON, or port of a server.
        what: String,
    },
    /// Runs every behaviour of an adversary on a vif, from inside a Xen guest
    HostileGuest(HostileGuestArgs),
    /// Runs one half of the platform's conformance suite on Xen
    Conformance(ConformanceArgs),
    /// Sends every message of the control ring to a vif's backend
    ControlRing(ControlRingCommand),
    /// Drives a disk of this Xen guest from user space
    DiskFrontend(DiskFrontendArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn notes_of_each_command_fit_100_columns() {
        fn check(command: &clap::Command) {
            let notes = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in notes.lines() {
                assert!(line.chars().count() <= 100, "{}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
