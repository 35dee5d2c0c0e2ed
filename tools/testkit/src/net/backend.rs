//! A driver domain without manners, and the honest frontend that it serves.

use std::time::{Duration, Instant};

use ringfence_frame::batch::Batch;
use ringfence_frame::port::{Fault, Port, Transmitted};
use ringfence_net::vif::frontend::{FrontendError, VifFrontend};
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::raw::{RawArena, RawChannel, RawDomain};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Gref, Platform};
use ringfence_ring::{NETIF_RX, NETIF_TX};
use ringfence_wire::netif::{RxRequest, RxResponse, TxRequest, TxResponse, keys};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::ring::RawRing;
use super::stage::{Arrived, Holder, fill, take};

/// What the backend has of a connected device.
pub struct Attached {
    /// The frontend's arena, as its grantee sees it.
    pub arena: RawArena,
    /// References of the rings.
    pub ring_refs: [u32; 2],
    /// The tx ring.
    pub tx: RawRing,
    /// The rx ring.
    pub rx: RawRing,
    /// Channels of both.
    pub channels: [RawChannel; 2],
}

/// A backend of which everything can be set by hand.
pub struct HostileBackend {
    hub: HubHandle,
    /// Its connection to the hub, as domain 0.
    pub domain: RawDomain,
    /// Its store, privileged.
    pub store: StoreClient,
    /// The device.
    pub device: DeviceId,
    /// The frontend's domain.
    pub platform: LocalPlatform,
    front_store: StoreClient,
    /// The frontend.
    pub front: VifFrontend<LocalPlatform>,
    /// Holds the frontend's port.
    pub host: Holder,
    /// What the backend has, once [`HostileBackend::attach`] was called.
    pub attached: Option<Attached>,
    batch: Batch,
}

impl Drop for HostileBackend {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Default for HostileBackend {
    fn default() -> Self {
        HostileBackend::new(ArenaShape::of(512, 512))
    }
}

impl HostileBackend {
    /// A hub, a frontend that lends an arena of that shape, and a backend that did nothing yet.
    pub fn new(shape: ArenaShape) -> HostileBackend {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let mut domain = RawDomain::join(socket).unwrap();
        let mut store = domain.store().unwrap();
        let (_, socket) = hub.admit(None, false).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap().with_arena(shape);
        let frontend = platform.domid();
        let device = DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 };
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut store, &device, config).unwrap();
        HostileBackend {
            hub,
            domain,
            store,
            device,
            front: VifFrontend::new(&platform, device, 1500).unwrap(),
            front_store: platform.store().unwrap(),
            platform,
            host: Holder::default(),
            attached: None,
            batch: Batch::with_capacity(64, 1 << 20),
        }
    }

    /// A backend to which the frontend is connected.
    pub fn connected() -> HostileBackend {
        let mut this = HostileBackend::default();
        this.connect();
        this
    }

    /// Goes through the whole handshake as an honest backend does.
    pub fn connect(&mut self) {
        self.announce();
        self.look().unwrap();
        self.attach();
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.front.is_up() {
            assert!(Instant::now() < deadline, "the frontend does not connect");
            self.look().unwrap();
        }
    }

    /// Writes one of the backend's keys.
    pub fn write(&mut self, key: &str, value: impl AsRef<[u8]>) {
        self.store.write(&format!("{}/{key}", self.device.backend_path()), value).unwrap();
    }

    /// Sets the backend's state.
    pub fn enter(&mut self, state: XenbusState) {
        self.write("state", state.to_string());
    }

    /// Offers the features that an honest backend offers.
    pub fn announce(&mut self) {
        for key in [
            keys::FEATURE_SG,
            keys::FEATURE_RX_COPY,
            keys::FEATURE_SPLIT_EVENT_CHANNELS,
            keys::FEATURE_IPV6_CSUM_OFFLOAD,
        ] {
            self.write(key, "1");
        }
        self.enter(XenbusState::InitWait);
    }

    /// The frontend looks at the store.
    ///
    /// # Errors
    ///
    /// The frontend's.
    pub fn look(&mut self) -> Result<(), FrontendError> {
        self.front.look(&self.platform, &mut self.front_store, &mut self.host)
    }

    /// The frontend's state in the store.
    pub fn front_state(&mut self) -> XenbusState {
        let path = format!("{}/state", self.device.frontend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }

    /// Takes what the frontend published, and says so.
    pub fn attach(&mut self) {
        let arena = self.domain.fetch(self.device.frontend).unwrap();
        let dir = self.device.frontend_path();
        let mut number = |key: &str| self.store.read_u32(&format!("{dir}/{key}")).unwrap();
        let ring_refs = [number(keys::TX_RING_REF), number(keys::RX_RING_REF)];
        let ports = [number(keys::EVENT_CHANNEL_TX), number(keys::EVENT_CHANNEL_RX)];
        let page = |gref: u32| arena.writable(arena.entry(gref).frame()).unwrap();
        let (tx, rx) = (page(ring_refs[0]), page(ring_refs[1]));
        let frontend = self.device.frontend;
        let channels = ports.map(|port| self.domain.bind(frontend, port).unwrap());
        let (tx, rx) = (RawRing::new(tx, NETIF_TX), RawRing::new(rx, NETIF_RX));
        self.attached = Some(Attached { arena, ring_refs, tx, rx, channels });
        self.enter(XenbusState::Connected);
    }

    /// What it has of the device.
    ///
    /// # Panics
    ///
    /// When it is not attached.
    pub fn rings(&mut self) -> &mut Attached {
        self.attached.as_mut().unwrap()
    }

    /// The frontend's port.
    ///
    /// # Panics
    ///
    /// When it has none.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut **self.host.port.as_mut().unwrap()
    }

    /// The guest sends frames.
    ///
    /// # Errors
    ///
    /// The port's.
    pub fn transmit(&mut self, frames: &[Vec<u8>]) -> Result<Transmitted, Fault> {
        let all = fill(&mut self.batch, frames);
        let port = self.host.port.as_mut().unwrap();
        let done = port.transmit(&self.batch, &all)?;
        port.flush()?;
        Ok(done)
    }

    /// The guest takes what came, and posts its buffers again.
    ///
    /// # Errors
    ///
    /// The port's.
    pub fn receive(&mut self) -> Result<Vec<Arrived>, Fault> {
        let port = self.host.port.as_mut().unwrap();
        take(&mut **port, &mut self.batch)
    }
}

impl Attached {
    /// The packets' slots that the frontend posted since this was asked last.
    pub fn requests(&mut self) -> Vec<TxRequest> {
        self.tx.take_requests().into_iter().map(TxRequest::from_bytes).collect()
    }

    /// The buffers that it posted.
    pub fn buffers(&mut self) -> Vec<RxRequest> {
        self.rx.take_requests().into_iter().map(RxRequest::from_bytes).collect()
    }

    /// The bytes behind a request.
    pub fn read(&self, gref: Gref, offset: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let page = self.arena.read_only(self.arena.entry(gref.0).frame()).unwrap();
        page.copy_to(offset.into(), &mut bytes).unwrap();
        bytes
    }

    /// Writes into a posted buffer.
    pub fn fill(&self, buffer: RxRequest, offset: usize, bytes: &[u8]) {
        let frame = self.arena.entry(buffer.gref.0).frame();
        self.arena.writable(frame).unwrap().copy_from(offset, bytes).unwrap();
    }

    /// Answers on tx.
    pub fn answer(&mut self, responses: &[TxResponse]) {
        for response in responses {
            self.tx.put(&response.to_bytes());
        }
        self.tx.set_rsp_prod(self.tx.produced);
    }

    /// Answers on rx.
    pub fn deliver(&mut self, responses: &[RxResponse]) {
        for response in responses {
            self.rx.put(&response.to_bytes());
        }
        self.rx.set_rsp_prod(self.rx.produced);
    }
}
