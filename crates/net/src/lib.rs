#![forbid(unsafe_code)]
//! Ports netfront and netback: both ends of a paravirtual network interface (vif).
//!
//! * [`netback`]: the backend's port of a vif; [`netfront`]: the frontend's.
//! * [`vif`]: the xenbus handshake that connects both ends over the store.
//! * [`features`]: the offload keys of a vif.
//! * [`commands`]: the commands of the control side to a vif's port.
//! * [`ctrl`]: the control ring, for staging and for hash configuration.
//! * [`rate`]: the rate limit of a vif, in the text form of toolstacks.
//! * [`staging`]: the choice of the pages that a frontend stages.
//! * [`rules`]: the counters of rule violations.
//!
//! ```
//! use ringfence_net::features::OffloadKeys;
//!
//! let offloads: OffloadKeys = "sg,tso4".parse().unwrap();
//! assert!(offloads.scatter_gather && !offloads.gso_tcp_v6);
//! ```

pub mod commands;
pub mod ctrl;
mod fast;
pub mod features;
pub mod netback;
pub mod netfront;
mod offered;
mod prefetch;
mod queues;
pub mod rate;
pub mod rules;
pub mod staging;
pub mod vif;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
