//! Results of a machine: the lines on its second serial port, and the outcome of each scenario.
//!
//! `vm/lib/run.sh` and `vm/lib/checks.sh` write these lines:
//!
//! | line | meaning |
//! |---|---|
//! | `up SECONDS` | the machine can run scenarios |
//! | `begin NAME` | a scenario starts |
//! | `ok LABEL`, `not ok LABEL: WHY`, `skip LABEL: WHY` | a check |
//! | `# TEXT` | a note |
//! | `complete N` | the scenario has run to its end and made N checks |
//! | `left TEXT` | a resource that a destroyed domain did not release |
//! | `end NAME STATUS` | the scenario's script has ended with this exit status |
//! | `down` | all scenarios have ended; the machine powers off |
//!
//! A scenario has passed if its script made a check, ran to `complete` and exited with status 0, no check failed, and
//! the harness read a line of each. So a crash at any point fails the running scenario.

use std::time::Duration;

/// Parsed line of the results.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// `up`.
    Up,
    /// `begin NAME`.
    Begin(String),
    /// `ok LABEL`.
    Ok(String),
    /// `not ok LABEL: WHY`.
    NotOk(String),
    /// `skip LABEL: WHY`.
    Skip(String),
    /// `# TEXT`.
    Note(String),
    /// `complete N`.
    Complete(u32),
    /// `left TEXT`.
    Left(String),
    /// `end NAME STATUS`.
    End(String, i32),
    /// `down`.
    Down,
    /// Line in another form.
    Other(String),
}

/// Parses one line of the results.
pub fn read(line: &str) -> Line {
    let line = line.trim();
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    let text = rest.to_owned();
    let understood = match word {
        "up" => Some(Line::Up),
        "begin" => Some(Line::Begin(text)),
        "ok" => Some(Line::Ok(text)),
        "not" => rest.strip_prefix("ok ").map(|text| Line::NotOk(text.to_owned())),
        "skip" => Some(Line::Skip(text)),
        "#" => Some(Line::Note(text)),
        "complete" => rest.parse().ok().map(Line::Complete),
        "left" => Some(Line::Left(text)),
        "end" => rest
            .split_once(' ')
            .and_then(|(name, status)| Some(Line::End(name.to_owned(), status.parse().ok()?))),
        "down" => Some(Line::Down),
        _ => None,
    };
    understood.unwrap_or_else(|| Line::Other(line.to_owned()))
}

/// Results of one scenario.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally {
    pub name: String,
    /// Number of passed checks.
    pub ok: u32,
    /// Failed checks with their reasons.
    pub bad: Vec<String>,
    /// Skipped checks with their reasons.
    pub skipped: Vec<String>,
    /// Resources that domains destroyed after the scenario did not release.
    left: Vec<String>,
    /// Notes and other lines of the scenario.
    pub notes: Vec<String>,
    /// Time from its `begin` to its `end`.
    pub time: Duration,
    /// Number of checks by the scenario's own count, once it has run to its end.
    complete: Option<u32>,
    status: Option<i32>,
    /// Reason for an end that the script did not cause.
    broken: Option<String>,
}

impl Tally {
    /// Creates the results of a scenario without lines.
    pub fn new(name: &str) -> Tally {
        Tally { name: name.to_owned(), ..Tally::default() }
    }

    /// Adds a line between `begin` and `end`, or the `end`.
    pub fn take(&mut self, line: &Line) {
        match line {
            Line::Ok(_) => self.ok += 1,
            Line::NotOk(what) => self.bad.push(what.clone()),
            Line::Skip(what) => self.skipped.push(what.clone()),
            Line::Complete(count) => self.complete = Some(*count),
            Line::Left(text) => self.left.push(text.clone()),
            Line::Note(text) | Line::Other(text) => self.notes.push(text.clone()),
            Line::End(_, status) => self.status = Some(*status),
            Line::Up | Line::Down | Line::Begin(_) => {}
        }
    }

    /// Adds complaints of the hypervisor during the scenario.
    pub fn complain(&mut self, lines: &[String]) {
        if let Some(first) = lines.first() {
            self.broken = Some(format!("{} bad grants are logged, as in `{first}`", lines.len()));
        }
    }

    /// Records that the machine ended before the scenario.
    pub fn break_off(&mut self, why: impl Into<String>) {
        self.broken = Some(why.into());
    }

    /// Returns every reason for which the scenario has not passed; none if it has.
    pub fn failures(&self) -> Vec<String> {
        let mut reasons: Vec<String> =
            self.bad.iter().map(|what| format!("not ok {what}")).collect();
        reasons.extend(self.left.iter().map(|what| format!("destroyed, and this is left {what}")));
        if let Some(why) = &self.broken {
            reasons.push(why.clone());
            return reasons;
        }
        let arrived = self.ok + count(&self.bad) + count(&self.skipped);
        match self.complete {
            None => reasons.push("its script did not run to its end marker".to_owned()),
            Some(0) => reasons.push("it made no check".to_owned()),
            Some(made) if made != arrived => {
                reasons.push(format!("{arrived} of its {made} checks arrived"));
            }
            Some(_) => {}
        }
        match self.status {
            Some(0) => {}
            Some(status) => reasons.push(format!("its script ended with status {status}")),
            None => reasons.push("its script did not end".to_owned()),
        }
        reasons
    }

    /// Returns the number of checks, skipped ones included.
    pub fn checks(&self) -> u32 {
        self.ok + count(&self.bad)
    }
}

fn count(list: &[String]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Tally {
        let mut tally = Tally::new("t");
        text.lines().for_each(|line| tally.take(&read(line)));
        tally
    }

    #[test]
    fn complete_scenario_with_status_0_passes() {
        let tally = tally("ok a\n# well\nok b\nskip c: no debug build\ncomplete 3\nend t 0\n");
        assert_eq!(tally.failures(), Vec::<String>::new());
        assert_eq!((tally.ok, tally.checks(), tally.skipped.len()), (2, 2, 1));
        assert_eq!(tally.notes, ["well"]);
    }

    #[test]
    fn scenario_with_failed_check_wrong_count_or_missing_marker_fails() {
        for (text, why) in [
            ("not ok a: 1 is not 2\ncomplete 1\nend t 0", "not ok a: 1 is not 2"),
            ("ok a\ncomplete 2\nend t 0", "1 of its 2 checks arrived"),
            ("ok a\ncomplete 1\nok b\nend t 0", "2 of its 1 checks arrived"),
            ("ok a\nend t 0", "its script did not run to its end marker"),
            ("ok a\ncomplete\nend t 0", "its script did not run to its end marker"),
            ("complete 0\nend t 0", "it made no check"),
            ("ok a\ncomplete 1\nend t 137", "its script ended with status 137"),
            ("ok a\ncomplete 1\n", "its script did not end"),
            ("ok a\ncomplete 1\nend t\n", "its script did not end"),
            (
                "ok a\ncomplete 1\nleft of domain 3: [0x007]\nend t 0",
                "destroyed, and this is left of domain 3: [0x007]",
            ),
        ] {
            assert_eq!(tally(text).failures(), [why], "{text}");
        }
    }

    #[test]
    fn end_of_machine_fails_running_scenario() {
        let mut tally = tally("ok a\n");
        tally.break_off("the machine was switched off after 60 s");
        assert_eq!(tally.failures(), ["the machine was switched off after 60 s"]);
    }

    #[test]
    fn malformed_line_is_kept_as_text() {
        assert_eq!(read("not even"), Line::Other("not even".to_owned()));
        assert_eq!(read("end x y"), Line::Other("end x y".to_owned()));
        assert_eq!(read("ok a\r\n"), Line::Ok("a".to_owned()));
    }
}
