//! Link between a vif's frontend and the guest's end: a patch of two ports.
//!
//! The guest's end is a TAP, or the network card of a virtual machine. A vif without room applies backpressure to it. Each
//! queue of a TAP has a worker. If the vif gets fewer queues than the TAP, workers share its queues
//! (`switch::dataplane`). `ringfence run`, `ringfence attach` and `ringfence vhost-user net` use this link.

use std::io;
use std::os::fd::AsFd;

use ringfence_access::window::{SourceLevels, pages_under_pressure};
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::commands::{VifCommand, VifReply};
use ringfence_net::vif::PortHost;
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_platform::{Platform, PlatformError};
use ringfence_switch::dataplane::{AddPortError, DataplaneHandle, PortId};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};
use rustix::event::{PollFd, PollFlags};

use ringfence_driver::workers::EndedPorts;
use ringfence_sys::pressure::Share;

/// Name of the port at the guest's end.
const GUEST: &str = "guest";

/// Failures that end a vif's frontend or the guest's end.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    #[error("the port at the guest's end was not added: {0}")]
    Guest(#[from] AddPortError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Event of a link that its owner may report.
pub enum LinkEvent {
    /// A watched key has changed.
    Store,
    /// The vif's port is gone, for this reason.
    VifGone(String),
    /// The port at the guest's end is gone, for this reason.
    GuestGone(String),
}

/// A connected vif frontend and the guest's end.
pub struct Link<P: Platform> {
    platform: P,
    vif: VifFrontend<P>,
    store: StoreClient,
    vif_port: VifPort,
    gone: EndedPorts,
}

/// Patch of two ports, with the vif's port.
struct VifPort {
    dataplane: DataplaneHandle,
    port: Option<PortId>,
}

impl PortHost for VifPort {
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
        self.dataplane.execute(self.port?, queue, command)
    }
}

impl<P: Platform> Link<P> {
    /// Joins the vif and the ports at the guest's end, one for each queue, with a worker for each. Grants nothing yet.
    pub fn start(
        platform: P,
        vif: VifFrontend<P>,
        guest: Vec<Box<dyn Port>>,
    ) -> Result<Link<P>, LinkError> {
        let gone = EndedPorts::new()?;
        let fabric = || Fabric::Patch(Patch::new());
        let dataplane = gone.start_workers(guest.len(), fabric, platform.counters())?;
        dataplane.add_queues(guest, PortPolicy::default(), GUEST)?;
        let mut store = platform.store()?;
        store.watch(&vif.watch_path(), "backend")?;
        let vif_port = VifPort { dataplane, port: None };
        Ok(Link { platform, vif, store, vif_port, gone })
    }

    /// Advances the vif's life cycle.
    pub fn look(&mut self) -> Result<(), LinkError> {
        Ok(self.vif.look(&self.platform, &mut self.store, &mut self.vif_port)?)
    }

    /// Returns `true` if frames can flow.
    pub fn is_up(&self) -> bool {
        self.vif.is_up()
    }

    /// Sets the share of its `full` pages that the grant windows of each queue keep under memory pressure.
    pub fn set_share(&mut self, share: Share, full: u32) {
        let most = pages_under_pressure(share, full);
        for (queue, levels) in self.levels_after(|| VifCommand::Resize(most)) {
            let (present, in_use) = (levels.present, levels.in_use);
            tracing::info!(queue, most, present, in_use, "pages of the queue's windows");
        }
    }

    /// Returns the levels of the grant windows of all queues; `None` without windows.
    pub fn window_levels(&mut self) -> Option<SourceLevels> {
        let each = self.levels_after(|| VifCommand::ReadLevels);
        each.into_iter().map(|(_, levels)| levels).reduce(|mut sum, levels| {
            sum.add(levels);
            sum
        })
    }

    /// Returns the number of TX requests that the backend has not answered, over all queues. Every frame that a worker has read
    /// is either in a request or was dropped.
    pub fn unanswered(&mut self) -> u32 {
        let device = *self.vif.device();
        let queues = (0u16..).take(self.vif.queues());
        let unanswered = queues.map(|queue| {
            let reply = self.vif_port.execute(&device, queue, VifCommand::ReadUnanswered.into());
            match reply.and_then(VifReply::of) {
                Some(VifReply::Unanswered(number)) => number,
                _ => 0,
            }
        });
        unanswered.sum()
    }

    /// Has each queue execute the command, and returns the levels of those with windows.
    fn levels_after(&mut self, command: impl Fn() -> VifCommand) -> Vec<(u16, SourceLevels)> {
        let device = *self.vif.device();
        let queues = (0u16..).take(self.vif.queues());
        let levels = queues.filter_map(|queue| {
            let reply = self.vif_port.execute(&device, queue, command().into())?;
            match VifReply::of(reply) {
                Some(VifReply::Levels(levels)) => Some((queue, levels)),
                _ => None,
            }
        });
        levels.collect()
    }

    /// Returns the platform of both ends.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// Returns the vif with its store connection.
    pub fn vif(&mut self) -> (&mut VifFrontend<P>, &mut StoreClient) {
        (&mut self.vif, &mut self.store)
    }

    /// Iterates over the descriptors to poll. Before the poll, call [`Link::next_event`] until it returns
    /// `None`.
    pub fn wait_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let fds = [Some(self.store.fd()), Some(self.gone.as_fd()), self.vif.control_fd()];
        fds.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
    }

    /// Returns the next event, if there is one.
    pub fn next_event(&mut self) -> Result<Option<LinkEvent>, LinkError> {
        self.gone.clear();
        while let Some(gone) = self.gone.dequeue() {
            let why = gone.reason.to_string();
            if gone.name == GUEST {
                return Ok(Some(LinkEvent::GuestGone(why)));
            }
            // A port that was removed in the meantime needs no event.
            if self.vif_port.port.take_if(|port| *port == gone.id).is_some() {
                self.vif.broke();
                return Ok(Some(LinkEvent::VifGone(why)));
            }
        }
        Ok(self.store.next_event()?.map(|_| LinkEvent::Store))
    }

    /// Closes the vif in order and releases its resources.
    pub fn close(&mut self) -> Result<(), LinkError> {
        Ok(self.vif.close(&mut self.store, &mut self.vif_port)?)
    }
}
