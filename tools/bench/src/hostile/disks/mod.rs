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

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use ringfence_platform::local::{ArenaShape, LocalPlatform};

use super::args::HostileArgs;
use super::burden::{Burden, burden_columns};
use super::launcher::{Attachment, Rendezvous};
use super::orders::{DiskSpec, Entrance, HostileAnswer, HostileRole, NeighbourSetup, SinkSetup};
use super::process::{Footprint, Process};
use super::scene::{Cores, MTU_MIN, WARM_UP};
use crate::block::args::Rw;
use crate::block::orders::GuestSetup;
use crate::block::process::{DiskDomain, work};
use crate::harness::{Attempt, Case, Format, Layout, Report, Runs, Summary, left, progress, right};
use ringfence_driver::switchboard::{DiskFrontend, DriverStats};
use ringfence_sandbox::channel::Channel;
use ringfence_testkit::hostile::disk::adversary::{DiskAdversary, WrongResponse};
use ringfence_testkit::hostile::disk::attacks::{self, DiskAttackState};
use ringfence_testkit::hostile::disk::behaviour::DiskBehaviour;
use ringfence_testkit::hostile::handshake::{Pace, STEP_WITHIN};

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
    let rows = rows(wanted).into_iter();
    let cases: Vec<_> = rows.map(|behaviour| DiskCase { args, cores, behaviour }).collect();
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(layout(), Format::of(args.json))?.beside(&progress);
    Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(&runs.summary(case, |other| other.behaviour == DiskBehaviour::Honest))
    })?;
    report.end()
}

/// Disk row: one neighbour beside the victim.
#[derive(Clone)]
struct DiskCase<'a> {
    args: &'a HostileArgs,
    cores: Cores,
    behaviour: DiskBehaviour,
}

/// Result of one run. Rates are requests a second.
#[derive(Clone, Debug)]
struct DiskRun {
    victim_iops: f64,
    victim_p99_us: f64,
    neighbour_iops: f64,
    burden: Burden,
}

/// Returns the columns of a row: a neighbour's runs, each with the honest run of the same round.
fn layout<'a>() -> Layout<Summary<DiskCase<'a>>> {
    let layout = Layout::new()
        .column(
            "behaviour",
            |row: &Summary<DiskCase<'_>>| row.case.behaviour.name(),
            left("neighbour", 23),
        )
        .field("mode", |row| row.case.args.disk_mode.name())
        .field("block", |_| BLOCK)
        .field("depth", |_| DEPTH)
        .field("seconds", |row| row.case.args.seconds.as_secs_f64())
        .field("rounds", |row| row.runs.len())
        .column(
            "victim_iops",
            |row| row.median(|run| run.victim_iops),
            right("kiops", 8).unit(1e3).digits(1),
        )
        .column("ratio", |row| row.ratio(|run| run.victim_iops), right("ratio", 6).digits(2))
        .column("victim_p99_us", |row| row.median(|run| run.victim_p99_us), right("p99 us", 8))
        .column(
            "neighbour_iops",
            |row| row.median(|run| run.neighbour_iops),
            right("its kiops", 9).unit(1e3).digits(1),
        );
    burden_columns(layout, |run| &run.burden).legend(LEGEND)
}

const LEGEND: &str = "\
`kiops`: random reads of 4 KiB of the victim's, each checked, thousands a second; `ratio`: to what it gets
beside an honest neighbour; `p99 us`: how long 99 of 100 of them took at most. Every answer that a hostile
neighbour got was the right one. `its kiops`: requests of the neighbour's that were answered. `rss KiB`,
`fds`: what the driver domain's memory and descriptors grew by. All columns: docs/perf/howto.md";

impl Case for DiskCase<'_> {
    type Measured = DiskRun;

    fn name(&self) -> String {
        self.behaviour.name()
    }

    fn failure(&self) -> String {
        format!("neighbour {}", self.name())
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<DiskRun> {
        let (rendezvous, listener) = Rendezvous::new(attempt.number)?;
        let mtu = u16::try_from(MTU_MIN)?;
        let entrance =
            Entrance { socket: rendezvous.path(), mtu, mode: self.args.mode.name().to_owned() };
        let size = self.args.size;
        let setup = |role, core| NeighbourSetup { role, core, size, yields: false };
        let driver = setup(HostileRole::Driver(SinkSetup::VERIFYING), self.cores.driver);
        let driver = Process::start(&driver, &[listener.as_fd()])?;
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
                let role = HostileRole::HostileDisk { entrance, behaviour, disk };
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
            attempt.progress.suspend(|| {
                eprintln!("{name}: driver domain {driver}, victim {victim}, neighbour {beside}");
            });
        }
        let measured = Scene { driver, honest, hostile, attachment }.measure(self.args.seconds);
        drop(beside);
        measured
    }
}

impl DiskCase<'_> {
    /// Starts a guest that keeps the rules and works on command.
    fn honest(
        &self,
        entrance: &Entrance,
        disk: &DiskSpec,
        core: Option<usize>,
    ) -> anyhow::Result<(Attachment, DiskDomain)> {
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
        let guest = DiskDomain::guest(setup, attachment.hub.try_clone()?)?;
        Ok((attachment, guest))
    }
}

/// Processes of a row, all started.
struct Scene {
    driver: Process,
    /// The victim, then the neighbour if it is honest.
    honest: Vec<DiskDomain>,
    hostile: Option<Process>,
    /// Hub session of the victim.
    attachment: Attachment,
}

impl Scene {
    fn measure(&self, length: Duration) -> anyhow::Result<DiskRun> {
        work(&self.honest, WARM_UP)?;
        let before = (self.attachment.stats()?, self.driver.footprint()?, self.neighbour()?);
        let worked = work(&self.honest, length)?;
        let after = (self.attachment.stats()?, self.driver.footprint()?, self.neighbour()?);
        self.hostile.as_ref().map_or(Ok(()), Process::check)?;
        let victim = worked.first().context("the victim did not work")?;
        let seconds = Duration::from_nanos(victim.nanos.max(1)).as_secs_f64();
        let cores = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64() / seconds;
        let asked = |stats: &DriverStats| self.of_others(&stats.disks, ASKED);
        let neighbour = before.2.zip(after.2).map_or(0.0, |(b, a)| cores(b.cpu, a.cpu));
        Ok(DiskRun {
            victim_iops: victim.requests as f64 / seconds,
            victim_p99_us: victim.latencies.quantile_us(0.99),
            neighbour_iops: asked(&after.0).saturating_sub(asked(&before.0)) as f64 / seconds,
            burden: Burden {
                neighbour_cpu: neighbour,
                driver_cpu: cores(before.1.cpu, after.1.cpu),
                driver_rss_kib_growth: after.1.rss_kib - before.1.rss_kib,
                driver_fds_growth: after.1.fds - before.1.fds,
                rules: self.charges(&after.0)?,
            },
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
    behaviour: DiskBehaviour,
    disk: &DiskSpec,
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
                channel.send(&HostileAnswer::Ready, &[])?;
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
    let mut state = DiskAttackState::default();
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: HostileArgs,
    }

    fn run(victim_iops: f64) -> DiskRun {
        DiskRun {
            victim_iops,
            victim_p99_us: 100.0,
            neighbour_iops: 7.0,
            burden: Burden {
                neighbour_cpu: 0.5,
                driver_cpu: 1.0,
                driver_rss_kib_growth: 4,
                driver_fds_growth: 0,
                rules: BTreeMap::from([("rule".to_owned(), 2)]),
            },
        }
    }

    fn row<'a>(args: &'a HostileArgs, runs: &[f64], honest: &[f64]) -> Summary<DiskCase<'a>> {
        let cores = Cores { driver: None, victim: None, neighbour: None };
        let case = DiskCase { args, cores, behaviour: DiskBehaviour::EventStorm };
        let [runs, baseline] =
            [runs, honest].map(|all| all.iter().map(|rate| run(*rate)).collect());
        Summary { case, runs, baseline }
    }

    #[test]
    fn rates_are_medians_and_ratios_are_per_round() {
        let args = CommandLine::parse_from(["hostile", "--disk-mode", "copy"]).args;
        let row = row(&args, &[90.0, 800.0, 9.9], &[100.0, 1000.0, 10.0]);
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        assert_eq!((&json["victim_iops"], &json["ratio"]), (&90.0.into(), &0.9.into()));
        assert_eq!((&json["rules"]["rule"], &json["rounds"]), (&6.into(), &3.into()));
        assert_eq!(
            (&json["behaviour"], &json["mode"]),
            (&"disk-event-storm".into(), &"copy".into())
        );
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let args = CommandLine::parse_from(["hostile"]).args;
        let line = layout().line(&row(&args, &[1e5], &[1e5]));
        let (before, _) = line.split_once("  rule 2").unwrap();
        let heading = layout().heading();
        let (expected, _) = heading.split_once("  what").unwrap();
        assert_eq!(before.len(), expected.len(), "{line}");
    }
}
