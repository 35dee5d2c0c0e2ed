//! `ringfence attach`: a frontend in user space, for a network interface (`vif`) or a disk (`vbd`) of a Xen guest.
//!
//! # How it works
//!
//! A device without a driver in the guest's kernel is a directory in xenstore. The process that grants rings
//! and writes their keys there is its frontend. The kernel's Xen devices provide the pages (gntalloc) and event channels.
//!
//! Pages that idle return to the system under memory pressure, as in the frontend of `ringfence run`. SIGUSR1 prints how many
//! are lent.
//!
//! Interface and disk stay while backends connect and disconnect. At SIGTERM the process closes the device, and
//! waits until the backend has unmapped every page. If the process was killed instead, the next one resets
//! the device first (`claim`).

pub mod claim;
mod vbd;
mod vif;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ringfence_net::features::OffloadKeys;
use ringfence_net::staging::TxStaging;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{Platform, PlatformChoice, PlatformError};
use ringfence_sys::tap::TapError;
use rustix::process::Signal;

use self::claim::ClaimError;
use crate::disks::DiskError;
use crate::link::LinkError;
use crate::options::staging_parser;
use ringfence_driver::switchboard::WindowLevels;
use ringfence_hostnet::interface::parse_interface;
use ringfence_hostnet::log::LineBudget;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::isolation::{SandboxError, View};
use ringfence_sandbox::signals::{Signals, name as signal_name};

/// Time that the backend has to disconnect.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
Examples:
  Take over the first interface from the kernel's driver:
    echo vif-0 > /sys/bus/xen/drivers/vif/unbind
    ringfence attach --device 0 --name eth0 &
    ip link set eth0 up

  Give it back: end the process (SIGTERM), and then
    echo vif-0 > /sys/bus/xen/drivers/vif/bind

  Read a disk that the kernel's driver does not have:
    ringfence attach --disk xvdb --socket /run/xvdb.sock &
    nbdcopy nbd+unix:///?socket=/run/xvdb.sock copy.img";

/// Drive one of this Xen guest's network interfaces, or disks, from user space
///
/// For a guest whose own driver lacks a feature. The interface becomes a TAP with the address and the
/// MTU that the toolstack gave it; addresses and routes are yours to set. A disk becomes an NBD export at a Unix
/// socket. Both work with any backend, and stay while backends come and go. Ends at SIGTERM or SIGINT. At SIGUSR1
/// it prints how many pages its grant windows have, and how often a page was used again without a grant operation.
///
/// Needs root, and the kernel's xen-gntalloc and xen-evtchn, for an interface also tun.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct AttachArgs {
    /// Number of the interface in the guest's configuration, from 0 [default: the one without a driver]
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,

    /// Serve this disk of the guest's configuration, such as xvdb, in place of an interface
    #[arg(long, value_name = "DEV", requires = "socket",
          conflicts_with_all = ["device", "name", "mtu", "staging", "window_churn", "offload"])]
    pub disk: Option<String>,

    /// Unix socket at which NBD clients find the disk; only root can connect. The file may stay at the end, and the next
    /// start replaces it
    #[arg(long, value_name = "FILE", requires = "disk")]
    pub socket: Option<PathBuf>,

    /// Name of the interface; %d stands for a free number
    #[arg(long, value_name = "NAME", default_value = "eth%d", value_parser = parse_name)]
    pub name: String,

    /// Longest IP packet, in bytes [default: as the toolstack says, or 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..=65521))]
    pub mtu: Option<u16>,

    /// Ask the backend to keep the pages of the rings mapped (staging grants), if it can
    #[arg(long, value_name = "PAGES", num_args = 0..=1, require_equals = true,
          default_missing_value = "full", value_parser = staging_parser())]
    pub staging: Option<TxStaging>,

    /// Put the buffers into grant windows, which this side issues and revokes without the backend's help, if
    /// the backend supports them; on Xen this needs a hypervisor with windows and the module ringfence-window
    #[arg(long)]
    pub windows: bool,

    /// Revoke one page after so many have come back from the backend, as a guest does that needs its pages for other
    /// purposes too; 1 leaves no reuse. For measurements
    #[arg(long, value_name = "N", default_value_t = 0, hide = true)]
    pub window_churn: u32,

    /// Number of queues, if the backend offers them and there are pages for them; each queue has a thread, as
    /// far as there are processors
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub queues: u32,

    /// Offloads that the interface accepts: `all`, `none`, or some of sg,tso4,tso6,csum4,csum6
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL)]
    pub offload: OffloadKeys,

    /// Explain each step
    #[arg(short, long)]
    pub verbose: bool,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = PlatformChoice::parse, hide = true)]
    pub platform: PlatformChoice,
}

fn parse_name(text: &str) -> Result<String, String> {
    // The kernel replaces the two characters by a number.
    parse_interface(&text.replacen("%d", "0", 1)).map(|_| text.to_owned())
}

/// Reasons for which the device cannot be served, or no longer.
#[derive(Debug, thiserror::Error)]
enum AttachError {
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error("--socket {}: {source}", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error("interface `{name}`: {what}: {source}")]
    Interface { name: String, what: &'static str, source: io::Error },
    #[error("interface `{name}` is of no more use: {why}")]
    InterfaceGone { name: String, why: String },
    #[error(
        "{0}. Raise the limit of the module: `echo 4096 > /sys/module/xen_gntalloc/parameters/limit`"
    )]
    NoPages(Box<dyn std::error::Error>),
    #[error(transparent)]
    Confinement(#[from] SandboxError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Serves the device until a signal ends the process. Returns the exit status.
pub fn main(args: &AttachArgs) -> u8 {
    ringfence_hostnet::log::to_stderr(args.verbose);
    let attached = match &args.platform {
        PlatformChoice::Xen => XenPlatform::open(Side::Frontend)
            .map_err(AttachError::from)
            .and_then(|p| attach(p, args)),
        PlatformChoice::Local(socket) => {
            let (queues, disks) = if args.disk.is_some() { (0, 1) } else { (args.queues, 0) };
            let arena = crate::process::arena(queues, disks);
            LocalPlatform::join(socket)
                .map_err(AttachError::from)
                .and_then(|platform| attach(platform.with_arena(arena), args))
        }
    };
    match attached {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: attach: {error}");
            STATUS_FAILED
        }
    }
}

fn attach<P: Platform>(platform: P, args: &AttachArgs) -> Result<(), AttachError> {
    match (&args.disk, &args.socket) {
        (Some(disk), Some(socket)) => vbd::attach(&platform, args, disk, socket),
        _ => vif::attach(platform, args),
    }
}

/// Signals of the process: two end it, the third asks for the levels of lent pages.
fn own_signals() -> io::Result<Signals> {
    Signals::new(&[Signal::INT, Signal::TERM, Signal::USR1])
}

/// Takes the signals that have arrived, and calls `asked` for each that asks for levels. Returns `true` if one ends the process.
fn is_told_to_end(signals: &Signals, asked: impl Fn()) -> io::Result<bool> {
    while let Some(arrived) = signals.next()? {
        if arrived.number != Signal::USR1.as_raw() {
            tracing::info!(signal = signal_name(arrived.number).unwrap_or("signal"), "leaving");
            return Ok(true);
        }
        asked();
    }
    Ok(false)
}

/// Reports of a device's connection, within a budget of lines: a backend may connect and disconnect without limit.
#[derive(Default)]
struct ConnectionLog {
    was_up: bool,
    lines: LineBudget,
}

impl ConnectionLog {
    /// Writes a line if the state has changed since the last call.
    fn record(&mut self, name: &str, is_up: bool) {
        if is_up == std::mem::replace(&mut self.was_up, is_up) {
            return;
        }
        if let Some(unlogged) = self.lines.take() {
            let what = if is_up { "connected" } else { "disconnected" };
            tracing::info!(name, unlogged, "{what}");
        }
    }
}

/// Warns if the backend has not disconnected in time.
fn warn_unless(has_let_go: bool) {
    if !has_let_go {
        tracing::warn!("the backend did not let go in time");
    }
}

/// Returns the view of the files of the host that the frontend needs while it runs.
fn view() -> View {
    View::default()
        .read("/sys")
        .read("/proc/self")
        .read("/run/xenstored")
        .read("/var/run/xenstored")
        .devices("/dev/xen")
        .devices("/dev/ringfence-window")
}

/// Formats the levels of the grant windows, over all queues since they were made.
fn levels_line(levels: Option<WindowLevels>) -> String {
    let Some(levels) = levels else { return "no grant windows".to_owned() };
    let WindowLevels { reused, issued, evicted, pages, pages_in_use } = levels;
    format!(
        "grant windows: reused {reused} issued {issued} evicted {evicted} pages {pages} in use {pages_in_use}"
    )
}
