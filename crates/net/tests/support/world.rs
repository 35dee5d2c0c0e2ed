//! Two kernels with a vif between them: a guest's, whose TAP is patched to netfront, and the driver domain's,
//! whose TAP is on a switch with netback.

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
use ringfence_switch::dataplane::{Dataplane, DataplaneConfig, DataplaneHandle, PortId};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy, Switch};
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::{Peer, ip, set_up};

/// The MTU of the vif.
pub const MTU: u16 = 8000;

/// A side's ports come and go in its data plane.
pub struct Side {
    pub plane: DataplaneHandle,
    pub port: Option<PortId>,
    pub counters: Arc<PortCounters>,
    /// The kernel's interface on that side.
    pub tap: Arc<PortCounters>,
    pub gone: Receiver<String>,
}

impl PortHost for Side {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.counters = Arc::clone(port.counters());
        self.port = Some(self.plane.add_port(port, PortPolicy::default(), "vif").unwrap());
    }

    fn detach(&mut self, _: &DeviceId) {
        if let Some(port) = self.port.take() {
            drop(self.plane.remove_port(port));
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
        let (dataplane, plane) =
            Dataplane::new(fabric, config, Arc::clone(&system), on_gone).unwrap();
        std::thread::spawn(move || dataplane.run());
        let port = TapPort::new(tap.fd, tap.offloads, MTU, system);
        let tap = Arc::clone(port.counters());
        plane.add_port(Box::new(port), PortPolicy::default(), "tap").unwrap();
        Side { plane, port: None, counters: Arc::default(), tap, gone }
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
        peer.tell(&format!("up rfb 2 {MTU}"));
        peer.tell("serve");
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
        // They are used where the backend opens them.
        let front = Some(front.with_windows(&platforms[1], WindowSizes::default()));
        let offloads = taps.each_ref().map(|tap| tap.offloads);
        let [a, b] = taps;
        let guest = Side::new(Fabric::Patch(Patch::new()), a);
        let driver = Side::new(Fabric::Switch(Switch::new()), b);
        World { peer, hub, platforms, stores, device, front, guest, driver, mtu: MTU, offloads }
    }

    /// Whether both kernels leave that undone.
    pub fn taps_take(&self, offloads: TapOffloads) -> bool {
        self.offloads.iter().all(|granted| granted.contains(offloads))
    }

    pub fn set_mtu(&mut self, mtu: u16) {
        if mtu != self.mtu {
            ip(&format!("link set rfa mtu {mtu}"));
            self.peer.tell(&format!("ip link set rfb mtu {mtu}"));
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
        assert_eq!((self.guest.port, self.driver.port), (None, None), "both let go");
        // The backend's port may have found its channels closed before it was taken away.
        let _ = self.driver.gone.try_recv();
        let state = format!("{}/state", self.device.frontend_path());
        front_store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    }

    /// Waits until what the kernels have handed over has gone through both data planes, and what they
    /// say to that (a connection that is no more is refused once) has, too: an answer comes between two
    /// rounds, so a round lies between two answers.
    pub fn settle(&self) {
        for side in [&self.guest, &self.driver].into_iter().cycle().take(4) {
            side.plane.stats().unwrap();
            side.plane.stats().unwrap();
        }
    }
}
