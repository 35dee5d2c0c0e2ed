//! Attacks by guests and by the outside.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod guest_view;
mod kernel_objects;
mod neighbours;
#[path = "../support/mod.rs"]
mod support;
mod uplink;
