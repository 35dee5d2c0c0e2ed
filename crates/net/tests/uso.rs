//! UDP segmentation offload: packets of many datagrams, from a sender that uses `UDP_SEGMENT`, to a socket in
//! another namespace that counts the datagrams.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::UdpSocket;

use ringfence_access::Mode;
use ringfence_frame::Port as _;
use ringfence_frame::PortCounters;
use ringfence_frame::tap::TapPort;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_platform::Counters;
use ringfence_switch::dataplane::{DataplaneConfig, DataplaneHandle, DataplaneWorker};
use ringfence_switch::forwarding::{Fabric, PortPolicy, Switch};
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_sys::testing::skip;
use std::sync::Arc;

use support::peer::{receive, send_segmented, socket_towards};
use support::world::{MTU, World};
use support::{Peer, in_namespaces, ip, set_up};

const USO: TapOffloads = TapOffloads::USO4.union(TapOffloads::USO6);

const TOO_OLD: &str = "this kernel (before Linux 6.2) leaves no UDP packet whole on a TAP";

/// Bytes of one send: 43 datagrams, of which the last one is shorter.
const EACH: usize = 60_000;
const SIZE: u16 = 1400;
const DATAGRAMS: u64 = 43;
/// Number of sequential sends, few enough for the sockets' buffers.
const SENDS: u64 = 20;

const ADDRESSES: [&str; 2] = ["10.9.0.2:7000", "[fd00:9::2]:7000"];

/// Returns true if this kernel leaves UDP packets whole on a TAP.
fn kernel_knows(tap: &Tap) -> bool {
    let knows = tap.offloads.contains(USO);
    if !knows {
        skip(TOO_OLD);
    }
    knows
}

/// Sends to the peer, and checks what it received.
fn to_peer(peer: &mut Peer, to: &str) {
    peer.call(&format!("bind {to}"));
    let socket = socket_towards(to);
    for n in 0..SENDS {
        peer.send_command(&format!("receive {EACH}"));
        let sent = send_segmented(&socket, 1, EACH, SIZE);
        assert_eq!(peer.response(), sent, "datagrams, bytes, hash of send {n} to {to}");
        assert!(sent.starts_with(&format!("{DATAGRAMS} {EACH} ")), "{sent}");
    }
}

/// Two namespaces with a switch between their TAPs.
struct Bridge {
    peer: Peer,
    a: Arc<PortCounters>,
    b: Arc<PortCounters>,
    worker: DataplaneHandle,
}

impl Bridge {
    /// Makes a bridge with these offloads on the far TAP.
    fn new(mut peer: Peer, far: TapOffloads) -> Option<Bridge> {
        let (a, mut b) = (Tap::create("rfa").unwrap(), Tap::create("rfb").unwrap());
        if !kernel_knows(&a) {
            return None;
        }
        b.limit_offloads(far).unwrap();
        ip(&format!("link set rfb netns {}", peer.id()));
        set_up("rfa", 1, 1500);
        peer.call("up rfb 2 1500");
        let system = Arc::new(Counters::default());
        let fabric = Fabric::Switch(Switch::new());
        let config = DataplaneConfig::default();
        let (dataplane, worker) =
            DataplaneWorker::new(fabric, config, Arc::clone(&system), |_| {}).unwrap();
        std::thread::spawn(move || dataplane.run());
        let [a, b] = [a, b].map(|tap| {
            let port = TapPort::new(tap.fd, tap.offloads, 1500, Arc::clone(&system));
            let counters = Arc::clone(port.counters());
            worker.add_port(Box::new(port), PortPolicy::default(), &tap.name).unwrap();
            counters
        });
        Some(Bridge { peer, a, b, worker })
    }
}

#[test]
fn datagrams_from_tap_to_tap_go_whole() {
    in_namespaces("datagrams_from_tap_to_tap_go_whole", |peer| {
        let Some(bridge) = Bridge::new(peer(), TapOffloads(u32::MAX)) else { return };
        let Bridge { mut peer, a, b, worker } = bridge;
        for (n, to) in (1..).zip(ADDRESSES) {
            to_peer(&mut peer, to);
            // Read the counters between two rounds, when all sent frames were counted.
            worker.stats().unwrap();
            assert_eq!((b.frames_whole.get(), b.tx_gso.get()), (n * SENDS, n * SENDS), "{to}");
        }
        assert_eq!((b.segments_made.get(), b.checksums_computed.get()), (0, 0));
        assert_eq!(b.frames_coalesced.get(), 0);
        // The kernels also sent ARP and neighbor discovery.
        assert!(a.rx_frames.get() < 2 * SENDS + 30, "{}", a.rx_frames.get());
    });
}

/// Checks that datagrams are split for a TAP that does not accept them whole.
fn split_for(peer: Peer, far: TapOffloads) {
    let Some(Bridge { mut peer, b, worker, .. }) = Bridge::new(peer, far) else { return };
    for to in ADDRESSES {
        to_peer(&mut peer, to);
    }
    worker.stats().unwrap();
    assert_eq!((b.frames_segmented.get(), b.frames_whole.get()), (2 * SENDS, 0));
    assert_eq!(b.segments_made.get(), 2 * SENDS * DATAGRAMS);
}

#[test]
fn datagrams_to_tap_without_uso_are_split() {
    in_namespaces("datagrams_to_tap_without_uso_are_split", |peer| {
        split_for(peer(), TapOffloads::CSUM.union(TapOffloads::TSO4));
    });
}

#[test]
fn datagrams_to_tap_without_offloads_are_split() {
    in_namespaces("datagrams_to_tap_without_offloads_are_split", |peer| {
        split_for(peer(), TapOffloads(0));
    });
}

/// Checks both directions over a vif; netif cannot express UDP segmentation.
fn over_a_vif(peer: Peer, mode: Mode) {
    let mut world = World::new(peer);
    if !world.taps_support(USO) {
        return skip(TOO_OLD);
    }
    let mut back = VifBackend::new(world.device, BackendOptions { mode, mtu: MTU });
    let mut front = world.front.take().unwrap();
    world.connect(&mut back, &mut front);
    for to in ADDRESSES {
        to_peer(&mut world.peer, to);
    }
    world.settle();
    // The TAP behind netback accepts whole datagrams.
    let (vif, tap) = (&world.guest.counters, &world.driver.tap);
    assert_eq!((vif.frames_segmented.get(), vif.tx_gso.get()), (2 * SENDS, 0));
    assert_eq!(vif.segments_made.get(), 2 * SENDS * DATAGRAMS);
    assert!(tap.frames_coalesced.get() > SENDS * DATAGRAMS, "{:?}", tap.named());

    for (any, to) in [("0.0.0.0", "10.9.0.1"), ("[::]", "[fd00:9::1]")] {
        let socket = UdpSocket::bind(format!("{any}:7001")).unwrap();
        for _ in 0..SENDS {
            world.peer.send_command(&format!("send {to}:7001 1 {EACH} {SIZE}"));
            let got = receive(&socket, EACH);
            assert_eq!(world.peer.response(), got, "{to}");
        }
    }
    world.settle();
    let (vif, tap) = (&world.driver.counters, &world.guest.tap);
    assert_eq!((vif.frames_segmented.get(), vif.tx_gso.get()), (2 * SENDS, 0));
    assert_eq!(vif.segments_made.get(), 2 * SENDS * DATAGRAMS);
    assert_eq!(tap.frames_coalesced.get(), 0, "nothing is joined in a patch");
}

#[test]
fn datagrams_over_vif_are_split() {
    in_namespaces("datagrams_over_vif_are_split", |peer| {
        over_a_vif(peer(), Mode::Copy);
    });
}

#[test]
fn datagrams_over_vif_in_map_mode_are_split() {
    in_namespaces("datagrams_over_vif_in_map_mode_are_split", |peer| {
        over_a_vif(peer(), Mode::Map);
    });
}
