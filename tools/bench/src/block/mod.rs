//! `ringfence-bench block` and `ringfence-bench seeds persistent`: throughput and cost of disks, by mode
//! and number of guests.
//!
//! ```text
//!  ringfence-bench block (parent: hub, orders, table)
//!    ├── internal bench-block   driver domain: blkback, a thread a ring; a memory disk each, or a file
//!    ├── internal bench-block   guest 1: blkfront, DEPTH requests in flight
//!    └── internal bench-block   guest 2 …
//! ```
//!
//! Each row has new processes. Guests first stamp every block of their disks with its position, then
//! warm up, then work at the same time; each read is verified.

pub mod args;
mod case;
pub(crate) mod domain;
mod latency;
pub(crate) mod orders;
mod peers;
pub(crate) mod process;
mod report;
pub(crate) mod seeds;

use std::io::Write;

use anyhow::ensure;
use ringfence_hostnet::out::Out;

use self::args::{BlockArgs, ImageFormat, Rw};
use self::case::{DiskCase, Settings};
use self::report::DiskRow;
use crate::harness::{Format, Report};

/// Runs every row and prints it.
pub(super) fn run(args: &BlockArgs) -> anyhow::Result<()> {
    let is_raw = args.format == ImageFormat::Raw;
    ensure!(
        is_raw || !args.vs.is_empty(),
        "--format qcow2 needs --vs: the other rows use the file as it is"
    );
    let report = Report::begin(report::layout(), Format::of(args.json))?;
    let settings = Settings::of(args);
    let rws: &[Rw] = if is_raw { &args.rw } else { &[] };
    for &rw in rws {
        for &block in &args.block {
            for &guests in &args.guests {
                for &mode in &args.modes {
                    let Settings { depth, queues, .. } = settings;
                    let case = DiskCase { mode, guests, block, rw, depth, queues };
                    report.row(&case.median(&settings)?)?;
                }
            }
        }
    }
    let print = |row: &DiskRow| report.row(row);
    let compared = if args.vs.is_empty() { String::new() } else { peers::run(args, print)? };
    let is_table = report.is_table();
    report.end()?;
    if is_table {
        write!(Out, "{compared}")?;
    }
    Ok(())
}
