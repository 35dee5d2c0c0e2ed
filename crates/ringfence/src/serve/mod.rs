//! `ringfence serve`: the driver-domain daemon on Xen.
//!
//! * [`config`]: its configuration file.

pub mod config;
