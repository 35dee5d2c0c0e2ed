#![forbid(unsafe_code)]
//! Batches of Ethernet frames, and the contract of the ports that they come from and go to.
//!
//! * [`batch`]: frames on their way through one round of a datapath worker.
//! * [`port`]: the contract between a worker and its ports.
//! * [`counters`]: the counters of a port, with a reason for each dropped frame.
//! * [`orders`]: commands from the control side of a device to its port.
//! * [`rate`]: the rate limit of a vif, as a toolstack writes it.
//! * [`steer`]: the choice of a queue for a packet's flow.
//! * [`tap`]: the port of a Linux TAP interface.

pub mod batch;
pub mod commands;
pub mod counters;
pub mod port;
pub mod rate;
pub mod steer;
pub mod tap;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;

pub use batch::{Batch, BatchError, FrameView, SegmentView};
pub use counters::{DropReason, PortCounters};
pub use port::{ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, Received, Transmitted};
