//! Command line of `ringfence-bench seeds staging`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::packet::{SIZE_MAX, SIZE_MIN};
use crate::params::{Direction, parse_seconds};
use crate::peers::ForwardingPeer;

const NOTES: &str = "\
The design of staging grants was published with two tables: bulk transfers in Gbit/s and small UDP
packets in Mpps, before and after, by number of queues. Here `copy` is before and `staging` is
after. Both take turns within one run, and the published ratios are beside the measured ones. The
text below the tables says which condition judges a ratio.

With --vs the same packets also go between two DPDK testpmd on the same two cores (Debian:
dpdk-dev; with huge pages if enough are free: echo 400 > /proc/sys/vm/nr_hugepages).

For figures to keep, the machine should do nothing else.";

/// Range of the number of queues; 8 is the maximum of a vif here.
const QUEUES: std::ops::RangeInclusive<i64> = 1..=8;

/// Packets by size and number of queues
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct StagingArgs {
    /// Queues of the interface
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4",
          value_parser = clap::value_parser!(u32).range(QUEUES))]
    pub queues: Vec<u32>,

    /// Bytes of a packet in the tables, Ethernet header included
    #[arg(long = "size", value_name = "BYTES", value_delimiter = ',', default_value = "64,65000",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=SIZE_MAX))]
    pub sizes: Vec<u32>,

    /// tx: from the frontend to the backend; rx: the other way
    #[arg(
        long = "direction",
        value_name = "DIRECTION",
        value_delimiter = ',',
        default_value = "tx,rx"
    )]
    pub directions: Vec<Direction>,

    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measurements of each row; rates and ratios are medians
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Measure these as well: memif, vhost-user (DPDK's testpmd)
    #[arg(long, value_name = "PEER", value_delimiter = ',')]
    pub vs: Vec<ForwardingPeer>,

    /// Bytes of a packet in comparisons with peers
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "64,1500",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=SIZE_MAX))]
    pub vs_size: Vec<u32>,

    /// Write a page with tables and plots to this file; also measures the rates by size
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Bytes of a packet in the plot of rates, with --html
    #[arg(long, value_name = "BYTES", value_delimiter = ',', requires = "html",
          default_value = "64,128,256,512,1024,1500,4096,16384,65000",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=SIZE_MAX))]
    pub plot_size: Vec<u32>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}
