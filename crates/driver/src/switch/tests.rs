//! Guests of a switch, attached over its socket. The test runs the rounds of the control thread.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringfence_platform::DomId;
use ringfence_platform::local::LocalPlatform;
use ringfence_sandbox::channel::Channel;
use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::pressure::PressureMonitor;
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::admission::Admission;
use super::domain::SwitchDomain;
use super::process;
use crate::domain::Control;
use crate::proof;
use crate::switchboard::{AttachRequest, Attached, DriverConfig, FromDriver, ToDriver, VERSION};
use crate::testing::{RefusingStore, assert_retry, run_until};

struct World {
    control: Control<LocalPlatform, SwitchDomain>,
    launcher: Channel,
}

impl World {
    /// Starts a switch, and connects a launcher.
    fn new() -> World {
        let directory = tempfile::tempdir().unwrap();
        let address = SocketAddrUnix::new(directory.path().join("switch")).unwrap();
        let socket = || -> OwnedFd {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
        };
        let (listener, near) = (socket(), socket());
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        rustix::net::connect(&near, &address).unwrap();
        let config = DriverConfig { switch: "test".to_owned(), verbose: false, rings: 0 };
        let rings = ringfence_memory::UringPool::new(0, 1);
        let admission = Admission::own().unwrap();
        let control = process::start(
            &config,
            admission,
            listener,
            rings,
            PressureMonitor::without_triggers(),
        )
        .unwrap();
        let launcher = Channel::from_fd(near);
        proof::introduce(&launcher).unwrap();
        World { control, launcher }
    }

    /// Attaches a guest with a vif. The guest exists as long as the descriptors of the answer are open.
    fn attach(&mut self) -> (Attached, Descriptors) {
        let request = AttachRequest {
            version: VERSION.to_owned(),
            name: None,
            mac: None,
            addresses: Vec::new(),
            avoid: Vec::new(),
            mtu: 1500,
            mode: "copy".to_owned(),
            queues: 1,
            offloads: "none".to_owned(),
            coalesce: false,
            forwarding: false,
            advertise: false,
            host_leg: false,
            interface: true,
        };
        self.launcher.send(&ToDriver::Attach(Box::new(request)), &[]).unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            run_until(&mut self.control, Instant::now() + Duration::from_millis(10));
            match self.launcher.try_receive().unwrap() {
                Some((FromDriver::Attached(attached), fds)) => return (*attached, fds),
                None => assert!(Instant::now() < limit, "no answer"),
                other => panic!("{other:?}"),
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let domain = &self.control.backends.domain;
        domain.dataplane.stop();
        domain.hub.stop();
    }
}

#[test]
fn device_that_fails_under_run_is_tried_again_after_the_delay() {
    let mut world = World::new();
    let platform = &world.control.backends.platform;
    let (refusing, store) = RefusingStore::connect(platform, keys::FEATURE_CTRL_RING);
    world.control.store = store;
    let (attached, _guest) = world.attach();
    let (kind, backend) = (DeviceKind::Vif, DomId(0));
    let device = DeviceId { kind, frontend: DomId(attached.domain), backend, handle: 0 };
    assert_retry(&mut world.control, &refusing, &device);
}
