//! A vif between two domains of one process: the real handshake, rings, grants and channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::time::{Duration, Instant};

use proptest::prelude::*;
use ringfence_grants::Mode;
use ringfence_net::batch::Batch;
use ringfence_net::port::Port;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, Life, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::store::{StoreAccess, StoreClient};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};

/// Holds the port of one side.
#[derive(Default)]
struct Host(Option<Box<dyn Port>>);

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }
    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }
}

struct Pair {
    hub: HubHandle,
    back_platform: LocalPlatform,
    front_platform: LocalPlatform,
    back_store: StoreClient,
    front_store: StoreClient,
    back: VifBackend,
    front: VifFrontend<LocalPlatform>,
    back_host: Host,
    front_host: Host,
    device: DeviceId,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Pair {
    fn new(mode: Mode) -> Pair {
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let join = |wanted, privileged| {
            LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap()
        };
        let back_platform = join(Some(DomId(0)), true);
        let front_platform = join(None, false);
        let device = DeviceId {
            kind: DeviceKind::Vif,
            frontend: front_platform.domid(),
            backend: DomId(0),
            handle: 0,
        };
        let mut back_store = back_platform.store().unwrap();
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut back_store, &device, config).unwrap();
        let back = VifBackend::new(device, BackendOptions { mode, mtu: 1500 });
        let front = VifFrontend::new(&front_platform, device, 1500).unwrap();
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

    fn look(&mut self) -> Life {
        let life =
            self.back.look(&self.back_platform, &mut self.back_store, &mut self.back_host).unwrap();
        self.front.look(&self.front_platform, &mut self.front_store, &mut self.front_host).unwrap();
        life
    }

    fn connect(&mut self) {
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

    fn state(&mut self, back: bool) -> XenbusState {
        let dir = if back { self.device.backend_path() } else { self.device.frontend_path() };
        XenbusState::parse(&self.back_store.read(&format!("{dir}/state")).unwrap()).unwrap()
    }

    fn ports(&mut self) -> (&mut dyn Port, &mut dyn Port) {
        (&mut **self.front_host.0.as_mut().unwrap(), &mut **self.back_host.0.as_mut().unwrap())
    }
}

fn frame(seed: u32, len: usize) -> Vec<u8> {
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

/// Sends frames one way, round by round; gives back what arrived.
fn carry(from: &mut dyn Port, to: &mut dyn Port, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
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
        // The sender hears of its responses.
        let mut none = Batch::default();
        from.receive(&mut none, 0).unwrap();
    }
    arrived
}

#[test]
fn frames_of_every_size_arrive_whole_both_ways_in_each_mode() {
    let sizes = [14, 60, 64, 255, 256, 257, 1514, 4095, 4096, 4097, 8192, 20_000, 65_000, 65_535];
    let frames: Vec<_> = (1..).zip(sizes).map(|(seed, len)| frame(seed, len)).collect();
    for mode in Mode::ALL {
        let mut pair = Pair::new(mode);
        pair.connect();
        let (front, back) = pair.ports();
        assert_eq!(carry(front, back, &frames), frames, "{mode}, from the guest");
        assert_eq!(carry(back, front, &frames), frames, "{mode}, to the guest");
        let many: Vec<_> =
            (0..3000).map(|i| self::frame(i, 64 + (i as usize * 37) % 3000)).collect();
        assert!(carry(front, back, &many) == many, "{mode}: the rings wrap");
        assert!(carry(back, front, &many) == many, "{mode}: the rings wrap");
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty());
    }
}

#[test]
fn a_backend_knows_its_room_and_is_woken_when_there_is_more() {
    let mut pair = Pair::new(Mode::Copy);
    pair.connect();
    let (front, back) = pair.ports();
    let full = back.room().unwrap();
    assert_eq!(full, 256, "a buffer for each slot of the ring");
    let mut out = Batch::default();
    let one = frame(1, 100);
    let at = out.reserve(one.len()).unwrap();
    out.scratch_mut(at..at + one.len()).unwrap().copy_from_slice(&one);
    out.push_contiguous(at, one.len(), OffloadMeta::PLAIN).unwrap();
    for left in (0..full).rev() {
        assert_eq!(back.transmit(&out, &[0]).unwrap().sent, 1);
        assert_eq!(back.room().unwrap(), left);
    }
    back.flush().unwrap();
    // What came before does not count.
    back.clear_events().unwrap();
    assert!(!back.arm().unwrap(), "no buffer is posted");
    let readable = |port: &dyn Port| {
        let fds = port.wait_fds();
        let mut fds: Vec<_> = fds
            .iter()
            .map(|fd| rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN))
            .collect();
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() > 0
    };
    assert!(!readable(back));
    let mut into = Batch::default();
    assert_eq!(front.receive(&mut into, 3).unwrap().frames, 3);
    into.clear();
    front.complete().unwrap();
    assert!(readable(back), "told of new buffers");
    back.clear_events().unwrap();
    assert!(!readable(back));
    // The ring has as many slots as frames were taken.
    assert_eq!(back.room().unwrap(), 3);
}

#[test]
fn a_frontend_that_goes_and_comes_back_connects_again() {
    let mut pair = Pair::new(Mode::Copy);
    for _ in 0..5 {
        pair.connect();
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        assert!(pair.back_host.0.is_none(), "the backend let go");
        assert_eq!(pair.state(true), XenbusState::Closed);
        let state = format!("{}/state", pair.device.frontend_path());
        pair.front_store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    }
    pair.connect();
    let (front, back) = pair.ports();
    let frames = [frame(1, 100)];
    assert_eq!(carry(front, back, &frames), frames);
}

#[test]
fn a_device_that_its_toolstack_takes_away_is_forgotten() {
    let mut pair = Pair::new(Mode::Map);
    pair.connect();
    toolstack::remove(&mut pair.back_store, &pair.device).unwrap();
    let life =
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(life, Life::Over);
    assert!(pair.back_host.0.is_none());
}

#[test]
fn a_condemned_device_is_closed_and_says_why() {
    let mut pair = Pair::new(Mode::Copy);
    pair.connect();
    pair.back.condemn("a test".to_owned());
    pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(pair.state(true), XenbusState::Closing);
    let error =
        pair.back_store.read_text(&format!("{}/error", pair.device.backend_path())).unwrap();
    assert_eq!(error, "a test");
    pair.front.look(&pair.front_platform, &mut pair.front_store, &mut pair.front_host).unwrap();
    assert_eq!(pair.state(false), XenbusState::Closed);
    assert!(pair.front_host.0.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever the frontend writes as its state, in any order, the backend survives, holds no
    /// rings of a frontend that closed, and connects again to one that starts over.
    #[test]
    fn xsa_374_any_text_as_state_is_survived(states in proptest::collection::vec("[0-9]{1,2}|[a-z0-9 -]{0,12}", 1..12)) {
        let mut pair = Pair::new(Mode::Copy);
        pair.connect();
        let key = format!("{}/state", pair.device.frontend_path());
        for state in &states {
            pair.front_store.write(&key, state).unwrap();
            pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
            if matches!(state.as_str(), "5" | "6") {
                prop_assert!(pair.back_host.0.is_none());
            }
        }
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.look();
        pair.front_store.write(&key, "1").unwrap();
        pair.connect();
    }
}
