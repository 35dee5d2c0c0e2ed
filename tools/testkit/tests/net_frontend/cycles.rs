//! Resource leaks: guests that join, reconnect and leave many times.

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_platform::DomId;
use ringfence_testkit::net::process::{alone, descriptors_settled, mappings, resident_pages};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_xenstore::StoreAccess;

/// Descriptors, mappings and resident pages of this process.
type Held = (usize, usize, usize);

fn held_when_settled(most: usize) -> Held {
    (descriptors_settled(most), mappings(), resident_pages())
}

fn join_and_leave(stage: &mut Stage, n: u32) {
    let mut guest = HostileFrontend::connected(stage);
    let sent = frame(n, 1000);
    let packet = guest.packet(1, &sent, &[300, 700]);
    guest.post(&packet);
    guest.post_buffers(16..20);
    stage.round();
    assert!(stage.arrived(guest.vif)[0].bytes == sent);
    assert_eq!(stage.send(guest.vif, &[sent]).unwrap().sent, 1);
    let vif = guest.vif;
    if n.is_multiple_of(2) {
        // The guest leaves before the backend.
        drop(guest);
        stage.remove_vif(vif);
    } else {
        stage.remove_vif(vif);
        drop(guest);
    }
}

#[test]
fn thousand_joins_and_leaves_leak_nothing() {
    alone("cycles::thousand_joins_and_leaves_leak_nothing", check_thousand_guests);
}

fn check_thousand_guests() {
    let mut stage = Stage::new(Mode::Map);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut warm = held_when_settled(usize::MAX);
    for n in 0..1100 {
        join_and_leave(&mut stage, n);
        if n == 99 {
            warm = held_when_settled(warm.0);
        }
        if n % 100 == 0 {
            neighbour.exchange(&mut stage);
        }
    }
    let held = held_when_settled(warm.0);
    // The allocator may keep some pages, and a heap for each thread that it finds busy. A leaked arena or ring
    // would be thousands.
    let bounds = (warm.0, warm.1 + 128, warm.2 + 512);
    assert!(
        held.0 <= bounds.0 && held.1 <= bounds.1 && held.2 <= bounds.2,
        "{warm:?}, then {held:?}"
    );
    let left = stage.store.directory("/local/domain/0/backend/vif").unwrap();
    assert_eq!(
        left.len(),
        1,
        "only the neighbour's directory is left, not {} others",
        left.len() - 1
    );
    neighbour.reconnect(&mut stage);
    neighbour.exchange(&mut stage);
}

/// Checks that a guest that reconnects many times leaves no descriptor, mapping or page in the driver
/// domain or the hub, and breaks no rule.
#[test]
fn repeated_reconnects_leak_nothing() {
    let name = "cycles::repeated_reconnects_leak_nothing";
    alone(name, check_reconnects);
}

fn check_reconnects() {
    let mut stage = Stage::new(Mode::Map);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let mut warm = held_when_settled(usize::MAX);
    for n in 0..300 {
        guest.connect(&mut stage, |_| {});
        assert!(
            stage.vifs[guest.vif].host.port.is_some(),
            "connection {n}: {}",
            stage.error(guest.vif)
        );
        if n % 50 == 0 {
            neighbour.exchange(&mut stage);
        }
        if n == 49 {
            warm = held_when_settled(warm.0);
        }
    }
    let held = held_when_settled(warm.0);
    // The allocator may keep some pages; a leak at each connection would be 250 of a kind.
    let bounds = (warm.0, warm.1 + 32, warm.2 + 512);
    assert!(
        held.0 <= bounds.0 && held.1 <= bounds.1 && held.2 <= bounds.2,
        "{warm:?}, then {held:?}"
    );
    assert_eq!(stage.vifs[guest.vif].host.attached, 301);
    assert!(stage.rules(guest.vif).all().is_empty());
    assert!(stage.hub.faults().is_empty(), "{:?}", stage.hub.faults());
    neighbour.reconnect(&mut stage);
    neighbour.exchange(&mut stage);
}

/// Checks that a guest that allocates without end reaches its own quota only.
#[test]
fn guest_that_allocates_every_port_exhausts_only_its_own_quota() {
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let mut hoard = Vec::new();
    while let Ok(channel) = guest.domain.alloc(DomId(0)) {
        hoard.push(channel);
    }
    assert!((100..=128).contains(&hoard.len()), "{} ports", hoard.len());
    neighbour.reconnect(&mut stage);
    neighbour.exchange(&mut stage);
    assert!(stage.hub.faults().contains_key("hub_quota"));
}
