//! The rows of disks: what a neighbour that breaks the rules of disks does to one that does not.
//!
//! ```text
//!  core 1  driver domain: hub, control, blkback with a thread a ring, threads for I/O
//!            │ │ (store, hub)      │ │ (rings, events)
//!  core 2    │ └── victim ─────────┘ │   blkfront: random reads of 4 KiB, 32 in flight, each checked
//!  core 3    └──── neighbour ────────┘   honest, absent, or one of `attacks`
//!  (or 2)
//! ```
//!
//! The driver domain is the one of the other rows. Each guest has a disk of its own, a file in memory.
//! A hostile neighbour judges every answer it gets: one that is not the right one ends the benchmark.
//! What it was charged with is read from the driver domain's counters, with what its persistent pages
//! did, since more of them than are kept is no rule broken.

mod attacks;
pub mod behaviour;
pub(super) mod on_xen;
mod report;
mod rogue;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

use ringfence_platform::local::{ArenaShape, LocalPlatform};

use anyhow::{Context, bail};
use clap::ValueEnum;
use indicatif::ProgressBar;
use ringfence::out::Out;
use ringfence::switchboard::{DiskFrontend, DriverStats};
use ringfence_sandbox::channel::Channel;
use serde::{Deserialize, Serialize};

use self::attacks::State;
use self::behaviour::DiskBehaviour;
use self::report::{Measured, Row};
use self::rogue::{RogueDisk, Unfair};
use super::args::HostileArgs;
use super::launcher::{Rendezvous, Seat};
use super::orders::{Answer, Entrance, Role, Setup};
use super::process::{Footprint, Process};
use super::rogue::{Pace, STEP_WITHIN};
use super::{Cores, MTU_MIN, WARM_UP};
use crate::block::{self, GuestSetup, Rw};

/// Bytes of a guest's disk.
const BYTES: u64 = 16 << 20;
/// Bytes of a request of an honest guest's.
const BLOCK: u32 = 4096;
/// Requests that an honest guest has in flight.
const DEPTH: u16 = 32;
/// Pages that a hostile guest may lend.
const PAGES: u32 = 4096;
/// References of which a hostile guest lends none, and the victim hundreds.
const FOREIGN: std::ops::Range<u32> = 100..1000;

/// The rows that were asked for, and the honest one.
fn rows(wanted: &[DiskBehaviour]) -> Vec<DiskBehaviour> {
    let all = DiskBehaviour::value_variants().iter().copied();
    all.filter(|row| *row == DiskBehaviour::Honest || wanted.contains(row)).collect()
}

/// A disk that a guest is to have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DiskOrder {
    /// The name of the mode in which its guest's pages are reached.
    pub(super) mode: String,
    pub(super) bytes: u64,
}

/// Runs every row.
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

/// The row of a behaviour of which every run is done, and every run of the honest neighbour's.
fn line(args: &HostileArgs, behaviour: DiskBehaviour, runs: &[Measured]) -> anyhow::Result<String> {
    let of = |wanted| runs.iter().filter(move |run| run.behaviour == wanted);
    let pairs: Vec<_> = of(behaviour).zip(of(DiskBehaviour::Honest)).collect();
    let row = Row::new(&pairs, args.disk_mode, args.seconds.as_secs_f64());
    Ok(if args.json { serde_json::to_string(&row)? } else { row.line() })
}

/// One run of one row.
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
        let disk = DiskOrder { mode: self.args.disk_mode.name().to_owned(), bytes: BYTES };
        let (seat, victim) = self.honest(&entrance, &disk, self.cores.victim)?;
        let mut honest = vec![victim];
        let mut hostile = None;
        // The neighbour's seat ends with the row.
        let mut beside = None;
        match self.behaviour {
            DiskBehaviour::Absent => {}
            DiskBehaviour::Honest => {
                let (seat, guest) = self.honest(&entrance, &disk, self.cores.neighbour)?;
                beside = Some(seat);
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
        let measured =
            Scene { driver, honest, hostile, seat }.measure(self.behaviour, self.args.seconds);
        drop(beside);
        measured
    }

    /// A guest that keeps the rules, at work when it is told.
    fn honest(
        &self,
        entrance: &Entrance,
        disk: &DiskOrder,
        core: Option<usize>,
    ) -> anyhow::Result<(Seat, block::Domain)> {
        let seat = Seat::take(entrance)?;
        seat.add_disk(disk)?;
        let setup = GuestSetup {
            domain: seat.place.domain,
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
        let guest = block::Domain::guest(setup, seat.hub.try_clone()?)?;
        Ok((seat, guest))
    }
}

/// The processes of a row, all there.
struct Scene {
    driver: Process,
    /// The victim, and the neighbour if that is honest.
    honest: Vec<block::Domain>,
    hostile: Option<Process>,
    /// The victim's.
    seat: Seat,
}

impl Scene {
    fn measure(&self, behaviour: DiskBehaviour, length: Duration) -> anyhow::Result<Measured> {
        block::work(&self.honest, WARM_UP)?;
        let before = (self.seat.stats()?, self.driver.footprint()?, self.neighbour()?);
        let worked = block::work(&self.honest, length)?;
        let after = (self.seat.stats()?, self.driver.footprint()?, self.neighbour()?);
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
        format!("vbd{}.0", self.seat.place.domain)
    }

    /// The sum of these counters, of all disks but the victim's.
    fn of_others(&self, disks: &BTreeMap<String, BTreeMap<String, u64>>, names: &[&str]) -> u64 {
        let victims = self.victims();
        let others = disks.iter().filter(|(disk, _)| **disk != victims);
        let counters = others.flat_map(|(_, counters)| counters);
        counters.filter(|(name, _)| names.contains(&name.as_str())).map(|(_, count)| count).sum()
    }

    /// Everything that others than the victim are charged with. Nothing that the victim is.
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

/// Counters of a disk that say how much it was asked for.
const ASKED: &[&str] = &["reads", "writes", "discards", "refused"];
/// Counters of a disk that are told beside broken rules.
const TOLD: &[&str] =
    &["persistent_over", "persistent_purged", "spurious_wakeups", "throttles", "pauses"];

/// A hostile guest's process, until the parent ends it.
pub(super) fn serve(
    channel: &Channel,
    entrance: &Entrance,
    (behaviour, disk): (DiskBehaviour, &DiskOrder),
) -> anyhow::Result<()> {
    let mut said = false;
    loop {
        let seat = Seat::take(entrance)?;
        seat.add_disk(disk)?;
        let platform = LocalPlatform::connect(seat.hub.try_clone()?)?;
        let platform = platform.with_arena(ArenaShape::of(PAGES, 64));
        let pace = Pace { step_within: STEP_WITHIN, pause: std::thread::yield_now };
        let device = seat.place.disk();
        let mut rogue = RogueDisk::new(platform, device, FOREIGN, pace)?;
        let ended = live(&mut rogue, behaviour, &mut || {
            if !core::mem::replace(&mut said, true) {
                channel.send(&Answer::Ready, &[])?;
            }
            Ok(())
        });
        match ended {
            // That is what this is about.
            Err(why) if why.is::<Unfair>() => return Err(why),
            // Why else it ended is what it asked for. It comes back.
            _ => std::thread::yield_now(),
        }
    }
}

/// From the first handshake to the end of the connection to the hub or the store.
fn live(
    rogue: &mut RogueDisk<LocalPlatform>,
    behaviour: DiskBehaviour,
    began: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut state = State::new();
    loop {
        // A device that cannot be connected now can be later.
        if rogue.connect().is_err() {
            std::thread::yield_now();
            continue;
        }
        loop {
            attacks::burst(rogue, behaviour, &mut state)?;
            began()?;
            std::thread::yield_now();
            if behaviour == DiskBehaviour::Reattach || rogue.was_closed()? {
                break;
            }
        }
    }
}
