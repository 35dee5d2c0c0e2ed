//! Handshake of a disk over xenbus, on both sides, and the part of the toolstack.
//!
//! ```text
//! backend                          frontend
//!   features, InitWait
//!                                    lends rings, writes their references, Initialised
//!   maps rings, size, Connected
//!                                    reads the size, Connected
//! ```
//!
//! Each side reads both states and takes the step that is due ([`ringfence_xenbus::steps`]). Neither depends
//! on the platform.

pub mod backend;
pub mod frontend;
pub mod toolstack;

/// Maximum number of queues of a disk that this backend serves.
pub const QUEUES_MAX: u32 = 16;
