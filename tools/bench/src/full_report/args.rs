//! Command line of `ringfence-bench report`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

const NOTES: &str = "\
Sections: the experiments of the five source documents (persistent, staging, gso, redesigned,
vhost), Ringfence beside other programs (dpdk, disks, uplink), the cost of each component (cost) and
latency beside hostile guests (neighbour). A section or program that this machine cannot run is left
out, and the page says why. All of them need root, /dev/vhost-net, fio, and the programs to compare
with.

Every round runs each section's command once, so that other load affects all sections alike. A
chart shows the median of the rounds, and the least and the greatest value. With --save, each round
is in the file as soon as it has ended. A command that takes more than ten minutes is ended.

With --compare, a figure has changed if its medians differ by more than the spread: the greater of
the differences between its greatest and its least value in both runs. Figures of one round have no
spread.

The whole set takes about half an hour. The machine should do nothing else; the page says how busy
it was before and after. docs/perf/howto.md explains the page, docs/lab/columns.md the file.";

/// Run the experiments of the source documents and the comparisons, and write one page
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct ReportArgs {
    /// Page to write
    #[arg(long, value_name = "FILE", default_value = "ringfence-report.html")]
    pub html: PathBuf,

    /// Write the figures to this file as well, for --from and --compare
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,

    /// Draw the page from a file of --save, without a measurement
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "rounds", "only", "save"])]
    pub from: Option<PathBuf>,

    /// Write each chart as a file of its own to this directory: SECTION-CHART.svg
    #[arg(long, value_name = "FOLDER")]
    pub svg: Option<PathBuf>,

    /// Show the changes since the run in this file of --save
    #[arg(long, value_name = "OLD")]
    pub compare: Option<PathBuf>,

    /// Sections to measure; all by default
    #[arg(long, value_name = "SECTION", value_delimiter = ',')]
    pub only: Vec<SectionName>,

    /// Runs of each section [default: 5, with --quick: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,

    /// Fewer cases, each measured for a fraction of a second: a test of the report, not of the machine
    #[arg(long)]
    pub quick: bool,

    /// Print one JSON object a line in place of the table
    #[arg(long)]
    pub json: bool,
}

/// Section of the report.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SectionName {
    /// Disk requests against the number of guests
    Persistent,
    /// Packets copied and with staging grants
    Staging,
    /// Super-packets between guests
    Gso,
    /// Grants issued and revoked by the guest alone
    Redesigned,
    /// Kernel vhost-net beside a TAP
    Vhost,
    /// Packets beside DPDK's memif and vhost-user
    Dpdk,
    /// A file beside other NBD servers
    Disks,
    /// A namespace's network beside pasta, slirp4netns and veth
    Uplink,
    /// Marginal cost of each component of a path
    Cost,
    /// Latency of a guest beside hostile neighbours
    Neighbour,
}

impl ReportArgs {
    /// Returns the number of rounds.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 5 })
    }

    /// Returns `true` if the section is to be measured.
    pub(super) fn wants(&self, name: SectionName) -> bool {
        self.only.is_empty() || self.only.contains(&name)
    }
}
