//! Takeover: a backend process that crashes, and another one that continues with its devices.
//!
//! The event channels behave as on Xen: after one end is closed, the other waits until it is bound again, and
//! receives no notice.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use ringfence_access::Mode;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_memory::LentSlice;
use ringfence_net::ctrl::frontend::StagingProgress;
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::features::OffloadKeys;
use ringfence_net::netback::QueueRecords;
use ringfence_net::netfront::{QUEUE_PAGES, WindowSizes};
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::controls::VifPolicy;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::{ArenaShape, LocalGrantee, LocalGranter, LocalPlatform};
use ringfence_platform::{
    Channel, ChannelError, Counters, DomId, EventPort, Platform, PlatformError, TranslationTable,
    WindowError, WindowHandle, WindowName, WindowShape, WindowView,
};
use ringfence_ring::RingPages;
use ringfence_sys::counters::CounterValues;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

/// Ends of each channel by number: the event of the allocator, and that of the binder.
type Exchange = Arc<Mutex<HashMap<u32, [OwnedFd; 2]>>>;

/// Local platform with channels that outlive their ends.
struct Steady {
    local: LocalPlatform,
    exchange: Exchange,
    /// Windows that this end has opened, and those of them that have ended.
    windows: Mutex<[Vec<WindowHandle>; 2]>,
}

impl Steady {
    /// Ends all opened windows, as Xen does when the process that registered them ends.
    fn end_windows(&self) {
        let mut windows = self.windows.lock().unwrap();
        let opened = core::mem::take(&mut windows[0]);
        windows[1].extend(opened);
    }

    /// Makes all windows anew, as a frontend does on Xen when it restarts.
    fn renew_windows(&self) {
        self.windows.lock().unwrap()[1].clear();
    }
}

struct SteadyChannel {
    port: EventPort,
    own: OwnedFd,
    other: OwnedFd,
}

impl AsFd for SteadyChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}

impl Channel for SteadyChannel {
    fn port(&self) -> EventPort {
        self.port
    }
    fn notify(&self) -> Result<(), ChannelError> {
        rustix::io::write(&self.other, &1u64.to_ne_bytes()).unwrap();
        Ok(())
    }
    fn clear(&self) -> Result<bool, ChannelError> {
        Ok(rustix::io::read(&self.own, &mut [0; 8]).is_ok())
    }
}

fn event() -> OwnedFd {
    use rustix::event::EventfdFlags as Flags;
    rustix::event::eventfd(0, Flags::CLOEXEC | Flags::NONBLOCK).unwrap()
}

impl Platform for Steady {
    type Granter = LocalGranter;
    type Grantee = LocalGrantee;
    type Channel = SteadyChannel;

    fn domid(&self) -> DomId {
        self.local.domid()
    }
    fn store(&self) -> Result<StoreClient, PlatformError> {
        self.local.store()
    }
    fn granter(&self, peer: DomId) -> Result<LocalGranter, PlatformError> {
        self.local.granter(peer)
    }
    fn grantee(&self, granter: DomId) -> Result<LocalGrantee, PlatformError> {
        self.local.grantee(granter)
    }
    fn alloc_unbound(&self, _: DomId) -> Result<SteadyChannel, PlatformError> {
        let ends = [event(), event()];
        let [own, other] = ends.each_ref().map(|end| end.try_clone().unwrap());
        let mut exchange = self.exchange.lock().unwrap();
        let port = u32::try_from(exchange.len()).unwrap() + 1;
        exchange.insert(port, ends);
        Ok(SteadyChannel { port: EventPort(port), own, other })
    }
    fn bind_interdomain(&self, _: DomId, port: EventPort) -> Result<SteadyChannel, PlatformError> {
        let exchange = self.exchange.lock().unwrap();
        let ends = exchange.get(&port.0).ok_or(PlatformError::Disconnected("test"))?;
        let [other, own] = ends.each_ref().map(|end| end.try_clone().unwrap());
        rustix::io::write(&own, &1u64.to_ne_bytes()).unwrap();
        Ok(SteadyChannel { port, own, other })
    }
    fn has_windows(&self) -> bool {
        true
    }
    fn window(
        &self,
        grantee: DomId,
        shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        self.local.window(grantee, shape)
    }
    fn open_window(
        &self,
        granter: DomId,
        name: impl Into<WindowName>,
        entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        let name = name.into();
        let mut windows = self.windows.lock().unwrap();
        if windows[1].contains(&name.handle) {
            return Err(WindowError::NoSuchWindow { granter, handle: name.handle });
        }
        windows[0].push(name.handle);
        self.local.open_window(granter, name, entries_max)
    }
    fn counters(&self) -> &Arc<Counters> {
        self.local.counters()
    }
}

/// Host with the port of one side, and the crash journals of the backend.
#[derive(Default)]
struct Host {
    port: Option<Box<dyn Port>>,
    /// Crash journals of the queues; the last one is that of the control ring.
    records: Option<(Vec<[LentSlice; 2]>, LentSlice)>,
}

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.port = Some(port);
    }
    fn detach(&mut self, _: &DeviceId) {
        self.port = None;
    }
    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.port.as_mut().map(|port| port.execute(queue, command))
    }
    fn records(&mut self, _: &DeviceId, queue: u32) -> Option<QueueRecords> {
        let ring = |page: &LentSlice| RingPages::new(page.clone(), 4096).unwrap();
        let (queues, _) = self.records.as_ref()?;
        let [tx, rx] = &queues[usize::try_from(queue).unwrap()];
        Some(QueueRecords { tx: ring(tx), rx: ring(rx) })
    }
    fn ctrl_record(&mut self, _: &DeviceId) -> Option<CtrlRecord> {
        let (_, control) = self.records.as_ref()?;
        Some(CtrlRecord::new(control.clone()).unwrap())
    }
}

struct Pair {
    hub: HubHandle,
    back_platform: Steady,
    front_platform: Steady,
    back_store: StoreClient,
    front_store: StoreClient,
    back: VifBackend,
    front: VifFrontend<Steady>,
    back_host: Host,
    front_host: Host,
    device: DeviceId,
    mode: Mode,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Pair {
    fn new(mode: Mode, takes: OffloadKeys, recorded: bool) -> Pair {
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let exchange = Exchange::default();
        let join = |wanted, privileged| Steady {
            local: LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap(),
            exchange: Arc::clone(&exchange),
            windows: Mutex::default(),
        };
        let (back_platform, mut front_platform) = (join(Some(DomId(0)), true), join(None, false));
        front_platform.local = front_platform.local.with_arena(ArenaShape::of(1200, 1200));
        let device = DeviceId {
            kind: DeviceKind::Vif,
            frontend: front_platform.domid(),
            backend: DomId(0),
            handle: 0,
        };
        let mut back_store = back_platform.store().unwrap();
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
        toolstack::create(&mut back_store, &device, config).unwrap();
        let back = VifBackend::new(device, BackendOptions { mode, mtu: 1500 }).with_offloads(takes);
        let front = VifFrontend::new(&front_platform, device, 1500).unwrap();
        let front = match mode {
            Mode::Window => front.with_windows(&front_platform, WindowSizes::default()),
            _ => front,
        };
        let front_store = front_platform.store().unwrap();
        let records = recorded.then(|| {
            let queues = (0..2).map(|_| [4096, 4096].map(LentSlice::anonymous));
            (queues.collect(), LentSlice::anonymous(CtrlRecord::BYTES))
        });
        let (back_host, front_host) = (Host { port: None, records }, Host::default());
        Pair {
            hub,
            back_platform,
            front_platform,
            back_store,
            front_store,
            back,
            front,
            back_host,
            front_host,
            device,
            mode,
        }
    }

    fn look(&mut self) {
        self.back.look(&self.back_platform, &mut self.back_store, &mut self.back_host).unwrap();
        self.front.look(&self.front_platform, &mut self.front_store, &mut self.front_host).unwrap();
    }

    fn connected(mode: Mode, takes: OffloadKeys, recorded: bool) -> Pair {
        let mut pair = Pair::new(mode, takes, recorded);
        for _ in 0..10 {
            pair.look();
        }
        assert!(pair.front.is_up());
        pair
    }

    /// Makes a pair with this number of queues, whose pages are staged.
    fn staging(queues: u32) -> Pair {
        let mut pair = Pair::new(Mode::Staging, OffloadKeys::ALL, true);
        let options = BackendOptions { mode: Mode::Staging, mtu: 1500 };
        pair.back = VifBackend::new(pair.device, options).with_queues(queues);
        let front = VifFrontend::new(&pair.front_platform, pair.device, 1500).unwrap();
        pair.front =
            front.with_queues(queues).with_staging(ringfence_net::staging::TxStaging::Full);
        for _ in 0..10 {
            pair.look();
        }
        assert_eq!(pair.front.queues(), usize::try_from(queues).unwrap());
        pair
    }

    /// Serves both ends of the control ring once.
    fn talk(&mut self) -> StagingProgress {
        self.front.look(&self.front_platform, &mut self.front_store, &mut self.front_host).unwrap();
        self.back.serve_control(&mut self.back_host);
        self.front.staging().unwrap()
    }

    /// Returns the numbers of grant copies and maps since `before`.
    fn uses(&self, before: &CounterValues) -> (u64, u64) {
        let spent = self.back_platform.counters().values().since(before);
        (spent.grant_maps, spent.grant_copies)
    }

    /// Returns the number of the frontend's grants that are mapped now.
    fn mapped(&self) -> u64 {
        let counts = self.back_platform.counters().values();
        counts.grant_maps - counts.grant_unmaps
    }

    /// Replaces the backend by another one without any notice to the frontend.
    fn succeed(&mut self) {
        self.back_host.port = None;
        let options = BackendOptions { mode: self.mode, mtu: 1500 };
        self.back = VifBackend::new(self.device, options);
        self.back.look(&self.back_platform, &mut self.back_store, &mut self.back_host).unwrap();
    }

    fn states(&mut self) -> [XenbusState; 2] {
        [self.device.backend_path(), self.device.frontend_path()].map(|dir| {
            XenbusState::parse(&self.back_store.read(&format!("{dir}/state")).unwrap()).unwrap()
        })
    }

    fn ports(&mut self) -> (&mut dyn Port, &mut dyn Port) {
        let (front, back) = (&mut self.front_host.port, &mut self.back_host.port);
        (&mut **front.as_mut().unwrap(), &mut **back.as_mut().unwrap())
    }
}

fn frame(seed: usize) -> Vec<u8> {
    (0..60 + seed * 97 % 9000).map(|i| (seed * 31 + i * 7 + i / 251).to_le_bytes()[0]).collect()
}

fn send(port: &mut dyn Port, seeds: impl Iterator<Item = usize>) -> usize {
    let mut batch = Batch::default();
    for seed in seeds {
        let bytes = frame(seed);
        let at = batch.reserve(bytes.len()).unwrap();
        batch.scratch_mut(at..at + bytes.len()).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, bytes.len(), OffloadMeta::PLAIN).unwrap();
    }
    let all: Vec<u32> = (0..u32::try_from(batch.len()).unwrap()).collect();
    let sent = port.transmit(&batch, &all).unwrap().sent;
    port.flush().unwrap();
    sent
}

fn take(port: &mut dyn Port, most: usize, complete: bool) -> Vec<Vec<u8>> {
    let mut batch = Batch::default();
    port.receive(&mut batch, most).unwrap();
    let copy = |frame: ringfence_frame::batch::FrameView<'_>| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        bytes
    };
    let taken = batch.iter().map(copy).collect();
    batch.clear();
    if complete {
        port.complete().unwrap();
    }
    taken
}

fn frames(seeds: impl Iterator<Item = usize>) -> Vec<Vec<u8>> {
    seeds.map(frame).collect()
}

#[test]
fn adopted_device_continues_without_state_change() {
    let cases = [
        (Mode::Copy, true, Mode::Copy),
        (Mode::Map, true, Mode::Map),
        (Mode::Copy, false, Mode::Copy),
        (Mode::Window, true, Mode::Window),
        // The announced keys hold.
        (Mode::Window, true, Mode::Copy),
    ];
    for (mode, recorded, then) in cases {
        let mut pair = Pair::connected(mode, OffloadKeys::ALL, recorded);
        assert_eq!(pair.front.has_windows(), mode == Mode::Window);
        pair.mode = then;
        for round in 0..200 {
            let base = round * 16;
            let (front, back) = pair.ports();
            assert_eq!(send(front, base..base + 5), 5);
            // Two frames are delivered and answered. A third one is delivered, and then the backend crashes.
            assert_eq!(take(back, 2, true), frames(base..base + 2));
            assert_eq!(take(back, 1, false), frames(base + 2..base + 3));
            assert_eq!(send(back, base + 5..base + 7), 2);
            pair.succeed();
            assert!(pair.back.connection().unwrap().adopted);
            assert_eq!(pair.states(), [XenbusState::Connected; 2]);
            let (front, back) = pair.ports();
            assert_eq!(take(back, 64, true), frames(base + 2..base + 5), "passed on again");
            assert_eq!(take(front, 64, true), frames(base + 5..base + 7), "as they were published");
            assert_eq!(send(back, base + 7..base + 9), 2);
            assert_eq!(take(front, 64, true), frames(base + 7..base + 9));
        }
        assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
        pair.look();
        assert!(pair.front.is_up());
    }
}

#[test]
fn windows_that_ended_with_their_backend_are_made_anew_without_penalty() {
    let mut pair = Pair::connected(Mode::Window, OffloadKeys::ALL, true);
    for round in 0..20 {
        let base = round * 16;
        let (front, back) = pair.ports();
        assert_eq!(send(front, base..base + 5), 5);
        assert_eq!(take(back, 64, true), frames(base..base + 5));
        pair.back_platform.end_windows();
        pair.succeed();
        assert_eq!(pair.states(), [XenbusState::InitWait, XenbusState::Connected]);
        // The frontend has not looked yet: its old keys are no reason for a penalty.
        for _ in 0..3 {
            pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        }
        assert!(pair.back.connection().is_none());
        pair.back_platform.renew_windows();
        for _ in 0..10 {
            pair.look();
        }
        assert!(pair.front.is_up());
        assert!(pair.front.has_windows());
        let rules = pair.back.rules().all();
        assert_eq!(rules.into_keys().collect::<Vec<_>>(), ["window_ended_with_backend"]);
        let (front, back) = pair.ports();
        assert_eq!(send(back, base + 5..base + 7), 2);
        assert_eq!(take(front, 64, true), frames(base + 5..base + 7));
    }
    assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
}

#[test]
fn missing_window_of_a_new_connection_closes_the_device() {
    let mut pair = Pair::connected(Mode::Window, OffloadKeys::ALL, true);
    let back = format!("{}/state", pair.device.backend_path());
    pair.back_platform.end_windows();
    // The backend has announced itself, and the frontend names a window that does not exist.
    pair.back_host.port = None;
    pair.back = VifBackend::new(pair.device, BackendOptions { mode: pair.mode, mtu: 1500 });
    pair.back_store.write(&back, XenbusState::InitWait.to_string()).unwrap();
    pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(pair.states()[0], XenbusState::Closing);
    assert!(pair.back.rules().all().contains_key("connect_no_such_window"));
}

#[test]
fn unpublished_responses_before_crash_lose_no_frame() {
    let mut pair = Pair::connected(Mode::Copy, OffloadKeys::ALL, true);
    for round in 0..100 {
        let base = round * 8;
        let (front, back) = pair.ports();
        assert_eq!(send(front, base..base + 3), 3);
        // Written to the guest but not flushed: the response stays unpublished.
        let mut batch = Batch::default();
        let at = batch.reserve(5000).unwrap();
        batch.push_contiguous(at, 5000, OffloadMeta::PLAIN).unwrap();
        assert_eq!(back.transmit(&batch, &[0]).unwrap().sent, 1);
        assert_eq!(take(back, 3, false).len(), 3);
        pair.succeed();
        let (front, back) = pair.ports();
        assert_eq!(take(back, 64, true), frames(base..base + 3));
        assert_eq!(take(front, 64, true), frames(0..0));
        assert_eq!(send(back, base + 3..base + 6), 3);
        assert_eq!(take(front, 64, true), frames(base + 3..base + 6));
    }
    assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
    assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
}

#[test]
fn adopting_backend_notifies_once_and_finds_waiting_requests() {
    let mut pair = Pair::connected(Mode::Copy, OffloadKeys::ALL, true);
    let (front, back) = pair.ports();
    assert!(!back.arm().unwrap() && !front.arm().unwrap());
    assert_eq!(send(front, 0..1), 1);
    // The event goes to a backend that crashes before it reads the ring.
    back.clear_events().unwrap();
    front.clear_events().unwrap();
    pair.succeed();
    let (front, back) = pair.ports();
    let readable = |port: &dyn Port| {
        let fds = port.wait_fds();
        let poll = |fd| rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN);
        let mut fds: Vec<_> = fds.iter().map(poll).collect();
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap()
    };
    assert_eq!(readable(front), 2, "both channels");
    assert_eq!(take(back, 64, true), frames(0..1));
}

#[test]
fn announced_keys_hold_for_adopting_backend() {
    let told = OffloadKeys { gso_tcp_v4: false, checksum_ipv6: false, ..OffloadKeys::ALL };
    let mut pair = Pair::connected(Mode::Copy, told, true);
    let before = *pair.back.connection().unwrap();
    assert_eq!(before.features.own, told);
    // The successor would announce every offload, if it announced.
    pair.succeed();
    let after = *pair.back.connection().unwrap();
    assert_eq!((before.adopted, after.adopted), (false, true));
    assert_eq!(after.features, before.features);
}

#[test]
fn xsa_39_device_with_moved_indices_is_closed_not_adopted() {
    for recorded in [true, false] {
        let mut pair = Pair::connected(Mode::Copy, OffloadKeys::ALL, recorded);
        // The frontend's first grant is its TX ring, which it can write.
        let path = format!("{}/tx-ring-ref", pair.device.frontend_path());
        let gref = pair.back_store.read_u32(&path).unwrap();
        let mut pages = pair.back_platform.grantee(pair.device.frontend).unwrap();
        let mut mapped = Vec::new();
        let access = ringfence_platform::Access::ReadWrite;
        ringfence_platform::Grantee::map(
            &mut pages,
            &[(ringfence_platform::Gref(gref), access)],
            &mut mapped,
        );
        let ring = mapped.pop().unwrap().unwrap();
        ring.store_u32(8, 0x8000_0000, std::sync::atomic::Ordering::Relaxed).unwrap();
        pair.succeed();
        assert_eq!(pair.states()[0], XenbusState::Closing, "recorded: {recorded}");
        assert!(pair.back_host.port.is_none());
        assert_eq!(pair.back.rules().get("adopted_ring_index"), 1);
        assert_eq!(pair.back.rules().get("connect_not_adopted"), 1);
    }
}

#[test]
fn backend_without_hotplug_status_does_not_connect() {
    let mut pair = Pair::new(Mode::Copy, OffloadKeys::ALL, false);
    let options = BackendOptions { mode: Mode::Copy, mtu: 1500 };
    pair.back = VifBackend::new(pair.device, options).waiting_for_hotplug(true);
    for _ in 0..5 {
        pair.look();
    }
    assert_eq!(pair.states(), [XenbusState::InitWait, XenbusState::Connected]);
    let status = format!("{}/hotplug-status", pair.device.backend_path());
    pair.back_store.write(&status, "error").unwrap();
    pair.look();
    assert_eq!(pair.states()[0], XenbusState::InitWait);
    pair.back_store.write(&status, "connected").unwrap();
    pair.look();
    assert_eq!(pair.states()[0], XenbusState::Connected);
}

/// Checks that a successor, which does not know the groups that a guest added, filters none of them.
#[test]
fn adopted_guest_with_multicast_filter_receives_all_groups() {
    let mut pair = Pair::new(Mode::Copy, OffloadKeys::ALL, true);
    let policy = VifPolicy { multicast_control: true, ..VifPolicy::default() };
    let options = BackendOptions { mode: Mode::Copy, mtu: 1500 };
    pair.back = VifBackend::new(pair.device, options).with_policy(policy);
    let asks = format!("{}/request-multicast-control", pair.device.frontend_path());
    pair.front_store.write(&asks, "1").unwrap();
    for _ in 0..10 {
        pair.look();
    }
    // Frame 33 begins with the bytes of a group address.
    assert_eq!(frame(33)[0] & 1, 1);
    let (front, back) = pair.ports();
    assert_eq!((send(back, 33..34), take(front, 64, true).len()), (0, 0));
    pair.succeed();
    let (front, back) = pair.ports();
    assert_eq!((send(back, 33..34), take(front, 64, true).len()), (1, 1));
}

#[test]
fn staged_pages_are_restaged_after_crash_at_any_step() {
    for queues in [1, 2] {
        let mut pair = Pair::staging(queues);
        let mut rounds = 0;
        // A backend crashes after each round of the control ring, also in the middle of staging.
        while !pair.talk().done {
            rounds += 1;
            assert!(rounds < 100);
            pair.succeed();
            assert!(pair.back.connection().unwrap().adopted);
        }
        let all = usize::try_from(queues).unwrap() * QUEUE_PAGES;
        let StagingProgress { staged, refused, .. } = pair.front.staging().unwrap();
        assert_eq!((staged, refused), (all, 0), "{queues} queues");
        assert_eq!(pair.back.staged() as usize, all);
        // The rings of the queues and the control ring are mapped too.
        let mapped = all as u64 + 2 * u64::from(queues) + 1;
        for round in 0..20 {
            pair.succeed();
            assert_eq!(pair.back.staged() as usize, all);
            assert_eq!(pair.mapped(), mapped);
            let before = pair.back_platform.counters().values();
            let (front, back) = pair.ports();
            let (here, there) = (round * 8..round * 8 + 4, round * 8 + 4..round * 8 + 8);
            assert_eq!(send(front, here.clone()), 4);
            assert_eq!(sorted(take(back, 64, true)), sorted(frames(here)));
            assert_eq!(send(back, there.clone()), 4);
            assert_eq!(sorted(take(front, 64, true)), sorted(frames(there)));
            assert_eq!(pair.uses(&before), (0, 0), "round {round}");
        }
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        assert_eq!(pair.mapped(), 0);
    }
}

/// Sorts frames: those of one round may take any queue.
fn sorted(mut frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    frames.sort();
    frames
}

#[test]
fn staging_offer_holds_for_adopting_backend_without_staging() {
    let mut pair = Pair::staging(1);
    while !pair.talk().done {}
    pair.mode = Mode::Copy;
    pair.succeed();
    assert_eq!(pair.back.staged() as usize, QUEUE_PAGES);
    let before = pair.back_platform.counters().values();
    let (front, back) = pair.ports();
    assert_eq!(send(front, 0..4), 4);
    assert_eq!(take(back, 64, true), frames(0..4));
    assert_eq!(send(back, 4..8), 4);
    assert_eq!(take(front, 64, true), frames(4..8));
    assert_eq!(pair.uses(&before), (0, 0));
}
