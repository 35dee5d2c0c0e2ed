//! Independent count of system calls: `perf stat` on both domains during a phase.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sys::poll::wait_readable;
use rustix::fs::{CWD, FileType, Mode};

const EVENT: &str = "raw_syscalls:sys_enter";
/// Time limit for an answer of perf.
const PATIENCE: Duration = Duration::from_secs(5);
const MISSING: &str =
    "`perf` could not be run; install it (Debian: linux-perf) or leave out --perf-check";

/// A running `perf stat`. It counts from [`PerfStat::begin`] to [`PerfStat::end`].
pub(super) struct PerfStat {
    perf: Child,
    orders: File,
    answers: BufReader<File>,
    directory: PathBuf,
}

impl PerfStat {
    /// Attaches to processes and begins to count.
    pub(super) fn begin(pids: &[u32]) -> anyhow::Result<PerfStat> {
        let directory = std::env::temp_dir().join(format!("ringfence-perf-{}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| format!("{}", directory.display()))?;
        let started = PerfStat::start(pids, &directory);
        if started.is_err() {
            remove(&directory);
        }
        let mut perf = started?;
        perf.order("enable")?;
        Ok(perf)
    }

    fn start(pids: &[u32], directory: &Path) -> anyhow::Result<PerfStat> {
        let [orders, answers] = ["orders", "answers"].map(|name| directory.join(name));
        for fifo in [&orders, &answers] {
            rustix::fs::mknodat(CWD, fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .context("a fifo")?;
        }
        let pids = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x", ",", "-D", "-1", "-e", EVENT, "-p", &pids, "--control"]);
        perf.arg(format!("fifo:{},{}", orders.display(), answers.display()));
        perf.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Opened for reading and writing, so that `open` does not block.
        let open = |path| OpenOptions::new().read(true).write(true).open(path).context("a fifo");
        let (orders, answers) = (open(&orders)?, BufReader::new(open(&answers)?));
        let perf = perf.spawn().context(MISSING)?;
        Ok(PerfStat { perf, orders, answers, directory: directory.to_owned() })
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

    /// Stops the count and returns the number of system calls.
    pub(super) fn end(mut self) -> anyhow::Result<u64> {
        self.order("disable")?;
        let pid = i32::try_from(self.perf.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("the process id of perf")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT).context("ending perf")?;
        let text = self.stderr_tail();
        self.perf.wait()?;
        let line = text.lines().find(|line| line.contains(EVENT));
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

fn remove(directory: &Path) {
    // The directory lies among temporary files; the system removes leftovers.
    let _ = std::fs::remove_dir_all(directory);
}
