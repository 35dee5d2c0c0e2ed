//! Vif between two domains of one process: real handshake, rings, grants and channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]
#![allow(dead_code, reason = "each test program uses some of it")]
#![allow(missing_docs, unreachable_pub, reason = "of tests, for tests")]

use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::ctrl::frontend::StagingProgress;
use ringfence_net::features::OffloadKeys;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, Life, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

/// Host of the port of one side.
#[derive(Default)]
pub struct Host(pub Option<Box<dyn Port>>);

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }
    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }
    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.0.as_mut().map(|port| port.execute(queue, command))
    }
}

pub struct Pair {
    pub hub: HubHandle,
    pub back_platform: LocalPlatform,
    pub front_platform: LocalPlatform,
    pub back_store: StoreClient,
    pub front_store: StoreClient,
    pub back: VifBackend,
    pub front: VifFrontend<LocalPlatform>,
    pub back_host: Host,
    pub front_host: Host,
    pub device: DeviceId,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

/// Adds grant windows to a frontend, if the mode uses them.
fn windowed(
    front: VifFrontend<LocalPlatform>,
    platform: &LocalPlatform,
    mode: Mode,
) -> VifFrontend<LocalPlatform> {
    if mode == Mode::Window { front.with_windows(platform, WindowSizes::default()) } else { front }
}

impl Pair {
    pub fn new(mode: Mode) -> Pair {
        Pair::with(mode, OffloadKeys::ALL, OffloadKeys::ALL)
    }

    /// Makes a pair whose ends accept these offloads: the backend, the frontend.
    pub fn with(mode: Mode, back_takes: OffloadKeys, front_takes: OffloadKeys) -> Pair {
        Pair::wishing(mode, back_takes, front_takes, mode == Mode::Staging)
    }

    /// Makes a pair, as [`Pair::with`] does, whose frontend requests staging or not, independent of the backend.
    pub fn wishing(
        mode: Mode,
        back_takes: OffloadKeys,
        front_takes: OffloadKeys,
        staging: bool,
    ) -> Pair {
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let join = |wanted, privileged| {
            LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap()
        };
        let back_platform = join(Some(DomId(0)), true);
        // Memory for a few queues.
        let shape = ArenaShape::of(1200, 1200);
        let front_platform = join(None, false).with_arena(shape);
        let device = DeviceId {
            kind: DeviceKind::Vif,
            frontend: front_platform.domid(),
            backend: DomId(0),
            handle: 0,
        };
        let mut back_store = back_platform.store().unwrap();
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut back_store, &device, config).unwrap();
        let options = BackendOptions { mode, mtu: 1500 };
        let back = VifBackend::new(device, options).with_offloads(back_takes);
        let front = VifFrontend::new(&front_platform, device, 1500).unwrap();
        let front = front.with_offloads(front_takes).with_staging(if staging {
            TxStaging::Full
        } else {
            TxStaging::Off
        });
        let front = windowed(front, &front_platform, mode);
        let front_store = front_platform.store().unwrap();
        Pair {
            hub,
            back_platform,
            front_platform,
            back_store,
            front_store,
            back,
            front,
            back_host: Host::default(),
            front_host: Host::default(),
            device,
        }
    }

    /// Restarts the pair with these numbers of offered and requested queues.
    pub fn with_queues(&mut self, offered: u32, wanted: u32, mode: Mode) {
        let options = BackendOptions { mode, mtu: 1500 };
        self.back = VifBackend::new(self.device, options).with_queues(offered);
        let front = VifFrontend::new(&self.front_platform, self.device, 1500).unwrap();
        let front = front.with_queues(wanted).with_staging(if mode == Mode::Staging {
            TxStaging::Full
        } else {
            TxStaging::Off
        });
        self.front = windowed(front, &self.front_platform, mode);
    }

    /// Restarts the pair with another selection of staged pages.
    #[allow(dead_code, reason = "not every test file chooses")]
    pub fn with_staging(&mut self, staging: TxStaging) {
        let front = VifFrontend::new(&self.front_platform, self.device, 1500).unwrap();
        self.front = front.with_staging(staging);
    }

    pub fn look(&mut self) -> Life {
        let life =
            self.back.look(&self.back_platform, &mut self.back_store, &mut self.back_host).unwrap();
        self.back.serve_control(&mut self.back_host);
        self.front.look(&self.front_platform, &mut self.front_store, &mut self.front_host).unwrap();
        life
    }

    /// Stages the guest's pages, and waits for the end of it.
    pub fn stage(&mut self) -> StagingProgress {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            self.look();
            let progress = self.front.staging().unwrap();
            if progress.done {
                return progress;
            }
            assert!(Instant::now() < deadline, "{progress:?}");
        }
    }

    pub fn connect(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.front.is_up() {
            assert!(
                Instant::now() < deadline,
                "no connection; states {:?} {:?}",
                self.state(true),
                self.state(false)
            );
            self.look();
        }
    }

    pub fn state(&mut self, back: bool) -> XenbusState {
        let dir = if back { self.device.backend_path() } else { self.device.frontend_path() };
        XenbusState::parse(&self.back_store.read(&format!("{dir}/state")).unwrap()).unwrap()
    }

    pub fn ports(&mut self) -> (&mut dyn Port, &mut dyn Port) {
        (&mut **self.front_host.0.as_mut().unwrap(), &mut **self.back_host.0.as_mut().unwrap())
    }
}

pub fn frame(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    (0..len.max(14))
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[1]
        })
        .collect()
}

/// Sends frames one way, round by round; returns the frames that arrived.
pub fn carry(from: &mut dyn Port, to: &mut dyn Port, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut arrived = Vec::new();
    let (mut out, mut into) = (Batch::default(), Batch::default());
    for chunk in frames.chunks(8) {
        out.clear();
        for frame in chunk {
            let at = out.reserve(frame.len()).unwrap();
            out.scratch_mut(at..at + frame.len()).unwrap().copy_from_slice(frame);
            out.push_contiguous(at, frame.len(), OffloadMeta::PLAIN).unwrap();
        }
        let all: Vec<u32> = (0..u32::try_from(out.len()).unwrap()).collect();
        let done = from.transmit(&out, &all).unwrap();
        assert_eq!((done.sent, done.dropped), (chunk.len(), 0));
        from.flush().unwrap();
        loop {
            into.clear();
            let got = to.receive(&mut into, 64).unwrap();
            for frame in into.iter() {
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(&mut bytes);
                arrived.push(bytes);
            }
            into.clear();
            to.complete().unwrap();
            if got.work == 0 {
                break;
            }
        }
        // The sender processes its responses.
        let mut none = Batch::default();
        from.receive(&mut none, 0).unwrap();
    }
    arrived
}
