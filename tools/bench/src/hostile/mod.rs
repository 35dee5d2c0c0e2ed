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
//! `ringfence-bench tail` (`tail`) has the same scene with a victim that sends one packet at a time and waits for the
//! port's answer.
//!
//! The charges come from the driver domain's own counters at the end: rule violations by name, the
//! hub's faults, and dropped frames of every port but the victim's. The victim must have no charge.

pub mod args;
mod burden;
pub mod disks;
mod driver;
mod honest;
pub(crate) mod launcher;
mod neighbour;
pub(crate) mod orders;
mod packets;
pub(crate) mod process;
mod scene;
pub(crate) mod sink;
pub mod tail;

use std::io::Write;

use anyhow::Context;
use clap::ValueEnum;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::Out;
use ringfence_sandbox::channel::{Channel, expect_fds};
use ringfence_testkit::hostile::behaviour::Behaviour;
use ringfence_testkit::hostile::disk::behaviour::DiskBehaviour;

use crate::affinity::bind;
use crate::harness::STATUS_BENCH_FAILED;
use args::HostileArgs;
use orders::{HostileAnswer, HostileRole, NeighbourSetup};
use scene::Cores;

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
        packets::run(args, &rows, cores)?;
    }
    if !rows.is_empty() && !disks.is_empty() && !args.json {
        writeln!(out)?;
    }
    if !disks.is_empty() {
        disks::run(args, &disks, cores)?;
    }
    Ok(())
}

/// Runs `ringfence-bench internal bench-hostile`, one process of a row. Returns the exit status.
pub(super) fn process_main() -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel).map(|()| 0),
        |error| (STATUS_BENCH_FAILED, HostileAnswer::Failed(causes(&error))),
    )
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    ringfence_sandbox::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<NeighbourSetup>()?;
    if let Some(core) = setup.core {
        bind(core)?;
    }
    if setup.yields {
        ringfence_sys::priority::run_when_idle().context("the scheduling class")?;
    }
    match &setup.role {
        HostileRole::Driver(sink) => {
            let [listener] = expect_fds(fds)?;
            // A second thread of the driver answers the parent.
            driver::serve(channel.try_clone()?, (setup.size, *sink), listener)
        }
        HostileRole::Asking { place, talks } => {
            let [hub] = expect_fds(fds)?;
            tail::asking::serve(channel, &setup, place, *talks, hub)
        }
        HostileRole::Honest { place, talks } => {
            let [hub] = expect_fds(fds)?;
            honest::serve(channel, &setup, place, *talks, hub)
        }
        HostileRole::Hostile { entrance, behaviour } => {
            neighbour::serve(channel, entrance, *behaviour)
        }
        HostileRole::HostileDisk { entrance, behaviour, disk } => {
            disks::serve(channel, entrance, *behaviour, disk)
        }
    }
}
