//! Command line of `ringfence-bench seeds iommu`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_link::vhost_net::Protection;
use serde::Serialize;

use crate::params::parse_seconds;

const NOTES: &str = "\
Datagrams between a socket of the kernel and the link of `run --link vhost`, in one process, to
the guest and from it. Every datagram is counted and must arrive in order. Protection is the memory
that the kernel's worker can reach:

  none               the link's buffers and its ring of frames, by a table that does not change
  coarse             the same, by a table of translations: one UPDATE for each
  fine-without-reuse the frames in transfer: an UPDATE and an INVALIDATE for each frame
  fine               the same, but blocks stay mapped until they are used again

Cost is processor time of this process and of the worker for each kilobyte of payload. `changes` are
UPDATEs and INVALIDATEs for each packet. Ratios are to `coarse` in the same round. Protections take
turns, and medians of the rounds are reported. Needs root, for a network namespace, and
/dev/vhost-net.";

/// Kernel vhost-net behind its I/O translation table: not protected, coarsely, finely, with grants reused
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct IommuArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measurements of each row, alternating; medians are reported
    #[arg(long, value_name = "N", default_value = "5",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Bytes of each datagram
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "1400,60000",
          value_parser = clap::value_parser!(u16).range(8..=65000))]
    pub size: Vec<u16>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Direction of the datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DatagramDirection {
    ToGuest,
    FromGuest,
}

/// Protections to compare, with their names.
pub(super) const PROTECTIONS: [(Protection, &str); 4] = [
    (Protection::Fixed, "none"),
    (Protection::Coarse, "coarse"),
    (Protection::FineWithoutReuse, "fine-without-reuse"),
    (Protection::Fine, "fine"),
];
