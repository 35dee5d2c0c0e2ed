//! Command line of `ringfence-bench pressure`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::params::parse_seconds;

const NOTES: &str = "\
Two guests' frontends and their driver domain run in a control group of their own, and a TCP stream flows
from one guest to the other, in mode window. Then the group's memory.high is cut to half of what it used at
most, or what --leave says (memory.max stays above that), and later lifted again.

Written down are, over time, what the group uses, what the guests' frontends have resident, and how much of
the group's memory is shared, which is the pages of windows but for a few. It fails (exit status 1) when these
did not shrink by half within two windows of pressure stall information (4 s), when the stream stood still
for longer than 5 s, when something was killed for want of memory, or when the windows did not grow again.

Needs root, control groups of version 2 with the controller memory, and pressure stall information.";

/// Windows that shrink under memory pressure and grow again, in the middle of a transfer
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct PressureArgs {
    /// Length of the phase with pressure, and of the one after it
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Percentage of the maximum use that memory.high leaves
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = clap::value_parser!(u64).range(1..=100))]
    pub leave: u64,

    /// One JSON object a line: each reading, then the outcome
    #[arg(long)]
    pub json: bool,

    /// Write a page with a table and plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
