//! `cargo xtask tidy`: the project's rules that the compiler and clippy do not check.
//!
//! Each rule is a function from the sources ([`tree::Tree`]) to findings, so its tests use sources in strings.
//! Exceptions are in `xtask/tidy.toml`, where a review sees each.

mod atomics;
mod columns;
mod commits;
mod config;
mod finding;
mod floors;
mod fuzz;
mod imports;
mod language;
mod links;
mod modules;
mod mutations;
mod size;
mod syscalls;
mod text;
mod tree;
mod unsafety;

use std::path::Path;

use anyhow::Context as _;

use config::{CONFIG, Config};
use finding::Finding;
pub(crate) use fuzz::fuzz_targets;
use tree::Tree;

/// Checks the repository at `root` and returns the findings.
pub(crate) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let tree = Tree::read(root)?;
    let config = tree.files.get(CONFIG).with_context(|| format!("{CONFIG} is missing"))?;
    let config: Config = toml::from_str(config).with_context(|| format!("reading {CONFIG}"))?;
    let mut findings = check_tree(&tree, &config);
    if let Some(after) = &config.commits_after {
        findings.extend(commits::check(root, after));
    }
    Ok(findings)
}

/// Writes the list of system calls from the sources below `root`. Returns findings for lines that cannot be
/// parsed, and writes nothing then.
pub(crate) fn write_syscalls(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let (text, findings) = syscalls::generate(&Tree::read(root)?);
    if findings.is_empty() {
        std::fs::write(root.join(syscalls::LIST), text)
            .with_context(|| format!("writing {}", syscalls::LIST))?;
    }
    Ok(findings)
}

fn check_tree(tree: &Tree, config: &Config) -> Vec<Finding> {
    let mut findings = tree.unreadable();
    findings.extend(modules::dead_files(tree));
    findings.extend(size::check(tree, &config.files, &config.functions));
    findings.extend(unsafety::check(tree));
    findings.extend(atomics::check(tree, &config.atomics));
    findings.extend(floors::check(tree));
    findings.extend(columns::check(tree));
    findings.extend(imports::check(tree));
    findings.extend(language::check(tree, &config.words));
    findings.extend(links::check(tree));
    findings.extend(fuzz::check(tree));
    findings.extend(mutations::check(tree));
    findings.extend(syscalls::check(tree));
    findings.extend(text::check(tree));
    findings.sort();
    findings
}

/// Returns the findings, one in each line, or a line that reports none.
pub(crate) fn describe(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "tidy: nothing found\n".to_owned();
    }
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tidy_tree_has_no_findings_and_finding_shows_its_position() {
        let tree = Tree::from_files([
            ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n"),
            (
                "ARCHITECTURE.md",
                "<!-- crates: this picture defines the floors that tidy checks -->\n```text\n net\n```\n",
            ),
            ("crates/net/Cargo.toml", "[package]\nname = \"ringfence-net\"\n"),
            ("crates/net/src/lib.rs", "#![forbid(unsafe_code)]\n//! Ports of a network device.\n"),
        ]);
        let findings = check_tree(&tree, &Config::default());
        assert_eq!(findings, []);
        assert_eq!(describe(&findings), "tidy: nothing found\n");
        assert_eq!(describe(&[Finding::at("a.rs", 3, "is odd")]), "a.rs:3: is odd\n");
    }

    #[test]
    fn source_that_does_not_parse_is_a_finding() {
        let tree = Tree::from_files([
            ("CHANGELOG.md", "## [Unreleased]\n"),
            ("xtask/Cargo.toml", "[package]\nname = \"xtask\"\n"),
            ("xtask/src/main.rs", "#![forbid(unsafe_code)]\nfn main( {}\n"),
        ]);
        let findings = check_tree(&tree, &Config::default());
        assert!(findings.iter().any(|f| f.message.contains("does not parse")), "{findings:?}");
    }
}
