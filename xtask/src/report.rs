//! What the reader is told: the list of steps, the table at the end, and the final line.

use std::fmt::Write as _;
use std::time::Duration;

use crate::steps::Step;

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ran and all was well; the note says what ran, or what is worth knowing.
    Passed(String),
    /// It ran and found something, or could not run for a reason that is ours.
    Failed(String),
    /// It could not run on this machine: what is missing, and how to get it.
    Skipped(String),
}

/// One row of the table.
pub(crate) struct Row {
    /// The step's name.
    pub(crate) name: &'static str,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// How long it took.
    pub(crate) time: Duration,
    /// Tests inside the step that lacked something: name and reason.
    pub(crate) skipped_tests: Vec<(String, String)>,
}

/// The steps and what each checks, for `--list`.
pub(crate) fn listing(steps: &[&Step]) -> String {
    let width = steps.iter().map(|s| s.name.len()).max().unwrap_or(0);
    steps.iter().fold(String::new(), |mut text, step| {
        let _ = writeln!(text, "{:width$}  {}", step.name, step.title);
        text
    })
}

/// The table, the skipped tests by name, and the final line.
pub(crate) fn summary(rows: &[Row]) -> String {
    let width = rows.iter().map(|r| r.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for row in rows {
        let (word, note) = match &row.outcome {
            Outcome::Passed(note) => ("passed", note),
            Outcome::Failed(note) => ("FAILED", note),
            Outcome::Skipped(note) => ("SKIPPED", note),
        };
        let line = format!("{:width$}  {word:7}  {:>8}  {note}", row.name, duration(row.time));
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for row in rows.iter().filter(|r| !r.skipped_tests.is_empty()) {
        let _ = writeln!(text, "\nTests of step {} that were SKIPPED:", row.name);
        for (test, reason) in &row.skipped_tests {
            let _ = writeln!(text, "  {test}: {reason}");
        }
    }
    let count = |wanted: fn(&Outcome) -> bool| rows.iter().filter(|r| wanted(&r.outcome)).count();
    let _ = writeln!(
        text,
        "\n{} passed, {} failed, {} skipped",
        count(|o| matches!(o, Outcome::Passed(_))),
        count(|o| matches!(o, Outcome::Failed(_))),
        count(|o| matches!(o, Outcome::Skipped(_))),
    );
    text
}

/// True if no row failed.
pub(crate) fn succeeded(rows: &[Row]) -> bool {
    !rows.iter().any(|r| matches!(r.outcome, Outcome::Failed(_)))
}

/// `1 test`, `2 tests`.
pub(crate) fn count<N: TryInto<u64>>(number: N, what: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// `time` as people read it: `0.4 s`, `3 min 07 s`.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, outcome: Outcome) -> Row {
        Row { name, outcome, time: Duration::from_millis(1240), skipped_tests: vec![] }
    }

    #[test]
    fn the_last_line_counts_steps_and_stands_alone() {
        let rows = [
            row("fmt", Outcome::Passed(String::new())),
            row("unit", Outcome::Failed("2 of 40 tests failed".to_owned())),
            row("fuzz-smoke", Outcome::Skipped("needs cargo-fuzz".to_owned())),
            row("deny", Outcome::Passed(String::new())),
        ];
        let text = summary(&rows);
        assert_eq!(text.lines().last(), Some("2 passed, 1 failed, 1 skipped"));
        assert!(text.contains("fuzz-smoke  SKIPPED     1.2 s  needs cargo-fuzz\n"), "{text}");
        assert!(!succeeded(&rows));
    }

    #[test]
    fn a_skipped_step_is_no_failure_but_is_named() {
        let rows = [row("advisories", Outcome::Skipped("no network".to_owned()))];
        assert!(succeeded(&rows));
        assert!(summary(&rows).contains("advisories  SKIPPED"));
    }

    #[test]
    fn skipped_tests_are_named_with_their_reason() {
        let mut local = row("local", Outcome::Passed("30 tests".to_owned()));
        local.skipped_tests.push(("udp".to_owned(), "iperf3 is not installed".to_owned()));
        let text = summary(&[local]);
        assert!(text.contains("step local that were SKIPPED:\n  udp: iperf3 is not installed\n"));
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(count(1_u64, "test"), "1 test");
        assert_eq!(count(0_usize, "test"), "0 tests");
    }

    #[test]
    fn durations_are_short() {
        assert_eq!(duration(Duration::from_millis(400)), "0.4 s");
        assert_eq!(duration(Duration::from_secs(187)), "3 min 07 s");
    }
}
