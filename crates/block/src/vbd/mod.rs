//! The xenbus handshake of a disk, on both sides, and what a toolstack does for it.
//!
//! ```text
//! backend                          frontend
//!   features, InitWait
//!                                    lends rings, writes their references, Initialised
//!   maps rings, size, Connected
//!                                    reads the size, Connected
//! ```
//!
//! Both sides look at both states and do what is due ([`ringfence_xenbus::steps`]). Neither
//! knows which platform it runs on.

pub mod backend;
pub mod frontend;
pub mod toolstack;

/// Most queues of a disk that a backend of ours serves.
pub const QUEUES_MAX: u32 = 16;
