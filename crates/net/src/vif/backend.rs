//! Backend side of the vif handshake.

mod offer;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_platform::{Gref, Platform};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_xenbus::connect::{RingName, bind_channel, map_ring};
pub use ringfence_xenbus::end::Life;
use ringfence_xenbus::end::{BackendEnd, Failed, STEPS_MAX};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::connect::{ConnectError, VifRejection};
use super::controls::{Followed, VifPolicy};
use super::steps::{BackendStep, backend_step};
use super::{PortHost, ctrl_ring, windows};
use crate::ctrl::backend::ControlRing;
use crate::features::{OffloadKeys, VifFeatures};
use crate::netback::{NetbackPort, QueueChannels, QueueParts, QueueRecords, QueueWindows};
use crate::rules::RuleCounters;
use ringfence_frame::port::{Fault, Port};
use ringfence_sys::clock::Clock;

/// Maximum number of queues of a vif: each uses files and mappings.
pub const QUEUES_MAX: u32 = 16;

/// Options of a backend that its owner selects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendOptions {
    /// Access mode for the guest's pages.
    pub mode: Mode,
    /// Maximum number of bytes behind the Ethernet header.
    pub mtu: u16,
}

/// Backend of one vif: it offers features, follows the frontend's state, and makes the ports of the queues.
pub struct VifBackend {
    end: BackendEnd,
    options: BackendOptions,
    offloads: OffloadKeys,
    max_queues: u32,
    waits_for_hotplug: bool,
    followed: Followed,
    /// Set if this process wrote the keys that the frontend reads.
    announced: bool,
    attached: bool,
    connection: Option<Connection>,
    control: Option<Box<dyn ControlRing>>,
}

/// Terms on which a vif is connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// Negotiated offloads of the connection.
    pub features: VifFeatures,
    pub queues: u32,
    /// Set if this process took the device over from a previous one, without a change of state.
    pub adopted: bool,
}

impl VifBackend {
    /// Makes a backend for a device that a toolstack created.
    pub fn new(device: DeviceId, options: BackendOptions) -> VifBackend {
        VifBackend {
            end: BackendEnd::new(device),
            options,
            offloads: OffloadKeys::ALL,
            max_queues: 1,
            waits_for_hotplug: false,
            followed: Followed::default(),
            announced: false,
            attached: false,
            connection: None,
            control: None,
        }
    }

    /// Delays the connection until the toolstack's script has configured the interface (`hotplug-status` is
    /// `connected`), as other backends of such toolstacks do.
    #[must_use]
    pub fn waiting_for_hotplug(self, waits: bool) -> VifBackend {
        VifBackend { waits_for_hotplug: waits, ..self }
    }

    /// Sets the policy for multicast control and stalls.
    #[must_use]
    pub fn with_policy(mut self, policy: VifPolicy) -> VifBackend {
        self.followed.policy = policy;
        self
    }

    /// Replaces the clock of the policy.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> VifBackend {
        self.followed.clock = clock;
        self
    }

    /// Limits the announced offloads. Offloads that are not announced are refused.
    #[must_use]
    pub fn with_offloads(self, offloads: OffloadKeys) -> VifBackend {
        VifBackend { offloads, ..self }
    }

    /// Changes the configuration; it applies when the frontend connects again.
    pub fn reconfigure(
        &mut self,
        options: BackendOptions,
        offloads: OffloadKeys,
        policy: VifPolicy,
        max_queues: u32,
    ) {
        (self.options, self.offloads, self.followed.policy) = (options, offloads, policy);
        self.max_queues = max_queues.clamp(1, QUEUES_MAX);
        // The keys announced earlier are in the store and hold until then.
        self.announced = false;
    }

    /// Changes the MTU, for the present connection too. The caller changes that of the port
    /// ([`PortCommand::SetMtu`](ringfence_frame::commands::PortCommand::SetMtu)).
    pub fn set_mtu(&mut self, mtu: u16) {
        self.options.mtu = mtu;
        if let Some(connection) = &mut self.connection {
            connection.features.mtu = mtu;
        }
    }

    /// Sets the number of offered queues, from one to [`QUEUES_MAX`].
    #[must_use]
    pub fn with_queues(self, max_queues: u32) -> VifBackend {
        VifBackend { max_queues: max_queues.clamp(1, QUEUES_MAX), ..self }
    }

    /// Returns the id of the device.
    pub fn device(&self) -> &DeviceId {
        self.end.device()
    }

    /// Returns the counters of the guest's rule violations.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        self.end.rules()
    }

    /// Returns the parameters of the connection, while there is one.
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref().filter(|_| self.attached)
    }

    /// Returns the file that is readable when the guest sent messages over its control ring, if it has one.
    /// Then the owner calls [`VifBackend::serve_control`].
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(|control| control.wait_fd())
    }

    /// Returns the number of pages that the guest staged.
    pub fn staged(&self) -> u32 {
        self.control.as_ref().map_or(0, |control| control.staged())
    }

    /// Serves some messages of the control ring; returns true if there may be more. A rule violation ends the
    /// device, so the owner calls [`VifBackend::look`] afterwards.
    pub fn serve_control(&mut self, host: &mut impl PortHost) -> bool {
        let Some(control) = &mut self.control else { return false };
        let device = self.end.device();
        match control.serve(&mut |queue, command| host.execute(device, queue, command)) {
            Ok(more) => more,
            Err(fault) => {
                self.control = None;
                if !matches!(fault, Fault::Gone) {
                    self.close_with_penalty(format!("control ring: {fault}"));
                }
                false
            }
        }
    }

    /// Returns the reason for which this side closed the device.
    pub fn penalized(&self) -> Option<&str> {
        self.end.penalized()
    }

    /// Returns the store paths to watch.
    pub fn watch_paths(&self) -> [String; 3] {
        let [state, back] = self.end.watch_paths();
        [state, self.end.front(keys::REQUEST_MULTICAST_CONTROL), back]
    }

    /// Marks the device for closing by the next [`VifBackend::look`], because the guest broke a rule. Repeated
    /// violations are logged at an exponentially falling rate.
    pub fn close_with_penalty(&mut self, why: String) {
        self.end.close_with_penalty(why);
    }

    /// Reads both states and executes the steps that are due. The owner calls it after each watch event;
    /// additional calls are harmless.
    ///
    /// # Errors
    ///
    /// Returns the store's error. Faults of the frontend end its device and are not errors.
    pub fn look<P: Platform>(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<Life, StoreError> {
        for _ in 0..STEPS_MAX {
            let Some(view) = self.end.view(store, self.attached)? else {
                self.let_go(host);
                return Ok(Life::Over);
            };
            if self.attached {
                let changed = self.followed.look(store, &self.end)?;
                if let Some(wanted) = changed {
                    // A missing port connects again, with the new values.
                    drop(host.execute(self.end.device(), 0, wanted.into()));
                }
            }
            match backend_step(view) {
                BackendStep::Wait => return Ok(Life::Alive),
                BackendStep::Announce => {
                    self.let_go(host);
                    self.end.reset_penalty();
                    self.announce(platform, store)?;
                }
                BackendStep::Connect => {
                    let adopting = view.own == XenbusState::Connected;
                    if !adopting && !self.is_wired_up(store)? {
                        return Ok(Life::Alive);
                    }
                    self.connect(adopting, platform, store, host)?;
                    if self.end.awaits_windows() {
                        return Ok(Life::Alive);
                    }
                }
                BackendStep::Close => {
                    self.let_go(host);
                    self.end.enter(store, XenbusState::Closing)?;
                }
                BackendStep::Finish => {
                    self.let_go(host);
                    self.end.enter(store, XenbusState::Closed)?;
                }
                BackendStep::Forget => {
                    self.let_go(host);
                    self.end.enter(store, XenbusState::Closed)?;
                    return Ok(Life::Over);
                }
            }
        }
        Ok(Life::Alive)
    }

    /// Releases all resources without store access, for a domain that no longer exists.
    pub fn let_go(&mut self, host: &mut impl PortHost) {
        self.control = None;
        if core::mem::take(&mut self.attached) {
            host.detach(self.end.device());
        }
    }

    fn is_wired_up(&self, store: &mut StoreClient) -> Result<bool, StoreError> {
        if !self.waits_for_hotplug {
            return Ok(true);
        }
        let status = store.read_opt(&self.end.back(keys::HOTPLUG_STATUS))?;
        Ok(status.is_some_and(|status| status == b"connected"))
    }

    fn announce(
        &mut self,
        platform: &impl Platform,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let windows = self.offers_windows(platform);
        self.announced = true;
        let end = &self.end;
        let queues = self.max_queues.to_string();
        store.transaction(|t| {
            let others = [
                (keys::FEATURE_RX_COPY, "1"),
                (keys::FEATURE_SPLIT_EVENT_CHANNELS, "1"),
                (keys::MULTI_QUEUE_MAX_QUEUES, queues.as_str()),
                (keys::FEATURE_CTRL_RING, "1"),
            ];
            let window = end.back(keys::FEATURE_RINGFENCE_WINDOW);
            if windows {
                t.write(&window, "1")?;
            } else if t.read_opt(&window)?.is_some() {
                t.rm(&window)?;
            }
            let policy = self.followed.entries();
            for (key, value) in self.offloads.entries().into_iter().chain(others).chain(policy) {
                t.write(&end.back(key), value)?;
            }
            t.write(&end.back(xenbus::STATE), XenbusState::InitWait.to_string())
        })
    }

    fn connect<P: Platform>(
        &mut self,
        adopting: bool,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<(), StoreError> {
        self.followed.look(store, &self.end)?;
        match self.open(adopting, platform, store, host) {
            Ok((port, control, connection)) => {
                self.control = control;
                host.attach(self.end.device(), port);
                self.attached = true;
                self.connection = Some(connection);
                self.end.connected();
                if adopting {
                    // The frontend must not see a change of state.
                    let device = self.end.device();
                    if let Some(control) = &mut self.control {
                        control.restore(&mut |queue, command| host.execute(device, queue, command));
                    }
                    return Ok(());
                }
                store.write(&self.end.back(keys::CARRIER), "1")?;
                self.end.enter(store, XenbusState::Connected)
            }
            Err(error) => match self.end.failed(adopting, &error) {
                Failed::Reject => self.end.reject(error),
                Failed::Announce => self.announce(platform, store),
                Failed::Wait => Ok(()),
            },
        }
    }

    /// Reads the frontend's keys, once each, and maps and binds the resources in them.
    fn open<P: Platform>(
        &self,
        adopting: bool,
        platform: &P,
        store: &mut StoreClient,
        host: &mut impl PortHost,
    ) -> Result<Opened, ConnectError> {
        let end = &self.end;
        let key = |name: &str| end.front(name);
        let queues = store.read_u32_opt(&key(keys::MULTI_QUEUE_NUM_QUEUES))?.unwrap_or(1);
        let limit = self.queues_offered(store)?;
        if queues == 0 || queues > limit {
            return Err(ConnectError::Queues { wanted: queues, limit });
        }
        if !store.read_flag(&key(keys::REQUEST_RX_COPY))? {
            return Err(ConnectError::Device(VifRejection::NoRxCopy));
        }
        // The offers that the frontend has read remain valid, regardless of this process's configuration.
        let (own, offered) = match self.announced {
            true => (self.offloads, self.followed.policy.multicast_control),
            false => (OffloadKeys::read(store, end.back_path())?, Followed::read(store, end)?),
        };
        let peer = OffloadKeys::read(store, end.front_path())?;
        let features = VifFeatures { peer, own, mtu: self.options.mtu };
        let windows = match self.announced {
            true => self.options.mode == Mode::Window,
            false => store.read_flag(&end.back(keys::FEATURE_RINGFENCE_WINDOW))?,
        };
        let parts = (0..queues).map(|queue| {
            let directory = match queues {
                1 => end.front_path().to_owned(),
                _ => end.front(&keys::queue_directory(queue)),
            };
            let records = host.records(end.device(), queue);
            let windows = if windows {
                windows::open(&directory, end.device().frontend, platform, store)?
            } else {
                QueueWindows::default()
            };
            let parts = self.open_queue(&directory, records, platform, store)?;
            Ok(QueueParts { windows, ..parts })
        });
        let parts = parts.collect::<Result<Vec<_>, ConnectError>>()?;
        let rules = end.rules();
        let mode = if windows { Mode::Window } else { self.options.mode };
        let terms = ctrl_ring::ControlTerms { queues, mode, adopting };
        let control = ctrl_ring::open(end.device(), terms, platform, store, host, rules)?;
        // If staging was offered, pages may be staged, regardless of the present mode.
        let told = adopting && control.as_ref().is_some_and(|control| control.offers_staging());
        let mode = if told && !windows { Mode::Staging } else { mode };
        let port = if adopting {
            NetbackPort::adopt(parts, mode, features, rules)
                .map_err(|fault| ConnectError::Device(VifRejection::Adopt(fault)))?
        } else {
            NetbackPort::new(parts, mode, features, rules)
        };
        let port = port.with_policy(self.followed.policy(end.back_path(), adopting, offered));
        Ok((Box::new(port), control, Connection { features, queues, adopted: adopting }))
    }

    /// Returns the number of queues that was offered to the frontend.
    fn queues_offered(&self, store: &mut StoreClient) -> Result<u32, StoreError> {
        if self.announced {
            return Ok(self.max_queues);
        }
        let key = self.end.back(keys::MULTI_QUEUE_MAX_QUEUES);
        Ok(store.read_u32_opt(&key)?.unwrap_or(1).min(QUEUES_MAX))
    }

    /// Maps and binds the resources in the keys of `directory`.
    fn open_queue<P: Platform>(
        &self,
        directory: &str,
        records: Option<QueueRecords>,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<QueueParts<P::Grantee, P::Channel>, ConnectError> {
        let key = |name: &str| format!("{directory}/{name}");
        // A missing reference must not become 0, which is the console's page.
        let tx_ref = Gref(store.read_u32(&key(keys::TX_RING_REF))?);
        let rx_ref = Gref(store.read_u32(&key(keys::RX_RING_REF))?);
        let peer = self.end.device().frontend;
        let mut tx_pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let rx_pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let tx_ring = map_ring(&mut tx_pages, RingName::Named("tx"), &[tx_ref])?;
        let rx_ring = map_ring(&mut tx_pages, RingName::Named("rx"), &[rx_ref])?;
        let bind = |port| bind_channel(platform, peer, port);
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

/// Port of a device, its control ring if it has one, and the parameters.
type Opened = (Box<dyn Port>, Option<Box<dyn ControlRing>>, Connection);
