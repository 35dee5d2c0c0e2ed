//! Split virtqueues: the driver's end, for kernel vhost and whatever else has the device's.
//!
//! # Theory of operation
//!
//! The driver makes buffers available ([`DriverQueue::push`], [`DriverQueue::publish`]) and takes them back
//! ([`DriverQueue::pop`]) when the device has used them. All that it remembers of a buffer is private: which
//! descriptors are whose, how many octets the device may write, what is in flight. Shared memory is written
//! and never read back, but for what is the device's to say: the used ring, its index and its flags.
//!
//! # What the device says is checked
//!
//! Each rule has a [`QueueFault`] of its own, after which the queue is of no more use:
//!
//! * the used index moves by no more than there is in flight;
//! * a used element names the first descriptor of a chain that is in flight: not one beyond the table, not
//!   one in the middle of a chain, not one a second time, not one that was not published yet;
//! * its length is at most what the device could write.
//!
//! An element is fetched once, whole. Its number of descriptors is our own record, so that no loop follows
//! links in shared memory.
//!
//! # Order
//!
//! Free descriptors come back in the order in which buffers were used, and are given out in that order. So
//! where a device uses buffers in order, descriptors go round the table: what
//! [`QueueFeatures::in_order`] demands of a driver comes by itself. With it, one used element stands for all
//! buffers up to the one it names.
//!
//! # Notification
//!
//! [`DriverQueue::publish`] says whether the device wants a kick. Interrupts are off
//! ([`DriverQueue::suppress`]) until somebody is about to sleep ([`DriverQueue::arm`]). Both sides publish an
//! index, then look at the other's wish, with a full fence between: loom explores it.

#[cfg(any(test, feature = "test-utils"))]
pub mod device;
mod driver;
mod memory;

#[cfg(loom)]
#[cfg(test)]
mod loom_tests;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

pub use driver::{DriverQueue, PushError, QueueFault, QueueFeatures, Used};
pub use memory::{QueueMemory, QueuePages};

/// Descriptors of a chain, at most: no driver here needs more, and each entry of a queue has room for an
/// indirect table of so many.
pub const CHAIN_MAX: usize = 4;
