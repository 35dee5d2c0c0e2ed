//! netif's control ring, on both sides.
//!
//! Over it a frontend says how packets are to be spread over its queues ([`hash`]), and which of its
//! pages the backend is to keep mapped: staging grants ([`ringfence_access::staging`]). What the
//! interface leaves open about them, and how it is decided here, is in `docs/staging-grants.md`.
//!
//! The ring is served by the control side of a device, not by the data plane: its messages map, unmap
//! and allocate. What they change in the data path goes there as a [`PortCommand`](ringfence_frame::commands).

pub mod backend;
pub mod frontend;
pub mod hash;
pub mod record;
