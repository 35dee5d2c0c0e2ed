//! The handshake as a game of two sides that follow the steps, and of one side that does not.

use proptest::prelude::*;

use super::*;
use XenbusState as S;

#[test]
fn a_fresh_pair_connects() {
    assert!(World::fresh().settle().is_up());
    assert!(World::fresh_waiting().settle().is_up());
}

#[test]
fn a_frontend_that_waits_is_initialised_until_the_backend_is_connected() {
    let world = World::fresh_waiting().back_moves().front_moves();
    assert_eq!((world.front.own, world.front.attached), (S::Initialised, true));
    assert_eq!(frontend_step(world.front), FrontendStep::Wait);
    let world = world.back_moves();
    assert_eq!(frontend_step(world.front), FrontendStep::Complete);
    assert!(world.front_moves().is_up());
}

#[test]
fn a_frontend_that_closes_and_comes_back_connects_again() {
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
fn a_frontend_that_restarts_without_closing_connects_again() {
    let mut world = World::fresh().settle();
    (world.front.own, world.front.attached) = (S::Initialising, false);
    let world = world.looked().back_moves();
    assert!(!world.back.attached, "the old rings are let go first");
    assert!(world.settle().is_up());
}

#[test]
fn a_new_backend_that_starts_over_is_followed() {
    let mut world = World::fresh().settle();
    (world.back.own, world.back.attached) = (S::InitWait, false);
    assert!(world.looked().front_moves().settle().is_up());
}

#[test]
fn a_device_that_goes_offline_is_forgotten() {
    let mut world = World::fresh().settle();
    world.back.online = false;
    (world.front.own, world.front.attached) = (S::Closed, false);
    assert_eq!(backend_step(world.looked().back), BackendStep::Forget);
}

#[test]
fn a_condemned_frontend_stays_closed_until_it_starts_over() {
    let mut world = World::fresh().settle();
    world.back.penalized = true;
    let mut world = world.back_moves();
    assert_eq!((world.back.own, world.back.attached), (S::Closing, false));
    assert_eq!(backend_step(world.back), BackendStep::Wait);
    (world.front.own, world.front.attached) = (S::Initialising, false);
    assert!(world.looked().settle().is_up());
}

#[test]
fn a_frontend_that_skips_ahead_is_connected() {
    // Initialised (3) and then nothing, as blkfront does, and straight to Connected (4).
    for state in [S::Initialised, S::Connected] {
        let mut world = World::fresh().back_moves();
        world.front.own = state;
        assert_eq!(backend_step(world.looked().back), BackendStep::Connect);
    }
}

#[test]
fn a_frontend_whose_state_was_set_back_starts_over() {
    // By a toolstack, or because its own could not be written: nobody else could begin.
    let mut world = World::fresh().back_moves().front_moves();
    assert!(world.front.attached && !world.front.was_up);
    world.front.own = S::Initialising;
    let world = world.looked().back_moves();
    assert_eq!(world.back.own, S::InitWait);
    assert!(world.settle().is_up());
}

#[test]
fn a_frontend_whose_channel_closed_before_it_was_up_starts_over() {
    // The backend bound the channel, died, and another one waits.
    let mut world = World::fresh().back_moves().front_moves();
    world.front.broken = true;
    let world = world.looked().front_moves();
    assert_eq!((world.front.own, world.front.attached), (S::Initialising, false));
    assert!(world.settle().is_up());
}

#[test]
fn a_device_that_the_backend_before_left_connected_is_taken_over() {
    let mut world = World::fresh().settle();
    world.back.attached = false;
    assert_eq!(backend_step(world.looked().back), BackendStep::Connect);
    let world = world.back_moves();
    assert!(world.is_up());
    assert_eq!(world, world.settle());
}

#[test]
fn a_frontend_that_started_over_while_there_was_no_backend_connects() {
    for own in [S::Connected, S::Initialised, S::Reconfiguring] {
        let mut world = World::fresh().settle().with_new_frontend();
        (world.back.own, world.back.attached) = (own, false);
        assert!(world.looked().settle().is_up(), "{own:?}");
    }
}

proptest! {
    #[test]
    fn xsa_465_any_sequence_of_frontend_states_is_survived(
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
    fn any_sequence_of_backend_states_is_survived(
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
