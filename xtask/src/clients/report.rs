//! Report of the scenarios: a line for each, and a table with the versions at the end.

use std::fmt::Write as _;
use std::time::Duration;

use taskkit::text::{count, duration};
use vm_lab::results::Tally;

use super::system::Peer;

/// Scenario of a client, with the results of each program called `pasta`.
pub(super) struct Row {
    pub(super) client: String,
    pub(super) scenario: String,
    pub(super) tallies: Vec<(Peer, Tally)>,
}

/// Returns the line of a scenario that has ended, with the reasons of a failure and skipped checks.
pub(super) fn scenario(client: &str, peer: Peer, tally: &Tally) -> String {
    let failures = tally.failures();
    let word = if failures.is_empty() { "passed" } else { "FAILED" };
    let checks = count(tally.checks(), "check");
    let time = duration(tally.time);
    let mut text =
        format!("[{}] {word} {client} {}: {checks} in {time}\n", peer.name(), tally.name);
    for failure in &failures {
        let _ = writeln!(text, "    {failure}");
    }
    for skipped in &tally.skipped {
        let _ = writeln!(text, "    SKIPPED {skipped}");
    }
    text
}

/// Returns the table of all results.
pub(super) fn table(rows: &[Row], versions: &[String], time: Duration) -> String {
    let mut text = String::new();
    for version in versions {
        let _ = writeln!(text, "{version}");
    }
    let _ =
        writeln!(text, "\n| client | scenario | `pasta` of | checks passed |\n|---|---|---|---|");
    for row in rows {
        for (peer, tally) in &row.tallies {
            let passed = format!("{} of {}", tally.ok, tally.checks());
            let skipped = tally.skipped.len();
            let skipped = if skipped == 0 { String::new() } else { format!(", {skipped} SKIPPED") };
            let is_complete = tally.failures().is_empty();
            let note = if is_complete { "" } else { ", FAILED" };
            let (client, scenario) = (&row.client, &row.scenario);
            let _ = writeln!(
                text,
                "| {client} | {scenario} | {} | {passed}{skipped}{note} |",
                peer.name()
            );
        }
    }
    let _ = write!(text, "\n{} in {}", count(rows.len(), "scenario"), duration(time));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_lab::results::read;

    #[test]
    fn table_shows_both_programs_and_failures() {
        let tally = |text: &str| {
            let mut tally = Tally::new("run");
            text.lines().for_each(|line| tally.take(&read(line)));
            tally
        };
        let good = tally("ok a\nskip b: none\ncomplete 2\nend run 0");
        let bad = tally("ok a\nnot ok b: no answer\ncomplete 2\nend run 0");
        let line = scenario("podman", Peer::Debian, &bad);
        assert!(line.starts_with("[debian] FAILED podman run: 2 checks in "), "{line}");
        assert!(line.contains("    not ok b: no answer\n"), "{line}");
        let tallies = vec![(Peer::Ringfence, good), (Peer::Debian, bad)];
        let row = Row { client: "podman".to_owned(), scenario: "run".to_owned(), tallies };
        let text = table(&[row], &["podman 5".to_owned()], Duration::from_secs(3));
        assert!(text.starts_with("podman 5\n"), "{text}");
        assert!(text.contains("| podman | run | ringfence | 1 of 1, 1 SKIPPED |"), "{text}");
        assert!(text.contains("| podman | run | debian | 1 of 2, FAILED |"), "{text}");
    }
}
