//! `ringfence attach` and `ringfence serve` at both ends of a vif, without a hypervisor. Both are domains of a
//! hub, and the test is the toolstack.

use std::time::Duration;

use ringfence_driver::xen::status::{Snapshot, ask};
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, frontend_root};
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenbus::toolstack::DeviceEntries;
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::needs::{Need, beside_product};
use crate::support::{Lab, MOMENT, Running, eventually, sha256, write_noise};

pub(super) const DRIVER: DomId = DomId(1);

/// Hub and its toolstack.
pub(super) struct World {
    pub(super) lab: Lab,
    pub(super) hub: Running,
    toolstack: StoreClient,
    _platform: LocalPlatform,
}

impl World {
    pub(super) fn new() -> World {
        let lab = Lab::new();
        let socket = lab.file("hub.sock");
        let program = env!("CARGO_BIN_EXE_ringfence");
        let hub = lab.spawn(&[program, "hub", "--socket", socket.to_str().unwrap()]);
        hub.wait_for_error("listens at");
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        let platform = LocalPlatform::connect_as(fd, Some(DomId(0))).unwrap();
        let mut toolstack = platform.store().unwrap();
        std::fs::write(lab.file("serve.toml"), "[network]\nattach = 'switch'\n").unwrap();
        // The daemon may read its own directory, as on Xen.
        let home = format!("/local/domain/{DRIVER}");
        toolstack.mkdir(&home).unwrap();
        let readable = PermissionList::owned_by(DomId(0), NodeAccess::Read);
        toolstack.set_perms(&home, &readable).unwrap();
        World { lab, hub, toolstack, _platform: platform }
    }

    pub(super) fn platform(&self) -> String {
        format!("local:{}", self.lab.file("hub.sock").display())
    }

    pub(super) fn serve(&self, options: &[&str]) -> Running {
        self.serve_in(&[], options)
    }

    /// Starts the daemon by the words in `starter`.
    fn serve_in(&self, starter: &[&str], options: &[&str]) -> Running {
        let (platform, run) = (self.platform(), self.lab.file("run"));
        let (run, config) = (run.to_str().unwrap(), self.lab.file("serve.toml"));
        let mut words = starter.to_vec();
        words.extend([env!("CARGO_BIN_EXE_ringfence"), "serve", "--platform", &platform]);
        words.extend(["--runtime-dir", run, "--config", config.to_str().unwrap()]);
        words.extend(options);
        let serve = self.lab.spawn(&words);
        assert!(eventually(MOMENT, || ask(&self.lab.file("run/serve.sock")).is_ok()));
        serve
    }

    pub(super) fn status(&self) -> Snapshot {
        ask(&self.lab.file("run/serve.sock")).unwrap()
    }

    /// Gives domain `number` an interface.
    fn plug_in(&mut self, number: u16) {
        let device =
            DeviceId { kind: DeviceKind::Vif, frontend: DomId(number), backend: DRIVER, handle: 0 };
        let config = VifConfig { mac: [2, 0, 0, 0, 0, number.to_le_bytes()[0]], mtu: 1500 };
        toolstack::create(&mut self.toolstack, &device, config).unwrap();
        self.show_devices(&device);
    }

    /// Creates a device with these entries, which its domain finds.
    pub(super) fn create(&mut self, device: &DeviceId, entries: DeviceEntries<'_>) {
        ringfence_xenbus::toolstack::create(&mut self.toolstack, device, entries).unwrap();
        self.show_devices(device);
    }

    /// Permits a domain to list its devices of a kind, as libxl does.
    fn show_devices(&mut self, device: &DeviceId) {
        let readable = PermissionList::owned_by(DomId(0), NodeAccess::Read);
        let devices = frontend_root(device.frontend, device.kind);
        self.toolstack.set_perms(&devices, &readable).unwrap();
    }

    /// Starts the frontend of domain `number`, in a network namespace of its own.
    fn attach(&mut self, number: u16) -> Running {
        self.attach_with(number, &[])
    }

    fn attach_with(&mut self, number: u16, options: &[&str]) -> Running {
        self.plug_in(number);
        let platform = self.platform();
        let program = env!("CARGO_BIN_EXE_ringfence");
        let mut words = vec!["unshare", "--net", program, "attach", "--platform", &platform];
        words.extend(["--name", "eth7", "-v"]);
        words.extend(options);
        let attach = self.lab.spawn(&words);
        attach.wait_for_error("connected");
        attach
    }

    /// Runs a script in the namespace of a frontend. Returns its output.
    fn inside(&self, of: &Running, script: &str) -> String {
        let pid = of.pid().as_raw_nonzero().to_string();
        let words = ["nsenter", "--target", &pid, "--net", "sh", "-ec", script];
        self.lab.spawn(&words).succeed(MOMENT)
    }
}

#[test]
fn two_user_space_frontends_exchange_traffic_through_daemon() {
    require!(Need::Root, Need::Program("ip", "iproute2"), Need::Program("ping", "iputils-ping"));
    let mut world = World::new();
    let serve = world.serve(&[]);
    let (one, two) = (world.attach(2), world.attach(3));
    let link = world.inside(&one, "ip link show eth7");
    assert!(link.contains("mtu 1500") && link.contains("02:00:00:00:00:02"), "{link}");
    world.inside(&one, "ip link set eth7 up; ip address add 10.1.1.1/24 dev eth7");
    world.inside(&two, "ip link set eth7 up; ip address add 10.1.1.2/24 dev eth7");
    world.inside(&one, "ping -c 3 -i 0.1 -w 60 -s 20000 10.1.1.2");
    let status = world.status();
    assert_eq!(status.vifs.len(), 2);
    assert!(status.vifs.iter().all(|vif| vif.connected && vif.rules.is_empty()), "{status:?}");
    // One guest leaves in an orderly way. The daemon keeps nothing of it.
    assert_eq!(one.end().status, Some(0));
    assert!(eventually(MOMENT, || world.status().vifs.iter().filter(|v| v.connected).count() == 1));
    assert_eq!(serve.end().status, Some(0));
    assert_eq!(two.end().status, Some(0));
    world.hub.end();
}

/// Returns `true` if the frontend of a domain announced a grant window.
fn has_window(world: &mut World, number: u16) -> bool {
    let key = format!("/local/domain/{number}/device/vif/0/ringfence-tx-window");
    world.toolstack.read(&key).is_ok()
}

#[test]
fn frontend_with_windows_option_uses_grant_windows() {
    require!(Need::Root, Need::Program("ip", "iproute2"), Need::Program("ping", "iputils-ping"));
    for (mode, opened) in [("window", true), ("copy", false)] {
        let mut world = World::new();
        let text = format!("[network]\nattach = 'switch'\nmode = '{mode}'\n");
        std::fs::write(world.lab.file("serve.toml"), text).unwrap();
        let serve = world.serve(&[]);
        let one = world.attach_with(2, &["--windows"]);
        let two = world.attach(3);
        assert_eq!((has_window(&mut world, 2), has_window(&mut world, 3)), (opened, false));
        if !opened {
            one.wait_for_error("buffers are not in windows: the backend does not open them");
        }
        world.inside(&one, "ip link set eth7 up; ip address add 10.1.1.1/24 dev eth7");
        world.inside(&two, "ip link set eth7 up; ip address add 10.1.1.2/24 dev eth7");
        world.inside(&one, "ping -c 3 -i 0.1 -w 60 -s 20000 10.1.1.2");
        assert!(world.status().vifs.iter().all(|vif| vif.connected && vif.rules.is_empty()));
        kill_process(one.pid(), Signal::USR1).unwrap();
        one.wait_for_error(if opened { "grant windows: reused " } else { "no grant windows" });
        assert_eq!(serve.end().status, Some(0));
        assert_eq!(one.end().status, Some(0));
        assert_eq!(two.end().status, Some(0));
        world.hub.end();
    }
}

/// Creates the network of a host, with a bridge, for any daemon.
fn host_with_bridge(lab: &Lab) -> Running {
    // /sys shows the network namespace of the process that mounted it.
    let bridge = "mount -t sysfs sysfs /sys; ip link add xenbr0 type bridge; ip link set xenbr0 up; \
                  ip address add 10.1.1.254/24 dev xenbr0; echo made; exec sleep 1000000";
    let host = lab.spawn(&["unshare", "--net", "--mount", "sh", "-ec", bridge]);
    host.wait_for_output("made");
    host
}

#[test]
#[ignore = "long: connections until each queue was used"]
fn multiqueue_frontend_reaches_bridge_through_all_queues() {
    require!(Need::Root, Need::Program("ip", "iproute2"), Need::Program("python3", "python3"));
    let mut world = World::new();
    let text = "[network]\nattach = 'bridge'\nbridge = 'xenbr0'\nmax-queues = 2\n";
    std::fs::write(world.lab.file("serve.toml"), text).unwrap();
    let host = host_with_bridge(&world.lab);
    let pid = host.pid().as_raw_nonzero().to_string();
    let within = ["nsenter", "--target", &pid, "--net", "--mount"];
    let serve = world.serve_in(&within, &[]);
    let guest = world.attach_with(2, &["--queues", "2"]);
    world.inside(&guest, "ip link set eth7 up; ip address add 10.1.1.1/24 dev eth7");
    let dir = world.lab.file("served");
    std::fs::create_dir(&dir).unwrap();
    write_noise(&dir.join("noise"), 4);
    let server = {
        let pid = guest.pid().as_raw_nonzero().to_string();
        let dir = dir.to_str().unwrap();
        let words = ["nsenter", "--target", &pid, "--net", "python3", "-m", "http.server"];
        world.lab.spawn(&[&words[..], &["--bind", "10.1.1.1", "--directory", dir]].concat())
    };
    let listens = || world.inside(&guest, "ss -ltn").contains(":8000 ");
    assert!(eventually(MOMENT, listens));
    let expected = sha256(&dir.join("noise"));
    let transfer = |world: &World| {
        let get = "python3 -c 'import hashlib, urllib.request as r; \
                   print(hashlib.sha256(r.urlopen(\"http://10.1.1.1:8000/noise\").read()).hexdigest())'";
        let got = world.inside(&host, get);
        assert_eq!(got.split_whitespace().next(), Some(expected.as_str()));
    };
    // The kernel chooses the queue of a connection. Eight connections almost certainly use both.
    (0..8).for_each(|_| transfer(&world));
    let [vif] = &world.status().vifs[..] else { panic!("one guest") };
    assert!(vif.connected && vif.queue_count == 2 && vif.rules.is_empty(), "{vif:?}");
    assert_eq!(serve.end().status, Some(0));
    for process in [server, guest, host] {
        process.end();
    }
    world.hub.end();
}

#[test]
fn mtu_changed_on_host_is_followed_for_connected_guest() {
    require!(Need::Root, Need::Program("ip", "iproute2"));
    let mut world = World::new();
    let text = "[network]\nattach = 'bridge'\nbridge = 'xenbr0'\n";
    std::fs::write(world.lab.file("serve.toml"), text).unwrap();
    let host = host_with_bridge(&world.lab);
    let pid = host.pid().as_raw_nonzero().to_string();
    let serve = world.serve_in(&["nsenter", "--target", &pid, "--net", "--mount"], &[]);
    let guest = world.attach(2);
    let mtu = |world: &World| world.status().vifs.first().map(|vif| (vif.connected, vif.mtu));
    assert_eq!(mtu(&world), Some((true, 1500)));
    for wanted in [9000, 1400] {
        world.inside(&host, &format!("ip link set vif2.0 mtu {wanted}"));
        assert!(eventually(MOMENT, || mtu(&world) == Some((true, wanted))), "{:?}", mtu(&world));
    }
    assert_eq!(serve.end().status, Some(0));
    for process in [guest, host] {
        process.end();
    }
    world.hub.end();
}

/// libxl writes the key `bridge` for each interface, also for those that a script connects in another way.
#[test]
fn tap_of_vif_with_another_script_joins_no_bridge() {
    require!(Need::Root, Need::Program("ip", "iproute2"));
    let mut world = World::new();
    std::fs::write(world.lab.file("serve.toml"), "[network]\nattach = 'bridge'\n").unwrap();
    let host = host_with_bridge(&world.lab);
    let pid = host.pid().as_raw_nonzero().to_string();
    let serve = world.serve_in(&["nsenter", "--target", &pid, "--net", "--mount"], &[]);
    // A daemon before has left this one, with an address of the script's.
    let left = "ip tuntap add vif4.0 mode tap multi_queue vnet_hdr; ip link set vif4.0 address 02:00:00:00:00:99";
    world.inside(&host, left);
    let cases = [
        (2, "vif-ringfence", true, "fe:ff:ff:ff:ff:ff"),
        (3, "vif-route", false, "fe:ff:ff:ff:ff:ff"),
        (4, "vif-route", false, "02:00:00:00:00:99"),
    ];
    for (number, script, bridge, address) in cases {
        let frontend = DomId(number);
        let device = DeviceId { kind: DeviceKind::Vif, frontend, backend: DRIVER, handle: 0 };
        let backend = [
            ("mac", format!("02:00:00:00:00:0{number}")),
            ("bridge", "xenbr0".to_owned()),
            ("script", format!("/etc/xen/scripts/{script}")),
        ];
        world.create(&device, DeviceEntries { frontend: &[], backend: &backend });
        let state = format!("{}/state", device.backend_path());
        let mut waits = || world.toolstack.read(&state).as_deref() == Ok(&b"2"[..]);
        assert!(eventually(MOMENT, &mut waits), "{:?}", world.status().vifs);
        // The script runs now, and finds the interface.
        let link = world.inside(&host, &format!("ip -o link show vif{number}.0"));
        assert!(link.contains(address), "{link}");
        assert_eq!(link.contains("master xenbr0"), bridge, "{link}");
    }
    assert_eq!(serve.end().status, Some(0));
    host.end();
    world.hub.end();
}

#[test]
fn daemon_closes_devices_on_request_and_second_daemon_is_refused() {
    require!(Need::Root, Need::Program("ip", "iproute2"));
    let mut world = World::new();
    let serve = world.serve(&["--on-exit", "close"]);
    let one = world.attach(2);
    let another = world.lab.spawn(&[
        env!("CARGO_BIN_EXE_ringfence"),
        "serve",
        "--platform",
        &world.platform(),
        "--runtime-dir",
        world.lab.file("run").to_str().unwrap(),
    ]);
    let refused = another.finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    let pid = serve.pid().as_raw_nonzero().to_string();
    let says = format!("another `ringfence serve` runs in this domain, process {pid}");
    assert!(refused.stderr.contains(&says), "{}", refused.stderr);
    kill_process(serve.pid(), Signal::TERM).unwrap();
    one.wait_for_error("disconnected");
    let closed = serve.finish(MOMENT);
    assert_eq!(closed.status, Some(0));
    assert!(!closed.stderr.contains("did not let go"), "{}", closed.stderr);
    let state = world.toolstack.read("/local/domain/2/device/vif/0/state").unwrap();
    assert_eq!(state, b"6");
    assert!(!world.lab.file("run/records/vif2.0").exists());
    one.end();
    world.hub.end();
}

#[test]
fn control_ring_message_is_answered_by_daemon() {
    require!(Need::Root, Need::Built("ringfence-bench"));
    let mut world = World::new();
    std::fs::write(
        world.lab.file("serve.toml"),
        "[network]\nattach = 'switch'\nmode = 'staging'\n",
    )
    .unwrap();
    let serve = world.serve(&[]);
    world.plug_in(2);
    let platform = world.platform();
    let program = beside_product("ringfence-bench");
    let program = program.to_str().unwrap();
    let words = [program, "internal", "control-ring", "--platform", &platform, "--pages", "20"];
    let asked = world.lab.spawn(&words).finish(Duration::from_secs(60));
    assert_eq!(asked.status, Some(0), "{}{}", asked.stdout, asked.stderr);
    assert!(asked.stdout.contains("all 10 kinds of messages"), "{}", asked.stdout);
    // The daemon unmaps what the frontend leaves, after the frontend has ended.
    let path = || world.status().daemon.path;
    let is_unmapped = || path().get("grant_maps") == path().get("grant_unmaps");
    assert!(eventually(MOMENT, is_unmapped), "{:?}", path());
    assert_eq!(serve.end().status, Some(0));
    world.hub.end();
}
