#![forbid(unsafe_code)]
//! The guest's link: how the packets of a network namespace reach the uplink, and come back.
//!
//! * [`frames`]: the ring in which frames for the guest are put together, where they are read from sockets.
//! * [`tap`]: the link by a TAP interface: a system call for each frame.

pub mod frames;
mod header;
pub mod tap;
