//! Every set of offload keys with every other one, with TCP of real kernels at both ends.
//!
//! Both kernels leave all offloads to the TAP's reader, so that the data path does all that the other side
//! does not accept. For each pair of sets the vif connects again and TCP runs both ways over IPv4 and IPv6.
//! The test checks the ports' counters for the offloads that were used.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::SocketAddr;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

use ringfence_access::Mode;
use ringfence_frame::{DropReason, PortCounters};
use ringfence_net::features::OffloadKeys;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};

use support::world::{MTU, Side, World};
use support::{Peer, in_namespaces, tcp};

/// Bytes of a connection in each direction. They fit the rings with any segmentation, so that no frame is
/// lost and no pair waits for a retransmission.
const BYTES: usize = 128 << 10;

/// MTU for pairs in which packets have one slot only.
const SMALL: u16 = 1500;

const ADDRESSES: [&str; 2] = ["10.9.0.2:5001", "[fd00:9::2]:5001"];

/// Connects the vif with these keys, runs TCP, and checks the offloads that were used.
fn check(world: &mut World, mode: Mode, pair: Pair) {
    world.set_mtu(if pair.sg() { MTU } else { SMALL });
    let options = BackendOptions { mode, mtu: MTU };
    let mut back = VifBackend::new(world.device, options).with_offloads(pair.back);
    let mut front = world.front.take().unwrap().with_offloads(pair.front);
    world.connect(&mut back, &mut front);
    for (family, to) in ADDRESSES.into_iter().enumerate() {
        let seen = uses(world);
        let sum = |side: &Side| side.tap.frames_coalesced.get();
        let joined = sum(&world.guest);
        tcp::both_ways(to.parse::<SocketAddr>().unwrap(), pair.seed(), BYTES);
        assert_eq!(world.peer.response(), "ended");
        world.settle();
        let used = uses(world);
        for (n, keys) in [pair.back, pair.front].into_iter().enumerate() {
            used[n].since(seen[n]).check_used(keys, family == 1, &pair.to_string());
        }
        assert_eq!(sum(&world.guest), joined, "{pair}: the two ends of a patch are one guest's");
    }
    for rules in [back.rules(), front.rules()] {
        assert!(rules.all().is_empty(), "{pair}: {:?}", rules.all());
    }
    for side in [&world.guest, &world.driver] {
        assert_eq!(side.gone.try_recv(), Err(TryRecvError::Empty), "{pair}");
        // The kernel may have sent frames while the vif was disconnected.
        let unheard = side.tap.drops(DropReason::NoDestination);
        let lost = side.counters.drops_total() + side.tap.drops_total() - unheard;
        assert_eq!(lost, 0, "{pair}: {:?} {:?}", side.counters.named(), side.tap.named());
    }
    world.disconnect(&mut back, &mut front);
    world.front = Some(front);
}

/// Returns the offloads used by the frontend and by the backend.
fn uses(world: &World) -> [Uses; 2] {
    [Uses::of(&world.guest.counters), Uses::of(&world.driver.counters)]
}

/// Numbers of frames that a vif's port sent with each offload.
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

    /// Checks that each offload was used if, and only if, the receiver's `keys` include it.
    fn check_used(self, keys: OffloadKeys, v6: bool, what: &str) {
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

/// Offloads that each end accepts.
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

    /// Returns a seed that differs for each pair.
    fn seed(&self) -> u64 {
        self.to_string().bytes().fold(1, |seed, byte| seed * 31 % (1 << 40) + u64::from(byte))
    }
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "frontend takes {}, backend takes {}", self.front, self.back)
    }
}

/// Returns the set with this number. The last 16 sets have `sg`.
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

/// Checks every pair of sets, each in the mode that `mode` returns.
fn check_all(peer: &dyn Fn() -> Peer, mode: impl Fn(u32, u32) -> Mode) {
    let mut world = World::new(peer());
    let start = Instant::now();
    for front in 0..SETS {
        for back in 0..SETS {
            check(&mut world, mode(front, back), Pair::new(front, back));
        }
        println!("{} of {} pairs, {:.1?}", (front + 1) * SETS, SETS * SETS, start.elapsed());
    }
}

/// Variable set by `cargo xtask soak features`: checks all pairs in each mode.
const EACH_MODE: &str = "RINGFENCE_TEST_EACH_MODE";

#[test]
#[ignore = "long: 1024 connected vifs"]
fn every_pair_of_offload_sets_carries_tcp() {
    in_namespaces("every_pair_of_offload_sets_carries_tcp", |peer| {
        if std::env::var_os(EACH_MODE).is_some() {
            for mode in Mode::NETWORK {
                println!("mode {mode}");
                check_all(peer, |_, _| mode);
            }
            return;
        }
        // Each key of each side is tested in every mode.
        check_all(peer, |front, back| {
            Mode::NETWORK[(front ^ back).count_ones() as usize % Mode::NETWORK.len()]
        });
    });
}
