//! Counts of `perf stat` on the processes of a benchmark during a phase.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sys::poll::wait_readable;
use rustix::fs::{CWD, FileType, Mode};

/// Event of an independent count of system calls.
pub(super) const SYSCALLS: &str = "raw_syscalls:sys_enter";
/// Event of the instructions of the processor.
pub(super) const INSTRUCTIONS: &str = "instructions";
/// Time limit for an answer of perf.
const PATIENCE: Duration = Duration::from_secs(5);
const MISSING: &str =
    "`perf` could not be run; install it (Debian: linux-perf) or leave out --perf-check";

/// A running `perf stat`. It counts from [`PerfStat::begin`] to [`PerfStat::end`].
pub(super) struct PerfStat {
    event: &'static str,
    perf: Child,
    orders: File,
    answers: BufReader<File>,
    directory: PathBuf,
}

impl PerfStat {
    /// Attaches to processes and begins to count an event.
    pub(super) fn begin(event: &'static str, pids: &[u32]) -> anyhow::Result<PerfStat> {
        let directory = std::env::temp_dir().join(format!("ringfence-perf-{}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| format!("{}", directory.display()))?;
        let started = PerfStat::start(event, pids, &directory);
        if started.is_err() {
            remove(&directory);
        }
        let mut perf = started?;
        perf.order("enable")?;
        Ok(perf)
    }

    fn start(event: &'static str, pids: &[u32], directory: &Path) -> anyhow::Result<PerfStat> {
        let [orders, answers] = ["orders", "answers"].map(|name| directory.join(name));
        for fifo in [&orders, &answers] {
            rustix::fs::mknodat(CWD, fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .context("a fifo")?;
        }
        let pids = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x", ",", "-D", "-1", "-e", event, "-p", &pids, "--control"]);
        perf.arg(format!("fifo:{},{}", orders.display(), answers.display()));
        perf.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Opened for reading and writing, so that `open` does not block.
        let open = |path| OpenOptions::new().read(true).write(true).open(path).context("a fifo");
        let (orders, answers) = (open(&orders)?, BufReader::new(open(&answers)?));
        let perf = perf.spawn().context(MISSING)?;
        Ok(PerfStat { event, perf, orders, answers, directory: directory.to_owned() })
    }

    fn order(&mut self, word: &str) -> anyhow::Result<()> {
        writeln!(self.orders, "{word}")?;
        let mut answer = String::new();
        if !wait_readable(self.answers.get_ref(), Some(PATIENCE))? {
            let _ = self.perf.kill();
            bail!("perf did not answer: {}", self.stderr_tail());
        }
        self.answers.read_line(&mut answer)?;
        if !answer.contains("ack") {
            bail!("perf answered {answer:?} to `{word}`");
        }
        Ok(())
    }

    fn stderr_tail(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = self.perf.stderr.take() {
            // Unreadable output is omitted.
            let _ = std::io::Read::read_to_string(&mut BufReader::new(stderr), &mut text);
        }
        text
    }

    /// Stops the count and returns it.
    pub(super) fn end(mut self) -> anyhow::Result<u64> {
        self.order("disable")?;
        let pid = i32::try_from(self.perf.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("the process id of perf")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT).context("ending perf")?;
        let text = self.stderr_tail();
        self.perf.wait()?;
        let line = text.lines().find(|line| line.contains(self.event));
        let count =
            line.and_then(|line| line.split(',').next()).and_then(|field| field.parse().ok());
        count.with_context(|| format!("perf said {text:?}"))
    }
}

impl Drop for PerfStat {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.perf.kill();
        let _ = self.perf.wait();
        remove(&self.directory);
    }
}

/// Returns the reason for which this machine counts no event of a kind; `None` if it does.
pub(super) fn missing(event: &str) -> Option<String> {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x", ",", "-e", event, "true"]).stdin(Stdio::null());
    let Ok(done) = perf.output() else { return Some("perf is not installed".to_owned()) };
    let text = String::from_utf8_lossy(&done.stderr);
    let line = text.lines().find(|line| line.contains(event)).unwrap_or_default();
    let count = line.split(',').next().unwrap_or_default();
    let is_counted = count.parse::<u64>().is_ok();
    (!is_counted).then(|| format!("perf counts no {event} on this machine: {}", reason(count)))
}

/// Returns the reason that perf has in place of a count.
fn reason(count: &str) -> &str {
    let bare = count.trim_matches(|c| matches!(c, '<' | '>' | ' '));
    if bare.is_empty() { "it may not" } else { bare }
}

fn remove(directory: &Path) {
    // The directory lies among temporary files; the system removes leftovers.
    let _ = std::fs::remove_dir_all(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_event_has_a_reason_and_a_counted_one_has_none() {
        assert_eq!(reason("<not supported>"), "not supported");
        let Some(why) = missing("ringfence-no-such-event") else { panic!("counted") };
        assert!(why.contains("perf"), "{why}");
        // The event of software exists wherever perf may count at all.
        let software = missing("task-clock");
        assert!(software.is_none_or(|why| why.contains("perf")));
    }
}
