//! `ringfence serve`: the driver-domain daemon on Xen.
//!
//! * [`config`]: its configuration file.
//! * [`status`]: what it says of itself.

pub mod config;
pub mod status;
