//! Guests that come and go leave nothing behind.

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_platform::DomId;
use ringfence_testkit::net::process::{alone, descriptors_settled, mappings, resident_pages};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_xenstore::StoreAccess;

/// What is held now: descriptors, mappings, pages.
type Held = (usize, usize, usize);

fn held_when_settled(most: usize) -> Held {
    (descriptors_settled(most), mappings(), resident_pages())
}

fn come_and_go(stage: &mut Stage, n: u32) {
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
        // The guest goes first.
        drop(guest);
        stage.remove_vif(vif);
    } else {
        stage.remove_vif(vif);
        drop(guest);
    }
}

#[test]
fn a_thousand_guests_that_come_and_go_leave_nothing() {
    alone("cycles::a_thousand_guests_that_come_and_go_leave_nothing", thousand_guests);
}

fn thousand_guests() {
    let mut stage = Stage::new(Mode::Map);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut warm = held_when_settled(usize::MAX);
    for n in 0..1100 {
        come_and_go(&mut stage, n);
        if n == 99 {
            warm = held_when_settled(warm.0);
        }
        if n % 100 == 0 {
            neighbour.exchange(&mut stage);
        }
    }
    let held = held_when_settled(warm.0);
    // The allocator may keep some; an arena or a ring leaked each time would be thousands.
    let bounds = (warm.0, warm.1 + 32, warm.2 + 512);
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

/// A guest that connects again and again leaves no descriptor, mapping or page behind, in the driver
/// domain or at the hub, and breaks no rule by it.
#[test]
fn a_guest_that_reconnects_for_ever_takes_nothing_from_the_neighbour() {
    let name = "cycles::a_guest_that_reconnects_for_ever_takes_nothing_from_the_neighbour";
    alone(name, reconnects);
}

fn reconnects() {
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
    // The allocator may keep some; what leaks with each connection would be 250 of a kind.
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

/// Who only ever allocates gets no further than its own quota.
#[test]
fn a_guest_that_hoards_ports_hoards_its_own() {
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
