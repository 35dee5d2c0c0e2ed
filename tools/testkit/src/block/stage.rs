//! A driver domain that serves disks, and guests with manners, in one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenbus::end::Life;
use ringfence_xenstore::{StoreAccess, StoreClient};

use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::Disk;
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::frontend::{PlatformDisk, VbdFrontend};
use ringfence_block::vbd::toolstack::{self, VbdConfig};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Wakes whoever looks after devices.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// What rings it.
    pub fn ringer(self: &Arc<Bell>) -> Arc<dyn Fn() + Send + Sync> {
        let bell = Arc::clone(self);
        Arc::new(move || {
            *bell.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
            bell.changed.notify_all();
        })
    }

    /// Waits until it was rung, but not for long.
    pub fn wait(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap();
        let (mut rung, _) = self.changed.wait_timeout_while(rung, limit, |rung| !*rung).unwrap();
        *rung = false;
    }
}

/// A driver domain (domain 0) with its hub.
pub struct Stage {
    /// The hub.
    pub hub: HubHandle,
    /// Domain 0.
    pub platform: LocalPlatform,
    /// Its store.
    pub store: StoreClient,
    /// The disks, by seat.
    pub seats: Vec<VbdBackend>,
    bell: Arc<Bell>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.seats.clear();
        self.hub.stop();
    }
}

impl Default for Stage {
    fn default() -> Stage {
        Stage::new()
    }
}

impl Stage {
    /// A stage without disks.
    pub fn new() -> Stage {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let store = platform.store().unwrap();
        Stage { hub, platform, store, seats: Vec::new(), bell: Arc::default() }
    }

    /// A new domain, with so much to lend of each kind.
    pub fn join(&self, pages: u32) -> LocalPlatform {
        let (_, socket) = self.hub.admit(None, false).unwrap();
        LocalPlatform::connect(socket).unwrap().with_arena(ArenaShape::of(pages, pages))
    }

    /// The device of a domain's only disk.
    pub fn device(frontend: DomId) -> DeviceId {
        DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle: 51712 }
    }

    /// Makes a disk for a domain, as a toolstack does, and its backend; its seat.
    pub fn add_vbd(
        &mut self,
        frontend: DomId,
        disk: Arc<dyn Disk>,
        options: BlkbackOptions,
        config: VbdConfig,
    ) -> usize {
        let device = Stage::device(frontend);
        toolstack::create(&mut self.store, &device, config).unwrap();
        self.seats.push(VbdBackend::new(device, options, disk, self.bell.ringer()));
        self.seats.len() - 1
    }

    /// The backend of a seat looks at the store.
    pub fn look(&mut self, seat: usize) -> Life {
        self.seats[seat].look(&self.platform, &mut self.store).unwrap()
    }

    /// All look.
    pub fn look_all(&mut self) {
        for seat in 0..self.seats.len() {
            self.look(seat);
        }
    }

    /// Looks until the backend has this state: it first waits for what is in flight.
    pub fn look_until(&mut self, seat: usize, state: XenbusState) {
        let begun = Instant::now();
        loop {
            self.look(seat);
            if self.state(seat) == state {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "the state never was {state:?}");
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// Looks until a frontend is served.
    pub fn look_until_connected(&mut self, seat: usize) {
        let begun = Instant::now();
        while self.seats[seat].connection().is_none() {
            assert!(begun.elapsed() < PATIENCE, "nobody is served");
            self.look(seat);
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// Looks until nothing of a frontend's is held any more.
    pub fn look_until_released(&mut self, seat: usize) {
        let begun = Instant::now();
        while self.seats[seat].connection().is_some() || self.seats[seat].is_leaving() {
            assert!(begun.elapsed() < PATIENCE, "it is still served");
            self.look(seat);
            self.bell.wait(Duration::from_millis(20));
        }
        self.look(seat);
    }

    /// Looks until the device of a seat was closed because of its guest.
    pub fn wait_for_condemnation(&mut self, seat: usize) -> String {
        let begun = Instant::now();
        loop {
            self.look(seat);
            if let Some(why) = self.seats[seat].penalized() {
                return why.to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "the device is still served");
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// What the guest of a seat did wrong.
    pub fn rules(&self, seat: usize) -> &Arc<RuleCounters> {
        self.seats[seat].rules()
    }

    /// The backend's state in the store.
    pub fn state(&mut self, seat: usize) -> XenbusState {
        let path = format!("{}/state", self.seats[seat].device().backend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }
}

/// A guest with manners.
pub struct Guest {
    /// Its platform.
    pub platform: LocalPlatform,
    /// Its store.
    pub store: StoreClient,
    /// Its end of the disk.
    pub front: VbdFrontend<LocalPlatform>,
    /// Its seat.
    pub seat: usize,
}

impl Guest {
    /// A guest, not connected.
    pub fn new(
        stage: &mut Stage,
        disk: Arc<dyn Disk>,
        back: BlkbackOptions,
        options: BlkfrontOptions,
    ) -> Guest {
        let platform = stage.join(2048);
        let seat = stage.add_vbd(platform.domid(), disk, back, VbdConfig::default());
        let device = *stage.seats[seat].device();
        let front = VbdFrontend::new(&platform, device, options, Arc::new(|| {})).unwrap();
        let store = platform.store().unwrap();
        Guest { platform, store, front, seat }
    }

    /// A guest, connected.
    pub fn join(
        stage: &mut Stage,
        disk: Arc<dyn Disk>,
        back: BlkbackOptions,
        options: BlkfrontOptions,
    ) -> Guest {
        let mut guest = Guest::new(stage, disk, back, options);
        guest.connect(stage);
        guest
    }

    /// The guest looks at the store.
    pub fn look(&mut self) {
        self.front.look(&self.platform, &mut self.store).unwrap();
    }

    /// Both look until the disk is there.
    pub fn connect(&mut self, stage: &mut Stage) {
        let begun = Instant::now();
        while !self.front.is_up() {
            assert!(begun.elapsed() < PATIENCE, "no connection");
            stage.look(self.seat);
            self.look();
        }
    }

    /// Its disk.
    pub fn disk(&self) -> Arc<PlatformDisk<LocalPlatform>> {
        Arc::clone(self.front.disk().unwrap())
    }
}
