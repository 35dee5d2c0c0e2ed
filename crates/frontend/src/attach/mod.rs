//! `ringfence attach`: a network frontend in user space, for a Xen guest.
//!
//! # How it works
//!
//! A vif without a driver in the guest's kernel is a directory in xenstore. The process that grants rings
//! and writes their keys there is its frontend. This is [`VifFrontend`] with pages from gntalloc, and with
//! a TAP interface as the network interface.
//!
//! With grant windows, pages of idle buffers return to the system under memory pressure, as in the frontend of
//! `ringfence run`. SIGUSR1 prints the levels of the windows.
//!
//! The interface stays while backends connect and disconnect. At SIGTERM the process closes the device, and
//! waits until the backend has unmapped every page. If the process was killed instead, the next one resets
//! the device first (`claim`).

pub mod claim;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::features::OffloadKeys;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{Platform, PlatformChoice};
use ringfence_sys::tap::{Tap, TapError};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;

use self::claim::{ClaimError, Claimed};
use crate::link::{Link, LinkError, LinkEvent};
use crate::options::staging_parser;
use ringfence_driver::switchboard::WindowLevels;
use ringfence_driver::workers::worker_count;
use ringfence_hostnet::interface::parse_interface;
use ringfence_hostnet::log::LineBudget;
use ringfence_hostnet::netlink::{LinkChange, Netlink};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::isolation::{Confinement, SandboxError, Sockets, View};
use ringfence_sandbox::signals::{Signals, name as signal_name};
use ringfence_sys::pressure::PressureMonitor;

/// Time that the backend has to disconnect.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of events that are handled before the states are read again.
const EVENTS_PER_ROUND: usize = 64;

const EXAMPLES: &str = "\
Examples:
  Take over the first interface from the kernel's driver:
      Take over the first interface from the kernel's driver:
    ringfence attach --device 0 --name eth0 &
    ip link set eth0 up

    Give it back: end the process (SIGTERM), and then
    echo vif-0 > /sys/bus/xen/drivers/vif/bind";

/// Drive one of this Xen guest's network interfaces from user space
///
/// For a guest whose own driver lacks a feature. The interface becomes a TAP with the address and the
/// MTU that the toolstack gave it; addresses and routes are yours to set. It works with any backend,
/// and stays while backends come and go. Ends at SIGTERM or SIGINT. At SIGUSR1 it prints how many pages its
/// grant windows have, and how often a page was used again without a grant operation.
///
/// Needs root, and the kernel's xen-gntalloc, xen-evtchn and tun.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct AttachArgs {
    /// Number of the interface in the guest's configuration, from 0 [default: the one without a driver]
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,

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

/// Reasons for which the interface cannot be served, or no longer.
#[derive(Debug, thiserror::Error)]
enum AttachError {
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error("interface `{name}`: {what}: {source}")]
    Interface { name: String, what: &'static str, source: io::Error },
    #[error("interface `{name}` is of no more use: {why}")]
    InterfaceGone { name: String, why: String },
    #[error(
        "{0}. Raise the limit of the module: `echo 4096 > /sys/module/xen_gntalloc/parameters/limit`"
    )]
    NoPages(FrontendError),
    #[error(transparent)]
    Confinement(#[from] SandboxError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Serves the interface until a signal ends the process. Returns the exit status.
pub fn main(args: &AttachArgs) -> u8 {
    ringfence_hostnet::log::to_stderr(args.verbose);
    let attached = match &args.platform {
        PlatformChoice::Xen => XenPlatform::open(Side::Frontend)
            .map_err(|error| LinkError::from(error).into())
            .and_then(|platform| attach(platform, args)),
        PlatformChoice::Local(socket) => {
            LocalPlatform::join(socket).map_err(|error| LinkError::from(error).into()).and_then(
                |platform| attach(platform.with_arena(crate::process::arena(args.queues, 0)), args),
            )
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
    let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::USR1])?;
    let mut store = platform.store().map_err(LinkError::from)?;
    let claimed = claim::claim(&mut store, platform.domid(), args.device)?;
    let mtu = args.mtu.or(claimed.mtu).unwrap_or(ringfence_wire::netif::keys::MTU_DEFAULT);
    let taps = make_interface(&args.name, &claimed, mtu, worker_count(args.queues))?;
    let name = taps.first().map(|tap| tap.name.clone()).unwrap_or_default();
    let mut sizes = WindowSizes::for_queues(args.queues);
    sizes.policy.churn = args.window_churn;
    // Its files cannot be opened any more once the view of the file system is fixed.
    let monitor =
        if args.windows { PressureMonitor::open() } else { PressureMonitor::without_triggers() };
    // The interface exists. No later step needs a capability.
    let confinement = Confinement::enter(CapabilitySet::empty(), &view(), Sockets::NONE)?;
    let vif = VifFrontend::new(&platform, claimed.device, mtu)
        .map_err(LinkError::from)?
        .with_backend(claimed.backend.clone())
        .with_offloads(args.offload)
        .with_queues(args.queues)
        .with_staging(args.staging.unwrap_or_default());
    if let Some(why) = monitor.errors() {
        tracing::warn!("{why}");
    }
    let vif = if args.windows { vif.with_windows(&platform, sizes) } else { vif };
    claim::reset(&mut store, &claimed.device, &claimed.backend)?;
    let port = |tap: Tap| {
        let port = TapPort::new(tap.fd, tap.offloads, mtu, Arc::clone(platform.counters()));
        Box::new(port) as Box<dyn Port>
    };
    let ports = taps.into_iter().map(port).collect();
    let mut link = Link::start(platform, vif, ports)?;
    confinement.lock()?;
    eprintln!(
        "ringfence: {} is interface {name}",
        ringfence_driver::ports::device_name(&claimed.device)
    );
    let served = serve(&mut link, &signals, &name, (monitor, sizes.pages));
    // In any case, revoke the granted pages.
    let left = leave(&mut link, &claimed);
    served.and(left)
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

/// Creates the interface with `queues` queues. It is down, as every new interface is.
fn make_interface(
    name: &str,
    claimed: &Claimed,
    mtu: u16,
    queues: usize,
) -> Result<Vec<Tap>, AttachError> {
    let taps = Tap::create_queues(name, queues)?;
    let name = taps.first().map(|tap| tap.name.clone()).unwrap_or_default();
    let set = || {
        let mut netlink = Netlink::open()?;
        let index = netlink.index_of(&name)?;
        let (mac, mtu) = (claimed.mac, Some(mtu.into()));
        netlink.change_link(index, &LinkChange { mac, mtu, ..LinkChange::default() })
    };
    let what = "address and MTU";
    set().map_err(|source| AttachError::Interface { name: name.clone(), what, source })?;
    Ok(taps)
}

/// Connects to backends, and reconnects, until a signal arrives or the interface fails.
fn serve<P: Platform>(
    link: &mut Link<P>,
    signals: &Signals,
    name: &str,
    (mut monitor, window_pages): (PressureMonitor, u32),
) -> Result<(), AttachError> {
    let mut was_up = false;
    // A backend may connect and disconnect without limit.
    let (mut changes, mut ends) = (LineBudget::new(), LineBudget::new());
    loop {
        link.look().map_err(|error| match error {
            LinkError::Frontend(error @ FrontendError::Lend(_)) => AttachError::NoPages(error),
            other => other.into(),
        })?;
        if link.is_up() != was_up {
            was_up = link.is_up();
            if let Some(unlogged) = changes.take() {
                let what = if was_up { "connected" } else { "disconnected" };
                tracing::info!(name, unlogged, "{what}");
            }
        }
        let mut any = false;
        for _ in 0..EVENTS_PER_ROUND {
            let Some(happened) = link.next_event()? else { break };
            any = true;
            match happened {
                LinkEvent::Store => {}
                LinkEvent::VifGone(why) => {
                    if let Some(unlogged) = ends.take() {
                        tracing::warn!(name, %why, unlogged, "the connection ended");
                    }
                }
                LinkEvent::GuestGone(why) => {
                    return Err(AttachError::InterfaceGone { name: name.to_owned(), why });
                }
            }
        }
        let mut fds = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        fds.extend(link.wait_fds());
        let (_, share) = monitor.wait(fds, any.then(Instant::now))?;
        if let Some(share) = share {
            link.set_share(share, window_pages);
        }
        while let Some(arrived) = signals.next()? {
            if arrived.number != Signal::USR1.as_raw() {
                tracing::info!(signal = signal_name(arrived.number).unwrap_or("signal"), "leaving");
                return Ok(());
            }
            eprintln!("ringfence: {name}: {}", levels_line(link.window_levels().map(Into::into)));
        }
    }
}

/// Formats the levels of the grant windows, over all queues since they were made.
fn levels_line(levels: Option<WindowLevels>) -> String {
    let Some(levels) = levels else { return "no grant windows".to_owned() };
    let WindowLevels { reused, issued, evicted, pages, pages_in_use } = levels;
    format!(
        "grant windows: reused {reused} issued {issued} evicted {evicted} pages {pages} in use {pages_in_use}"
    )
}

/// Closes the device, waits until the backend has disconnected, and revokes the grants.
fn leave<P: Platform>(link: &mut Link<P>, claimed: &Claimed) -> Result<(), AttachError> {
    let (vif, store) = link.vif();
    vif.begin_close(store).map_err(LinkError::from)?;
    if !claim::await_backend_disconnect(store, &claimed.backend, Instant::now() + CLOSE_TIMEOUT)? {
        tracing::warn!("the backend did not let go in time");
    }
    Ok(link.close()?)
}
