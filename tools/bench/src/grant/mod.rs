//! `ringfence-bench grant`: cost of the grant primitives.
//!
//! Granter and grantee are two domains of one process, so that only the operation itself is measured,
//! without scheduling and rings.

pub mod args;
mod cases;
mod iommu;

use std::io::Write;
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use serde::Serialize;

use self::args::GrantArgs;
use self::cases::{Bench, Cost};
use self::iommu::{Engine, OPERATIONS};

/// A row as it is printed. Field names are part of the command's interface.
#[derive(Debug, Serialize)]
struct Row {
    operation: &'static str,
    engine: &'static str,
    cpus: u32,
    /// Pages in one call of a batch operation.
    pages: u32,
    ns: f64,
    syscalls: f64,
}

impl Row {
    fn print(&self, args: &GrantArgs, out: &mut impl Write) -> anyhow::Result<()> {
        let line = if args.json { serde_json::to_string(self)? } else { self.line() };
        Ok(writeln!(out, "{line}")?)
    }

    fn line(&self) -> String {
        format!(
            "{:<26} {:<8} {:>4} {:>6} {:>10.1} {:>9.3}",
            self.operation, self.engine, self.cpus, self.pages, self.ns, self.syscalls
        )
    }
}

fn heading() -> String {
    format!(
        "{:<26} {:<8} {:>4} {:>6} {:>10} {:>9}",
        "operation", "engine", "cpus", "pages", "ns/page", "syscalls"
    )
}

/// Runs every row and prints it.
pub(super) fn run(args: &GrantArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    if !args.json {
        writeln!(out, "{}", heading())?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for &cpus in &args.cpus {
        if cpus as usize > cores {
            eprintln!("ringfence-bench: {cpus} cores are not there; those rows are left out");
            continue;
        }
        let _busy = (cpus > 1).then(Busy::start).transpose()?;
        let mut bench = Bench::new(args)?;
        for case in cases::ALL {
            let Cost { ns, syscalls } = bench.median(case)?;
            let (operation, engine, pages) = (case.operation, case.engine, case.pages);
            let row = Row { operation, engine, cpus, pages, ns, syscalls };
            row.print(args, &mut out)?;
        }
        for mut engine in engines(args)? {
            for (operation, pages) in OPERATIONS {
                let Cost { ns, syscalls } = engine.median((operation, pages), args.rounds)?;
                let row = Row { operation, engine: engine.name(), cpus, pages, ns, syscalls };
                row.print(args, &mut out)?;
            }
        }
    }
    Ok(())
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
        let mut bench = Bench::new(&args).unwrap();
        for case in cases::ALL {
            let cost = bench.median(case).unwrap();
            assert!(cost.ns > 0.0, "{}", case.operation);
            let free = ["issue", "revoke", "look up", "lend", "take back", "look up (kept)"];
            let expected = !free.contains(&case.operation);
            assert_eq!(cost.syscalls > 0.0, expected, "{}: {}", case.operation, cost.syscalls);
        }
    }
}
