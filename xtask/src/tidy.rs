//! The rules of the house that the compiler and clippy do not know, read off the sources.
//!
//! Each rule is a function from the sources ([`tree::Tree`]) to findings, so that it is tested on
//! sources written in the test. Exceptions are in `xtask/tidy.toml`, each visible in review.

mod atomics;
mod commits;
mod floors;
mod fuzz;
mod imports;
mod language;
mod modules;
mod mutations;
mod size;
mod syscalls;
mod text;
mod tree;
mod unsafety;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;

pub(crate) use fuzz::fuzz_targets;
use tree::Tree;

/// Where the exceptions are.
const CONFIG: &str = "xtask/tidy.toml";

/// The crates that may hold `unsafe` and the processor's atomics: the rooms where two domains
/// touch the same bytes, and the one that talks to the kernel about them.
const TRUSTED: [&str; 6] = [
    "crates/memory/",
    "crates/ring/",
    "crates/sys/",
    "crates/platform/",
    // System calls of an attacker, rings written by hand; ioctls of VFIO. Neither is in a product.
    "tools/testkit/",
    "tools/iommu-lab/",
];

/// The exceptions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    /// Lines of the files over the limit.
    files: BTreeMap<String, usize>,
    /// Lines of the functions over the limit, by `path::Type::name`.
    functions: BTreeMap<String, usize>,
    /// Files that use atomics, and why.
    atomics: BTreeMap<String, String>,
    /// Import cycles over the limit: their first file and the number of their files.
    #[serde(default)]
    cycles: BTreeMap<String, usize>,
    /// Words that the glossary replaces, by the file that may use them, and why.
    #[serde(default)]
    words: language::Words,
    /// Files whose text was not rewritten yet, and the number of their language findings.
    #[serde(default)]
    pending: BTreeMap<String, usize>,
    /// The last commit whose subject, and those before it, the rule on subjects leaves out.
    #[serde(default)]
    commits_after: Option<String>,
}

/// One thing that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    line: Option<usize>,
    message: String,
}

impl Finding {
    fn at(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: Some(line), message: message.into() }
    }

    fn file(path: &str, message: impl Into<String>) -> Finding {
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

/// Checks the repository at `root`.
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

/// Writes the list of system calls anew from what the sources of `root` say; the findings are of lines
/// that cannot be read, and then nothing is written.
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
    findings.extend(imports::check(tree, &config.cycles));
    findings.extend(language::check(tree, &config.words, &config.pending));
    findings.extend(fuzz::check(tree));
    findings.extend(mutations::check(tree));
    findings.extend(syscalls::check(tree));
    findings.extend(text::check(tree));
    findings.sort();
    findings
}

/// The findings, one a line, or a line that says there are none.
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
    fn a_tidy_tree_has_no_findings_and_a_finding_shows_where_it_is() {
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
    fn a_source_that_does_not_parse_is_found() {
        let tree = Tree::from_files([
            ("CHANGELOG.md", "## [Unreleased]\n"),
            ("xtask/Cargo.toml", "[package]\nname = \"xtask\"\n"),
            ("xtask/src/main.rs", "#![forbid(unsafe_code)]\nfn main( {}\n"),
        ]);
        let findings = check_tree(&tree, &Config::default());
        assert!(findings.iter().any(|f| f.message.contains("does not parse")), "{findings:?}");
    }
}
