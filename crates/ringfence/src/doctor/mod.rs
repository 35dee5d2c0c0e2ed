//! `ringfence doctor`: prerequisites of the host, their states, and the commands that provide what is missing.
//!
//! The rows are the table of prerequisites ([`ringfence_sys::prerequisite::ALL`]), from which other commands take the sentences of their
//! errors. `checks` has a function for each row. It examines the object in the way in which the other commands use it: it
//! opens the device, makes the namespaces in a child process, sets up a ring of io_uring, starts a guest.

mod checks;
mod trial;

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use ringfence_base::json::escape_controls;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::text::{printable, wrapped};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::namespace_settings;
use ringfence_sys::prerequisite::{Prerequisite, TITLE_MAX};
use serde::Serialize;

/// Exit status if `ringfence run` does not work here.
const STATUS_NO_GUESTS: u8 = 1;
/// Width of the table in characters.
const COLUMNS: usize = 80;

const NOTES: &str = "\
Examples:
  A line for each prerequisite; what is missing also has the command that provides it:
    ringfence doctor

  The command that permits `ping`, if there is need of one:
    ringfence doctor --json | jq -r '.checks[] | select(.name == \"ping\") | .enable'

States:
  ok        it can be used
  limited   it can be used in part
  missing   it cannot be used
  n/a       this system does not run on Xen

Exit status:
  0 if `ringfence run` works here, 1 if it does not; 125 if the result cannot be printed, 2 for
  errors of usage.";

/// Show what this host allows, what works without the rest, and the commands that enable it
///
/// Examines the host as the calling user, and changes nothing. A guest is started for a moment, with `true` as its
/// command.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct DoctorArgs {
    /// Print a JSON object: `run` (true if it works), `checks`, and the kernel's settings on namespaces
    #[arg(long)]
    pub json: bool,
}

/// State of a prerequisite. Its name is part of the command's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum State {
    #[serde(rename = "ok")]
    Usable,
    #[serde(rename = "limited")]
    Limited,
    #[serde(rename = "missing")]
    Missing,
    /// A system without the hypervisor has no use for it.
    #[serde(rename = "n/a")]
    NotApplicable,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Usable => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
            State::NotApplicable => "n/a",
        }
    }

    fn is_deficient(self) -> bool {
        matches!(self, State::Limited | State::Missing)
    }
}

/// Result of examining one object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    state: State,
    /// State in words, with numbers.
    found: String,
    /// Remedy, unless it is that of the table.
    remedy: Option<String>,
}

impl Finding {
    fn new(state: State, found: impl Into<String>) -> Finding {
        Finding { state, found: found.into(), remedy: None }
    }

    fn usable(found: impl Into<String>) -> Finding {
        Finding::new(State::Usable, found)
    }

    fn limited(found: impl Into<String>) -> Finding {
        Finding::new(State::Limited, found)
    }

    fn missing(found: impl Into<String>) -> Finding {
        Finding::new(State::Missing, found)
    }

    fn with_remedy(self, remedy: impl Into<String>) -> Finding {
        Finding { remedy: Some(remedy.into()), ..self }
    }
}

/// Row of the table. Field names are part of the command's interface.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    title: &'static str,
    state: State,
    /// Set if `ringfence run` needs it.
    required: bool,
    found: String,
    without: &'static str,
    /// Command that provides it, if something is missing.
    enable: Option<String>,
}

impl Row {
    fn of(entry: &'static Prerequisite, finding: Finding) -> Row {
        let Finding { state, found, remedy } = finding;
        Row {
            name: entry.name,
            title: entry.title,
            state,
            required: entry.is_required,
            found: printable(&found),
            without: entry.without,
            enable: state.is_deficient().then(|| remedy.unwrap_or_else(|| entry.enable.to_owned())),
        }
    }
}

/// Report on the host. Field names are part of the command's interface.
#[derive(Debug, Serialize)]
struct Report {
    /// Set if `ringfence run` works.
    run: bool,
    checks: Vec<Row>,
    /// Settings of the kernel on namespaces, with their values.
    settings: BTreeMap<&'static str, String>,
}

impl Report {
    /// Examines the host, one prerequisite after the other.
    fn of_host() -> Report {
        let mut checks: Vec<Row> = Vec::new();
        for (entry, check) in checks::ALL {
            checks.push(Row::of(entry, check(&checks)));
        }
        Report {
            run: checks.iter().all(|row| !row.required || row.state == State::Usable),
            checks,
            settings: namespace_settings::settings().into_iter().collect(),
        }
    }

    /// Formats the table. A row with a deficiency has lines for the rest and for the remedy.
    fn table(&self) -> String {
        let mut lines = vec![format!("{:<8}{:<TITLE_MAX$}  FOUND", "STATE", "PREREQUISITE")];
        for row in &self.checks {
            let Row { title, state, found, without, enable, .. } = row;
            let indent = " ".repeat(8 + TITLE_MAX + 2);
            let head = format!("{:<8}{title:<TITLE_MAX$}  {found}", state.name());
            lines.extend(wrapped(&head, COLUMNS, &indent));
            if let Some(remedy) = enable {
                lines.extend(wrapped(
                    &format!("          works: {without}"),
                    COLUMNS,
                    &" ".repeat(17),
                ));
                lines.extend(wrapped(
                    &format!("          enable: {remedy}"),
                    COLUMNS,
                    &" ".repeat(18),
                ));
            }
        }
        let missing = self.checks.iter().filter(|row| row.required && row.state != State::Usable);
        let missing: Vec<&str> = missing.map(|row| row.title).collect();
        let verdict = match self.run {
            true => "`ringfence run` works here.".to_owned(),
            false => format!("`ringfence run` does not work here: {}.", missing.join(", ")),
        };
        lines.extend(wrapped(&verdict, COLUMNS, ""));
        lines.join("\n") + "\n"
    }
}

/// Examines the host and prints the report. Returns the exit status.
pub fn main(args: &DoctorArgs) -> u8 {
    match print(args) {
        Ok(true) => 0,
        Ok(false) => STATUS_NO_GUESTS,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: doctor: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

/// Prints the report. Returns `false` if `ringfence run` does not work.
fn print(args: &DoctorArgs) -> anyhow::Result<bool> {
    let report = Report::of_host();
    let text = if args.json {
        format!("{}\n", escape_controls(serde_json::to_string_pretty(&report)?))
    } else {
        report.table()
    };
    Out.write_all(text.as_bytes())?;
    Ok(report.run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_sys::prerequisite;

    #[test]
    fn every_prerequisite_has_its_check_in_the_order_of_the_table() {
        let checked: Vec<&str> = checks::ALL.iter().map(|(entry, _)| entry.name).collect();
        let listed: Vec<&str> = prerequisite::ALL.iter().map(|entry| entry.name).collect();
        assert_eq!(checked, listed);
    }

    #[test]
    fn table_with_every_deficiency_fits_a_terminal() {
        let rows = prerequisite::ALL.iter().map(|entry| {
            let found = "/sys/module/xen_netback exists, and the rest of this line is long as well";
            Row::of(entry, Finding::missing(found))
        });
        let report = Report { run: false, checks: rows.collect(), settings: BTreeMap::new() };
        let table = report.table();
        for line in table.lines() {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        for entry in prerequisite::ALL {
            assert!(table.contains(&format!("missing {}", entry.title)), "{}", entry.title);
        }
        let verdict = "does not work here: user namespaces, TAP devices, a guest starts.";
        assert!(table.replace('\n', " ").contains(verdict), "{table}");
    }

    #[test]
    fn row_without_deficiency_has_no_remedy() {
        let row = Row::of(&prerequisite::NBD, Finding::usable("/dev/nbd0"));
        assert_eq!((row.enable, row.state.name()), (None, "ok"));
        let row = Row::of(&prerequisite::NBD, Finding::missing("a").with_remedy("b"));
        assert_eq!(row.enable.as_deref(), Some("b"));
        let row = Row::of(&prerequisite::NBD, Finding::missing("a\u{1b}[2J"));
        assert_eq!(row.found, "a\u{fffd}[2J");
        assert_eq!(row.enable.as_deref(), Some(prerequisite::NBD.enable));
    }
}
