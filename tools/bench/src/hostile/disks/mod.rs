//! Disk rows of the hostile benchmark: effect of a rule-breaking neighbour on a victim's disk.
//!
//! ```text
//!  core 1  driver domain: hub, control, blkback with a thread a ring, threads for I/O
//!            │ │ (store, hub)      │ │ (rings, events)
//!  core 2    │ └── victim ─────────┘ │   blkfront: random reads of 4 KiB, 32 in flight, each checked
//!  core 3    └──── neighbour ────────┘   honest, absent, or one of `attacks`
//!  (or 2)
//! ```
//!
//! The driver domain is the one of the packet rows. Each guest has a disk of its own, a file in memory.
//! A hostile neighbour validates every response; a wrong one fails the benchmark. Its charges come from
//! the driver domain's counters. They include the counters of persistent pages, although more pages
//! than blkback keeps are no rule violation.

mod adversary;
mod attacks;
pub mod behaviour;
pub(super) mod on_xen;
mod report;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use indicatif::ProgressBar;
use ringfence_platform::local::{ArenaShape, LocalPlatform};

use self::adversary::{DiskAdversary, WrongResponse};
use self::attacks::State;
use self::behaviour::DiskBehaviour;
use self::report::{Measured, Row};
use super::args::HostileArgs;
use super::handshake::{Pace, STEP_WITHIN};
use super::launcher::{Attachment, Rendezvous};
use super::orders::{Answer, DiskSpec, Entrance, Role, Setup};
use super::process::{Footprint, Process};
use super::{Cores, MTU_MIN, WARM_UP};
use crate::block::{self, GuestSetup, Rw};
use ringfence_driver::switchboard::{DiskFrontend, DriverStats};
use ringfence_hostnet::out::Out;
use ringfence_sandbox::channel::Channel;

/// Bytes of a guest's disk.
const BYTES: u64 = 16 << 20;
/// Bytes of a request of an honest guest.
const BLOCK: u32 = 4096;
/// Requests that an honest guest keeps in flight.
const DEPTH: u16 = 32;
/// Maximum number of pages that a hostile guest lends.
const PAGES: u32 = 4096;
/// References that a hostile guest does not grant although the victim grants hundreds of them.
const FOREIGN: std::ops::Range<u32> = 100..1000;

/// Returns the requested rows and the honest one.
fn rows(wanted: &[DiskBehaviour]) -> Vec<DiskBehaviour> {
    let all = DiskBehaviour::value_variants().iter().copied();
    all.filter(|row| *row == DiskBehaviour::Honest || wanted.contains(row)).collect()
}

/// Runs every row and prints it.
pub(super) fn run(
    args: &HostileArgs,
    wanted: &[DiskBehaviour],
    cores: Cores,
) -> anyhow::Result<()> {
    let mut out = Out;
    let rows = rows(wanted);
    if !args.json {
        writeln!(out, "{}", report::heading())?;
    }
    let run = |behaviour, number, progress: &ProgressBar| {
        Case { args, cores, behaviour, number }.run(progress)
    };
    let line = |row, runs: &[Measured]| line(args, row, runs);
    super::every_round(args, &rows, DiskBehaviour::name, run, line)?;
    if !args.json {
        writeln!(out, "{}", report::LEGEND)?;
    }
    Ok(())
}

/// Formats the row of a behaviour from its runs and those of the honest neighbour.
fn line(args: &HostileArgs, behaviour: DiskBehaviour, runs: &[Measured]) -> anyhow::Result<String> {
    let of = |wanted| runs.iter().filter(move |run| run.behaviour == wanted);
    let pairs: Vec<_> = of(behaviour).zip(of(DiskBehaviour::Honest)).collect();
    let row = Row::new(&pairs, args.disk_mode, args.seconds.as_secs_f64());
    Ok(if args.json { serde_json::to_string(&row)? } else { row.line() })
}

/// Run of one row.
struct Case<'a> {
    args: &'a HostileArgs,
    cores: Cores,
    behaviour: DiskBehaviour,
    number: usize,
}

impl Case<'_> {
    fn run(&self, progress: &ProgressBar) -> anyhow::Result<Measured> {
        let (rendezvous, listener) = Rendezvous::new(self.number)?;
        let mtu = u16::try_from(MTU_MIN)?;
        let entrance =
            Entrance { socket: rendezvous.path(), mtu, mode: self.args.mode.name().to_owned() };
        let size = self.args.size;
        let setup = |role, core| Setup { role, core, size };
        let driver = Process::start(&setup(Role::Driver, self.cores.driver), &[listener.as_fd()])?;
        driver.wait_ready()?;
        let disk = DiskSpec { mode: self.args.disk_mode.name().to_owned(), bytes: BYTES };
        let (attachment, victim) = self.honest(&entrance, &disk, self.cores.victim)?;
        let mut honest = vec![victim];
        let mut hostile = None;
        // Keeps the neighbour's hub session open until the row ends.
        let mut beside = None;
        match self.behaviour {
            DiskBehaviour::Absent => {}
            DiskBehaviour::Honest => {
                let (attachment, guest) = self.honest(&entrance, &disk, self.cores.neighbour)?;
                beside = Some(attachment);
                honest.push(guest);
            }
            behaviour => {
                let role = Role::HostileDisk { entrance, behaviour, disk };
                let process = Process::start(&setup(role, self.cores.neighbour), &[])?;
                process.wait_ready()?;
                hostile = Some(process);
            }
        }
        if self.args.verbose {
            let beside = match &hostile {
                Some(process) => process.pid().to_string(),
                None => honest.get(1).map_or(String::new(), |guest| guest.pid().to_string()),
            };
            let (name, victim) = (self.behaviour.name(), honest[0].pid());
            let driver = driver.pid();
            progress.suspend(|| {
                eprintln!("{name}: driver domain {driver}, victim {victim}, neighbour {beside}");
            });
        }
        let measured = Scene { driver, honest, hostile, attachment }
            .measure(self.behaviour, self.args.seconds);
        drop(beside);
        measured
    }

    /// Starts a guest that keeps the rules and works on command.
    fn honest(
        &self,
        entrance: &Entrance,
        disk: &DiskSpec,
        core: Option<usize>,
    ) -> anyhow::Result<(Attachment, block::Domain)> {
        let attachment = Attachment::take(entrance)?;
        attachment.add_disk(disk)?;
        let setup = GuestSetup {
            domain: attachment.place.domain,
            handle: 0,
            core,
            frontend: DiskFrontend::of(self.args.disk_mode),
            block: BLOCK,
            rw: Rw::RandRead,
            depth: DEPTH,
            queues: 1,
            base: 0,
            span: disk.bytes,
        };
        let guest = block::Domain::guest(setup, attachment.hub.try_clone()?)?;
        Ok((attachment, guest))
    }
}

/// Processes of a row, all started.
struct Scene {
    driver: Process,
    /// The victim, then the neighbour if it is honest.
    honest: Vec<block::Domain>,
    hostile: Option<Process>,
    /// Hub session of the victim.
    attachment: Attachment,
}

impl Scene {
    fn measure(&self, behaviour: DiskBehaviour, length: Duration) -> anyhow::Result<Measured> {
        block::work(&self.honest, WARM_UP)?;
        let before = (self.attachment.stats()?, self.driver.footprint()?, self.neighbour()?);
        let worked = block::work(&self.honest, length)?;
        let after = (self.attachment.stats()?, self.driver.footprint()?, self.neighbour()?);
        self.hostile.as_ref().map_or(Ok(()), Process::check)?;
        let victim = worked.first().context("the victim did not work")?;
        let seconds = Duration::from_nanos(victim.nanos.max(1)).as_secs_f64();
        let cores = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64() / seconds;
        let asked = |stats: &DriverStats| self.of_others(&stats.disks, ASKED);
        let neighbour = before.2.zip(after.2).map_or(0.0, |(b, a)| cores(b.cpu, a.cpu));
        Ok(Measured {
            behaviour,
            victim_iops: victim.requests as f64 / seconds,
            victim_p99_us: victim.latencies.quantile_us(0.99),
            neighbour_iops: asked(&after.0).saturating_sub(asked(&before.0)) as f64 / seconds,
            neighbour_cpu: neighbour,
            driver_cpu: cores(before.1.cpu, after.1.cpu),
            driver_rss_kib_growth: after.1.rss_kib - before.1.rss_kib,
            driver_fds_growth: after.1.fds - before.1.fds,
            rules: self.charges(&after.0)?,
        })
    }

    fn neighbour(&self) -> anyhow::Result<Option<Footprint>> {
        match (&self.hostile, self.honest.get(1)) {
            (Some(process), _) => process.footprint().map(Some),
            (None, Some(guest)) => Footprint::of(guest.pid()).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn victims(&self) -> String {
        format!("vbd{}.0", self.attachment.place.domain)
    }

    /// Sums these counters over all disks but the victim's.
    fn of_others(&self, disks: &BTreeMap<String, BTreeMap<String, u64>>, names: &[&str]) -> u64 {
        let victims = self.victims();
        let others = disks.iter().filter(|(disk, _)| **disk != victims);
        let counters = others.flat_map(|(_, counters)| counters);
        counters.filter(|(name, _)| names.contains(&name.as_str())).map(|(_, count)| count).sum()
    }

    /// Returns the charges of all guests but the victim. Fails if the victim is charged.
    fn charges(&self, stats: &DriverStats) -> anyhow::Result<BTreeMap<String, u64>> {
        let victim = self.victims();
        if let Some(rules) = stats.rules.get(&victim) {
            bail!("the victim is charged with {rules:?}");
        }
        let mut charges = BTreeMap::new();
        for (rule, count) in stats.rules.values().chain([&stats.hub]).flatten() {
            *charges.entry(rule.clone()).or_default() += count;
        }
        for counter in TOLD {
            let count = self.of_others(&stats.disks, &[*counter]);
            if count > 0 {
                charges.insert((*counter).to_owned(), count);
            }
        }
        Ok(charges)
    }
}

/// Counters of a disk that count requests.
const ASKED: &[&str] = &["reads", "writes", "discards", "refused"];
/// Counters of a disk that are reported beside rule violations.
const TOLD: &[&str] =
    &["persistent_over", "persistent_purged", "spurious_wakeups", "throttles", "pauses"];

/// Runs a hostile guest until the parent ends the process.
pub(super) fn serve(
    channel: &Channel,
    entrance: &Entrance,
    (behaviour, disk): (DiskBehaviour, &DiskSpec),
) -> anyhow::Result<()> {
    let mut said = false;
    loop {
        let attachment = Attachment::take(entrance)?;
        attachment.add_disk(disk)?;
        let platform = LocalPlatform::connect(attachment.hub.try_clone()?)?;
        let platform = platform.with_arena(ArenaShape::of(PAGES, 64));
        let pace = Pace { step_within: STEP_WITHIN, pause: std::thread::yield_now };
        let device = attachment.place.disk();
        let mut adversary = DiskAdversary::new(platform, device, FOREIGN, pace)?;
        let ended = live(&mut adversary, behaviour, &mut || {
            if !core::mem::replace(&mut said, true) {
                channel.send(&Answer::Ready, &[])?;
            }
            Ok(())
        });
        match ended {
            // A wrong response is the failure that this row looks for.
            Err(why) if why.is::<WrongResponse>() => return Err(why),
            // Any other end is the driver domain's reaction; the guest reconnects.
            _ => std::thread::yield_now(),
        }
    }
}

/// Attacks from the first handshake to the end of the connection to the hub or the store.
fn live(
    adversary: &mut DiskAdversary<LocalPlatform>,
    behaviour: DiskBehaviour,
    began: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut state = State::new();
    loop {
        // The driver domain may refuse the device for a while only.
        if adversary.connect().is_err() {
            std::thread::yield_now();
            continue;
        }
        loop {
            attacks::burst(adversary, behaviour, &mut state)?;
            began()?;
            std::thread::yield_now();
            if behaviour == DiskBehaviour::Reattach || adversary.handshake.was_closed()? {
                break;
            }
        }
    }
}
