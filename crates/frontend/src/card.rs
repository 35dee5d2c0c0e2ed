//! Card process: the network card of a virtual machine, on a switch or on a TAP of the host.
//!
//! The process receives the socket at which hypervisors connect, and its other end. It serves the card by vhost-user
//! ([`ringfence_link::vhost_user`]), and joins both by a patch of two ports, as a [frontend](crate::process) does:
//!
//! ```text
//! hypervisor <── socket, memory ──> vhost-user link ── patch ──> vif ──> rings, lent pages ──> switch
//!                                                          └───> TAP ──> kernel of the host
//! ```
//!
//! Frames pass with their offloads: a super-packet that the other end takes whole is neither cut nor summed here.
//!
//! # Guarantees
//!
//! * The process has no right but its descriptors: a client that takes it over reaches the switch as the machine itself
//!   would, behind the same filters.
//! * A client that breaks a rule loses its connection, and the next one is served. A client that truncates the file of its
//!   memory ends this process, which serves no other machine.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use ringfence_driver::switchboard::{CardConfig, CardEnd, FromFrontend, ToFrontend};
use ringfence_driver::workers::EndedPorts;
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_hostnet::log;
use ringfence_link::clients::Clients;
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::vhost_user::{PoolRule, Reporter, VhostUserLink, VhostUserOptions};
use ringfence_platform::Counters;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::limits::raise_descriptor_limit;
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_switch::dataplane::{AddPortError, DataplaneHandle};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_sys::poll::wait_any;
use ringfence_sys::tap::TapOffloads;
use rustix::event::{PollFd, PollFlags};

use crate::process::{self, Failure, FrontendParts};

/// Errors that end a card process.
#[derive(Debug, thiserror::Error)]
enum CardError {
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Frontend(#[from] Failure),
    #[error("a port was not added: {0}")]
    Port(#[from] AddPortError),
    /// One end of the patch has ended.
    #[error("the {end}: {why}")]
    Gone { end: String, why: String },
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Main function of a card process. Returns the exit status.
pub fn main() -> u8 {
    Channel::serve_stdin(
        |channel| run(channel).map(|()| 0),
        |error| {
            eprintln!("ringfence: card: {error}");
            (STATUS_FAILED, FromFrontend::Failed(error.to_string()))
        },
    )
}

fn run(channel: &Channel) -> Result<(), CardError> {
    let (config, fds) = channel.receive::<CardConfig>()?;
    let [listener, other] = expect_fds(fds)?;
    raise_descriptor_limit()?;
    let mtu = match &config.other_end {
        CardEnd::Switch(frontend) => frontend.mtu,
        CardEnd::Tap { mtu, .. } => *mtu,
    };
    let CardConfig { pairs, pool, .. } = config;
    let card = MachineCard { channel, listener, mtu, pairs, pool };
    match config.other_end {
        CardEnd::Switch(frontend) => {
            let parts = FrontendParts {
                kind: DomainKind::Card,
                hub: other,
                guest: vec![card.listener.as_raw_fd()],
                waiting: Vec::new(),
                ports: Box::new(move |counters| Ok(vec![card.into_port(counters)?])),
                disks: Vec::new(),
                is_verbose: config.verbose,
            };
            Ok(process::serve(channel, &frontend, parts, || Ok(()))?)
        }
        CardEnd::Tap { offloads, .. } => {
            let tap = (other, TapOffloads(offloads));
            serve_tap(channel, card, tap, config.verbose)
        }
    }
}

/// Network card before its link is made.
struct MachineCard<'a> {
    /// Channel to the session, for reports.
    channel: &'a Channel,
    /// Listening socket for hypervisors.
    listener: OwnedFd,
    /// Maximum length of a frame without its Ethernet header, in bytes.
    mtu: u16,
    /// Number of queue pairs.
    pairs: u16,
    pool: PoolRule,
}

impl MachineCard<'_> {
    /// Makes the link. This needs system calls that are denied later.
    fn into_port(self, counters: &Arc<Counters>) -> Result<Box<dyn Port>, Failure> {
        let MachineCard { channel, listener, mtu, pairs, pool } = self;
        let reports = channel.try_clone()?;
        let report: Reporter =
            Box::new(move |state| reports.send_or_drop(&FromFrontend::Machine(state.into())));
        let clients = Clients::Listener { socket: listener, one_off: false };
        let options = VhostUserOptions { pairs, pool, report: Some(report) };
        let (shape, counters) = (FrameShape::default(), Arc::clone(counters));
        Ok(Box::new(VhostUserLink::new(clients, mtu, shape, counters, options)?))
    }
}

/// Joins the card and a TAP until the session closes the channel.
fn serve_tap(
    channel: &Channel,
    card: MachineCard<'_>,
    (tap, offloads): (OwnedFd, TapOffloads),
    is_verbose: bool,
) -> Result<(), CardError> {
    let fds = [channel.as_fd().as_raw_fd(), card.listener.as_raw_fd(), tap.as_raw_fd()];
    let isolation = Isolation::enter(DomainKind::Card, &fds)?;
    log::to_stderr(is_verbose);
    let counters = Arc::<Counters>::default();
    let mtu = card.mtu;
    let card = card.into_port(&counters)?;
    let traffic = [Arc::clone(card.counters())];
    isolation.lock()?;
    let mut ended = EndedPorts::new()?;
    let tap = Box::new(TapPort::new(tap, offloads, mtu, Arc::clone(&counters)));
    let _dataplane = patch(&ended, [("machine", card), ("TAP", tap)], &counters)?;
    channel.send(&FromFrontend::Up { huge_pages: false }, &[])?;
    ringfence_sys::code::unmap();
    loop {
        ended.clear();
        if let Some(port) = ended.dequeue() {
            return Err(CardError::Gone { end: port.name, why: port.reason.to_string() });
        }
        match channel.try_receive::<ToFrontend>() {
            Ok(Some((ToFrontend::Traffic, _))) => {
                channel.send(&FromFrontend::Traffic(process::traffic(&traffic)), &[])?;
            }
            // A patch lends no memory and has no disk, and a machine that has ended sends nothing.
            Ok(Some((
                ToFrontend::Levels | ToFrontend::AwaitSize { .. } | ToFrontend::Drain,
                _,
            )))
            | Ok(None) => {}
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let mut fds = [
            PollFd::new(channel, PollFlags::IN),
            PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN),
        ];
        wait_any(&mut fds, None)?;
    }
}

/// Starts a worker that moves frames between two ports.
fn patch(
    ended: &EndedPorts,
    ports: [(&str, Box<dyn Port>); 2],
    counters: &Arc<Counters>,
) -> Result<DataplaneHandle, CardError> {
    let dataplane = ended.start_workers(1, || Fabric::Patch(Patch::new()), counters)?;
    for (name, port) in ports {
        dataplane.add_port(port, PortPolicy::default(), name)?;
    }
    Ok(dataplane)
}
