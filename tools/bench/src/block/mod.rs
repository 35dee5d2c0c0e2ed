//! `ringfence-bench block` and `ringfence-bench seeds persistent`: throughput and cost of disks, by mode
//! and number of guests.
//!
//! ```text
//!  ringfence-bench block (parent: hub, orders, table)
//!    ├── internal bench-block   driver domain: blkback, a thread a ring; a memory disk each, or a file
//!    ├── internal bench-block   guest 1: blkfront, DEPTH requests in flight
//!    └── internal bench-block   guest 2 …
//! ```
//!
//! Each row has new processes. Guests first stamp every block of their disks with its position, then
//! warm up, then work at the same time; each read is verified.

pub mod args;
mod domain;
mod latency;
pub mod on_xen;
mod orders;
mod peers;
mod report;
mod seeds;

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_access::Mode;
use ringfence_block::storage::file::{CacheMode, Engine};
use ringfence_platform::DomId;

pub(super) use self::args::Rw;
use self::args::{BlockArgs, Storage};
pub(super) use self::domain::main as domain_main;
use self::latency::Latencies;
use self::orders::{Answer, DiskCommand, HANDLE, Setup, span};
pub(super) use self::orders::{GuestSetup, Worked};
use self::report::Row;
pub(super) use self::seeds::{published_text, run as run_seeds};
use super::net::RunningHub;
use super::usage::Usage;
use ringfence_driver::switchboard::DiskFrontend;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;

/// Time limit for an answer, in addition to the time that the command takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Warm-up time of rings, tables and caches.
const WARM_UP: Duration = Duration::from_millis(300);

/// Runs every row and prints it.
pub(super) fn run(args: &BlockArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    if !args.json {
        writeln!(out, "{}", report::heading())?;
    }
    let mut print = |row: &Row| {
        let line = if args.json { serde_json::to_string(row)? } else { row.line() };
        Ok(writeln!(out, "{line}")?)
    };
    for &rw in &args.rw {
        for &block in &args.block {
            for &guests in &args.guests {
                for &mode in &args.modes {
                    let Settings { depth, queues, .. } = Settings::of(args);
                    let case = Case { mode, guests, block, rw, depth, queues };
                    print(&case.median(&Settings::of(args))?)?;
                }
            }
        }
    }
    let compared = match args.vs.is_empty() {
        true => String::new(),
        false => peers::run(args, print)?,
    };
    if !args.json {
        writeln!(std::io::stdout(), "{}", report::LEGEND)?;
        write!(std::io::stdout(), "{compared}")?;
    }
    Ok(())
}

/// Settings common to all rows.
struct Settings {
    storage: Storage,
    cache: CacheMode,
    engine: Engine,
    seconds: Duration,
    repeat: u16,
    depth: u16,
    queues: u16,
}

impl Settings {
    fn of(args: &BlockArgs) -> Settings {
        let BlockArgs { ref storage, cache, engine, seconds, repeat, depth, queues, .. } = *args;
        Settings { storage: storage.clone(), cache, engine, seconds, repeat, depth, queues }
    }
}

/// Returns the median run by rate.
fn middle(mut runs: Vec<Row>) -> Option<Row> {
    runs.sort_by(|a, b| a.iops.total_cmp(&b.iops));
    let middle = runs.len() / 2;
    runs.into_iter().nth(middle)
}

/// Returns the number of TLB flush interrupts of the whole machine so far, if the kernel counts them.
fn tlb_shootdowns() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/interrupts").ok()?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"))?;
    Some(line.split_whitespace().map_while(|field| field.parse::<u64>().ok()).sum())
}

/// Row to be measured.
#[derive(Clone, Copy)]
struct Case {
    mode: Mode,
    guests: u16,
    block: u32,
    rw: Rw,
    depth: u16,
    queues: u16,
}

impl Case {
    fn median(&self, settings: &Settings) -> anyhow::Result<Row> {
        let Case { mode, guests, block, rw, .. } = *self;
        let runs: anyhow::Result<Vec<Row>> =
            (0..settings.repeat.max(1)).map(|_| self.measure(settings)).collect();
        let what = || format!("mode {mode}, {guests} guests, {} of {block} bytes", rw.name());
        middle(runs.with_context(what)?).context("there was no run")
    }

    fn measure(&self, settings: &Settings) -> anyhow::Result<Row> {
        let Settings { storage, seconds: length, .. } = settings;
        let hub = RunningHub::start()?;
        let (_, back_hub) = hub.0.admit(Some(DomId(0)), true)?;
        let mut admitted = Vec::new();
        for _ in 0..self.guests {
            admitted.push(hub.0.admit(None, false)?);
        }
        let span = span(self.guests);
        let setup = Setup::Backend {
            span,
            mode: self.mode.name().to_owned(),
            storage: storage.clone(),
            cache: settings.cache,
            engine: settings.engine,
            guests: admitted.iter().map(|(domain, _)| domain.0).collect(),
            queues: self.queues,
        };
        let back = Domain::start("driver domain", &setup, back_hub)?;
        match back.hear()? {
            Answer::DevicesMade => {}
            other => bail!("the driver domain said {other:?}"),
        }
        let mut guests = Vec::new();
        for (number, (domain, socket)) in (0u64..).zip(admitted) {
            let base = if *storage == Storage::Memory { 0 } else { number * span };
            let setup = Setup::Guest(GuestSetup {
                domain: domain.0,
                handle: HANDLE,
                core: None,
                frontend: DiskFrontend::of(self.mode),
                block: self.block,
                rw: self.rw,
                depth: self.depth,
                queues: self.queues,
                base,
                span,
            });
            guests.push(Domain::start("guest", &setup, socket)?);
        }
        for domain in guests.iter().chain([&back]) {
            match domain.hear()? {
                Answer::Ready => {}
                other => bail!("a domain said {other:?}"),
            }
        }
        work(&guests, WARM_UP)?;
        let (before, shot) = (back.usage()?, tlb_shootdowns());
        let worked = work(&guests, *length)?;
        let shot = tlb_shootdowns().zip(shot).map(|(after, before)| after.saturating_sub(before));
        let backend = back.usage()?.since(&before);
        Ok(self.row(storage, &worked, &backend, shot))
    }

    fn row(
        &self,
        storage: &Storage,
        worked: &[Worked],
        backend: &Usage,
        tlb_shootdowns: Option<u64>,
    ) -> Row {
        let mut latencies = Latencies::default();
        let (mut requests, mut iops, mut usage) = (0, 0.0, Usage::default());
        for one in worked {
            latencies.merge(&one.latencies);
            requests += one.requests;
            iops += one.requests as f64 / (one.nanos.max(1) as f64 / 1e9);
            usage = usage.plus(&one.usage);
        }
        Row::new(report::Measured {
            case: *self,
            storage: storage.name(),
            requests,
            iops,
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
            backend: *backend,
            guests: usage,
            tlb_shootdowns,
        })
    }
}

/// Makes all guests work for this time.
pub(super) fn work(guests: &[Domain], length: Duration) -> anyhow::Result<Vec<Worked>> {
    for guest in guests {
        guest.tell(DiskCommand::Work(length))?;
    }
    let hear = |guest: &Domain| match guest.hear()? {
        Answer::Worked(worked) => Ok(worked),
        other => bail!("a guest said {other:?}"),
    };
    guests.iter().map(hear).collect()
}

/// Domain process, ended on drop.
pub(super) struct Domain {
    name: &'static str,
    child: OwnedChild,
    channel: Channel,
}

impl Domain {
    fn start(name: &'static str, setup: &Setup, hub: OwnedFd) -> anyhow::Result<Domain> {
        let (channel, theirs) = Channel::pair().context("a channel")?;
        let child = Command::new(THIS_PROGRAM)
            .arg0("ringfence")
            .args(["internal", "bench-block"])
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting the {name}"))?;
        let domain = Domain { name, child: OwnedChild(child), channel };
        domain.channel.send(setup, &[hub.as_fd()])?;
        Ok(domain)
    }

    /// Starts a guest for an existing device. Returns once its disk holds the data to be read.
    pub(super) fn guest(setup: GuestSetup, hub: OwnedFd) -> anyhow::Result<Domain> {
        let guest = Domain::start("guest", &Setup::Guest(setup), hub)?;
        match guest.hear()? {
            Answer::Ready => Ok(guest),
            other => bail!("the guest said {other:?}"),
        }
    }

    /// Returns the process id.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn tell(&self, order: DiskCommand) -> anyhow::Result<()> {
        self.channel.send(&order, &[]).with_context(|| format!("telling the {}", self.name))
    }

    fn hear(&self) -> anyhow::Result<Answer> {
        let name = self.name;
        match self.channel.receive_within::<Answer>(PATIENCE) {
            Ok((Answer::Failed(why), _)) => bail!("{name}: {why}"),
            Ok((answer, _)) => Ok(answer),
            Err(ChannelError::Closed) => bail!("the {name} is gone (process {})", self.child.id()),
            Err(error) => Err(error).with_context(|| format!("waiting for the {name}")),
        }
    }

    fn usage(&self) -> anyhow::Result<Usage> {
        self.tell(DiskCommand::Usage)?;
        match self.hear()? {
            Answer::Usage(usage) => Ok(usage),
            other => bail!("the {} said {other:?}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tlb_shootdowns_sum_over_all_processors() {
        let before = tlb_shootdowns();
        assert!(before.is_none_or(|n| tlb_shootdowns().is_some_and(|later| later >= n)));
    }
}
