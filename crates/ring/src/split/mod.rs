//! Split virtqueues: the driver's end, for kernel vhost and other devices, and the backend's end ([`backend`]).
//!
//! # Theory of operation
//!
//! The driver makes buffers available ([`DriverQueue::push`], [`DriverQueue::publish`]) and takes them back
//! ([`DriverQueue::pop`]) after the device has used them. All state of a buffer is private: its descriptors,
//! its writable length, its in-flight mark. The driver writes shared memory and reads back only the device's
//! part: the used ring, its index and its flags.
//!
//! # Validation of the device
//!
//! Each rule has its own [`QueueFault`]. After a fault the queue must not be used:
//!
//! * The used index advances by at most the number of chains in flight.
//! * A used element names the first descriptor of a chain in flight. It names no descriptor beyond the table or
//!   in the middle of a chain, no used chain, and no unpublished chain.
//! * Its length is at most the bytes that the device may write.
//!
//! An element is fetched once, whole. Its number of descriptors comes from private state, so no loop follows
//! links in shared memory.
//!
//! # Order
//!
//! Free descriptors return in the order in which buffers were used and are reused in that order. So if a device
//! uses buffers in order, descriptors rotate through the table, as [`QueueFeatures::in_order`] requires of a
//! driver. With that feature, one used element stands for all buffers up to the one that it names.
//!
//! # Notification
//!
//! [`DriverQueue::publish`] returns `true` if the device wants a kick. Interrupts are suppressed
//! ([`DriverQueue::suppress`]) until a thread is about to sleep ([`DriverQueue::arm`]). Both sides publish an
//! index, then read the other side's request, with a full fence between. loom explores this protocol.

pub mod backend;
#[cfg(any(test, feature = "test-utils"))]
pub mod device;
mod driver;
pub mod inflight;
mod memory;
pub mod pagelog;

#[cfg(loom)]
#[cfg(test)]
mod loom_tests;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

pub use driver::{DriverQueue, PushError, QueueFault, QueueFeatures, Used};
pub use memory::{QueueMemory, QueuePages};

/// Maximum descriptors of a chain. Each queue entry has an indirect table of this length.
pub const CHAIN_MAX: usize = 4;
