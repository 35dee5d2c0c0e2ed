//! Frontend of a guest: connects the guest's TAP with its vif, and its disks with NBD exports.
//!
//! The process receives its configuration, its hub connection, the queues of the TAP and the
//! sockets of its disks. It allocates the memory that it grants while that is still possible, and
//! enters the sandbox. Then it joins TAP and vif by a patch of two ports (`link`). A vif without
//! room applies backpressure to the TAP. A guest without a switch has neither TAP nor vif.
//!
//! A card process is such a frontend, too, with the network card of a virtual machine in place of the TAP
//! ([`card`](crate::card)).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_access::window::Revocation;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_frame::PortCounters;
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::features::UnknownOffload;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::staging::UnknownStaging;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_platform::local::{ArenaShape, LocalPlatform, PageSize};
use ringfence_platform::{Counters, DomId, Platform, PlatformError};
use ringfence_sys::numbers::{bounded, u64_from, usize_from};
use ringfence_sys::poll::wait_readable;
use ringfence_sys::tap::TapOffloads;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::event::{PollFd, PollFlags};

use ringfence_driver::switchboard::{
    DiskFrontend, FromFrontend, FrontendConfig, FrontendLevels, ToFrontend,
};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::{DomainKind, STATUS_FAILED};
use ringfence_sys::pressure::{PressureMonitor, Share};

use crate::disks::{self, DiskError, DiskRequest, Disks};
use crate::drain::{self, Drain};
use crate::link::{Link, LinkError, LinkEvent};

/// Errors that end a frontend.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The launcher is of another build.
    #[error(transparent)]
    Offload(#[from] UnknownOffload),
    /// The launcher is of another build.
    #[error(transparent)]
    Staging(#[from] UnknownStaging),
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Function that makes the ports of a guest's end.
type MakePorts<'a> = Box<dyn FnOnce(&Arc<Counters>) -> Result<Vec<Box<dyn Port>>, Failure> + 'a>;

/// Parts of a frontend that its kinds of processes have in different ways.
pub(crate) struct FrontendParts<'a> {
    pub(crate) kind: DomainKind,
    /// Connection to the hub.
    pub(crate) hub: OwnedFd,
    /// Descriptors of the guest's end.
    pub(crate) guest: Vec<RawFd>,
    /// Files that are readable while frames of the guest wait.
    pub(crate) waiting: Vec<OwnedFd>,
    /// Makes the ports of the guest's end, once the process is isolated. System calls are counted there.
    pub(crate) ports: MakePorts<'a>,
    /// Sockets of the disks' exports.
    pub(crate) disks: Vec<OwnedFd>,
    pub(crate) is_verbose: bool,
}

/// Main function of a frontend's inner process. Returns the exit status.
pub fn main() -> u8 {
    inner(|| Ok(()))
}

/// Runs a frontend, as [`main`] does, for tests of a compromised one. `hook` runs on its own thread
/// from the moment when the sandbox is closed, while frames flow.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn main_taken_over(hook: impl FnOnce() + Send + 'static) -> u8 {
    inner(|| std::thread::Builder::new().name("test hook".to_owned()).spawn(hook).map(drop))
}

/// Runs the process; calls `locked` once the sandbox is closed.
fn inner(locked: impl FnOnce() -> io::Result<()>) -> u8 {
    Channel::serve_stdin(
        |channel| run(channel, locked).map(|()| 0),
        |error| (STATUS_FAILED, FromFrontend::Failed(error.to_string())),
    )
}

fn run(channel: &Channel, locked: impl FnOnce() -> io::Result<()>) -> Result<(), Failure> {
    let (config, fds) = channel.receive::<FrontendConfig>()?;
    let mut fds = fds.into_vec();
    let mut taps = fds.split_off(fds.len().min(1));
    let [hub] = expect_fds(fds.into())?;
    let queues = usize_from(config.tap_queues);
    let sockets = taps.split_off(taps.len().min(queues));
    if taps.len() < queues {
        return Err(ChannelError::Descriptors { expected: queues, found: taps.len() }.into());
    }
    let waiting = taps.iter().map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>()?;
    let (offloads, mtu) = (TapOffloads(config.offloads), config.mtu);
    let parts = FrontendParts {
        kind: DomainKind::Frontend,
        hub,
        guest: taps.iter().map(AsRawFd::as_raw_fd).collect(),
        waiting,
        ports: Box::new(move |counters| {
            let port = |tap| {
                let port = TapPort::new(tap, offloads, mtu, Arc::clone(counters));
                Box::new(port) as Box<dyn Port>
            };
            Ok(taps.into_iter().map(port).collect())
        }),
        disks: sockets,
        is_verbose: false,
    };
    serve(channel, &config, parts, locked)
}

/// Serves a guest until the launcher closes the channel. Calls `locked` once the sandbox is closed.
pub(crate) fn serve(
    channel: &Channel,
    config: &FrontendConfig,
    parts: FrontendParts<'_>,
    locked: impl FnOnce() -> io::Result<()>,
) -> Result<(), Failure> {
    let has_vif = config.tap_queues > 0;
    let vif_queues = if has_vif { config.queues.max(1) } else { 0 };
    let arena = arena(vif_queues, config.disks.len());
    let platform =
        LocalPlatform::connect(parts.hub)?.with_arena(arena).with_page_size(config.page_size());
    // Arenas are opened again through /proc, which the sandbox does not have.
    let vif = if has_vif { Some(make_vif(&platform, config)?) } else { None };
    let has_windows = config.windows || config.disks.iter().any(|disk| disk.windows);
    let has_pools = has_windows || !config.disks.is_empty();
    let monitor =
        if has_pools { PressureMonitor::open() } else { PressureMonitor::without_triggers() };
    let window_pages = WindowSizes::for_queues(config.queues).pages;
    let disks = Disks::new(&platform, disk_requests(&platform, config, parts.disks))?;
    let mut expected = platform.descriptors();
    expected.push(channel.as_fd().as_raw_fd());
    expected.extend(parts.guest);
    expected.extend(parts.waiting.iter().map(AsRawFd::as_raw_fd));
    expected.extend(vif.iter().flat_map(VifFrontend::descriptors));
    expected.extend(monitor.descriptors());
    expected.extend(disks.descriptors());
    let isolation = Isolation::enter(parts.kind, &expected)?;
    ringfence_hostnet::log::to_stderr(parts.is_verbose);
    // Without a window an idle pool has a few megabytes at most.
    if let Some(why) = monitor.errors().filter(|_| has_windows) {
        tracing::warn!("{why}");
    }
    let guest = (parts.ports)(platform.counters())?;
    isolation.lock()?;
    locked()?;
    let frontend = Frontend::start(platform, vif, guest, disks)?;
    Frontend { waiting: parts.waiting, monitor, window_pages, ..frontend }.serve(channel)
}

/// Creates the frontend of the vif and allocates its memory.
fn make_vif(
    platform: &LocalPlatform,
    config: &FrontendConfig,
) -> Result<VifFrontend<LocalPlatform>, Failure> {
    let device = DeviceId {
        kind: DeviceKind::Vif,
        frontend: platform.domid(),
        backend: DomId(0),
        handle: 0,
    };
    let vif = VifFrontend::new(platform, device, config.mtu)?
        .with_offloads(config.takes.parse()?)
        .with_staging(config.staging.parse()?)
        .with_queues(config.queues);
    let mut sizes = WindowSizes::for_queues(config.queues);
    sizes.policy.revocation = revocation(config);
    Ok(if config.windows { vif.with_windows(platform, sizes) } else { vif })
}

/// Returns the disks that the launcher orders, with the sockets of their exports.
fn disk_requests(
    platform: &LocalPlatform,
    config: &FrontendConfig,
    sockets: Vec<OwnedFd>,
) -> Vec<DiskRequest> {
    let (kind, frontend, backend) = (DeviceKind::Vbd, platform.domid(), DomId(0));
    let ordered = config.disks.iter().zip(sockets).zip(0..);
    let request = |((order, socket), handle): ((&DiskFrontend, OwnedFd), u32)| {
        let options = BlkfrontOptions {
            persistent: order.persistent,
            window: if order.windows { disks::WINDOW } else { 0 },
            revocation: revocation(config),
            ..BlkfrontOptions::default()
        };
        let device = DeviceId { kind, frontend, backend, handle };
        DiskRequest { device, backend: None, options, socket }
    };
    ordered.map(request).collect()
}

fn revocation(config: &FrontendConfig) -> Revocation {
    if config.strict_revocation { Revocation::Strict } else { Revocation::Plain }
}

/// Returns the arena's shape for so many queues (0 without a vif) and disks: rings, buffers, a control ring with its
/// list, and a reserve for pages that the driver domain releases late.
pub fn arena(queues: u32, disks: usize) -> ArenaShape {
    let queues = queues.min(QUEUES_MAX) * LocalPlatform::DEFAULT_PAGES;
    let pages = queues + bounded(disks, u32::MAX) * disks::PAGES;
    ArenaShape::of(pages, pages)
}

/// Returns the sums of the counters of ports that are not zero.
pub(crate) fn traffic(ports: &[Arc<PortCounters>]) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (name, value) in ports.iter().flat_map(|counters| counters.named()) {
        if value > 0 {
            *sums.entry(name.to_owned()).or_default() += value;
        }
    }
    sums
}

enum Network {
    Link(Link<LocalPlatform>),
    /// The guest has only disks.
    None(LocalPlatform),
}

impl Network {
    fn link(&self) -> Option<&Link<LocalPlatform>> {
        match self {
            Network::Link(link) => Some(link),
            Network::None(_) => None,
        }
    }

    fn link_mut(&mut self) -> Option<&mut Link<LocalPlatform>> {
        match self {
            Network::Link(link) => Some(link),
            Network::None(_) => None,
        }
    }

    fn platform(&self) -> &LocalPlatform {
        match self {
            Network::Link(link) => link.platform(),
            Network::None(platform) => platform,
        }
    }
}

struct Frontend {
    network: Network,
    disks: Disks<LocalPlatform>,
    /// Counters of the ports at the guest's end.
    counters: Vec<Arc<PortCounters>>,
    /// Files that are readable while frames of the guest wait.
    waiting: Vec<OwnedFd>,
    /// Disks with the sizes that the launcher awaits.
    awaited: Vec<(u16, u64)>,
    /// Drain that the launcher has ordered.
    drain: Option<Drain>,
    was_up: bool,
    /// Without triggers if the frontend has neither disks nor grant windows.
    monitor: PressureMonitor,
    /// Size of the grant windows of the vif's queues in pages, without memory pressure.
    window_pages: u32,
}

impl Frontend {
    fn start(
        platform: LocalPlatform,
        vif: Option<VifFrontend<LocalPlatform>>,
        guest: Vec<Box<dyn Port>>,
        mut disks: Disks<LocalPlatform>,
    ) -> Result<Frontend, Failure> {
        disks.start(&platform)?;
        let counters = guest.iter().map(|port| Arc::clone(port.counters())).collect();
        let network = match vif {
            Some(vif) => Network::Link(Link::start(platform, vif, guest)?),
            None => Network::None(platform),
        };
        let monitor = PressureMonitor::without_triggers();
        Ok(Frontend {
            network,
            disks,
            counters,
            waiting: Vec::new(),
            awaited: Vec::new(),
            drain: None,
            was_up: false,
            monitor,
            window_pages: 0,
        })
    }

    /// Serves until the launcher closes the channel.
    fn serve(mut self, channel: &Channel) -> Result<(), Failure> {
        loop {
            self.network.link_mut().map_or(Ok(()), Link::look)?;
            let mut more = self.disks.look(self.network.platform())?;
            self.report(channel)?;
            self.report_sizes(channel)?;
            // A request may have read store events, for which no poll returns any more.
            more |= self.handle_events(channel)?;
            self.advance_drain(channel)?;
            let now = Instant::now();
            let next_look = self.drain.as_ref().map(|_| now + drain::INTERVAL);
            let until = if more { Some(now) } else { next_look };
            let mut fds = vec![PollFd::new(channel, PollFlags::IN)];
            fds.extend(self.network.link().into_iter().flat_map(Link::wait_fds));
            let disks = self.disks.wait_fds();
            fds.extend(disks.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let (events, share) = self.monitor.wait(fds, until)?;
            let is_asked = !events[0].is_empty();
            if is_asked && !self.answer(channel)? {
                // The launcher is gone. Close the devices in order.
                self.disks.close()?;
                self.network.link_mut().map_or(Ok(()), Link::close)?;
                return Ok(());
            }
            if let Some(share) = share {
                self.set_share(share);
            }
        }
    }

    /// Answers a request of the launcher. Returns `false` if the launcher is gone.
    fn answer(&mut self, channel: &Channel) -> Result<bool, Failure> {
        match channel.try_receive() {
            Ok(Some((ToFrontend::Traffic, _))) => {
                channel.send(&FromFrontend::Traffic(traffic(&self.counters)), &[])?;
                Ok(true)
            }
            Ok(Some((ToFrontend::Levels, _))) => {
                let windows = self.network.link_mut().and_then(Link::window_levels);
                let lent_pages = u64_from(self.network.platform().lent_pages());
                let levels = FrontendLevels { lent_pages, windows: windows.map(Into::into) };
                channel.send(&FromFrontend::Levels(levels), &[])?;
                Ok(true)
            }
            Ok(Some((ToFrontend::AwaitSize { disk, bytes }, _))) => {
                self.awaited.push((disk, bytes));
                Ok(true)
            }
            Ok(Some((ToFrontend::Drain, _))) => {
                self.drain = Some(Drain::begin(self.frames(), Instant::now()));
                Ok(true)
            }
            Ok(None) => Ok(true),
            Err(ChannelError::Closed) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Tells the launcher which disks have the sizes that it awaits. A disk that does not exist has any size.
    fn report_sizes(&mut self, channel: &Channel) -> Result<(), Failure> {
        let disks = &self.disks;
        let has = |&mut (disk, bytes): &mut (u16, u64)| {
            disks.bytes(disk).is_none_or(|found| found >= bytes)
        };
        for (disk, _) in self.awaited.extract_if(.., has) {
            channel.send(&FromFrontend::HasSize { disk }, &[])?;
        }
        Ok(())
    }

    /// Returns the number of frames that were read from the guest.
    fn frames(&self) -> u64 {
        self.counters.iter().map(|counters| counters.rx_frames.get()).sum()
    }

    /// Looks for frames of a guest that has ended, and tells the launcher when there are none.
    fn advance_drain(&mut self, channel: &Channel) -> Result<(), Failure> {
        if self.drain.is_none() {
            return Ok(());
        }
        let mut is_empty = true;
        if let Some(link) = self.network.link_mut().filter(|link| link.is_up()) {
            for file in &self.waiting {
                is_empty &= !wait_readable(file, Some(Duration::ZERO))?;
            }
            // In this order: a frame that was read meanwhile is in a request.
            is_empty &= link.unanswered() == 0;
        }
        let frames = self.frames();
        if self.drain.take_if(|drain| drain.look(is_empty, frames, Instant::now())).is_some() {
            channel.send(&FromFrontend::Drained, &[])?;
        }
        Ok(())
    }

    /// Shrinks or grows the pools of lent pages.
    fn set_share(&mut self, share: Share) {
        if let Some(link) = self.network.link_mut() {
            link.set_share(share, self.window_pages);
        }
        self.disks.set_share(share);
    }

    /// Handles pending events. Returns `true` if there was one.
    fn handle_events(&mut self, channel: &Channel) -> Result<bool, Failure> {
        let mut any = false;
        let Some(link) = self.network.link_mut() else { return Ok(false) };
        for _ in 0..64 {
            let Some(happened) = link.next_event()? else { break };
            any = true;
            match happened {
                LinkEvent::Store => {}
                LinkEvent::VifGone(why) => channel.send(&FromFrontend::Down(why), &[])?,
                LinkEvent::GuestGone(why) => {
                    let why = format!("the guest's end of the link: {why}");
                    channel.send(&FromFrontend::Failed(why), &[])?;
                }
            }
        }
        Ok(any)
    }

    fn report(&mut self, channel: &Channel) -> Result<(), Failure> {
        let up = self.network.link().is_none_or(Link::is_up) && self.disks.are_up();
        if up != self.was_up {
            let message = if up {
                let huge_pages = self.network.platform().page_size() == PageSize::Huge;
                FromFrontend::Up { huge_pages }
            } else {
                FromFrontend::Down("the backend closed the vif".to_owned())
            };
            channel.send(&message, &[])?;
            self.was_up = up;
            ringfence_sys::code::unmap();
        }
        Ok(())
    }
}
