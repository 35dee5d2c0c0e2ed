//! Command line of `ringfence-bench block` and `ringfence-bench seeds persistent`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_access::Mode;
use ringfence_block::storage::file::{CacheMode, Engine};
use serde::{Deserialize, Serialize};

use crate::params::parse_seconds;

const NOTES: &str = "\
Each row is a run of its own: one driver domain with a disk for each guest, and a process for each
guest, which keeps DEPTH requests in flight. Every block carries its position, and every read is
checked. A read with other content fails the benchmark (exit status 1).

`map`, `unmap` and `copy` are grant operations for each request. Persistent grants avoid them.
docs/perf/howto.md explains every column.";

/// Disks through blkfront, rings and blkback, by many guests at once
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct BlockArgs {
    /// Number of guests that work at the same time
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,5,10",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub guests: Vec<u16>,

    /// Access modes for the guests' pages: map, copy, persistent, window
    #[arg(long, value_name = "MODE", value_delimiter = ',', default_value = "map,copy,persistent,window",
          value_parser = parse_mode)]
    pub modes: Vec<Mode>,

    /// Bytes of a request
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "4k",
          value_parser = parse_block)]
    pub block: Vec<u32>,

    /// Requests that each guest keeps in flight
    #[arg(long, value_name = "N", default_value = "32",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub depth: u16,

    /// Kinds of requests
    #[arg(long, value_name = "KIND", value_delimiter = ',', default_value = "randread")]
    pub rw: Vec<Rw>,

    /// Location of the disks' content: memory, or a file (its first 128 MiB are overwritten)
    #[arg(long, value_name = "memory|FILE", default_value = "memory")]
    pub storage: Storage,

    /// Queues, each with a thread in the driver domain, for each guest
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,

    /// Cache mode of a file, as in QEMU: none (O_DIRECT), writeback, writethrough, directsync, unsafe
    #[arg(long, value_name = "MODE", default_value = "none")]
    pub cache: CacheMode,

    /// I/O engine of a file, as in `ringfence run --disk`: io_uring, threads, or auto (io_uring where the kernel
    /// allows it)
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub engine: Engine,

    /// Programs to compare with: each serves the file over NBD, as `ringfence run --disk` does,
    /// and fio runs the same job on all of them (needs fio, and --storage FILE)
    #[arg(long, value_name = "PROGRAM", value_delimiter = ',')]
    pub vs: Vec<NbdPeer>,

    /// Format of the file for --vs. With qcow2 only the rows of --vs are measured, on an image that exists (its first
    /// 128 MiB are overwritten)
    #[arg(long, value_name = "FORMAT", default_value = "raw")]
    pub format: ImageFormat,

    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Runs of each row, reported as the median; those of --vs alternate
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=99))]
    pub repeat: u16,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// A program that serves files over NBD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum NbdPeer {
    /// qemu-nbd with its defaults: threads perform the I/O.
    QemuNbd,
    /// qemu-nbd with io_uring.
    QemuNbdUring,
    /// nbdkit's plugin `file`, which lacks O_DIRECT and uses the page cache regardless of --cache.
    Nbdkit,
    /// qemu-storage-daemon: an export in its main loop, threads for the I/O.
    QemuStorageDaemon,
}

/// Format of the file that is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ImageFormat {
    Raw,
    Qcow2,
}

impl ImageFormat {
    /// Returns the name that Ringfence and QEMU have for it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        }
    }
}

const PERSISTENT_NOTES: &str = "\
The experiment that led to persistent grants: random reads of 4 KiB by more and more guests from
disks in memory. On a machine with 24 processors, with each page mapped and unmapped for its
request, 5 guests reached 650,000 requests a second together, and 10 guests 400,000: unmapping
interrupts every processor to flush its TLB. With two processors there are few to interrupt, so
compare the mappings for each request, too.";

/// IOPS against the number of guests
#[derive(Debug, Args)]
#[command(after_help = PERSISTENT_NOTES)]
pub struct PersistentArgs {
    /// Number of guests that work at the same time
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,3,5,7,10",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub guests: Vec<u16>,

    /// Queues, each with a thread in the driver domain, for each guest; several numbers are several
    /// curves
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: Vec<u16>,

    /// Measured time of each point
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Runs of each point, reported as the median
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u16).range(1..=99))]
    pub repeat: u16,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,

    /// Also write a page with tables and plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// Kind of requests that guests issue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum Rw {
    /// Reads of random blocks.
    RandRead,
    /// Writes of random blocks.
    RandWrite,
    /// Reads of one block after the other.
    SeqRead,
}

impl Rw {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
            Rw::SeqRead => "seqread",
        }
    }
}

/// Location of the disks' content.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Storage {
    /// Disk in memory for each guest.
    Memory,
    /// Part of one file for each guest.
    File(PathBuf),
}

impl FromStr for Storage {
    type Err = std::convert::Infallible;

    fn from_str(word: &str) -> Result<Storage, Self::Err> {
        Ok(match word {
            "memory" => Storage::Memory,
            path => Storage::File(path.into()),
        })
    }
}

impl Storage {
    pub(super) fn name(&self) -> String {
        match self {
            Storage::Memory => "memory".to_owned(),
            Storage::File(path) => path.display().to_string(),
        }
    }
}

fn parse_mode(word: &str) -> Result<Mode, String> {
    Mode::for_disk(word).map_err(|unknown| unknown.to_string())
}

/// Maximum block size: one mebibyte, the maximum of one request.
const BLOCK_MAX: u32 = 1 << 20;

pub(crate) fn parse_block(word: &str) -> Result<u32, String> {
    let (digits, unit) = match word.to_ascii_lowercase() {
        word if word.ends_with('k') => (word[..word.len() - 1].to_owned(), 1 << 10),
        word if word.ends_with('m') => (word[..word.len() - 1].to_owned(), 1 << 20),
        word => (word, 1),
    };
    let number = digits.parse::<u32>().map_err(|error| error.to_string())?;
    match number.checked_mul(unit) {
        Some(bytes) if bytes.is_power_of_two() && (512..=BLOCK_MAX).contains(&bytes) => Ok(bytes),
        _ => Err("a power of two from 512 to 1m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_parse_with_units_and_reject_others() {
        assert_eq!(
            ["512", "4k", "64K", "1m"].map(parse_block),
            [512, 4096, 65536, 1 << 20].map(Ok)
        );
        for word in ["", "k", "3k", "256", "2m", "4g", "-4k", "99999999999"] {
            assert!(parse_block(word).is_err(), "{word}");
        }
    }
}
