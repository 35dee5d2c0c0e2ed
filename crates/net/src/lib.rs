#![forbid(unsafe_code)]
//! Ports, and what moves frames between them.
//!
//! * [`batch`]: frames on their way through one round of the data plane.
//! * [`port`]: the contract of whatever frames come from and go to.
//! * [`counters`]: what is counted there.

pub mod batch;
pub mod counters;
pub mod port;

pub use batch::{Batch, BatchError, FrameView, SegmentView};
pub use counters::{DropReason, PortCounters};
pub use port::{ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, Received, Transmitted};
