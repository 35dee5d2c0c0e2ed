//! Drivers that are unbound from a device and bound to it again.

use ringfence_access::Mode;
use ringfence_platform::Access;
use ringfence_platform::local::LocalPlatform;
use ringfence_testkit::block::frontend::whole;
use ringfence_testkit::block::{RawFront, Stage};
use ringfence_wire::blkif::{Abi, Operation, Status};
use ringfence_wire::xenbus::XenbusState;

use super::*;

#[test]
fn a_driver_that_left_without_a_word_finds_the_device_connected() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let vbd = front.vbd;
    let page = front.lend(Access::ReadWrite, 7);
    let write = front.direct(Operation::Write, 1, 8, &[whole(&page)]);
    assert_eq!(front.ask(&write), Status::Okay);
    // As Linux leaves: from connected to closed.
    front.enter(XenbusState::Closed);
    stage.look_until_released(vbd);
    let values = stage.platform.counters().values();
    assert_eq!(values.grant_maps, values.grant_unmaps, "nothing of it is held");
    for _ in 0..3 {
        assert_eq!(stage.state(vbd), XenbusState::Connected, "and it stays so");
        stage.look(vbd);
    }
    assert!(stage.vbds[vbd].connection().is_none());
    // It has a request in its ring before it says anything.
    let RawFront { platform, .. } = front;
    let mut front = RawFront::new(&stage, platform, vbd, Abi::X86_64, 1);
    let back = front.lend(Access::ReadWrite, 0);
    let read = front.direct(Operation::Read, 2, 8, &[whole(&back)]);
    front.post(&[read]);
    front.write_keys(true);
    front.enter(XenbusState::Initialised);
    stage.look(vbd);
    let connection = *stage.vbds[vbd].connection().unwrap();
    assert!(connection.persistent && !connection.adopted, "{connection:?}");
    assert_eq!(front.answers(1)[0].status, Status::Okay);
    let found: [u8; 4] = back.memory().fetch(4092).unwrap().into_unchecked();
    assert_eq!(found, [7; 4]);
    assert!(stage.rules(vbd).all().is_empty());
}

/// A frontend at the same vbd as `platform`'s last one, which still has its ring: it saw that the backend
/// was connected, so that it is ready at once.
fn comes_back(stage: &Stage, platform: LocalPlatform, vbd: usize) -> RawFront {
    let mut front = RawFront::new(stage, platform, vbd, Abi::X86_64, 1);
    front.write_keys(true);
    front.enter(XenbusState::Initialised);
    front.enter(XenbusState::Connected);
    front
}

/// It reads its disk, without having looked at the backend's state.
fn reads(stage: &mut Stage, front: &mut RawFront) {
    let page = front.lend(Access::ReadWrite, 1);
    let read = front.direct(Operation::Read, 2, 8, &[whole(&page)]);
    front.post(&[read]);
    stage.look_until_connected(front.vbd);
    assert_eq!(front.answers(1)[0].status, Status::Okay);
    assert_eq!(stage.state(front.vbd), XenbusState::Connected);
    assert!(stage.rules(front.vbd).all().is_empty());
}

#[test]
fn one_that_is_back_before_the_backend_saw_it_leave_is_served() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    let RawFront { platform, vbd, .. } = front;
    let mut front = comes_back(&stage, platform, vbd);
    // Whoever serves the old ring has to notice by the new one's key.
    stage.look(vbd);
    reads(&mut stage, &mut front);
}

#[test]
fn one_that_is_back_while_the_backend_lets_go_is_served() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    let vbd = front.vbd;
    stage.look(vbd);
    let RawFront { platform, .. } = front;
    let mut front = comes_back(&stage, platform, vbd);
    reads(&mut stage, &mut front);
}

#[test]
fn one_that_is_back_when_it_was_let_go_of_is_served_again_and_again() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let vbd = front.vbd;
    for _ in 0..4 {
        front.enter(XenbusState::Closed);
        stage.look_until_released(vbd);
        let RawFront { platform, .. } = front;
        front = comes_back(&stage, platform, vbd);
        reads(&mut stage, &mut front);
    }
}

#[test]
fn one_that_said_that_it_was_closing_finds_it_closed() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closing);
    stage.look_until(front.vbd, XenbusState::Closing);
    front.enter(XenbusState::Closed);
    stage.look_until(front.vbd, XenbusState::Closed);
}

#[test]
fn one_that_starts_over_in_order_is_announced_to_in_order() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    stage.look_until_released(front.vbd);
    front.enter(XenbusState::Initialising);
    stage.look_until(front.vbd, XenbusState::InitWait);
}

#[test]
fn one_that_broke_a_rule_is_not_waited_for() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    stage.vbds[front.vbd].close_with_penalty("for this test");
    front.enter(XenbusState::Closed);
    stage.look_until(front.vbd, XenbusState::Closed);
}
