//! The backend's side of the handshake.

mod offer;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_platform::{EventPort, Gref, Platform};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_xenbus::end::is_about_a_key;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::connect::{ConnectError, map_ring};
use super::controls::{Followed, VifPolicy};
use super::steps::{BackendStep, BackendView, backend_step};
use super::{PortHost, ctrl_ring, windows};
use crate::ctrl::backend::ControlRing;
use crate::features::{OffloadKeys, VifFeatures};
use crate::netback::{NetbackPort, QueueChannels, QueueParts, QueueRecords, QueueWindows};
use crate::rules::RuleCounters;
use ringfence_frame::commands::PortCommand;
use ringfence_frame::port::{Fault, Port};
use ringfence_sys::clock::Clock;

/// Steps that one look may take: more than any handshake needs, so that a peer that changes its
/// state all the time holds nobody up.
const STEPS_MAX: usize = 8;

/// Queues that a vif has at most, whatever its owner wants: each takes files and mappings.
pub const QUEUES_MAX: u32 = 16;

/// What the owner of a backend decides about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendOptions {
    /// How the guest's pages are reached.
    pub mode: Mode,
    /// Bytes behind the Ethernet header.
    pub mtu: u16,
}

/// What became of a device in a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// It goes on.
    Alive,
    /// It is gone for good; forget it.
    Over,
}

/// One vif, from the backend's side.
pub struct VifBackend {
    device: DeviceId,
    front: String,
    back: String,
    options: BackendOptions,
    offloads: OffloadKeys,
    max_queues: u32,
    waits_for_hotplug: bool,
    followed: Followed,
    rules: Arc<RuleCounters>,
    /// This value wrote the keys that the frontend reads.
    announced: bool,
    attached: bool,
    connection: Option<Connection>,
    control: Option<Box<dyn ControlRing>>,
    condemned: Option<String>,
}

/// How a device that is in use was connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// What both ends take.
    pub features: VifFeatures,
    /// Queues.
    pub queues: u32,
    /// Whether it was taken over from a backend before this one, without the frontend's noticing.
    pub adopted: bool,
}

impl VifBackend {
    /// A backend for a device that a toolstack made.
    pub fn new(device: DeviceId, options: BackendOptions) -> VifBackend {
        VifBackend {
            device,
            front: device.frontend_path(),
            back: device.backend_path(),
            options,
            offloads: OffloadKeys::ALL,
            max_queues: 1,
            waits_for_hotplug: false,
            followed: Followed::default(),
            rules: Arc::default(),
            announced: false,
            attached: false,
            connection: None,
            control: None,
            condemned: None,
        }
    }

    /// Connects only once the toolstack's script said that the interface is wired up
    /// (`hotplug-status` is `connected`), as other backends of a toolstack with scripts do.
    #[must_use]
    pub fn waiting_for_hotplug(self, waits: bool) -> VifBackend {
        VifBackend { waits_for_hotplug: waits, ..self }
    }

    /// Decides about the guest's behaviour over time.
    #[must_use]
    pub fn with_policy(mut self, policy: VifPolicy) -> VifBackend {
        self.followed.policy = policy;
        self
    }

    /// Goes by another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> VifBackend {
        self.followed.clock = clock;
        self
    }

    /// Announces only these offloads. What is not announced is refused.
    #[must_use]
    pub fn with_offloads(self, offloads: OffloadKeys) -> VifBackend {
        VifBackend { offloads, ..self }
    }

    /// Decides anew, for the next time that the frontend starts over.
    pub fn reconfigure(
        &mut self,
        options: BackendOptions,
        offloads: OffloadKeys,
        policy: VifPolicy,
        max_queues: u32,
    ) {
        (self.options, self.offloads, self.followed.policy) = (options, offloads, policy);
        self.max_queues = max_queues.clamp(1, QUEUES_MAX);
        // What was announced, and holds until then, is in the store.
        self.announced = false;
    }

    /// Offers so many queues: at least one, and at most [`QUEUES_MAX`].
    #[must_use]
    pub fn with_queues(self, max_queues: u32) -> VifBackend {
        VifBackend { max_queues: max_queues.clamp(1, QUEUES_MAX), ..self }
    }

    /// The device.
    pub fn device(&self) -> &DeviceId {
        &self.device
    }

    /// What the guest did wrong, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// How it is connected, while it is.
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref().filter(|_| self.attached)
    }

    /// Readable when the guest has something to say over its control ring, if it has one: then
    /// call [`VifBackend::serve_control`].
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(|control| control.wait_fd())
    }

    /// Pages that the guest staged.
    pub fn staged(&self) -> u32 {
        self.control.as_ref().map_or(0, |control| control.staged())
    }

    /// Serves the control ring for one turn; whether there may be more to do. A guest that breaks its
    /// rules is condemned: look afterwards.
    pub fn serve_control(&mut self, host: &mut impl PortHost) -> bool {
        let Some(control) = &mut self.control else { return false };
        let device = &self.device;
        match control.serve(&mut |queue, command| host.execute(device, queue, command)) {
            Ok(more) => more,
            Err(fault) => {
                self.control = None;
                if !matches!(fault, Fault::Gone) {
                    self.condemn(format!("control ring: {fault}"));
                }
                false
            }
        }
    }

    /// Why the device was closed, if this side did so.
    pub fn condemned(&self) -> Option<&str> {
        self.condemned.as_deref()
    }

    /// The paths to watch.
    pub fn watch_paths(&self) -> [String; 3] {
        let front = |key| format!("{}/{key}", self.front);
        [front(xenbus::STATE), front(keys::REQUEST_MULTICAST_CONTROL), self.back.clone()]
    }

    /// The data path ended because of the guest: close the device at the next look. A guest that
    /// comes back to be condemned again is logged ever more rarely.
    pub fn condemn(&mut self, why: String) {
        let times = self.rules.count("device_condemned") + 1;
        if times.is_power_of_two() {
            tracing::warn!(device = %self.back, %why, times, "device closed");
        }
        self.condemned.get_or_insert(why);
    }

    /// Looks at both states and does what is due. Call it when a watch fired; calling it without
    /// need does no harm.
    ///
    /// # Errors
    ///
    /// When the store fails; what the frontend does wrong is no error but costs it the device.
    pub fn look<P: Platform>(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<Life, StoreError> {
        for _ in 0..STEPS_MAX {
            let Some(view) = self.view(store)? else {
                self.let_go(host);
                return Ok(Life::Over);
            };
            if self.attached {
                let changed = self.followed.look(store, &self.front, &self.back, &self.rules)?;
                if let Some(wanted) = changed {
                    // Whoever is not there any more is connected anew, with what is wanted by then.
                    drop(host.execute(&self.device, 0, PortCommand::SetPolicy(wanted)));
                }
            }
            match backend_step(view) {
                BackendStep::Wait => return Ok(Life::Alive),
                BackendStep::Announce => {
                    self.let_go(host);
                    self.condemned = None;
                    self.announce(platform, store)?;
                }
                BackendStep::Connect => {
                    let adopting = view.own == XenbusState::Connected;
                    if !adopting && !self.is_wired_up(store)? {
                        return Ok(Life::Alive);
                    }
                    self.connect(adopting, platform, store, host)?;
                }
                BackendStep::Close => {
                    self.let_go(host);
                    self.enter(store, XenbusState::Closing)?;
                }
                BackendStep::Finish => {
                    self.let_go(host);
                    self.enter(store, XenbusState::Closed)?;
                }
                BackendStep::Forget => {
                    self.let_go(host);
                    self.enter(store, XenbusState::Closed)?;
                    return Ok(Life::Over);
                }
            }
        }
        Ok(Life::Alive)
    }

    /// Lets go of everything, without touching the store: for a domain that is gone.
    pub fn let_go(&mut self, host: &mut impl PortHost) {
        self.control = None;
        if core::mem::take(&mut self.attached) {
            host.detach(&self.device);
        }
    }

    fn view(&self, store: &mut StoreClient) -> Result<Option<BackendView>, StoreError> {
        let own = match store.read_opt(&format!("{}/{}", self.back, xenbus::STATE)) {
            Ok(Some(own)) => own,
            // Gone, or no longer ours, which is the same where the toolstack took it away.
            Ok(None) | Err(StoreError::Refused { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let peer = match store.read_opt(&format!("{}/{}", self.front, xenbus::STATE)) {
            Ok(peer) => peer.map(|text| self.peer_state(&text)),
            // The frontend's own permissions keep us from reading it.
            Err(StoreError::Refused { .. }) => {
                self.rules.count("state_unreadable");
                Some(XenbusState::Missing)
            }
            Err(error) => return Err(error),
        };
        Ok(Some(BackendView {
            own: XenbusState::parse(&own).unwrap_or(XenbusState::Missing),
            peer,
            attached: self.attached,
            online: store.read_flag(&format!("{}/{}", self.back, xenbus::ONLINE)).unwrap_or(false),
            condemned: self.condemned.is_some(),
        }))
    }

    fn peer_state(&self, text: &[u8]) -> XenbusState {
        XenbusState::parse(text).unwrap_or_else(|_| {
            self.rules.count("state_not_a_number");
            XenbusState::Missing
        })
    }

    fn enter(&self, store: &mut StoreClient, state: XenbusState) -> Result<(), StoreError> {
        if let Some(why) = &self.condemned {
            store.write(&format!("{}/error", self.back), why)?;
        }
        store.write(&format!("{}/{}", self.back, xenbus::STATE), state.to_string())
    }

    fn is_wired_up(&self, store: &mut StoreClient) -> Result<bool, StoreError> {
        if !self.waits_for_hotplug {
            return Ok(true);
        }
        let status = store.read_opt(&format!("{}/{}", self.back, keys::HOTPLUG_STATUS))?;
        Ok(status.is_some_and(|status| status == b"connected"))
    }

    fn announce(
        &mut self,
        platform: &impl Platform,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let windows = self.offers_windows(platform);
        self.announced = true;
        let back = &self.back;
        let queues = self.max_queues.to_string();
        store.transaction(|t| {
            let others = [
                (keys::FEATURE_RX_COPY, "1"),
                (keys::FEATURE_SPLIT_EVENT_CHANNELS, "1"),
                (keys::MULTI_QUEUE_MAX_QUEUES, queues.as_str()),
                (keys::FEATURE_CTRL_RING, "1"),
            ];
            let window = format!("{back}/{}", keys::FEATURE_RINGFENCE_WINDOW);
            if windows {
                t.write(&window, "1")?;
            } else if t.read_opt(&window)?.is_some() {
                t.rm(&window)?;
            }
            let policy = self.followed.entries();
            for (key, value) in self.offloads.entries().into_iter().chain(others).chain(policy) {
                t.write(&format!("{back}/{key}"), value)?;
            }
            t.write(&format!("{back}/{}", xenbus::STATE), XenbusState::InitWait.to_string())
        })
    }

    fn connect<P: Platform>(
        &mut self,
        adopting: bool,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<(), StoreError> {
        self.followed.look(store, &self.front, &self.back, &self.rules)?;
        match self.open(adopting, platform, store, host) {
            Ok((port, control, connection)) => {
                self.control = control;
                host.attach(&self.device, port);
                self.attached = true;
                self.connection = Some(connection);
                if adopting {
                    // The frontend is to notice nothing.
                    let device = &self.device;
                    if let Some(control) = &mut self.control {
                        control.take_up(&mut |queue, command| host.execute(device, queue, command));
                    }
                    return Ok(());
                }
                store.write(&format!("{}/{}", self.back, keys::CARRIER), "1")?;
                self.enter(store, XenbusState::Connected)
            }
            Err(ConnectError::Store(error)) if !is_about_a_key(&error) => Err(error),
            Err(error) => {
                self.rules.count(error.rule());
                self.condemn(error.to_string());
                Ok(())
            }
        }
    }

    /// Reads the frontend's keys, once each, and maps and binds what they name.
    fn open<P: Platform>(
        &self,
        adopting: bool,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<Opened, ConnectError> {
        let key = |name: &str| format!("{}/{name}", self.front);
        let queues = store.read_u32_opt(&key(keys::MULTI_QUEUE_NUM_QUEUES))?.unwrap_or(1);
        let limit = self.queues_offered(store)?;
        if queues == 0 || queues > limit {
            return Err(ConnectError::Queues { wanted: queues, limit });
        }
        if !store.read_flag(&key(keys::REQUEST_RX_COPY))? {
            return Err(ConnectError::NoRxCopy);
        }
        // What the frontend was told holds, whatever this process would tell it today.
        let (own, offered) = match self.announced {
            true => (self.offloads, self.followed.policy.multicast_control),
            false => (OffloadKeys::read(store, &self.back)?, Followed::read(store, &self.back)?),
        };
        let peer = OffloadKeys::read(store, &self.front)?;
        let features = VifFeatures { peer, own, mtu: self.options.mtu };
        let windows = match self.announced {
            true => self.options.mode == Mode::Window,
            false => {
                store.read_flag(&format!("{}/{}", self.back, keys::FEATURE_RINGFENCE_WINDOW))?
            }
        };
        let parts = (0..queues).map(|queue| {
            let directory = match queues {
                1 => self.front.clone(),
                _ => format!("{}/{}", self.front, keys::queue_directory(queue)),
            };
            let records = host.records(&self.device, queue);
            let windows = if windows {
                windows::open(&directory, self.device.frontend, platform, store)?
            } else {
                QueueWindows::default()
            };
            let parts = self.open_queue(&directory, records, platform, store)?;
            Ok(QueueParts { windows, ..parts })
        });
        let parts = parts.collect::<Result<Vec<_>, ConnectError>>()?;
        let rules = &self.rules;
        let mode = if windows { Mode::Window } else { self.options.mode };
        let wanted = ctrl_ring::PortPolicy { queues, mode, adopting };
        let control = ctrl_ring::open(&self.device, wanted, platform, store, host, rules)?;
        // Who was told that its pages can be staged has staged some, whatever the mode is now.
        let told = adopting && control.as_ref().is_some_and(|control| control.stages());
        let mode = if told && !windows { Mode::Staging } else { mode };
        let port = if adopting {
            NetbackPort::adopt(parts, mode, features, rules).map_err(ConnectError::Adopt)?
        } else {
            NetbackPort::new(parts, mode, features, rules)
        };
        let port = port.with_policy(self.followed.policy(&self.back, adopting, offered));
        Ok((Box::new(port), control, Connection { features, queues, adopted: adopting }))
    }

    /// Queues that the frontend was told it may have.
    fn queues_offered(&self, store: &mut StoreClient) -> Result<u32, StoreError> {
        if self.announced {
            return Ok(self.max_queues);
        }
        let key = format!("{}/{}", self.back, keys::MULTI_QUEUE_MAX_QUEUES);
        Ok(store.read_u32_opt(&key)?.unwrap_or(1).min(QUEUES_MAX))
    }

    /// Maps and binds what the keys in `directory` name.
    fn open_queue<P: Platform>(
        &self,
        directory: &str,
        records: Option<QueueRecords>,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<QueueParts<P::Grantee, P::Channel>, ConnectError> {
        let key = |name: &str| format!("{directory}/{name}");
        // A missing reference must not be read as 0, which is the console's page.
        let tx_ref = Gref(store.read_u32(&key(keys::TX_RING_REF))?);
        let rx_ref = Gref(store.read_u32(&key(keys::RX_RING_REF))?);
        let peer = self.device.frontend;
        let mut tx_pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let rx_pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let tx_ring = map_ring(&mut tx_pages, "tx", tx_ref)?;
        let rx_ring = map_ring(&mut tx_pages, "rx", rx_ref)?;
        let bind = |port| {
            let bound = platform.bind_interdomain(peer, EventPort(port));
            bound.map_err(|source| ConnectError::Channel { port, source })
        };
        let channels = match store.read_u32_opt(&key(keys::EVENT_CHANNEL_TX))? {
            Some(tx) => {
                let rx = store.read_u32(&key(keys::EVENT_CHANNEL_RX))?;
                QueueChannels { tx: bind(tx)?, rx: Some(bind(rx)?) }
            }
            None => {
                QueueChannels { tx: bind(store.read_u32(&key(keys::EVENT_CHANNEL))?)?, rx: None }
            }
        };
        let windows = QueueWindows::default();
        Ok(QueueParts { tx_ring, rx_ring, channels, tx_pages, rx_pages, windows, records })
    }
}

/// A device's port, and its control ring if it has one.
type Opened = (Box<dyn Port>, Option<Box<dyn ControlRing>>, Connection);
