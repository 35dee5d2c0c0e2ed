//! Adversary peers of a vif, for tests: every word of theirs can be set.
//!
//! * [`stage`]: a driver domain with any number of vifs, served in rounds by one thread, and a
//!   *neighbour*: a correct guest whose frames must pass, whatever the other guests do.
//! * [`frontend`]: an adversary guest whose rings, pages, grant table, keys and channels a test writes.
//! * [`backend`]: an adversary driver domain, against a correct frontend.
//!
//! All data is well-formed until a test changes it, so a test breaks one field at a time.

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
