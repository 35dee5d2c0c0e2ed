//! Invalid packets between valid ones.

use ringfence_access::Mode;
use ringfence_frame::testing::{frame, tcp_frame, udp_frame};
use ringfence_offload::Checksum;
use ringfence_platform::{DomId, Gref};
use ringfence_testkit::net::frontend::{RX_BUFFERS, TX_PAGES};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::{Status, TxFlags, TxRequest};

type Slot = [u8; 12];

/// Returns an extra info: its type, whether another one follows, and six bytes that depend on the type.
fn extra(kind: u8, more: bool, body: [u8; 6]) -> Slot {
    let [a, b, c, d, e, f] = body;
    [kind, u8::from(more), a, b, c, d, e, f, 0, 0, 0, 0]
}

fn bytes(slots: &[TxRequest]) -> Vec<Slot> {
    slots.iter().map(|slot| slot.to_bytes()).collect()
}

/// Returns a valid packet of 300 bytes in three slots.
fn three(guest: &mut HostileFrontend) -> Vec<TxRequest> {
    guest.packet(1, &frame(7, 300), &[100, 100, 100])
}

/// Returns a packet whose first slot announces extra infos.
fn with_extras(guest: &mut HostileFrontend, extras: impl IntoIterator<Item = Slot>) -> Vec<Slot> {
    let mut slots = guest.packet(1, &frame(7, 200), &[200]);
    slots[0].flags = TxFlags(slots[0].flags.0 | TxFlags::EXTRA_INFO.0);
    bytes(&slots).into_iter().chain(extras).collect()
}

/// Returns a packet with a GSO extra info: segment size and type as in the ring.
fn gso_packet(guest: &mut HostileFrontend, packet: &[u8], size: u16, kind: u8) -> Vec<Slot> {
    let mut slots = guest.packet(1, packet, &[packet.len()]);
    slots[0].flags = TxFlags(slots[0].flags.0 | TxFlags::EXTRA_INFO.0);
    let [low, high] = size.to_le_bytes();
    let info = extra(1, false, [low, high, kind, 0, 0, 0]);
    bytes(&slots).into_iter().chain([info]).collect()
}

/// Invalid packet and the rule under which it is counted.
struct Case {
    name: &'static str,
    rule: &'static str,
    make: fn(&mut HostileFrontend) -> Vec<Slot>,
}

const E: Status = Status::Error;

fn broken(guest: &mut HostileFrontend, slot: usize, change: fn(&mut TxRequest)) -> Vec<Slot> {
    let mut slots = three(guest);
    change(&mut slots[slot]);
    bytes(&slots)
}

const CASES: &[Case] = &[
    Case {
        name: "size smaller than its fragments",
        rule: "tx_smaller_than_fragments",
        make: |g| broken(g, 0, |s| s.size = 199),
    },
    Case {
        name: "sizes whose sum wraps 16 bits",
        rule: "tx_smaller_than_fragments",
        make: |g| {
            let mut slots = three(g);
            (slots[1].size, slots[2].size) = (0xFFFF, 200);
            bytes(&slots)
        },
    },
    Case { name: "no size", rule: "tx_too_short", make: |g| broken(g, 0, |s| s.size = 0) },
    Case {
        name: "less than an Ethernet header",
        rule: "tx_too_short",
        make: |g| broken(g, 0, |s| s.size = 13),
    },
    Case {
        name: "a fragment across its page",
        rule: "tx_crosses_page",
        make: |g| broken(g, 1, |s| s.offset = 3997),
    },
    Case {
        name: "an offset beyond the page",
        rule: "tx_crosses_page",
        make: |g| broken(g, 2, |s| s.offset = 0xFFFF),
    },
    Case {
        name: "the first fragment, by what the others leave, across its page",
        rule: "tx_crosses_page",
        make: |g| broken(g, 0, |s| s.size = 0xFFFF),
    },
    Case {
        name: "19 slots",
        rule: "tx_too_many_slots",
        make: |g| bytes(&g.packet(1, &frame(7, 190), &[10; 19])),
    },
    Case {
        name: "200 slots",
        rule: "tx_too_many_slots",
        make: |g| {
            let one = g.packet(1, &frame(7, 60), &[60])[0];
            bytes(&vec![TxRequest { flags: TxFlags::MORE_DATA, ..one }; 199])
                .into_iter()
                .chain([one.to_bytes()])
                .collect()
        },
    },
    Case {
        name: "nine extra infos",
        rule: "tx_too_many_extras",
        make: |g| with_extras(g, (0..9).map(|i| extra(9, i < 8, [0; 6]))),
    },
    Case {
        name: "200 extra infos",
        rule: "tx_too_many_extras",
        make: |g| with_extras(g, (0..200).map(|i| extra(4, i < 199, [0; 6]))),
    },
    Case {
        name: "an extra info of type 0",
        rule: "tx_bad_extra",
        make: |g| with_extras(g, [extra(0, false, [0; 6])]),
    },
    Case {
        name: "segments of no size",
        rule: "tx_bad_extra",
        make: |g| with_extras(g, [extra(1, false, [0, 0, 1, 0, 0, 0])]),
    },
    Case {
        name: "segmentation of an unknown type",
        rule: "tx_bad_extra",
        make: |g| gso_packet(g, &tcp_frame(false, 3000), 1000, 3),
    },
    Case {
        name: "segmentation of what is no TCP",
        rule: "tx_gso_kind_mismatch",
        make: |g| gso_packet(g, &frame(7, 3000), 1000, 1),
    },
    Case {
        name: "segmentation of UDP as TCP",
        rule: "tx_gso_kind_mismatch",
        make: |g| gso_packet(g, &udp_frame(3000), 1000, 1),
    },
    Case {
        name: "segmentation of IPv4 as IPv6",
        rule: "tx_gso_kind_mismatch",
        make: |g| gso_packet(g, &tcp_frame(false, 3000), 1000, 2),
    },
    Case {
        name: "segmentation of IPv6 as IPv4",
        rule: "tx_gso_kind_mismatch",
        make: |g| gso_packet(g, &tcp_frame(true, 3000), 1000, 1),
    },
    Case {
        name: "segments smaller than any sender makes",
        rule: "tx_gso_size_too_small",
        make: |g| gso_packet(g, &tcp_frame(false, 3000), 7, 1),
    },
    Case {
        name: "segments of the reserved size",
        rule: "tx_gso_size_reserved",
        make: |g| gso_packet(g, &tcp_frame(false, 3000), 0xFFFF, 1),
    },
    Case {
        name: "segmentation of a packet whose IP length is not the frame's",
        rule: "tx_gso_length_mismatch",
        make: |g| {
            let mut bytes = tcp_frame(false, 3000);
            bytes.truncate(3000);
            bytes[16..18].copy_from_slice(&2900u16.to_be_bytes());
            gso_packet(g, &bytes, 1000, 1)
        },
    },
    Case {
        name: "segmentation of a fragment",
        rule: "tx_gso_kind_mismatch",
        make: |g| {
            let mut bytes = tcp_frame(false, 3004);
            bytes[20] = 0x20;
            gso_packet(g, &bytes, 1000, 1)
        },
    },
    Case {
        name: "segmentation of what ends within its IP header",
        rule: "tx_gso_bad_headers",
        make: |g| gso_packet(g, &tcp_frame(false, 3000)[..30], 1000, 1),
    },
    Case {
        name: "a multicast filter that was not offered",
        rule: "tx_multicast_not_offered",
        make: |g| with_extras(g, [extra(2, false, [1, 0, 0x5E, 0, 0, 1])]),
    },
    Case {
        name: "a reference that was never granted",
        rule: "tx_gref_not_granted",
        make: |g| broken(g, 1, |s| s.gref = Gref(900)),
    },
    Case {
        name: "a reserved reference",
        rule: "tx_gref_not_granted",
        make: |g| {
            g.arena.grant(0, DomId(0), 1, true);
            broken(g, 0, |s| s.gref = Gref(0))
        },
    },
    Case {
        name: "a reference beyond the table",
        rule: "tx_gref_not_granted",
        make: |g| broken(g, 2, |s| s.gref = Gref(1024)),
    },
    Case {
        name: "the last reference there could be",
        rule: "tx_gref_not_granted",
        make: |g| broken(g, 2, |s| s.gref = Gref(u32::MAX)),
    },
    Case {
        name: "a page granted to another domain",
        rule: "tx_grant_denied",
        make: |g| {
            g.arena.grant(901, DomId(77), 1, true);
            broken(g, 1, |s| s.gref = Gref(901))
        },
    },
    Case {
        name: "an entry that names the first page beyond the arena",
        rule: "tx_page_beyond_arena",
        make: |g| {
            g.arena.grant(902, DomId(0), 64, true);
            broken(g, 1, |s| s.gref = Gref(902))
        },
    },
    Case {
        name: "an entry that names the last page there could be",
        rule: "tx_page_beyond_arena",
        make: |g| {
            g.arena.grant(903, DomId(0), u32::MAX, false);
            broken(g, 0, |s| s.gref = Gref(903))
        },
    },
    Case {
        name: "a blank checksum on what has none",
        rule: "tx_bad_checksum_blank",
        make: |g| broken(g, 0, |s| s.flags = TxFlags(s.flags.0 | TxFlags::CHECKSUM_BLANK.0)),
    },
    Case {
        name: "a blank checksum whose field the packet is too short for",
        rule: "tx_bad_checksum_blank",
        make: |g| {
            let mut slots = g.packet(1, &udp_frame(0)[..41], &[41]);
            slots[0].flags = TxFlags::CHECKSUM_BLANK;
            bytes(&slots)
        },
    },
];

/// Checks that each invalid packet gets ERROR (NULL for extra infos) and is counted once under its rule,
/// and that the packets before and after it arrive. The other guest is served meanwhile.
fn check_refused_alone(mode: Mode) {
    let mut stage = Stage::new(mode);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let vif = guest.vif;
    for (case, seed) in CASES.iter().zip(1000..) {
        let name = case.name;
        let (before, behind) = (frame(seed, 777), frame(seed + 500, 1200));
        let first = guest.packet(40, &before, &[777]);
        let last = guest.packet(41, &behind, &[1000, 200]);
        let slots = (case.make)(&mut guest);
        let extras = slots.iter().filter(|s| s[0] < 10 && s[8..] == [0; 4]).count();
        for slot in bytes(&first).iter().chain(&slots).chain(&bytes(&last)) {
            guest.tx.put(slot);
        }
        guest.tx.set_req_prod(guest.tx.produced);
        let counted = stage.rules(vif).get(case.rule);
        neighbour.exchange(&mut stage);
        let arrived: Vec<_> = stage.arrived(vif).into_iter().map(|a| a.bytes).collect();
        assert!(arrived == [before, behind], "{mode}, {name}: {} arrived", arrived.len());
        assert_eq!(
            stage.rules(vif).get(case.rule) - counted,
            1,
            "{mode}, {name}: {:?}",
            stage.rules(vif).all()
        );
        let mut expected = vec![Status::Okay];
        expected.extend(vec![E; slots.len() - extras]);
        expected.extend(vec![Status::Null; extras]);
        expected.extend([Status::Okay; 2]);
        assert_eq!(guest.statuses(), expected, "{mode}, {name}");
        assert!(stage.vifs[vif].host.port.is_some(), "{mode}, {name}: the device goes on");
    }
    neighbour.exchange(&mut stage);
    for gref in 0..1024 {
        let uses = u32::from(gref == 8 || gref == 9);
        assert_eq!(guest.arena.status(gref), uses, "{mode}: uses of {gref} that did not end");
    }
}

#[test]
fn xsa_270_invalid_packet_in_copy_mode_is_refused_alone() {
    check_refused_alone(Mode::Copy);
}

#[test]
fn xsa_270_invalid_packet_in_map_mode_is_refused_alone() {
    check_refused_alone(Mode::Map);
}

/// Sends one chain and returns the frame that arrived.
fn send_and_receive(
    stage: &mut Stage,
    guest: &mut HostileFrontend,
    slots: &[TxRequest],
) -> Vec<u8> {
    guest.post(slots);
    stage.round();
    let mut arrived = stage.arrived(guest.vif);
    assert_eq!(arrived.len(), 1, "{:?}", stage.rules(guest.vif).all());
    assert_eq!(guest.statuses(), vec![Status::Okay; slots.len()]);
    arrived.remove(0).bytes
}

#[test]
fn xsa_448_zero_length_fragments_are_counted_and_skipped() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut neighbour = Neighbour::join(&mut stage);
        let mut guest = HostileFrontend::connected(&mut stage);
        let sent = frame(3, 300);
        // An empty fragment in the middle, at the end, in all but the last slot, and in the first slot (whose
        // length is the rest of the packet's).
        for pieces in [&[100, 0, 200][..], &[300, 0], &[0; 18]] {
            let mut slots = guest.packet(1, &sent, pieces);
            if pieces.len() == 2 {
                slots[1].size = 0;
                guest.write_page(1, 0, &sent);
            }
            assert!(send_and_receive(&mut stage, &mut guest, &slots) == sent, "{mode}, {pieces:?}");
            neighbour.exchange(&mut stage);
        }
        assert_eq!(stage.rules(guest.vif).get("tx_zero_length_fragment"), 3, "{mode}");
        // The backend does not use the reference of an empty fragment.
        let mut slots = guest.packet(1, &sent, &[300, 0]);
        (slots[1].gref, slots[1].size) = (Gref(u32::MAX), 0);
        guest.write_page(1, 0, &sent);
        assert!(send_and_receive(&mut stage, &mut guest, &slots) == sent, "{mode}");
    }
}

#[test]
fn xsa_423_headers_in_any_fragments_are_joined() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut neighbour = Neighbour::join(&mut stage);
        let mut guest = HostileFrontend::connected(&mut stage);
        // 18 slots of one byte: the maximum of slots and nearly the minimum of bytes.
        let tiny = frame(5, 18);
        let slots = guest.packet(1, &tiny, &[1; 18]);
        assert!(send_and_receive(&mut stage, &mut guest, &slots) == tiny, "{mode}");
        // A header in pieces of one byte each, followed by the payload.
        let whole = udp_frame(1000);
        let slots = guest.packet(1, &whole, &[1; 18]);
        assert!(send_and_receive(&mut stage, &mut guest, &slots) == whole, "{mode}");
        // A cut at each position in the headers, with and without a blank checksum, gives the uncut frame.
        let mut blank = guest.packet(1, &whole, &[whole.len()]);
        blank[0].flags = TxFlags::CHECKSUM_BLANK;
        guest.post(&blank);
        stage.round();
        let uncut = stage.arrived(guest.vif).remove(0);
        assert!(matches!(uncut.meta.checksum, Checksum::Partial { .. }), "{:?}", uncut.meta);
        guest.statuses();
        for cut in 1..60 {
            let mut slots = guest.packet(1, &whole, &[cut, 3, 1]);
            slots[0].flags = TxFlags(slots[0].flags.0 | TxFlags::CHECKSUM_BLANK.0);
            guest.post(&slots);
            stage.round();
            assert_eq!(
                stage.arrived(guest.vif),
                core::slice::from_ref(&uncut),
                "{mode}, cut at {cut}"
            );
            assert_eq!(guest.statuses(), [Status::Okay; 3]);
        }
        neighbour.exchange(&mut stage);
        assert!(stage.rules(guest.vif).all().is_empty());
    }
}

#[test]
fn unknown_extra_info_is_skipped_and_counted() {
    let mut stage = Stage::new(Mode::Copy);
    let mut guest = HostileFrontend::connected(&mut stage);
    for kind in 6..=255 {
        let slots =
            with_extras(&mut guest, [extra(kind, true, [0xFF; 6]), extra(kind, false, [1; 6])]);
        slots.iter().for_each(|slot| guest.tx.put(slot));
        guest.tx.set_req_prod(guest.tx.produced);
        stage.round();
        assert_eq!(stage.arrived(guest.vif).len(), 1, "type {kind}");
        assert_eq!(guest.statuses(), [Status::Okay, Status::Null, Status::Null], "type {kind}");
    }
    assert_eq!(stage.rules(guest.vif).get("tx_unknown_extra"), 250, "once a packet");
}

#[test]
fn same_gref_in_several_slots_reads_same_data() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut guest = HostileFrontend::connected(&mut stage);
        guest.write_page(1, 0, &frame(9, 2000));
        let slots = |guest: &mut HostileFrontend| {
            let mut slots = guest.packet(2, &[0; 600], &[200, 200, 200]);
            slots.iter_mut().for_each(|slot| slot.gref = Gref(TX_PAGES + 1));
            slots
        };
        // The reference three times in each of three packets of one round.
        let chains: Vec<_> = (0..3).flat_map(|_| slots(&mut guest)).collect();
        guest.post(&chains);
        stage.round();
        let expected = frame(9, 2000)[..200].repeat(3);
        let arrived: Vec<_> = stage.arrived(guest.vif).into_iter().map(|a| a.bytes).collect();
        assert!(arrived == [expected.clone(), expected.clone(), expected], "{mode}");
        assert_eq!(guest.statuses(), [Status::Okay; 9]);
        assert!(stage.rules(guest.vif).all().is_empty());
    }
}

/// Checks that a guest that sends only invalid packets gets no larger share of a round.
#[test]
fn refused_packets_consume_round_budget() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let bad = TxRequest { gref: Gref(0), offset: 0, flags: TxFlags::NONE, id: 1, size: 1 };
    guest.post(&vec![bad; 256]);
    for answered in [64, 128, 192, 256] {
        neighbour.exchange(&mut stage);
        assert_eq!(guest.tx.rsp_prod(), answered);
    }
    assert_eq!(guest.statuses(), vec![Status::Error; 256]);
    assert_eq!(stage.rules(guest.vif).get("tx_too_short"), 256);
}

/// Checks that bytes of a slot that the response does not cover keep the guest's content.
#[test]
fn xsa_216_response_writes_only_its_own_fields() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut guest = HostileFrontend::connected(&mut stage);
        let good = guest.packet(1, &frame(1, 100), &[100]);
        let bad = TxRequest { gref: Gref(0x0A0B_0C0D), size: 5, id: 0x1234, ..good[0] };
        let posted = with_extras(&mut guest, [extra(9, false, [0xEE; 6])]);
        let slots: Vec<Slot> =
            bytes(&good).into_iter().chain([bad.to_bytes()]).chain(posted).collect();
        slots.iter().for_each(|slot| guest.tx.put(slot));
        guest.tx.set_req_prod(guest.tx.produced);
        stage.round();
        assert_eq!(guest.tx.rsp_prod(), 4);
        for (slot, index) in slots.iter().zip(0..) {
            let answered: Slot = guest.tx.entry(index);
            assert_eq!(answered[4..], slot[4..], "{mode}, slot {index}: behind the response");
        }
        let extra_answer: Slot = guest.tx.entry(3);
        assert_eq!(extra_answer[..4], [0, 0, 1, 0], "{mode}: id 0, NULL");
        // An RX response covers its whole slot.
        guest.post_buffers([RX_BUFFERS]);
        stage.send(guest.vif, &[frame(2, 60)]);
        let [i0, i1, offset @ .., s0, s1] = guest.rx.entry::<8>(0);
        assert_eq!(([i0, i1], [s0, s1]), ([0, 0], [60, 0]), "{mode}");
        assert_eq!(offset, [0; 4], "{mode}: offset 0, no flags");
    }
}
