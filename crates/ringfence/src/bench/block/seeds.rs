//! `ringfence bench seeds persistent`: IOPS against the number of guests.

use std::io::Write;

use ringfence_block::blkback::Mode;

use super::Case;
use super::args::{PersistentArgs, Rw, Storage};
use super::report::{self, Row};

/// Columns of the longest bar.
const WIDTH: f64 = 50.0;

/// Runs the experiment.
pub(in crate::bench) fn run(args: &PersistentArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    let mut rows = Vec::new();
    if !args.json {
        writeln!(out, "{}", report::heading())?;
    }
    for &guests in &args.guests {
        for mode in [Mode::Map, Mode::Persistent] {
            let case = Case {
                mode,
                guests,
                block: 4096,
                rw: Rw::RandRead,
                depth: 32,
                queues: args.queues,
            };
            let row = median(args, case)?;
            let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
            writeln!(out, "{line}")?;
            rows.push(row);
        }
    }
    if !args.json {
        writeln!(out, "{}\n\n{}", report::LEGEND, plot(&rows))?;
    }
    Ok(())
}

/// The run in the middle of several.
fn median(args: &PersistentArgs, case: Case) -> anyhow::Result<Row> {
    let mut runs = Vec::new();
    for _ in 0..args.repeat {
        runs.push(case.run(&Storage::Memory, args.seconds)?);
    }
    runs.sort_by(|a, b| a.iops.total_cmp(&b.iops));
    Ok(runs.swap_remove(runs.len() / 2))
}

/// The rates as bars, the mappings beside them.
fn plot(rows: &[Row]) -> String {
    let most = rows.iter().map(|row| row.iops).fold(1.0, f64::max);
    let mut text = String::from("guests mode        IOPS of all guests\n");
    for row in rows {
        let columns = (row.iops / most * WIDTH).round();
        let bar: String = (0..).map(f64::from).take_while(|n| *n < columns).map(|_| '#').collect();
        let unmaps = row.unmap_calls_per_request;
        text += &format!(
            "{:>6} {:<10} {bar} {:.0} ({unmaps:.2} unmappings a request, {} threads)\n",
            row.guests, row.mode, row.iops, row.backend_threads
        );
    }
    for mode in [Mode::Map, Mode::Persistent] {
        let of_mode = || rows.iter().filter(|row| row.mode == mode.name());
        let best = of_mode().map(|row| row.iops).fold(0.0, f64::max);
        if let Some(last) = of_mode().max_by_key(|row| row.guests).filter(|_| best > 0.0) {
            let (part, guests) = (last.iops / best, last.guests);
            text += &format!("{mode}: {part:.2} of its best with {guests} guests\n");
        }
    }
    text
}
