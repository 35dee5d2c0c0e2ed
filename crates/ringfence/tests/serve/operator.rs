//! Operation of `ringfence serve` without a hypervisor. The daemon is a domain of a hub, the test is the toolstack and
//! the guests, and the guests are on the daemon's switch.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::lab::{DRIVER, Lab, wait_until};
use ringfence_driver::xen::status::VifStatus;
use ringfence_frame::Batch;
use ringfence_frame::port::Port;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_sys::testing::FreePort;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::process::Signal;

const MINE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const FOREIGN: [u8; 6] = [2, 0, 0, 0, 0, 99];

impl Lab {
    /// Starts a daemon with these lines in its configuration, besides those that a test without a hypervisor needs.
    fn new(lines: &str) -> Lab {
        Lab::start(|dir| configure(dir, lines))
    }

    fn vif(&self, of: &Guest) -> VifStatus {
        let vifs = self.status().vifs;
        vifs.into_iter().find(|vif| vif.domain == of.device.frontend.0).unwrap_or_default()
    }

    fn counter(&self, of: &Guest, name: &str) -> u64 {
        self.vif(of).queues.iter().filter_map(|queue| queue.counters.get(name)).sum()
    }

    fn logged(&self, text: &str) {
        wait_until(text, || self.log().contains(text));
    }

    fn reload(&self, lines: &str) {
        configure(self.dir.path(), lines);
        self.signal(Signal::HUP);
    }

    /// Writes a key into a device's backend directory, as the toolstack does.
    fn toolstack(&mut self, of: &Guest, key: &str, value: &str) {
        self.write(&of.device, key, value);
    }

    /// Creates a guest with an interface that is not connected yet.
    fn guest(&mut self, mac: [u8; 6]) -> Guest {
        let (_, socket) = self.hub.admit(None, false).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let device = DeviceId {
            kind: DeviceKind::Vif,
            frontend: platform.domid(),
            backend: DRIVER,
            handle: 0,
        };
        toolstack::create(&mut self.store, &device, VifConfig { mac, mtu: 1500 }).unwrap();
        let front = VifFrontend::new(&platform, device, 1500).unwrap();
        let store = platform.store().unwrap();
        Guest { platform, store, front, port: Holder(None), device, batch: Batch::default() }
    }

    /// Creates a guest and connects its interface.
    fn connected(&mut self, mac: [u8; 6]) -> Guest {
        let mut guest = self.guest(mac);
        guest.connect();
        guest
    }
}

fn configure(dir: &Path, lines: &str) {
    // Keys of [network] come first, because the lines of a test may begin with more of them.
    let text = format!("[network]\nattach = 'switch'\n{lines}\n");
    std::fs::write(dir.join("ringfence.toml"), text).unwrap();
}

struct Holder(Option<Box<dyn Port>>);

impl PortHost for Holder {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }

    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }
}

struct Guest {
    platform: LocalPlatform,
    store: StoreClient,
    front: VifFrontend<LocalPlatform>,
    port: Holder,
    device: DeviceId,
    batch: Batch,
}

impl Guest {
    fn look(&mut self) {
        self.front.look(&self.platform, &mut self.store, &mut self.port).unwrap();
    }

    fn connect(&mut self) {
        wait_until("a guest connects", || {
            self.look();
            self.front.is_up()
        });
    }

    /// Disconnects and connects again, as a driver does that is unbound and bound.
    fn reconnect(&mut self) {
        self.front.close(&mut self.store, &mut self.port).unwrap();
        self.await_backend(XenbusState::Closed);
        let state = format!("{}/state", self.device.frontend_path());
        self.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
        self.await_backend(XenbusState::InitWait);
        self.connect();
    }

    fn await_backend(&mut self, state: XenbusState) {
        let path = format!("{}/state", self.device.backend_path());
        wait_until("the backend follows", || {
            XenbusState::parse(&self.store.read(&path).unwrap()) == Ok(state)
        });
    }

    /// Sends `count` frames of 1000 bytes.
    fn send(&mut self, to: [u8; 6], from: [u8; 6], count: usize) {
        let mut frame = vec![0x5A; 1000];
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&from);
        frame[12..14].copy_from_slice(&[0x88, 0xB5]);
        let port = self.port.0.as_mut().unwrap();
        // Completed requests make room for more frames.
        port.receive(&mut self.batch, 64).unwrap();
        self.batch.clear();
        port.complete().unwrap();
        for _ in 0..count {
            let at = self.batch.reserve(frame.len()).unwrap();
            self.batch.scratch_mut(at..at + frame.len()).unwrap().copy_from_slice(&frame);
            self.batch.push_contiguous(at, frame.len(), OffloadMeta::PLAIN).unwrap();
        }
        let all: Vec<u32> = (0..u32::try_from(count).unwrap()).collect();
        assert_eq!(port.transmit(&self.batch, &all).unwrap().sent, count);
        port.flush().unwrap();
        self.batch.clear();
    }

    /// Returns the source addresses of the received frames.
    fn received_sources(&mut self) -> Vec<[u8; 6]> {
        let port = self.port.0.as_mut().unwrap();
        self.batch.clear();
        port.receive(&mut self.batch, 64).unwrap();
        let sources = self.batch.iter().map(|frame| frame.header()[6..12].try_into().unwrap());
        let sources = sources.collect();
        self.batch.clear();
        port.complete().unwrap();
        port.flush().unwrap();
        sources
    }

    fn receives(&mut self, count: usize) -> Vec<[u8; 6]> {
        let mut all = Vec::new();
        wait_until("frames arrive", || {
            all.extend(self.received_sources());
            all.len() >= count
        });
        all
    }
}

#[test]
fn source_address_is_enforced_until_configuration_disables_it() {
    let mut lab = Lab::new("");
    let (mut one, mut two) = (lab.connected(MINE), lab.connected(PEER));
    one.send(PEER, FOREIGN, 3);
    one.send(PEER, PEER, 1);
    one.send(PEER, MINE, 1);
    assert_eq!(two.receives(1), [MINE]);
    assert_eq!(lab.counter(&one, "drop_spoofed_source"), 4);
    lab.reload("chek-source = false");
    lab.logged("ringfence.toml:3:1: unknown key `chek-source`; did you mean `check-source`?");
    lab.logged("the configuration stays as it was");
    lab.reload("check-source = false");
    lab.logged("network.check-source for devices that connect from now on");
    one.send(PEER, FOREIGN, 1);
    one.send(PEER, MINE, 1);
    assert_eq!(two.receives(1), [MINE], "who is connected keeps what it has");
    one.reconnect();
    one.send(PEER, FOREIGN, 1);
    assert_eq!(two.receives(1), [FOREIGN]);
}

#[test]
fn override_applies_to_named_device_only() {
    let mut lab = Lab::new("[[device]]\nmac = '02:00:00:00:00:01'\ncheck-source = false");
    let (mut one, mut two) = (lab.connected(MINE), lab.connected(PEER));
    one.send(PEER, FOREIGN, 1);
    assert_eq!(two.receives(1), [FOREIGN]);
    two.send(FOREIGN, [2, 0, 0, 0, 0, 98], 1);
    two.send(FOREIGN, PEER, 1);
    assert_eq!(one.receives(1), [PEER]);
}

#[test]
fn features_offered_to_guest_follow_configuration() {
    let mut lab = Lab::new("max-queues = 3\nmulticast-control = false\noffloads = 'sg'");
    let mut one = lab.connected(MINE);
    let offered = |lab: &mut Lab, of: &Guest| {
        ["multi-queue-max-queues", "feature-multicast-control", "feature-gso-tcpv4"].map(|key| {
            let path = format!("{}/{key}", of.device.backend_path());
            lab.store.read_text_opt(&path).unwrap().unwrap_or_default()
        })
    };
    assert_eq!(offered(&mut lab, &one), ["3", "0", "0"]);
    lab.reload("max-queues = 2");
    lab.logged("the configuration was read again");
    assert_eq!(offered(&mut lab, &one), ["3", "0", "0"], "who is connected keeps what it has");
    one.reconnect();
    assert_eq!(offered(&mut lab, &one), ["2", "1", "1"]);
}

#[test]
fn device_without_address_is_not_served_with_source_check() {
    let mut lab = Lab::new("");
    let mut one = lab.guest(MINE);
    lab.toolstack(&one, "mac", "nonsense");
    wait_until("the daemon says why", || {
        let problem = lab.vif(&one).problem;
        problem.is_some_and(|why| why.contains("no usable `mac`"))
    });
    one.look();
    assert!(!one.front.is_up());
    lab.toolstack(&one, "mac", "02:00:00:00:00:01");
    one.connect();
    assert_eq!(lab.vif(&one).problem, None);
}

/// Situation of a guest that migrates to its own host: the new domain connects before the old one is gone.
#[test]
fn address_belongs_to_last_connected_vif() {
    let mut lab = Lab::new("");
    let (old, mut two) = (lab.connected(MINE), lab.connected(PEER));
    let mut new = lab.connected(MINE);
    new.send(PEER, MINE, 1);
    assert_eq!(two.receives(1), [MINE]);
    wait_until("the old one is closed", || {
        let why = lab.vif(&old).problem.unwrap_or_default();
        why == format!("vif{}.0 has its Ethernet address now", new.device.frontend)
    });
    assert!(lab.vif(&new).connected && !lab.vif(&old).connected);
    two.send(MINE, PEER, 1);
    assert_eq!(new.receives(1), [PEER]);
}

#[test]
fn rate_key_applies_at_once() {
    let mut lab = Lab::new("");
    let (mut one, mut two) = (lab.connected(MINE), lab.connected(PEER));
    lab.toolstack(&one, "rate", "2000,200000");
    // The dataplane applies the rate when it polls the port next, with the first of these frames.
    wait_until("the rate holds", || {
        one.send(PEER, MINE, 4);
        let begin = Instant::now();
        two.receives(4);
        // A busy machine delays frames, too.
        begin.elapsed() >= Duration::from_millis(150) && lab.counter(&one, "rate_limited") > 0
    });
    lab.toolstack(&one, "rate", "as much as it likes");
    lab.logged("the rate is unusable");
    assert_eq!(lab.vif(&one).rules.get("rate_unusable"), Some(&1));
}

fn scrape(mut client: impl Read + Write) -> String {
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"), "{answer}");
    answer
}

#[test]
fn metrics_and_log_level_follow_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.sock");
    let quiet = "[serve]\nlog-level = 'error'";
    let mut lab = Lab::new(&format!("[metrics]\nlisten = 'unix:{}'\n{quiet}", path.display()));
    let one = lab.connected(MINE);
    let answer = scrape(UnixStream::connect(&path).unwrap());
    let series = format!("ringfence_vif_connected{{vif=\"vif{}.0\"}} 1\n", one.device.frontend);
    assert!(answer.contains(&series), "{answer}");
    assert_eq!(lab.log(), "", "nothing failed");
    wait_until("the level is another one", || {
        lab.reload("[serve]\nlog-level = 'info'\n[metrics]\nlisten = ''");
        lab.log().contains("metrics.listen when the daemon is started again")
    });
    let port = FreePort::new();
    let _lab = Lab::new(&format!("[metrics]\nlisten = '{}'", port.address()));
    let answer = scrape(TcpStream::connect(port.address()).unwrap());
    assert!(answer.contains("\nringfence_vifs 0\n"), "{answer}");
}

#[test]
fn check_option_validates_configuration_without_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ringfence.toml");
    let check = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence"));
        command.args(["serve", "--check", "--config"]).arg(&path);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let (right, said) = check();
    assert!(!right && said.contains("No such file"), "{said}");
    std::fs::write(&path, include_str!("../../../../dist/ringfence.toml")).unwrap();
    assert!(check().0);
    std::fs::write(&path, "[limits]\ndevices = 0").unwrap();
    let (right, said) = check();
    assert!(!right && said.contains("ringfence.toml:2:11: 0 is not within 1 to 250"), "{said}");
}
