//! Command line of `ringfence-bench tail`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_access::Mode;
use ringfence_testkit::hostile::behaviour::Behaviour;

use crate::packet::SIZE_MIN;
use crate::params::{parse_mode, parse_seconds};

const NOTES: &str = "\
The guest sends one packet through netfront, netback and the switch of a driver domain to a port
that verifies and answers it, and sleeps until the answer comes. Beside it runs no neighbour
(`absent`, the base of all ratios), one that keeps the rules and sends as much as it can (`honest`),
or one that breaks rules as fast as it can. `ringfence-bench hostile --list` explains behaviours.

With two cores the neighbour shares the guest's core, in the scheduling class SCHED_IDLE, so that
the guest never waits for it there. With three or more each domain has a core of its own.";

/// Latency of a guest alone, beside an honest neighbour and beside hostile ones
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct TailArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Rows to measure; the guest alone and the honest neighbour are always measured
    #[arg(
        long,
        value_name = "BEHAVIOUR",
        value_delimiter = ',',
        hide_possible_values = true,
        value_enum
    )]
    pub behaviours: Vec<Behaviour>,

    /// Measure all rows so many times, and report medians
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Bytes of a packet, Ethernet header included
    #[arg(long, value_name = "BYTES", default_value = "64",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=9018))]
    pub size: u32,

    /// Access mode of the driver domain for the guests' packets
    #[arg(long, value_name = "MODE", default_value = "copy", value_parser = parse_mode)]
    pub mode: Mode,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

impl TailArgs {
    /// Returns the rows to run: the guest alone, the honest neighbour, and the others.
    pub(super) fn rows(&self) -> Vec<Behaviour> {
        let first = [Behaviour::Absent, Behaviour::Honest];
        let others = Behaviour::value_variants().iter().copied();
        let is_wanted = |row: &Behaviour| {
            !first.contains(row) && (self.behaviours.is_empty() || self.behaviours.contains(row))
        };
        first.into_iter().chain(others.filter(is_wanted)).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: TailArgs,
    }

    fn rows(line: &str) -> Vec<Behaviour> {
        let words = ["tail"].into_iter().chain(line.split_whitespace());
        CommandLine::parse_from(words).args.rows()
    }

    #[test]
    fn rows_begin_with_the_guest_alone_and_the_honest_neighbour() {
        let all = rows("");
        assert_eq!(all.len(), Behaviour::value_variants().len());
        assert_eq!(all[..2], [Behaviour::Absent, Behaviour::Honest]);
        let some = rows("--behaviours event-storm,honest");
        assert_eq!(some, [Behaviour::Absent, Behaviour::Honest, Behaviour::EventStorm]);
    }
}
