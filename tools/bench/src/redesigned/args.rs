//! Command line of `ringfence-bench seeds redesigned`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_frontend::options::revocation_parser;

use crate::gso::case::Modes;
use crate::params::{parse_mode, parse_seconds};

const NOTES: &str = "\
One TCP stream between kernels, in packets of up to 64 KiB: from the driver domain's side to a
guest (receive), from a guest to it (transmit), and from guest to guest. The first row of each has
the original mechanism: to transmit, each page is mapped for its packet and unmapped before the
packet is answered (`map`); to receive, the system copies each packet in one call (`copy`); from
guest to guest both (`map+copy`). `window` is the redesigned mechanism. Receive and transmit need
root, as `ringfence-bench gso` does.

Cost is processor time of all processes for each kilobyte that arrived, and the parts of it that
frontends and driver domain took, in user mode and in the kernel. The rest is the guests' own.
Ratios are to the original mechanism, within a round. Medians are reported beside the published
figures.

`reused` is the share of uses of a page without a grant operation, and `issued` the number of other
uses. The frontends of the stream count both while it is measured.

A revocation is measured by request and answer over the interface's control ring, with a peer that
has the page mapped, and by the window's owner alone. The peer is quick, takes 2 ms to react, or is
stopped.";

/// Bulk TCP with grants mapped for each packet, copied, and issued and revoked by the guest alone
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct RedesignedArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measurements of each row, alternating; medians are reported
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Experiments [default: all that are allowed]
    #[arg(long, value_name = "EXPERIMENT", value_delimiter = ',', value_enum)]
    pub experiments: Vec<RedesignedExperiment>,

    /// Access modes for the guests' pages; the original mechanism is always measured
    #[arg(long, value_name = "MODE", value_delimiter = ',', default_value = "map,copy,window",
          value_parser = parse_mode)]
    pub modes: Vec<Mode>,

    /// Time at which the content of a revoked page leaves the driver domain's reach, in mode window
    #[arg(long = "revoke", value_name = "WHEN", default_value = "plain", value_parser = revocation_parser())]
    pub revocation: Revocation,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,

    /// Write a page with tables and plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl RedesignedArgs {
    /// Returns the modes to measure, the original mechanism first.
    pub(super) fn modes(&self, experiment: RedesignedExperiment) -> Vec<Modes> {
        let wanted = Mode::NETWORK.into_iter().filter(|mode| self.modes.contains(mode));
        let original = experiment.original();
        let others = wanted
            .map(Modes::both)
            .filter(|modes| experiment.name_of(*modes) != experiment.name_of(original));
        [original].into_iter().chain(others).collect()
    }

    /// Returns the requested experiments; without `root` only those that need no privilege.
    pub(super) fn experiments(&self, root: bool) -> Vec<RedesignedExperiment> {
        let all = RedesignedExperiment::value_variants().iter().copied();
        let wanted = all.filter(|e| self.experiments.is_empty() || self.experiments.contains(e));
        wanted.filter(|e| root || *e == RedesignedExperiment::GuestGuest).collect()
    }
}

/// Direction of the stream: from the driver domain's side, to it, or between guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum RedesignedExperiment {
    /// From the driver domain's side to a guest
    Receive,
    /// From a guest to the driver domain's side
    Transmit,
    /// From one guest to another
    GuestGuest,
}

impl RedesignedExperiment {
    pub(super) fn name(self) -> &'static str {
        match self {
            RedesignedExperiment::Receive => "receive",
            RedesignedExperiment::Transmit => "transmit",
            RedesignedExperiment::GuestGuest => "guest-guest",
        }
    }

    /// Returns the original mechanism: pages of packets from a guest are mapped, packets to a guest are copied by the
    /// system.
    pub(super) fn original(self) -> Modes {
        Modes { sender: Mode::Map, receiver: Mode::Copy }
    }

    /// Returns the names of the modes that have a part in this experiment.
    pub(super) fn name_of(self, modes: Modes) -> String {
        match self {
            RedesignedExperiment::Receive => modes.receiver.name().to_owned(),
            RedesignedExperiment::Transmit => modes.sender.name().to_owned(),
            RedesignedExperiment::GuestGuest if modes.sender == modes.receiver => {
                modes.sender.name().to_owned()
            }
            RedesignedExperiment::GuestGuest => format!("{}+{}", modes.sender, modes.receiver),
        }
    }
}
