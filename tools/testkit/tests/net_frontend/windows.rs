//! Invalid grant windows, and invalid references to them.

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_net::vif::WINDOW_ENTRIES_MAX;
use ringfence_platform::DomId;
use ringfence_platform::local::ArenaShape;
use ringfence_platform::local::raw::RawArena;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::grant::{Gref, RawGrantEntry};
use ringfence_wire::netif::{Status, TxFlags, TxRequest, keys};
use ringfence_wire::xenbus::XenbusState;

const SHAPE: ArenaShape = ArenaShape { writable: 16, read_only: 16, references: 64 };
/// Bit that marks a reference into the ring's grant window.
const MARK: u32 = 1 << 31;
/// First references of the read-only pages and of the writable pages of each window.
const READ_ONLY: u32 = 8;
const WRITABLE: u32 = 32;

struct Guest {
    frontend: HostileFrontend,
    tx: RawArena,
    rx: RawArena,
}

impl Guest {
    /// Connects a guest with a grant window for each ring.
    fn connected(stage: &mut Stage) -> Guest {
        let mut frontend = HostileFrontend::join(stage);
        frontend.domain.lend(DomId(0), &frontend.arena).unwrap();
        let [tx, rx] = [1, 2].map(|handle| {
            let window = RawArena::new(SHAPE).unwrap();
            for page in 0..16 {
                window.grant(READ_ONLY + page, DomId(0), page, true);
                window.grant(WRITABLE + page, DomId(0), page, false);
            }
            frontend.domain.lend_window(DomId(0), &window, handle).unwrap();
            window
        });
        let mut guest = Guest { frontend, tx, rx };
        guest.connect(stage, "1", "2");
        assert_eq!(stage.state(guest.frontend.vif), XenbusState::Connected);
        guest
    }

    fn connect(&mut self, stage: &mut Stage, tx: &str, rx: &str) {
        self.frontend.connect(stage, |keys| {
            keys.insert(keys::RINGFENCE_TX_WINDOW, tx.to_owned());
            keys.insert(keys::RINGFENCE_RX_WINDOW, rx.to_owned());
        });
    }

    /// Sends a frame in the page of any reference. Returns the status of the response.
    fn send(&mut self, stage: &mut Stage, gref: u32, flags: TxFlags, size: u16) -> Status {
        self.frontend.post(&[TxRequest { gref: Gref(gref), offset: 0, flags, id: 7, size }]);
        stage.round();
        self.frontend.statuses()[0]
    }
}

fn check_refused(stage: &mut Stage, guest: &mut Guest, rule: &str) {
    assert_eq!(stage.rules(guest.frontend.vif).get(rule), 1, "{rule}");
    assert_eq!(stage.state(guest.frontend.vif), XenbusState::Closing);
    assert!(stage.vifs[guest.frontend.vif].host.port.is_none());
}

#[test]
fn missing_or_oversized_window_closes_device() {
    let mut stage = Stage::new(Mode::Window);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = Guest::connected(&mut stage);
    guest.connect(&mut stage, "1", "3");
    check_refused(&mut stage, &mut guest, "connect_no_such_window");
    let shape = ArenaShape { writable: 1, read_only: 1, references: WINDOW_ENTRIES_MAX + 9 };
    let large = RawArena::new(shape).unwrap();
    guest.frontend.domain.lend_window(DomId(0), &large, 4).unwrap();
    guest.connect(&mut stage, "4", "2");
    check_refused(&mut stage, &mut guest, "connect_window_too_large");
    guest.connect(&mut stage, "first", "2");
    check_refused(&mut stage, &mut guest, "connect_not_a_number");
    neighbour.exchange(&mut stage);
    // A ring may have no window.
    guest.frontend.connect(&mut stage, |_| {});
    assert_eq!(stage.state(guest.frontend.vif), XenbusState::Connected);
    neighbour.exchange(&mut stage);
}

#[test]
fn gref_outside_window_costs_that_packet() {
    let mut stage = Stage::new(Mode::Window);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = Guest::connected(&mut stage);
    let vif = guest.frontend.vif;
    let good = frame(1, 100);
    guest.tx.read_only(0).unwrap().copy_from(0, &good).unwrap();
    let denied = guest.tx.entry(READ_ONLY).0 & !(0xFFFF << 16) | 9 << 16;
    guest.tx.set_entry(20, RawGrantEntry(denied));
    guest.tx.grant(21, DomId(0), 16, true);
    let cases = [
        (MARK, "tx_gref_not_granted"),
        (MARK | 7, "tx_gref_not_granted"),
        (MARK | 63, "tx_gref_not_granted"),
        (MARK | 64, "tx_gref_not_granted"),
        (u32::MAX, "tx_gref_not_granted"),
        (MARK | 20, "tx_grant_denied"),
        (MARK | 21, "tx_page_beyond_arena"),
    ];
    guest.tx.set_entry(63, RawGrantEntry::INVALID);
    for (gref, rule) in cases {
        for flags in [TxFlags::NONE, TxFlags::CHECKSUM_BLANK] {
            let counted = stage.rules(vif).get(rule);
            assert_eq!(guest.send(&mut stage, gref, flags, 100), Status::Error, "{gref:#x}");
            assert_eq!(stage.rules(vif).get(rule), counted + 1, "{gref:#x}");
        }
        let sent = guest.send(&mut stage, MARK | READ_ONLY, TxFlags::NONE, 100);
        assert_eq!(sent, Status::Okay);
        assert!(stage.arrived(vif).iter().all(|arrived| arrived.bytes == good));
        neighbour.exchange(&mut stage);
    }
    assert!((0..64).all(|gref| guest.tx.status(gref) == 0), "a use is left");
}

/// Checks that the backend does not write to read-only pages: its mapping of them is read-only too.
#[test]
fn read_only_page_as_rx_buffer_is_not_written() {
    let mut stage = Stage::new(Mode::Window);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = Guest::connected(&mut stage);
    let vif = guest.frontend.vif;
    let buffers = [WRITABLE, READ_ONLY, WRITABLE + 1, WRITABLE + 2, READ_ONLY + 1, WRITABLE + 3];
    guest.frontend.post_buffers(buffers.map(|gref| MARK | gref));
    let frames = [frame(1, 60), frame(2, 60), frame(3, 60), frame(4, 6000), frame(5, 60)];
    let done = stage.send(vif, &frames).unwrap();
    assert_eq!((done.sent, done.dropped), (3, 2));
    let answers: Vec<_> = guest.frontend.rx_responses().iter().map(|r| r.status).collect();
    assert_eq!(answers, [60, -1, 60, -1, -1, 60]);
    assert_eq!(stage.rules(vif).get("rx_grant_denied"), 2);
    let mut bytes = [0; 60];
    guest.rx.read_only(0).unwrap().copy_to(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 60]);
    guest.rx.writable(3).unwrap().copy_to(0, &mut bytes).unwrap();
    assert!(bytes[..] == frames[4][..]);
    assert!((0..64).all(|gref| guest.rx.status(gref) == 0), "a use is left");
    neighbour.exchange(&mut stage);
}

/// Checks that revoked references in the rings cost only the packets of their own guest.
#[test]
fn revoked_window_grefs_cost_only_their_own_packets() {
    let mut stage = Stage::new(Mode::Window);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = Guest::connected(&mut stage);
    let vif = guest.frontend.vif;
    for round in 0..200u32 {
        let gref = READ_ONLY + round % 16;
        guest.frontend.post_buffers([MARK | (WRITABLE + round % 16)]);
        if round % 3 != 0 {
            guest.tx.set_entry(gref, RawGrantEntry::INVALID);
            guest.rx.set_entry(WRITABLE + round % 16, RawGrantEntry::INVALID);
            guest.tx.punch(true, round % 16, 1).unwrap();
            guest.rx.punch(false, round % 16, 1).unwrap();
        }
        let expected = if round % 3 == 0 { Status::Okay } else { Status::Error };
        assert_eq!(guest.send(&mut stage, MARK | gref, TxFlags::NONE, 1000), expected);
        let sent = stage.send(vif, &[frame(round, 1000)]).unwrap().sent;
        assert_eq!(sent, usize::from(round % 3 == 0));
        guest.tx.grant(gref, DomId(0), round % 16, true);
        guest.rx.grant(WRITABLE + round % 16, DomId(0), round % 16, false);
        neighbour.exchange(&mut stage);
    }
    assert!(stage.vifs[vif].host.port.is_some());
}

/// Checks that a granter that writes the grantee's status words affects only its own device.
#[test]
fn window_status_words_written_by_granter_have_no_effect() {
    let mut stage = Stage::new(Mode::Window);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = Guest::connected(&mut stage);
    for uses in [1, u32::MAX, 0x8000_0000] {
        (0..64).for_each(|gref| guest.tx.set_status(gref, uses));
        let sent = guest.send(&mut stage, MARK | READ_ONLY, TxFlags::NONE, 1000);
        assert_eq!(sent, Status::Okay);
        assert_eq!(guest.tx.status(READ_ONLY), 0);
        neighbour.exchange(&mut stage);
    }
}

#[test]
fn window_gref_in_other_access_mode_is_refused() {
    for mode in [Mode::Copy, Mode::Map, Mode::Staging] {
        let mut stage = Stage::new(mode);
        let mut guest = Guest::connected(&mut stage);
        let sent = guest.send(&mut stage, MARK | READ_ONLY, TxFlags::NONE, 100);
        assert_eq!(sent, Status::Error, "{mode}");
    }
}
