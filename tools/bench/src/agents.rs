//! Commands of the test agents: `ringfence-bench internal conformance`, `control-ring`, `disk-frontend` and
//! `hostile-guest`.
//!
//! The agents are in `testkit`. This module selects the platform and the device, and prints the errors.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use ringfence_block::storage::Disk;
use ringfence_driver::switchboard::DiskFrontend;
use ringfence_frontend::attach::claim;
use ringfence_hostnet::causes::causes;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{DomId, Platform, PlatformChoice};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_testkit::agents::conformance::{self, ConformanceArgs};
use ringfence_testkit::agents::control_ring::{self, ControlRingArgs, ControlRingTarget};
use ringfence_testkit::agents::disk_frontend::{self, DiskFrontendArgs, DiskFrontendTarget};
use ringfence_testkit::agents::hostile_guest::{self, HostileGuestArgs};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::StoreAccess;

use crate::block::args::Rw;
use crate::block::domain::Worker;
use crate::block::orders::GuestSetup;
use crate::harness::STATUS_BENCH_FAILED;

/// Bytes of each request of the step `load`.
const BLOCK: u32 = 4096;
/// Requests in flight of each queue in the step `load`.
const LOAD_DEPTH: u16 = 8;
/// Bytes of the disk that each queue uses in the step `load`.
const SPAN: u64 = 2 << 20;

/// Sends every message of the control ring to a backend
#[derive(Debug, Args)]
pub struct ControlRingCommand {
    /// Number of the interface [default: the one without a driver]
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,

    /// Options of the agent.
    #[command(flatten)]
    pub agent: ControlRingArgs,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = PlatformChoice::parse)]
    pub platform: PlatformChoice,
}

/// Runs one half of the conformance suite. Returns the exit status.
pub(super) fn conformance(args: &ConformanceArgs) -> u8 {
    match conformance::run(args) {
        Ok(true) => 0,
        Ok(false) => STATUS_FAILED,
        Err(error) => {
            eprintln!("ringfence: conformance: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

/// Sends all messages of the control ring. Returns the exit status.
pub(super) fn control_ring(command: &ControlRingCommand) -> u8 {
    let asked = match &command.platform {
        PlatformChoice::Xen => XenPlatform::open(Side::Frontend)
            .map_err(anyhow::Error::from)
            .and_then(|platform| claim_and_ask(&platform, command)),
        PlatformChoice::Local(socket) => LocalPlatform::join(socket)
            .map_err(anyhow::Error::from)
            .and_then(|platform| claim_and_ask(&platform, command)),
    };
    status(asked, "control ring", STATUS_FAILED)
}

/// Takes over the vif, as `ringfence attach` does, and asks its backend.
fn claim_and_ask<P: Platform>(platform: &P, command: &ControlRingCommand) -> anyhow::Result<()> {
    let mut store = platform.store()?;
    let claim::Claimed { device, backend, .. } =
        claim::claim(&mut store, platform.domid(), &claim::Wanted::Interface(command.device))?;
    claim::reset(&mut store, &device, &backend)?;
    drop(store);
    control_ring::run(platform, ControlRingTarget { device, backend }, &command.agent)
}

/// Runs the adversary guest. Returns the exit status.
pub(super) fn hostile_guest(args: &HostileGuestArgs) -> u8 {
    status(hostile_guest::run(args), "hostile guest", STATUS_BENCH_FAILED)
}

/// Drives a disk of this guest. Returns the exit status.
pub(super) fn disk_frontend(args: &DiskFrontendArgs) -> u8 {
    status(claim_and_drive(args), "disk frontend", STATUS_BENCH_FAILED)
}

/// Takes over the disk from the guest's driver, and takes the steps.
fn claim_and_drive(args: &DiskFrontendArgs) -> anyhow::Result<()> {
    let platform = XenPlatform::open(Side::Frontend)?;
    let mut store = platform.store()?;
    let (kind, frontend, handle) = (DeviceKind::Vbd, platform.domid(), args.handle);
    let mut device = DeviceId { kind, frontend, backend: DomId(0), handle };
    let backend = store.read_u16(&format!("{}/backend-id", device.frontend_path()));
    device.backend = DomId(backend.with_context(|| format!("the disk {handle}"))?);
    let backend = claim::backend_path(&mut store, &device)?;
    claim::reset(&mut store, &device, &backend)?;
    drop(store);
    let target = DiskFrontendTarget { device, backend };
    disk_frontend::run(&platform, target, args, &|disk, length| load(disk, length, args))
}

/// Runs one worker for each queue on its own part of the disk. Returns the number of verified reads.
fn load(disk: &dyn Disk, length: Duration, args: &DiskFrontendArgs) -> anyhow::Result<u64> {
    let worker = |number: u16| -> anyhow::Result<u64> {
        let setup = GuestSetup {
            domain: number,
            handle: args.handle,
            core: None,
            frontend: DiskFrontend { persistent: true, windows: args.windows },
            block: BLOCK,
            rw: Rw::RandRead,
            depth: LOAD_DEPTH,
            queues: args.queues,
            base: u64::from(number) * SPAN,
            span: SPAN,
        };
        let mut worker = Worker::new(disk.queue(LOAD_DEPTH.into())?, setup)?;
        worker.fill()?;
        worker.work(length)?;
        Ok(worker.requests())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..args.queues).map(|number| scope.spawn(move || worker(number))).collect();
        workers.into_iter().try_fold(0, |sum, worker| {
            let requests = worker.join().unwrap_or_else(|_| bail!("a worker panicked"))?;
            Ok(sum + requests)
        })
    })
}

/// Prints an error with the name of the agent. Returns the exit status.
fn status(outcome: anyhow::Result<()>, agent: &str, failed: u8) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: {agent}: {}", causes(&error));
            failed
        }
    }
}
