//! Command line of `ringfence-bench gso`, its paths and its setups.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_access::Mode;
use ringfence_net::features::OffloadKeys;
use serde::{Deserialize, Serialize};

use super::super::params::{parse_mode, parse_seconds};

const NOTES: &str = "\
One TCP stream between the kernels of two guests that `ringfence run` started, or between a guest
and the driver domain's side of the switch, or over the loopback interface of one guest. The setups:

  mtu1500      packets of 1500 bytes, one slot each: no scatter-gather, no segmentation offload
  mtu16436-sg  packets of 16436 bytes, in several slots each
  tso          MTU 1500; the kernel passes on super-packets of up to 64 KiB

All setups leave checksums to the receiver, as the experiment did that this repeats. `ratio` is to
mtu1500 on the same path in the same round. On `loopback`, the interface's own MTU is set, and no
packet passes through Ringfence.

All paths but guest-guest need root: the driver domain's side is an interface in a network namespace
of the benchmark's own (`ringfence run --host-tap`), and only a guest of root's may set up its
loopback interface.

docs/perf/howto.md explains every column.";

/// Benefit of unsegmented super-packets: TCP between guests, three setups
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct GsoArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Access mode of the driver domain for the guests' pages
    #[arg(long, value_name = "MODE", default_value = "copy", value_parser = parse_mode)]
    pub mode: Mode,

    /// Measurements of each row, alternating; medians are reported
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Paths to measure [default: all that are allowed]
    #[arg(long, value_name = "PATH", value_delimiter = ',', value_enum)]
    pub paths: Vec<StreamPath>,

    /// Setups to measure; mtu1500 is always measured
    #[arg(long, value_name = "SETUP", value_delimiter = ',', value_enum)]
    pub setups: Vec<StreamSetup>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

impl GsoArgs {
    /// Returns the paths to measure without duplicates. By default those that need root are omitted without it.
    pub(super) fn paths(&self, root: bool) -> Vec<StreamPath> {
        let all = StreamPath::value_variants().iter().copied();
        match self.paths.as_slice() {
            [] => all.filter(|path| root || !path.needs_root()).collect(),
            some => all.filter(|path| some.contains(path)).collect(),
        }
    }

    /// Returns the setups to measure without duplicates, the baseline first.
    pub(super) fn setups(&self) -> Vec<StreamSetup> {
        let wanted = |setup: &StreamSetup| {
            *setup == StreamSetup::BASELINE || self.setups.is_empty() || self.setups.contains(setup)
        };
        StreamSetup::value_variants().iter().copied().filter(wanted).collect()
    }
}

/// Direction of the stream: from the driver domain's side, to it, or between guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamPath {
    /// From one guest to another
    GuestGuest,
    /// From a guest to the driver domain's side of the switch
    GuestDriver,
    /// From the driver domain's side to a guest
    DriverGuest,
    /// Within one guest, over its loopback interface
    Loopback,
}

impl StreamPath {
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(super) fn needs_root(self) -> bool {
        self != StreamPath::GuestGuest
    }
}

/// Packet size and offloads of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
pub enum StreamSetup {
    /// MTU 1500 without scatter-gather
    #[value(name = "mtu1500")]
    #[serde(rename = "mtu1500")]
    Small,
    /// MTU 16436 with scatter-gather
    #[value(name = "mtu16436-sg")]
    #[serde(rename = "mtu16436-sg")]
    Jumbo,
    /// MTU 1500 with every offload
    #[value(name = "tso")]
    #[serde(rename = "tso")]
    Whole,
}

impl StreamSetup {
    /// Setup that the others are compared with.
    pub(super) const BASELINE: StreamSetup = StreamSetup::Small;

    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns the MTU in bytes.
    pub(super) fn mtu(self) -> u16 {
        match self {
            StreamSetup::Small | StreamSetup::Whole => 1500,
            // The MTU of Linux's loopback interface when the experiment was published.
            StreamSetup::Jumbo => 16_436,
        }
    }

    /// Returns the offloads that both ends accept.
    pub(super) fn offload(self) -> OffloadKeys {
        let checksums =
            OffloadKeys { checksum_ipv4: true, checksum_ipv6: true, ..OffloadKeys::NONE };
        match self {
            StreamSetup::Small => checksums,
            StreamSetup::Jumbo => OffloadKeys { scatter_gather: true, ..checksums },
            StreamSetup::Whole => OffloadKeys::ALL,
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
        args: GsoArgs,
    }

    fn parse(line: &str) -> Result<GsoArgs, clap::Error> {
        let words = ["gso"].into_iter().chain(line.split_whitespace());
        Ok(CommandLine::try_parse_from(words)?.args)
    }

    #[test]
    fn setups_include_baseline_first() {
        assert_eq!(
            parse("").unwrap().setups(),
            [StreamSetup::Small, StreamSetup::Jumbo, StreamSetup::Whole]
        );
        assert_eq!(
            parse("--setups tso").unwrap().setups(),
            [StreamSetup::Small, StreamSetup::Whole]
        );
    }

    #[test]
    fn paths_that_need_root_are_omitted_unless_requested() {
        assert_eq!(parse("").unwrap().paths(true), StreamPath::value_variants());
        assert_eq!(parse("").unwrap().paths(false), [StreamPath::GuestGuest]);
        let asked = parse("--paths driver-guest,guest-guest").unwrap();
        assert_eq!(asked.paths(false), [StreamPath::GuestGuest, StreamPath::DriverGuest]);
    }

    #[test]
    fn command_line_names_equal_json_names() {
        for path in StreamPath::value_variants() {
            assert_eq!(serde_json::to_value(path).unwrap(), path.name());
        }
        for setup in StreamSetup::value_variants() {
            assert_eq!(serde_json::to_value(setup).unwrap(), setup.name());
        }
    }

    #[test]
    fn arguments_out_of_range_are_rejected() {
        for line in ["--paths host-host", "--setups mtu9000", "--rounds 0", "--mode fast"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
