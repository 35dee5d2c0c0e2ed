//! Every set of offload keys beside every other one, with TCP of real kernels at both ends.
//!
//! One network namespace is the guest: its kernel's TAP is patched to netfront. Another is the driver
//! domain's: its kernel's TAP is on a switch with netback. Both kernels leave to the TAP's reader whatever
//! they can, so that everything that the other side does not take has to be done on the way. For each pair
//! the vif connects anew, TCP runs both ways over IPv4 and IPv6, and the ports' counters say what was made
//! use of.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::SocketAddr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ringfence_grants::Mode;
use ringfence_net::dataplane::{Dataplane, DataplaneConfig, DataplaneHandle, PortId};
use ringfence_net::features::OffloadKeys;
use ringfence_net::switch::{Fabric, Patch, PortPolicy, Switch};
use ringfence_net::tap::TapPort;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_net::{DropReason, Port, PortCounters};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::store::{StoreAccess, StoreClient};
use ringfence_platform::tap::Tap;
use ringfence_platform::{Counters, DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};

use support::{Peer, in_namespaces, ip, tcp};

/// What a connection carries each way. It fits the rings however it is cut, so that nothing is lost and
/// no pair waits for a retransmission.
const OCTETS: usize = 128 << 10;

/// The MTU where a packet may take several slots, and where it may not.
const LARGE: u16 = 8000;
const SMALL: u16 = 1500;

const ADDRESSES: [&str; 2] = ["10.9.0.2:5001", "[fd00:9::2]:5001"];

/// A side's ports come and go in its data plane.
struct Side {
    plane: DataplaneHandle,
    port: Option<PortId>,
    counters: Arc<PortCounters>,
    /// The kernel's interface on that side.
    tap: Arc<PortCounters>,
    gone: Receiver<String>,
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
    fn new(fabric: Fabric, tap: Tap) -> Side {
        let system = Arc::new(Counters::default());
        let (tell, gone) = mpsc::channel();
        let on_gone = move |port: ringfence_net::dataplane::PortGone| {
            let _ = tell.send(format!("{}: {}", port.name, port.reason));
        };
        let config = DataplaneConfig::default();
        let (dataplane, plane) =
            Dataplane::new(fabric, config, Arc::clone(&system), on_gone).unwrap();
        std::thread::spawn(move || dataplane.run());
        let port = TapPort::new(tap.fd, tap.offloads, LARGE, system);
        let tap = Arc::clone(port.counters());
        plane.add_port(Box::new(port), PortPolicy::default(), "tap").unwrap();
        Side { plane, port: None, counters: Arc::default(), tap, gone }
    }
}

/// Two kernels with a vif between them.
struct World {
    peer: Peer,
    hub: HubHandle,
    platforms: [LocalPlatform; 2],
    stores: [StoreClient; 2],
    device: DeviceId,
    front: Option<VifFrontend<LocalPlatform>>,
    guest: Side,
    driver: Side,
    mtu: u16,
}

impl Drop for World {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl World {
    fn new(mut peer: Peer) -> World {
        let taps = ["rfa", "rfb"].map(|name| Tap::create(name).unwrap());
        ip(&format!("link set rfb netns {}", peer.id()));
        let set_up = |name: &str, host: u8| {
            [
                format!("link set {name} address 02:00:00:00:00:0{host} mtu {LARGE} up"),
                format!("address add 10.9.0.{host}/24 dev {name}"),
                format!("address add fd00:9::{host}/64 dev {name} nodad"),
            ]
        };
        set_up("rfa", 1).iter().for_each(|args| ip(args));
        for args in set_up("rfb", 2) {
            peer.tell(&format!("ip {args}"));
        }
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
        let config = VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: LARGE };
        toolstack::create(&mut stores[0], &device, config).unwrap();
        let front = Some(VifFrontend::new(&platforms[1], device, LARGE).unwrap());
        let [a, b] = taps;
        let guest = Side::new(Fabric::Patch(Patch::new()), a);
        let driver = Side::new(Fabric::Switch(Switch::new()), b);
        World { peer, hub, platforms, stores, device, front, guest, driver, mtu: LARGE }
    }

    fn set_mtu(&mut self, mtu: u16) {
        if mtu != self.mtu {
            ip(&format!("link set rfa mtu {mtu}"));
            self.peer.tell(&format!("ip link set rfb mtu {mtu}"));
            self.mtu = mtu;
        }
    }

    /// Connects the vif with these keys, lets TCP run, and checks what was made use of.
    fn check(&mut self, mode: Mode, pair: Pair) {
        self.set_mtu(if pair.sg() { LARGE } else { SMALL });
        let options = BackendOptions { mode, mtu: LARGE };
        let mut back = VifBackend::new(self.device, options).with_offloads(pair.back);
        let mut front = self.front.take().unwrap().with_offloads(pair.front);
        self.connect(&mut back, &mut front);
        for (family, to) in ADDRESSES.into_iter().enumerate() {
            let seen = self.uses();
            let sum = |side: &Side| side.tap.frames_coalesced.get();
            let joined = sum(&self.guest);
            tcp::both_ways(to.parse::<SocketAddr>().unwrap(), pair.seed(), OCTETS);
            assert_eq!(self.peer.answer(), "ended");
            self.settle();
            let used = self.uses();
            for (n, keys) in [pair.back, pair.front].into_iter().enumerate() {
                used[n].since(seen[n]).are_within(keys, family == 1, &pair.to_string());
            }
            assert_eq!(sum(&self.guest), joined, "{pair}: the two ends of a patch are one guest's");
        }
        for rules in [back.rules(), front.rules()] {
            assert!(rules.all().is_empty(), "{pair}: {:?}", rules.all());
        }
        for side in [&self.guest, &self.driver] {
            assert_eq!(side.gone.try_recv(), Err(mpsc::TryRecvError::Empty), "{pair}");
            // While the vif was away, its kernel may have had something to say to nobody.
            let unheard = side.tap.drops(DropReason::NoDestination);
            let lost = side.counters.drops_total() + side.tap.drops_total() - unheard;
            assert_eq!(lost, 0, "{pair}: {:?} {:?}", side.counters.named(), side.tap.named());
        }
        self.disconnect(&mut back, &mut front);
        self.front = Some(front);
    }

    fn connect(&mut self, back: &mut VifBackend, front: &mut VifFrontend<LocalPlatform>) {
        let until = Instant::now() + Duration::from_secs(5);
        let [back_store, front_store] = &mut self.stores;
        while !front.is_up() {
            assert!(Instant::now() < until, "no connection");
            back.look(&self.platforms[0], back_store, &mut self.driver).unwrap();
            front.look(&self.platforms[1], front_store, &mut self.guest).unwrap();
        }
    }

    fn disconnect(&mut self, back: &mut VifBackend, front: &mut VifFrontend<LocalPlatform>) {
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
    fn settle(&self) {
        for side in [&self.guest, &self.driver].into_iter().cycle().take(4) {
            side.plane.stats().unwrap();
            side.plane.stats().unwrap();
        }
    }

    /// What the frontend sent, and what the backend sent.
    fn uses(&self) -> [Uses; 2] {
        [Uses::of(&self.guest.counters), Uses::of(&self.driver.counters)]
    }
}

/// How many frames a vif's port sent by which offload.
#[derive(Clone, Copy)]
struct Uses {
    gso: u64,
    chained: u64,
    blank: u64,
}

impl Uses {
    fn of(counters: &PortCounters) -> Uses {
        Uses {
            gso: counters.tx_gso.get(),
            chained: counters.tx_chained.get(),
            blank: counters.tx_blank.get(),
        }
    }

    fn since(self, before: Uses) -> Uses {
        Uses {
            gso: self.gso - before.gso,
            chained: self.chained - before.chained,
            blank: self.blank - before.blank,
        }
    }

    /// Each was used if, and only if, `keys` of whom it was sent to say so.
    fn are_within(self, keys: OffloadKeys, v6: bool, what: &str) {
        let (gso, blank) = if v6 {
            (keys.gso_tcp_v6, keys.checksum_ipv6)
        } else {
            (keys.gso_tcp_v4, keys.checksum_ipv4)
        };
        let Uses { gso: sent_gso, chained, blank: sent_blank } = self;
        let all = format!("{what}, taken: {keys}, IPv6: {v6}: {sent_gso}, {chained}, {sent_blank}");
        assert_eq!(sent_blank > 0, blank, "blank checksums; {all}");
        // A super-packet has a blank checksum.
        assert!(sent_gso == 0 || gso && blank, "super-packets; {all}");
        assert!(chained == 0 || keys.scatter_gather, "several slots; {all}");
        if keys.scatter_gather && gso && blank {
            assert!(sent_gso > 0 && chained > 0, "super-packets in several slots; {all}");
        }
    }
}

/// What each end takes.
#[derive(Clone, Copy)]
struct Pair {
    front: OffloadKeys,
    back: OffloadKeys,
}

impl Pair {
    fn new(front: u32, back: u32) -> Pair {
        Pair { front: keys(front), back: keys(back) }
    }

    fn sg(&self) -> bool {
        self.front.scatter_gather && self.back.scatter_gather
    }

    /// Other octets for each.
    fn seed(&self) -> u64 {
        self.to_string().bytes().fold(1, |seed, octet| seed * 31 % (1 << 40) + u64::from(octet))
    }
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "frontend takes {}, backend takes {}", self.front, self.back)
    }
}

/// The sets by number. The last 16 have `sg`.
fn keys(number: u32) -> OffloadKeys {
    let bit = |n: u32| number >> n & 1 == 1;
    OffloadKeys {
        scatter_gather: bit(4),
        gso_tcp_v4: bit(0),
        gso_tcp_v6: bit(1),
        checksum_ipv4: bit(2),
        checksum_ipv6: bit(3),
    }
}

const SETS: u32 = 32;

/// Every pair in some mode.
fn check_all(peer: &dyn Fn() -> Peer, mode: impl Fn(u32, u32) -> Mode) {
    let mut world = World::new(peer());
    let start = Instant::now();
    for front in 0..SETS {
        for back in 0..SETS {
            world.check(mode(front, back), Pair::new(front, back));
        }
        println!("{} of {} pairs, {:.1?}", (front + 1) * SETS, SETS * SETS, start.elapsed());
    }
}

/// Set by `cargo xtask soak features`: all pairs in each mode.
const EACH_MODE: &str = "RINGFENCE_TEST_EACH_MODE";

#[test]
fn every_set_of_keys_understands_every_other() {
    in_namespaces("every_set_of_keys_understands_every_other", |peer| {
        if std::env::var_os(EACH_MODE).is_some() {
            for mode in Mode::ALL {
                println!("mode {mode}");
                check_all(peer, |_, _| mode);
            }
            return;
        }
        // Each key of each side meets both modes.
        check_all(peer, |front, back| Mode::ALL[(front ^ back).count_ones() as usize % 2]);
    });
}
