//! Report of the benchmark: rows and their columns.

use super::args::Way;
use super::servers::Program;
use super::{DiskCase, DiskRun};
use crate::harness::{Layout, Summary, left, right};

/// Runs of a case, and those of Ringfence with all memory.
type Row<'a> = Summary<DiskCase<'a>>;

fn mib_per_s(row: &Row<'_>) -> f64 {
    row.median(DiskRun::iops) * f64::from(row.case.work.block) / f64::from(1 << 20)
}

/// Returns the median of a count for each request.
fn each(row: &Row<'_>, count: impl Fn(&DiskRun) -> u64) -> f64 {
    row.median(|run| run.per_request(count(run)))
}

/// Returns the rate in terms of that of Ringfence with all memory.
fn to_trust(row: &Row<'_>) -> Option<f64> {
    let is_other_way = row.case.program == Program::Ringfence && row.case.way != Way::Trust;
    (is_other_way && !row.baseline.is_empty()).then(|| row.ratio(DiskRun::iops))
}

/// Returns the rate of Ringfence in terms of that of another program, both with all memory.
fn ours_to_this(row: &Row<'_>) -> Option<f64> {
    let is_peer = row.case.program != Program::Ringfence;
    let ratio = || 1.0 / row.ratio(DiskRun::iops).max(f64::MIN_POSITIVE);
    (is_peer && !row.baseline.is_empty()).then(ratio)
}

pub(super) fn layout<'a>() -> Layout<Row<'a>> {
    Layout::new()
        .column("program", |row: &Row<'_>| row.case.program.name(), left("program", 25))
        .column("way", |row| row.case.way.name(), left("way", 7))
        .column("rw", |row| row.case.work.rw.name(), left("rw", 9))
        .column("block", |row| row.case.work.block, right("block", 7))
        .field("depth", |row| row.case.work.depth)
        .field("cache", |row| row.case.args.cache.to_string())
        .column("iops", |row| row.median(DiskRun::iops), right("IOPS", 8))
        .column("mib_per_s", mib_per_s, right("MiB/s", 8))
        .column(
            "front_cpu_ns_per_request",
            |row| each(row, |run| run.worked.front_ns),
            right("front ns", 9),
        )
        .column(
            "backend_cpu_ns_per_request",
            |row| each(row, |run| run.served_ns),
            right("back ns", 9),
        )
        .column(
            "kicks_per_request",
            |row| each(row, |run| run.worked.kicks),
            right("kicks", 6).digits(2),
        )
        .column(
            "calls_per_request",
            |row| each(row, |run| run.worked.calls),
            right("calls", 6).digits(2),
        )
        .column("to_trust", to_trust, right("to trust", 9).digits(2))
        .column("ours_to_this", ours_to_this, right("ours/this", 10).digits(2))
        .legend(LEGEND)
}

const LEGEND: &str = "\
`front ns`, `back ns`: CPU time for each request of the front-end, and of the backend and the shield.
`kicks`, `calls`: writes to an eventfd for each request, by the front-end, and towards it.
`to trust`: the rate in terms of that of way `trust`; `ours/this`: that of Ringfence in terms of this
program's, both with all memory; medians of the ratios of each round.
All columns: docs/perf/howto.md";
