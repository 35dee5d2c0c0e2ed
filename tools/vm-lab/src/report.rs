//! Report of scenarios: a line for each when it ends. A failed one gets the reasons and the ends of the logs.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use taskkit::text::{count, duration};

use super::results::Tally;
use super::scenario::{Scenario, Set};

/// Number of lines of each log in the report of a failure.
const TAIL: usize = 40;

/// Returns the list of scenarios for `--list`.
pub(crate) fn listing(scenarios: &[Scenario]) -> String {
    let width = scenarios.iter().map(|scenario| scenario.name.len()).max().unwrap_or(0);
    scenarios.iter().fold(String::new(), |mut text, scenario| {
        let set = match scenario.set {
            Set::Core => "core",
            Set::All => "all ",
            Set::Name => "name",
        };
        let _ = writeln!(text, "{:width$}  {set}  {}", scenario.name, scenario.title);
        text
    })
}

/// Returns the line of a scenario that has ended, with reasons and notes.
pub(crate) fn scenario(machine: &str, tally: &Tally, verbose: bool) -> String {
    let failures = tally.failures();
    let word = if failures.is_empty() { "passed" } else { "FAILED" };
    let mut text = format!(
        "[{machine}] {word} {}: {} in {}\n",
        tally.name,
        count(tally.checks(), "check"),
        duration(tally.time)
    );
    for failure in &failures {
        let _ = writeln!(text, "    {failure}");
    }
    for skipped in &tally.skipped {
        let _ = writeln!(text, "    SKIPPED {skipped}");
    }
    if verbose || !failures.is_empty() {
        for note in &tally.notes {
            let _ = writeln!(text, "    # {note}");
        }
    }
    text
}

/// Returns the ends of the logs below `folder`.
pub(crate) fn logs(folder: &Path) -> String {
    let mut files: Vec<_> = walkdir::WalkDir::new(folder)
        .into_iter()
        .filter_map(Result::ok)
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "log"))
        .map(walkdir::DirEntry::into_path)
        .collect();
    files.sort();
    let mut text = String::new();
    for file in files {
        let contents = std::fs::read(&file).unwrap_or_default();
        let contents = String::from_utf8_lossy(&contents);
        // Marks by which guests get their commands are omitted.
        let noise =
            |line: &&str| line.is_empty() || line.starts_with("@begin") || line.starts_with("@end");
        let lines: Vec<&str> =
            contents.lines().map(str::trim_end).filter(|line| !noise(line)).collect();
        let first = lines.len().saturating_sub(TAIL);
        let shown = if first == 0 { String::new() } else { format!(" (its last {TAIL} lines)") };
        let _ = writeln!(text, "---- {}{shown}", file.display());
        for line in &lines[first..] {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

/// Returns the final line with the counts.
pub(crate) fn summary(tallies: &[Tally], time: Duration) -> String {
    let failed = tallies.iter().filter(|tally| !tally.failures().is_empty()).count();
    let checks: u32 = tallies.iter().map(Tally::checks).sum();
    let skipped: usize = tallies.iter().map(|tally| tally.skipped.len()).sum();
    let mut text = format!(
        "{}, {} ({failed} failed) in {}",
        count(tallies.len(), "scenario"),
        count(checks, "check"),
        duration(time)
    );
    if skipped > 0 {
        let _ = write!(text, "; {} SKIPPED", count(skipped, "check"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::read;

    #[test]
    fn failed_scenario_is_reported_with_reasons_and_notes() {
        let mut tally = Tally::new("tcp");
        for line in ["ok a", "# 64 MiB", "not ok b: sums differ", "complete 2", "end tcp 1"] {
            tally.take(&read(line));
        }
        let text = scenario("xen", &tally, false);
        assert!(text.starts_with("[xen] FAILED tcp: 2 checks in "), "{text}");
        assert!(text.contains("    not ok b: sums differ\n"), "{text}");
        assert!(text.contains("    # 64 MiB\n"), "{text}");
        assert!(
            summary(&[tally], Duration::from_secs(3))
                .starts_with("1 scenario, 2 checks (1 failed)")
        );
    }

    #[test]
    fn last_lines_of_logs_are_shown() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..100).map(|i| format!("line {i}\r\n\n")).collect();
        std::fs::write(folder.path().join("console.log"), text).unwrap();
        std::fs::write(folder.path().join("root.cpio"), "no log").unwrap();
        let shown = logs(folder.path());
        assert!(shown.contains("  line 99\n") && shown.contains("  line 60\n"), "{shown}");
        assert!(!shown.contains("line 59") && !shown.contains("no log"), "{shown}");
    }
}
