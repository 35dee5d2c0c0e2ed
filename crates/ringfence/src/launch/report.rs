//! Messages of the launcher: on standard error, and kept for `ringfence logs`.

use std::io::Write;

use tracing::Level;

use super::messages;
use crate::commands::Source;
use ringfence_hostnet::log;
use ringfence_hostnet::text::printable;

/// Amount of messages that the launcher writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loudness {
    /// Only problems.
    Quiet,
    /// Problems, and one line on each result.
    Normal,
    /// Each step.
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

    /// Reports a step, if verbose.
    pub fn step(self, text: impl std::fmt::Display) {
        self.report(Loudness::Verbose, &text.to_string());
    }

    /// Forwards what another process wrote to its standard error, if verbose.
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

/// Prints a message on standard error.
pub(super) fn print(text: impl std::fmt::Display) {
    // The terminal may be gone, which is no reason to stop. One write, so that lines of several
    // processes do not mix.
    let line = format!("ringfence: {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

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
