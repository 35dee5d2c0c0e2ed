//! Driver domain that serves disks, and correct guests, in one process.
//!
//! A test calls [`Stage::look`] and [`Guest::look`] in place of the event loops: each lets one end read
//! the store and act once. Vbds are numbered in the order of [`Stage::add_vbd`].

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

/// Maximum time of any wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// Flag that wakes the thread that serves the devices.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Returns a function that sets the flag.
    pub fn ringer(self: &Arc<Bell>) -> Arc<dyn Fn() + Send + Sync> {
        let bell = Arc::clone(self);
        Arc::new(move || {
            *bell.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
            bell.changed.notify_all();
        })
    }

    /// Waits until the flag is set or `limit` has elapsed, and clears it.
    pub fn wait(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap();
        let (mut rung, _) = self.changed.wait_timeout_while(rung, limit, |rung| !*rung).unwrap();
        *rung = false;
    }
}

/// Driver domain (domain 0) with its hub.
pub struct Stage {
    pub hub: HubHandle,
    pub platform: LocalPlatform,
    /// Store connection of domain 0.
    pub store: StoreClient,
    /// Backends of the disks, by number.
    pub vbds: Vec<VbdBackend>,
    bell: Arc<Bell>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.vbds.clear();
        self.hub.stop();
    }
}

impl Default for Stage {
    fn default() -> Stage {
        Stage::new()
    }
}

impl Stage {
    /// Creates a stage without disks.
    pub fn new() -> Stage {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let store = platform.store().unwrap();
        Stage { hub, platform, store, vbds: Vec::new(), bell: Arc::default() }
    }

    /// Admits a new domain, with `pages` pages of each kind to grant to each peer.
    pub fn join(&self, pages: u32) -> LocalPlatform {
        let (_, socket) = self.hub.admit(None, false).unwrap();
        LocalPlatform::connect(socket).unwrap().with_arena(ArenaShape::of(pages, pages))
    }

    /// Returns the id of a domain's only disk.
    pub fn device(frontend: DomId) -> DeviceId {
        DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle: 51712 }
    }

    /// Creates a vbd for a domain, as a toolstack does, and its backend. Returns the number of the vbd.
    pub fn add_vbd(
        &mut self,
        frontend: DomId,
        disk: Arc<dyn Disk>,
        options: BlkbackOptions,
        config: VbdConfig,
    ) -> usize {
        let device = Stage::device(frontend);
        toolstack::create(&mut self.store, &device, config).unwrap();
        self.vbds.push(VbdBackend::new(device, options, disk, self.bell.ringer()));
        self.vbds.len() - 1
    }

    /// Lets the backend of a vbd read the store and act once.
    pub fn look(&mut self, vbd: usize) -> Life {
        self.vbds[vbd].look(&self.platform, &mut self.store).unwrap()
    }

    /// Lets every backend act once.
    pub fn look_all(&mut self) {
        for vbd in 0..self.vbds.len() {
            self.look(vbd);
        }
    }

    /// Lets the backend act until it has this state. It may wait for requests in flight first.
    pub fn look_until(&mut self, vbd: usize, state: XenbusState) {
        let begun = Instant::now();
        loop {
            self.look(vbd);
            if self.state(vbd) == state {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "the state never was {state:?}");
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// Lets the backend act until it serves a frontend.
    pub fn look_until_connected(&mut self, vbd: usize) {
        let begun = Instant::now();
        while self.vbds[vbd].connection().is_none() {
            assert!(begun.elapsed() < PATIENCE, "nobody is served");
            self.look(vbd);
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// Lets the backend act until it holds no resource of a frontend.
    pub fn look_until_released(&mut self, vbd: usize) {
        let begun = Instant::now();
        while self.vbds[vbd].connection().is_some() || self.vbds[vbd].is_leaving() {
            assert!(begun.elapsed() < PATIENCE, "it is still served");
            self.look(vbd);
            self.bell.wait(Duration::from_millis(20));
        }
        self.look(vbd);
    }

    /// Lets the backend act until it has closed the device because of its guest. Returns the reason.
    pub fn wait_for_penalty_close(&mut self, vbd: usize) -> String {
        let begun = Instant::now();
        loop {
            self.look(vbd);
            if let Some(why) = self.vbds[vbd].penalized() {
                return why.to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "the device is still served");
            self.bell.wait(Duration::from_millis(20));
        }
    }

    /// Returns the rule violations of a vbd's guest.
    pub fn rules(&self, vbd: usize) -> &Arc<RuleCounters> {
        self.vbds[vbd].rules()
    }

    /// Returns the backend's state in the store.
    pub fn state(&mut self, vbd: usize) -> XenbusState {
        let path = format!("{}/state", self.vbds[vbd].device().backend_path());
        XenbusState::parse(&self.store.read(&path).unwrap()).unwrap()
    }
}

/// Correct guest with one disk.
pub struct Guest {
    pub platform: LocalPlatform,
    pub store: StoreClient,
    pub front: VbdFrontend<LocalPlatform>,
    /// Index of the vbd in the stage's list.
    pub vbd: usize,
}

impl Guest {
    /// Creates a guest that is not connected.
    pub fn new(
        stage: &mut Stage,
        disk: Arc<dyn Disk>,
        back: BlkbackOptions,
        options: BlkfrontOptions,
    ) -> Guest {
        let platform = stage.join(2048);
        let vbd = stage.add_vbd(platform.domid(), disk, back, VbdConfig::default());
        let device = *stage.vbds[vbd].device();
        let front = VbdFrontend::new(&platform, device, options, Arc::new(|| {})).unwrap();
        let store = platform.store().unwrap();
        Guest { platform, store, front, vbd }
    }

    /// Creates a guest and connects it.
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

    /// Lets the frontend read the store and act once.
    pub fn look(&mut self) {
        self.front.look(&self.platform, &mut self.store).unwrap();
    }

    /// Lets both ends act until the disk is connected.
    pub fn connect(&mut self, stage: &mut Stage) {
        let begun = Instant::now();
        while !self.front.is_up() {
            assert!(begun.elapsed() < PATIENCE, "no connection");
            stage.look(self.vbd);
            self.look();
        }
    }

    /// Returns the connected disk.
    pub fn disk(&self) -> Arc<PlatformDisk<LocalPlatform>> {
        Arc::clone(self.front.disk().unwrap())
    }
}
