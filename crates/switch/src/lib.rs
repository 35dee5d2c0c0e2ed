#![forbid(unsafe_code)]
//! The switch: threads that move frames between ports.
//!
//! * [`dataplane`]: the threads, which poll their ports and sleep when there is nothing to do.
//! * [`forwarding`]: the forwarding database, which chooses the ports that a frame goes to.
//! * [`egress`]: checksums and segmentation for ports that cannot take a frame as it is.

pub mod dataplane;
pub mod egress;
pub mod forwarding;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
