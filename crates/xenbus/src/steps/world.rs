//! Model of both ends of a vif for tests of the steps and for the fuzz target: states, and the rings
//! that each end holds.

use ringfence_wire::xenbus::XenbusState as S;

use super::{BackendStep, BackendView, FrontendStep, FrontendView, backend_step, frontend_step};

/// Maximum looks of one end until it is idle, while the other end does nothing.
const LOOKS_MAX: usize = 4;

/// States and holdings of both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct World {
    pub back: BackendView,
    pub front: FrontendView,
    /// Presence of each end's key.
    pub keys: Keys,
    /// Set if the frontend waits in Initialised for a Connected backend, as a vbd's does.
    pub front_waits: bool,
}

/// Presence of the `state` keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keys {
    pub back: bool,
    pub front: bool,
}

impl World {
    /// Creates a device as a toolstack does.
    pub fn fresh() -> World {
        let own = S::Initialising;
        let back = BackendView { own, peer: None, attached: false, online: true, penalized: false };
        let front = FrontendView { own, peer: None, attached: false, was_up: false, broken: false };
        let keys = Keys { back: true, front: true };
        World { back, front, keys, front_waits: false }.looked()
    }

    /// Creates a device whose frontend waits for a Connected backend.
    pub fn fresh_waiting() -> World {
        World { front_waits: true, ..World::fresh() }
    }

    /// Updates both views from the store.
    #[must_use]
    pub fn looked(mut self) -> World {
        self.back.peer = self.keys.front.then_some(self.front.own);
        self.front.peer = self.keys.back.then_some(self.back.own);
        self.front.was_up |= self.front.attached && self.front.peer == Some(S::Connected);
        self
    }

    /// Carries out the backend's due step.
    #[must_use]
    pub fn back_moves(mut self) -> World {
        if !self.keys.back {
            // Its directory is gone, so nothing is left.
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

    /// Carries out the frontend's due step, which writes its key.
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

    /// Lets the backend look until no step is due.
    ///
    /// # Panics
    ///
    /// Panics if it does not become idle, or holds rings of a frontend that lends none.
    #[must_use]
    pub fn back_rests(self) -> World {
        let world = self.rest(World::back_moves);
        let without_rings = matches!(
            world.back.peer,
            None | Some(S::Missing | S::Initialising | S::Closing | S::Closed)
        );
        assert!(!(without_rings && world.back.attached), "rings are held: {world:?}");
        assert!(
            !(world.back.penalized && world.back.attached),
            "penalized and attached: {world:?}"
        );
        world
    }

    /// Lets the frontend look until no step is due.
    ///
    /// # Panics
    ///
    /// Panics if it does not become idle, or is attached to a backend that released the rings.
    #[must_use]
    pub fn front_rests(self) -> World {
        let world = self.rest(World::front_moves);
        let let_go = matches!(world.front.peer, None | Some(S::Closing | S::Closed));
        assert!(!(let_go && world.front.attached), "attached to nobody: {world:?}");
        world
    }

    /// Lets both ends look alternately until no step is due.
    ///
    /// # Panics
    ///
    /// Panics if they do not become idle.
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

    /// Returns `true` if both ends are connected and attached.
    pub fn is_up(&self) -> bool {
        self.back.attached
            && self.front.attached
            && self.back.own == S::Connected
            && self.front.own == S::Connected
    }

    /// Replaces the frontend by a new one.
    #[must_use]
    pub fn with_new_frontend(mut self) -> World {
        self.front = World::fresh().front;
        self.keys.front = true;
        self.looked()
    }

    /// Replaces the backend by a new one; the device stays.
    #[must_use]
    pub fn with_new_backend(mut self) -> World {
        self.back = World::fresh().back;
        self.keys.back = true;
        self.looked()
    }
}
