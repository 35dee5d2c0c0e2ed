//! `ringfence-bench seeds persistent`: IOPS against the number of guests.

use std::io::Write;

use ringfence_access::Mode;
use ringfence_block::storage::file::{CacheMode, Engine};
use ringfence_hostnet::out::Out;

use super::args::{PersistentArgs, Rw, Storage};
use super::case::{DiskCase, Settings};
use super::report::{self, DiskRow};
use crate::harness::{Axis, Format, Page, Plot, Report, Series};

/// Columns of the longest bar.
const WIDTH: f64 = 50.0;

/// Runs the experiment and prints it.
pub(crate) fn run(args: &PersistentArgs) -> anyhow::Result<()> {
    let report = Report::begin(report::layout(), Format::of(args.json))?;
    let mut rows = Vec::new();
    for &queues in &args.queues {
        for &guests in &args.guests {
            for mode in [Mode::Map, Mode::Persistent] {
                let (block, rw, depth) = (4096, Rw::RandRead, 32);
                let case = DiskCase { mode, guests, block, rw, depth, queues };
                let settings = Settings {
                    storage: Storage::Memory,
                    cache: CacheMode::None,
                    engine: Engine::Auto,
                    seconds: args.seconds,
                    repeat: args.repeat,
                    depth,
                    queues,
                };
                let row = case.median(&settings)?;
                report.row(&row)?;
                rows.push(row);
            }
        }
    }
    report.end()?;
    if !args.json {
        write!(Out, "\n{}{}\n", bars(&rows), verdict(&rows))?;
    }
    if let Some(path) = &args.html {
        page(&rows)?.write(path)?;
    }
    Ok(())
}

/// Published requests a second by number of guests: those of the mechanism that the commit of persistent grants replaced,
/// with a driver domain of 24 processors.
pub(crate) const PUBLISHED: [(u16, f64); 2] = [(5, 650_000.0), (10, 400_000.0)];

/// Returns the published figures for a row that was measured on Xen.
pub(crate) fn published_text(setup: &str) -> Option<String> {
    let [(fewer, before), (more, after)] = PUBLISHED;
    let text = || format!("{before} IOPS of {fewer} guests, {after} of {more}");
    (setup == Mode::Map.name()).then(text)
}

/// Formats an optional count for each request.
fn count(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.3}"))
}

/// Formats the rates as bars with the mappings beside them.
fn bars(rows: &[DiskRow]) -> String {
    let most = rows.iter().map(|row| row.iops).fold(1.0, f64::max);
    let mut text = String::from("guests mode        IOPS of all guests\n");
    for row in rows {
        let columns = (row.iops / most * WIDTH).round();
        let bar: String = (0..).map(f64::from).take_while(|n| *n < columns).map(|_| '#').collect();
        text += &format!(
            "{:>6} {:<10} {bar} {:.0} (for each request {} mappings, {} unmappings, {} TLB shootdowns; \
             {} threads)\n",
            row.guests,
            row.mode,
            row.iops,
            count(row.map_calls()),
            count(row.unmap_calls()),
            count(row.tlb_shootdowns()),
            row.backend_threads()
        );
    }
    text
}

/// Returns the threads that each guest has in the driver domain.
fn threads_a_guest(row: &DiskRow) -> u32 {
    row.backend_threads() / u32::from(row.guests.max(1))
}

/// Summarizes the experiment in figures.
fn verdict(rows: &[DiskRow]) -> String {
    let mut text = String::new();
    let mut threads: Vec<u32> = rows.iter().map(threads_a_guest).collect();
    threads.dedup();
    for threads in threads {
        let of = |mode: Mode| {
            rows.iter()
                .filter(move |row| row.mode == mode.name() && threads_a_guest(row) == threads)
        };
        let last = |mode| of(mode).max_by_key(|row| row.guests);
        for mode in [Mode::Map, Mode::Persistent] {
            let best = of(mode).map(|row| row.iops).fold(0.0, f64::max);
            if let Some(last) = last(mode).filter(|_| best > 0.0) {
                let (part, guests) = (last.iops / best, last.guests);
                text += &format!(
                    "{mode}: {part:.2} of its best with {guests} guests ({threads} threads each)\n"
                );
            }
        }
        if let (Some(map), Some(persistent)) = (last(Mode::Map), last(Mode::Persistent)) {
            let times = persistent.iops / map.iops.max(1.0);
            text += &format!("persistent: {times:.2} x map with {} guests\n", map.guests);
        }
    }
    text
}

/// Builds a page with the rows and plots.
fn page(rows: &[DiskRow]) -> anyhow::Result<Page> {
    let mut page = Page::new("Persistent grants: IOPS against the number of guests");
    page.text(INTRODUCTION);
    type Figure = (&'static str, &'static str, fn(&DiskRow) -> Option<f64>);
    let figures: [Figure; 3] = [
        ("Requests of all guests together", "IOPS", |row| Some(row.iops)),
        ("Unmappings", "for each request", |row| row.unmap_calls()),
        ("TLB shootdowns, of the whole machine", "for each request", |row| row.tlb_shootdowns()),
    ];
    for (title, y, figure) in figures {
        let mut series: Vec<(String, Vec<(f64, f64)>)> = vec![];
        for row in rows {
            let name = format!("{}, {} threads a guest", row.mode, threads_a_guest(row));
            let point = figure(row).map(|y| (f64::from(row.guests), y));
            match series.iter_mut().find(|(other, _)| *other == name) {
                Some((_, points)) => points.extend(point),
                None => series.push((name, point.into_iter().collect())),
            }
        }
        let series = series.into_iter().map(|(name, points)| Series::new(name, points)).collect();
        let (title, x) = (title.to_owned(), Axis::linear("guests"));
        page.plot(&Plot { title, x, y: Axis::linear(y), series })?;
    }
    let heading = ["mode", "guests", "threads", "IOPS", "map", "unmap", "TLB shootdowns", "cpu ns"];
    let line = |row: &DiskRow| {
        vec![
            row.mode.to_owned(),
            row.guests.to_string(),
            row.backend_threads().to_string(),
            format!("{:.0}", row.iops),
            count(row.map_calls()),
            count(row.unmap_calls()),
            count(row.tlb_shootdowns()),
            format!("{:.0}", row.cost()),
        ]
    };
    page.table("Rows", &heading, &rows.iter().map(line).collect::<Vec<_>>());
    page.text(&verdict(rows).replace('\n', "\n\n"));
    Ok(page)
}

const INTRODUCTION: &str = "\
Random reads of 4 KiB, depth 32, by more and more guests, each from a disk in memory of its own. In mode \
`map` the driver domain maps each page for its request and unmaps it afterwards; in mode `persistent` \
it keeps it.

The experiment is that of the change that brought persistent grants to Linux: in a dom0 with 24 \
processors, 5 guests came to 650,000 requests a second together, and 10 guests to 400,000, for \
unmapping interrupts every processor to flush its TLB.";
