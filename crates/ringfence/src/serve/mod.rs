//! `ringfence serve`: the driver-domain daemon on Xen.
//!
//! * [`config`]: its configuration file.
//! * [`metrics`]: what it counts, for Prometheus.
//! * [`status`]: what it says of itself.

pub mod config;
pub mod metrics;
pub mod status;
