//! Frontend side of the vif handshake.

use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;

use ringfence_platform::{
    Access, Channel, Granter, Lease, LendError, Platform, PlatformError, take_back,
};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_xenbus::end::{FrontendEnd, STEPS_MAX};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::PortHost;
use super::backend::QUEUES_MAX;
use super::steps::{FrontendStep, FrontendView, frontend_step};
use crate::commands::VifCommand;
use crate::ctrl::frontend::{CtrlFrontend, StagingProgress};
use crate::features::{OffloadKeys, VifFeatures};
use crate::netback::QueueChannels;
use crate::netfront::{NetfrontPort, QueueMemory, QueueStock, WindowSizes};
use crate::rules::RuleCounters;
use crate::staging::TxStaging;
use ringfence_frame::port::Fault;

/// Reasons for which a frontend cannot connect.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// Error of the store, or an unusable key of the backend.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Error of the platform.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// Pages that cannot be granted.
    #[error("the pages of a queue cannot be lent: {0}")]
    Lend(#[from] LendError),
    /// Rings that cannot be made.
    #[error(transparent)]
    Port(#[from] Fault),
    /// Required feature that the backend does not offer.
    #[error("the backend does not offer {0}")]
    Lacks(&'static str),
}

/// Frontend of one vif: it lends rings and pages, publishes keys, and makes the ports of the queues.
pub struct VifFrontend<P: Platform> {
    end: FrontendEnd,
    mtu: u16,
    offloads: OffloadKeys,
    granter: P::Granter,
    /// Requested number of queues, and the memory of the present ones.
    queues: u32,
    memory: Vec<QueueMemory>,
    /// Pages to stage, if the backend offers staging.
    staging: TxStaging,
    /// Grant windows, if they are requested and the platform has them.
    windows: Option<QueueStock>,
    /// Set if the absence of grant windows was logged.
    said: bool,
    control: Option<Control<P::Channel>>,
    /// Pages that the backend still uses.
    stuck: Vec<Lease>,
    rules: Arc<RuleCounters>,
    broken: bool,
    was_up: bool,
}

impl<P: Platform> VifFrontend<P> {
    /// Makes a frontend for a device that a toolstack created. It reserves memory for grants, which some
    /// platforms can do only before their sandbox closes.
    ///
    /// # Errors
    ///
    /// Returns the platform's error.
    pub fn new(platform: &P, device: DeviceId, mtu: u16) -> Result<VifFrontend<P>, PlatformError> {
        Ok(VifFrontend {
            end: FrontendEnd::new(device),
            mtu,
            offloads: OffloadKeys::ALL,
            granter: platform.granter(device.backend)?,
            queues: 1,
            memory: Vec::new(),
            staging: TxStaging::Off,
            windows: None,
            said: false,
            control: None,
            stuck: Vec::new(),
            rules: Arc::default(),
            broken: false,
            was_up: false,
        })
    }

    /// Sets the backend's directory, where [`ringfence_xenbus::end::backend_path`] found it in another place than that of
    /// a kernel's backend.
    #[must_use]
    pub fn with_backend(self, directory: String) -> VifFrontend<P> {
        VifFrontend { end: self.end.with_backend(directory), ..self }
    }

    /// Limits the announced offloads. Offloads that are not announced are refused.
    #[must_use]
    pub fn with_offloads(self, offloads: OffloadKeys) -> VifFrontend<P> {
        VifFrontend { offloads, ..self }
    }

    /// Sets the number of queues. The backend's offer and the memory limit it further.
    #[must_use]
    pub fn with_queues(self, queues: u32) -> VifFrontend<P> {
        VifFrontend { queues: queues.clamp(1, QUEUES_MAX), ..self }
    }

    /// Returns the id of the device.
    pub fn device(&self) -> &DeviceId {
        self.end.device()
    }

    /// Returns the number of queues, while it is connected.
    pub fn queues(&self) -> usize {
        self.memory.len()
    }

    /// Requests staging of the queues' pages, if the backend offers it: all receive buffers, and the send
    /// buffers that `staging` selects.
    #[must_use]
    pub fn with_staging(self, staging: TxStaging) -> VifFrontend<P> {
        VifFrontend { staging, ..self }
    }

    /// Puts the buffers into grant windows, if the platform and the backend support them. Otherwise they are
    /// granted permanently, and staged if requested. The owner calls it after [`VifFrontend::with_queues`], and
    /// before the sandbox closes.
    #[must_use]
    pub fn with_windows(mut self, platform: &P, sizes: WindowSizes) -> VifFrontend<P> {
        match QueueStock::new(platform, self.end.device().backend, self.queues, sizes) {
            Ok(stock) => self.windows = Some(stock),
            Err(error) => self.say_without_windows(&error),
        }
        self
    }

    /// Returns the file descriptors of the grant windows, for a sandbox that closes all others. The owner calls
    /// it before the frontend connects.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.windows.as_ref().map(QueueStock::descriptors).unwrap_or_default()
    }

    /// Returns true if the buffers are in grant windows now.
    pub fn has_windows(&self) -> bool {
        self.memory.first().is_some_and(|memory| memory.windows().is_some())
    }

    fn say_without_windows(&mut self, why: &dyn core::fmt::Display) {
        if !core::mem::replace(&mut self.said, true) {
            tracing::warn!(device = %self.end.front_path(), "buffers are not in windows: {why}");
        }
    }

    /// Returns the file that is readable when the backend responded over the control ring, if there is one.
    /// Then the owner calls [`look`](VifFrontend::look).
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        let control = self.control.as_ref().filter(|control| !control.given_up)?;
        Some(control.ring.channel().as_fd())
    }

    /// Returns the progress of staging; `None` if it is not requested or not offered.
    pub fn staging(&self) -> Option<StagingProgress> {
        self.control.as_ref().map(|control| control.ring.progress())
    }

    /// Returns the store path to watch.
    pub fn watch_path(&self) -> String {
        self.end.watch_path()
    }

    /// Returns the counters of the backend's rule violations.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// Returns true if the backend is connected.
    pub fn is_up(&self) -> bool {
        !self.memory.is_empty() && self.was_up && !self.broken
    }

    /// Records that the data path ended.
    pub fn broke(&mut self) {
        self.broken = true;
    }

    /// Reads both states and executes the steps that are due.
    ///
    /// # Errors
    ///
    /// Returns an error if the store or this side fails.
    pub fn look(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<(), FrontendError> {
        for _ in 0..STEPS_MAX {
            let view = self.view(store)?;
            match frontend_step(view) {
                FrontendStep::Wait => {
                    self.serve_control(host);
                    return Ok(());
                }
                FrontendStep::Connect => self.connect(platform, store, host)?,
                FrontendStep::Complete => self.end.enter(store, XenbusState::Connected)?,
                FrontendStep::Restart => {
                    self.let_go(host);
                    self.end.enter(store, XenbusState::Initialising)?;
                }
                FrontendStep::Finish => {
                    self.let_go(host);
                    self.end.enter(store, XenbusState::Closed)?;
                }
            }
        }
        Ok(())
    }

    /// Announces that this frontend will disconnect. A correct backend then releases every page, which some
    /// platforms cannot revoke before. [`VifFrontend::close`] must follow.
    ///
    /// # Errors
    ///
    /// Returns the store's error.
    pub fn begin_close(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        self.end.enter(store, XenbusState::Closing)
    }

    /// Disconnects this frontend and releases all resources.
    ///
    /// # Errors
    ///
    /// Returns the store's error.
    pub fn close(
        &mut self,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<(), StoreError> {
        self.end.enter(store, XenbusState::Closing)?;
        self.let_go(host);
        self.end.enter(store, XenbusState::Closed)
    }

    fn view(&mut self, store: &mut StoreClient) -> Result<FrontendView, StoreError> {
        let view = self.end.view(store, !self.memory.is_empty())?;
        self.was_up |= view.attached && view.peer == Some(XenbusState::Connected);
        Ok(FrontendView { was_up: self.was_up, broken: self.broken, ..view })
    }

    fn let_go(&mut self, host: &mut impl PortHost) {
        if let Some(Control { ring, page, .. }) = self.control.take() {
            self.stuck.extend([page, ring.into_list()]);
        }
        if !self.memory.is_empty() {
            host.detach(self.end.device());
            for memory in core::mem::take(&mut self.memory) {
                self.stuck.extend(memory.revoke_all(&mut self.granter));
            }
        }
        // A slow backend may have released pages since the last call.
        let stuck = core::mem::take(&mut self.stuck);
        self.stuck = take_back(&mut self.granter, stuck);
        (self.broken, self.was_up) = (false, false);
    }

    /// Returns the offloads, the flag for two channels per queue, and the maximum number of queues.
    fn features(&self, store: &mut StoreClient) -> Result<(VifFeatures, bool, u32), FrontendError> {
        let key = |name: &str| self.end.back(name);
        if !store.read_flag(&key(keys::FEATURE_RX_COPY))? {
            return Err(FrontendError::Lacks(keys::FEATURE_RX_COPY));
        }
        let peer = OffloadKeys::read(store, self.end.back_path())?;
        let features = VifFeatures { peer, own: self.offloads, mtu: self.mtu };
        let most = store.read_u32_opt(&key(keys::MULTI_QUEUE_MAX_QUEUES))?.unwrap_or(1);
        Ok((features, store.read_flag(&key(keys::FEATURE_SPLIT_EVENT_CHANNELS))?, most))
    }

    fn connect(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<(), FrontendError> {
        let (features, split, most) = self.features(store)?;
        let backend = self.end.device().backend;
        let channels = |_: &QueueMemory| {
            let tx = platform.alloc_unbound(backend)?;
            let rx = if split { Some(platform.alloc_unbound(backend)?) } else { None };
            Ok::<_, PlatformError>(QueueChannels { tx, rx })
        };
        let windows = store.read_flag(&self.end.back(keys::FEATURE_RINGFENCE_WINDOW))?;
        if self.windows.is_some() && !windows {
            self.say_without_windows(&"the backend does not open them");
        }
        let mut memory = self.lend(self.queues.min(most), windows)?;
        let windows = memory.iter().any(|memory| memory.windows().is_some());
        let channels = memory.iter().map(channels).collect::<Result<Vec<_>, _>>()?;
        let queues = memory.iter().zip(&channels);
        let entries: Vec<_> = queues.map(|(memory, of)| queue_entries(memory, of)).collect();
        let port = NetfrontPort::new(&mut memory, channels, features, &self.rules)?;
        let wanted = self.staging != TxStaging::Off
            && !windows
            && store.read_flag(&self.end.back(keys::FEATURE_CTRL_RING))?;
        self.control = wanted.then(|| self.control_ring(platform, &memory)).transpose()?;
        let control = self.control.as_ref().map(|c| (c.page.gref(), c.ring.channel().port()));
        self.memory = memory;
        host.attach(self.end.device(), Box::new(port));
        let (front, offloads) = (self.end.front_path(), self.offloads);
        store.transaction(|t| {
            forget_queues(t, front)?;
            let mut put = |key: &str, value: String| t.write(&format!("{front}/{key}"), value);
            match entries.as_slice() {
                [only] => only.iter().try_for_each(|(key, value)| put(key, value.clone()))?,
                queues => {
                    put(keys::MULTI_QUEUE_NUM_QUEUES, queues.len().to_string())?;
                    for (number, entries) in (0..).zip(queues) {
                        let directory = keys::queue_directory(number);
                        for (key, value) in entries {
                            put(&format!("{directory}/{key}"), value.clone())?;
                        }
                    }
                }
            }
            if let Some((gref, port)) = control {
                put(keys::CTRL_RING_REF, gref.to_string())?;
                put(keys::EVENT_CHANNEL_CTRL, port.0.to_string())?;
            }
            let others = [(keys::REQUEST_RX_COPY, "1"), (keys::FEATURE_RX_NOTIFY, "1")];
            for (key, value) in offloads.entries().into_iter().chain(others) {
                put(key, value.to_owned())?;
            }
            put(xenbus::STATE, XenbusState::Connected.to_string())
        })?;
        Ok(())
    }

    /// Grants the memory of up to `queues` queues, as far as there is memory.
    fn lend(&mut self, queues: u32, windows: bool) -> Result<Vec<QueueMemory>, FrontendError> {
        let mut memory = Vec::new();
        for _ in 0..queues.max(1) {
            let stock = self.windows.as_mut().filter(|_| windows);
            let lent = match stock.and_then(QueueStock::take) {
                Some(windows) => QueueMemory::lend_rings(&mut self.granter, windows),
                None => QueueMemory::lend(&mut self.granter),
            };
            match lent {
                Ok(queue) => memory.push(queue),
                Err(error) if memory.is_empty() => return Err(error.into()),
                Err(error) => {
                    tracing::info!(%error, wanted = queues, got = memory.len(), "fewer queues");
                    break;
                }
            }
        }
        Ok(memory)
    }
}

/// Returns the keys of a queue and their values.
fn queue_entries<C: Channel>(
    memory: &QueueMemory,
    channels: &QueueChannels<C>,
) -> Vec<(&'static str, String)> {
    let (tx, rx) = memory.ring_refs();
    let mut entries =
        vec![(keys::TX_RING_REF, tx.to_string()), (keys::RX_RING_REF, rx.to_string())];
    let port = |channel: &C| channel.port().0.to_string();
    match &channels.rx {
        Some(rx) => entries.extend([
            (keys::EVENT_CHANNEL_TX, port(&channels.tx)),
            (keys::EVENT_CHANNEL_RX, port(rx)),
        ]),
        None => entries.push((keys::EVENT_CHANNEL, port(&channels.tx))),
    }
    if let Some((tx, rx)) = memory.windows() {
        let rings = [
            (tx, keys::RINGFENCE_TX_WINDOW, keys::RINGFENCE_TX_WINDOW_REFERENCES),
            (rx, keys::RINGFENCE_RX_WINDOW, keys::RINGFENCE_RX_WINDOW_REFERENCES),
        ];
        for (name, handle, references) in rings {
            entries.push((handle, name.handle.0.to_string()));
            entries.extend(name.references.map(|count| (references, count.to_string())));
        }
    }
    entries
}

/// Removes the keys of an earlier connection with another number of queues. Keys of both forms must not
/// exist together.
fn forget_queues(store: &mut impl StoreAccess, front: &str) -> Result<(), StoreError> {
    let single = [
        keys::TX_RING_REF,
        keys::RX_RING_REF,
        keys::EVENT_CHANNEL,
        keys::EVENT_CHANNEL_TX,
        keys::EVENT_CHANNEL_RX,
        keys::CTRL_RING_REF,
        keys::EVENT_CHANNEL_CTRL,
        keys::RINGFENCE_TX_WINDOW,
        keys::RINGFENCE_RX_WINDOW,
        keys::RINGFENCE_TX_WINDOW_REFERENCES,
        keys::RINGFENCE_RX_WINDOW_REFERENCES,
        keys::MULTI_QUEUE_NUM_QUEUES,
    ];
    let several = (0..QUEUES_MAX).map(keys::queue_directory);
    for key in single.into_iter().map(str::to_owned).chain(several) {
        let path = format!("{front}/{key}");
        if store.read_opt(&path)?.is_some() {
            store.rm(&path)?;
        }
    }
    Ok(())
}

/// Control ring of a frontend and its page.
struct Control<C> {
    ring: CtrlFrontend<C>,
    page: Lease,
    /// Set if the backend broke a rule or closed its channel.
    given_up: bool,
    /// Set if the port knows which pages are staged.
    in_use: bool,
}

impl<P: Platform> VifFrontend<P> {
    fn control_ring(
        &mut self,
        platform: &P,
        memory: &[QueueMemory],
    ) -> Result<Control<P::Channel>, FrontendError> {
        let page = self.granter.lend(Access::ReadWrite)?;
        let list = match self.granter.lend(Access::ReadWrite) {
            Ok(list) => list,
            Err(error) => {
                self.stuck.push(page);
                return Err(error.into());
            }
        };
        let channel = platform.alloc_unbound(self.end.device().backend)?;
        let pages = memory.iter().map(|memory| memory.pages(self.staging)).collect();
        let ring = CtrlFrontend::new(&page, list, channel, pages, &self.rules)?;
        Ok(Control { ring, page, given_up: false, in_use: false })
    }

    /// Continues staging, once the backend is connected. A failure costs only performance.
    fn serve_control(&mut self, host: &mut impl PortHost) {
        if !self.is_up() {
            return;
        }
        let Some(control) = self.control.as_mut().filter(|control| !control.given_up) else {
            return;
        };
        if let Err(fault) = control.ring.serve() {
            control.given_up = true;
            self.rules.count("control_ring_given_up");
            tracing::warn!(%fault, "staging was given up");
            return;
        }
        if control.ring.progress().done && !control.in_use {
            control.in_use = true;
            let queues = (0u16..).take(self.memory.len());
            for queue in queues.filter(|queue| control.ring.is_staged(*queue)) {
                drop(host.execute(
                    self.end.device(),
                    queue,
                    VifCommand::SendStaged(self.staging).into(),
                ));
            }
        }
    }
}
