//! Command line of `ringfence-bench cost`.

use std::time::Duration;

use clap::Args;

use crate::packet::SIZE_MIN;
use crate::params::parse_seconds;

const NOTES: &str = "\
Each path carries the same packets, in bursts at a fixed rate. The cost of a path is the processor
time of all its processes, which share one core, in ticks of the time-stamp counter for each packet.
The cost of a component is the difference of two paths that differ by it alone, in the same round.
Rows `alone` time one operation of the data path in a loop.

Instructions are those that perf counts for the same processes. Many virtual machines count none;
the column then has a dash, and a line says why.

The rows of the uplink need user and network namespaces (unshare, ip). They are left out without.";

/// Marginal cost of each component of a packet's path, at a fixed offered load
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct CostArgs {
    /// Bytes of a packet, Ethernet header included
    #[arg(long = "size", value_name = "BYTES", value_delimiter = ',', default_value = "64,1500",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=1514))]
    pub sizes: Vec<u32>,

    /// Offered load, in packets a second
    #[arg(long, value_name = "PACKETS", default_value = "100000",
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub rate: u32,

    /// Packets of a burst
    #[arg(long, value_name = "PACKETS", default_value = "32",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub burst: u16,

    /// Measured time of each path
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measure all paths so many times, and report medians
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}
