//! The command line.

use clap::{Parser, Subcommand};

use crate::args::BenchCommand;
use crate::conformance::ConformanceArgs;
use crate::control::ControlRingArgs;
use crate::hostile::on_xen::HostileGuestArgs;

/// Measures what Ringfence's data path costs
#[derive(Debug, Parser)]
#[command(name = "ringfence-bench", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// The benchmark.
    #[command(subcommand)]
    pub command: Command,
}

/// A benchmark, or a process of one.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// A benchmark.
    #[command(flatten)]
    Bench(BenchCommand),
    /// Processes of benchmarks and tests
    #[command(hide = true)]
    Internal {
        /// The process.
        #[command(subcommand)]
        role: Role,
    },
}

/// Processes that benchmarks and the scenarios of `cargo xtask vm` start.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// One side of a benchmark
    BenchDomain,
    /// One process of a benchmark with hostile guests
    BenchHostile,
    /// One process of a benchmark of disks
    BenchBlock,
    /// One end of a stream of a benchmark
    BenchGsoEnd {
        /// The end.
        #[command(subcommand)]
        role: crate::gso::end::Role,
    },
    /// One end of a request-response benchmark
    BenchLatencyEnd {
        /// The end.
        #[command(subcommand)]
        role: crate::latency::end::Role,
    },
    /// One end of what a benchmark sends through uplinks
    BenchUplinkEnd {
        /// `client` or `server`.
        role: String,
        /// How TCP meets congestion.
        congestion: String,
        /// A client's order, a server's port.
        what: String,
    },
    /// Breaks every rule of a vif, from inside a Xen guest
    HostileGuest(HostileGuestArgs),
    /// Runs one half of the platform's conformance suite on Xen
    Conformance(ConformanceArgs),
    /// Asks a vif's backend every message of the control ring
    ControlRing(ControlRingArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
