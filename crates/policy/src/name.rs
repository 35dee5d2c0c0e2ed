//! Host names: validated, in lower case, without a final dot.

use core::fmt;
use std::sync::Arc;

/// Maximum length of a name in bytes, as text (RFC 1035, 2.3.4).
pub const NAME_MAX: usize = 253;
/// Maximum length of a label in bytes.
pub const LABEL_MAX: usize = 63;

/// Host name in lower case. Labels consist of letters, digits, `-` and `_`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

/// Reasons for which a text is no host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    #[error("a name is expected here")]
    Empty,
    #[error("an empty label: two dots in a row, or a dot at the beginning")]
    EmptyLabel,
    #[error("a label has at most {LABEL_MAX} characters")]
    LabelLength,
    #[error("a name has at most {NAME_MAX} characters")]
    Length,
    #[error("`{0}` is not allowed in a name: letters, digits, `-` and `_` are")]
    Character(char),
    #[error("the last label of a name is no number")]
    Number,
}

/// Error of a text that is no host name, with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault}")]
pub struct NameError {
    /// Offset of the first wrong character, in bytes.
    pub at: usize,
    /// Rule that the text breaks.
    pub fault: NameFault,
}

impl HostName {
    /// Parses a name in any case, with or without a final dot.
    ///
    /// # Errors
    ///
    /// Returns [`NameError`] with the position of the first wrong character.
    pub fn parse(text: &str) -> Result<HostName, NameError> {
        let error = |at, fault| Err(NameError { at, fault });
        let bare = text.strip_suffix('.').unwrap_or(text);
        if bare.is_empty() {
            return error(0, NameFault::Empty);
        }
        let mut at = 0;
        let mut last = bare;
        for label in bare.split('.') {
            if label.is_empty() {
                return error(at, NameFault::EmptyLabel);
            }
            let is_wrong = |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_';
            if let Some((offset, wrong)) = label.char_indices().find(|(_, c)| is_wrong(*c)) {
                return error(at + offset, NameFault::Character(wrong));
            }
            if label.len() > LABEL_MAX {
                return error(at + LABEL_MAX, NameFault::LabelLength);
            }
            at += label.len() + 1;
            last = label;
        }
        if bare.len() > NAME_MAX {
            return error(NAME_MAX, NameFault::Length);
        }
        if last.bytes().all(|byte| byte.is_ascii_digit()) {
            return error(bare.len() - last.len(), NameFault::Number);
        }
        Ok(HostName(bare.to_ascii_lowercase().into()))
    }

    /// Builds a name from the labels of a DNS message. Returns `None` if no rule can name it.
    pub fn from_labels<'a>(labels: impl Iterator<Item = &'a [u8]>) -> Option<HostName> {
        let mut text = String::new();
        for label in labels {
            if !text.is_empty() {
                text.push('.');
            }
            // A dot inside a label would read as two labels.
            if label.contains(&b'.') {
                return None;
            }
            text.push_str(core::str::from_utf8(label).ok()?);
        }
        if text.ends_with('.') {
            return None;
        }
        HostName::parse(&text).ok()
    }

    /// Returns the name as text, without a final dot.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Iterates over the domains above this name, the nearest one first.
    pub fn parents(&self) -> impl Iterator<Item = &str> {
        self.0.match_indices('.').filter_map(|(at, _)| self.0.get(at + 1..))
    }

    /// Returns `true` if this name lies below `parent`.
    pub fn is_below(&self, parent: &HostName) -> bool {
        self.0.strip_suffix(&*parent.0).is_some_and(|rest| rest.ends_with('.'))
    }
}

impl core::borrow::Borrow<str> for HostName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn name_in_any_case_becomes_lower_case() {
        assert_eq!(HostName::parse("PyPI.org.").unwrap().as_str(), "pypi.org");
        assert_eq!(HostName::parse("_acme.a-b.io").unwrap().as_str(), "_acme.a-b.io");
    }

    #[test]
    fn wrong_name_is_rejected_at_its_position() {
        let at = |text: &str| HostName::parse(text).map_err(|error| error.at);
        for (text, position) in [
            ("", 0),
            (".", 0),
            ("a..b", 2),
            (".a", 0),
            ("exa mple.org", 3),
            ("example.org/x", 11),
            ("a.é", 2),
            ("10.0.0.300", 7),
            ("*.example.org", 0),
        ] {
            assert_eq!(at(text), Err(position), "{text}");
        }
        assert_eq!(at(&format!("a.{}", "b".repeat(64))), Err(2 + 63));
        assert_eq!(at(&["abcdefg"; 40].join(".")), Err(NAME_MAX));
    }

    #[test]
    fn dot_inside_a_label_of_a_message_is_no_separator() {
        let name = |labels: &[&str]| HostName::from_labels(labels.iter().map(|l| l.as_bytes()));
        assert_eq!(name(&["WWW", "example", "org"]).unwrap().as_str(), "www.example.org");
        assert_eq!(name(&["evil.example", "org"]), None);
        assert_eq!(name(&["example", "org."]), None);
        assert_eq!(name(&["a b", "org"]), None);
        assert_eq!(name(&[]), None);
    }

    #[test]
    fn name_is_below_its_parents_only() {
        let name = |text| HostName::parse(text).unwrap();
        assert!(name("a.b.example.org").is_below(&name("example.org")));
        assert!(!name("example.org").is_below(&name("example.org")));
        assert!(!name("badexample.org").is_below(&name("example.org")));
        assert_eq!(name("a.b.c").parents().collect::<Vec<_>>(), ["b.c", "c"]);
    }

    proptest! {
        #[test]
        fn parsed_name_parses_to_itself(text in "[a-zA-Z0-9_.-]{1,80}") {
            if let Ok(name) = HostName::parse(&text) {
                prop_assert_eq!(HostName::parse(name.as_str()).unwrap(), name);
            }
        }

        #[test]
        fn position_of_an_error_lies_in_the_text(text in "\\PC{0,300}") {
            if let Err(error) = HostName::parse(&text) {
                prop_assert!(error.at <= text.len() && text.is_char_boundary(error.at));
            }
        }
    }
}
