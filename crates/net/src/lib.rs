#![forbid(unsafe_code)]
//! Ports, and what moves frames between them.
//!
//! * [`batch`]: frames on their way through one round of the data plane.
//! * [`clock`]: the time by which they go.
//! * [`port`]: the contract of whatever frames come from and go to.
//! * [`counters`]: what is counted there.
//! * [`tap`]: the port of a Linux TAP interface.
//! * [`features`]: the offload keys of a vif.
//! * [`steer`]: which queue of a guest a packet takes.
//! * [`ctrl`]: the control ring: staging, and how a guest wants its packets hashed.
//! * [`switch`]: which port a frame goes to.
//! * [`edge`]: what is done to a frame that the port it leaves by cannot take as it is.
//! * [`dataplane`]: the thread that polls the ports, and sleeps when there is nothing to do.

pub mod batch;
pub mod counters;
pub mod ctrl;
pub mod dataplane;
pub mod edge;
pub mod features;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod hostile;
pub mod netback;
pub mod netfront;
mod offered;
pub mod orders;
pub mod port;
pub mod rules;
pub mod steer;
pub mod switch;
pub mod tap;
#[doc(hidden)]
pub mod testing;
pub mod vif;
mod window;

pub use batch::{Batch, BatchError, FrameView, SegmentView};
pub use counters::{DropReason, PortCounters};
pub use port::{ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, Received, Transmitted};
