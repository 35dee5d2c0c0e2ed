//! Daemon on a hub. The test is the toolstack, and runs the rounds of the control thread.

use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubLimits};
use ringfence_platform::{DomId, Platform, PlatformChoice};
use ringfence_sandbox::signals::Signals;
use ringfence_sys::pressure::PressureMonitor;
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::process::Signal;

use super::args::OnExit;
use super::config::Config;
use super::domain;
use super::setup::Setup;
use crate::testing::{RefusingStore, assert_retry};

#[test]
fn device_that_fails_under_serve_is_tried_again_after_the_delay() {
    let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
    std::thread::spawn(move || thread.run().unwrap());
    let join = |domain, is_privileged| {
        LocalPlatform::connect(hub.admit(Some(DomId(domain)), is_privileged).unwrap().1).unwrap()
    };
    let (daemon, _guest) = (join(0, true), join(7, false));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringfence.toml");
    let config = Config::parse("[network]\nattach = \"switch\"\n", &file).unwrap();
    let setup = Setup {
        config: file,
        on_exit: OnExit::Keep,
        platform: PlatformChoice::Local(directory.path().join("hub")),
        runtime_dir: directory.path().to_owned(),
    };
    let (kind, backend) = (DeviceKind::Vif, DomId(0));
    let device = DeviceId { kind, frontend: DomId(7), backend, handle: 0 };
    let (refusing, store) = RefusingStore::connect(&daemon, keys::FEATURE_CTRL_RING);
    let mut toolstack = daemon.store().unwrap();
    let signals = Signals::new(&[Signal::WINCH]).unwrap();
    let mut control =
        domain::start(setup, config, daemon, signals, PressureMonitor::without_triggers()).unwrap();
    control.store = store;
    control.devices.discover(&mut control.store, kind).unwrap();
    let vif = VifConfig { mac: [2, 0, 0, 0, 0, 7], mtu: 1500 };
    toolstack::create(&mut toolstack, &device, vif).unwrap();
    assert_retry(&mut control, &refusing, &device);
    control.backends.domain.switch.as_ref().unwrap().stop();
    hub.stop();
}
