//! Comparison of two runs: figures that changed by more than their spread.
//!
//! The spread of a figure is the difference between its greatest and its least value of all rounds, and the greater one
//! of both runs counts. A figure has changed if its medians differ by more than that. A figure of one round has no spread,
//! so nothing is said about it.

use super::document::{Document, Figure};
use crate::harness::{Bar, Layout, Value, left, number, right};

/// Comparison of a run with an older one.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Comparison {
    /// Time of the older run.
    pub(super) since: String,
    /// Figures of both runs that changed by more than the spread, the largest change first.
    pub(super) changes: Vec<Change>,
    /// Number of figures that did not.
    pub(super) within: usize,
    /// Figures of both runs with only one round in one of them.
    pub(super) without_spread: Vec<String>,
    /// Figures of one run alone.
    pub(super) only_old: Vec<String>,
    pub(super) only_new: Vec<String>,
    /// Differences of the circumstances that may explain changes.
    pub(super) warnings: Vec<String>,
}

/// Figure that changed by more than its spread.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Change {
    pub(super) name: String,
    pub(super) unit: String,
    pub(super) old: f64,
    pub(super) new: f64,
    pub(super) spread: f64,
    pub(super) is_better: bool,
}

impl Change {
    fn size(&self) -> f64 {
        (self.new - self.old).abs()
    }

    /// Returns the part of the change that the spread does not explain.
    fn excess(&self) -> f64 {
        self.size() - self.spread
    }

    /// Returns the change as a share of the older figure, unless that is 0.
    fn share(&self) -> Option<f64> {
        (self.old > 0.0).then(|| (self.new - self.old) / self.old)
    }

    fn verdict(&self) -> &'static str {
        if self.is_better { "better" } else { "worse" }
    }
}

/// Change of a figure between two runs.
enum Verdict {
    Changed(Change),
    Within,
    WithoutSpread,
}

fn judge(old: &Bar, new: &Figure<'_>) -> Option<Verdict> {
    let (before, after) = (old.median()?, new.bar.median()?);
    let Some((one, other)) = old.spread().zip(new.bar.spread()) else {
        return Some(Verdict::WithoutSpread);
    };
    let change = Change {
        name: new.name(),
        unit: new.chart.unit.clone(),
        old: before,
        new: after,
        spread: one.max(other),
        is_better: (after > before) != new.chart.less_is_better,
    };
    let is_change = change.excess() > 0.0;
    Some(if is_change { Verdict::Changed(change) } else { Verdict::Within })
}

/// Compares a run with an older one.
pub(super) fn compare(old: &Document, new: &Document) -> Comparison {
    let mut found = Comparison {
        since: old.run.began.clone(),
        changes: Vec::new(),
        within: 0,
        without_spread: Vec::new(),
        only_old: Vec::new(),
        only_new: Vec::new(),
        warnings: warnings(old, new),
    };
    let has_values = |figure: &Figure<'_>| !figure.bar.values.is_empty();
    for figure in new.figures().filter(has_values) {
        let before = old.figures().filter(has_values).find(|other| other.key() == figure.key());
        match before.and_then(|before| judge(before.bar, &figure)) {
            None => found.only_new.push(figure.name()),
            Some(Verdict::Changed(change)) => found.changes.push(change),
            Some(Verdict::Within) => found.within += 1,
            Some(Verdict::WithoutSpread) => found.without_spread.push(figure.name()),
        }
    }
    for figure in old.figures().filter(has_values) {
        if !new.figures().filter(has_values).any(|other| other.key() == figure.key()) {
            found.only_old.push(figure.name());
        }
    }
    let by_share = |change: &Change| change.share().map_or(f64::INFINITY, f64::abs);
    found.changes.sort_by(|a, b| by_share(b).total_cmp(&by_share(a)));
    found
}

/// Returns a sentence for each circumstance that differs.
fn warnings(old: &Document, new: &Document) -> Vec<String> {
    let mut warnings = Vec::new();
    let facts = |before: &[(String, String)],
                 after: &[(String, String)],
                 warnings: &mut Vec<String>| {
        for (name, value) in after {
            if let Some((_, was)) = before.iter().find(|(known, was)| known == name && was != value)
            {
                warnings.push(format!("{name}: {was} before, {value} now"));
            }
        }
    };
    facts(&old.machine, &new.machine, &mut warnings);
    facts(&old.programs, &new.programs, &mut warnings);
    for (document, which) in [(old, "older"), (new, "newer")] {
        if document.run.quick {
            warnings.push(format!("the {which} run is a quick one, which tests the report alone"));
        }
        if document.run.is_beside_load() {
            warnings.push(format!("the {which} run was beside other load"));
        }
    }
    warnings
}

/// Returns the columns of a change.
pub(super) fn layout() -> Layout<Change> {
    Layout::new()
        .column("figure", |row: &Change| row.name.clone(), left("figure", 60))
        .written("old", |row| row.old, right("before", 10), |row| number(row.old))
        .written("new", |row| row.new, right("now", 10), |row| number(row.new))
        .column("unit", |row| row.unit.clone(), left("unit", 18))
        .written(
            "change",
            |row| row.share(),
            right("change", 9),
            |row| {
                row.share()
                    .map_or_else(|| "-".to_owned(), |share| format!("{:+.1} %", share * 100.0))
            },
        )
        .written("spread", |row| row.spread, right("spread", 10), |row| number(row.spread))
        .written("excess", Change::excess, right("excess", 10), |row| number(row.excess()))
        .column("verdict", Change::verdict, left("verdict", 7))
}

impl Comparison {
    /// Returns the result as sentences, an empty line between them; the changes have a table of their own.
    pub(super) fn sentences(&self) -> String {
        let changed = self.changes.len();
        let compared = changed + self.within;
        let mut sentences = vec![format!(
            "{changed} of {compared} figures changed by more than the spread since {}.",
            self.since
        )];
        let mut list = |names: &[String], what: &str| {
            if !names.is_empty() {
                sentences.push(format!("{what}: {}.", names.join("; ")));
            }
        };
        list(&self.without_spread, "Not compared, because a run has one round only");
        list(&self.only_old, "In the older run alone");
        list(&self.only_new, "In the newer run alone");
        sentences.join("\n\n")
    }

    /// Returns the result as text for a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = self.sentences().replace("\n\n", "\n") + "\n";
        for warning in &self.warnings {
            text += &format!("The runs differ: {warning}\n");
        }
        if !self.changes.is_empty() {
            text += &format!("\n{}{LEGEND}\n", layout().table(&self.changes));
        }
        text
    }
}

/// Explanation of the columns.
pub(super) const LEGEND: &str = "\
Spread: the greater of the differences between greatest and least value in the two runs.
Excess: the part of the change that exceeds it.";

/// Fields of a change with `--json`.
pub(super) fn json(comparison: &Comparison) -> anyhow::Result<String> {
    let lines = comparison.changes.iter().map(|change| layout().json(change));
    let lines: Vec<String> = lines.collect::<Result<_, _>>()?;
    let (changes, within) = (lines.len(), comparison.within);
    let summary = Layout::new()
        .field("comparison", |_: &Comparison| "summary")
        .field("since", |found| found.since.clone())
        .field("changes", move |_| changes)
        .field("within_spread", move |_| within)
        .field("without_spread", |found| Value::json(&found.without_spread))
        .field("only_old", |found| Value::json(&found.only_old))
        .field("only_new", |found| Value::json(&found.only_new))
        .field("warnings", |found| Value::json(&found.warnings));
    Ok([lines, vec![summary.json(comparison)?]].concat().join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::super::document::tests::document;
    use super::*;

    #[test]
    fn change_within_the_spread_is_no_change() {
        let old = document(&[3.0, 2.0, 4.0], &[1.0, 1.0]);
        // The median moves by 1.5, and the older run has a spread of 2.
        let found = compare(&old, &document(&[4.5, 4.5, 4.5], &[1.0, 1.0]));
        assert_eq!((found.changes.len(), found.within), (0, 2), "{found:?}");
        assert!(found.text().starts_with("0 of 2 figures changed"), "{}", found.text());
        // A change as large as the spread is within it.
        let found = compare(&old, &document(&[5.0, 5.0, 5.0], &[1.0, 1.0]));
        assert!(found.changes.is_empty(), "{found:?}");
    }

    #[test]
    fn spread_of_the_newer_run_counts_as_well() {
        let old = document(&[3.0, 3.0], &[1.0, 1.0]);
        let found = compare(&old, &document(&[4.0, 2.9, 4.1], &[1.0, 1.0]));
        assert!(found.changes.is_empty(), "{found:?}");
    }

    #[test]
    fn change_beyond_the_spread_has_size_excess_and_direction() {
        let old = document(&[3.0, 2.9, 3.1], &[1.0, 1.0]);
        let found = compare(&old, &document(&[6.0, 5.9, 6.1], &[0.5, 0.5]));
        assert_eq!(found.changes.len(), 2);
        let rows: Vec<serde_json::Value> = found
            .changes
            .iter()
            .map(|c| serde_json::from_str(&layout().json(c).unwrap()).unwrap())
            .collect();
        // The largest share first: 3 to 6.
        assert_eq!((&rows[0]["old"], &rows[0]["new"]), (&3.0.into(), &6.0.into()));
        assert_eq!((&rows[0]["verdict"], &rows[1]["verdict"]), (&"better".into(), &"worse".into()));
        let excess = rows[0]["excess"].as_f64().unwrap();
        assert!((excess - 2.8).abs() < 1e-9, "{excess}");
        assert_eq!(rows[0]["change"], 1.0);
        assert!(found.text().contains("+100.0 %"), "{}", found.text());
        let lines = json(&found).unwrap();
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.contains(r#""changes":2,"within_spread":0"#), "{lines}");
    }

    #[test]
    fn lower_figure_is_better_where_less_is() {
        let mut runs = [document(&[3.0, 3.0], &[1.0, 1.0]), document(&[2.0, 2.0], &[1.0, 1.0])];
        runs.iter_mut().for_each(|run| run.sections[0].charts[0].less_is_better = true);
        let [old, new] = runs;
        assert!(
            compare(&old, &new).changes[0].is_better && !compare(&new, &old).changes[0].is_better
        );
    }

    #[test]
    fn figure_of_one_round_is_not_judged() {
        let found = compare(&document(&[3.0], &[1.0, 1.0]), &document(&[9.0, 9.0], &[1.0, 1.0]));
        assert_eq!((found.changes.len(), found.within), (0, 1), "{found:?}");
        assert_eq!(found.without_spread, ["Packets a second, 64 bytes, staging"]);
        assert!(found.text().contains("one round only: Packets a second"), "{}", found.text());
    }

    #[test]
    fn rows_of_one_run_alone_are_named() {
        let old = document(&[3.0, 3.0], &[1.0, 1.0]);
        let mut new = document(&[3.0, 3.0], &[]);
        new.sections[0].charts[0].groups[0].bars[0].name = "window".to_owned();
        let found = compare(&old, &new);
        assert_eq!(
            found.only_old,
            ["Packets a second, 64 bytes, staging", "Packets a second, 64 bytes, memif"]
        );
        assert_eq!(found.only_new, ["Packets a second, 64 bytes, window"]);
        assert_eq!((found.changes.len(), found.within), (0, 0));
    }

    #[test]
    fn figure_that_was_zero_changes_without_a_share() {
        let found = compare(&document(&[0.0, 0.0], &[]), &document(&[2.0, 2.0], &[]));
        assert_eq!(found.changes[0].share(), None);
        assert!(!found.text().contains("inf") && !found.text().contains("NaN"), "{}", found.text());
    }

    #[test]
    fn other_machine_quick_run_and_load_are_named() {
        let old = document(&[3.0], &[]);
        let mut new = document(&[3.0], &[]);
        assert!(compare(&old, &new).warnings.is_empty());
        new.machine[0].1 = "another".to_owned();
        new.run.quick = true;
        new.run.busy_before = 0.9;
        let found = compare(&old, &new);
        let wanted = [
            "processor: one & two before, another now",
            "the newer run is a quick one, which tests the report alone",
            "the newer run was beside other load",
        ];
        assert_eq!(found.warnings, wanted);
        assert!(found.text().contains("The runs differ: processor"), "{}", found.text());
    }
}
