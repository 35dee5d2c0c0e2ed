//! Handshakes of two ends that follow the steps, and of one end with a hostile peer.

use proptest::prelude::*;

use super::*;
use XenbusState as S;

#[test]
fn fresh_pair_connects() {
    assert!(World::fresh().settle().is_up());
    assert!(World::fresh_waiting().settle().is_up());
}

#[test]
fn waiting_frontend_stays_initialised_until_backend_is_connected() {
    let world = World::fresh_waiting().back_moves().front_moves();
    assert_eq!((world.front.own, world.front.attached), (S::Initialised, true));
    assert_eq!(frontend_step(world.front), FrontendStep::Wait);
    let world = world.back_moves();
    assert_eq!(frontend_step(world.front), FrontendStep::Complete);
    assert!(world.front_moves().is_up());
}

#[test]
fn frontend_that_closes_and_returns_reconnects() {
    let mut world = World::fresh().settle();
    world.front.own = S::Closing;
    let mut world = world.looked().back_moves();
    assert_eq!((world.back.own, world.back.attached), (S::Closing, false));
    (world.front.own, world.front.attached) = (S::Closed, false);
    let mut world = world.looked().back_moves();
    assert_eq!(world.back.own, S::Closed);
    world.front.own = S::Initialising;
    assert!(world.looked().settle().is_up());
}

#[test]
fn frontend_that_restarts_without_closing_reconnects() {
    let mut world = World::fresh().settle();
    (world.front.own, world.front.attached) = (S::Initialising, false);
    let world = world.looked().back_moves();
    assert!(!world.back.attached, "the old rings are let go first");
    assert!(world.settle().is_up());
}

#[test]
fn frontend_follows_restarted_backend() {
    let mut world = World::fresh().settle();
    (world.back.own, world.back.attached) = (S::InitWait, false);
    assert!(world.looked().front_moves().settle().is_up());
}

#[test]
fn offline_device_is_forgotten() {
    let mut world = World::fresh().settle();
    world.back.online = false;
    (world.front.own, world.front.attached) = (S::Closed, false);
    assert_eq!(backend_step(world.looked().back), BackendStep::Forget);
}

#[test]
fn penalized_frontend_stays_closed_until_it_restarts() {
    let mut world = World::fresh().settle();
    world.back.penalized = true;
    let mut world = world.back_moves();
    assert_eq!((world.back.own, world.back.attached), (S::Closing, false));
    assert_eq!(backend_step(world.back), BackendStep::Wait);
    (world.front.own, world.front.attached) = (S::Initialising, false);
    assert!(world.looked().settle().is_up());
}

#[test]
fn frontend_that_skips_states_is_connected() {
    // Initialised (3) and then nothing, as blkfront does, and straight to Connected (4).
    for state in [S::Initialised, S::Connected] {
        let mut world = World::fresh().back_moves();
        world.front.own = state;
        assert_eq!(backend_step(world.looked().back), BackendStep::Connect);
    }
}

#[test]
fn frontend_with_reset_state_restarts() {
    // By a toolstack, or because its own could not be written: nobody else could begin.
    let mut world = World::fresh().back_moves().front_moves();
    assert!(world.front.attached && !world.front.was_up);
    world.front.own = S::Initialising;
    let world = world.looked().back_moves();
    assert_eq!(world.back.own, S::InitWait);
    assert!(world.settle().is_up());
}

#[test]
fn frontend_whose_channel_closed_before_connection_restarts() {
    // The backend bound the channel, died, and another one waits.
    let mut world = World::fresh().back_moves().front_moves();
    world.front.broken = true;
    let world = world.looked().front_moves();
    assert_eq!((world.front.own, world.front.attached), (S::Initialising, false));
    assert!(world.settle().is_up());
}

#[test]
fn device_left_connected_is_adopted_by_next_backend() {
    let mut world = World::fresh().settle();
    world.back.attached = false;
    assert_eq!(backend_step(world.looked().back), BackendStep::Connect);
    let world = world.back_moves();
    assert!(world.is_up());
    assert_eq!(world, world.settle());
}

#[test]
fn frontend_restarted_without_backend_connects() {
    for own in [S::Connected, S::Initialised, S::Reconfiguring] {
        let mut world = World::fresh().settle().with_new_frontend();
        (world.back.own, world.back.attached) = (own, false);
        assert!(world.looked().settle().is_up(), "{own:?}");
    }
}

proptest! {
    #[test]
    fn xsa_465_any_frontend_states_end_connected(
        waits: bool,
        states in proptest::collection::vec(0u32..12, 0..60),
    ) {
        let mut world = World { front_waits: waits, ..World::fresh() };
        for state in states {
            world.front.own = S::from_raw(state);
            world = world.looked().back_rests();
        }
        // Whatever it did, it can start over.
        prop_assert!(world.with_new_frontend().settle().is_up());
    }

    #[test]
    fn any_backend_states_end_connected(
        waits: bool,
        states in proptest::collection::vec(0u32..12, 0..60),
    ) {
        let mut world = World { front_waits: waits, ..World::fresh() };
        for state in states {
            world.back.own = S::from_raw(state);
            world = world.looked().front_rests();
        }
        prop_assert!(world.with_new_backend().settle().is_up());
    }
}
