//! Policies in short form, for tests.

use crate::policy::{PolicySource, RuleSource};
use crate::rule::Action;

/// Builds a policy from words: `+RULE` allows, `-RULE` denies, `strict` requires readable names.
pub(crate) fn source(words: &str) -> PolicySource {
    let mut source = PolicySource::default();
    for word in words.split_ascii_whitespace() {
        let (sign, text) = word.split_at(1);
        let action = match sign {
            "+" => Action::Allow,
            "-" => Action::Deny,
            _ => {
                source.strict_sni = true;
                continue;
            }
        };
        let (text, origin) = (text.to_owned(), "test".to_owned());
        source.rules.push(RuleSource { action, text, origin });
    }
    source
}
