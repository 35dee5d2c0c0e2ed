//! Invalid store keys of a frontend, and arenas that it does not lend.

use std::collections::BTreeMap;

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_net::vif::backend::Life;
use ringfence_platform::{DomId, Platform};
use ringfence_testkit::net::frontend::TX_PAGES;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::XenbusState;
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::StoreAccess;

type Keys = BTreeMap<&'static str, String>;

struct Case {
    name: &'static str,
    rule: &'static str,
    change: fn(&mut Keys),
}

fn set(keys: &mut Keys, key: &'static str, value: &str) {
    keys.insert(key, value.to_owned());
}

const CASES: &[Case] = &[
    Case {
        name: "no tx ring",
        rule: "connect_missing_key",
        change: |k| drop(k.remove(keys::TX_RING_REF)),
    },
    Case {
        name: "no rx ring",
        rule: "connect_missing_key",
        change: |k| drop(k.remove(keys::RX_RING_REF)),
    },
    Case {
        name: "an rx ring that is no number",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::RX_RING_REF, "eight"),
    },
    Case {
        name: "a negative number",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::TX_RING_REF, "-8"),
    },
    Case {
        name: "a number with a space",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::TX_RING_REF, " 8"),
    },
    Case {
        name: "no digits",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::TX_RING_REF, ""),
    },
    Case {
        name: "more digits than fit",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::TX_RING_REF, "4294967296"),
    },
    Case {
        name: "2048 digits",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::TX_RING_REF, &"9".repeat(2048)),
    },
    Case {
        name: "bytes that are not text",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::EVENT_CHANNEL_TX, "\u{1}\u{7f}\u{fffd}"),
    },
    Case {
        name: "a feature that is neither",
        rule: "connect_not_a_number",
        change: |k| set(k, keys::FEATURE_SG, "2"),
    },
    Case {
        name: "ring reference 0",
        rule: "connect_ring_grant",
        change: |k| set(k, keys::TX_RING_REF, "0"),
    },
    Case {
        name: "a ring that was never granted",
        rule: "connect_ring_grant",
        change: |k| set(k, keys::RX_RING_REF, "1023"),
    },
    Case {
        name: "a ring beyond the table",
        rule: "connect_ring_grant",
        change: |k| set(k, keys::RX_RING_REF, "4294967295"),
    },
    Case {
        name: "a ring in a read-only page",
        rule: "connect_ring_grant",
        change: |k| set(k, keys::TX_RING_REF, &TX_PAGES.to_string()),
    },
    Case {
        name: "half of a pair of channels",
        rule: "connect_missing_key",
        change: |k| drop(k.remove(keys::EVENT_CHANNEL_RX)),
    },
    Case {
        name: "no channel at all",
        rule: "connect_missing_key",
        change: |k| {
            k.remove(keys::EVENT_CHANNEL_TX);
            k.remove(keys::EVENT_CHANNEL_RX);
        },
    },
    Case {
        name: "a port that is not there",
        rule: "connect_bad_port",
        change: |k| set(k, keys::EVENT_CHANNEL_TX, "4000000000"),
    },
    Case {
        name: "the same port twice",
        rule: "connect_bad_port",
        change: |k| {
            let port = k[keys::EVENT_CHANNEL_TX].clone();
            set(k, keys::EVENT_CHANNEL_RX, &port);
        },
    },
    Case {
        name: "a mode without RX copy",
        rule: "connect_no_rx_copy",
        change: |k| set(k, keys::REQUEST_RX_COPY, "0"),
    },
    Case {
        name: "more queues than were offered",
        rule: "connect_too_many_queues",
        change: |k| set(k, keys::MULTI_QUEUE_NUM_QUEUES, "2"),
    },
    Case {
        name: "no queues",
        rule: "connect_too_many_queues",
        change: |k| set(k, keys::MULTI_QUEUE_NUM_QUEUES, "0"),
    },
    Case {
        name: "all the queues there could be",
        rule: "connect_too_many_queues",
        change: |k| set(k, keys::MULTI_QUEUE_NUM_QUEUES, "4294967295"),
    },
];

fn check_device_works(stage: &mut Stage, guest: &mut HostileFrontend) {
    let sent = frame(1, 500);
    let packet = guest.packet(3, &sent, &[500]);
    guest.post(&packet);
    stage.round();
    let arrived = stage.arrived(guest.vif);
    assert!(arrived.len() == 1 && arrived[0].bytes == sent);
}

#[test]
fn invalid_key_closes_device_until_it_is_corrected() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let vif = guest.vif;
    // More connections than the driver domain has ports and the guest has grants, so a leak would show.
    for Case { name, rule, change } in CASES.iter().cycle().take(8 * CASES.len()) {
        let counted = stage.rules(vif).get(rule);
        guest.connect(&mut stage, change);
        assert_eq!(stage.rules(vif).get(rule), counted + 1, "{name}: {:?}", stage.rules(vif).all());
        assert_eq!(stage.state(vif), XenbusState::Closing, "{name}");
        assert!(!stage.error(vif).is_empty(), "{name}");
        assert!(stage.vifs[vif].host.port.is_none(), "{name}");
        assert_eq!((guest.arena.status(8), guest.arena.status(9)), (0, 0), "{name}: mapped");
        neighbour.exchange(&mut stage);
        guest.connect(&mut stage, |_| {});
        check_device_works(&mut stage, &mut guest);
    }
    neighbour.reconnect(&mut stage);
    neighbour.exchange(&mut stage);
}

/// Checks ports of other domains, and ports allocated for other domains.
#[test]
fn port_of_another_domain_is_not_bound() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    // A port of the guest that is allocated for another domain.
    let foreign = guest.domain.alloc(neighbour.platform.domid()).unwrap();
    guest.connect(&mut stage, |k| set(k, keys::EVENT_CHANNEL_TX, &foreign.port.to_string()));
    assert_eq!(stage.rules(guest.vif).get("connect_bad_port"), 1);
    // The numbers of the other guest's ports name ports of this guest.
    for port in 1..40 {
        let port = port.to_string();
        if guest.channels.iter().all(|c| c.port.to_string() != port) {
            guest.connect(&mut stage, |k| set(k, keys::EVENT_CHANNEL_TX, &port));
            assert!(stage.vifs[guest.vif].host.port.is_none());
        }
    }
    neighbour.exchange(&mut stage);
}

#[test]
fn same_page_for_both_rings_leaves_backend_running() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut neighbour = Neighbour::join(&mut stage);
        let mut guest = HostileFrontend::connected(&mut stage);
        guest.connect(&mut stage, |k| set(k, keys::RX_RING_REF, "8"));
        assert_eq!(stage.state(guest.vif), XenbusState::Connected);
        let packet = guest.packet(1, &frame(1, 3000), &[100; 10]);
        guest.post(&packet);
        for _ in 0..10 {
            stage.send(guest.vif, &[frame(1, 9000)]);
            neighbour.exchange(&mut stage);
        }
        guest.connect(&mut stage, |_| {});
        check_device_works(&mut stage, &mut guest);
    }
}

#[test]
fn connect_without_arena_is_refused() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::join(&mut stage);
    guest.connect(&mut stage, |_| {});
    assert_eq!(stage.rules(guest.vif).get("connect_no_arena"), 1);
    assert_eq!(stage.state(guest.vif), XenbusState::Closing);
    neighbour.exchange(&mut stage);
    guest.domain.lend(DomId(0), &guest.arena).unwrap();
    guest.connect(&mut stage, |_| {});
    check_device_works(&mut stage, &mut guest);
}

#[test]
fn state_that_is_not_a_number_closes_device_and_is_counted() {
    let mut stage = Stage::new(Mode::Copy);
    let mut guest = HostileFrontend::connected(&mut stage);
    for (text, n) in ["", "four", "4 ", "-1", "4294967296", &"4".repeat(2000)].iter().zip(1..) {
        guest.write("state", text);
        stage.look(guest.vif);
        // The look that releases the device looks a second time.
        assert!(stage.rules(guest.vif).get("state_not_a_number") >= n, "{text:.9}");
        assert!(stage.vifs[guest.vif].host.port.is_none(), "{text:.9}");
    }
    guest.connect(&mut stage, |_| {});
    check_device_works(&mut stage, &mut guest);
}

#[test]
fn removed_frontend_directory_ends_device() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let dir = guest.device.frontend_path();
    guest.store.rm(&dir).unwrap();
    assert_eq!(stage.look(guest.vif), Life::Over);
    assert!(stage.vifs[guest.vif].host.port.is_none());
    assert_eq!(guest.arena.status(8), 0);
    neighbour.exchange(&mut stage);
}

/// Checks a directory that the backend may not read, and keys that are directories.
#[test]
fn unreadable_or_nested_keys_affect_only_their_guest() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let dir = guest.device.frontend_path();
    let mine = PermissionList::owned_by(guest.domain.domid, NodeAccess::None);
    for key in ["state", "tx-ring-ref", ""] {
        let path = if key.is_empty() { dir.clone() } else { format!("{dir}/{key}") };
        guest.store.set_perms(&path, &mine).unwrap();
        stage.look(guest.vif);
        neighbour.exchange(&mut stage);
    }
    guest.store.mkdir(&format!("{dir}/state/deeper/and/deeper")).unwrap();
    guest.connect(&mut stage, |k| set(k, keys::TX_RING_REF, "8"));
    check_device_works(&mut stage, &mut guest);
}

/// Checks that a guest can be refused any number of times and still reconnect.
#[test]
fn guest_refused_200_times_can_reconnect() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    for n in 1..=200 {
        guest.connect(&mut stage, |k| set(k, keys::TX_RING_REF, "x"));
        assert_eq!(stage.rules(guest.vif).get("device_condemned"), n);
    }
    neighbour.exchange(&mut stage);
    guest.connect(&mut stage, |_| {});
    check_device_works(&mut stage, &mut guest);
}
