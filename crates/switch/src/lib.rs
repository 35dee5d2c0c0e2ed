#![forbid(unsafe_code)]
//! Datapath of the driver domain: workers that move frames between ports, the forwarding database, and
//! egress processing.
//!
//! * [`dataplane`]: workers, threads that poll their ports and sleep without work. A [`DataplaneHandle`]
//!   controls them.
//! * [`forwarding`]: the learning [`Switch`] and the [`Patch`] between two ports, which select the egress
//!   ports of each frame; the address filter of a port.
//! * [`egress`]: checksums, segmentation and joining for ports that cannot take a frame as it is.
//!
//! A port is any [`ringfence_frame::Port`]. `examples/sockets.rs` runs a switch between Unix sockets. The
//! forwarding database alone needs neither threads nor ports:
//!
//! ```
//! use std::time::Duration;
//!
//! use ringfence_frame::{Batch, PortCounters};
//! use ringfence_offload::OffloadMeta;
//! use ringfence_switch::forwarding::{Plan, PortIndex, PortPolicy, Switch};
//!
//! let mut switch = Switch::new();
//! for index in 0..3 {
//!     switch.attach(PortIndex(index), PortPolicy::default()).unwrap();
//! }
//! // A broadcast frame, received from port 0.
//! let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x08, 0x06], &[0; 46]].concat();
//! let mut batch = Batch::default();
//! let offset = batch.reserve(frame.len()).unwrap();
//! batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
//! batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).unwrap();
//!
//! let (counters, mut plan) = (PortCounters::default(), Plan::new());
//! switch.route(PortIndex(0), &batch, Duration::ZERO, &counters, &mut plan);
//! assert_eq!(plan.ports(), [PortIndex(1), PortIndex(2)]);
//! assert_eq!(switch.addresses(), 1);
//! ```
//!
//! [`DataplaneHandle`]: dataplane::DataplaneHandle
//! [`Switch`]: forwarding::Switch
//! [`Patch`]: forwarding::Patch

pub mod dataplane;
pub mod egress;
pub mod forwarding;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
