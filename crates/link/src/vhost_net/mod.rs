//! Vhost-net link: virtqueues in memory that the uplink shares with the kernel.
//!
//! * [`link`]: the link itself, with its receive and send side.
//! * `device`: the kernel's device, or a mock device in tests.
//!
//! A link is a [`Port`](ringfence_frame::Port), by which frames come from the guest, and a
//! [`GuestLink`](ringfence_uplink::GuestLink), by which the engine assembles frames for it. It has one queue and belongs
//! to one thread; an interface with several queues has a link for each.

mod device;
mod fault;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod link;

pub use device::Device;
pub use fault::LinkFault;
pub use link::{Protection, VhostLink};
