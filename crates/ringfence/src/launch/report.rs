//! Messages of the launcher on standard error.

use std::io::Write;

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

    /// Reports a problem, at every loudness.
    pub fn problem(self, text: impl std::fmt::Display) {
        self.line(text);
    }

    /// Reports a result, unless quiet.
    pub fn summary(self, text: impl std::fmt::Display) {
        if self.loudness >= Loudness::Normal {
            self.line(text);
        }
    }

    /// Reports a step, if verbose.
    pub fn step(self, text: impl std::fmt::Display) {
        if self.loudness >= Loudness::Verbose {
            self.line(text);
        }
    }

    /// Forwards what another process wrote to its standard error.
    pub fn relay(self, who: &str, text: &str) {
        if self.loudness >= Loudness::Verbose {
            for line in text.lines() {
                self.line(format_args!("{who}: {}", printable(line)));
            }
        }
    }

    fn line(self, text: impl std::fmt::Display) {
        // The terminal may be gone, which is no reason to stop. One write, so that lines of several
        // processes do not mix.
        let line = format!("ringfence: {text}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// Returns the last line of a stderr tail, safe for a message.
pub(crate) fn last_line(tail: &str) -> Option<String> {
    tail.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(printable)
}

/// Replaces control characters, which could act on a terminal: the process may be compromised.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(500).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_stderr_tail_are_replaced() {
        assert_eq!(last_line("a\n\x1b[2Jb\n\n"), Some("\u{fffd}[2Jb".into()));
        assert_eq!(last_line(" \n"), None);
    }
}
