//! Command line of `ringfence-bench hostile`, and the neighbour's behaviours.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_access::Mode;

use super::super::packet::SIZE_MIN;
use super::super::params::{parse_mode, parse_seconds};
use ringfence_testkit::hostile::behaviour::{Behaviour, NeighbourBehaviour};
use ringfence_testkit::hostile::disk::behaviour::DiskBehaviour;

const NOTES: &str = "\
A well-behaved guest (the victim) sends numbered, checksummed packets through netfront, netback and
the switch of a driver domain to a port that verifies each one. Beside it runs a neighbour: one that
does the same as the victim (`honest`, the base of all ratios), none (`absent`), or one that breaks
rules as fast as it can and reconnects when its device is closed. Each row has a driver domain and
guests of its own. --list names the behaviours.

The rows disk-... are the same with disks: the victim reads at random positions of its disk, through
blkfront and blkback, and the neighbour attacks its own disk. Every answer that it gets is checked.

Every domain is a process on a core that does not depend on the row: the driver domain on the first,
the victim on the second, the neighbour on the third, or on the victim's if there are two.

Exit status 1: a packet or block of the victim was damaged, a rule violation was counted against the
victim, or a hostile neighbour got a wrong answer to a request.";

/// Effect of a neighbour that breaks rules on a guest that does not
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct HostileArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Rows to measure; the honest neighbour is always measured
    #[arg(long, value_name = "BEHAVIOUR", value_delimiter = ',', value_parser = NeighbourBehaviour::parse)]
    pub behaviours: Vec<NeighbourBehaviour>,

    /// Measure all rows so many times, and report medians
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Bytes of a packet of the victim, Ethernet header included
    #[arg(long, value_name = "BYTES", default_value = "64",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=9018))]
    pub size: u32,

    /// Access mode of the driver domain for the guests' packets
    #[arg(long, value_name = "MODE", default_value = "copy", value_parser = parse_mode)]
    pub mode: Mode,

    /// Access mode of the driver domain for the guests' disk requests
    #[arg(long, value_name = "MODE", default_value = "persistent", value_parser = Mode::for_disk)]
    pub disk_mode: Mode,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,

    /// Name the processes of each row on standard error
    #[arg(short, long)]
    pub verbose: bool,

    /// List the behaviours and what they mean
    #[arg(long)]
    pub list: bool,
}

impl HostileArgs {
    /// Returns the packet rows to run, the honest neighbour first. Empty if only disk rows were requested.
    pub(super) fn rows(&self) -> Vec<Behaviour> {
        let wanted: Vec<_> = match self.behaviours.as_slice() {
            [] => Behaviour::value_variants().to_vec(),
            some => some.iter().filter_map(|which| which.packets()).collect(),
        };
        let all = Behaviour::value_variants().iter().copied();
        let honest = |row| row == Behaviour::Honest && !wanted.is_empty();
        all.filter(|row| honest(*row) || wanted.contains(row)).collect()
    }

    /// Returns the disk rows that were requested.
    pub(super) fn disks(&self) -> Vec<DiskBehaviour> {
        match self.behaviours.as_slice() {
            [] => DiskBehaviour::value_variants().to_vec(),
            some => some.iter().filter_map(|which| which.disks()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct CommandLine {
        #[command(flatten)]
        args: HostileArgs,
    }

    fn parse(line: &str) -> Result<HostileArgs, clap::Error> {
        let words = ["hostile"].into_iter().chain(line.split_whitespace());
        Ok(CommandLine::try_parse_from(words)?.args)
    }

    #[test]
    fn rows_include_honest_and_keep_declaration_order() {
        let rows = parse("").unwrap().rows();
        assert_eq!(rows, Behaviour::value_variants());
        let rows = parse("--behaviours event-storm,absent").unwrap().rows();
        assert_eq!(rows, [Behaviour::Honest, Behaviour::Absent, Behaviour::EventStorm]);
        let both = parse("--behaviours disk-nonsense,event-storm").unwrap();
        assert_eq!(both.rows(), [Behaviour::Honest, Behaviour::EventStorm]);
        assert_eq!(both.disks(), [DiskBehaviour::Nonsense]);
        let disks = parse("--behaviours disk-nonsense").unwrap();
        assert!(disks.rows().is_empty(), "one kind is not measured for the other's sake");
        assert_eq!(parse("").unwrap().disks(), DiskBehaviour::value_variants());
    }

    #[test]
    fn every_behaviour_has_one_name_and_a_meaning() {
        for row in Behaviour::value_variants() {
            assert!(!row.name().is_empty() && !row.meaning().is_empty(), "{row:?}");
            let json = serde_json::to_value(row).unwrap();
            assert_eq!(json, row.name(), "one name everywhere");
        }
    }

    #[test]
    fn arguments_out_of_range_are_rejected() {
        for line in [
            "--size 59",
            "--size 9019",
            "--behaviours rude",
            "--behaviours disk-rude",
            "--disk-mode fast",
            "--rounds 0",
            "--mode fast",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
