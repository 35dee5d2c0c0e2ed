//! Control ring of netif, on both sides.
//!
//! Over it, a frontend configures the hash that distributes packets over its queues ([`hash`]), and selects
//! the pages that the backend keeps mapped ([`ringfence_access::staging`]). `docs/staging-grants.md` has the
//! decisions that the interface leaves to the backend.
//!
//! The control side of a device serves the ring, not a datapath worker: the messages map, unmap and allocate.
//! Their effects on the data path are [commands](ringfence_frame::commands) to the port.

pub mod backend;
pub mod frontend;
pub mod hash;
pub mod record;
