//! A driver domain served in rounds by one thread, and the guest with manners.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{Fault, Port, Transmitted};
use ringfence_net::rules::RuleCounters;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, Life, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};

/// Holds one side's port.
#[derive(Default)]
pub struct Holder {
    /// The port, while it is connected.
    pub port: Option<Box<dyn Port>>,
    /// Counters of the port that is or was here last.
    pub counters: Option<Arc<PortCounters>>,
    /// Ports that were attached so far.
    pub attached: usize,
}

impl PortHost for Holder {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.counters = Some(Arc::clone(port.counters()));
        self.port = Some(port);
        self.attached += 1;
    }
    fn detach(&mut self, _: &DeviceId) {
        self.port = None;
    }
    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.port.as_mut().map(|port| port.execute(queue, command))
    }
}

/// A frame that a guest sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arrived {
    /// Its octets.
    pub bytes: Vec<u8>,
    /// What is known about its checksum.
    pub meta: OffloadMeta,
}

/// One vif in the driver domain.
pub struct Seat {
    /// Its backend.
    pub backend: VifBackend,
    /// Its port.
    pub host: Holder,
    /// What its guest sent, until the test takes it.
    pub arrived: Vec<Arrived>,
    /// Why its port ended, if it did.
    pub fault: Option<Fault>,
}

/// A hub, and a driver domain (domain 0) with its vifs.
pub struct Stage {
    /// The hub.
    pub hub: HubHandle,
    /// Domain 0.
    pub platform: LocalPlatform,
    /// Its store.
    pub store: StoreClient,
    /// The vifs.
    pub seats: Vec<Seat>,
    mode: Mode,
    batch: Batch,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

/// Fills a batch with frames in one piece.
pub fn fill(batch: &mut Batch, frames: &[Vec<u8>]) -> Vec<u32> {
    batch.clear();
    for frame in frames {
        let at = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(at..at + frame.len()).unwrap().copy_from_slice(frame);
        batch.push_contiguous(at, frame.len(), OffloadMeta::PLAIN).unwrap();
    }
    (0..u32::try_from(frames.len()).unwrap()).collect()
}

/// Takes what a port has, copied out.
///
/// # Errors
///
/// The port's.
pub fn take(port: &mut dyn Port, batch: &mut Batch) -> Result<Vec<Arrived>, Fault> {
    batch.clear();
    port.receive(batch, 64)?;
    let arrived = batch.iter().map(|frame| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        Arrived { bytes, meta: frame.meta() }
    });
    let arrived = arrived.collect();
    batch.clear();
    port.complete()?;
    Ok(arrived)
}

impl Stage {
    /// A stage whose backends reach pages by `mode`.
    pub fn new(mode: Mode) -> Stage {
        Stage::with_limits(mode, HubLimits::default())
    }

    /// As [`Stage::new`], with other limits at the hub.
    pub fn with_limits(mode: Mode, limits: HubLimits) -> Stage {
        let (thread, hub) = Hub::new(limits).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let store = platform.store().unwrap();
        Stage { hub, platform, store, seats: Vec::new(), mode, batch: Batch::default() }
    }

    /// The mode of the backends.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Makes a vif for a domain, as a toolstack does, and its backend; its seat's number.
    pub fn add_vif(&mut self, frontend: DomId) -> usize {
        let device = DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 };
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut self.store, &device, config).unwrap();
        let options = BackendOptions { mode: self.mode, mtu: 1500 };
        let backend = VifBackend::new(device, options);
        let host = Holder::default();
        self.seats.push(Seat { backend, host, arrived: Vec::new(), fault: None });
        self.seats.len() - 1
    }

    /// Takes a vif away, as a toolstack does. Other seats keep their numbers if it is the last.
    pub fn remove_vif(&mut self, seat: usize) {
        let device = *self.seats[seat].backend.device();
        toolstack::remove(&mut self.store, &device).unwrap();
        assert_eq!(self.look(seat), Life::Over);
        self.seats.remove(seat);
    }

    /// The backend of a seat looks at the store.
    pub fn look(&mut self, seat: usize) -> Life {
        let Seat { backend, host, .. } = &mut self.seats[seat];
        backend.look(&self.platform, &mut self.store, host).unwrap()
    }

    /// What the guest of a seat did wrong.
    pub fn rules(&self, seat: usize) -> &Arc<RuleCounters> {
        self.seats[seat].backend.rules()
    }

    /// The backend's state in the store.
    pub fn state(&mut self, seat: usize) -> XenbusState {
        let path = format!("{}/state", self.seats[seat].backend.device().backend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }

    /// The backend's `error` key.
    pub fn error(&mut self, seat: usize) -> String {
        let path = format!("{}/error", self.seats[seat].backend.device().backend_path());
        self.store.read_text_opt(&path).unwrap().unwrap_or_default()
    }

    /// One round, as the data plane goes it: each port is asked once, what ends ends alone.
    pub fn round(&mut self) {
        for seat in 0..self.seats.len() {
            let Seat { host, arrived, .. } = &mut self.seats[seat];
            let Some(port) = &mut host.port else { continue };
            match take(&mut **port, &mut self.batch) {
                Ok(frames) => arrived.extend(frames),
                Err(fault) => self.ended(seat, fault),
            }
        }
    }

    /// The port of a seat ended itself.
    fn ended(&mut self, seat: usize, fault: Fault) {
        let entry = &mut self.seats[seat];
        entry.host.port = None;
        entry.backend.condemn(fault.to_string());
        entry.fault = Some(fault);
        self.look(seat);
    }

    /// Sends frames to the guest of a seat.
    pub fn send(&mut self, seat: usize, frames: &[Vec<u8>]) -> Option<Transmitted> {
        let all = fill(&mut self.batch, frames);
        let port = self.seats[seat].host.port.as_mut()?;
        let done = port.transmit(&self.batch, &all).and_then(|done| port.flush().map(|()| done));
        self.batch.clear();
        match done {
            Ok(done) => Some(done),
            Err(fault) => {
                self.ended(seat, fault);
                None
            }
        }
    }

    /// What the guest of a seat sent since this was asked last.
    pub fn arrived(&mut self, seat: usize) -> Vec<Arrived> {
        core::mem::take(&mut self.seats[seat].arrived)
    }
}

/// A guest with manners on the same stage.
pub struct Neighbour {
    /// Its platform.
    pub platform: LocalPlatform,
    store: StoreClient,
    front: VifFrontend<LocalPlatform>,
    host: Holder,
    seat: usize,
    seed: u32,
    batch: Batch,
}

impl Neighbour {
    /// A neighbour, connected.
    pub fn join(stage: &mut Stage) -> Neighbour {
        let (_, socket) = stage.hub.admit(None, false).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let seat = stage.add_vif(platform.domid());
        let device = *stage.seats[seat].backend.device();
        let front = VifFrontend::new(&platform, device, 1500).unwrap();
        let store = platform.store().unwrap();
        let batch = Batch::with_capacity(64, 1 << 20);
        let host = Holder::default();
        let mut neighbour = Neighbour { platform, store, front, host, seat, seed: 0, batch };
        neighbour.connect(stage);
        neighbour
    }

    /// Looks until both sides are connected.
    pub fn connect(&mut self, stage: &mut Stage) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.front.is_up() {
            assert!(Instant::now() < deadline, "the neighbour does not connect");
            stage.look(self.seat);
            self.front.look(&self.platform, &mut self.store, &mut self.host).unwrap();
        }
    }

    /// Its port.
    ///
    /// # Panics
    ///
    /// When it has none.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut **self.host.port.as_mut().unwrap()
    }

    /// Its seat on the stage.
    pub fn seat(&self) -> usize {
        self.seat
    }

    /// Sends one frame.
    pub fn send(&mut self, frame: &[u8]) -> Transmitted {
        let all = fill(&mut self.batch, &[frame.to_vec()]);
        let port = self.host.port.as_mut().unwrap();
        let sent = port.transmit(&self.batch, &all).unwrap();
        port.flush().unwrap();
        sent
    }

    /// Takes what came.
    pub fn take(&mut self) -> Vec<Arrived> {
        let port = self.host.port.as_mut().unwrap();
        take(&mut **port, &mut self.batch).unwrap()
    }

    /// Leaves and comes back.
    pub fn reconnect(&mut self, stage: &mut Stage) {
        self.front.close(&mut self.store, &mut self.host).unwrap();
        stage.look(self.seat);
        let device = stage.seats[self.seat].backend.device();
        let state = format!("{}/state", device.frontend_path());
        self.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
        self.connect(stage);
    }

    /// Exchanges frames both ways, through the same rounds that serve everybody else, and compares
    /// every octet.
    ///
    /// # Panics
    ///
    /// When a frame is lost, late or damaged, or when this guest is charged with anything.
    pub fn exchange(&mut self, stage: &mut Stage) {
        self.seed += 16;
        let frames: Vec<_> = [60, 1514, 5000, 9000]
            .into_iter()
            .zip(self.seed..)
            .map(|(len, seed)| ringfence_frame::testing::frame(seed, len))
            .collect();
        let all = fill(&mut self.batch, &frames);
        let port = self.host.port.as_mut().unwrap();
        let sent = port.transmit(&self.batch, &all).unwrap();
        port.flush().unwrap();
        assert_eq!((sent.sent, sent.dropped), (4, 0), "the neighbour has no room");
        stage.round();
        let arrived: Vec<_> = stage.arrived(self.seat).into_iter().map(|a| a.bytes).collect();
        assert!(arrived == frames, "the neighbour's frames did not arrive as they were");
        let sent = stage.send(self.seat, &frames).unwrap();
        assert_eq!((sent.sent, sent.dropped), (4, 0), "frames to the neighbour were dropped");
        let back = take(&mut **port, &mut self.batch).unwrap();
        let back: Vec<_> = back.into_iter().map(|a| a.bytes).collect();
        assert!(back == frames, "frames to the neighbour did not arrive as they were");
        let rules = stage.rules(self.seat).all();
        assert!(rules.is_empty(), "the neighbour is charged with {rules:?}");
    }
}
