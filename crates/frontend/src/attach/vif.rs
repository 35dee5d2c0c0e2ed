//! Network interface of `ringfence attach`: [`VifFrontend`] with a TAP interface.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::Platform;
use ringfence_sys::tap::Tap;
use rustix::event::{PollFd, PollFlags};
use rustix::thread::CapabilitySet;

use super::claim::{self, Claimed, Wanted};
use super::{
    AttachArgs, AttachError, CLOSE_TIMEOUT, ConnectionLog, is_told_to_end, levels_line,
    own_signals, view, warn_unless,
};
use crate::link::{Link, LinkError, LinkEvent};
use ringfence_driver::workers::worker_count;
use ringfence_hostnet::log::LineBudget;
use ringfence_hostnet::netlink::{LinkChange, Netlink};
use ringfence_sandbox::isolation::{Confinement, Sockets};
use ringfence_sandbox::signals::Signals;
use ringfence_sys::pressure::PressureMonitor;

/// Maximum number of events that are handled before the states are read again.
const EVENTS_PER_ROUND: usize = 64;

/// Serves the interface until a signal arrives.
pub(super) fn attach<P: Platform>(platform: P, args: &AttachArgs) -> Result<(), AttachError> {
    let signals = own_signals()?;
    let mut store = platform.store().map_err(LinkError::from)?;
    let claimed = claim::claim(&mut store, platform.domid(), &Wanted::Interface(args.device))?;
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
    // A backend may connect and disconnect without limit.
    let (mut connection, mut ends) = (ConnectionLog::default(), LineBudget::new());
    loop {
        link.look().map_err(|error| match error {
            LinkError::Frontend(error @ FrontendError::Lend(_)) => {
                AttachError::NoPages(error.into())
            }
            other => other.into(),
        })?;
        connection.record(name, link.is_up());
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
        let levels = link.window_levels().map(Into::into);
        if is_told_to_end(signals, || eprintln!("ringfence: {name}: {}", levels_line(levels)))? {
            return Ok(());
        }
    }
}

/// Closes the device, waits until the backend has disconnected, and revokes the grants.
fn leave<P: Platform>(link: &mut Link<P>, claimed: &Claimed) -> Result<(), AttachError> {
    let (vif, store) = link.vif();
    vif.begin_close(store).map_err(LinkError::from)?;
    let until = Instant::now() + CLOSE_TIMEOUT;
    warn_unless(claim::await_backend_disconnect(store, &claimed.backend, until)?);
    Ok(link.close()?)
}
