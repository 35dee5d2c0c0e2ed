//! Keys that make no sense cost the device until its guest starts over.

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_testkit::block::Stage;
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::XenbusState;

use super::*;

/// Tries to connect with some keys changed; the rule that was broken.
fn refused(changes: &[(&str, &str)]) -> (String, Vec<&'static str>) {
    let mut stage = Stage::new();
    let guest = neighbour(&mut stage);
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
    unharmed(&stage, &guest);
    (why, rules)
}

#[test]
fn each_key_that_cannot_be_right_has_a_name() {
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
fn a_negotiated_feature_is_asked_for_once() {
    // The frontend says afterwards that it keeps no pages lent: what was agreed holds.
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
