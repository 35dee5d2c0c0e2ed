//! `ringfence vhost-user`: devices of virtual machines, each served by a process of its own in a sandbox. `ringfence
//! pool-proxy` and `ringfence shield`: a proxy or a shield before a device of another program, likewise.
//!
//! ```text
//! user ── starts ──> session ── spawns ──> disk process <── socket ──> hypervisor
//!                    opens disk and socket   (ringfence_driver::machine)
//! user ── starts ──> session ── spawns ──> card or uplink process <── socket ──> hypervisor
//!                    opens socket and TAP, or attaches to a switch  (`net`)
//! user ── starts ──> session ── spawns ──> proxy process <── socket ──> hypervisor
//!                    opens sockets           (ringfence_driver::pool_proxy)  └──> backend
//!                                            (ringfence_driver::shield)
//! ```

mod blk;
mod common;
mod control;
mod net;
mod proxy;
mod session;
mod shield;

use clap::{Args, Subcommand};
use ringfence_hostnet::causes::causes;
use ringfence_sandbox::STATUS_FAILED;

pub use blk::BlkArgs;
pub use net::NetArgs;
pub use proxy::PoolProxyArgs;
pub use shield::ShieldArgs;

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
    Net(Box<NetArgs>),
    Blk(Box<BlkArgs>),
}

/// Serves the device until a signal ends it. Returns the exit status.
pub fn main(args: &VhostUserArgs) -> u8 {
    let served = match &args.device {
        DeviceArgs::Net(args) => net::serve(args),
        DeviceArgs::Blk(args) => blk::serve(args),
    };
    served.unwrap_or_else(|error| {
        eprintln!("ringfence: vhost-user: {}", causes(&error));
        STATUS_FAILED
    })
}

/// Stands between hypervisors and a backend until a signal ends it. Returns the exit status.
pub fn pool_proxy(args: &PoolProxyArgs) -> u8 {
    proxy::serve(args).unwrap_or_else(|error| {
        eprintln!("ringfence: pool-proxy: {}", causes(&error));
        STATUS_FAILED
    })
}

/// Keeps the memory of a machine from a backend until a signal ends it. Returns the exit status.
pub fn shield(args: &ShieldArgs) -> u8 {
    shield::serve(args).unwrap_or_else(|error| {
        eprintln!("ringfence: shield: {}", causes(&error));
        STATUS_FAILED
    })
}
