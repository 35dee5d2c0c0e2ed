//! Changes of policy files: adds a rule to the text of one, and leaves everything else as it is.

use serde::Deserialize;
use toml::Spanned;

use crate::file::{FileError, parse_part};
use crate::rule::{Action, Rule};

#[derive(Deserialize)]
struct Lists {
    allow: Option<Spanned<Vec<String>>>,
}

/// Adds a rule that allows something to the text of a policy file, as the first of its list. Comments stay at their lines.
/// Returns `None` if the file has the rule already. `file` is its name in messages.
///
/// # Errors
///
/// Returns the first error of the file. A text that would not mean the old rules and the new one is no result.
pub fn with_rule(file: &str, text: &str, rule: &Rule) -> Result<Option<String>, FileError> {
    let rule = rule.to_string();
    let before = parse_part(file, text)?;
    let is_it = |known: &crate::RuleSource| known.action == Action::Allow && known.text == rule;
    if before.source.rules.iter().any(is_it) {
        return Ok(None);
    }
    let lists: Result<Lists, _> = toml::from_str(text);
    // The text was parsed above.
    let list = lists.ok().and_then(|lists| lists.allow).map(|allow| allow.span());
    let changed = match list {
        Some(list) if text.get(list.start..).is_some_and(|rest| rest.starts_with('[')) => {
            let (head, rest) = text.split_at(list.start + 1);
            // Only a comment, or nothing, follows on the line of the bracket: the list has a line for each rule.
            let (line, later) = rest.split_once('\n').unwrap_or((rest, ""));
            let is_alone = line.trim_start().is_empty() || line.trim_start().starts_with('#');
            if is_alone && !later.is_empty() {
                format!("{head}{line}\n    \"{rule}\",\n{later}")
            } else {
                format!("{head}\"{rule}\", {rest}")
            }
        }
        // A key before all others belongs to no table.
        _ => format!("allow = [\n    \"{rule}\",\n]\n{text}"),
    };
    let after = parse_part(file, &changed)?;
    let mut rules = after.source.rules;
    let place = rules.iter().position(is_it);
    place.map(|place| rules.remove(place));
    let texts = |rules: &[crate::RuleSource]| -> Vec<_> {
        rules.iter().map(|rule| (rule.action, rule.text.clone())).collect()
    };
    let is_right = place.is_some()
        && texts(&rules) == texts(&before.source.rules)
        && after.source.default == before.source.default
        && after.source.strict_sni == before.source.strict_sni
        && after
            .includes
            .iter()
            .map(|(name, _)| name)
            .eq(before.includes.iter().map(|(name, _)| name));
    if is_right { Ok(Some(changed)) } else { Err(FileError::Form { file: file.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn add(text: &str, rule: &str) -> Option<String> {
        with_rule("p.toml", text, &rule.parse().unwrap()).unwrap()
    }

    #[test]
    fn rule_is_added_and_the_rest_stays() {
        for (before, after) in [
            ("", "allow = [\n    \"n.org:443\",\n]\n"),
            ("deny = ['x.org']\n", "allow = [\n    \"n.org:443\",\n]\ndeny = ['x.org']\n"),
            ("allow = []\n", "allow = [\"n.org:443\", ]\n"),
            ("allow=['a.org']  # a\n", "allow=[\"n.org:443\", 'a.org']  # a\n"),
            (
                "# p\nallow = [  # list\n  'a.org', # a\n]\n",
                "# p\nallow = [  # list\n    \"n.org:443\",\n  'a.org', # a\n]\n",
            ),
            ("allow = ['a.org',\n 'b.org']\n", "allow = [\"n.org:443\", 'a.org',\n 'b.org']\n"),
            ("allow = [\n]", "allow = [\n    \"n.org:443\",\n]"),
        ] {
            assert_eq!(add(before, "n.org:443").as_deref(), Some(after), "{before:?}");
            assert_eq!(add(after, "n.org:443"), None);
        }
    }

    #[test]
    fn file_with_an_error_is_left() {
        let rule = "n.org:443".parse().unwrap();
        for text in ["allow = [", "allow = ['a b']", "[allow]\n", "default = 'x'"] {
            assert!(with_rule("p.toml", text, &rule).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn changed_file_means_its_rules_and_the_new_one(
            text in "(# c\n|\n)?(default = 'deny'\n)?(allow = \\[ ?(# c\n|\n)?('a.org', ?(# ]\n|\n)?)?(\"b.org\" ?\n?)?\\] ?(# c)?\n)?(deny = \\['c.org'\\]\n)?",
        ) {
            if let Ok(before) = crate::file::parse("p.toml", &text) {
                let changed = add(&text, "n.org:443").unwrap();
                let after = crate::file::parse("p.toml", &changed).unwrap();
                prop_assert_eq!(after.rules.len(), before.rules.len() + 1);
                prop_assert_eq!(after.default, before.default);
            }
        }
    }
}
