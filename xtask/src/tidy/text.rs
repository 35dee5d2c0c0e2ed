//! Rules about plain text: strings that must not be checked in, and the changelog's open section.

use super::finding::Finding;
use super::tree::Tree;

/// Strings that must not be checked in, with the reason. Each is written in two halves, so that this file is
/// no finding.
const BANNED: &[(&str, &str)] = &[
    (concat!("/wo", "rk/"), "a path of one build machine"),
    (concat!("/fa", "rm/"), "a path of one build machine"),
    (concat!("../sha", "red"), "a path outside the repository"),
    (concat!("FIX", "ME"), "fix it, or file an issue and name it"),
    (concat!("to", "do!("), "no stubs: what is not there yet is left out"),
    (concat!("unimple", "mented!("), "no stubs: what is not there yet is left out"),
    (concat!("db", "g!("), "left from debugging: use tracing"),
];

/// Returns findings for banned strings, and for a changelog without an open section.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in &tree.files {
        for (i, line) in text.lines().enumerate() {
            for (banned, why) in BANNED.iter().filter(|(banned, _)| line.contains(banned)) {
                findings.push(Finding::at(path, i + 1, format!("`{banned}` is banned: {why}")));
            }
        }
    }
    let changelog = tree.files.get("CHANGELOG.md").map_or("", String::as_str);
    if !changelog.lines().any(|line| line.trim_end() == "## [Unreleased]") {
        findings.push(Finding::file("CHANGELOG.md", "lacks the section `## [Unreleased]`"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_string_is_a_finding_at_its_line() {
        for (banned, _) in BANNED {
            let text = format!("fine\n  {banned}x\n");
            let changelog = ("CHANGELOG.md", "## [Unreleased]\n");
            let found = check(&Tree::from_files([changelog, ("docs/a.md", &*text)]));
            assert_eq!(found.len(), 1, "{banned}");
            assert!(found[0].to_string().starts_with("docs/a.md:2: "), "{found:?}");
        }
    }

    #[test]
    fn changelog_without_open_section_is_a_finding() {
        let found = check(&Tree::from_files([("CHANGELOG.md", "## [0.1.0]\n")]));
        assert_eq!(found.len(), 1);
        assert_eq!(check(&Tree::from_files([("CHANGELOG.md", "## [Unreleased]\n")])), []);
    }
}
