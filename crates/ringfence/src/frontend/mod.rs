//! The frontend of a guest: its TAP on one side, the vif on the other.
//!
//! It begins with its orders and two descriptors (its hub connection, the TAP), sets memory aside
//! for lending while it still can, enters the sandbox, and then joins TAP and vif by a cable: a
//! data plane of two ports, in which the TAP is held up while the vif has no room.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ringfence_net::dataplane::{DataplaneHandle, PortId};
use ringfence_net::features::UnknownOffload;
use ringfence_net::port::Port;
use ringfence_net::switch::{Fabric, Patch, PortPolicy};
use ringfence_net::tap::TapPort;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::store::{StoreClient, StoreError};
use ringfence_platform::tap::TapOffloads;
use ringfence_platform::{DomId, Platform, PlatformError};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::event::{PollFd, PollFlags};

use crate::plane::Gone;
use crate::switchboard::{FromFrontend, FrontendConfig};
use crate::sys::channel::{Channel, ChannelError, expect_fds, poll_until};
use crate::sys::sandbox::{Isolation, SandboxError};
use crate::sys::{DomainKind, STATUS_FAILED};

/// Why a frontend ends before its time.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Not this build's launcher.
    #[error(transparent)]
    Offload(#[from] UnknownOffload),
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    #[error(transparent)]
    System(#[from] io::Error),
    #[error("the TAP port was not added: {0}")]
    Tap(#[from] ringfence_net::dataplane::AddPortError),
}

/// The inner process of a frontend. Returns its exit status.
pub fn main() -> u8 {
    inner(None)
}

/// As [`main`], for tests that play a frontend which was taken over: `deed` is done on a thread of
/// its own as soon as the sandbox is closed, while frames are carried.
#[doc(hidden)]
pub fn main_taken_over(deed: impl FnOnce() + Send + 'static) -> u8 {
    inner(Some(Box::new(deed)))
}

/// What is done besides the work of a domain, in tests.
type Deed = Box<dyn FnOnce() + Send>;

fn inner(deed: Option<Deed>) -> u8 {
    let channel = match Channel::from_stdin() {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("ringfence: {error}");
            return STATUS_FAILED;
        }
    };
    match live(&channel, deed) {
        Ok(()) => 0,
        Err(error) => {
            // If nobody hears it the guest is gone, and so is the user's interest.
            let _ = channel.send(&FromFrontend::Failed(error.to_string()), &[]);
            STATUS_FAILED
        }
    }
}

fn live(channel: &Channel, deed: Option<Deed>) -> Result<(), Failure> {
    let (config, fds) = channel.receive::<FrontendConfig>()?;
    let [hub, tap] = expect_fds(fds)?;
    let platform = LocalPlatform::connect(hub)?;
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
        .with_staging(config.staging);
    let mut expected = platform.descriptors();
    expected.extend([channel.as_fd().as_raw_fd(), tap.as_raw_fd()]);
    let isolation = Isolation::enter(DomainKind::Frontend, &expected)?;
    crate::sys::log::to_stderr(false);
    isolation.lock()?;
    if let Some(deed) = deed {
        std::thread::Builder::new().name("deed".to_owned()).spawn(deed)?;
    }
    Frontend::start(&config, platform, vif, tap)?.serve(channel)
}

struct Frontend {
    platform: LocalPlatform,
    vif: VifFrontend<LocalPlatform>,
    store: StoreClient,
    cable: Cable,
    gone: Gone,
    was_up: bool,
}

/// The two-port data plane.
struct Cable {
    dataplane: DataplaneHandle,
    port: Option<PortId>,
}

impl PortHost for Cable {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        match self.dataplane.add_port(port, PortPolicy::default(), "vif") {
            Ok(id) => self.port = Some(id),
            Err(error) => tracing::error!(%error, "the vif's port was not added"),
        }
    }

    fn detach(&mut self, _: &DeviceId) {
        if let Some(id) = self.port.take() {
            drop(self.dataplane.remove_port(id));
        }
    }
}

impl Frontend {
    fn start(
        config: &FrontendConfig,
        platform: LocalPlatform,
        vif: VifFrontend<LocalPlatform>,
        tap: OwnedFd,
    ) -> Result<Frontend, Failure> {
        let counters = Arc::clone(platform.counters());
        let fabric = Fabric::Patch(Patch::new());
        let gone = Gone::new()?;
        let handle = gone.start_plane(fabric, Arc::clone(&counters))?;
        let port = TapPort::new(tap, TapOffloads(config.offloads), config.mtu, counters);
        handle.add_port(Box::new(port), PortPolicy::default(), "tap")?;
        let mut store = platform.store()?;
        store.watch(&vif.watch_path(), "backend")?;
        let cable = Cable { dataplane: handle, port: None };
        Ok(Frontend { platform, vif, store, cable, gone, was_up: false })
    }

    /// Serves until the launcher is gone.
    fn serve(mut self, channel: &Channel) -> Result<(), Failure> {
        loop {
            self.vif.look(&self.platform, &mut self.store, &mut self.cable)?;
            self.report(channel)?;
            // A request may have come across events, of which no poll tells any more.
            let until = self.drain(channel)?.then(Instant::now);
            let mut fds = vec![
                PollFd::new(channel, PollFlags::IN),
                PollFd::from_borrowed_fd(self.store.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.gone.as_fd(), PollFlags::IN),
            ];
            let control = self.vif.control_fd();
            fds.extend(control.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            poll_until(&mut fds, until)?;
            if !fds[0].revents().is_empty() {
                // There are no further orders: the launcher is gone. The vif is closed in order.
                self.vif.close(&mut self.store, &mut self.cable)?;
                return Ok(());
            }
        }
    }

    /// Takes what waits; true if there was something.
    fn drain(&mut self, channel: &Channel) -> Result<bool, Failure> {
        let mut any = false;
        for _ in 0..64 {
            if self.store.next_event()?.is_none() {
                break;
            }
            any = true;
        }
        self.gone.clear();
        while let Some(gone) = self.gone.next() {
            any = true;
            if self.cable.port == Some(gone.id) {
                self.cable.port = None;
                self.vif.broke();
                channel.send(&FromFrontend::Down(gone.reason.to_string()), &[])?;
            } else {
                channel.send(&FromFrontend::Failed(format!("the TAP: {}", gone.reason)), &[])?;
            }
        }
        Ok(any)
    }

    fn report(&mut self, channel: &Channel) -> Result<(), Failure> {
        let up = self.vif.is_up();
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
