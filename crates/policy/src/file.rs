//! Policy files in TOML.
//!
//! ```toml
//! # Fetch packages of the Python Package Index.
//! allow = ["pypi.org:443/tcp", "files.pythonhosted.org:443/tcp"]
//! deny = ["*.ads.example"]
//! strict-sni = true
//! default = "deny"
//! include = ["../common.toml"]
//! ```
//!
//! Every key is optional. Errors name the line and point at the character. This crate opens no file: [`parse`] refuses a text
//! that includes others, and [`parse_part`] returns their names.

use core::ops::Range;

use serde::Deserialize;
use toml::Spanned;

use crate::policy::{PolicySource, RULES_MAX, RuleSource};
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
    #[serde(default)]
    include: Vec<Spanned<String>>,
}

/// Policy of one file, and the files that it includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    pub source: PolicySource,
    /// Names of the files as they are written, with their lines.
    pub includes: Vec<(String, usize)>,
}

/// Defects for which a policy file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    #[error("{file}: {length} bytes; a policy file has at most {FILE_MAX}")]
    Length { file: String, length: usize },
    #[error("{file}: {count} rules; a policy has at most {RULES_MAX}")]
    TooMany { file: String, count: usize },
    #[error("{file}:{line}: only a policy file can include others")]
    Include { file: String, line: usize },
    #[error("{file}: its form allows no change by a program; add the rule to it")]
    Form { file: String },
    #[error("{file}:{line}: {message}")]
    Toml { file: String, line: usize, message: String },
    #[error("{file}:{line}: {error}\n{}", .error.caret(.text))]
    Rule { file: String, line: usize, text: String, error: RuleError },
}

/// Parses a policy file that includes no other. `file` is its name in messages and in the origins of its rules.
///
/// # Errors
///
/// Returns the first error, with its line.
pub fn parse(file: &str, text: &str) -> Result<PolicySource, FileError> {
    let part = parse_part(file, text)?;
    match part.includes.first() {
        None => Ok(part.source),
        Some(&(_, line)) => Err(FileError::Include { file: file.to_owned(), line }),
    }
}

/// Parses a policy file that may include others.
///
/// # Errors
///
/// Returns the first error, with its line.
pub fn parse_part(file: &str, text: &str) -> Result<FilePart, FileError> {
    if text.len() > FILE_MAX {
        return Err(FileError::Length { file: file.to_owned(), length: text.len() });
    }
    let lines = Lines::new(text);
    let document: Document = toml::from_str(text).map_err(|error| FileError::Toml {
        file: file.to_owned(),
        line: lines.number(error.span()),
        message: error.message().to_owned(),
    })?;
    let count = document.allow.len() + document.deny.len();
    if count > RULES_MAX {
        return Err(FileError::TooMany { file: file.to_owned(), count });
    }
    let mut rules = Vec::new();
    let lists = [(Action::Allow, document.allow), (Action::Deny, document.deny)];
    for (action, rule) in lists
        .into_iter()
        .flat_map(|(action, list)| list.into_iter().map(move |rule| (action, rule)))
    {
        let line = lines.number(Some(rule.span()));
        let rule = rule.into_inner();
        if let Err(error) = rule.parse::<Rule>() {
            return Err(FileError::Rule { file: file.to_owned(), line, text: rule, error });
        }
        rules.push(RuleSource { action, text: rule, origin: format!("{file}:{line}") });
    }
    let include = |name: Spanned<String>| {
        let line = lines.number(Some(name.span()));
        (name.into_inner(), line)
    };
    let includes = document.include.into_iter().map(include).collect();
    let (default, strict_sni) = (document.default, document.strict_sni);
    Ok(FilePart { source: PolicySource { rules, default, strict_sni }, includes })
}

/// Offsets of the ends of a text's lines. A look-up does not read the text again.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Lines {
        Lines(
            text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect(),
        )
    }

    /// Returns the number of the line in which a range begins.
    fn number(&self, span: Option<Range<usize>>) -> usize {
        let start = span.map_or(0, |span| span.start);
        1 + self.0.partition_point(|end| *end < start)
    }
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
    fn included_files_are_named_with_their_lines() {
        let text = "include = [\n'a.toml',\n'../b.toml']\nallow = ['a.org']\n";
        let part = parse_part("p.toml", text).unwrap();
        assert_eq!(part.includes, [("a.toml".to_owned(), 2), ("../b.toml".to_owned(), 3)]);
        assert_eq!(part.source.rules.len(), 1);
        let error = parse("p.toml", text).unwrap_err();
        assert_eq!(error, FileError::Include { file: "p.toml".into(), line: 2 });
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

    #[test]
    fn time_grows_with_the_length_of_the_file_and_too_many_rules_are_not_parsed() {
        let file =
            |rules: usize| format!("allow = [\n{}]\n", "'a.example.org:443',\n".repeat(rules));
        // Time of this thread alone, which waits for others do not change.
        let now = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let seconds = |text: &str| {
            let start = now();
            let parsed = parse("p.toml", text);
            let spent = now() - start;
            (parsed, spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9)
        };
        let (few, many) = (file(RULES_MAX / 20), file(RULES_MAX));
        // The shortest of several is the least disturbed one.
        let shortest = |text: &str| (0..5).map(|_| seconds(text).1).fold(f64::MAX, f64::min);
        let (short, long) = (shortest(&few), shortest(&many));
        assert!(long < 80.0 * short, "{long} s for 20 times {short} s");
        let source = parse("p.toml", &many).unwrap();
        assert_eq!(source.rules[RULES_MAX - 1].origin, format!("p.toml:{}", RULES_MAX + 1));

        // The rule is wrong, and is not reached.
        let text = file(150_000).replacen("a.example", "a b", 1);
        let count = 150_000;
        assert_eq!(
            parse("p.toml", &text),
            Err(FileError::TooMany { file: "p.toml".into(), count })
        );
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_panic(text in "(allow|deny|default|=|\\[|\\]|'|\"|a.org|,|\n|\\PC){0,40}") {
            let _ = parse("p.toml", &text);
        }
    }
}
