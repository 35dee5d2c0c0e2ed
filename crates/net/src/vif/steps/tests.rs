//! The handshake as a game of two sides that follow the steps, and of one side that does not.

use proptest::prelude::*;

use super::*;
use XenbusState as S;

/// Both sides' states and holdings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct World {
    back: BackendView,
    front: FrontendView,
}

impl World {
    fn fresh() -> World {
        let back = BackendView {
            own: S::Initialising,
            peer: None,
            attached: false,
            online: true,
            condemned: false,
        };
        let front = FrontendView {
            own: S::Initialising,
            peer: None,
            attached: false,
            was_up: false,
            broken: false,
        };
        World { back, front }.looked()
    }

    fn looked(mut self) -> World {
        self.back.peer = Some(self.front.own);
        self.front.peer = Some(self.back.own);
        self.front.was_up |= self.front.attached && self.back.own == S::Connected;
        self
    }

    fn back_moves(mut self) -> World {
        let step = backend_step(self.back);
        let (own, attached) = match step {
            BackendStep::Wait => return self,
            BackendStep::Announce => (S::InitWait, false),
            BackendStep::Connect => (S::Connected, true),
            BackendStep::Close => (S::Closing, false),
            BackendStep::Finish | BackendStep::Forget => (S::Closed, false),
        };
        self.back.condemned &= step != BackendStep::Announce;
        (self.back.own, self.back.attached) = (own, attached);
        self.looked()
    }

    fn front_moves(mut self) -> World {
        let (own, attached) = match frontend_step(self.front) {
            FrontendStep::Wait => return self,
            FrontendStep::Connect => (S::Connected, true),
            FrontendStep::Restart => (S::Initialising, false),
            FrontendStep::Finish => (S::Closed, false),
        };
        (self.front.broken, self.front.was_up) = (false, false);
        (self.front.own, self.front.attached) = (own, attached);
        self.looked()
    }

    fn settle(mut self) -> World {
        for _ in 0..20 {
            let next = self.back_moves().front_moves();
            if next == self {
                return self;
            }
            self = next;
        }
        panic!("the handshake does not settle: {self:?}");
    }

    fn is_up(&self) -> bool {
        self.back.attached
            && self.front.attached
            && self.back.own == S::Connected
            && self.front.own == S::Connected
    }
}

#[test]
fn a_fresh_pair_connects() {
    assert!(World::fresh().settle().is_up());
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
    world.back.condemned = true;
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

/// One step of a frontend that writes what it likes. Also the body of a fuzz target.
fn hostile_frontend(states: &[u32]) {
    let mut world = World::fresh();
    for state in states {
        world.front.own = S::from_raw(*state);
        world = world.looked();
        // One look does one step; looking again must come to rest at once or after few.
        let mut looks = 0;
        loop {
            let next = world.back_moves();
            if next == world {
                break;
            }
            world = next;
            looks += 1;
            assert!(looks < 4, "the backend dances: {world:?}");
        }
        if matches!(world.front.own, S::Closing | S::Closed | S::Missing | S::Initialising) {
            assert!(!world.back.attached, "rings are held for a frontend in {:?}", world.front.own);
        }
    }
    // Whatever it did, it can start over.
    world.front.own = S::Initialising;
    (world.front.attached, world.front.broken, world.front.was_up) = (false, false, false);
    assert!(world.looked().settle().is_up());
}

proptest! {
    #[test]
    fn xsa_465_any_sequence_of_frontend_states_is_survived(states in proptest::collection::vec(0u32..12, 0..60)) {
        hostile_frontend(&states);
    }

    #[test]
    fn any_sequence_of_backend_states_is_survived(states in proptest::collection::vec(0u32..12, 0..60)) {
        let mut world = World::fresh();
        for state in states {
            world.back.own = S::from_raw(state);
            world = world.looked();
            let mut looks = 0;
            loop {
                let next = world.front_moves();
                if next == world { break; }
                world = next;
                looks += 1;
                prop_assert!(looks < 4, "the frontend dances: {:?}", world);
            }
            if matches!(world.back.own, S::Closing | S::Closed) {
                prop_assert!(!world.front.attached);
            }
        }
    }
}
