//! Hostile network backends against a correct frontend. Each attack costs the frontend a packet or its
//! device, and increments a counter of its own. A backend that starts again gets the device back.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ringfence_frame::Fault;
use ringfence_frame::counters::DropReason;
use ringfence_frame::testing::{frame, tcp_frame, udp_frame};
use ringfence_net::vif::toolstack;
use ringfence_offload::Checksum;
use ringfence_platform::local::ArenaShape;
use ringfence_platform::{Access, DomId, Granter, Platform};
use ringfence_testkit::net::HostileBackend;
use ringfence_wire::netif::{RxFlags, RxResponse, Status, TxResponse, keys};
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenstore::StoreAccess;
use rustix::net::Shutdown;

/// Writes a valid packet into the next posted buffer. Returns the packet and its response.
fn valid_packet(backend: &mut HostileBackend, seed: u32) -> (Vec<u8>, RxResponse) {
    let rings = backend.rings();
    let slot = rings.rx.produced;
    let buffer = posted(backend, slot);
    let sent = frame(seed, 100);
    backend.rings().fill(buffer, 0, &sent);
    (sent, RxResponse { id: buffer.id, offset: 0, flags: RxFlags::NONE, status: 100 })
}

/// Returns the buffer posted in the slot of an index.
fn posted(backend: &mut HostileBackend, index: u32) -> ringfence_wire::netif::RxRequest {
    ringfence_wire::netif::RxRequest::from_bytes(backend.rings().rx.entry(index))
}

/// Checks that both directions work.
fn check_device_works(backend: &mut HostileBackend) {
    let sent = [frame(3, 60), frame(4, 6000)];
    assert_eq!(backend.transmit(&sent).unwrap().sent, 2);
    let requests = backend.rings().requests();
    assert_eq!(requests.len(), 3, "one slot and two");
    assert!(backend.rings().read(requests[0].gref, requests[0].offset, 60) == sent[0]);
    let answers: Vec<_> =
        requests.iter().map(|r| TxResponse { id: r.id, status: Status::Okay }).collect();
    backend.rings().answer(&answers);
    let (sent, response) = valid_packet(backend, 5);
    backend.rings().deliver(&[response]);
    let arrived = backend.receive().unwrap();
    assert!(arrived.len() == 1 && arrived[0].bytes == sent);
}

/// Checks that the frontend has closed its device, and that a backend that starts again gets it back.
fn check_restart(mut backend: HostileBackend, name: &str) {
    backend.front.broke();
    backend.look().unwrap();
    assert_eq!(backend.front_state(), XenbusState::Closed, "{name}");
    assert!(backend.host.port.is_none(), "{name}");
    backend.attached = None;
    backend.enter(XenbusState::Closed);
    backend.look().unwrap();
    backend.connect();
    check_device_works(&mut backend);
}

type Act = fn(&mut HostileBackend);

/// Attacks that end the device: name, rule, and the backend's action.
const FATAL: &[(&str, &str, Act)] = &[
    ("an answer to nothing", "tx_response_overflow", |b| {
        let next = b.rings().tx.produced + 1;
        b.rings().tx.set_rsp_prod(next);
    }),
    ("nearly 2^32 answers", "tx_response_overflow", |b| b.rings().tx.set_rsp_prod(0xFFFF_FF00)),
    ("answers taken back", "tx_response_overflow", |b| b.rings().tx.set_rsp_prod(0)),
    ("an id that is not under way", "tx_response_foreign_id", |b| {
        b.transmit(&[frame(1, 60)]).unwrap();
        let id = b.rings().requests()[0].id;
        b.rings().answer(&[TxResponse { id: (id + 1) % 256, status: Status::Okay }]);
    }),
    ("an id that there is not", "tx_response_foreign_id", |b| {
        b.transmit(&[frame(1, 60)]).unwrap();
        b.rings().answer(&[TxResponse { id: 0xFFFF, status: Status::Okay }]);
    }),
    ("the same id twice", "tx_response_foreign_id", |b| {
        b.transmit(&[frame(1, 60), frame(2, 60)]).unwrap();
        let id = b.rings().requests()[0].id;
        b.rings().answer(&[TxResponse { id, status: Status::Okay }; 2]);
    }),
    ("more packets than buffers", "rx_response_overflow", |b| {
        let next = b.rings().rx.produced + 257;
        b.rings().rx.set_rsp_prod(next);
    }),
    ("packets taken back", "rx_response_overflow", |b| b.rings().rx.set_rsp_prod(0)),
    ("a chain that goes on where nothing is", "rx_unfinished_chain", |b| {
        let (_, response) = valid_packet(b, 1);
        b.rings().deliver(&[RxResponse { flags: RxFlags::MORE_DATA, ..response }]);
    }),
    ("extra infos without end", "rx_unfinished_chain", |b| {
        let (_, response) = valid_packet(b, 1);
        b.rings().deliver(&[RxResponse { flags: RxFlags::EXTRA_INFO, ..response }]);
        b.rings().rx.put(&[9, 1, 0, 0, 0, 0, 0, 0]);
        let next = b.rings().rx.produced;
        b.rings().rx.set_rsp_prod(next);
    }),
    ("a chain of all slots", "rx_chain_longer_than_ring", |b| {
        let (_, response) = valid_packet(b, 1);
        b.rings().deliver(&[RxResponse { flags: RxFlags::MORE_DATA, ..response }; 256]);
    }),
    ("the tx ring's page punched out", "tx_response_overflow", |b| {
        let ring = b.rings().ring_refs[0];
        let page = b.rings().arena.entry(ring).frame();
        b.rings().arena.punch(false, page, 1).unwrap();
    }),
    ("the rx ring's page punched out", "rx_response_overflow", |b| {
        let ring = b.rings().ring_refs[1];
        let page = b.rings().arena.entry(ring).frame();
        b.rings().arena.punch(false, page, 1).unwrap();
    }),
];

#[test]
fn invalid_ring_state_closes_device() {
    for (name, rule, act) in FATAL {
        let mut backend = HostileBackend::connected();
        check_device_works(&mut backend);
        assert!(backend.front.rules().all().is_empty());
        act(&mut backend);
        let fault = backend.receive();
        assert!(matches!(fault, Err(Fault::Misbehaved(_))), "{name}: {fault:?}");
        let rules = backend.front.rules().all();
        assert_eq!((rules.len(), rules.get(rule)), (1, Some(&1)), "{name}: {rules:?}");
        check_restart(backend, name);
    }
}

/// Writes a packet with a GSO extra info into the next posted slot: segment size and type as in the ring.
fn gso_packet(backend: &mut HostileBackend, bytes: &[u8], size: u16, kind: u16) -> Vec<RxResponse> {
    let slot = backend.rings().rx.produced;
    let buffer = posted(backend, slot);
    backend.rings().fill(buffer, 0, bytes);
    let flags = RxFlags(RxFlags::EXTRA_INFO.0 | RxFlags::CHECKSUM_BLANK.0);
    let status = i16::try_from(bytes.len()).unwrap();
    let first = RxResponse { id: buffer.id, offset: 0, flags, status };
    // Field by field: type 1, no other extra info, the segment size, the GSO type.
    vec![first, RxResponse { id: 1, offset: size, flags: RxFlags(kind), status: 0 }]
}

/// Modification of a valid response in the next slot, or slots of its own: an attack that costs one packet.
/// The table gives its name and its rule.
type Change = fn(&mut HostileBackend, RxResponse) -> Vec<RxResponse>;

const REFUSED: &[(&str, &str, Change)] = &[
    ("a failure", "rx_backend_failed", |_, r| vec![RxResponse { status: -1, ..r }]),
    ("an undefined failure", "rx_backend_failed", |_, r| {
        vec![RxResponse { status: i16::MIN, ..r }]
    }),
    ("a failure in the middle", "rx_backend_failed", |_, r| {
        let more = RxResponse { flags: RxFlags::MORE_DATA, ..r };
        vec![more, RxResponse { status: -2, ..more }, r]
    }),
    ("nothing", "rx_too_short", |_, r| vec![RxResponse { status: 0, ..r }]),
    ("less than a header", "rx_too_short", |_, r| vec![RxResponse { status: 13, ..r }]),
    ("more than a page", "rx_crosses_page", |_, r| vec![RxResponse { status: 4097, ..r }]),
    ("the most there could be", "rx_crosses_page", |_, r| {
        vec![RxResponse { status: i16::MAX, offset: 0xFFFF, ..r }]
    }),
    ("over the end of the page", "rx_crosses_page", |_, r| {
        vec![RxResponse { status: 100, offset: 3997, ..r }]
    }),
    ("19 slots", "rx_too_many_slots", |_, r| {
        let mut all = vec![RxResponse { flags: RxFlags::MORE_DATA, status: 20, ..r }; 18];
        all.push(r);
        all
    }),
    ("more bytes than a packet has", "rx_too_long", |_, r| {
        let mut all = vec![RxResponse { flags: RxFlags::MORE_DATA, status: 4096, ..r }; 16];
        all.push(r);
        all
    }),
    ("a blank checksum on what has none", "rx_bad_checksum_blank", |_, r| {
        vec![RxResponse { flags: RxFlags::CHECKSUM_BLANK, ..r }]
    }),
    ("a GSO prefix", "rx_gso_prefix", |_, r| {
        vec![RxResponse { flags: RxFlags(RxFlags::GSO_PREFIX.0 | RxFlags::MORE_DATA.0), ..r }, r]
    }),
    ("an order of an unknown type", "rx_bad_extra", |b, _| {
        gso_packet(b, &tcp_frame(false, 3000), 1000, 3)
    }),
    ("segments of no size", "rx_bad_extra", |b, _| gso_packet(b, &tcp_frame(false, 3000), 0, 1)),
    ("tiny segments", "rx_gso_size_too_small", |b, _| gso_packet(b, &tcp_frame(false, 3000), 7, 1)),
    ("segments of the reserved size", "rx_gso_size_reserved", |b, _| {
        gso_packet(b, &tcp_frame(false, 3000), 0xFFFF, 1)
    }),
    ("an order for no TCP", "rx_gso_kind_mismatch", |b, _| {
        gso_packet(b, &udp_frame(3000), 1000, 1)
    }),
    ("an order for the other IP", "rx_gso_kind_mismatch", |b, _| {
        gso_packet(b, &tcp_frame(true, 3000), 1000, 1)
    }),
    ("an order for a part of the frame", "rx_gso_length_mismatch", |b, _| {
        let mut bytes = tcp_frame(false, 3000);
        bytes[16..18].copy_from_slice(&2900u16.to_be_bytes());
        gso_packet(b, &bytes, 1000, 1)
    }),
    ("an order for no headers", "rx_gso_bad_headers", |b, _| {
        gso_packet(b, &tcp_frame(false, 3000)[..30], 1000, 1)
    }),
    ("an extra info of type 0", "rx_bad_extra", |_, r| {
        let none = RxResponse { id: 0, offset: 0, flags: RxFlags::NONE, status: 0 };
        vec![RxResponse { flags: RxFlags::EXTRA_INFO, ..r }, none]
    }),
];

/// Number of packets; enough for the ring to wrap around.
const ROUNDS: usize = 90;

#[test]
fn invalid_rx_response_costs_that_packet() {
    let mut backend = HostileBackend::connected();
    for ((name, rule, change), seed) in REFUSED.iter().cycle().take(ROUNDS).zip(100..) {
        let counted = backend.front.rules().get(rule);
        let (before, first) = valid_packet(&mut backend, seed);
        backend.rings().deliver(&[first]);
        let (_, response) = valid_packet(&mut backend, 7);
        let broken = change(&mut backend, response);
        backend.rings().deliver(&broken);
        let (behind, last) = valid_packet(&mut backend, seed + 1000);
        backend.rings().deliver(&[last]);
        let arrived: Vec<_> = backend.receive().unwrap().into_iter().map(|a| a.bytes).collect();
        assert!(arrived == [before, behind], "{name}: {} arrived", arrived.len());
        assert_eq!(backend.front.rules().get(rule), counted + 1, "{name}");
        // Every page was returned and posted again.
        let produced = backend.rings().rx.produced;
        assert_eq!(backend.rings().rx.req_prod(), produced + 256, "{name}");
    }
    check_device_works(&mut backend);
    let dropped = backend.port().counters().drops(DropReason::BadRequest);
    assert_eq!(dropped, ROUNDS as u64);
}

/// Checks that the slot of an RX response names the page, since extra infos overwrite the ids.
#[test]
fn id_of_rx_response_is_ignored() {
    let mut backend = HostileBackend::connected();
    for (id, seed) in [0, 0, 255, 0xFFFF, 1].into_iter().zip(1..) {
        let (sent, response) = valid_packet(&mut backend, seed);
        backend.rings().deliver(&[RxResponse { id, ..response }]);
        let arrived = backend.receive().unwrap();
        assert!(arrived.len() == 1 && arrived[0].bytes == sent, "id {id}");
    }
    assert!(backend.front.rules().all().is_empty());
}

#[test]
fn failed_tx_response_is_counted_and_its_page_reused() {
    let mut backend = HostileBackend::connected();
    let statuses = [Status::Error, Status::Dropped, Status::Null, Status::Unknown(77)];
    for status in statuses.into_iter().cycle().take(2000) {
        assert_eq!(backend.transmit(&[frame(1, 60)]).unwrap().sent, 1);
        let id = backend.rings().requests()[0].id;
        backend.rings().answer(&[TxResponse { id, status }]);
        backend.receive().unwrap();
    }
    assert_eq!(backend.port().counters().drops(DropReason::Refused), 2000);
    assert!(backend.front.rules().all().is_empty());
    check_device_works(&mut backend);
}

#[test]
fn blank_checksum_of_udp_frame_is_accepted() {
    let mut backend = HostileBackend::connected();
    let sent = udp_frame(300);
    let slot = backend.rings().rx.produced;
    let buffer = posted(&mut backend, slot);
    backend.rings().fill(buffer, 50, &sent);
    let status = i16::try_from(sent.len()).unwrap();
    let flags = RxFlags(RxFlags::CHECKSUM_BLANK.0 | RxFlags::DATA_VALIDATED.0);
    backend.rings().deliver(&[RxResponse { id: 0, offset: 50, flags, status }]);
    let arrived = backend.receive().unwrap();
    assert!(matches!(arrived[0].meta.checksum, Checksum::Partial { .. }));
}

#[test]
fn frontend_of_silent_backend_drops_frames_and_keeps_running() {
    let mut backend = HostileBackend::connected();
    let mut sent = 0;
    while backend.port().room().unwrap() > 0 {
        sent += backend.transmit(&[frame(1, 1500)]).unwrap().sent;
    }
    assert_eq!(sent, 256, "a ring full");
    let done = backend.transmit(&vec![frame(1, 1500); 10]).unwrap();
    assert_eq!((done.sent, done.dropped), (0, 10), "the frontend waited");
    assert!(!backend.port().arm().unwrap(), "the ring has room");
    backend.receive().unwrap();
    // The frontend requested an event; one response frees one slot.
    let id = backend.rings().requests()[0].id;
    backend.rings().answer(&[TxResponse { id, status: Status::Okay }]);
    assert!(backend.port().arm().unwrap());
    assert_eq!(backend.port().room().unwrap(), 1);
    assert!(backend.front.rules().all().is_empty());
}

/// Checks that the frontend does not read its own indices back from the ring.
#[test]
fn frontend_indices_written_by_backend_have_no_effect() {
    let mut backend = HostileBackend::connected();
    for garbage in [0, 1, 0x7FFF_FFFF, 0xFFFF_FFFF] {
        for word in [0, 12] {
            let pages = [backend.rings().tx.page.clone(), backend.rings().rx.page.clone()];
            pages.iter().for_each(|page| page.store_u32(word, garbage, Ordering::SeqCst).unwrap());
        }
        assert_eq!(backend.transmit(&[frame(1, 60)]).unwrap().sent, 1);
        let (produced, consumed) = (backend.rings().tx.req_prod(), backend.rings().tx.consumed);
        assert_eq!(produced, consumed + 1, "the frontend read its index back");
        let id = backend.rings().requests()[0].id;
        backend.rings().answer(&[TxResponse { id, status: Status::Okay }]);
        backend.receive().unwrap();
    }
    assert!(backend.front.rules().all().is_empty());
}

#[test]
fn xsa_155_response_changed_during_read_is_old_or_new_value() {
    let mut backend = HostileBackend::connected();
    let page = backend.rings().rx.page.clone();
    let places: Vec<_> = (0..256).map(|slot| backend.rings().rx.place(slot) + 6).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let flipper = std::thread::spawn(move || {
        // 100 and 4196 differ in one byte, since the bytes are not all fetched at the same instant.
        let mut size = 0x0064u16;
        while !seen.load(Ordering::Relaxed) {
            size ^= 0x1000;
            places.iter().for_each(|at| page.copy_from(*at, &size.to_le_bytes()).unwrap());
        }
    });
    let begun = Instant::now();
    let (mut whole, mut refused) = (0, 0);
    while begun.elapsed() < Duration::from_millis(200) || whole == 0 || refused == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the threads do not race");
        // The flipper also changes posted requests: the frontend knows their pages by slot.
        let response = RxResponse { id: 0, offset: 0, flags: RxFlags::NONE, status: 100 };
        backend.rings().deliver(&[response; 32]);
        let arrived = backend.receive().unwrap();
        assert!(arrived.iter().all(|a| a.bytes.len() == 100));
        whole += arrived.len();
        refused += 32 - arrived.len();
        assert_eq!(backend.front.rules().get("rx_crosses_page"), refused as u64);
    }
    stop.store(true, Ordering::Relaxed);
    flipper.join().unwrap();
}

#[test]
fn closed_or_shut_down_channel_closes_device() {
    let acts: [(&str, Act); 3] = [
        ("closed", |b| {
            let channels = &b.rings().channels;
            channels.iter().for_each(|channel| channel.shut(Shutdown::Both));
        }),
        ("nothing to be read any more", |b| b.rings().channels[0].shut(Shutdown::Read)),
        ("nothing will come", |b| b.rings().channels[0].shut(Shutdown::Write)),
    ];
    for (name, act) in acts {
        let mut backend = HostileBackend::connected();
        check_device_works(&mut backend);
        act(&mut backend);
        backend.rings().tx.page.store_u32(4, 0xFFFF_FFFF, Ordering::SeqCst).unwrap();
        // The frontend detects it when it sends a notification or when it clears one.
        let mut outcome = Ok(());
        for seed in 0..300 {
            let next = backend.rings().tx.req_prod() + 1;
            backend.rings().tx.page.store_u32(4, next, Ordering::SeqCst).unwrap();
            outcome = backend.transmit(&[frame(seed, 60)]).map(|_| ());
            outcome = outcome.and_then(|()| backend.port().clear_events());
            if outcome.is_err() {
                break;
            }
        }
        assert!(matches!(outcome, Err(Fault::Gone)), "{name}: {outcome:?}");
        assert_eq!(backend.front.rules().get("channel_closed"), 1, "{name}");
        check_restart(backend, name);
    }
}

#[test]
fn event_storm_and_full_channel_leave_frontend_running() {
    let mut backend = HostileBackend::connected();
    assert!(backend.rings().channels[0].fill() > 4096);
    let begun = Instant::now();
    for seed in 0..3000 {
        // The backend never reads its own events.
        let next = backend.rings().tx.req_prod() + 1;
        backend.rings().tx.page.store_u32(4, next, Ordering::SeqCst).unwrap();
        assert_eq!(backend.transmit(&[frame(seed, 60)]).unwrap().sent, 1);
        let id = backend.rings().requests()[0].id;
        backend.rings().answer(&[TxResponse { id, status: Status::Okay }]);
        backend.rings().channels.iter().for_each(|channel| channel.notify());
        backend.port().clear_events().unwrap();
        backend.receive().unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
    check_device_works(&mut backend);
}

/// Checks a backend that never releases a page. The frontend revokes the pages by force: the
/// backend cannot read their content, and the frontend does not lend them again until the backend has
/// released them.
#[test]
fn xsa_396_pages_never_released_by_backend_are_revoked_by_force() {
    let mut backend = HostileBackend::new(ArenaShape::of(1024, 1024));
    backend.connect();
    check_device_works(&mut backend);
    let grefs: Vec<u32> = (8..2056).filter(|g| backend.rings().arena.entry(*g).0 != 0).collect();
    assert!(grefs.len() > 500);
    // The backend's view of a buffer and of the frontend's packet.
    let request = {
        backend.transmit(&[frame(9, 4000)]).unwrap();
        backend.rings().requests()[0]
    };
    assert!(backend.rings().read(request.gref, 0, 4000) == frame(9, 4000));
    let page = backend.rings().arena.entry(request.gref.0).frame();
    grefs.iter().for_each(|gref| backend.rings().arena.set_status(*gref, 1));
    backend.enter(XenbusState::Closing);
    backend.look().unwrap();
    assert_eq!(backend.front_state(), XenbusState::Closed);
    assert!(backend.host.port.is_none());
    let granter = backend.platform.granter(DomId(0)).unwrap();
    assert_eq!(granter.quarantined(), grefs.len(), "a page is not in quarantine");
    assert!(grefs.iter().all(|gref| backend.rings().arena.entry(*gref).0 == 0), "all revoked");
    let mut left = vec![1; 4096];
    backend.rings().arena.read_only(page).unwrap().copy_to(0, &mut left).unwrap();
    assert!(left == [0; 4096], "the backend still sees what was in the page");
    // The remaining pages of the arena serve one more connection.
    let before = backend.attached.take().unwrap();
    backend.enter(XenbusState::Closed);
    backend.look().unwrap();
    backend.connect();
    check_device_works(&mut backend);
    let again: Vec<u32> = (8..2056).filter(|g| backend.rings().arena.entry(*g).0 != 0).collect();
    assert!(again.iter().all(|gref| !grefs.contains(gref)), "a reference in quarantine was issued");
    // A backend that releases the pages gets them again later.
    grefs.iter().for_each(|gref| before.arena.set_status(*gref, 0));
    let mut granter = granter;
    let mut leases = Vec::new();
    while let Ok(lease) = granter.lend(Access::ReadWrite) {
        leases.push(lease);
    }
    while let Ok(lease) = granter.lend(Access::ReadOnly) {
        leases.push(lease);
    }
    assert_eq!(leases.len() + again.len(), 2048, "every page can be lent");
    assert_eq!(granter.quarantined(), 0);
    for lease in leases {
        granter.take_back(lease).unwrap();
    }
}

/// Checks that lent pages hold the packets sent and zeros: no other data of the guest, also not in the rest
/// of a packet's page.
#[test]
fn xsa_403_lent_pages_hold_only_sent_data_and_zeros() {
    let mut backend = HostileBackend::connected();
    backend.transmit(&[frame(1, 100)]).unwrap();
    let request = backend.rings().requests()[0];
    let rings = backend.rings().ring_refs;
    let arena = &backend.rings().arena;
    let (sent_in, rings) =
        (arena.entry(request.gref.0).frame(), rings.map(|r| arena.entry(r).frame()));
    let mut page = vec![0; 4096];
    for n in 0..512 {
        arena.read_only(n).unwrap().copy_to(0, &mut page).unwrap();
        let sent = if n == sent_in { 100 } else { 0 };
        assert!(page[sent..].iter().all(|byte| *byte == 0), "page {n}, for sending");
        arena.writable(n).unwrap().copy_to(0, &mut page).unwrap();
        assert!(rings.contains(&n) || page.iter().all(|byte| *byte == 0), "page {n}");
    }
}

/// Checks that pages in quarantine do not block the return of later ones.
#[test]
fn released_pages_are_reused_while_other_pages_are_held() {
    let mut backend = HostileBackend::connected();
    let grefs: Vec<u32> = (8..1032).filter(|g| backend.rings().arena.entry(*g).0 != 0).collect();
    grefs.iter().for_each(|gref| backend.rings().arena.set_status(*gref, 1));
    backend.enter(XenbusState::Closing);
    backend.look().unwrap();
    let before = backend.attached.take().unwrap();
    // 40 pages stay held; a connection needs more pages than were never lent.
    grefs[40..].iter().for_each(|gref| before.arena.set_status(*gref, 0));
    let mut granter = backend.platform.granter(DomId(0)).unwrap();
    let mut leases = Vec::new();
    for access in [Access::ReadWrite, Access::ReadOnly] {
        while let Ok(lease) = granter.lend(access) {
            leases.push(lease);
        }
    }
    assert_eq!(leases.len(), 1024 - 40);
    assert_eq!(granter.quarantined(), 40);
}

#[test]
fn invalid_backend_key_fails_one_look() {
    let bad: [(&str, &str); 5] = [
        (keys::FEATURE_RX_COPY, "0"),
        (keys::FEATURE_RX_COPY, "maybe"),
        (keys::FEATURE_SG, "\u{0}\u{1}"),
        (keys::FEATURE_SPLIT_EVENT_CHANNELS, "-1"),
        (keys::FEATURE_IPV6_CSUM_OFFLOAD, ""),
    ];
    for (key, value) in bad {
        let mut backend = HostileBackend::default();
        backend.announce();
        backend.write(key, value);
        assert!(backend.look().is_err(), "{key} = {value:?}");
        assert!(backend.host.port.is_none(), "{key}");
        // The frontend lent nothing, and the next look succeeds.
        backend.write(key, "1");
        backend.connect();
        check_device_works(&mut backend);
    }
}

#[test]
fn frontend_of_backend_without_directory_closes() {
    let mut backend = HostileBackend::connected();
    let dir = backend.device.backend_path();
    backend.store.rm(&dir).unwrap();
    backend.look().unwrap();
    assert_eq!(backend.front_state(), XenbusState::Closed);
    assert!(backend.host.port.is_none());
}

/// Checks a device that the toolstack removed: the frontend cannot write its state either.
#[test]
fn removed_device_is_released() {
    let mut backend = HostileBackend::connected();
    let device = backend.device;
    toolstack::remove(&mut backend.store, &device).unwrap();
    for _ in 0..3 {
        backend.look().unwrap();
        assert!(backend.host.port.is_none());
    }
    assert_eq!(
        backend.store.read_opt(&device.frontend_path()).unwrap(),
        None,
        "the frontend created its directory again"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Checks random sequences of backend states, with and without rings: the frontend settles, has no port
    /// while the backend is closing, and connects to a backend that starts again.
    #[test]
    fn xsa_350_backend_states_in_any_order_leave_frontend_reconnectable(states in proptest::collection::vec("[0-9]{1,2}|[a-z -]{0,9}", 1..16)) {
        let mut backend = HostileBackend::connected();
        for state in &states {
            backend.write("state", state);
            // An error is permitted; a panic or an endless loop is not.
            let _ = backend.look();
            if matches!(state.as_str(), "5" | "6") {
                prop_assert!(backend.host.port.is_none(), "after {state}");
                prop_assert_eq!(backend.front_state(), XenbusState::Closed);
            }
        }
        backend.attached = None;
        backend.enter(XenbusState::Closing);
        backend.look().unwrap();
        backend.connect();
        check_device_works(&mut backend);
    }
}
