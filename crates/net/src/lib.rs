#![forbid(unsafe_code)]
//! netfront and netback: both ends of a paravirtual network interface.
//!
//! * [`netback`]: the backend's port of a vif; [`netfront`]: the frontend's.
//! * [`vif`]: the handshake over the store that connects both.
//! * [`features`]: the offload keys of a vif.
//! * [`ctrl`]: the control ring: staging, and how a guest wants its packets hashed.
//! * [`rules`]: the names of broken rules.

pub mod ctrl;
pub mod features;
pub mod netback;
pub mod netfront;
mod offered;
mod prefetch;
pub mod rules;
pub mod vif;
