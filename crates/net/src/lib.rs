#![forbid(unsafe_code)]
//! Ports netfront and netback: both ends of a paravirtual network interface (vif).
//!
//! * [`netback`]: the backend's port of a vif; [`netfront`]: the frontend's.
//! * [`vif`]: the xenbus handshake that connects both ends over the store.
//! * [`features`]: the offload keys of a vif.
//! * [`ctrl`]: the control ring, for staging and for hash configuration.
//! * [`rules`]: the counters of rule violations.
//!
//! ```
//! use ringfence_net::features::OffloadKeys;
//!
//! let offloads: OffloadKeys = "sg,tso4".parse().unwrap();
//! assert!(offloads.scatter_gather && !offloads.gso_tcp_v6);
//! ```

pub mod ctrl;
mod fast;
pub mod features;
pub mod netback;
pub mod netfront;
mod offered;
mod prefetch;
pub mod rules;
pub mod vif;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
