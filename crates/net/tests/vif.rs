//! Vif between two domains of one process: real handshake, rings, grants and channels.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod pair;

use ringfence_access::Mode;
use ringfence_frame::batch::Batch;
use ringfence_frame::port::{ChecksumOffload, Port};
use ringfence_frame::testing::tcp_frame;
use ringfence_net::features::OffloadKeys;
use ringfence_net::vif::backend::Life;
use ringfence_net::vif::toolstack;
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;

use pair::{Pair, carry, frame};
use proptest::prelude::*;

#[test]
fn frames_of_every_size_arrive_both_ways_in_each_mode() {
    let sizes = [14, 60, 64, 255, 256, 257, 1514, 4095, 4096, 4097, 8192, 20_000, 65_000, 65_535];
    let frames: Vec<_> = (1..).zip(sizes).map(|(seed, len)| frame(seed, len)).collect();
    for mode in Mode::NETWORK {
        let mut pair = Pair::new(mode);
        pair.connect();
        if mode == Mode::Staging {
            pair.stage();
        }
        let (front, back) = pair.ports();
        assert_eq!(carry(front, back, &frames), frames, "{mode}, from the guest");
        assert_eq!(carry(back, front, &frames), frames, "{mode}, to the guest");
        let many: Vec<_> = (0..3000).map(|i| frame(i, 64 + (i as usize * 37) % 3000)).collect();
        assert!(carry(front, back, &many) == many, "{mode}: the rings wrap");
        assert!(carry(back, front, &many) == many, "{mode}: the rings wrap");
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty());
    }
}

#[test]
fn full_backend_reports_no_room_and_is_woken_by_new_buffers() {
    let slots = OffloadKeys { gso_tcp_v4: false, gso_tcp_v6: false, ..OffloadKeys::ALL };
    let mut pair = Pair::with(Mode::Copy, slots, slots);
    pair.connect();
    let (front, back) = pair.ports();
    let full = back.room().unwrap();
    assert_eq!(full, 256, "a buffer for each slot of the ring");
    let mut out = Batch::default();
    let one = frame(1, 100);
    let at = out.reserve(one.len()).unwrap();
    out.scratch_mut(at..at + one.len()).unwrap().copy_from_slice(&one);
    out.push_contiguous(at, one.len(), OffloadMeta::PLAIN).unwrap();
    for left in (0..full).rev() {
        assert_eq!(back.transmit(&out, &[0]).unwrap().sent, 1);
        assert_eq!(back.room().unwrap(), left);
    }
    back.flush().unwrap();
    // Clear earlier events.
    back.clear_events().unwrap();
    assert!(!back.arm().unwrap(), "no buffer is posted");
    let readable = |port: &dyn Port| {
        let fds = port.wait_fds();
        let mut fds: Vec<_> = fds
            .iter()
            .map(|fd| rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN))
            .collect();
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() > 0
    };
    assert!(!readable(back));
    let mut into = Batch::default();
    assert_eq!(front.receive(&mut into, 3).unwrap().frames, 3);
    into.clear();
    front.complete().unwrap();
    assert!(readable(back), "told of new buffers");
    back.clear_events().unwrap();
    assert!(!readable(back));
    // The ring has as many slots as frames were received.
    assert_eq!(back.room().unwrap(), 3);
}

#[test]
fn restarted_frontend_connects_again() {
    let mut pair = Pair::new(Mode::Copy);
    for _ in 0..5 {
        pair.connect();
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
        assert!(pair.back_host.0.is_none(), "the backend released the port");
        assert_eq!(pair.state(true), XenbusState::Closed);
        let state = format!("{}/state", pair.device.frontend_path());
        pair.front_store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    }
    pair.connect();
    let (front, back) = pair.ports();
    let frames = [frame(1, 100)];
    assert_eq!(carry(front, back, &frames), frames);
}

#[test]
fn device_removed_by_toolstack_is_dropped() {
    let mut pair = Pair::new(Mode::Map);
    pair.connect();
    toolstack::remove(&mut pair.back_store, &pair.device).unwrap();
    let life =
        pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(life, Life::Over);
    assert!(pair.back_host.0.is_none());
}

#[test]
fn penalized_device_is_closed_with_error_key() {
    let mut pair = Pair::new(Mode::Copy);
    pair.connect();
    pair.back.close_with_penalty("a test".to_owned());
    pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
    assert_eq!(pair.state(true), XenbusState::Closing);
    let error =
        pair.back_store.read_text(&format!("{}/error", pair.device.backend_path())).unwrap();
    assert_eq!(error, "a test");
    pair.front.look(&pair.front_platform, &mut pair.front_store, &mut pair.front_host).unwrap();
    assert_eq!(pair.state(false), XenbusState::Closed);
    assert!(pair.front_host.0.is_none());
}

/// Sends one frame unchanged, regardless of the negotiated offloads; returns what arrived.
fn carry_one(
    from: &mut dyn Port,
    to: &mut dyn Port,
    frame: &[u8],
    meta: OffloadMeta,
) -> Option<(Vec<u8>, OffloadMeta)> {
    let (mut out, mut into) = (Batch::default(), Batch::default());
    let at = out.reserve(frame.len()).unwrap();
    out.scratch_mut(at..at + frame.len()).unwrap().copy_from_slice(frame);
    out.push_contiguous(at, frame.len(), meta).unwrap();
    assert_eq!(from.transmit(&out, &[0]).unwrap().sent, 1);
    from.flush().unwrap();
    to.receive(&mut into, 64).unwrap();
    let arrived = into.iter().next().map(|frame| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        (bytes, frame.meta())
    });
    into.clear();
    to.complete().unwrap();
    from.receive(&mut Batch::default(), 0).unwrap();
    arrived
}

/// Returns a TCP frame with its metadata: a super-packet, or, for `size` 0, one with a blank checksum.
fn tcp(v6: bool, payload: usize, size: u16) -> (Vec<u8>, OffloadMeta) {
    let kind = if v6 { GsoKind::TcpV6 } else { GsoKind::TcpV4 };
    let checksum = Checksum::Partial { start: if v6 { 54 } else { 34 }, offset: 16 };
    let gso = (size > 0).then_some(Gso { kind, ecn: false, size });
    (tcp_frame(v6, payload), OffloadMeta { checksum, gso })
}

#[test]
fn super_packets_go_whole_both_ways_in_every_mode() {
    for mode in Mode::NETWORK {
        let mut pair = Pair::new(mode);
        pair.connect();
        let (front, back) = pair.ports();
        let mut arrived = 0;
        for round in 0..12 {
            for (v6, payload) in [(false, 4000), (true, 20_000), (false, 65_000), (true, 65_461)] {
                let (bytes, meta) = tcp(v6, payload, 1448 + round);
                let there = carry_one(front, back, &bytes, meta).unwrap();
                assert!(there == (bytes.clone(), meta), "{mode}, from the guest: {:?}", there.1);
                let back_again = carry_one(back, front, &bytes, meta).unwrap();
                assert!(back_again == (bytes, meta), "{mode}, to the guest: {:?}", back_again.1);
                arrived += 1;
            }
        }
        assert_eq!(
            (front.counters().rx_frames.get(), back.counters().rx_frames.get()),
            (arrived, arrived)
        );
        assert!(pair.back.rules().all().is_empty(), "{:?}", pair.back.rules().all());
        assert!(pair.front.rules().all().is_empty(), "{:?}", pair.front.rules().all());
    }
}

#[test]
fn cwr_of_super_packet_is_read_from_header() {
    let mut pair = Pair::new(Mode::Copy);
    pair.connect();
    let (front, back) = pair.ports();
    let (mut bytes, meta) = tcp(false, 9000, 1000);
    bytes[47] |= 0x80;
    let (_, arrived) = carry_one(front, back, &bytes, meta).unwrap();
    assert_eq!(arrived.gso, meta.gso.map(|gso| Gso { ecn: true, ..gso }));
}

/// Checks that IPv4 checksums are accepted blank: Linux's netfront ignores the key.
#[test]
fn blank_ipv4_checksum_of_guest_is_always_accepted() {
    for mode in Mode::NETWORK {
        let off = OffloadKeys { checksum_ipv4: false, ..OffloadKeys::ALL };
        let mut pair = Pair::with(mode, off, OffloadKeys::ALL);
        pair.connect();
        let (front, back) = pair.ports();
        let (bytes, meta) = tcp(false, 900, 0);
        let (_, arrived) = carry_one(front, back, &bytes, meta).unwrap();
        assert!(matches!(arrived.checksum, Checksum::Partial { .. }), "{mode}: to be finished");
        assert!(pair.back.rules().all().is_empty());
    }
}

/// Clears each key alone and sends what then breaks a rule: name, frame, rule without its direction.
#[test]
fn packet_with_unannounced_offload_is_refused_by_rule() {
    let all = OffloadKeys::ALL;
    let cases = [
        (OffloadKeys { gso_tcp_v4: false, ..all }, tcp(false, 9000, 1000), "gso_not_negotiated"),
        (OffloadKeys { gso_tcp_v6: false, ..all }, tcp(true, 9000, 1000), "gso_not_negotiated"),
        (
            OffloadKeys { checksum_ipv4: false, ..all },
            tcp(false, 900, 0),
            "checksum_not_negotiated",
        ),
        (OffloadKeys { checksum_ipv6: false, ..all }, tcp(true, 900, 0), "checksum_not_negotiated"),
        (OffloadKeys { scatter_gather: false, ..all }, tcp(false, 9000, 1000), "sg"),
    ];
    for mode in Mode::NETWORK {
        for (off, (bytes, meta), rule) in &cases {
            let slots = *rule == "sg";
            let mut pair = Pair::with(mode, *off, all);
            pair.connect();
            let (front, back) = pair.ports();
            // Blank IPv4 checksums of a guest are always accepted.
            let refused = off.checksum_ipv4;
            assert_eq!(carry_one(front, back, bytes, *meta).is_none(), refused, "{mode}, {off}");
            assert!(carry_one(back, front, bytes, *meta).is_some(), "the other way it goes");
            let tx = if slots { "tx_too_many_slots".to_owned() } else { format!("tx_{rule}") };
            assert_eq!(
                pair.back.rules().get(&tx),
                u64::from(refused),
                "{mode}, {off}: {:?}",
                pair.back.rules().all()
            );

            let mut pair = Pair::with(mode, all, *off);
            pair.connect();
            let (front, back) = pair.ports();
            assert_eq!(carry_one(back, front, bytes, *meta), None, "{mode}, {off}");
            assert!(carry_one(front, back, bytes, *meta).is_some(), "the other way it goes");
            let rx = if slots { "scatter_gather_not_negotiated" } else { rule };
            let rx = format!("rx_{rx}");
            assert_eq!(
                pair.front.rules().get(&rx),
                1,
                "{mode}, {off}: {:?}",
                pair.front.rules().all()
            );
        }
    }
}

/// Checks, key by key, that the offloads one end accepts are the capabilities of the other end's port.
#[test]
fn offload_key_applies_alone_and_to_one_direction() {
    for bits in 0..32 {
        let keys = keys_of(bits);
        for (back_takes, front_takes) in [(keys, OffloadKeys::ALL), (OffloadKeys::NONE, keys)] {
            let mut pair = Pair::with(Mode::Copy, back_takes, front_takes);
            pair.connect();
            let (front, back) = pair.ports();
            for (port, takes) in [(front, back_takes), (back, front_takes)] {
                let found = port.capabilities();
                let checksum =
                    ChecksumOffload::Netif { ipv4: takes.checksum_ipv4, ipv6: takes.checksum_ipv6 };
                assert_eq!(found.checksum, checksum, "{takes}");
                assert_eq!(found.scatter_gather, takes.scatter_gather, "{takes}");
                assert_eq!(found.gso.tcp_v4, takes.gso_tcp_v4, "{takes}");
                assert_eq!(found.gso.tcp_v6, takes.gso_tcp_v6, "{takes}");
            }
        }
    }
}

fn keys_of(bits: u32) -> OffloadKeys {
    let bit = |n: u32| bits >> n & 1 == 1;
    OffloadKeys {
        scatter_gather: bit(0),
        gso_tcp_v4: bit(1),
        gso_tcp_v6: bit(2),
        checksum_ipv4: bit(3),
        checksum_ipv6: bit(4),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Checks that the backend survives any sequence of state values from the frontend. It must not hold rings
    /// of a closed frontend, and must connect again to one that restarts.
    #[test]
    fn xsa_374_arbitrary_state_text_is_survived(states in proptest::collection::vec("[0-9]{1,2}|[a-z0-9 -]{0,12}", 1..12)) {
        let mut pair = Pair::new(Mode::Copy);
        pair.connect();
        let key = format!("{}/state", pair.device.frontend_path());
        for state in &states {
            pair.front_store.write(&key, state).unwrap();
            pair.back.look(&pair.back_platform, &mut pair.back_store, &mut pair.back_host).unwrap();
            if matches!(state.as_str(), "5" | "6") {
                prop_assert!(pair.back_host.0.is_none());
            }
        }
        pair.front.close(&mut pair.front_store, &mut pair.front_host).unwrap();
        pair.look();
        pair.front_store.write(&key, "1").unwrap();
        pair.connect();
    }
}
