//! `ringfence-bench vhost-user`: rate and cost of a device, by the way in which a machine hands its memory over.
//!
//! ```text
//!  ringfence-bench (front-end: vrings) ── socket ──> ringfence vhost-user blk | net | another program
//!                       └── socket ──> ringfence shield ── socket ──> ...
//! ```
//!
//! A kind of device is a `Workload`: the processes that serve it (`servers`), and its front-end (`front`). Each run has new
//! processes. The front-end warms up, then works for the measured time, then once more while system calls are counted.

pub mod args;
mod blk;
mod card;
mod disk;
mod front;
mod measure;
mod net;
mod report;
mod servers;

use self::args::{DeviceArgs, VhostUserArgs};

/// Runs the benchmark of a device.
pub(super) fn run(args: &VhostUserArgs) -> anyhow::Result<()> {
    match &args.device {
        DeviceArgs::Blk(args) => blk::run(args),
        DeviceArgs::Net(args) => net::run(args),
    }
}
