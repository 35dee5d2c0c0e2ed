//! Frontend drivers that are unbound from a device and bound to it again.

use ringfence_access::Mode;
use ringfence_platform::Access;
use ringfence_platform::local::LocalPlatform;
use ringfence_testkit::block::frontend::whole;
use ringfence_testkit::block::{RawFront, Stage};
use ringfence_wire::blkif::{Abi, Operation, Status, keys};
use ringfence_wire::xenbus::XenbusState;

use super::*;

#[test]
fn frontend_that_left_without_closing_finds_device_connected() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let vbd = front.vbd;
    let page = front.lend(Access::ReadWrite, 7);
    let write = front.direct(Operation::Write, 1, 8, &[whole(&page)]);
    assert_eq!(front.ask(&write), Status::Okay);
    // Linux leaves in this way: from Connected to Closed.
    front.enter(XenbusState::Closed);
    stage.look_until_released(vbd);
    let values = stage.platform.counters().values();
    assert_eq!(values.grant_maps, values.grant_unmaps, "nothing of it is held");
    for _ in 0..3 {
        assert_eq!(stage.state(vbd), XenbusState::Connected, "and it stays so");
        stage.look(vbd);
    }
    assert!(stage.vbds[vbd].connection().is_none());
    // The next frontend has a request in its ring before it enters a state.
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

/// Connects a frontend at the vbd of `platform`'s previous one, whose state the backend still has. The
/// frontend sees a connected backend and enters Connected at once.
fn reconnect(stage: &Stage, platform: LocalPlatform, vbd: usize) -> RawFront {
    let mut front = RawFront::new(stage, platform, vbd, Abi::X86_64, 1);
    front.write_keys(true);
    front.enter(XenbusState::Initialised);
    front.enter(XenbusState::Connected);
    front
}

/// Checks that a read succeeds before the frontend has looked at the backend's state.
fn check_read(stage: &mut Stage, front: &mut RawFront) {
    let page = front.lend(Access::ReadWrite, 1);
    let read = front.direct(Operation::Read, 2, 8, &[whole(&page)]);
    front.post(&[read]);
    stage.look_until_connected(front.vbd);
    assert_eq!(front.answers(1)[0].status, Status::Okay);
    assert_eq!(stage.state(front.vbd), XenbusState::Connected);
    assert!(stage.rules(front.vbd).all().is_empty());
}

#[test]
fn frontend_back_before_backend_noticed_its_exit_is_served() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    let RawFront { platform, vbd, .. } = front;
    let mut front = reconnect(&stage, platform, vbd);
    // The backend of the old ring must notice the keys of the new one.
    stage.look(vbd);
    check_read(&mut stage, &mut front);
}

#[test]
fn frontend_back_during_release_of_old_ring_is_served() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    let vbd = front.vbd;
    stage.look(vbd);
    let RawFront { platform, .. } = front;
    let mut front = reconnect(&stage, platform, vbd);
    check_read(&mut stage, &mut front);
}

#[test]
fn frontend_back_after_release_is_served_each_time() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let vbd = front.vbd;
    for _ in 0..4 {
        front.enter(XenbusState::Closed);
        stage.look_until_released(vbd);
        let RawFront { platform, .. } = front;
        front = reconnect(&stage, platform, vbd);
        check_read(&mut stage, &mut front);
    }
}

#[test]
fn frontend_that_closes_in_order_finds_backend_closed() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closing);
    stage.look_until(front.vbd, XenbusState::Closing);
    front.enter(XenbusState::Closed);
    stage.look_until(front.vbd, XenbusState::Closed);
}

#[test]
fn frontend_without_key_of_persistent_grants_finds_backend_closed() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    let vbd = front.vbd;
    // GRUB, which hands over to a kernel.
    front.remove(keys::FEATURE_PERSISTENT);
    front.enter(XenbusState::Closed);
    stage.look_until(vbd, XenbusState::Closed);
    front.enter(XenbusState::Initialising);
    stage.look_until(vbd, XenbusState::InitWait);
    assert!(stage.rules(vbd).all().is_empty());
}

#[test]
fn frontend_that_enters_initialising_gets_init_wait() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    front.enter(XenbusState::Closed);
    stage.look_until_released(front.vbd);
    front.enter(XenbusState::Initialising);
    stage.look_until(front.vbd, XenbusState::InitWait);
}

#[test]
fn backend_closes_after_penalized_frontend_left() {
    let mut stage = Stage::new();
    let mut front = connected(&mut stage, Mode::Persistent);
    stage.vbds[front.vbd].close_with_penalty("for this test");
    front.enter(XenbusState::Closed);
    stage.look_until(front.vbd, XenbusState::Closed);
}
