//! Peers that break the rules, for tests: each of their words can be set by hand.
//!
//! * [`stage`]: a driver domain with any number of vifs, served in rounds by one thread, and a
//!   *neighbour*: a guest with manners, whose frames must go through whatever the others do.
//! * [`frontend`]: a guest that writes its rings, pages, grant table, keys and channels by hand.
//! * [`backend`]: a driver domain that does the same to an honest frontend.
//!
//! A test says in a few lines what is right about a peer and then breaks one field. What is made here
//! is well-formed until it is changed.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

pub mod backend;
pub mod frontend;
mod ring;
pub mod stage;

pub use ringfence_platform::local::raw::process;

pub use backend::HostileBackend;
pub use frontend::HostileFrontend;
pub use ring::RawRing;
pub use stage::{Neighbour, Stage};
