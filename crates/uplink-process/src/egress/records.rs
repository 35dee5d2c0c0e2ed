//! Files of `--egress-log` and `--egress-learn`. The uplink's process has no files: it sends lines and rules, and
//! the process that started it writes them.
//!
//! The uplink reads packets of the guest, so its messages are untrusted: control characters are replaced, rules
//! are parsed, and the log grows by a bounded number of bytes a second.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use ringfence_policy::Rule;
use ringfence_policy::record::Learned;
use ringfence_sys::numbers::u64_from;

use super::EgressArgs;
use crate::messages::FromUplink;

/// Bytes that the log may grow by at once, and each second.
const LOG_BURST: u64 = 8 << 20;
const LOG_EACH_SECOND: u64 = 64 << 10;

/// Open files of the records.
pub(super) struct Records {
    log: Option<Box<dyn Write>>,
    learn: Option<(File, Learned)>,
    began: Instant,
    written: u64,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").field("written", &self.written).finish_non_exhaustive()
    }
}

impl Records {
    /// Opens the files that the options name.
    pub(super) fn open(options: &EgressArgs) -> anyhow::Result<Records> {
        let log = options.egress_log.as_deref().map(open_log).transpose()?;
        let mut learn = None;
        if let Some(path) = &options.egress_learn {
            let file =
                File::create(path).with_context(|| format!("--egress-learn {}", path.display()))?;
            learn = Some((file, Learned::default()));
        }
        let mut records = Records { log, learn, began: Instant::now(), written: 0 };
        records.write_learned();
        Ok(records)
    }

    /// Returns `true` if there is a file to write.
    pub(super) fn are_wanted(&self) -> bool {
        self.log.is_some() || self.learn.is_some()
    }

    /// Returns `true` if a policy is to be learned.
    pub(super) fn learns(&self) -> bool {
        self.learn.is_some()
    }

    /// Writes the message if it is a record. Returns other messages.
    pub(super) fn accept(&mut self, message: FromUplink) -> Option<FromUplink> {
        match message {
            FromUplink::Records(lines) => self.write_lines(&lines),
            FromUplink::Learned(rules) => self.learn(&rules),
            other => return Some(other),
        }
        None
    }

    fn write_lines(&mut self, lines: &str) {
        let Some(log) = &mut self.log else { return };
        let length = u64_from(lines.len());
        let limit = LOG_BURST + self.began.elapsed().as_secs() * LOG_EACH_SECOND;
        if self.written.saturating_add(length) > limit {
            return;
        }
        self.written += length;
        let lines = without_controls(lines);
        // The command goes on without its log if the disk is full.
        let _ = log.write_all(lines.as_bytes()).and_then(|()| log.flush());
    }

    fn learn(&mut self, rules: &[String]) {
        let Some((_, learned)) = &mut self.learn else { return };
        let mut is_new = false;
        for rule in rules.iter().filter_map(|rule| rule.parse::<Rule>().ok()) {
            is_new |= learned.insert(rule.to_string());
        }
        if is_new {
            self.write_learned();
        }
    }

    fn write_learned(&mut self) {
        let Some((file, learned)) = &mut self.learn else { return };
        let text = learned.to_toml();
        let written = file.set_len(0).and_then(|()| file.rewind());
        let _ = written.and_then(|()| file.write_all(text.as_bytes()));
    }
}

/// Replaces the control characters of lines, except their ends.
pub(super) fn without_controls(lines: &str) -> String {
    lines.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}

/// Opens the log for appending. `-` is standard error: standard output belongs to the command.
fn open_log(path: &Path) -> anyhow::Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stderr()));
    }
    let file = File::options().create(true).append(true).open(path);
    Ok(Box::new(file.with_context(|| format!("--egress-log {}", path.display()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_a_hostile_uplink_is_bounded_and_cleaned() {
        let directory = tempfile::tempdir().unwrap();
        let (log, learn) = (directory.path().join("log"), directory.path().join("learn.toml"));
        let options = EgressArgs {
            egress_log: Some(log.clone()),
            egress_learn: Some(learn.clone()),
            ..EgressArgs::default()
        };
        let mut records = Records::open(&options).unwrap();
        assert!(records.accept(FromUplink::Records("{}\x1b[2J\n".into())).is_none());
        let rules = ["a.org:443/tcp", "\"]\nallow = [\"*.b.org", "x y"].map(str::to_owned);
        assert!(records.accept(FromUplink::Learned(rules.to_vec())).is_none());
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "{}\u{fffd}[2J\n");
        let text = std::fs::read_to_string(&learn).unwrap();
        let policy = ringfence_policy::file::parse("learn.toml", &text).unwrap();
        assert_eq!(policy.rules.len(), 1, "{text}");
        for _ in 0..2000 {
            records.accept(FromUplink::Records("x".repeat(8 << 10)));
        }
        let length = std::fs::metadata(&log).unwrap().len();
        assert!(length <= LOG_BURST + 60 * LOG_EACH_SECOND, "{length} bytes");
        assert!(records.accept(FromUplink::Failed("x".into())).is_some());
    }
}
