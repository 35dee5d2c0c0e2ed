//! The frontend of a guest: its TAP on one side, the vif on the other.
//!
//! It begins with its orders and two descriptors (its hub connection, the TAP), sets memory aside
//! for lending while it still can, enters the sandbox, and then joins TAP and vif by a cable: a
//! data plane of two ports, in which the TAP is held up while the vif has no room.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ringfence_frame::commands::UnknownStaging;
use ringfence_frame::tap::TapPort;
use ringfence_net::features::UnknownOffload;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform, PlatformError};
use ringfence_sys::tap::TapOffloads;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::event::{PollFd, PollFlags};

use crate::switchboard::{FromFrontend, FrontendConfig};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds, poll_until};
use ringfence_sandbox::isolation::{Isolation, SandboxError};
use ringfence_sandbox::{DomainKind, STATUS_FAILED};

mod disks;
pub(crate) mod link;
mod squeeze;

use disks::Disks;
use link::{Happened, Link, LinkError};
use squeeze::Squeeze;

/// Why a frontend ends before its time.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Not this build's launcher.
    #[error(transparent)]
    Offload(#[from] UnknownOffload),
    /// Likewise.
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
    Disk(#[from] ringfence_block::vbd::frontend::FrontendError),
    #[error("store: {0}")]
    Store(#[from] ringfence_xenstore::StoreError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The inner process of a frontend. Returns its exit status.
pub fn main() -> u8 {
    inner(None)
}

/// As [`main`], for tests that play a frontend which was taken over: `deed` is done on a thread of
/// its own as soon as the sandbox is closed, while frames are carried.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn main_taken_over(deed: impl FnOnce() + Send + 'static) -> u8 {
    inner(Some(Box::new(deed)))
}

/// What is done besides the work of a domain, in tests.
type Deed = Box<dyn FnOnce() + Send>;

fn inner(deed: Option<Deed>) -> u8 {
    Channel::serve_stdin(
        |channel| live(channel, deed).map(|()| 0),
        |error| (STATUS_FAILED, FromFrontend::Failed(error.to_string())),
    )
}

fn live(channel: &Channel, deed: Option<Deed>) -> Result<(), Failure> {
    let (config, fds) = channel.receive::<FrontendConfig>()?;
    let mut fds = fds.into_vec();
    let mut taps = fds.split_off(fds.len().min(1));
    let [hub] = expect_fds(fds.into())?;
    let queues = usize::try_from(config.tap_queues).unwrap_or(usize::MAX).max(1);
    let sockets = taps.split_off(taps.len().min(queues));
    if taps.len() < queues {
        return Err(ChannelError::Descriptors { expected: queues, found: taps.len() }.into());
    }
    let arena = arena(config.queues, config.disks.len());
    let platform = LocalPlatform::connect(hub)?.with_arena(arena);
    let device = DeviceId {
        kind: DeviceKind::Vif,
        frontend: platform.domid(),
        backend: DomId(0),
        handle: 0,
    };
    // Arenas are re-opened through /proc, so they are made before there is none.
    let takes = config.takes.parse()?;
    let vif = VifFrontend::new(&platform, device, config.mtu)?
        .with_offloads(takes)
        .with_staging(config.staging.parse()?)
        .with_queues(config.queues);
    let sizes = WindowSizes::for_queues(config.queues);
    let vif = if config.windows { vif.with_windows(&platform, sizes) } else { vif };
    let any = config.windows || config.disks.iter().any(|disk| disk.windows);
    let full = sizes.pages.max(disks::WINDOW);
    let squeeze = any.then(|| Squeeze::new(full));
    let disks = Disks::new(&platform, &config.disks, sockets)?;
    let mut expected = platform.descriptors();
    expected.push(channel.as_fd().as_raw_fd());
    expected.extend(taps.iter().map(AsRawFd::as_raw_fd));
    expected.extend(vif.descriptors());
    expected.extend(squeeze.iter().flat_map(Squeeze::descriptors));
    expected.extend(disks.descriptors());
    let isolation = Isolation::enter(DomainKind::Frontend, &expected)?;
    crate::log::to_stderr(false);
    if let Some(why) = squeeze.as_ref().and_then(Squeeze::refused) {
        tracing::warn!("{why}");
    }
    isolation.lock()?;
    if let Some(deed) = deed {
        std::thread::Builder::new().name("deed".to_owned()).spawn(deed)?;
    }
    let frontend = Frontend::start(&config, platform, vif, taps, disks)?;
    Frontend { squeeze, ..frontend }.serve(channel)
}

/// Memory to lend for so many queues and disks: rings and buffers, a control ring and its list, and
/// some that the driver domain is slow to let go of.
pub fn arena(queues: u32, disks: usize) -> ArenaShape {
    let queues = queues.clamp(1, QUEUES_MAX) * LocalPlatform::DEFAULT_PAGES;
    let pages = queues + u32::try_from(disks).unwrap_or(0) * disks::PAGES;
    ArenaShape::of(pages, pages)
}

struct Frontend {
    link: Link<LocalPlatform>,
    disks: Disks,
    was_up: bool,
    /// Where there are windows.
    squeeze: Option<Squeeze>,
}

impl Frontend {
    fn start(
        config: &FrontendConfig,
        platform: LocalPlatform,
        vif: VifFrontend<LocalPlatform>,
        taps: Vec<OwnedFd>,
        mut disks: Disks,
    ) -> Result<Frontend, Failure> {
        disks.start(&platform)?;
        let port = |tap| {
            let counters = Arc::clone(platform.counters());
            TapPort::new(tap, TapOffloads(config.offloads), config.mtu, counters)
        };
        let taps = taps.into_iter().map(port).collect();
        Ok(Frontend {
            link: Link::start(platform, vif, taps)?,
            disks,
            was_up: false,
            squeeze: None,
        })
    }

    /// Serves until the launcher is gone.
    fn serve(mut self, channel: &Channel) -> Result<(), Failure> {
        loop {
            self.link.look()?;
            let mut more = self.disks.look(self.link.platform())?;
            self.report(channel)?;
            // A request may have come across events, of which no poll tells any more.
            more |= self.drain(channel)?;
            let due = self.squeeze.as_ref().and_then(Squeeze::due);
            let until = if more { Some(Instant::now()) } else { due };
            let mut fds = vec![PollFd::new(channel, PollFlags::IN)];
            fds.extend(self.link.wait_fds());
            let disks = self.disks.wait_fds();
            fds.extend(disks.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let triggers = fds.len();
            let squeezed = self.squeeze.iter().flat_map(Squeeze::wait_fds);
            fds.extend(squeezed.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::PRI)));
            poll_until(&mut fds, until)?;
            let pressure = fds.split_off(triggers).iter().map(PollFd::revents).collect();
            if !fds[0].revents().is_empty() {
                // There are no further orders: the launcher is gone. The vif is closed in order.
                self.disks.close()?;
                self.link.close()?;
                return Ok(());
            }
            drop(fds);
            self.squeeze(pressure);
        }
    }

    /// Windows shrink, or grow again, as the system's memory allows.
    fn squeeze(&mut self, pressure: Vec<PollFlags>) {
        let Some(squeeze) = &mut self.squeeze else { return };
        let any = pressure.into_iter().fold(PollFlags::empty(), |all, flags| all | flags);
        let most = if any.contains(PollFlags::ERR) {
            squeeze.give_up();
            None
        } else if any.contains(PollFlags::PRI) {
            Some(squeeze.pressed())
        } else {
            squeeze.relaxed()
        };
        if let Some(most) = most {
            self.link.resize_windows(most);
            self.disks.resize_windows(most);
        }
    }

    /// Takes what waits; true if there was something.
    fn drain(&mut self, channel: &Channel) -> Result<bool, Failure> {
        let mut any = false;
        for _ in 0..64 {
            let Some(happened) = self.link.next()? else { break };
            any = true;
            match happened {
                Happened::Store => {}
                Happened::VifGone(why) => channel.send(&FromFrontend::Down(why), &[])?,
                Happened::TapGone(why) => {
                    channel.send(&FromFrontend::Failed(format!("the TAP: {why}")), &[])?;
                }
            }
        }
        Ok(any)
    }

    fn report(&mut self, channel: &Channel) -> Result<(), Failure> {
        let up = self.link.is_up() && self.disks.are_up();
        if up != self.was_up {
            let message = if up {
                FromFrontend::Up
            } else {
                FromFrontend::Down("the backend closed the vif".to_owned())
            };
            channel.send(&message, &[])?;
            self.was_up = up;
        }
        Ok(())
    }
}
