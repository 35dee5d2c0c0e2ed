//! Rows that a section's command printed in each round, and the charts' values in them.

use serde_json::{Map, Value};

use crate::harness::{Bar, BarChart, BarGroup};

/// Row: the JSON object of one line.
pub(super) type Row = Map<String, Value>;

/// Rows of every round.
pub(super) struct Rounds(pub(super) Vec<Vec<Row>>);

/// Fields that select a row, with their values as text.
pub(super) type Wanted<'a> = &'a [(&'a str, &'a str)];

/// Parses the lines that a command printed.
///
/// # Errors
///
/// Returns an error if a line is no JSON object.
pub(super) fn parse(text: &str) -> serde_json::Result<Vec<Row>> {
    text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str).collect()
}

/// Returns `true` if a row has all wanted values.
fn has_values(row: &Row, wanted: Wanted<'_>) -> bool {
    let has =
        |(field, value): &(&str, &str)| row.get(*field).map(as_text).as_deref() == Some(value);
    wanted.iter().all(has)
}

/// Returns a field's value as text, without quotes.
fn as_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl Rounds {
    /// Returns a figure of the first row of each round that has all wanted values; rounds without it are left out.
    pub(super) fn values(&self, wanted: Wanted<'_>, figure: &str) -> Vec<f64> {
        let value = |rows: &Vec<Row>| {
            rows.iter()
                .filter(|row| has_values(row, wanted))
                .find_map(|row| row.get(figure)?.as_f64())
        };
        self.0.iter().filter_map(value).collect()
    }

    /// Returns the greatest figure of the rows of each round that have none of the unwanted values.
    pub(super) fn greatest_without(
        &self,
        field: &str,
        unwanted: &[&str],
        figure: &str,
    ) -> Vec<f64> {
        let is_wanted = |row: &&Row| {
            row.get(field).map(as_text).is_some_and(|value| !unwanted.contains(&value.as_str()))
        };
        let greatest = |rows: &Vec<Row>| {
            let figures = rows.iter().filter(is_wanted).filter_map(|row| row.get(figure)?.as_f64());
            figures.max_by(f64::total_cmp)
        };
        self.0.iter().filter_map(greatest).collect()
    }

    /// Returns the ratio of two rows' figures in each round that has both.
    pub(super) fn ratios(&self, wanted: Wanted<'_>, to: Wanted<'_>, figure: &str) -> Vec<f64> {
        let find = |rows: &[Row], wanted: Wanted<'_>| {
            rows.iter()
                .filter(|row| has_values(row, wanted))
                .find_map(|row| row.get(figure)?.as_f64())
        };
        let ratio = |rows: &Vec<Row>| {
            let base = find(rows, to).filter(|base| *base > 0.0)?;
            Some(find(rows, wanted)? / base)
        };
        self.0.iter().filter_map(ratio).collect()
    }

    /// Returns the reasons for which rows have no figures, with the names of their programs.
    pub(super) fn skipped(&self) -> Vec<String> {
        let text = |row: &Row, field: &str| Some(row.get(field)?.as_str()?.to_owned());
        let mut reasons: Vec<String> = self
            .0
            .iter()
            .flatten()
            .filter_map(|row| {
                let why = text(row, "skipped")?;
                Some(text(row, "peer").map_or_else(|| why.clone(), |peer| format!("{peer}: {why}")))
            })
            .collect();
        reasons.sort();
        reasons.dedup();
        reasons
    }
}

/// Bar of Ringfence itself, with the value of the source document.
pub(super) fn ours(name: &str, values: Vec<f64>, published: Option<f64>) -> Bar {
    Bar { name: name.to_owned(), values, published, ours: true }
}

/// Bar of another program, or of the mechanism that Ringfence replaces.
pub(super) fn other(name: &str, values: Vec<f64>) -> Bar {
    Bar { name: name.to_owned(), values, published: None, ours: false }
}

/// Returns a chart of the groups and bars that have values; `None` without any.
pub(super) fn chart(
    [id, title, unit]: [&str; 3],
    less_is_better: bool,
    groups: Vec<(String, Vec<Bar>)>,
) -> Option<BarChart> {
    let with_values = |(name, bars): (String, Vec<Bar>)| {
        let bars: Vec<Bar> = bars.into_iter().filter(|bar| !bar.values.is_empty()).collect();
        (!bars.is_empty()).then_some(BarGroup { name, bars })
    };
    let groups: Vec<BarGroup> = groups.into_iter().filter_map(with_values).collect();
    let [id, title, unit] = [id, title, unit].map(str::to_owned);
    (!groups.is_empty()).then_some(BarChart { id, title, unit, less_is_better, groups })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds() -> Rounds {
        let round = |map: f64, persistent: f64| {
            let text = format!(
                "{{\"mode\":\"map\",\"guests\":5,\"iops\":{map}}}\n\
                 {{\"mode\":\"persistent\",\"guests\":5,\"iops\":{persistent}}}\n\
                 {{\"peer\":\"memif\",\"iops\":null,\"skipped\":\"no cores\"}}\n"
            );
            parse(&text).unwrap()
        };
        Rounds(vec![round(2.0, 8.0), round(4.0, 8.0)])
    }

    #[test]
    fn values_and_ratios_are_those_of_each_round() {
        let (map, persistent) = ([("mode", "map"), ("guests", "5")], [("mode", "persistent")]);
        assert_eq!(rounds().values(&map, "iops"), [2.0, 4.0]);
        assert_eq!(rounds().ratios(&persistent, &map, "iops"), [4.0, 2.0]);
        assert!(rounds().values(&[("mode", "copy")], "iops").is_empty());
        assert!(rounds().values(&[("peer", "memif")], "iops").is_empty(), "null is no value");
        assert!(rounds().values(&map, "gbps").is_empty());
        let zero = Rounds(vec![parse("{\"a\":1,\"v\":0}\n{\"a\":2,\"v\":3}").unwrap()]);
        assert!(zero.ratios(&[("a", "2")], &[("a", "1")], "v").is_empty(), "no ratio to 0");
    }

    #[test]
    fn greatest_figure_is_that_of_the_rows_that_are_wanted() {
        let found = |unwanted: &[&str]| rounds().greatest_without("mode", unwanted, "iops");
        assert_eq!(found(&[]), [8.0, 8.0]);
        assert_eq!(found(&["persistent"]), [2.0, 4.0]);
        assert!(found(&["persistent", "map"]).is_empty(), "a row without the field is not wanted");
    }

    #[test]
    fn skipped_rows_give_each_reason_once() {
        assert_eq!(rounds().skipped(), ["memif: no cores"]);
    }

    #[test]
    fn bars_without_values_and_empty_charts_are_left_out() {
        let bars = vec![ours("a", vec![1.0], None), other("b", vec![])];
        let groups = vec![("x".to_owned(), bars), ("y".to_owned(), vec![other("b", vec![])])];
        let found = chart(["id", "title", "unit"], false, groups).unwrap();
        assert_eq!((found.groups.len(), found.groups[0].bars.len()), (1, 1));
        assert_eq!(chart(["id", "title", "unit"], false, vec![]), None);
    }

    #[test]
    fn line_that_is_no_object_is_an_error() {
        assert!(parse("{\"a\":1}\nerror\n").is_err() && parse("[1]").is_err());
        assert!(parse("\n\n").unwrap().is_empty());
    }
}
