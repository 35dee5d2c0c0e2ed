//! Rows of the benchmark: paths, components and single operations.

use super::alone::{Operation, published};
use super::args::CostArgs;
use super::components::{Component, PathName};
use super::paths::PathRun;
use crate::harness::{Layout, Value, left, median, right};

/// Kind of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Whole path.
    Path,
    /// Difference of two paths.
    Component,
    /// Operation that was timed alone.
    Alone,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Path => "path",
            Kind::Component => "component",
            Kind::Alone => "alone",
        }
    }
}

/// Cost for each packet.
pub(super) struct CostRow {
    kind: Kind,
    name: &'static str,
    size: u32,
    rate: u32,
    burst: u16,
    /// Ticks of the time-stamp counter in each round.
    cycles: Vec<f64>,
    /// Instructions in each round; empty if none are counted.
    instructions: Vec<f64>,
    /// Share of the core that the path used.
    load: Option<f64>,
    published: Option<[u32; 2]>,
}

impl CostRow {
    fn new(args: &CostArgs, size: u32, kind: Kind, name: &'static str) -> CostRow {
        CostRow {
            kind,
            name,
            size,
            rate: args.rate,
            burst: args.burst,
            cycles: Vec::new(),
            instructions: Vec::new(),
            load: None,
            published: None,
        }
    }

    pub(super) fn path(args: &CostArgs, size: u32, path: PathName, runs: &[PathRun]) -> CostRow {
        CostRow {
            cycles: runs.iter().map(|run| run.cycles).collect(),
            instructions: runs.iter().filter_map(|run| run.instructions).collect(),
            load: Some(median(runs.iter().map(|run| run.load))),
            ..CostRow::new(args, size, Kind::Path, path.name())
        }
    }

    pub(super) fn component(
        args: &CostArgs,
        size: u32,
        component: &Component,
        with: &[PathRun],
        without: &[PathRun],
    ) -> CostRow {
        let pairs = || with.iter().zip(without);
        let instructions =
            pairs().filter_map(|(with, without)| Some(with.instructions? - without.instructions?));
        CostRow {
            cycles: pairs().map(|(with, without)| with.cycles - without.cycles).collect(),
            instructions: instructions.collect(),
            published: component.published,
            ..CostRow::new(args, size, Kind::Component, component.name)
        }
    }

    pub(super) fn alone(args: &CostArgs, size: u32, operation: Operation) -> CostRow {
        CostRow {
            cycles: operation.cycles,
            published: published(operation.name, size),
            ..CostRow::new(args, size, Kind::Alone, operation.name)
        }
    }

    fn least(&self) -> f64 {
        self.cycles.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn greatest(&self) -> f64 {
        self.cycles.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    fn instructions(&self) -> Option<f64> {
        (!self.instructions.is_empty()).then(|| median(self.instructions.iter().copied()))
    }

    fn published(&self) -> String {
        self.published.map_or_else(|| "-".to_owned(), |[least, most]| format!("{least}-{most}"))
    }
}

/// Returns the columns. `uncounted` is the reason for which there are no instructions.
pub(super) fn layout(uncounted: Option<&str>) -> Layout<CostRow> {
    let why = uncounted.map(str::to_owned);
    let column = match uncounted {
        None => "`instructions`: those that perf counted.".to_owned(),
        Some(why) => format!("No instructions: {why}."),
    };
    Layout::new()
        .column("kind", |row: &CostRow| row.kind.name(), left("kind", 9))
        .column("name", |row| row.name, left("what", 27))
        .column("size", |row| row.size, right("bytes", 5))
        .field("rate", |row| row.rate)
        .field("burst", |row| u32::from(row.burst))
        .field("rounds", |row| row.cycles.len())
        .column("cycles", |row| median(row.cycles.iter().copied()), right("cycles", 8))
        .column("least", CostRow::least, right("least", 8))
        .column("greatest", CostRow::greatest, right("greatest", 8))
        .column("instructions", CostRow::instructions, right("instructions", 12))
        .field("instructions_missing", move |_| Value::if_some(why.clone()))
        .column("load", |row| row.load, right("load", 5).digits(2))
        .written(
            "published",
            |row| row.published.map_or(Value::Null, |range| Value::json(&range)),
            right("published", 9),
            CostRow::published,
        )
        .legend(format!(
            "For each packet: ticks of the time-stamp counter while a process of the path ran; medians, and the least and the\n\
             greatest of the rounds. `component`: difference of two paths. `alone`: an operation in a loop. `load`: share of\n\
             the core that the path used. `published`: cycles of the same step in seL4's device driver framework.\n\
             {column}"
        ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::components::COMPONENTS;
    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: CostArgs,
    }

    fn run(cycles: f64, instructions: Option<f64>) -> PathRun {
        PathRun { cycles, instructions, load: 0.25 }
    }

    #[test]
    fn component_is_the_difference_of_two_paths_in_each_round() {
        let args = CommandLine::parse_from(["cost"]).args;
        let with = [run(900.0, Some(500.0)), run(1200.0, Some(510.0)), run(700.0, Some(505.0))];
        let without = [run(500.0, Some(200.0)), run(900.0, Some(200.0)), run(800.0, Some(200.0))];
        let row = CostRow::component(&args, 64, &COMPONENTS[5], &with, &without);
        let json: serde_json::Value =
            serde_json::from_str(&layout(None).json(&row).unwrap()).unwrap();
        for (field, value) in [
            ("kind", "component".into()),
            ("name", "one more distrusting domain".into()),
            ("cycles", serde_json::Value::from(300.0)),
            // Noise may make a difference negative; the row says so.
            ("least", (-100.0).into()),
            ("greatest", 400.0.into()),
            ("instructions", 305.0.into()),
            ("published", serde_json::json!([350, 1500])),
        ] {
            assert_eq!(json[field], value, "{field}: {json}");
        }
    }

    #[test]
    fn row_without_instructions_has_a_dash_and_the_legend_says_why() {
        let args = CommandLine::parse_from(["cost"]).args;
        let row = CostRow::path(&args, 64, PathName::Switch, &[run(900.0, None)]);
        let layout = layout(Some("perf counts no instructions on this machine: not supported"));
        let line = layout.line(&row);
        assert_eq!(line.len(), layout.heading().len(), "{line}");
        assert!(layout.legend_text().contains("not supported"), "{}", layout.legend_text());
        let json: serde_json::Value = serde_json::from_str(&layout.json(&row).unwrap()).unwrap();
        assert_eq!(json["instructions"], serde_json::Value::Null);
        assert!(json["instructions_missing"].as_str().unwrap().contains("not supported"));
    }
}
