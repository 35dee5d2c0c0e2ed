//! Driver domain served in rounds by one thread, and the correct guest next to an adversary.
//!
//! A test calls [`Stage::look`] in place of the event loop and [`Stage::round`] in place of a worker.
//! Vifs are numbered in the order of [`Stage::add_vif`].

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

/// Port host that keeps the port of one device.
#[derive(Default)]
pub struct Holder {
    /// Port, while it is connected.
    pub port: Option<Box<dyn Port>>,
    /// Counters of the current or last port.
    pub counters: Option<Arc<PortCounters>>,
    /// Number of ports attached so far.
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

/// Frame that a guest sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arrived {
    /// Content of the frame.
    pub bytes: Vec<u8>,
    /// Offload metadata, such as the state of the checksum.
    pub meta: OffloadMeta,
}

/// Vif of the driver domain.
pub struct VifEntry {
    pub backend: VifBackend,
    /// Host of the backend's port.
    pub host: Holder,
    /// Frames that the guest sent and the test has not taken.
    pub arrived: Vec<Arrived>,
    /// Fault that ended the port.
    pub fault: Option<Fault>,
}

/// Driver domain (domain 0) with its vifs, and its hub.
pub struct Stage {
    pub hub: HubHandle,
    pub platform: LocalPlatform,
    /// Store connection of domain 0.
    pub store: StoreClient,
    /// Vifs of the driver domain, by number.
    pub vifs: Vec<VifEntry>,
    mode: Mode,
    batch: Batch,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

/// Fills a batch with contiguous frames. Returns their indices.
pub fn fill(batch: &mut Batch, frames: &[Vec<u8>]) -> Vec<u32> {
    batch.clear();
    for frame in frames {
        let at = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(at..at + frame.len()).unwrap().copy_from_slice(frame);
        batch.push_contiguous(at, frame.len(), OffloadMeta::PLAIN).unwrap();
    }
    (0..u32::try_from(frames.len()).unwrap()).collect()
}

/// Receives up to 64 frames from a port and copies them out.
///
/// # Errors
///
/// Returns the port's fault.
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
    /// Creates a stage whose backends access pages in `mode`.
    pub fn new(mode: Mode) -> Stage {
        Stage::with_limits(mode, HubLimits::default())
    }

    /// Creates a stage as [`Stage::new`] does, with other limits of the hub.
    pub fn with_limits(mode: Mode, limits: HubLimits) -> Stage {
        let (thread, hub) = Hub::new(limits).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let store = platform.store().unwrap();
        Stage { hub, platform, store, vifs: Vec::new(), mode, batch: Batch::default() }
    }

    /// Returns the access mode of the backends.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Creates a vif for a domain, as a toolstack does, and its backend. Returns the number of the vif.
    pub fn add_vif(&mut self, frontend: DomId) -> usize {
        let device = DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 };
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut self.store, &device, config).unwrap();
        let options = BackendOptions { mode: self.mode, mtu: 1500 };
        let backend = VifBackend::new(device, options);
        let host = Holder::default();
        self.vifs.push(VifEntry { backend, host, arrived: Vec::new(), fault: None });
        self.vifs.len() - 1
    }

    /// Removes a vif, as a toolstack does. Later vifs move down by one number.
    pub fn remove_vif(&mut self, vif: usize) {
        let device = *self.vifs[vif].backend.device();
        toolstack::remove(&mut self.store, &device).unwrap();
        assert_eq!(self.look(vif), Life::Over);
        self.vifs.remove(vif);
    }

    /// Lets the backend of a vif read the store and act once.
    pub fn look(&mut self, vif: usize) -> Life {
        let VifEntry { backend, host, .. } = &mut self.vifs[vif];
        backend.look(&self.platform, &mut self.store, host).unwrap()
    }

    /// Returns the rule violations of a vif's guest.
    pub fn rules(&self, vif: usize) -> &Arc<RuleCounters> {
        self.vifs[vif].backend.rules()
    }

    /// Returns the backend's state in the store.
    pub fn state(&mut self, vif: usize) -> XenbusState {
        let path = format!("{}/state", self.vifs[vif].backend.device().backend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }

    /// Returns the backend's `error` key.
    pub fn error(&mut self, vif: usize) -> String {
        let path = format!("{}/error", self.vifs[vif].backend.device().backend_path());
        self.store.read_text_opt(&path).unwrap().unwrap_or_default()
    }

    /// Runs one round as a worker does: receives from each port once. A fault ends only its own port.
    pub fn round(&mut self) {
        for vif in 0..self.vifs.len() {
            let VifEntry { host, arrived, .. } = &mut self.vifs[vif];
            let Some(port) = &mut host.port else { continue };
            match take(&mut **port, &mut self.batch) {
                Ok(frames) => arrived.extend(frames),
                Err(fault) => self.ended(vif, fault),
            }
        }
    }

    /// Closes a vif whose port has ended with a fault.
    fn ended(&mut self, vif: usize, fault: Fault) {
        let entry = &mut self.vifs[vif];
        entry.host.port = None;
        entry.backend.close_with_penalty(fault.to_string());
        entry.fault = Some(fault);
        self.look(vif);
    }

    /// Transmits frames to the guest of a vif. Returns `None` without a port, or if the port ended.
    pub fn send(&mut self, vif: usize, frames: &[Vec<u8>]) -> Option<Transmitted> {
        let all = fill(&mut self.batch, frames);
        let port = self.vifs[vif].host.port.as_mut()?;
        let done = port.transmit(&self.batch, &all).and_then(|done| port.flush().map(|()| done));
        self.batch.clear();
        match done {
            Ok(done) => Some(done),
            Err(fault) => {
                self.ended(vif, fault);
                None
            }
        }
    }

    /// Takes the frames that the guest of a vif has sent since the last call.
    pub fn arrived(&mut self, vif: usize) -> Vec<Arrived> {
        core::mem::take(&mut self.vifs[vif].arrived)
    }
}

/// Correct guest on the same stage.
pub struct Neighbour {
    pub platform: LocalPlatform,
    store: StoreClient,
    front: VifFrontend<LocalPlatform>,
    host: Holder,
    vif: usize,
    seed: u32,
    batch: Batch,
}

impl Neighbour {
    /// Creates a neighbour and connects it.
    pub fn join(stage: &mut Stage) -> Neighbour {
        let (_, socket) = stage.hub.admit(None, false).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let vif = stage.add_vif(platform.domid());
        let device = *stage.vifs[vif].backend.device();
        let front = VifFrontend::new(&platform, device, 1500).unwrap();
        let store = platform.store().unwrap();
        let batch = Batch::with_capacity(64, 1 << 20);
        let host = Holder::default();
        let mut neighbour = Neighbour { platform, store, front, host, vif, seed: 0, batch };
        neighbour.connect(stage);
        neighbour
    }

    /// Lets both ends act until they are connected.
    pub fn connect(&mut self, stage: &mut Stage) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.front.is_up() {
            assert!(Instant::now() < deadline, "the neighbour does not connect");
            stage.look(self.vif);
            self.front.look(&self.platform, &mut self.store, &mut self.host).unwrap();
        }
    }

    /// Returns the guest's port.
    ///
    /// # Panics
    ///
    /// Panics without a port.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut **self.host.port.as_mut().unwrap()
    }

    /// Returns the number of the guest's vif.
    pub fn vif(&self) -> usize {
        self.vif
    }

    /// Transmits one frame from the guest.
    pub fn send(&mut self, frame: &[u8]) -> Transmitted {
        let all = fill(&mut self.batch, &[frame.to_vec()]);
        let port = self.host.port.as_mut().unwrap();
        let sent = port.transmit(&self.batch, &all).unwrap();
        port.flush().unwrap();
        sent
    }

    /// Takes the frames that the guest received.
    pub fn take(&mut self) -> Vec<Arrived> {
        let port = self.host.port.as_mut().unwrap();
        take(&mut **port, &mut self.batch).unwrap()
    }

    /// Disconnects and connects again.
    pub fn reconnect(&mut self, stage: &mut Stage) {
        self.front.close(&mut self.store, &mut self.host).unwrap();
        stage.look(self.vif);
        let device = stage.vifs[self.vif].backend.device();
        let state = format!("{}/state", device.frontend_path());
        self.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
        self.connect(stage);
    }

    /// Exchanges frames in both directions, in the same rounds as all other guests, and compares every
    /// byte.
    ///
    /// # Panics
    ///
    /// Panics if a frame is lost, late or damaged, or if this guest is charged with a rule violation.
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
        let arrived: Vec<_> = stage.arrived(self.vif).into_iter().map(|a| a.bytes).collect();
        assert!(arrived == frames, "the neighbour's frames did not arrive as they were");
        let sent = stage.send(self.vif, &frames).unwrap();
        assert_eq!((sent.sent, sent.dropped), (4, 0), "frames to the neighbour were dropped");
        let back = take(&mut **port, &mut self.batch).unwrap();
        let back: Vec<_> = back.into_iter().map(|a| a.bytes).collect();
        assert!(back == frames, "frames to the neighbour did not arrive as they were");
        let rules = stage.rules(self.vif).all();
        assert!(rules.is_empty(), "the neighbour is charged with {rules:?}");
    }
}
