//! Messages of the launcher: on standard error, and kept for `ringfence logs`.

use std::io::Write;

use rustix::termios::OutputModes;
use tracing::Level;

use super::messages;
use crate::commands::Source;
use ringfence_hostnet::log;
use ringfence_hostnet::text::{printable, printable_lines, wrapped};

/// Amount of messages that the launcher writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loudness {
    /// Only problems.
    Quiet,
    /// Problems, and one line on each result.
    Normal,
    Verbose,
}

/// Writer of messages of one loudness.
#[derive(Clone, Copy, Debug)]
pub struct Reporter {
    loudness: Loudness,
}

impl Reporter {
    /// Creates a reporter with this loudness.
    pub fn new(loudness: Loudness) -> Reporter {
        Reporter { loudness }
    }

    /// Returns `true` if each step is reported.
    pub fn is_verbose(self) -> bool {
        self.loudness == Loudness::Verbose
    }

    /// Sends the log of the crates below, from level `warn` on, where results go. They log what the user should know
    /// of a disk's file, for example.
    pub(super) fn take_log(self) {
        log::to_lines_at(Level::WARN, move |line| self.summary(line));
    }

    /// Reports a problem, at every loudness.
    pub fn problem(self, text: impl std::fmt::Display) {
        self.report(Loudness::Quiet, &text.to_string());
    }

    /// Reports a result, unless quiet.
    pub fn summary(self, text: impl std::fmt::Display) {
        self.report(Loudness::Normal, &text.to_string());
    }

    /// Reports a result, unless quiet. A text that is wider than a terminal takes several lines.
    pub(super) fn summary_in_lines(self, text: &str) {
        in_lines(text).iter().for_each(|line| self.summary(line));
    }

    /// Reports a step, if verbose.
    pub fn step(self, text: impl std::fmt::Display) {
        self.report(Loudness::Verbose, &text.to_string());
    }

    /// Forwards the standard error of another process, if verbose.
    pub(super) fn forward_stderr(self, source: Source, text: &str) {
        for line in text.lines().map(printable) {
            messages::kept().add(source, &line);
            if self.loudness >= Loudness::Verbose {
                print(format_args!("{}: {line}", source.label()));
            }
        }
    }

    /// Keeps the message, and prints it from this loudness on.
    fn report(self, from: Loudness, text: &str) {
        keep(text);
        if self.loudness >= from {
            print(text);
        }
    }
}

/// Keeps a message of the launcher without printing it.
pub(super) fn keep(text: &str) {
    let mut kept = messages::kept();
    for line in text.lines() {
        kept.add(Source::Launcher, &printable(line));
    }
}

/// Prints a message on standard error, without the control characters of what it quotes.
pub(super) fn print(text: impl std::fmt::Display) {
    // The terminal may be gone, which is no reason to stop. One write, so that lines of several
    // processes do not mix.
    let end = if is_raw() { "\r\n" } else { "\n" };
    let line = printable_lines(&format!("ringfence: {text}")) + end;
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns `true` if standard error is a terminal in raw mode, on which a new line does not begin at the left.
fn is_raw() -> bool {
    let modes = rustix::termios::tcgetattr(rustix::stdio::stderr());
    modes.is_ok_and(|modes| !modes.output_modes.contains(OutputModes::OPOST))
}

/// Adds the command that helps to the description of a problem, if AppArmor is the likely cause.
pub(super) fn with_remedy(problem: String) -> String {
    let is_refusal =
        ["Operation not permitted", "Permission denied"].iter().any(|text| problem.contains(text));
    match ringfence_sandbox::namespace_settings::obstacle_to_capabilities() {
        // The refusal of a user namespace names its cause itself.
        Some(obstacle) if is_refusal && !problem.contains(&obstacle.problem) => {
            format!("{problem}; {}", obstacle.sentence())
        }
        _ => problem,
    }
}

/// Divides a text into lines of at most 80 columns, the name of the program included.
fn in_lines(text: &str) -> Vec<String> {
    const COLUMNS: usize = 80 - "ringfence: ".len();
    wrapped(text, COLUMNS, "  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_takes_several_lines_of_a_terminals_width() {
        assert_eq!(in_lines("eth0: 10.0.0.2/16"), ["eth0: 10.0.0.2/16"]);
        let address = "fd00:1111:2222:3333:4444:5555:6666:7777/64,";
        let lines = in_lines(&format!("eth0: {address} {address} MTU 1500"));
        assert_eq!(lines, [format!("eth0: {address}"), format!("  {address} MTU 1500")]);
        for line in in_lines(crate::launch::AS_ROOT) {
            assert!(line.len() + "ringfence: ".len() <= 80, "{line}");
        }
    }

    #[test]
    fn forwarded_line_is_kept_without_control_characters_by_a_quiet_launcher() {
        Reporter::new(Loudness::Quiet).forward_stderr(Source::Uplink, "a\x1b[2J\nb\n");
        let kept = messages::kept().after(0);
        let texts: Vec<&str> = kept
            .iter()
            .filter(|message| message.source == Source::Uplink)
            .map(|message| message.text.as_str())
            .collect();
        assert_eq!(texts, ["a\u{fffd}[2J", "b"]);
    }
}
