//! Devices that appear and disappear in a store, served by a list that records the calls.

use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};

use super::*;

struct World {
    hub: HubHandle,
    _toolstack: LocalPlatform,
    store: StoreClient,
    own: StoreClient,
}

impl World {
    fn new() -> World {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let join = |wanted| LocalPlatform::connect(hub.admit(wanted, true).unwrap().1).unwrap();
        let toolstack = join(Some(DomId(0)));
        let (store, own) = (toolstack.store().unwrap(), toolstack.store().unwrap());
        World { hub, _toolstack: toolstack, store, own }
    }

    fn make(&mut self, domain: u16, handle: u32) {
        let path = device(domain, handle).backend_path();
        self.store.write(&format!("{path}/state"), "1").unwrap();
    }

    /// Handles events until none arrives for a while, and then serves the devices that are due.
    fn settle(&mut self, devices: &mut Devices, served: &mut List) {
        while let Some(event) = self.own.wait_event(Duration::from_millis(50)).unwrap() {
            devices.handle_event(&event);
        }
        devices.work(&mut self.own, served).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

/// Returns a schedule of vifs that a toolstack assigns to domain 0.
fn discover(store: &mut StoreClient) -> Devices {
    let mut devices = Devices::new(DomId(0));
    devices.discover(store, DeviceKind::Vif).unwrap();
    devices
}

#[derive(Default)]
struct List {
    looked: Vec<DeviceId>,
    forgotten: Vec<DeviceId>,
    answer: Option<Look>,
}

impl Served for List {
    fn watch_paths(&self, device: &DeviceId) -> Vec<String> {
        vec![format!("{}/state", device.frontend_path())]
    }
    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError> {
        self.looked.push(*device);
        if self.answer == Some(Look::Over) {
            store.write(&format!("{}/state", device.backend_path()), "6")?;
        }
        Ok(self.answer.unwrap_or(Look::Alive))
    }
    fn forget(&mut self, device: &DeviceId) {
        self.forgotten.push(*device);
    }
}

fn device(domain: u16, handle: u32) -> DeviceId {
    DeviceId { kind: DeviceKind::Vif, frontend: DomId(domain), backend: DomId(0), handle }
}

#[test]
fn existing_and_later_devices_are_found_once() {
    let mut world = World::new();
    world.make(1, 0);
    world.make(1, 1);
    let mut devices = discover(&mut world.own);
    let mut list = List::default();
    devices.work(&mut world.own, &mut list).unwrap();
    assert_eq!(list.looked, [device(1, 0), device(1, 1)]);
    world.settle(&mut devices, &mut list);
    list.looked.clear();
    world.make(7, 3);
    world.settle(&mut devices, &mut list);
    assert_eq!(list.looked, [device(7, 3)], "many events, one look, at that device alone");
    // The key of its frontend is outside the watched tree.
    list.looked.clear();
    world.store.write(&format!("{}/state", device(7, 3).frontend_path()), "3").unwrap();
    world.settle(&mut devices, &mut list);
    assert_eq!(list.looked, [device(7, 3)]);
}

#[test]
fn removal_of_any_parent_directory_ends_device() {
    for gone in ["5/0", "5", ""] {
        let mut world = World::new();
        world.make(5, 0);
        let mut devices = discover(&mut world.own);
        let mut list = List::default();
        world.settle(&mut devices, &mut list);
        let root = xenbus::backend_root(DomId(0), DeviceKind::Vif);
        world.store.rm(format!("{root}/{gone}").trim_end_matches('/')).unwrap();
        world.settle(&mut devices, &mut list);
        assert_eq!(list.forgotten, [device(5, 0)], "{gone:?}");
        // A directory created again is a new device, with its own watches.
        world.make(5, 0);
        world.settle(&mut devices, &mut list);
        world.settle(&mut devices, &mut list);
        list.looked.clear();
        world.store.write(&format!("{}/state", device(5, 0).frontend_path()), "3").unwrap();
        world.settle(&mut devices, &mut list);
        assert_eq!(list.looked, [device(5, 0)]);
    }
}

#[test]
fn failed_device_is_tried_again_after_delay() {
    let mut world = World::new();
    world.make(5, 0);
    let mut devices = discover(&mut world.own);
    let mut list = List { answer: Some(Look::Again), ..List::default() };
    world.settle(&mut devices, &mut list);
    list.looked.clear();
    devices.work(&mut world.own, &mut list).unwrap();
    assert!(list.looked.is_empty());
    let deadline = devices.deadline().unwrap();
    assert!(deadline <= Instant::now() + AGAIN);
    std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
    list.answer = None;
    devices.work(&mut world.own, &mut list).unwrap();
    assert_eq!(list.looked, [device(5, 0)]);
    assert_eq!(devices.deadline(), None);
}

#[test]
fn directory_that_names_no_device_is_ignored() {
    let mut world = World::new();
    let root = xenbus::backend_root(DomId(0), DeviceKind::Vif);
    for path in ["x/0/state", "5/y/state", "70000/0/state", "6/0/other"] {
        world.store.write(&format!("{root}/{path}"), "1").unwrap();
    }
    let mut devices = discover(&mut world.own);
    let mut list = List::default();
    world.settle(&mut devices, &mut list);
    assert!(list.looked.is_empty(), "{:?}", list.looked);
}

#[test]
fn own_write_to_closed_device_is_no_new_device() {
    let mut world = World::new();
    world.make(5, 0);
    let mut devices = discover(&mut world.own);
    let mut list = List { answer: Some(Look::Over), ..List::default() };
    for _ in 0..5 {
        world.settle(&mut devices, &mut list);
    }
    assert_eq!(list.looked, [device(5, 0)]);
    assert_eq!(list.forgotten, [device(5, 0)]);

    // The toolstack requests the close only now, and waits for the answer.
    let state = format!("{}/state", device(5, 0).backend_path());
    world.store.write(&state, "5").unwrap();
    for _ in 0..5 {
        world.settle(&mut devices, &mut list);
    }
    assert_eq!(world.store.read_opt(&state).unwrap().as_deref(), Some(&b"6"[..]));
    assert_eq!(list.looked, [device(5, 0); 2]);

    // The device is created again, with and without a removal before.
    for removed in [false, true] {
        list.looked.clear();
        if removed {
            world.store.rm(&device(5, 0).backend_path()).unwrap();
        }
        world.make(5, 0);
        for _ in 0..5 {
            world.settle(&mut devices, &mut list);
        }
        assert_eq!(list.looked, [device(5, 0)], "removed: {removed}");
    }
}

#[test]
fn registered_device_is_served_at_once_and_after_events_of_both_ends() {
    let mut world = World::new();
    world.make(5, 0);
    let (mut devices, mut list) = (Devices::new(DomId(0)), List::default());
    devices.register(&device(5, 0), &mut world.own, &list).unwrap();
    devices.work(&mut world.own, &mut list).unwrap();
    assert_eq!(list.looked, [device(5, 0)]);
    world.settle(&mut devices, &mut list);
    for directory in [device(5, 0).frontend_path(), device(5, 0).backend_path()] {
        list.looked.clear();
        world.store.write(&format!("{directory}/state"), "3").unwrap();
        world.settle(&mut devices, &mut list);
        assert_eq!(list.looked, [device(5, 0)], "{directory}");
    }
    devices.unregister(&device(5, 0), &mut world.own, &list);
    list.looked.clear();
    world.store.write(&format!("{}/state", device(5, 0).backend_path()), "4").unwrap();
    world.settle(&mut devices, &mut list);
    assert!(list.looked.is_empty() && list.forgotten.is_empty());
}

#[test]
fn end_of_a_domain_makes_all_devices_due() {
    let mut world = World::new();
    world.make(5, 0);
    let (mut devices, mut list) = (Devices::new(DomId(0)), List::default());
    devices.watch_releases(&mut world.own).unwrap();
    devices.register(&device(5, 0), &mut world.own, &list).unwrap();
    world.settle(&mut devices, &mut list);
    list.looked.clear();
    drop(world.hub.admit(Some(DomId(9)), false).unwrap());
    world.settle(&mut devices, &mut list);
    assert_eq!(list.looked, [device(5, 0)]);
}
