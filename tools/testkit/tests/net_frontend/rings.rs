//! Invalid ring contents: the device is closed, and its guest may reconnect.

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_platform::Gref;
use ringfence_testkit::net::frontend::RX_BUFFERS;
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::{TxFlags, TxRequest};
use ringfence_wire::xenbus::XenbusState;

struct Case {
    name: &'static str,
    rule: &'static str,
    act: fn(&mut HostileFrontend),
    /// Set if the backend detects the violation only when it sends to the guest.
    on_send: bool,
}

fn slots(guest: &mut HostileFrontend, flags: TxFlags, n: usize) {
    let slot = TxRequest { gref: Gref(512), offset: 0, flags, id: 1, size: 60 };
    guest.post(&vec![slot; n]);
}

const CASES: &[Case] = &[
    Case {
        name: "257 requests in a ring of 256",
        rule: "tx_producer_overflow",
        act: |g| g.tx.set_req_prod(g.tx.produced + 257),
        on_send: false,
    },
    Case {
        name: "nearly 2^32 requests",
        rule: "tx_producer_overflow",
        act: |g| g.tx.set_req_prod(g.tx.produced + 0xFFFF_0000),
        on_send: false,
    },
    Case {
        name: "a producer index taken back",
        rule: "tx_producer_overflow",
        act: |g| g.tx.set_req_prod(g.tx.produced - 1),
        on_send: false,
    },
    Case {
        name: "the ring's page punched out",
        rule: "tx_producer_overflow",
        act: |g| g.arena.punch(false, 0, 1).unwrap(),
        on_send: false,
    },
    Case {
        name: "a chain that goes on where nothing was published",
        rule: "tx_unfinished_chain",
        act: |g| slots(g, TxFlags::MORE_DATA, 3),
        on_send: false,
    },
    Case {
        name: "extra infos that go on where nothing was published",
        rule: "tx_unfinished_chain",
        act: |g| {
            slots(g, TxFlags::EXTRA_INFO, 1);
            g.tx.put(&[9, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            g.tx.set_req_prod(g.tx.produced);
        },
        on_send: false,
    },
    Case {
        name: "a chain of all the ring's slots",
        rule: "tx_chain_longer_than_ring",
        act: |g| slots(g, TxFlags::MORE_DATA, 256),
        on_send: false,
    },
    Case {
        name: "extra infos without end",
        rule: "tx_chain_longer_than_ring",
        act: |g| {
            slots(g, TxFlags::EXTRA_INFO, 1);
            (0..255).for_each(|_| g.tx.put(&[9, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
            g.tx.set_req_prod(g.tx.produced);
        },
        on_send: false,
    },
    Case {
        name: "257 buffers in a ring of 256",
        rule: "rx_producer_overflow",
        act: |g| g.rx.set_req_prod(g.rx.produced + 257),
        on_send: true,
    },
    Case {
        name: "buffers taken back",
        rule: "rx_producer_overflow",
        act: |g| g.rx.set_req_prod(0),
        on_send: true,
    },
];

fn check_device_works(stage: &mut Stage, guest: &mut HostileFrontend) {
    let sent = frame(1, 500);
    let packet = guest.packet(3, &sent, &[500]);
    guest.post(&packet);
    guest.post_buffers([RX_BUFFERS]);
    stage.round();
    let arrived = stage.arrived(guest.vif);
    assert!(arrived.len() == 1 && arrived[0].bytes == sent, "a packet arrives");
    assert_eq!(stage.send(guest.vif, core::slice::from_ref(&sent)).map(|t| t.sent), Some(1));
    assert!(guest.read_buffer(0, 500) == sent, "a packet is received");
}

#[test]
fn xsa_39_invalid_ring_closes_that_device_only() {
    for mode in Mode::NETWORK {
        let mut stage = Stage::new(mode);
        let mut neighbour = Neighbour::join(&mut stage);
        let mut guest = HostileFrontend::connected(&mut stage);
        let vif = guest.vif;
        for Case { name, rule, act, on_send } in CASES {
            check_device_works(&mut stage, &mut guest);
            neighbour.exchange(&mut stage);
            let all = stage.rules(vif).all();
            act(&mut guest);
            let responded = guest.tx.rsp_prod();
            if *on_send {
                assert_eq!(stage.send(vif, &[frame(2, 60)]), None, "{name}");
            }
            neighbour.exchange(&mut stage);
            let before = |rule: &str| all.get(rule).copied().unwrap_or(0);
            assert_eq!(stage.rules(vif).get(rule), before(rule) + 1, "{mode}, {name}");
            assert_eq!(
                stage.rules(vif).get("device_condemned"),
                before("device_condemned") + 1,
                "{mode}, {name}"
            );
            assert!(stage.vifs[vif].host.port.is_none(), "{name}");
            assert_eq!(stage.state(vif), XenbusState::Closing, "{name}");
            assert!(!stage.error(vif).is_empty(), "{name}: the store has no reason");
            assert!(
                guest.tx.rsp_prod() == responded || *rule == "tx_producer_overflow",
                "{name}: a request was answered"
            );
            assert_eq!(guest.arena.status(8), 0, "{name}: a ring is mapped");
            // The guest may reconnect.
            guest.connect(&mut stage, |_| {});
            assert_eq!(stage.state(vif), XenbusState::Connected, "{mode}, {name}");
        }
        check_device_works(&mut stage, &mut guest);
        neighbour.exchange(&mut stage);
    }
}

/// Equal store events merge while they wait, so a watcher that reads none meanwhile gets a few of them and
/// not thousands. The store's own tests count the merged events.
#[test]
fn xsa_349_flood_of_state_changes_merges_into_few_events() {
    const WRITES: u32 = 3000;
    /// One event for the watch, one merged from all that waited, and some that come between.
    const EVENTS_MAX: u32 = 16;
    let mut stage = Stage::new(Mode::Copy);
    let mut neighbour = Neighbour::join(&mut stage);
    let mut guest = HostileFrontend::connected(&mut stage);
    let device = *stage.vifs[guest.vif].backend.device();
    let watched = format!("{}/state", device.frontend_path());
    stage.store.watch(&watched, "flood").unwrap();
    for i in 0..WRITES {
        guest.write("state", (i % 9).to_string());
    }
    let mut events = 0;
    while let Some(_event) = stage.store.next_event().unwrap() {
        events += 1;
        stage.look(guest.vif);
    }
    assert!(events <= EVENTS_MAX, "{events} looks for {WRITES} changes");
    neighbour.exchange(&mut stage);
    guest.connect(&mut stage, |_| {});
    check_device_works(&mut stage, &mut guest);
}
