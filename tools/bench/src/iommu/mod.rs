//! `ringfence-bench seeds iommu`: cost of granting the worker of kernel vhost-net only pages in flight.
//!
//! The source describes the scheme for IOMMUs and did not build it. vhost's translation table is one.

pub mod args;
mod rig;

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence::out::Out;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::vhost;
use serde::Serialize;

use self::args::{Direction, IommuArgs, PROTECTIONS};
use self::rig::{Rig, Spent};
use crate::harness::median;

/// A row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    direction: Direction,
    size: u16,
    protection: &'static str,
    rounds: usize,
    gbps: f64,
    packets: u64,
    cost_ns_per_kb: f64,
    changes_per_packet: f64,
    /// Cost ratio to `coarse` in the same round.
    cost_ratio: f64,
}

impl Row {
    fn line(&self) -> String {
        let direction = match self.direction {
            Direction::ToGuest => "to guest",
            Direction::FromGuest => "from guest",
        };
        format!(
            "{direction:<10} {:>6} {:<18} {:>8.2} {:>10.1} {:>10.4} {:>7.3}",
            self.size,
            self.protection,
            self.gbps,
            self.cost_ns_per_kb,
            self.changes_per_packet,
            self.cost_ratio
        )
    }
}

fn heading() -> String {
    format!(
        "{:<10} {:>6} {:<18} {:>8} {:>10} {:>10} {:>7}",
        "direction", "size", "protection", "Gbit/s", "ns/KB", "changes", "ratio"
    )
}

/// Runs every row and prints it.
pub(super) fn run(args: &IommuArgs) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench seeds iommu needs root, for a network of its own"
    );
    drop(vhost::open()?);
    namespaces::unshare(Fresh::MountNetIpcUts).context("a network of its own")?;
    let mut out = Out;
    if !args.json {
        writeln!(out, "{}", heading())?;
    }
    for direction in [Direction::ToGuest, Direction::FromGuest] {
        for &size in &args.size {
            for row in measure(args, direction, size)? {
                let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
                writeln!(out, "{line}")?;
            }
        }
    }
    Ok(())
}

fn measure(args: &IommuArgs, direction: Direction, size: u16) -> anyhow::Result<Vec<Row>> {
    let mut runs: Vec<Vec<Spent>> = vec![Vec::new(); PROTECTIONS.len()];
    for _ in 0..args.rounds {
        for ((protection, name), runs) in PROTECTIONS.into_iter().zip(&mut runs) {
            let spent = Rig::new(protection, size)?.measure(direction, args.seconds);
            runs.push(spent.with_context(|| format!("{name}, {direction:?}, {size}"))?);
        }
    }
    let coarse: Vec<f64> = runs.get(1).into_iter().flatten().map(cost).collect();
    let rows = PROTECTIONS.into_iter().zip(runs).map(|((_, protection), runs)| Row {
        experiment: "iommu",
        direction,
        size,
        protection,
        rounds: runs.len(),
        gbps: median(runs.iter().map(|run| run.bytes as f64 * 8e-9 / run.took.as_secs_f64())),
        packets: runs.iter().map(|run| run.packets).sum(),
        cost_ns_per_kb: median(runs.iter().map(cost)),
        changes_per_packet: median(
            runs.iter().map(|run| run.changes as f64 / run.packets.max(1) as f64),
        ),
        // Ratios of consecutive runs: interference changes more slowly than that.
        cost_ratio: median(runs.iter().zip(&coarse).map(|(run, coarse)| cost(run) / coarse)),
    });
    Ok(rows.collect())
}

/// Returns the nanoseconds for each kilobyte.
fn cost(run: &Spent) -> f64 {
    run.cpu_ns as f64 * 1000.0 / run.bytes.max(1) as f64
}
