//! Report of a test run: the list of steps, the table of results, and the final line.

use std::fmt::Write as _;
use std::time::Duration;

use taskkit::text::duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The step found nothing wrong. The note has the number of tests, or other information.
    Passed(String),
    /// The step found an error, or could not run for a reason in the checkout.
    Failed(String),
    /// The step could not run on this machine. The note has the missing programs and the way to install them.
    Skipped(String),
}

/// Row of the table of results.
pub(crate) struct Row {
    /// Name of the step, with that of the part in the long set.
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) time: Duration,
    /// Name and reason of each test in the step that skipped itself.
    pub(crate) skipped_tests: Vec<(String, String)>,
    /// Name of each failed test in the step, and the first line of its panic.
    pub(crate) failed_tests: Vec<(String, String)>,
}

/// Returns names and descriptions of steps, for `--list`.
pub(crate) fn listing(steps: &[(String, String)]) -> String {
    let width = steps.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    steps.iter().fold(String::new(), |mut text, (name, title)| {
        let _ = writeln!(text, "{name:width$}  {title}");
        text
    })
}

/// Returns the table of results, the names of skipped tests, and the final line.
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
    for row in rows {
        list(&mut text, &row.name, "were SKIPPED", &row.skipped_tests);
    }
    for row in rows {
        list(&mut text, &row.name, "FAILED", &row.failed_tests);
    }
    let count = |wanted: fn(&Outcome) -> bool| rows.iter().filter(|r| wanted(&r.outcome)).count();
    let _ = writeln!(
        text,
        "\n{} passed, {} failed, {} skipped",
        count(|o| matches!(o, Outcome::Passed(_))),
        count(|o| matches!(o, Outcome::Failed(_))),
        count(|o| matches!(o, Outcome::Skipped(_))),
    );
    text += &skips(rows);
    text
}

/// Returns a sentence about everything that was skipped, or an empty text.
fn skips(rows: &[Row]) -> String {
    let steps: Vec<&str> = rows
        .iter()
        .filter(|row| matches!(row.outcome, Outcome::Skipped(_)))
        .map(|row| row.name.as_str())
        .collect();
    let tests: usize = rows.iter().map(|row| row.skipped_tests.len()).sum();
    let tests = taskkit::text::count(tests, "test");
    match (steps.is_empty(), tests == "0 tests") {
        (true, true) => String::new(),
        (true, false) => format!("This machine could not run {tests}; the list above says why.\n"),
        (false, true) => format!("This machine could not run {}.\n", steps.join(", ")),
        (false, false) => format!(
            "This machine could not run {}, and {tests} of other steps; the list above says why.\n",
            steps.join(", ")
        ),
    }
}

/// Returns the list of the slowest tests.
pub(crate) fn durations(tests: &[(String, Duration)]) -> String {
    let mut text = "The slowest tests:\n".to_owned();
    for (name, time) in tests {
        let _ = writeln!(text, "{:>12}  {name}", duration(*time));
    }
    text.push('\n');
    text
}

/// Returns the list of link times. `programs` is the number of all test programs.
pub(crate) fn link_times(times: &[(String, Duration)], programs: usize) -> String {
    let mut text = "Link times of test programs:\n".to_owned();
    for (name, time) in times {
        let _ = writeln!(text, "{:>12}  {name}", duration(*time));
    }
    let sum: Duration = times.iter().map(|(_, time)| *time).sum();
    let _ = writeln!(
        text,
        "{:>12}  {} of {programs} test programs; the others were linked before this run\n",
        duration(sum),
        times.len()
    );
    text
}

/// Appends names and reasons of a step's tests that `did` something. An empty list appends nothing.
fn list(text: &mut String, step: &str, did: &str, tests: &[(String, String)]) {
    if !tests.is_empty() {
        let _ = writeln!(text, "\nTests of step {step} that {did}:");
    }
    for (test, reason) in tests {
        let _ = writeln!(text, "  {test}: {reason}");
    }
}

/// Returns the exit status: 1 after a failure, 2 if something was skipped although nothing may be, 0 otherwise.
pub(crate) fn status(rows: &[Row], no_skips: bool) -> u8 {
    let failed = rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)));
    let is_skip =
        |row: &Row| matches!(row.outcome, Outcome::Skipped(_)) || !row.skipped_tests.is_empty();
    match failed {
        true => 1,
        false if no_skips && rows.iter().any(is_skip) => 2,
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, outcome: Outcome) -> Row {
        Row {
            name: name.to_owned(),
            outcome,
            time: Duration::from_millis(1240),
            skipped_tests: vec![],
            failed_tests: vec![],
        }
    }

    #[test]
    fn summary_ends_with_counts_of_steps() {
        let rows = [
            row("fmt", Outcome::Passed(String::new())),
            row("unit", Outcome::Failed("2 of 40 tests failed".to_owned())),
            row("fuzz-smoke", Outcome::Skipped("needs cargo-fuzz".to_owned())),
            row("deny", Outcome::Passed(String::new())),
        ];
        let text = summary(&rows);
        assert!(text.contains("\n2 passed, 1 failed, 1 skipped\n"), "{text}");
        assert!(text.ends_with("This machine could not run fuzz-smoke.\n"), "{text}");
        assert!(text.contains("fuzz-smoke  SKIPPED     1.2 s  needs cargo-fuzz\n"), "{text}");
        assert_eq!((status(&rows, false), status(&rows, true)), (1, 1));
    }

    #[test]
    fn skipped_step_is_named_and_is_no_failure() {
        let rows = [row("advisories", Outcome::Skipped("no network".to_owned()))];
        assert_eq!((status(&rows, false), status(&rows, true)), (0, 2));
        assert!(summary(&rows).contains("advisories  SKIPPED"));
    }

    #[test]
    fn skipped_tests_are_listed_with_reason() {
        let mut local = row("local", Outcome::Passed("30 tests".to_owned()));
        local.skipped_tests.push(("udp".to_owned(), "iperf3 is not installed".to_owned()));
        let text = summary(&[local]);
        assert!(text.contains("step local that were SKIPPED:\n  udp: iperf3 is not installed\n"));
        assert!(
            text.ends_with("This machine could not run 1 test; the list above says why.\n"),
            "{text}"
        );
    }

    #[test]
    fn failed_tests_are_listed_with_message_before_final_line() {
        let mut unit = row("unit", Outcome::Failed("1 of 2 tests".to_owned()));
        unit.failed_tests.push(("sum".to_owned(), "2 is not 3".to_owned()));
        let text = summary(&[unit]);
        assert!(text.contains("step unit that FAILED:\n  sum: 2 is not 3\n\n0 passed"), "{text}");
    }
}
