//! Measurements of an experiment that was measured on Xen, under the hypervisor's counters.
//!
//! A scenario of `cargo xtask vm xen` writes one JSON object a line, with the helper `row` of `vm/xen/perf.sh`:
//!
//! ```json
//! {"seed":"redesigned","experiment":"receive","setup":"window","unit":"packet","units":2000,"counts":{"hypercalls":31}}
//! ```
//!
//! The file of a run has the rows of all its scenarios. `seeds EXPERIMENT --xen FILE` prints those of the experiment: each
//! count for one unit, and behind a stroke its ratio to the first setup of the same experiment. The published figures
//! follow in the last column. Measurements with the counts `reused` and `not_reused`, which are uses of pages of grant windows,
//! have the share of the former, too.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use ringfence_hostnet::out::Out;
use serde::Deserialize;

use crate::harness::{Layout, Table, Value};
use crate::{block, gso, redesigned, staging};

/// Measurement as a scenario writes it. Field names are part of the file's format.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Measurement {
    /// Name of the command's experiment: `redesigned`.
    seed: String,
    /// Part of it, such as a direction.
    experiment: String,
    /// Mechanism or program that was measured.
    setup: String,
    /// Noun for one of `units`: `packet`, `request`.
    unit: String,
    units: u64,
    /// Totals by name. Times have their unit in the name: `dom0_ms`.
    counts: BTreeMap<String, u64>,
}

/// Measurements of a file.
pub(crate) struct Measurements(Vec<Measurement>);

impl Measurements {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Measurements> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Measurements::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> anyhow::Result<Measurements> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let rows = lines.map(|(n, line)| {
            let row: Measurement =
                serde_json::from_str(line).with_context(|| format!("line {}", n + 1))?;
            anyhow::ensure!(row.units > 0, "line {}: no {} was counted", n + 1, row.unit);
            Ok(row)
        });
        Ok(Measurements(rows.collect::<anyhow::Result<_>>()?))
    }

    /// Prints the rows of an experiment.
    pub(crate) fn print(&self, seed: &str, json: bool) -> anyhow::Result<()> {
        let rows: Vec<&Measurement> = self.0.iter().filter(|row| row.seed == seed).collect();
        let mut out = Out;
        if json {
            let layout = layout();
            return rows.iter().try_for_each(|row| Ok(writeln!(out, "{}", layout.json(row)?)?));
        }
        anyhow::ensure!(!rows.is_empty(), "the file of --xen has no row of `seeds {seed}`");
        for group in groups(&rows) {
            write!(out, "\n{}", table(&group).text())?;
        }
        Ok(writeln!(out, "\n{NOTES}")?)
    }
}

const NOTES: &str = "\
xen: counted by the hypervisor, for one unit each. The ratio to the first row is behind the slash.
The machine is emulated: counts are exact, and times are comparable only within a table.";

impl Measurement {
    fn per_unit(&self, count: &str) -> Option<f64> {
        self.counts.get(count).map(|count| *count as f64 / self.units as f64)
    }

    /// Returns the share of uses of a page without a grant operation, if uses were counted.
    fn reused_share(&self) -> Option<f64> {
        let reused = *self.counts.get("reused")? as f64;
        let uses = reused + *self.counts.get("not_reused")? as f64;
        (uses > 0.0).then_some(reused / uses)
    }

    /// Returns the published figures, if the source document has some for this row.
    fn published(&self) -> Option<String> {
        match self.seed.as_str() {
            "redesigned" => redesigned::report::published_text(&self.experiment, &self.setup),
            "gso" => gso::report::published_text(&self.experiment, &self.setup),
            "staging" => staging::published_text(&self.experiment, &self.setup),
            "persistent" => block::seeds::published_text(&self.setup),
            _ => None,
        }
    }
}

/// Returns the fields of a measurement with `--json`.
fn layout() -> Layout<Measurement> {
    Layout::new()
        .field("platform", |_: &Measurement| "xen")
        .field("seed", |row| row.seed.clone())
        .field("experiment", |row| row.experiment.clone())
        .field("setup", |row| row.setup.clone())
        .field("unit", |row| row.unit.clone())
        .field("units", |row| row.units)
        .field("counts", |row| Value::json(&row.counts))
        .field("per_unit", |row| {
            let each = |name: &String| Some((name.clone(), row.per_unit(name)?));
            Value::json(&row.counts.keys().filter_map(each).collect::<BTreeMap<_, _>>())
        })
        .field("reused_share", |row| Value::if_some(row.reused_share()))
        .field("published", Measurement::published)
}

/// Returns the rows of each experiment. A scenario may measure all experiments of one setup before the next.
fn groups<'a>(rows: &[&'a Measurement]) -> Vec<Vec<&'a Measurement>> {
    let mut groups: Vec<Vec<&Measurement>> = Vec::new();
    for &row in rows {
        let alike = |of: &&mut Vec<&Measurement>| {
            of[0].experiment == row.experiment && of[0].unit == row.unit
        };
        match groups.iter_mut().find(alike) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
}

/// Returns the table of an experiment.
fn table<'a>(rows: &[&'a Measurement]) -> Table<'a> {
    let mut names: Vec<&str> =
        rows.iter().flat_map(|row| row.counts.keys()).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let first = rows[0];
    let cell = |row: &Measurement, name: &str| {
        let Some(each) = row.per_unit(name) else { return "-".to_owned() };
        match first.per_unit(name).filter(|each| *each > 0.0 && !std::ptr::eq(row, first)) {
            Some(base) => format!("{each:.3}/{:.2}", each / base),
            None => format!("{each:.3}"),
        }
    };
    let shares = rows.iter().any(|row| row.reused_share().is_some());
    let cells = |row: &Measurement| {
        let mut cells = vec![row.setup.clone(), row.units.to_string()];
        cells.extend(names.iter().map(|name| cell(row, name)));
        let share = row.reused_share().map(|share| format!("{:.4} %", share * 100.0));
        cells.extend(shares.then(|| share.unwrap_or_else(|| "-".to_owned())));
        cells.push(row.published().unwrap_or_else(|| "-".to_owned()));
        cells
    };
    Table {
        title: format!("xen, {}: for each {}", first.experiment, first.unit),
        rows: rows.iter().map(|row| cells(row)).collect(),
        heading: ["setup", "units"]
            .into_iter()
            .chain(names)
            .chain(shares.then_some("reuse share"))
            .chain(["published"])
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"seed":"redesigned","experiment":"receive","setup":"map","unit":"packet","units":1000,"counts":{"maps":2000,"flushes":500}}
{"seed":"persistent","experiment":"read","setup":"map","unit":"request","units":10,"counts":{}}
{"seed":"redesigned","experiment":"receive","setup":"window","unit":"packet","units":2000,"counts":{"maps":0,"flushes":100,"issues":50}}
"#;

    fn as_json(row: &Measurement) -> serde_json::Value {
        serde_json::from_str(&layout().json(row).unwrap()).unwrap()
    }

    #[test]
    fn counts_are_printed_for_one_unit_with_ratio_to_first_row() {
        let rows = Measurements::parse(TEXT).unwrap();
        let rows: Vec<&Measurement> =
            rows.0.iter().filter(|row| row.seed == "redesigned").collect();
        let table = table(&rows);
        assert_eq!(table.heading, ["setup", "units", "flushes", "issues", "maps", "published"]);
        assert_eq!(table.rows[0], ["map", "1000", "0.500", "-", "2.000", "-"]);
        let published = "throughput 1.18, cost 0.69";
        assert_eq!(
            table.rows[1],
            ["window", "2000", "0.050/0.10", "0.025", "0.000/0.00", published]
        );
        assert_eq!(table.title, "xen, receive: for each packet");
        let line = as_json(rows[1]);
        assert_eq!(line["platform"], "xen");
        assert_eq!(line["per_unit"]["issues"], 0.025);
        assert_eq!(line["published"], published);
    }

    #[test]
    fn share_of_reused_pages_is_printed_for_rows_that_count_uses() {
        let text = TEXT.replacen(r#""issues":50"#, r#""reused":297,"not_reused":3"#, 1);
        let rows = Measurements::parse(&text).unwrap();
        let rows: Vec<&Measurement> =
            rows.0.iter().filter(|row| row.seed == "redesigned").collect();
        let table = table(&rows);
        assert_eq!(table.heading[table.heading.len() - 2..], ["reuse share", "published"]);
        let shares: Vec<&str> = table.rows.iter().map(|row| row[row.len() - 2].as_str()).collect();
        assert_eq!(shares, ["-", "99.0000 %"]);
        assert_eq!(rows[0].reused_share(), None);
        assert_eq!(as_json(rows[1])["reused_share"], 0.99);
    }

    #[test]
    fn published_figures_are_those_of_the_experiment() {
        let published = |seed: &str, experiment: &str, setup: &str| {
            let (unit, counts) = ("packet".to_owned(), BTreeMap::new());
            let [seed, experiment, setup] = [seed, experiment, setup].map(str::to_owned);
            Measurement { seed, experiment, setup, unit, units: 1, counts }.published()
        };
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(published("gso", "guest-dom0", "netback-tso"), is("throughput 2.61"));
        assert_eq!(published("gso", "guest-dom0", "serve-mtu16436-sg"), is("throughput 2.52"));
        assert_eq!(published("gso", "guest-guest", "serve-tso"), is("throughput 5.18"));
        assert_eq!(published("gso", "guest-guest", "serve-mtu1500"), None);
        let staging = is("throughput 3.64 sent, 6.74 received");
        assert_eq!(published("staging", "one-slot", "staging-driver"), staging);
        assert_eq!(published("staging", "bulk", "netback"), None);
        assert!(published("persistent", "guests-6", "map").is_some());
        assert_eq!(published("persistent", "guests-6", "copy"), None);
    }

    #[test]
    fn interleaved_rows_make_one_table_for_each_experiment() {
        let text = TEXT.replace("persistent", "redesigned");
        let rows = Measurements::parse(&text).unwrap();
        let rows: Vec<&Measurement> = rows.0.iter().collect();
        let names =
            groups(&rows).into_iter().map(|group| (group[0].experiment.clone(), group.len()));
        let names: Vec<(String, usize)> = names.collect();
        assert_eq!(names, [("receive".to_owned(), 2), ("read".to_owned(), 1)]);
    }

    #[test]
    fn malformed_row_is_refused_with_its_line() {
        for (from, to, wanted) in [
            ("\"units\":10,", "\"units\":0,", "line 2: no request was counted"),
            ("\"units\":10,", "", "line 2"),
            ("\"units\":10,", "\"units\":10,\"more\":1,", "line 2"),
        ] {
            let error = Measurements::parse(&TEXT.replace(from, to)).err().unwrap();
            assert!(format!("{error:#}").contains(wanted), "{error:#}");
        }
    }
}
