//! Command line of `ringfence-bench pressure`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::params::parse_seconds;

const NOTES: &str = "\
The frontends of two guests and their driver domain run in a control group of their own. A TCP
stream flows from one guest to the other, in mode window. Then memory.high of the group is set to
half of the memory that it used at most, or to --leave (memory.max stays above that), and later
lifted again.

The report shows, over time, the memory of the group, the resident memory of the frontends, and the
shared memory of the group, which consists of the windows' pages except for a few. The exit status
is 1 if the windows do not shrink by half within two windows of pressure stall information (4 s), if
the stream stands still for more than 5 s, if a process is killed for lack of memory, or if the
windows do not grow again.

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
