//! Last result of each part of the long set, and of each round of `soak tests`, with the commit on which it ran:
//! `xtask/long.json` in the target directory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use taskkit::exec::Cmd;
use taskkit::text::duration;

use crate::report::Outcome;

/// Result of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Commit, with a hash of the changes that were not committed.
    pub(crate) commit: String,
    /// `passed`, `failed` or `skipped`.
    pub(crate) outcome: String,
    pub(crate) note: String,
    pub(crate) seconds: f64,
    /// Time of day at the end, in UTC.
    pub(crate) ended: String,
    /// Name of each failed test, and the first line of its panic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failures: Vec<(String, String)>,
}

/// Results by part, in their file.
pub(crate) struct Record {
    file: PathBuf,
    commit: String,
    entries: BTreeMap<String, Entry>,
}

impl Record {
    /// Reads the record below `target` for the checkout at `root`.
    pub(crate) fn open(root: &Path, target: &Path) -> anyhow::Result<Record> {
        let file = target.join("xtask/long.json");
        let entries = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error.into()),
        };
        Ok(Record { file, commit: commit(root)?, entries })
    }

    /// Returns `true` if the part passed, or could not run here, on this very commit.
    pub(crate) fn is_done(&self, part: &str) -> bool {
        self.result(part).is_some_and(|entry| entry.outcome != "failed")
    }

    /// Returns the result of the part on this very commit.
    pub(crate) fn result(&self, part: &str) -> Option<&Entry> {
        self.entries.get(part).filter(|entry| entry.commit == self.commit)
    }

    /// Returns how long the part took the last time, on any commit.
    pub(crate) fn last_time(&self, part: &str) -> Option<Duration> {
        Duration::try_from_secs_f64(self.entries.get(part)?.seconds).ok()
    }

    /// Stores the result of a part. The file is complete at any time.
    pub(crate) fn store(
        &mut self,
        part: &str,
        outcome: &Outcome,
        time: Duration,
        failures: &[(String, String)],
    ) -> anyhow::Result<()> {
        let (word, note) = match outcome {
            Outcome::Passed(note) => ("passed", note),
            Outcome::Failed(note) => ("failed", note),
            Outcome::Skipped(note) => ("skipped", note),
        };
        let date = Cmd::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]).output(Path::new("/"))?;
        let entry = Entry {
            commit: self.commit.clone(),
            outcome: word.to_owned(),
            note: note.clone(),
            seconds: (time.as_secs_f64() * 10.0).round() / 10.0,
            ended: date.unwrap_or_default().trim().to_owned(),
            failures: failures.to_vec(),
        };
        self.entries.insert(part.to_owned(), entry);
        if let Some(folder) = self.file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let new = self.file.with_extension("new");
        std::fs::write(&new, serde_json::to_vec_pretty(&self.entries)?)?;
        std::fs::rename(&new, &self.file)?;
        Ok(())
    }

    /// Returns a table of the parts with their last results. Those of another commit are marked.
    pub(crate) fn table(&self, parts: &[String]) -> String {
        let width = parts.iter().map(String::len).max().unwrap_or(0);
        let mut text = format!("commit {}\n", self.commit);
        let mut done = 0;
        for part in parts {
            let line = match self.entries.get(part) {
                None => "never ran".to_owned(),
                Some(entry) => {
                    let of = if entry.commit == self.commit {
                        done += 1;
                        String::new()
                    } else {
                        format!(", of commit {}", entry.commit)
                    };
                    let time = Duration::try_from_secs_f64(entry.seconds).unwrap_or_default();
                    let Entry { outcome, note, ended, .. } = entry;
                    format!("{outcome:7}  {:>12}  {ended}{of}  {note}", duration(time))
                }
            };
            let _ = writeln!(text, "{part:width$}  {}", line.trim_end());
        }
        let _ = writeln!(text, "{done} of {} have a result of this commit", parts.len());
        text
    }
}

/// Returns the checkout's commit, with a hash of its changes if there are any.
fn commit(root: &Path) -> anyhow::Result<String> {
    let git = |args: &[&str]| -> anyhow::Result<Option<String>> {
        Ok(Cmd::new("git").args(args.iter().copied()).output(root)?.ok())
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"])? else {
        return Ok("no commit".to_owned());
    };
    let changes = git(&["diff", "HEAD"])?.unwrap_or_default();
    if changes.is_empty() {
        return Ok(head.trim().to_owned());
    }
    let mut hasher = DefaultHasher::new();
    changes.hash(&mut hasher);
    Ok(format!("{}-changed-{:08x}", head.trim(), hasher.finish() >> 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_of_another_commit_is_shown_and_not_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::open(folder.path(), folder.path()).unwrap();
        let second = Duration::from_secs(1);
        record.store("doc", &Outcome::Passed("3 examples".to_owned()), second, &[]).unwrap();
        let failures = [("ring a".to_owned(), "1 is not 2".to_owned())];
        let failed = Outcome::Failed("1 test".to_owned());
        record.store("loom/ring", &failed, second, &failures).unwrap();
        let mut record = Record::open(folder.path(), folder.path()).unwrap();
        assert!(record.is_done("doc") && !record.is_done("loom/ring") && !record.is_done("vm"));
        let parts = ["doc", "loom/ring", "vm"].map(str::to_owned);
        let table = record.table(&parts);
        assert!(table.contains("3 examples") && table.contains("never ran"), "{table}");
        assert!(table.ends_with("2 of 3 have a result of this commit\n"), "{table}");
        assert_eq!(record.result("loom/ring").unwrap().failures, failures);
        record.commit = "another".to_owned();
        assert!(!record.is_done("doc") && record.result("loom/ring").is_none());
        assert_eq!(record.last_time("doc"), Some(second));
        assert!(record.table(&parts).ends_with("0 of 3 have a result of this commit\n"));
    }
}
