//! `ringfence-bench hostile`: effect of a rule-breaking neighbour on a victim.
//!
//! # Theory of operation
//!
//! ```text
//!  core 1  driver domain: hub, control, switch with its workers ── port that verifies
//!            │ │ (store, hub)      │ │ (rings, events)
//!  core 2    │ └── victim ─────────┘ │   honest: as many packets as its ring takes
//!  core 3    └──── neighbour ────────┘   honest, absent, or one of `attacks`
//!  (or 2)
//! ```
//!
//! The driver domain is that of `ringfence run` with all its threads, in one process that is not
//! sandboxed. Guests attach through the same socket as those of any launcher (`launcher`). Every row
//! has processes of its own. The port that verifies the victim's packets is in the driver domain
//! (`sink`), so that its cost is the same in each row.
//!
//! A hostile neighbour attacks at its maximum rate (`attacks`). If its device is closed, it runs the
//! handshake again at once. If it loses its connections, it attaches again as its own launcher. It
//! yields its core as often as an honest guest; the columns `cpu` show the resulting shares.
//!
//! The charges come from the driver domain's own counters at the end: rule violations by name, the
//! hub's faults, and dropped frames of every port but the victim's. The victim must have no charge.

mod adversary;
pub mod args;
mod attacks;
mod control;
pub mod disks;
mod driver;
mod handshake;
mod honest;
mod launcher;
pub mod on_xen;
mod orders;
mod process;
mod report;
mod sink;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use indicatif::ProgressBar;
use ringfence_access::Mode;
use ringfence_driver::switchboard::DriverStats;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::Out;
use ringfence_sandbox::channel::{Channel, expect_fds};
use rustix::thread::CpuSet;

use super::STATUS_BENCH_FAILED;
use args::{Behaviour, HostileArgs};
use disks::behaviour::DiskBehaviour;
use launcher::{Attachment, Rendezvous};
use orders::{Answer, Arrivals, Entrance, Role, RowCommand, Setup};
use process::Process;
use report::{Measured, Row};

/// Time between the start of all processes and the measurement.
const WARM_UP: Duration = Duration::from_millis(300);
/// Bytes that the MTU does not include, as in `ringfence_frame::port`.
const LINK_HEADER: u32 = 18;
/// Minimum MTU of a vif here.
const MTU_MIN: u32 = 1500;

/// Runs every row and prints it.
pub(super) fn run(args: &HostileArgs) -> anyhow::Result<()> {
    let mut out = Out;
    if args.list {
        for behaviour in Behaviour::value_variants() {
            writeln!(out, "{:<23} {}", behaviour.name(), behaviour.meaning())?;
        }
        for behaviour in DiskBehaviour::value_variants() {
            writeln!(out, "{:<23} {}", behaviour.name(), behaviour.meaning())?;
        }
        return Ok(());
    }
    let cores = Cores::find()?;
    let (rows, disks) = (args.rows(), args.disks());
    if !rows.is_empty() {
        packets(args, &rows, cores)?;
    }
    if !rows.is_empty() && !disks.is_empty() && !args.json {
        writeln!(out)?;
    }
    if !disks.is_empty() {
        disks::run(args, &disks, cores)?;
    }
    Ok(())
}

/// Runs the packet rows.
fn packets(args: &HostileArgs, rows: &[Behaviour], cores: Cores) -> anyhow::Result<()> {
    let mut out = Out;
    if !args.json {
        writeln!(out, "{}", report::heading())?;
    }
    let run = |behaviour, number, progress: &ProgressBar| {
        Case { args, cores, behaviour, number }.run(progress)
    };
    let runs = every_round(args, rows, Behaviour::name, run, |row, runs| line(args, row, runs))?;
    let damaged: u64 = runs.iter().map(|run| run.victim_damaged).sum();
    ensure!(damaged == 0, "{damaged} packets of the victim's were damaged or came twice");
    if !args.json {
        writeln!(out, "{}", report::legend())?;
    }
    Ok(())
}

/// Runs each row once in each round, with the number of the run. Prints a row's line after its last
/// run. Returns all runs.
fn every_round<B: Copy, M>(
    args: &HostileArgs,
    rows: &[B],
    name: fn(B) -> String,
    run: impl Fn(B, usize, &ProgressBar) -> anyhow::Result<M>,
    line: impl Fn(B, &[M]) -> anyhow::Result<String>,
) -> anyhow::Result<Vec<M>> {
    let progress = super::progress(rows.len() * args.rounds as usize);
    let mut runs = Vec::new();
    for round in 1..=args.rounds {
        for &row in rows {
            let name = name(row);
            progress.set_message(format!("round {round}: {name}"));
            let measured = run(row, runs.len(), &progress);
            runs.push(measured.with_context(|| format!("neighbour {name}"))?);
            progress.inc(1);
            if round == args.rounds {
                let line = line(row, &runs)?;
                progress.suspend(|| writeln!(Out, "{line}"))?;
            }
        }
    }
    progress.finish_and_clear();
    Ok(runs)
}

/// Formats the row of a behaviour from its runs and those of the honest neighbour.
fn line(args: &HostileArgs, behaviour: Behaviour, runs: &[Measured]) -> anyhow::Result<String> {
    let of = |wanted| runs.iter().filter(move |run| run.behaviour == wanted);
    let pairs: Vec<_> = of(behaviour).zip(of(Behaviour::Honest)).collect();
    let row = Row::new(&pairs, args.mode, args.size, args.seconds.as_secs_f64());
    Ok(if args.json { serde_json::to_string(&row)? } else { row.line() })
}

/// CPU core of each domain.
#[derive(Clone, Copy)]
struct Cores {
    driver: Option<usize>,
    victim: Option<usize>,
    neighbour: Option<usize>,
}

impl Cores {
    fn find() -> anyhow::Result<Cores> {
        let allowed = rustix::thread::sched_getaffinity(None).context("sched_getaffinity")?;
        let mut each = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
        let [driver, victim, third] = [(); 3].map(|()| each.next());
        if victim.is_none() {
            eprintln!("ringfence: one core only: all domains share it, and take turns");
        }
        Ok(Cores { driver, victim: victim.or(driver), neighbour: third.or(victim).or(driver) })
    }
}

/// Run of one row.
struct Case<'a> {
    args: &'a HostileArgs,
    cores: Cores,
    behaviour: Behaviour,
    number: usize,
}

impl Case<'_> {
    fn run(&self, progress: &ProgressBar) -> anyhow::Result<Measured> {
        let (rendezvous, listener) = Rendezvous::new(self.number)?;
        let mtu = self.args.size.saturating_sub(LINK_HEADER).max(MTU_MIN);
        let entrance = Entrance {
            socket: rendezvous.path(),
            mtu: u16::try_from(mtu)?,
            mode: self.args.mode.name().to_owned(),
        };
        let setup = |role, core| Setup { role, core, size: self.args.size };
        let driver = Process::start(&setup(Role::Driver, self.cores.driver), &[listener.as_fd()])?;
        driver.wait_ready()?;
        let attachment = Attachment::take(&entrance)?;
        match driver.ask(RowCommand::Victim(attachment.place.mac))? {
            Answer::Ready => {}
            other => bail!("the driver domain said {other:?}"),
        }
        let talks = self.behaviour == Behaviour::Hoarder;
        let role = Role::Honest { place: attachment.place.clone(), talks };
        let victim = Process::start(&setup(role, self.cores.victim), &[attachment.hub.as_fd()])?;
        victim.wait_ready()?;
        let beside = match self.behaviour {
            Behaviour::Absent => None,
            Behaviour::Honest => Some(Attachment::take(&entrance)?),
            _ => None,
        };
        let neighbour = match (self.behaviour, &beside) {
            (Behaviour::Absent, _) => None,
            (_, Some(attachment)) => {
                let role = Role::Honest { place: attachment.place.clone(), talks: false };
                Some(Process::start(&setup(role, self.cores.neighbour), &[attachment.hub.as_fd()])?)
            }
            (behaviour, None) => {
                let staging = behaviour.needs_staging().then_some(Mode::Staging);
                let mode = staging.unwrap_or(self.args.mode).name().to_owned();
                let entrance = Entrance { mode, ..entrance };
                let role = Role::Hostile { entrance, behaviour };
                Some(Process::start(&setup(role, self.cores.neighbour), &[])?)
            }
        };
        neighbour.as_ref().map_or(Ok(()), Process::wait_ready)?;
        if self.args.verbose {
            progress.suspend(|| {
                let beside = neighbour.as_ref().map_or(String::new(), |n| n.pid().to_string());
                let [driver, victim] = [&driver, &victim].map(Process::pid);
                eprintln!(
                    "{}: driver domain {driver}, victim {victim}, neighbour {beside}",
                    self.behaviour.name()
                );
            });
        }
        Scene { driver, victim, neighbour, attachment }.measure(self.behaviour, self.args.seconds)
    }
}

/// Processes of a row, all started.
struct Scene {
    driver: Process,
    victim: Process,
    neighbour: Option<Process>,
    /// Attachment of the victim.
    attachment: Attachment,
}

impl Scene {
    fn measure(&self, behaviour: Behaviour, length: Duration) -> anyhow::Result<Measured> {
        std::thread::sleep(WARM_UP);
        let neighbour = || self.neighbour.as_ref().map(Process::footprint).transpose();
        let before = (self.driver.footprint()?, self.victim.footprint()?, neighbour()?);
        let from = self.arrived()?;
        std::thread::sleep(length);
        let to = self.arrived()?;
        let after = (self.driver.footprint()?, self.victim.footprint()?, neighbour()?);
        self.victim.check()?;
        self.neighbour.as_ref().map_or(Ok(()), Process::check)?;
        let rules = self.charges(&self.attachment.stats()?)?;
        let seconds = Duration::from_nanos(to.at.saturating_sub(from.at).max(1)).as_secs_f64();
        let a_second = |count: u64| count as f64 / seconds;
        let cores = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64() / seconds;
        let neighbour_cpu = before.2.zip(after.2).map_or(0.0, |(b, a)| cores(b.cpu, a.cpu));
        Ok(Measured {
            behaviour,
            victim_pps: a_second(to.verified - from.verified),
            victim_drops: to.missing - from.missing,
            victim_damaged: to.damaged,
            neighbour_pps: a_second(to.others - from.others),
            victim_cpu: cores(before.1.cpu, after.1.cpu),
            neighbour_cpu,
            driver_cpu: cores(before.0.cpu, after.0.cpu),
            driver_rss_kib_growth: after.0.rss_kib - before.0.rss_kib,
            driver_fds_growth: after.0.fds - before.0.fds,
            rules,
        })
    }

    fn arrived(&self) -> anyhow::Result<Arrivals> {
        match self.driver.ask(RowCommand::Arrived)? {
            Answer::Arrived(arrivals) => Ok(arrivals),
            other => bail!("the driver domain said {other:?}"),
        }
    }

    /// Returns the charges of all guests but the victim. Fails if the victim is charged.
    fn charges(&self, stats: &DriverStats) -> anyhow::Result<BTreeMap<String, u64>> {
        let victim = format!("vif{}.0", self.attachment.place.domain);
        if let Some(rules) = stats.rules.get(&victim) {
            bail!("the victim is charged with {rules:?}");
        }
        let broken = stats.rules.values().chain([&stats.hub]).flatten();
        let counted = stats.ports.iter().filter(|(name, _)| **name != victim);
        let counted = counted.flat_map(|(_, counters)| counters).filter(|(name, _)| {
            name.starts_with("drop_") || matches!(name.as_str(), "spurious_wakeups" | "throttles")
        });
        let mut charges = BTreeMap::new();
        for (rule, count) in broken.chain(counted) {
            *charges.entry(rule.clone()).or_default() += count;
        }
        Ok(charges)
    }
}

/// Runs `ringfence-bench internal hostile-guest`. Returns the exit status.
pub(super) fn guest_main(args: &on_xen::HostileGuestArgs) -> u8 {
    on_xen::main(args)
}

/// Runs `ringfence-bench internal bench-hostile`, one process of a row. Returns the exit status.
pub(super) fn process_main() -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel).map(|()| 0),
        |error| (STATUS_BENCH_FAILED, Answer::Failed(causes(&error))),
    )
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    ringfence_sandbox::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<Setup>()?;
    if let Some(core) = setup.core {
        let mut cores = CpuSet::new();
        cores.set(core);
        rustix::thread::sched_setaffinity(None, &cores).context("choosing a core")?;
    }
    match &setup.role {
        Role::Driver => {
            let [listener] = expect_fds(fds)?;
            // A second thread of the driver answers the parent.
            driver::serve(channel.try_clone()?, &setup, listener)
        }
        Role::Honest { place, talks } => {
            let [hub] = expect_fds(fds)?;
            honest::serve(channel, &setup, place, *talks, hub)
        }
        Role::Hostile { entrance, behaviour } => attacks::serve(channel, entrance, *behaviour),
        Role::HostileDisk { entrance, behaviour, disk } => {
            disks::serve(channel, entrance, (*behaviour, disk))
        }
    }
}
