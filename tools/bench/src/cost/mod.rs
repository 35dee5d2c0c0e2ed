//! `ringfence-bench cost`: marginal cost of each component of a packet's path, at a fixed offered load.
//!
//! # Theory of operation
//!
//! ```text
//!  direct    source ─▶ sink                                                   one process
//!  ring      source ─▶ netfront ═ ring ═ netback ─▶ sink                      one process
//!  domain    source ─▶ netfront ═ ring ═│═ netback ─▶ sink                    two
//!  switch    source ─▶ netfront ═ ring ═│═ netback ─▶ switch ─▶ sink          two
//!  guest     source ─▶ netfront ═ ring ═│═ netback ─▶ switch ─▶ netback ═ ring ═│═ netfront ─▶ sink    three
//!  uplink    source ─▶ uplink ─▶ socket of the host                           one process
//! ```
//!
//! The form is that of the tables of seL4's device driver framework: every path carries the same packets in bursts at one
//! rate (`process`), far below what it could carry, and sleeps between the bursts. The parent reads the processor time
//! of all processes of a path before and after a run (`paths`), while they sleep, and converts it to ticks of the
//! time-stamp counter. All processes of a path share one core, so the time of wake-ups and of switches between
//! domains is part of it. Two paths that differ by one component are compared in the same round (`components`).
//! Operations that no pair of paths separates are timed alone (`alone`).

mod alone;
pub mod args;
mod components;
mod paths;
pub(crate) mod process;
mod report;
mod uplink;

use std::time::{Duration, Instant};

use anyhow::Context;
use ringfence_sys::clock::time_stamp;

use self::args::CostArgs;
use self::components::{COMPONENTS, PathName};
use self::paths::{PathCase, cores};
use self::report::{CostRow, layout};
use crate::affinity::bind;
use crate::harness::{Format, Report, Runs, progress};
use crate::perf;

/// Time over which the rate of the time-stamp counter is measured.
const CALIBRATED: Duration = Duration::from_millis(100);

/// Measures all paths and operations and prints their rows.
pub(super) fn run(args: &CostArgs) -> anyhow::Result<()> {
    let ticks = ticks_per_ns()?;
    let uncounted = perf::missing(perf::INSTRUCTIONS);
    let cores = cores()?;
    bind(cores.parent)?;
    let mut names = PathName::ALL.to_vec();
    if let Some(why) = uplink::missing() {
        eprintln!("ringfence: uplink is left out: {why}");
        names.retain(|name| !name.is_uplink());
    }
    let mut cases = Vec::new();
    for &size in &args.sizes {
        let counts = uncounted.is_none();
        let case = |&path| PathCase { args, path, size, core: cores.path, ticks, counts };
        cases.extend(names.iter().map(case));
    }
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(layout(uncounted.as_deref()), Format::of(args.json))?;
    let report = report.beside(&progress);
    let runs = Runs::measure(&cases, args.rounds, &progress, |_, _| Ok(()))?;
    for &size in &args.sizes {
        let of = |path: PathName| {
            let wanted = move |case: &PathCase<'_>| case.path == path && case.size == size;
            runs.of(wanted).copied().collect::<Vec<_>>()
        };
        for &path in &names {
            report.row(&CostRow::path(args, size, path, &of(path)))?;
        }
        for component in &COMPONENTS {
            if [component.with, component.without].iter().all(|path| names.contains(path)) {
                let (with, without) = (of(component.with), of(component.without));
                report.row(&CostRow::component(args, size, component, &with, &without))?;
            }
        }
        bind(cores.path)?;
        for operation in alone::measure(size, args.rounds, ticks)? {
            report.row(&CostRow::alone(args, size, operation))?;
        }
        bind(cores.parent)?;
    }
    report.end()
}

/// Returns kind, name and greatest published cycles of each row that is no path, for packets of a size.
pub(crate) fn figures(
    size: u32,
) -> impl Iterator<Item = (&'static str, &'static str, Option<u32>)> {
    let components = COMPONENTS.iter().map(|component| (component.name, component.published));
    let components = components.map(|(name, published)| ("component", name, published));
    let alone = alone::NAMES.iter().map(move |name| ("alone", *name, alone::published(name, size)));
    components
        .chain(alone)
        .map(|(kind, name, published)| (kind, name, published.map(|[_, most]| most)))
}

/// Measures the ticks of the time-stamp counter in a nanosecond.
fn ticks_per_ns() -> anyhow::Result<f64> {
    let read = || time_stamp().context("this processor has no time-stamp counter to read");
    let (began, first) = (Instant::now(), read()?);
    std::thread::sleep(CALIBRATED);
    let (last, elapsed) = (read()?, began.elapsed());
    Ok(last.saturating_sub(first) as f64 / elapsed.as_nanos() as f64)
}

#[cfg(test)]
mod tests {
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn counter_ticks_at_the_rate_of_a_processor() {
        let ticks = super::ticks_per_ns().unwrap();
        assert!((0.1..100.0).contains(&ticks), "{ticks}");
    }
}
