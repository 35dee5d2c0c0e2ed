//! `ringfence serve`: the daemon of a driver domain on Xen.
//!
//! # How it works
//!
//! The toolstack creates a directory in xenstore for each interface and each disk that this domain is to
//! serve. One control thread (`control`) watches the directories and runs the xenbus handshake with
//! each guest. It attaches connected interfaces to a dataplane, which has threads of its own. Each ring of a disk has a
//! thread too.
//!
//! A daemon takes over the devices that an earlier daemon left connected. Guests do not notice a restart.
//!
//! | module                | contents                                                         |
//! |-----------------------|------------------------------------------------------------------|
//! | [`args`], `setup`     | command line, and what the daemon needs of its host              |
//! | [`process`]           | main function: sandbox, lock, signals                            |
//! | [`config`]            | configuration file                                               |
//! | [`metrics`]           | counters for Prometheus                                          |
//! | [`status`]            | status, and the socket that reports it                           |
//! | `domain`              | part of the daemon in the control loop                           |
//! | `vif`, `vif_steps`    | interfaces and their attachment                                  |
//! | `vif_keys`            | keys of an interface that the toolstack writes                   |
//! | `disks`               | disks and their storage                                          |
//! | `snapshot`            | the status at one moment                                         |
//! | `bridge`              | TAP interfaces of the host                                       |
//! | `staging`             | limits of staged pages                                           |
//! | `records`, `made`     | state that outlives the process                                  |

pub mod args;
mod bridge;
pub mod config;
mod disks;
mod domain;
mod made;
pub mod metrics;
pub mod process;
mod records;
mod setup;
mod snapshot;
mod staging;
mod states;
pub mod status;
#[cfg(test)]
mod tests;
mod vif;
mod vif_keys;
mod vif_steps;
