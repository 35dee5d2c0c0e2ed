//! `ringfence-bench grant`: cost of the grant primitives.
//!
//! Granter and grantee are two domains of one process, so that only the operation itself is measured,
//! without scheduling and rings.

pub mod args;
pub(crate) mod cases;
mod iommu;

use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use self::args::GrantArgs;
use self::cases::{Bench, Cost};
use self::iommu::{Engine, OPERATIONS};
use crate::harness::{Format, Layout, Report, left, right};

struct OperationCost {
    operation: &'static str,
    engine: &'static str,
    /// Cores that the process keeps busy.
    cpus: u32,
    /// Pages in one call of a batch operation.
    pages: u32,
    cost: Cost,
}

fn layout() -> Layout<OperationCost> {
    Layout::new()
        .column("operation", |row: &OperationCost| row.operation, left("operation", 26))
        .column("engine", |row| row.engine, left("engine", 8))
        .column("cpus", |row| row.cpus, right("cpus", 4))
        .column("pages", |row| row.pages, right("pages", 6))
        .column("ns", |row| row.cost.ns, right("ns/page", 10).digits(1))
        .column("syscalls", |row| row.cost.syscalls, right("syscalls", 9).digits(3))
}

/// Runs every row and prints it.
pub(super) fn run(args: &GrantArgs) -> anyhow::Result<()> {
    let report = Report::begin(layout(), Format::of(args.json))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for &cpus in &args.cpus {
        if cpus as usize > cores {
            eprintln!("ringfence-bench: {cpus} cores are not there; those rows are left out");
            continue;
        }
        let _busy = (cpus > 1).then(Busy::start).transpose()?;
        let mut bench = Bench::new(args.rounds, args.mappings)?;
        for case in cases::ALL {
            let (operation, engine, pages) = (case.operation, case.engine, case.pages);
            let cost = bench.median(case)?;
            report.row(&OperationCost { operation, engine, cpus, pages, cost })?;
        }
        for mut engine in engines(args)? {
            for (operation, pages) in OPERATIONS {
                let cost = engine.median(operation, pages, args.rounds)?;
                let engine = engine.name();
                report.row(&OperationCost { operation, engine, cpus, pages, cost })?;
            }
        }
    }
    report.end()
}

/// Returns the engines of I/O translation tables that this machine has.
fn engines(args: &GrantArgs) -> anyhow::Result<Vec<Engine>> {
    let mut engines = Vec::new();
    match Engine::iotlb() {
        Ok(engine) => engines.push(engine),
        Err(why) => eprintln!("ringfence-bench: no rows of the engine iotlb: {why}"),
    }
    if let Some(device) = &args.vfio {
        engines.push(Engine::vfio(device)?);
    }
    Ok(engines)
}

/// Thread that keeps another core of this process busy, ended on drop.
struct Busy {
    /// Sender whose drop ends the thread.
    goes_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    fn start() -> anyhow::Result<Busy> {
        let (goes_on, ended) = channel::<()>();
        let spin = move || {
            while ended.try_recv() == Err(TryRecvError::Empty) {
                std::hint::spin_loop();
            }
        };
        let thread = std::thread::Builder::new().name("busy".to_owned()).spawn(spin)?;
        Ok(Busy { goes_on: Some(goes_on), thread: Some(thread) })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        drop(self.goes_on.take());
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_operations_report_no_system_call() {
        let args = GrantArgs { cpus: vec![1], rounds: 3, mappings: 2, vfio: None, json: true };
        let mut bench = Bench::new(args.rounds, args.mappings).unwrap();
        for case in cases::ALL {
            let cost = bench.median(case).unwrap();
            assert!(cost.ns > 0.0, "{}", case.operation);
            let free = ["issue", "revoke", "look up", "lend", "take back", "look up (kept)"];
            let expected = !free.contains(&case.operation);
            assert_eq!(cost.syscalls > 0.0, expected, "{}: {}", case.operation, cost.syscalls);
        }
    }
}
