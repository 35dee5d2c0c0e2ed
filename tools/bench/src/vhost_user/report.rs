//! Columns that the reports of all kinds of devices have.

use super::args::Way;
use super::measure::{DeviceCase, DeviceRun, Program, Workload};
use crate::harness::{Layout, Summary, Value, left, right};

/// Runs of a case, and those of Ringfence with all memory.
pub(super) type Row<W> = Summary<DeviceCase<W>>;

/// Returns the median of a figure; `None` for a case that was skipped.
pub(super) fn figure<W: Workload>(row: &Row<W>, figure: impl Fn(&DeviceRun) -> f64) -> Option<f64> {
    row.runs.first()?.as_ref().ok()?;
    Some(row.median(|run| run.as_ref().map_or(0.0, &figure)))
}

/// Returns the median of a figure that not each machine or program counts.
pub(super) fn counted_figure<W: Workload>(
    row: &Row<W>,
    count: impl Fn(&DeviceRun) -> Option<f64>,
) -> Option<f64> {
    count(row.runs.first()?.as_ref().ok()?)?;
    figure(row, |run| count(run).unwrap_or(0.0))
}

/// Returns the rate in terms of that of Ringfence with all memory; `None` if one of both is missing.
fn ratio<W: Workload>(row: &Row<W>) -> Option<f64> {
    row.runs.first()?.as_ref().ok()?;
    row.baseline.first()?.as_ref().ok()?;
    Some(row.ratio(|run| run.as_ref().map_or(0.0, DeviceRun::rate)))
}

fn to_trust<W: Workload>(row: &Row<W>) -> Option<f64> {
    let is_other_way = row.case.program == Program::Ringfence && row.case.way != Way::Trust;
    ratio(row).filter(|_| is_other_way)
}

fn ours_to_this<W: Workload>(row: &Row<W>) -> Option<f64> {
    let ours = ratio(row).filter(|_| row.case.program != Program::Ringfence);
    ours.map(|ratio| 1.0 / ratio.max(f64::MIN_POSITIVE))
}

/// Returns the difference of the highest and the lowest rate in terms of the median.
fn spread<W: Workload>(row: &Row<W>) -> Option<f64> {
    let median = figure(row, DeviceRun::rate)?.max(f64::MIN_POSITIVE);
    let rates = || row.runs.iter().filter_map(|run| run.as_ref().ok()).map(DeviceRun::rate);
    Some((rates().fold(0.0, f64::max) - rates().fold(f64::INFINITY, f64::min)) / median)
}

fn skipped<W: Workload>(row: &Row<W>) -> Option<String> {
    row.runs.first()?.as_ref().err().map(ToString::to_string)
}

/// Names of the columns of costs, each of one request or packet.
pub(super) struct CostNames {
    pub(super) front_ns: &'static str,
    pub(super) backend_ns: &'static str,
    pub(super) syscalls: &'static str,
    pub(super) allocations: &'static str,
    pub(super) kicks: &'static str,
    pub(super) calls: &'static str,
}

/// Returns the columns that name a case.
pub(super) fn names<W: Workload>() -> Layout<Row<W>> {
    Layout::new()
        .column("program", |row: &Row<W>| row.case.program_name(), left("program", 25))
        .column("way", |row| row.case.way.name(), left("way", 7))
}

/// Adds the columns behind the rate: its spread, costs, and ratios.
pub(super) fn with_costs<W: Workload>(layout: Layout<Row<W>>, names: &CostNames) -> Layout<Row<W>> {
    let each =
        |count: fn(&DeviceRun) -> u64| move |row: &Row<W>| figure(row, |run| run.each(count(run)));
    let counted =
        |count: fn(&DeviceRun) -> Option<f64>| move |row: &Row<W>| counted_figure(row, count);
    layout
        .column("spread", spread, right("spread", 6).digits(2))
        .column(names.front_ns, each(|run| run.worked.front_ns), right("front ns", 9))
        .column(names.backend_ns, each(|run| run.served_ns), right("back ns", 9))
        .column(names.syscalls, counted(|run| run.syscalls), right("sysc", 6).digits(2))
        .column(names.allocations, counted(|run| run.allocations), right("alloc", 6).digits(2))
        .column(names.kicks, each(|run| run.worked.kicks), right("kicks", 6).digits(2))
        .column(names.calls, each(|run| run.worked.calls), right("calls", 6).digits(2))
        .column("to_trust", to_trust, right("to trust", 9).digits(2))
        .column("ours_to_this", ours_to_this, right("ours/this", 10).digits(2))
        .field("skipped", |row| Value::if_some(skipped(row)))
        .tail("", |row| skipped(row).map_or_else(String::new, |why| format!("  SKIPPED: {why}")))
        .legend(LEGEND)
}

const LEGEND: &str = "\
`front ns`, `back ns`: CPU time for each request or packet of the front-end, and of the backend and the shield.
`sysc`, `alloc`: system calls and heap allocations of the backend and the shield. `kicks`, `calls`: writes to an eventfd by the front-end, and
towards it. `spread`: highest minus lowest rate of the rounds, in terms of the median.
`to trust`: the rate in terms of that of way `trust`; `ours/this`: that of Ringfence in terms of this
program's, both with all memory; medians of the ratios of each round.
All columns: docs/perf/howto.md";
