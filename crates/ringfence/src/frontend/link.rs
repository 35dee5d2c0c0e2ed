//! A vif's frontend and its TAP, joined by a cable: a data plane of two ports, in which the TAP is
//! held up while the vif has no room. Both may have several queues, each of which has a thread; if the
//! vif comes to have fewer of them than the TAP, threads share its queues (`net::dataplane`). The same for a command's frontend and for one in a Xen guest.

use std::io;
use std::os::fd::AsFd;

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::{Platform, PlatformError};
use ringfence_switch::dataplane::{AddPortError, DataplaneHandle, PortId};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};
use rustix::event::{PollFd, PollFlags};

use crate::plane::Gone;

/// What the TAP's port is called.
const TAP: &str = "tap";

/// Why a link is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    #[error("the TAP port was not added: {0}")]
    Tap(#[from] AddPortError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Something that its owner may want to tell about.
pub(crate) enum Happened {
    /// A key changed that is watched.
    Store,
    /// The vif's port is gone, for this reason.
    VifGone(String),
    /// The TAP is gone, for this reason.
    TapGone(String),
}

/// The link.
pub(crate) struct Link<P: Platform> {
    platform: P,
    vif: VifFrontend<P>,
    store: StoreClient,
    cable: Cable,
    gone: Gone,
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

    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.dataplane.order(self.port?, queue, command)
    }
}

impl<P: Platform> Link<P> {
    /// Joins both, by a thread for each queue of the TAP; nothing is lent yet.
    pub(crate) fn start(
        platform: P,
        vif: VifFrontend<P>,
        taps: Vec<TapPort>,
    ) -> Result<Link<P>, LinkError> {
        let gone = Gone::new()?;
        let fabric = || Fabric::Patch(Patch::new());
        let dataplane = gone.start_plane(taps.len(), fabric, platform.counters())?;
        let taps = taps.into_iter().map(|tap| Box::new(tap) as Box<dyn Port>);
        dataplane.add_queues(taps.collect(), PortPolicy::default(), TAP)?;
        let mut store = platform.store()?;
        store.watch(&vif.watch_path(), "backend")?;
        let cable = Cable { dataplane, port: None };
        Ok(Link { platform, vif, store, cable, gone })
    }

    /// Does what is due.
    pub(crate) fn look(&mut self) -> Result<(), LinkError> {
        Ok(self.vif.look(&self.platform, &mut self.store, &mut self.cable)?)
    }

    /// Whether frames can flow.
    pub(crate) fn is_up(&self) -> bool {
        self.vif.is_up()
    }

    /// Has the windows of each queue keep at most so many pages.
    pub(crate) fn resize_windows(&mut self, most: u32) {
        let device = *self.vif.device();
        for queue in (0u16..).take(self.vif.queues()) {
            if let Some(PortReply::Resized(levels)) =
                self.cable.execute(&device, queue, PortCommand::Resize(most))
            {
                let (present, in_use) = (levels.present, levels.in_use);
                tracing::info!(queue, most, present, in_use, "pages of the queue's windows");
            }
        }
    }

    /// What both ends are on.
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// The vif.
    pub(crate) fn vif(&mut self) -> (&mut VifFrontend<P>, &mut StoreClient) {
        (&mut self.vif, &mut self.store)
    }

    /// What to wait for. Before that, [`Link::next`] until there is nothing.
    pub(crate) fn wait_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let fds = [Some(self.store.fd()), Some(self.gone.as_fd()), self.vif.control_fd()];
        fds.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
    }

    /// The next thing that happened.
    pub(crate) fn next(&mut self) -> Result<Option<Happened>, LinkError> {
        self.gone.clear();
        while let Some(gone) = self.gone.next() {
            let why = gone.reason.to_string();
            if gone.name == TAP {
                return Ok(Some(Happened::TapGone(why)));
            }
            // One that was taken out meanwhile is of no interest any more.
            if self.cable.port.take_if(|port| *port == gone.id).is_some() {
                self.vif.broke();
                return Ok(Some(Happened::VifGone(why)));
            }
        }
        Ok(self.store.next_event()?.map(|_| Happened::Store))
    }

    /// Says that this frontend leaves, and lets go of everything.
    pub(crate) fn close(&mut self) -> Result<(), LinkError> {
        Ok(self.vif.close(&mut self.store, &mut self.cable)?)
    }
}
