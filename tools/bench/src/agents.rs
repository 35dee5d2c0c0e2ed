//! Commands of the test agents: `ringfence-bench internal conformance`, `control-ring` and `hostile-guest`.
//!
//! The agents are in `testkit`. This module selects the platform and the device, and prints the errors.

use clap::Args;
use ringfence_frontend::attach::claim;
use ringfence_hostnet::causes::causes;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{Platform, PlatformChoice};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_testkit::agents::conformance::{self, ConformanceArgs};
use ringfence_testkit::agents::control_ring::{self, ControlRingArgs, ControlRingTarget};
use ringfence_testkit::agents::hostile_guest::{self, HostileGuestArgs};

use crate::harness::STATUS_BENCH_FAILED;

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
        claim::claim(&mut store, platform.domid(), command.device)?;
    claim::reset(&mut store, &device, &backend)?;
    drop(store);
    control_ring::run(platform, ControlRingTarget { device, backend }, &command.agent)
}

/// Runs the adversary guest. Returns the exit status.
pub(super) fn hostile_guest(args: &HostileGuestArgs) -> u8 {
    status(hostile_guest::run(args), "hostile guest", STATUS_BENCH_FAILED)
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
