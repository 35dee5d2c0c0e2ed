//! Finding: the report of one violation of a rule.

use std::fmt;

/// Violation of a rule, with its position.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(super) path: String,
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

impl Finding {
    /// Returns a finding at a line, counted from 1.
    pub(super) fn at(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: Some(line), message: message.into() }
    }

    /// Returns a finding about a whole file.
    pub(super) fn file(path: &str, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: None, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}
