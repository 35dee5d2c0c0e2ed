//! Command line of `ringfence-bench vhost-user`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use ringfence_block::storage::file::CacheMode;

use crate::block::args::{Rw, parse_block};
use crate::params::parse_seconds;

const NOTES: &str = "\
No virtual machine: the front-end is this process, with vrings in shared memory as QEMU has them.
Each way starts new processes. Every block carries its position, and every read is checked. A read
with other content fails the benchmark (exit status 1). docs/perf/howto.md explains the columns.";

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
}

/// Requests to `ringfence vhost-user blk`, and to other programs that serve the same file
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct BlkArgs {
    /// Ways to hand memory over
    #[arg(long, value_name = "WAY", value_delimiter = ',', default_value = "trust,pool,shield")]
    pub ways: Vec<Way>,

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
