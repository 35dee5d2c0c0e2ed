//! Invalid grants in RX buffers, and grants that are revoked during use.

use ringfence_access::Mode;
use ringfence_frame::batch::Batch;
use ringfence_frame::counters::DropReason;
use ringfence_frame::testing::frame;
use ringfence_platform::{DomId, Gref, Platform};
use ringfence_testkit::net::frontend::{RX_BUFFERS, TX_PAGES};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::grant::RawGrantEntry;
use ringfence_wire::netif::{RxFlags, Status};
use ringfence_wire::xenbus::XenbusState;

struct Case {
    name: &'static str,
    rule: &'static str,
    gref: u32,
    arrange: fn(&HostileFrontend),
}

const CASES: &[Case] = &[
    Case { name: "never granted", rule: "rx_gref_not_granted", gref: 900, arrange: |_| {} },
    Case { name: "reserved", rule: "rx_gref_not_granted", gref: 7, arrange: |_| {} },
    Case { name: "beyond the table", rule: "rx_gref_not_granted", gref: 1024, arrange: |_| {} },
    Case { name: "read-only", rule: "rx_grant_denied", gref: TX_PAGES, arrange: |_| {} },
    Case {
        name: "another domain's",
        rule: "rx_grant_denied",
        gref: 901,
        arrange: |g| g.arena.grant(901, DomId(5), 3, false),
    },
    Case {
        name: "beyond the arena",
        rule: "rx_page_beyond_arena",
        gref: 902,
        arrange: |g| g.arena.grant(902, DomId(0), 320, false),
    },
    Case {
        name: "revoked right after it was posted",
        rule: "rx_gref_not_granted",
        gref: RX_BUFFERS + 9,
        arrange: |g| g.arena.set_entry(RX_BUFFERS + 9, RawGrantEntry::INVALID),
    },
];

/// Checks that a buffer that cannot be written costs one frame and gets the response ERROR. The frames
/// before and after it arrive.
#[test]
fn rx_buffer_that_cannot_be_written_costs_one_frame() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut neighbour = Neighbour::join(&mut stage);
        let mut guest = HostileFrontend::connected(&mut stage);
        let vif = guest.vif;
        for (Case { name, rule, gref, arrange }, seed) in CASES.iter().zip(50..) {
            // One frame; one frame of two buffers, of which the second is invalid; one frame.
            guest.post_buffers([RX_BUFFERS, RX_BUFFERS + 1, *gref, RX_BUFFERS + 2]);
            arrange(&guest);
            let frames = [frame(seed, 60), frame(seed + 1, 6000), frame(seed + 2, 1514)];
            let counted = stage.rules(vif).get(rule);
            let done = stage.send(vif, &frames).unwrap();
            assert_eq!((done.sent, done.dropped), (2, 1), "{mode}, {name}");
            assert_eq!(stage.rules(vif).get(rule), counted + 1, "{mode}, {name}");
            let answers: Vec<_> = guest.rx_responses().iter().map(|r| r.status).collect();
            assert_eq!(answers, [60, -1, -1, 1514], "{mode}, {name}");
            assert!(guest.read_buffer(0, 60) == frames[0], "{mode}, {name}");
            assert!(guest.read_buffer(2, 1514) == frames[2], "{mode}, {name}");
            neighbour.exchange(&mut stage);
        }
        let counters = stage.vifs[vif].host.counters.clone().unwrap();
        assert_eq!(counters.drops(DropReason::Unwritable), CASES.len() as u64, "{mode}");
    }
}

#[test]
fn rx_buffer_posted_twice_holds_last_frame() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut guest = HostileFrontend::connected(&mut stage);
        guest.post_buffers([RX_BUFFERS; 4]);
        let frames = [frame(1, 100), frame(2, 8000), frame(3, 200)];
        let done = stage.send(guest.vif, &frames).unwrap();
        assert_eq!((done.sent, done.dropped), (3, 0), "{mode}");
        let responses = guest.rx_responses();
        let sizes: Vec<_> = responses.iter().map(|r| r.status).collect();
        assert_eq!(sizes, [100, 4096, 3904, 200], "{mode}");
        assert!(responses[1].flags.contains(RxFlags::MORE_DATA));
        assert!(guest.read_buffer(0, 200) == frames[2], "{mode}: the last one written stays");
    }
}

#[test]
fn xsa_392_guest_without_rx_buffers_loses_only_its_own_frames() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let vif = guest.vif;
    // One free slot does not hold a frame of two slots, but holds a frame of one.
    guest.post_buffers([RX_BUFFERS]);
    let done = stage.send(vif, &[frame(1, 5000), frame(2, 60), frame(3, 60)]).unwrap();
    assert_eq!((done.sent, done.dropped), (1, 2));
    for _ in 0..50 {
        let done = stage.send(vif, &vec![frame(4, 1514); 20]).unwrap();
        assert_eq!((done.sent, done.dropped), (0, 20));
    }
    neighbour.exchange(&mut stage);
    let counters = stage.vifs[vif].host.counters.clone().unwrap();
    assert_eq!(counters.drops(DropReason::PortFull), 1002);
    assert!(stage.rules(vif).all().is_empty(), "no rule was broken");
}

/// Checks that the guest cannot take back pages of packets that the backend holds, nor its rings. After the
/// use it can, and the backend refuses the reference (XSA-396).
#[test]
fn xsa_396_take_back_of_a_page_in_use_fails_until_the_use_ends() {
    let mut stage = Stage::new(Mode::Map);
    let mut guest = HostileFrontend::connected(&mut stage);
    let vif = guest.vif;
    // Longer than the header that a backend copies, so the rest is used in place.
    let packet = guest.packet(1, &frame(1, 1000), &[1000]);
    let page = packet[0].gref.0;
    guest.post(&packet);
    let mut batch = Batch::with_capacity(64, 1 << 16);
    let port = stage.vifs[vif].host.port.as_mut().unwrap();
    port.receive(&mut batch, 64).unwrap();
    for gref in [page, 8, 9] {
        assert!(!guest.arena.take_back(gref), "{gref} is taken back under its use");
    }
    let mut bytes = vec![0; 1000];
    batch.iter().next().unwrap().copy_to(&mut bytes);
    assert!(bytes == frame(1, 1000), "the page still holds the packet");
    batch.clear();
    port.complete().unwrap();
    assert_eq!(guest.statuses(), [Status::Okay]);
    assert!(guest.arena.take_back(page), "the use has ended");
    assert!(!guest.arena.take_back(8), "the ring is used for as long as the device");

    let mut packet = guest.packet(1, &frame(2, 100), &[100]);
    packet[0].gref = Gref(page);
    guest.post(&packet);
    stage.round();
    assert_eq!(guest.statuses(), [Status::Error]);
    assert_eq!(stage.rules(vif).get("tx_gref_not_granted"), 1, "{:?}", stage.rules(vif).all());
    guest.enter(XenbusState::Closing);
    stage.look(vif);
    assert!(guest.arena.take_back(8) && guest.arena.take_back(9));
    guest.connect(&mut stage, |_| {});
    assert_eq!(stage.rules(vif).get("connect_ring_grant"), 1);
    assert!(stage.vifs[vif].host.port.is_none());
}

/// Checks that a granter that writes the grantee's status words affects only its own device.
#[test]
fn status_words_written_by_granter_have_no_effect() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut guest = HostileFrontend::connected(&mut stage);
        for uses in [1, u32::MAX, u32::MAX - 1, 0x8000_0000] {
            (0..1024).for_each(|gref| guest.arena.set_status(gref, uses));
            let packet = guest.packet(1, &frame(1, 5000), &[2500, 2500]);
            guest.post(&packet);
            guest.post_buffers([RX_BUFFERS]);
            stage.round();
            assert_eq!(guest.statuses(), [Status::Okay; 2], "{mode}");
            assert_eq!(stage.send(guest.vif, &[frame(2, 60)]).unwrap().sent, 1, "{mode}");
            assert_eq!(guest.arena.status(TX_PAGES + 1), uses, "{mode}: raised and lowered");
        }
        assert!(stage.rules(guest.vif).all().is_empty());
    }
}

/// Both holders share the flags of the open file. With O_APPEND the kernel ignores the offset of a write. The
/// arena cannot grow, so such writes fail, for that guest only.
#[test]
fn append_mode_of_arena_file_costs_only_its_guest_frames() {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let file = &guest.arena.handed_over[0];
    fcntl_setfl(file, fcntl_getfl(file).unwrap() | OFlags::APPEND).unwrap();
    guest.post_buffers([RX_BUFFERS, RX_BUFFERS + 1]);
    assert_eq!(stage.send(guest.vif, &[frame(1, 60)]).unwrap().dropped, 1);
    assert_eq!(stage.rules(guest.vif).get("rx_grant_error"), 1);
    neighbour.exchange(&mut stage);
    let file = &guest.arena.handed_over[0];
    fcntl_setfl(file, fcntl_getfl(file).unwrap() - OFlags::APPEND).unwrap();
    assert_eq!(stage.send(guest.vif, &[frame(1, 60)]).unwrap().sent, 1);
    assert!(guest.read_buffer(1, 60) == frame(1, 60));
}

/// Checks that a full TX ring has 256 pages mapped while its packets are in flight, and no other page. One
/// queue cannot map more. The limit of a pair, 4096 pages, has its own test.
#[test]
fn xsa_300_full_tx_ring_maps_only_its_own_pages() {
    const PACKETS: usize = 14;
    let mut stage = Stage::new(Mode::Map);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let mapped = |guest: &HostileFrontend| -> u32 {
        (0..1024).filter(|gref| ![8, 9].contains(gref)).map(|gref| guest.arena.status(gref)).sum()
    };
    let before = stage.platform.counters().values();
    for _ in 0..40 {
        let mut slots = Vec::new();
        for _ in 0..PACKETS {
            slots.extend(guest.packet(1, &frame(1, 1800), &[100; 18]));
        }
        // One-slot packets fill the ring.
        while slots.len() < 256 {
            slots.extend(guest.packet(1, &frame(1, 600), &[600]));
        }
        guest.post(&slots);
        let mut batch = Batch::with_capacity(64, 1 << 16);
        let port = stage.vifs[guest.vif].host.port.as_mut().unwrap();
        let mut arrived = 0;
        let mut most = 0;
        while guest.tx.rsp_prod() != guest.tx.produced {
            port.receive(&mut batch, 64).unwrap();
            arrived += batch.len();
            most = most.max(mapped(&guest));
            batch.clear();
            port.complete().unwrap();
            assert_eq!(mapped(&guest), 0, "nothing stays mapped behind an answer");
        }
        assert!((64..=256).contains(&most), "{most} pages were mapped at a time");
        assert_eq!(arrived, PACKETS + 256 - PACKETS * 18);
        assert_eq!(guest.statuses(), vec![Status::Okay; 256]);
        neighbour.exchange(&mut stage);
    }
    let after = stage.platform.counters().values();
    let maps = after.grant_maps - before.grant_maps;
    assert!(maps >= 40 * 256, "{maps} pages were mapped");
    assert_eq!(maps, after.grant_unmaps - before.grant_unmaps, "each mapping was removed");
    assert!(stage.rules(guest.vif).all().is_empty(), "a rule was broken");
}

/// Checks that the backend writes only to posted buffers: the rest of the page and the other pages of the
/// arena keep their content.
#[test]
fn memory_outside_posted_rx_buffers_is_not_written() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut guest = HostileFrontend::connected(&mut stage);
        for buffer in 0..10 {
            guest.arena.writable(2 + buffer).unwrap().copy_from(0, &[0x55; 4096]).unwrap();
        }
        guest.post_buffers([RX_BUFFERS + 3, RX_BUFFERS + 5]);
        assert_eq!(stage.send(guest.vif, &[frame(1, 4196)]).unwrap().sent, 1);
        for buffer in [0, 1, 2, 4, 6, 7, 8, 9] {
            assert!(guest.read_buffer(buffer, 4096) == [0x55; 4096], "{mode}: page {buffer}");
        }
        assert!(guest.read_buffer(5, 4096)[100..] == [0x55; 3996], "{mode}: behind the frame");
    }
}
