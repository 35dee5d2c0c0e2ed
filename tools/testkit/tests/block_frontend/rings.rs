//! Invalid ring indices, and event channels that are misused.

use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_platform::{Access, Channel};
use ringfence_sys::pressure::Share;
use ringfence_testkit::block::Stage;
use ringfence_testkit::block::frontend::whole;
use ringfence_wire::blkif::{Operation, Status};
use ringfence_wire::xenbus::XenbusState;

use super::*;

#[test]
fn xsa_39_producer_index_overflow_closes_that_device_only() {
    for (jump, penalized) in [(33, true), (u32::MAX, true), (1 << 31, true), (32, false)] {
        let mut stage = Stage::new();
        let guest = other_guest(&mut stage);
        let mut front = connected(&mut stage, Mode::Persistent);
        front.publish_as(jump);
        if penalized {
            let why = stage.wait_for_penalty_close(front.vbd);
            assert!(why.contains("announced"), "{why}");
            assert_eq!(stage.rules(front.vbd).get("blk_producer_overflow"), 1);
            assert_eq!(stage.state(front.vbd), XenbusState::Closing);
        } else {
            // Slots of zeros: reads without a segment.
            let answers = front.answers(32);
            assert!(answers.iter().all(|answer| answer.status == Status::Error));
        }
        check_other_guest_works(&stage, &guest);
    }
}

#[test]
fn unchanged_producer_index_is_ignored_without_penalty() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Map);
    let page = front.lend(Access::ReadWrite, 1);
    for id in 0..20 {
        let slot = front.direct(Operation::Read, id, 0, &[whole(&page)]);
        assert_eq!(front.ask(&slot), Status::Okay);
    }
    front.publish_as(20);
    front.publish_as(20);
    std::thread::sleep(Duration::from_millis(20));
    assert!(stage.vbds[front.vbd].served().unwrap().is_alive());
    let slot = front.direct(Operation::Read, 77, 0, &[whole(&page)]);
    assert_eq!(front.ask(&slot), Status::Okay);
}

#[test]
fn commands_to_a_sleeping_worker_that_come_together_are_all_followed() {
    let mut stage = Stage::new();
    let front = connected(&mut stage, Mode::Persistent);
    let served = stage.vbds[front.vbd].served().unwrap();
    // A worker cannot wake as often.
    (0..1000).for_each(|_| served.set_share(Share::WHOLE));
    served.stop();
    let until = Instant::now() + Duration::from_secs(60);
    while !served.is_over() {
        assert!(Instant::now() < until, "the last command is left in the queue");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn penalized_guest_reconnects_after_restart() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.publish_as(1000);
    stage.wait_for_penalty_close(front.vbd);
    let leases = std::mem::take(&mut front.ring);
    front.ring = leases;
    front.ring[0].memory().zero(0, 4096).unwrap();
    (front.produced, front.consumed) = (0, 0);
    front.channel =
        ringfence_platform::Platform::alloc_unbound(&front.platform, ringfence_platform::DomId(0))
            .unwrap();
    front.enter(XenbusState::Initialising);
    front.connect(&mut stage, true);
    let page = front.lend(Access::ReadWrite, 1);
    let slot = front.direct(Operation::Read, 1, 0, &[whole(&page)]);
    assert_eq!(front.ask(&slot), Status::Okay);
}

#[test]
fn xsa_332_event_storm_is_throttled_while_ring_is_served() {
    let mut stage = Stage::new();
    let guest = other_guest(&mut stage);
    let mut front = connected(&mut stage, Mode::Persistent);
    let page = front.lend(Access::ReadWrite, 1);
    let begun = Instant::now();
    let mut id = 0;
    while begun.elapsed() < Duration::from_millis(300) {
        for _ in 0..200 {
            front.channel.notify().unwrap();
        }
        id += 1;
        let slot = front.direct(Operation::Read, id, 0, &[whole(&page)]);
        assert_eq!(front.ask(&slot), Status::Okay);
    }
    let served = stage.vbds[front.vbd].served().unwrap();
    let (queue, _) = served.counters().next().unwrap();
    let before = queue.spurious_wakeups.get();
    let begun = Instant::now();
    let (mut sent, mut woken) = (0, 0);
    while sent < 2000 || woken <= 24 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{woken} of {sent} events were seen");
        front.channel.notify().unwrap();
        sent += 1;
        std::thread::sleep(Duration::from_micros(50));
        woken = queue.spurious_wakeups.get() - before;
    }
    assert!(queue.throttles.get() > 0, "{queue:?}");
    // 16 events are tolerated. The 8th throttling, and each later one, ignores events for 5 ms.
    let elapsed = u64::try_from(begun.elapsed().as_millis()).unwrap();
    assert!(woken <= 16 + 8 + 1 + elapsed / 5, "{woken} of {sent} events in {elapsed} ms");
    check_other_guest_works(&stage, &guest);
}

#[test]
fn closed_event_channel_closes_device() {
    let mut stage = Stage::new();
    let guest = other_guest(&mut stage);
    let mut front = connected(&mut stage, Mode::Persistent);
    front.channel =
        ringfence_platform::Platform::alloc_unbound(&front.platform, ringfence_platform::DomId(0))
            .unwrap();
    stage.wait_for_penalty_close(front.vbd);
    assert_eq!(stage.rules(front.vbd).get("channel_closed"), 1);
    check_other_guest_works(&stage, &guest);
}
