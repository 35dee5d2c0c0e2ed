//! Attacks by guests and by the outside.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod command_filter;
mod guest_devices;
mod guest_sockets;
mod guest_view;
mod job;
mod kernel_objects;
mod neighbours;
#[path = "../support/mod.rs"]
mod support;
mod uplink;
