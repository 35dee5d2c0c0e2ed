//! Command line of `ringfence-bench vhost-user`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use ringfence_block::storage::file::CacheMode;

use crate::block::args::{Rw, parse_block};
use crate::params::parse_seconds;

/// Shortest and longest frame in bytes.
const FRAME_MIN: u32 = 64;
const FRAME_MAX: u32 = 65_535;

const BLK_NOTES: &str = "\
No virtual machine: the front-end is this process, with vrings in shared memory as QEMU has them.
Each way starts new processes. Every block carries its position, and every read is checked. A read
with other content fails the benchmark (exit status 1). docs/perf/howto.md explains the columns.";

const NET_NOTES: &str = "\
No virtual machine: the front-end is this process, with the vrings of two machines as QEMU has them.
The near machine hands memory over by the way of the row, the far one trusts the backend. Both are
on one switch, or on two ports of testpmd. Each way starts new processes. Every byte is checked; a
packet that is lost or damaged fails the benchmark (exit status 1). docs/perf/howto.md explains
the columns.";

/// Devices of virtual machines: memory that is lent, behind a shield, and trusted, beside other programs
#[derive(Debug, Args)]
pub struct VhostUserArgs {
    /// Kind of the device
    #[command(subcommand)]
    pub device: DeviceArgs,
}

/// Kind of the device, with its options.
#[derive(Debug, Subcommand)]
pub enum DeviceArgs {
    /// Requests to `ringfence vhost-user blk`, and to other programs that serve the same file
    Blk(BlkArgs),
    /// Packets between two `ringfence vhost-user net` on a switch, and through other programs
    Net(NetArgs),
}

/// Options of all kinds of devices
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Ways to hand memory over
    #[arg(long, value_name = "WAY", value_delimiter = ',', default_value = "trust,pool,shield")]
    pub ways: Vec<Way>,

    /// Measured time of each run
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Runs of each row; all rows run once in each round
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Requests to `ringfence vhost-user blk`, and to other programs that serve the same file
#[derive(Debug, Args)]
#[command(after_help = BLK_NOTES)]
pub struct BlkArgs {
    #[command(flatten)]
    pub run: RunArgs,

    /// Bytes of a request
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "4k,128k",
          value_parser = parse_block)]
    pub block: Vec<u32>,

    /// Kinds of requests
    #[arg(long, value_name = "KIND", value_delimiter = ',', default_value = "randread,randwrite")]
    pub rw: Vec<Rw>,

    /// Requests in flight
    #[arg(long, value_name = "N", default_value = "32",
          value_parser = clap::value_parser!(u16).range(1..=128))]
    pub depth: u16,

    /// File to serve (its first 128 MiB are overwritten); without it, a temporary one
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Cache mode of the file, as in QEMU
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    pub cache: CacheMode,

    /// Programs to compare with, which have all memory
    #[arg(long, value_name = "PROGRAM", value_delimiter = ',')]
    pub vs: Vec<DiskPeer>,
}

/// Packets between two `ringfence vhost-user net` on a switch, and through other programs
#[derive(Debug, Args)]
#[command(after_help = NET_NOTES)]
pub struct NetArgs {
    #[command(flatten)]
    pub run: RunArgs,

    /// Bytes of a packet, Ethernet header included; above 1514 a super-packet, up to 64k
    #[arg(long = "size", value_name = "BYTES", value_delimiter = ',', default_value = "64,512,1500,64k",
          value_parser = parse_frame)]
    pub sizes: Vec<u32>,

    /// Directions: the near machine sends (out), or receives (in)
    #[arg(
        long = "direction",
        value_name = "DIRECTION",
        value_delimiter = ',',
        default_value = "out,in"
    )]
    pub directions: Vec<Flow>,

    /// Programs to compare with, which have all memory
    #[arg(long, value_name = "PROGRAM", value_delimiter = ',')]
    pub vs: Vec<CardPeer>,
}

/// Direction of packets, as the near machine sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Flow {
    /// The near machine sends.
    Out,
    /// The near machine receives.
    In,
}

impl Flow {
    pub(super) fn name(self) -> &'static str {
        match self {
            Flow::Out => "out",
            Flow::In => "in",
        }
    }
}

/// Another program that has ports for vhost-user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CardPeer {
    /// DPDK's testpmd, which forwards between two ports and never sleeps.
    Testpmd,
}

/// Parses the length of a frame. `64k` is the longest one, of 65,535 bytes.
fn parse_frame(word: &str) -> Result<u32, String> {
    let bytes = match word.to_ascii_lowercase().strip_suffix('k') {
        Some(digits) => digits.parse::<u32>().ok().and_then(|number| number.checked_mul(1 << 10)),
        None => word.parse().ok(),
    };
    let bytes = bytes.map(|bytes| if bytes == 1 << 16 { FRAME_MAX } else { bytes });
    let is_valid = |bytes: &u32| (FRAME_MIN..=FRAME_MAX).contains(bytes);
    bytes.filter(is_valid).ok_or_else(|| format!("a number from {FRAME_MIN} to 64k"))
}

/// Way to hand memory over to a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Way {
    /// The backend maps all memory.
    Trust,
    /// The backend maps a pool, and the front-end copies into it and out of it.
    Pool,
    /// `ringfence shield` is between, and copies.
    Shield,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Trust => "trust",
            Way::Pool => "pool",
            Way::Shield => "shield",
        }
    }
}

/// Another program that serves disks over vhost-user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DiskPeer {
    /// qemu-storage-daemon with its defaults: threads perform the I/O.
    QemuStorageDaemon,
    /// qemu-storage-daemon with io_uring.
    QemuStorageDaemonUring,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_lengths_parse_with_units_up_to_the_longest_frame() {
        assert_eq!(
            ["64", "1k", "64K", "65535"].map(parse_frame),
            [64, 1024, 65_535, 65_535].map(Ok)
        );
        for word in ["", "k", "63", "65k", "65537", "-1", "4294967295k"] {
            assert!(parse_frame(word).is_err(), "{word}");
        }
    }
}
