//! Policy files in TOML.
//!
//! ```toml
//! # Fetch packages of the Python Package Index.
//! allow = ["pypi.org:443/tcp", "files.pythonhosted.org:443/tcp"]
//! deny = ["*.ads.example"]
//! strict-sni = true
//! default = "deny"
//! ```
//!
//! Every key is optional. Errors name the line and point at the character.

use core::ops::Range;

use serde::Deserialize;
use toml::Spanned;

use crate::policy::{PolicySource, RuleSource};
use crate::rule::{Action, Rule, RuleError};

/// Maximum length of a policy file in bytes.
pub const FILE_MAX: usize = 4 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Document {
    #[serde(default)]
    allow: Vec<Spanned<String>>,
    #[serde(default)]
    deny: Vec<Spanned<String>>,
    #[serde(default)]
    strict_sni: bool,
    default: Option<Action>,
}

/// Errors of a policy file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    #[error("{file}: {length} bytes; a policy file has at most {FILE_MAX}")]
    Length { file: String, length: usize },
    #[error("{file}:{line}: {message}")]
    Toml { file: String, line: usize, message: String },
    #[error("{file}:{line}: {error}\n{}", .error.caret(.text))]
    Rule { file: String, line: usize, text: String, error: RuleError },
}

/// Parses a policy file. `file` is its name in messages and in the origins of its rules.
///
/// # Errors
///
/// Returns the first error, with its line.
pub fn parse(file: &str, text: &str) -> Result<PolicySource, FileError> {
    if text.len() > FILE_MAX {
        return Err(FileError::Length { file: file.to_owned(), length: text.len() });
    }
    let document: Document = toml::from_str(text).map_err(|error| FileError::Toml {
        file: file.to_owned(),
        line: line_of(text, error.span()),
        message: error.message().to_owned(),
    })?;
    let mut rules = Vec::new();
    let lists = [(Action::Allow, document.allow), (Action::Deny, document.deny)];
    for (action, rule) in lists
        .into_iter()
        .flat_map(|(action, list)| list.into_iter().map(move |rule| (action, rule)))
    {
        let line = line_of(text, Some(rule.span()));
        let rule = rule.into_inner();
        if let Err(error) = rule.parse::<Rule>() {
            return Err(FileError::Rule { file: file.to_owned(), line, text: rule, error });
        }
        rules.push(RuleSource { action, text: rule, origin: format!("{file}:{line}") });
    }
    Ok(PolicySource { rules, default: document.default, strict_sni: document.strict_sni })
}

/// Returns the number of the line in which a range begins.
fn line_of(text: &str, span: Option<Range<usize>>) -> usize {
    let start = span.map_or(0, |span| span.start.min(text.len()));
    1 + text.as_bytes().iter().take(start).filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rule_of_a_file_has_its_line_as_origin() {
        let text = "# names\nallow = [\n  'a.org:443',\n  \"b.org\",\n]\ndeny = [\"c.org\"]\nstrict-sni = true\n";
        let source = parse("p.toml", text).unwrap();
        let origins: Vec<_> = source.rules.iter().map(|rule| rule.origin.as_str()).collect();
        assert_eq!(origins, ["p.toml:3", "p.toml:4", "p.toml:6"]);
        assert_eq!(source.rules[2].action, Action::Deny);
        assert!(source.strict_sni && source.default.is_none());
        assert_eq!(parse("p.toml", "default = 'deny'").unwrap().default, Some(Action::Deny));
    }

    #[test]
    fn error_in_a_file_names_its_line() {
        let error = parse("p.toml", "allow = [\n'a.org',\n'b.org:x']").unwrap_err();
        assert!(error.to_string().starts_with("p.toml:3: a port is"), "{error}");
        assert!(error.to_string().ends_with("\n  b.org:x\n        ^"), "{error}");
        for (text, line) in [("allow = []\nfoo = 1\n", 2), ("allow = 1\n", 1), ("\n\nallow = [", 3)]
        {
            let error = parse("p.toml", text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("p.toml:{line}: ")), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_panic(text in "(allow|deny|default|=|\\[|\\]|'|\"|a.org|,|\n|\\PC){0,40}") {
            let _ = parse("p.toml", &text);
        }
    }
}
