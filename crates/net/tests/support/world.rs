//! Two kernels with a vif between them. The guest's TAP is bridged to netfront; the driver domain's TAP is on
//! a switch with netback.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Port, PortCounters};
use ringfence_net::netfront::WindowSizes;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::VifBackend;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{Counters, DomId, Platform};
use ringfence_switch::dataplane::{DataplaneConfig, DataplaneHandle, DataplaneWorker, PortId};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy, Switch};
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::{Peer, ip, set_up};

/// MTU of the vif.
pub const MTU: u16 = 8000;

/// Side of a vif, whose ports are added to its workers and removed again.
pub struct Side {
    pub worker: DataplaneHandle,
    pub port: Option<PortId>,
    pub counters: Arc<PortCounters>,
    /// Kernel interface of this side.
    pub tap: Arc<PortCounters>,
    pub gone: Receiver<String>,
}

impl PortHost for Side {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.counters = Arc::clone(port.counters());
        self.port = Some(self.worker.add_port(port, PortPolicy::default(), "vif").unwrap());
    }

    fn detach(&mut self, _: &DeviceId) {
        if let Some(port) = self.port.take() {
            drop(self.worker.remove_port(port));
        }
    }
}

impl Side {
    pub fn new(fabric: Fabric, tap: Tap) -> Side {
        let system = Arc::new(Counters::default());
        let (tell, gone) = mpsc::channel();
        let on_gone = move |port: ringfence_switch::dataplane::PortGone| {
            let _ = tell.send(format!("{}: {}", port.name, port.reason));
        };
        let config = DataplaneConfig::default();
        let (dataplane, worker) =
            DataplaneWorker::new(fabric, config, Arc::clone(&system), on_gone).unwrap();
        std::thread::spawn(move || dataplane.run());
        let port = TapPort::new(tap.fd, tap.offloads, MTU, system);
        let tap = Arc::clone(port.counters());
        worker.add_port(Box::new(port), PortPolicy::default(), "tap").unwrap();
        Side { worker, port: None, counters: Arc::default(), tap, gone }
    }
}

/// Two kernels with a vif between them.
pub struct World {
    pub peer: Peer,
    hub: HubHandle,
    platforms: [LocalPlatform; 2],
    stores: [StoreClient; 2],
    pub device: DeviceId,
    pub front: Option<VifFrontend<LocalPlatform>>,
    pub guest: Side,
    pub driver: Side,
    mtu: u16,
    offloads: [TapOffloads; 2],
}

impl Drop for World {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl World {
    pub fn new(mut peer: Peer) -> World {
        let taps = ["rfa", "rfb"].map(|name| Tap::create(name).unwrap());
        ip(&format!("link set rfb netns {}", peer.id()));
        set_up("rfa", 1, MTU);
        peer.call(&format!("up rfb 2 {MTU}"));
        peer.call("serve");
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let platforms = [(Some(DomId(0)), true), (None, false)].map(|(id, privileged)| {
            LocalPlatform::connect(hub.admit(id, privileged).unwrap().1).unwrap()
        });
        let mut stores = [&platforms[0], &platforms[1]].map(|p| p.store().unwrap());
        let device = DeviceId {
            kind: DeviceKind::Vif,
            frontend: platforms[1].domid(),
            backend: DomId(0),
            handle: 0,
        };
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: MTU };
        toolstack::create(&mut stores[0], &device, config).unwrap();
        let front = VifFrontend::new(&platforms[1], device, MTU).unwrap();
        // The backend opens grant windows only in that mode.
        let front = Some(front.with_windows(&platforms[1], WindowSizes::default()));
        let offloads = taps.each_ref().map(|tap| tap.offloads);
        let [a, b] = taps;
        let guest = Side::new(Fabric::Patch(Patch::new()), a);
        let driver = Side::new(Fabric::Switch(Switch::new()), b);
        World { peer, hub, platforms, stores, device, front, guest, driver, mtu: MTU, offloads }
    }

    /// Returns true if both kernels grant these offloads.
    pub fn taps_support(&self, offloads: TapOffloads) -> bool {
        self.offloads.iter().all(|granted| granted.contains(offloads))
    }

    pub fn set_mtu(&mut self, mtu: u16) {
        if mtu != self.mtu {
            ip(&format!("link set rfa mtu {mtu}"));
            self.peer.call(&format!("ip link set rfb mtu {mtu}"));
            self.mtu = mtu;
        }
    }

    pub fn connect(&mut self, back: &mut VifBackend, front: &mut VifFrontend<LocalPlatform>) {
        let until = Instant::now() + Duration::from_secs(60);
        let [back_store, front_store] = &mut self.stores;
        while !front.is_up() {
            assert!(Instant::now() < until, "no connection");
            back.look(&self.platforms[0], back_store, &mut self.driver).unwrap();
            front.look(&self.platforms[1], front_store, &mut self.guest).unwrap();
        }
    }

    pub fn disconnect(&mut self, back: &mut VifBackend, front: &mut VifFrontend<LocalPlatform>) {
        let [back_store, front_store] = &mut self.stores;
        front.close(front_store, &mut self.guest).unwrap();
        back.look(&self.platforms[0], back_store, &mut self.driver).unwrap();
        assert_eq!(
            (self.guest.port, self.driver.port),
            (None, None),
            "both sides released their ports"
        );
        // The backend's port may have seen its channels closed before it was removed.
        let _ = self.driver.gone.try_recv();
        let state = format!("{}/state", self.device.frontend_path());
        front_store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    }

    /// Waits until the frames that the kernels have sent have passed both datapaths, and so have the responses to
    /// them (a segment of a closed connection is refused once). A worker answers between two rounds, so one round
    /// passes between two answers.
    pub fn settle(&self) {
        for side in [&self.guest, &self.driver].into_iter().cycle().take(4) {
            side.worker.stats().unwrap();
            side.worker.stats().unwrap();
        }
    }
}
