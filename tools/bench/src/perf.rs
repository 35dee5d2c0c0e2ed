//! Counts of `perf stat` on the processes of a benchmark during a phase.

pub(super) mod heap;

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
    /// Name of the event, or beginning of the names of several events.
    event: String,
    perf: Child,
    orders: File,
    answers: BufReader<File>,
    directory: PathBuf,
}

impl PerfStat {
    /// Attaches to processes and begins to count an event, or a group of events: `GROUP:*`.
    pub(super) fn begin(event: &str, pids: &[u32]) -> anyhow::Result<PerfStat> {
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

    fn start(event: &str, pids: &[u32], directory: &Path) -> anyhow::Result<PerfStat> {
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
        let event = event.trim_end_matches('*').to_owned();
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

    /// Stops the count and returns it, in total if there are several events.
    pub(super) fn end(mut self) -> anyhow::Result<u64> {
        self.order("disable")?;
        let pid = i32::try_from(self.perf.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("the process id of perf")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT).context("ending perf")?;
        let text = self.stderr_tail();
        self.perf.wait()?;
        total(&text, &self.event).with_context(|| format!("perf said {text:?}"))
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

/// Returns the sum of the counts of events whose names contain `event`, in the output of perf. `None` if there is no count, or
/// one is no number.
fn total(text: &str, event: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.contains(event)).peekable();
    lines.peek()?;
    lines.map(|line| line.split(',').next()?.parse::<u64>().ok()).sum()
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
    fn counts_of_a_group_are_summed_and_a_missing_one_is_no_count() {
        let text =
            "12,,g_1:malloc,900,100.00,,\n30,,g_1:realloc,900,100.00,,\n7,,other,900,100.00,,\n";
        assert_eq!([total(text, "g_1:"), total(text, "other")], [Some(42), Some(7)]);
        let broken = format!("{text}<not counted>,,g_1:calloc,0,0.00,,\n");
        assert_eq!([total(&broken, "g_1:"), total(&broken, "none")], [None, None]);
    }

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
