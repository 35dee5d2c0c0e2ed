//! What the launcher says, on standard error.

use std::io::Write;

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loudness {
    /// Problems alone.
    Quiet,
    /// One line on what was done, too.
    Normal,
    /// Each step.
    Verbose,
}

/// Says things on standard error.
#[derive(Clone, Copy, Debug)]
pub struct Reporter {
    loudness: Loudness,
}

impl Reporter {
    /// One that says so much.
    pub fn new(loudness: Loudness) -> Reporter {
        Reporter { loudness }
    }

    /// Whether each step is explained.
    pub fn is_verbose(self) -> bool {
        self.loudness == Loudness::Verbose
    }

    /// Something went wrong.
    pub fn problem(self, text: impl std::fmt::Display) {
        self.line(text);
    }

    /// What was done.
    pub fn summary(self, text: impl std::fmt::Display) {
        if self.loudness >= Loudness::Normal {
            self.line(text);
        }
    }

    /// A step on the way.
    pub fn step(self, text: impl std::fmt::Display) {
        if self.loudness >= Loudness::Verbose {
            self.line(text);
        }
    }

    /// What a process of ours wrote to its standard error.
    pub fn relay(self, who: &str, text: &str) {
        if self.loudness >= Loudness::Verbose {
            for line in text.lines() {
                self.line(format_args!("{who}: {}", printable(line)));
            }
        }
    }

    fn line(self, text: impl std::fmt::Display) {
        // The terminal may be gone; that is not a reason to stop. One write, so that lines of
        // several processes do not mix.
        let line = format!("ringfence: {text}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// The end of what a process said last, fit to be shown in a message.
pub(crate) fn last_line(words: &str) -> Option<String> {
    words.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(printable)
}

/// Takes out what could act on a terminal: a process of ours may have been taken over.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(500).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_cannot_act_on_the_terminal() {
        assert_eq!(last_line("a\n\x1b[2Jb\n\n"), Some("\u{fffd}[2Jb".into()));
        assert_eq!(last_line(" \n"), None);
    }
}
