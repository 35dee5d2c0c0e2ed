//! Rule about commit subjects: at most 72 characters, and no empty words ("wip", "fmt").
//!
//! The rule applies to commits after the one that `xtask/tidy.toml` names in `commits_after`.

use std::path::Path;
use std::process::Command;

use super::config::CONFIG;
use super::finding::Finding;

/// Maximum length of a commit's subject in characters.
const SUBJECT_MAX: usize = 72;
/// First words of subjects that describe no change.
const EMPTY: [&str; 2] = ["wip", "fmt"];

/// Returns findings for the commits of the repository at `root` after the commit `after`.
///
/// Without history (an unpacked archive, a shallow clone) nothing can be checked; a line on standard error
/// reports that.
pub(super) fn check(root: &Path, after: &str) -> Vec<Finding> {
    let range = format!("{after}..HEAD");
    let log = Command::new("git")
        .args(["log", "--no-merges", "--format=%h %s", &range, "--"])
        .current_dir(root)
        .output();
    match log {
        Ok(log) if log.status.success() => check_log(&String::from_utf8_lossy(&log.stdout)),
        _ => {
            eprintln!(
                "tidy: commit subjects not checked: {after} ({CONFIG}) is not in the history here"
            );
            vec![]
        }
    }
}

/// Returns findings for lines with an abbreviated hash and a subject.
fn check_log(log: &str) -> Vec<Finding> {
    let mut findings = vec![];
    for line in log.lines() {
        let Some((hash, subject)) = line.split_once(' ') else { continue };
        let length = subject.chars().count();
        if length > SUBJECT_MAX {
            let message = format!("the subject has {length} characters, at most {SUBJECT_MAX} fit");
            findings.push(Finding::file(&format!("commit {hash}"), message));
        }
        let first = subject.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        if EMPTY.contains(&first.to_lowercase().as_str()) {
            let message = format!("the subject begins with \"{first}\": say what changes");
            findings.push(Finding::file(&format!("commit {hash}"), message));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subject_of_73_characters_is_a_finding_and_of_72_is_not() {
        let subject = |length: usize| format!("abc123 {}\n", "x".repeat(length));
        assert_eq!(check_log(&subject(72)), []);
        let found = check_log(&subject(73));
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().starts_with("commit abc123: the subject has 73"), "{found:?}");
    }

    #[test]
    fn subject_that_begins_with_wip_or_fmt_is_a_finding() {
        assert_eq!(check_log("a1 wip: things\na2 Fmt\na3 fmtlib: add\n").len(), 2);
    }
}
