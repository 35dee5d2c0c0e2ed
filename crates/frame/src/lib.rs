#![forbid(unsafe_code)]
//! Batches of Ethernet frames, and the contract of the ports that receive and transmit them.
//!
//! * [`batch`]: frames in one round of a datapath worker.
//! * [`port`]: the contract between a worker and its ports.
//! * [`counters`]: the counters of a port, with a reason for each dropped frame.
//! * [`commands`]: commands from the control side of a device to its port.
//! * [`steer`]: the choice of a queue for a packet's flow.
//! * [`tap`]: the port of a Linux TAP interface.
//!
//! ```
//! use ringfence_frame::Batch;
//! use ringfence_offload::OffloadMeta;
//!
//! let mut batch = Batch::default();
//! let frame = [0u8; 60];
//! let offset = batch.reserve(frame.len()).unwrap();
//! batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
//! let index = batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).unwrap();
//! assert_eq!(batch.get(index).unwrap().len(), 60);
//! batch.clear();
//! ```

pub mod batch;
mod capabilities;
pub mod commands;
pub mod counters;
pub mod port;
pub mod steer;
pub mod tap;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;

pub use batch::{Batch, BatchError, FrameView, SegmentView};
pub use counters::{DropReason, PortCounters};
pub use port::{ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, Received, Transmitted};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
