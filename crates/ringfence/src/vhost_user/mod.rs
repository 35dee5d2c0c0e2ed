//! `ringfence vhost-user`: devices of virtual machines, each served by a process of its own in a sandbox.
//!
//! ```text
//! user ── starts ──> session ── spawns ──> disk process <── socket ──> hypervisor
//!                    opens disk and socket   (ringfence_driver::machine)
//! ```

mod blk;

use clap::{Args, Subcommand};
use ringfence_hostnet::causes::causes;
use ringfence_sandbox::STATUS_FAILED;

pub use blk::BlkArgs;

/// Serve a device to virtual machines over vhost-user
///
/// A hypervisor (QEMU) connects to a socket and hands over memory: a pool alone, or all of the machine's. The device
/// runs in a process of its own, in a sandbox, until a signal ends it.
#[derive(Debug, Args)]
pub struct VhostUserArgs {
    /// Kind of the device
    #[command(subcommand)]
    pub device: DeviceArgs,
}

/// Kinds of devices, with the options of each.
#[derive(Debug, Subcommand)]
pub enum DeviceArgs {
    Blk(Box<BlkArgs>),
}

/// Serves the device until a signal ends it. Returns the exit status.
pub fn main(args: &VhostUserArgs) -> u8 {
    let served = match &args.device {
        DeviceArgs::Blk(args) => blk::serve(args),
    };
    served.unwrap_or_else(|error| {
        eprintln!("ringfence: vhost-user: {}", causes(&error));
        STATUS_FAILED
    })
}
