//! Both ends of disks in one process, and a frontend that breaks the rules, for tests.
//!
//! * [`stage`]: a driver domain with any number of vbds, and guests with manners.
//! * [`frontend`]: a guest that writes its rings, pages, keys and channels by hand.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

pub mod frontend;
pub mod stage;

pub use frontend::RawFront;
pub use stage::{Guest, Stage};
