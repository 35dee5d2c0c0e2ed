//! Processes of a row, as the parent starts and observes them.

use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};

use super::orders::{HostileAnswer, NeighbourSetup, RowCommand};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;

/// Time limit for an answer of a process.
const PATIENCE: Duration = Duration::from_secs(30);

/// Process of a row, ended on drop.
pub(crate) struct Process {
    name: &'static str,
    child: OwnedChild,
    channel: Channel,
}

impl Process {
    /// Starts a process and sends its setup.
    pub(crate) fn start(setup: &NeighbourSetup, fds: &[BorrowedFd<'_>]) -> anyhow::Result<Process> {
        let name = setup.role.name();
        let (channel, theirs) = Channel::pair().context("a channel")?;
        let child = Command::new(THIS_PROGRAM)
            .arg0("ringfence")
            .args(["internal", "bench-hostile"])
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting the {name}"))?;
        let process = Process { name, child: OwnedChild(child), channel };
        process.channel.send(setup, fds)?;
        Ok(process)
    }

    /// Waits until the process has begun its work.
    pub(crate) fn wait_ready(&self) -> anyhow::Result<()> {
        match self.hear(PATIENCE)? {
            HostileAnswer::Ready => Ok(()),
            other => bail!("the {} said {other:?}", self.name),
        }
    }

    pub(crate) fn ask(&self, order: RowCommand) -> anyhow::Result<HostileAnswer> {
        self.ask_for(order, Duration::ZERO)
    }

    /// Sends an order that takes so long, and waits for its answer.
    pub(super) fn ask_for(
        &self,
        order: RowCommand,
        length: Duration,
    ) -> anyhow::Result<HostileAnswer> {
        self.channel.send(&order, &[]).with_context(|| format!("asking the {}", self.name))?;
        self.hear(PATIENCE + length)
    }

    fn hear(&self, patience: Duration) -> anyhow::Result<HostileAnswer> {
        let name = self.name;
        match self.channel.receive_within::<HostileAnswer>(patience) {
            Ok((HostileAnswer::Failed(why), _)) => bail!("{name}: {why}"),
            Ok((answer, _)) => Ok(answer),
            Err(ChannelError::Closed) => bail!("the {name} is gone (process {})", self.pid()),
            Err(error) => Err(error).with_context(|| format!("waiting for the {name}")),
        }
    }

    /// Fails if the process has failed; a working process sends nothing unasked.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        match self.channel.try_receive::<HostileAnswer>() {
            Ok(None) => Ok(()),
            Ok(Some((HostileAnswer::Failed(why), _))) => bail!("{}: {why}", self.name),
            Ok(Some((other, _))) => bail!("the {} said {other:?}", self.name),
            Err(_) => bail!("the {} is gone (process {})", self.name, self.pid()),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads the resources that the process uses.
    pub(super) fn footprint(&self) -> anyhow::Result<Footprint> {
        Footprint::of(self.pid()).with_context(|| format!("looking at the {}", self.name))
    }
}

/// Resources of a process at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprint {
    /// Resident memory in KiB.
    pub(super) rss_kib: i64,
    /// Number of open descriptors.
    pub(super) fds: i64,
    /// CPU time of all threads.
    pub(super) cpu: Duration,
}

impl Footprint {
    pub(super) fn of(pid: u32) -> anyhow::Result<Footprint> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let rss = rss.and_then(|rest| rest.split_whitespace().next()).context("no VmRSS")?;
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        Ok(Footprint { rss_kib: rss.parse()?, fds: i64::try_from(fds)?, cpu: cpu_time(pid)? })
    }
}

fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command's name, in parentheses, may contain any character.
    let (_, rest) = stat.rsplit_once(')').context("no name in stat")?;
    let field = |n: usize| rest.split_whitespace().nth(n).and_then(|f| f.parse::<u64>().ok());
    // utime and stime (proc_pid_stat(5), fields 14 and 15); the state is field 3.
    let ticks = field(11).zip(field(12)).map(|(user, system)| user + system);
    let ticks = ticks.context("no times in stat")?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_nanos(ticks.saturating_mul(1_000_000_000) / per_second.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn footprint_grows_with_memory_descriptors_and_cpu_time() {
        let before = Footprint::of(std::process::id()).unwrap();
        let kept = vec![1u8; 64 << 20];
        let files: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let begin = std::time::Instant::now();
        while begin.elapsed() < Duration::from_millis(50) {}
        let after = Footprint::of(std::process::id()).unwrap();
        // Half of it: the process runs other tests, which give back memory and descriptors meanwhile.
        let kib = i64::try_from(kept.len() >> 10).unwrap();
        assert!(after.rss_kib - before.rss_kib > kib / 2, "{before:?} {after:?}");
        let opened = i64::try_from(files.len()).unwrap();
        assert!(after.fds - before.fds > opened / 2, "{before:?} {after:?}");
        assert!(after.cpu > before.cpu, "{before:?} {after:?}");
    }
}
