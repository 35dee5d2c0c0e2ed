//! `ringfence-bench seeds iommu`: cost of granting the worker of kernel vhost-net only pages in flight.
//!
//! The source describes the scheme for IOMMUs and did not build it. vhost's translation table is one.

pub mod args;
mod rig;

use std::time::Duration;

use anyhow::{Context, ensure};
use indicatif::ProgressBar;
use ringfence_link::vhost_net::Protection;
use ringfence_platform::vhost;
use ringfence_sys::namespaces::{self, Fresh};

use self::args::{DatagramDirection, IommuArgs, PROTECTIONS};
use self::rig::{Rig, Spent};
use crate::harness::{Attempt, Case, Format, Layout, Report, Runs, Summary, Value, left, right};

/// One protection, for datagrams of one size in one direction.
#[derive(Clone)]
struct ProtectionCase {
    protection: Protection,
    name: &'static str,
    direction: DatagramDirection,
    size: u16,
    /// Measured time of a run.
    length: Duration,
}

impl Case for ProtectionCase {
    type Measured = Spent;

    fn name(&self) -> String {
        format!("{}, {:?}, {}", self.name, self.direction, self.size)
    }

    fn run(&self, _: &Attempt<'_>) -> anyhow::Result<Spent> {
        Rig::new(self.protection, self.size)?.measure(self.direction, self.length)
    }
}

/// Returns the columns of a row. The ratio is to protection `coarse` in the same round.
fn layout() -> Layout<Summary<ProtectionCase>> {
    Layout::new()
        .field("experiment", |_: &Summary<ProtectionCase>| "iommu")
        .written(
            "direction",
            |row| Value::json(&row.case.direction),
            left("direction", 10),
            |row| match row.case.direction {
                DatagramDirection::ToGuest => "to guest".to_owned(),
                DatagramDirection::FromGuest => "from guest".to_owned(),
            },
        )
        .column("size", |row| row.case.size, right("size", 6))
        .column("protection", |row| row.case.name, left("protection", 18))
        .field("rounds", |row| row.runs.len())
        .column(
            "gbps",
            |row| row.median(|run| run.bytes as f64 * 8e-9 / run.took.as_secs_f64()),
            right("Gbit/s", 8).digits(2),
        )
        .field("packets", |row| row.sum(|run| run.packets))
        .column("cost_ns_per_kb", |row| row.median(cost), right("ns/KB", 10).digits(1))
        .column(
            "changes_per_packet",
            |row| row.median(|run| run.changes as f64 / run.packets.max(1) as f64),
            right("changes", 10).digits(4),
        )
        .column("cost_ratio", |row| row.ratio(cost), right("ratio", 7).digits(3))
}

/// Runs every row and prints it.
pub(super) fn run(args: &IommuArgs) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench seeds iommu needs root, for a network of its own"
    );
    drop(vhost::open()?);
    namespaces::unshare(Fresh::MountNetIpcUts).context("a network of its own")?;
    let report = Report::begin(layout(), Format::of(args.json))?;
    for direction in [DatagramDirection::ToGuest, DatagramDirection::FromGuest] {
        for &size in &args.size {
            let length = args.seconds;
            let case =
                |(protection, name)| ProtectionCase { protection, name, direction, size, length };
            let cases = PROTECTIONS.map(case);
            let runs = Runs::measure(&cases, args.rounds, &ProgressBar::hidden(), |_, _| Ok(()))?;
            let coarse = |case: &ProtectionCase| case.protection == Protection::Coarse;
            cases.iter().try_for_each(|case| report.row(&runs.summary(case, coarse)))?;
        }
    }
    report.end()
}

/// Returns the nanoseconds for each kilobyte.
fn cost(run: &Spent) -> f64 {
    run.cpu_ns as f64 * 1000.0 / run.bytes.max(1) as f64
}
