//! Metrics of the daemon, in the OpenMetrics text format for Prometheus.
//!
//! The exporter's thread (`http`) asks the control thread for a `Snapshot`, as `ringfence status` does,
//! and [`render`](render::render) turns it into text. The datapath does no work for metrics.
//!
//! Names follow the rules of Prometheus. Counters end in `_total`, and units are part of the name.
//! Variants of one measurement share a name and differ in labels. Directions are the guest's: `sent` and
//! `received`.

mod disks;
pub mod encode;
mod http;
pub mod render;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use http::{Exporter, ExporterError};
