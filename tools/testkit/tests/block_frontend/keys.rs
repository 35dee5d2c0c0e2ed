//! Invalid store keys: the backend closes the device until its guest starts again.

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_testkit::block::Stage;
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::XenbusState;

use super::*;

/// Connects with some keys changed. Returns the reason of the penalty and the rules that were broken.
fn refused(changes: &[(&str, &str)]) -> (String, Vec<&'static str>) {
    let mut stage = Stage::new();
    let guest = other_guest(&mut stage);
    let back = BlkbackOptions { queues: 2, ring_order: 2, ..options(Mode::Persistent) };
    let mut front = raw(&mut stage, back, Abi::X86_64, 1);
    stage.look(front.vbd);
    front.write_keys(true);
    for (key, value) in changes {
        front.set(key, value);
    }
    front.enter(XenbusState::Initialised);
    stage.look(front.vbd);
    assert_eq!(stage.state(front.vbd), XenbusState::Closing, "{changes:?}");
    let why = stage.vbds[front.vbd].penalized().unwrap_or_default().to_owned();
    let rules = stage.rules(front.vbd).all().into_keys().collect();
    check_other_guest_works(&stage, &guest);
    (why, rules)
}

#[test]
fn invalid_store_key_closes_device_under_named_rule() {
    for (changes, rule) in [
        (&[(keys::RING_REF, "4000")][..], "connect_ring_grant"),
        (&[(keys::RING_REF, "0")], "connect_ring_grant"),
        (&[(keys::RING_REF, "-1")], "connect_not_a_number"),
        (&[(keys::RING_REF, "99999999999")], "connect_not_a_number"),
        (&[(keys::EVENT_CHANNEL, "77777")], "connect_bad_port"),
        (&[(keys::PROTOCOL, "riscv-abi")], "connect_unknown_protocol"),
        (&[(keys::MULTI_QUEUE_NUM_QUEUES, "3")], "connect_too_many_queues"),
        (&[(keys::MULTI_QUEUE_NUM_QUEUES, "0")], "connect_too_many_queues"),
        (&[(keys::MULTI_QUEUE_NUM_QUEUES, "2")], "connect_missing_key"),
        (&[(keys::RING_PAGE_ORDER, "3")], "connect_ring_size"),
        (&[(keys::RING_PAGE_ORDER, "4000000000")], "connect_ring_size"),
        (&[(keys::RING_PAGE_ORDER, "1")], "connect_missing_key"),
        (&[(keys::NUM_RING_PAGES, "3")], "connect_ring_size"),
        (&[(keys::FEATURE_PERSISTENT, "2")], "connect_not_a_number"),
    ] {
        let (why, rules) = refused(changes);
        assert!(rules.contains(&rule), "{changes:?}: {why} {rules:?}");
    }
}

#[test]
fn feature_changed_after_negotiation_has_no_effect() {
    // The frontend withdraws the feature after negotiation: the negotiated value stays in effect.
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.set(keys::FEATURE_PERSISTENT, "0");
    stage.look(front.vbd);
    assert!(stage.vbds[front.vbd].connection().unwrap().persistent);
    let mut other = raw(&mut stage, options(Mode::Persistent), Abi::X86_64, 1);
    other.connect(&mut stage, false);
    other.set(keys::FEATURE_PERSISTENT, "1");
    stage.look(other.vbd);
    assert!(!stage.vbds[other.vbd].connection().unwrap().persistent);
}
