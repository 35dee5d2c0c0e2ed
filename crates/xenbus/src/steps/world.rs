//! Both sides of a vif as far as the steps see them: states, and who holds what. For tests of the
//! steps and for the fuzz target.

use super::{BackendStep, BackendView, FrontendStep, FrontendView, backend_step, frontend_step};
use ringfence_wire::xenbus::XenbusState as S;

/// Looks after which a side must have come to rest, when the other one does nothing.
const LOOKS_MAX: usize = 4;

/// Both sides' states and holdings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct World {
    /// The backend's view.
    pub back: BackendView,
    /// The frontend's view.
    pub front: FrontendView,
    /// Each side's key may have been removed by whoever may.
    pub keys: Keys,
    /// The frontend waits, Initialised, for the backend to be Connected, as a disk's does.
    pub front_waits: bool,
}

/// Which side's `state` there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keys {
    /// The backend's.
    pub back: bool,
    /// The frontend's.
    pub front: bool,
}

impl World {
    /// As a toolstack makes it.
    pub fn fresh() -> World {
        let own = S::Initialising;
        let back = BackendView { own, peer: None, attached: false, online: true, penalized: false };
        let front = FrontendView { own, peer: None, attached: false, was_up: false, broken: false };
        let keys = Keys { back: true, front: true };
        World { back, front, keys, front_waits: false }.looked()
    }

    /// As a toolstack makes it, for a device whose frontend waits for the backend to be Connected.
    pub fn fresh_waiting() -> World {
        World { front_waits: true, ..World::fresh() }
    }

    /// Both sides read the store.
    #[must_use]
    pub fn looked(mut self) -> World {
        self.back.peer = self.keys.front.then_some(self.front.own);
        self.front.peer = self.keys.back.then_some(self.back.own);
        self.front.was_up |= self.front.attached && self.front.peer == Some(S::Connected);
        self
    }

    /// The backend does what is due.
    #[must_use]
    pub fn back_moves(mut self) -> World {
        if !self.keys.back {
            // Its directory is gone: it is over.
            self.back.attached = false;
            return self;
        }
        let step = backend_step(self.back);
        let (own, attached) = match step {
            BackendStep::Wait => return self,
            BackendStep::Announce => (S::InitWait, false),
            BackendStep::Connect => (S::Connected, true),
            BackendStep::Close => (S::Closing, false),
            BackendStep::Finish | BackendStep::Forget => (S::Closed, false),
        };
        self.back.penalized &= step != BackendStep::Announce;
        (self.back.own, self.back.attached) = (own, attached);
        self.looked()
    }

    /// The frontend does what is due. Its key is there afterwards.
    #[must_use]
    pub fn front_moves(mut self) -> World {
        let (own, attached) = match frontend_step(self.front) {
            FrontendStep::Wait => return self,
            FrontendStep::Connect if self.front_waits => (S::Initialised, true),
            FrontendStep::Connect | FrontendStep::Complete => (S::Connected, true),
            FrontendStep::Restart => (S::Initialising, false),
            FrontendStep::Finish => (S::Closed, false),
        };
        (self.front.broken, self.front.was_up) = (false, false);
        (self.front.own, self.front.attached) = (own, attached);
        self.keys.front = true;
        self.looked()
    }

    fn rest(self, side: fn(World) -> World) -> World {
        let mut world = self;
        for _ in 0..LOOKS_MAX {
            let next = side(world);
            if next == world {
                return world;
            }
            world = next;
        }
        assert_eq!(side(world), world, "a side dances by itself, from {self:?}");
        world
    }

    /// The backend looks until nothing is due, and holds nothing that it must not.
    ///
    /// # Panics
    ///
    /// When it does not come to rest, or holds the rings of a frontend that has none.
    #[must_use]
    pub fn back_rests(self) -> World {
        let world = self.rest(World::back_moves);
        let without_rings = matches!(
            world.back.peer,
            None | Some(S::Missing | S::Initialising | S::Closing | S::Closed)
        );
        assert!(!(without_rings && world.back.attached), "rings are held: {world:?}");
        assert!(!(world.back.penalized && world.back.attached), "penalized, and used: {world:?}");
        world
    }

    /// The frontend looks until nothing is due, and uses nothing that it must not.
    ///
    /// # Panics
    ///
    /// When it does not come to rest, or is attached to a backend that let go.
    #[must_use]
    pub fn front_rests(self) -> World {
        let world = self.rest(World::front_moves);
        let let_go = matches!(world.front.peer, None | Some(S::Closing | S::Closed));
        assert!(!(let_go && world.front.attached), "attached to nobody: {world:?}");
        world
    }

    /// Both look in turn until nothing is due.
    ///
    /// # Panics
    ///
    /// When that does not end.
    #[must_use]
    pub fn settle(self) -> World {
        let mut world = self;
        for _ in 0..20 {
            let next = world.back_moves().front_moves();
            if next == world {
                return world;
            }
            world = next;
        }
        panic!("the handshake does not settle, from {self:?}");
    }

    /// Whether frames can flow.
    pub fn is_up(&self) -> bool {
        self.back.attached
            && self.front.attached
            && self.back.own == S::Connected
            && self.front.own == S::Connected
    }

    /// A new frontend in the place of the old one.
    #[must_use]
    pub fn with_new_frontend(mut self) -> World {
        self.front = World::fresh().front;
        self.keys.front = true;
        self.looked()
    }

    /// A new backend in the place of the old one, for a device that stays.
    #[must_use]
    pub fn with_new_backend(mut self) -> World {
        self.back = World::fresh().back;
        self.keys.back = true;
        self.looked()
    }
}
