//! `ringfence attach`: in a Xen guest, a network frontend in user space.
//!
//! # Theory of operation
//!
//! A vif whose driver in the guest's kernel was unbound, or is not there, is just a directory in
//! xenstore: whoever lends rings and says so in its keys is its frontend. This is
//! [`VifFrontend`], with pages from gntalloc, and a TAP interface in place of a driver's.
//!
//! The interface stays while backends come and go. At SIGTERM the backend is told, and has let go of
//! every page before this process ends; one that was killed instead is put in order by the next one
//! (`claim`).

pub mod claim;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;
use ringfence_frame::commands::TxStaging;
use ringfence_frame::tap::TapPort;
use ringfence_net::features::OffloadKeys;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::Platform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_sys::tap::{Tap, TapError};
use rustix::event::{PollFd, PollFlags};
use rustix::thread::CapabilitySet;

use self::claim::{ClaimError, Claimed};
use crate::cli::{parse_interface, staging_parser};
use crate::frontend::link::{Happened, Link, LinkError};
use crate::log::LineBudget;
use crate::netlink::{LinkChange, Netlink};
use crate::plane::threads;
use crate::serve::{PlatformChoice, join_hub, parse_platform};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::channel::poll_until;
use ringfence_sandbox::isolation::{Confinement, SandboxError, Sockets, View};
use ringfence_sandbox::signals::{Signals, name as signal_name};

/// How long the backend may take to let go.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);
/// Things that happened which are taken before the states are looked at again.
const TAKEN_A_TURN: usize = 64;

const EXAMPLES: &str = "\
Examples:
  Take over the first interface from the kernel's driver:
    echo vif-0 > /sys/bus/xen/drivers/vif/unbind
    ringfence attach --device 0 --name eth0 &
    ip link set eth0 up

  Give it back: end this (SIGTERM), and then
    echo vif-0 > /sys/bus/xen/drivers/vif/bind";

/// Drive one of this Xen guest's network interfaces from user space
///
/// For a guest whose own driver lacks a feature. The interface becomes a TAP with the address and the
/// MTU that the toolstack gave it; addresses and routes are yours to set. It works with any backend,
/// and stays while backends come and go. Ends at SIGTERM or SIGINT.
///
/// Needs root, and the kernel's xen-gntalloc, xen-evtchn and tun.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct AttachArgs {
    /// Which interface, by the number in the guest's configuration, from 0 [default: the one that
    /// no driver has]
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,

    /// What the interface is called; %d stands for a number that is free
    #[arg(long, value_name = "NAME", default_value = "eth%d", value_parser = parse_name)]
    pub name: String,

    /// The longest IP packet, in bytes [default: as the toolstack says, or 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..=65521))]
    pub mtu: Option<u16>,

    /// Ask the backend to keep the pages of the rings mapped (staging grants), if it can
    #[arg(long, value_name = "PAGES", num_args = 0..=1, require_equals = true,
          default_missing_value = "full", value_parser = staging_parser())]
    pub staging: Option<TxStaging>,

    /// Have the buffers in windows, which are granted and taken back without the backend's help, if it
    /// opens them; on Xen there are none
    #[arg(long)]
    pub windows: bool,

    /// How many queues to have, if the backend offers them and there are pages for them; each has a
    /// thread, as far as there are processors
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub queues: u32,

    /// What is taken unfinished: `all`, `none`, or some of sg,tso4,tso6,csum4,csum6
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL)]
    pub offload: OffloadKeys,

    /// Explain each step
    #[arg(short, long)]
    pub verbose: bool,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = parse_platform, hide = true)]
    pub platform: PlatformChoice,
}

fn parse_name(text: &str) -> Result<String, String> {
    // The kernel puts a number in place of the two characters.
    parse_interface(&text.replacen("%d", "0", 1)).map(|_| text.to_owned())
}

/// Why the interface is not, or no longer, there.
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

/// Drives the interface until told to end. Returns the exit status.
pub fn main(args: &AttachArgs) -> u8 {
    crate::log::to_stderr(args.verbose);
    let attached = match &args.platform {
        PlatformChoice::Xen => XenPlatform::open(Side::Frontend)
            .map_err(|error| LinkError::from(error).into())
            .and_then(|platform| attach(platform, args)),
        PlatformChoice::Local(socket) => {
            join_hub(socket).map_err(|error| LinkError::from(error).into()).and_then(|platform| {
                attach(platform.with_arena(crate::frontend::arena(args.queues, 0)), args)
            })
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
    let signals = Signals::new(&[Signal::SIGINT, Signal::SIGTERM])?;
    let mut store = platform.store().map_err(LinkError::from)?;
    let claimed = claim::claim(&mut store, platform.domid(), args.device)?;
    let mtu = args.mtu.or(claimed.mtu).unwrap_or(ringfence_wire::netif::keys::MTU_DEFAULT);
    let taps = make_interface(&args.name, &claimed, mtu, threads(args.queues))?;
    let name = taps.first().map(|tap| tap.name.clone()).unwrap_or_default();
    // The interface is made: nothing more takes a capability.
    let confinement = Confinement::enter(CapabilitySet::empty(), &view(), Sockets::NONE)?;
    let vif = VifFrontend::new(&platform, claimed.device, mtu)
        .map_err(LinkError::from)?
        .with_offloads(args.offload)
        .with_queues(args.queues)
        .with_staging(args.staging.unwrap_or_default());
    let sizes = WindowSizes::for_queues(args.queues);
    let vif = if args.windows { vif.with_windows(&platform, sizes) } else { vif };
    claim::put_in_order(&mut store, &claimed.device)?;
    let port = |tap: Tap| TapPort::new(tap.fd, tap.offloads, mtu, Arc::clone(platform.counters()));
    let ports = taps.into_iter().map(port).collect();
    let mut link = Link::start(platform, vif, ports)?;
    confinement.lock()?;
    eprintln!("ringfence: {} is interface {name}", crate::seat::device_name(&claimed.device));
    let served = serve(&mut link, &signals, &name);
    // Whatever ended it: pages that are lent are taken back.
    let left = leave(&mut link, &claimed);
    served.and(left)
}

/// Files of the host that the frontend needs while it runs.
fn view() -> View {
    View::default()
        .read("/sys")
        .read("/proc/self")
        .read("/run/xenstored")
        .read("/var/run/xenstored")
        .devices("/dev/xen")
}

/// Makes the interface, of so many queues. It is down, as a new one is.
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

fn serve<P: Platform>(
    link: &mut Link<P>,
    signals: &Signals,
    name: &str,
) -> Result<(), AttachError> {
    let mut was_up = false;
    // A backend may connect and disconnect as often as it likes.
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
        for _ in 0..TAKEN_A_TURN {
            let Some(happened) = link.next()? else { break };
            any = true;
            match happened {
                Happened::Store => {}
                Happened::VifGone(why) => {
                    if let Some(unlogged) = ends.take() {
                        tracing::warn!(name, %why, unlogged, "the connection ended");
                    }
                }
                Happened::TapGone(why) => {
                    return Err(AttachError::InterfaceGone { name: name.to_owned(), why });
                }
            }
        }
        let mut fds = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        fds.extend(link.wait_fds());
        poll_until(&mut fds, any.then(Instant::now))?;
        if let Some(arrived) = signals.next()? {
            tracing::info!(signal = signal_name(arrived.number).unwrap_or("signal"), "leaving");
            return Ok(());
        }
    }
}

/// Has the backend let go, and then takes back what was lent.
fn leave<P: Platform>(link: &mut Link<P>, claimed: &Claimed) -> Result<(), AttachError> {
    let (vif, store) = link.vif();
    vif.begin_close(store).map_err(LinkError::from)?;
    if !claim::backend_let_go(store, &claimed.device, Instant::now() + LEAVE_WITHIN)? {
        tracing::warn!("the backend did not let go in time");
    }
    Ok(link.close()?)
}
