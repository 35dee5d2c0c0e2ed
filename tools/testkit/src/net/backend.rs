//! Adversary driver domain, and the correct frontend that it serves.

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

/// Resources of the backend for a connected device.
pub struct Attached {
    /// Frontend's arena, as the grantee sees it.
    pub arena: RawArena,
    /// References of the tx and rx rings.
    pub ring_refs: [u32; 2],
    /// Ring of packets from the frontend.
    pub tx: RawRing,
    /// Ring of packets to the frontend.
    pub rx: RawRing,
    /// Event channels of tx and rx.
    pub channels: [RawChannel; 2],
}

/// Backend of which everything can be set word by word.
pub struct HostileBackend {
    hub: HubHandle,
    /// Connection to the hub, as domain 0.
    pub domain: RawDomain,
    /// Privileged store connection.
    pub store: StoreClient,
    pub device: DeviceId,
    /// Platform of the frontend's domain.
    pub platform: LocalPlatform,
    front_store: StoreClient,
    /// Frontend under test.
    pub front: VifFrontend<LocalPlatform>,
    /// Host of the frontend's port.
    pub host: Holder,
    /// Resources of the backend after [`HostileBackend::attach`].
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
    /// Creates a hub, a frontend that grants from an arena of that shape, and an idle backend.
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

    /// Creates a backend with a connected frontend.
    pub fn connected() -> HostileBackend {
        let mut this = HostileBackend::default();
        this.connect();
        this
    }

    /// Completes the handshake as a correct backend does.
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

    /// Writes a key of the backend.
    pub fn write(&mut self, key: &str, value: impl AsRef<[u8]>) {
        self.store.write(&format!("{}/{key}", self.device.backend_path()), value).unwrap();
    }

    /// Writes the backend's state.
    pub fn enter(&mut self, state: XenbusState) {
        self.write("state", state.to_string());
    }

    /// Offers the features of a correct backend.
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

    /// Lets the frontend read the store and act once.
    ///
    /// # Errors
    ///
    /// Returns the frontend's error.
    pub fn look(&mut self) -> Result<(), FrontendError> {
        self.front.look(&self.platform, &mut self.front_store, &mut self.host)
    }

    /// Returns the frontend's state in the store.
    pub fn front_state(&mut self) -> XenbusState {
        let path = format!("{}/state", self.device.frontend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }

    /// Attaches to the rings and channels that the frontend published, and enters Connected.
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

    /// Returns the resources of the attached device.
    ///
    /// # Panics
    ///
    /// Panics if the backend is not attached.
    pub fn rings(&mut self) -> &mut Attached {
        self.attached.as_mut().unwrap()
    }

    /// Returns the frontend's port.
    ///
    /// # Panics
    ///
    /// Panics without a port.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut **self.host.port.as_mut().unwrap()
    }

    /// Transmits frames from the guest.
    ///
    /// # Errors
    ///
    /// Returns the port's fault.
    pub fn transmit(&mut self, frames: &[Vec<u8>]) -> Result<Transmitted, Fault> {
        let all = fill(&mut self.batch, frames);
        let port = self.host.port.as_mut().unwrap();
        let done = port.transmit(&self.batch, &all)?;
        port.flush()?;
        Ok(done)
    }

    /// Receives frames in the guest and posts its buffers again.
    ///
    /// # Errors
    ///
    /// Returns the port's fault.
    pub fn receive(&mut self) -> Result<Vec<Arrived>, Fault> {
        let port = self.host.port.as_mut().unwrap();
        take(&mut **port, &mut self.batch)
    }
}

impl Attached {
    /// Takes the tx requests that the frontend has posted since the last call.
    pub fn requests(&mut self) -> Vec<TxRequest> {
        self.tx.take_requests().into_iter().map(TxRequest::from_bytes).collect()
    }

    /// Takes the rx buffers that the frontend has posted since the last call.
    pub fn buffers(&mut self) -> Vec<RxRequest> {
        self.rx.take_requests().into_iter().map(RxRequest::from_bytes).collect()
    }

    /// Returns the data of a tx request.
    pub fn read(&self, gref: Gref, offset: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let page = self.arena.read_only(self.arena.entry(gref.0).frame()).unwrap();
        page.copy_to(offset.into(), &mut bytes).unwrap();
        bytes
    }

    /// Writes data into a posted rx buffer.
    pub fn fill(&self, buffer: RxRequest, offset: usize, bytes: &[u8]) {
        let frame = self.arena.entry(buffer.gref.0).frame();
        self.arena.writable(frame).unwrap().copy_from(offset, bytes).unwrap();
    }

    /// Writes tx responses and publishes them.
    pub fn answer(&mut self, responses: &[TxResponse]) {
        for response in responses {
            self.tx.put(&response.to_bytes());
        }
        self.tx.set_rsp_prod(self.tx.produced);
    }

    /// Writes rx responses and publishes them.
    pub fn deliver(&mut self, responses: &[RxResponse]) {
        for response in responses {
            self.rx.put(&response.to_bytes());
        }
        self.rx.set_rsp_prod(self.rx.produced);
    }
}
