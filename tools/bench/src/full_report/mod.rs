//! `ringfence-bench report`: the fixed set of experiments and comparisons on one page.
//!
//! # Theory of operation
//!
//! ```text
//!  sections ── command ──▶ rows of each round ──▶ charts ──▶ document ──▶ table, page
//!  (the set)   (process)   (rows)                             ▲  │            and charts as files
//!                                         --from FILE ────────┘  └────▶ --save FILE
//!                                         --compare OLD ──▶ changes (compare)
//! ```
//!
//! A section is one command of this program with `--json`, and the charts of the rows that it prints (`sections`). Every
//! round starts each command once, as a process of its own (`measure`): commands change network namespaces, and a
//! reader can repeat them. The document (`document`) has all figures with machine and programs. Table, page and
//! comparison come from the document alone, so they can be made again without a measurement.

pub mod args;
mod compare;
mod document;
mod machine;
mod measure;
mod page;
mod rows;
mod sections;

use std::io::Write;

use anyhow::bail;
use ringfence_hostnet::out::Out;

use self::args::ReportArgs;
use self::document::{Document, Figure, Outcome, RunFacts};
use crate::harness::{Format, Layout, Report, Value, left, number, right};

/// Share of processor time of other programs above which a run counts as beside load.
const LOAD_MAX: f64 = 0.1;

impl RunFacts {
    /// Returns `true` if other programs were at work before or after the run.
    fn is_beside_load(&self) -> bool {
        self.busy_before.max(self.busy_after) > LOAD_MAX
    }
}

/// Measures or reads the figures, prints them and writes the page.
pub(super) fn run(args: &ReportArgs) -> anyhow::Result<()> {
    // An unusable file is reported before the measurement.
    let old = args.compare.as_deref().map(Document::read).transpose()?;
    let document = match &args.from {
        Some(path) => Document::read(path)?,
        None => measure::measure(args)?,
    };
    if let Some(path) = &args.save {
        document.write(path)?;
    }
    let comparison = old.map(|old| compare::compare(&old, &document));
    page::page(&document, comparison.as_ref()).write(&args.html)?;
    args.svg.as_deref().map_or(Ok(()), |folder| page::write_charts(&document, folder))?;
    let report = Report::begin(layout(), Format::of(args.json))?;
    document.figures().try_for_each(|figure| report.row(&figure))?;
    let is_table = report.is_table();
    report.end()?;
    match comparison {
        Some(comparison) if is_table => write!(Out, "\n{}", comparison.text())?,
        Some(comparison) => write!(Out, "{}", compare::json(&comparison)?)?,
        None => {}
    }
    eprintln!("ringfence-bench: the page is {}", args.html.display());
    ended(&document)
}

/// Reports sections without figures.
///
/// # Errors
///
/// Returns an error if a section failed; one that the machine cannot run is no failure.
fn ended(document: &Document) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for section in &document.sections {
        match &section.outcome {
            Outcome::Measured => {}
            Outcome::Skipped(why) => {
                eprintln!("ringfence-bench: not measured: {}: {why}", section.title)
            }
            Outcome::Failed(why) => failed.push(format!("{}: {why}", section.title)),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("{} of {} sections failed: {}", failed.len(), document.sections.len(), failed.join("; "))
}

/// Returns the columns of a figure.
fn layout<'a>() -> Layout<Figure<'a>> {
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
    Layout::new()
        .column("section", |row: &Figure<'_>| Value::json(&row.section.name), left("section", 10))
        .field("chart", |row| row.chart.id.as_str())
        .cell(left("chart", 43), |row| row.chart.title.clone())
        .column("case", |row| row.group, left("case", 33))
        .column("bar", |row| row.bar.name.as_str(), left("bar", 20))
        .column("unit", |row| row.chart.unit.as_str(), left("unit", 17))
        .written(
            "median",
            |row| row.bar.median(),
            right("median", 9),
            move |row| optional(row.bar.median()),
        )
        .written(
            "least",
            |row| row.bar.range().map(|range| range.0),
            right("least", 9),
            move |row| optional(row.bar.range().map(|range| range.0)),
        )
        .written(
            "greatest",
            |row| row.bar.range().map(|range| range.1),
            right("greatest", 9),
            move |row| optional(row.bar.range().map(|range| range.1)),
        )
        .written(
            "published",
            |row| row.bar.published,
            right("published", 9),
            move |row| optional(row.bar.published),
        )
        .field("values", |row| Value::json(&row.bar.values))
        .field("less_is_better", |row| row.chart.less_is_better)
        .legend(LEGEND)
}

const LEGEND: &str = "\
Medians, and the least and the greatest value of all rounds. `published`: the figure of the source
document. Only ratios within one run are comparable between machines. docs/lab/columns.md";

#[cfg(test)]
mod tests {
    use super::document::tests::document;
    use super::*;

    #[test]
    fn figures_have_their_columns_in_table_and_json() {
        let document = document(&[3.0, 2.0, 4.0], &[1.0]);
        let rows: Vec<Figure<'_>> = document.figures().collect();
        assert_eq!(layout().line(&rows[0]).len(), layout().heading().len());
        let json: serde_json::Value =
            serde_json::from_str(&layout().json(&rows[0]).unwrap()).unwrap();
        for (field, value) in [
            ("section", "staging".into()),
            ("chart", "rate".into()),
            ("case", "64 bytes".into()),
            ("bar", "staging".into()),
            ("median", serde_json::Value::from(3.0)),
            ("least", 2.0.into()),
            ("greatest", 4.0.into()),
            ("published", 3.64.into()),
        ] {
            assert_eq!(json[field], value, "{field}: {json}");
        }
        let single = layout().json(&rows[1]).unwrap();
        assert!(single.contains(r#""least":null"#), "{single}");
    }

    #[test]
    fn failed_section_is_an_error_and_a_skipped_one_is_not() {
        let mut document = document(&[3.0], &[1.0]);
        let error = ended(&document).unwrap_err();
        assert!(error.to_string().starts_with("1 of 3 sections failed: "), "{error}");
        document.sections.pop();
        ended(&document).unwrap();
    }
}
