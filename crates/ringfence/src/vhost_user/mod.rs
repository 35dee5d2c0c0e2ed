//! `ringfence vhost-user`: devices of virtual machines, each served by a process of its own in a sandbox. `ringfence
//! pool-proxy`: a proxy before a device of another program, likewise.
//!
//! ```text
//! user ── starts ──> session ── spawns ──> disk process <── socket ──> hypervisor
//!                    opens disk and socket   (ringfence_driver::machine)
//! user ── starts ──> session ── spawns ──> card or uplink process <── socket ──> hypervisor
//!                    opens socket and TAP, or attaches to a switch  (`net`)
//! user ── starts ──> session ── spawns ──> proxy process <── socket ──> hypervisor
//!                    opens sockets           (ringfence_driver::pool_proxy)  └──> backend
//! ```

mod blk;
mod control;
mod net;
mod proxy;
mod session;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ringfence_hostnet::causes::causes;
use ringfence_pasta::machine::{SocketFile, listen_at};
use ringfence_sandbox::STATUS_FAILED;

pub use blk::BlkArgs;
pub use net::NetArgs;
pub use proxy::PoolProxyArgs;

/// Maximum wait for a socket at which another process listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(2);

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

/// Creates the socket. The process of a session that was killed holds it for a moment.
fn listen(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    let until = Instant::now() + LISTEN_TIMEOUT;
    loop {
        match listen_at(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            listening => return listening,
        }
    }
}

fn say(text: impl std::fmt::Display) {
    eprintln!("ringfence: {text}");
}
