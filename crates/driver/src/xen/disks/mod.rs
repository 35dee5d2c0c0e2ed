//! Disks of the daemon: the storage of each disk and its xenbus handshake.
//!
//! # How it works
//!
//! The control thread announces a disk to its guest at once, because the toolstack waits for that. A
//! thread of its own opens the storage meanwhile (`opener`). The control thread connects a guest that
//! is ready once the storage is open. If the storage cannot be opened, the log, the status and the key
//! `disk-status` say why, and the daemon tries again every two seconds. The storage stays open until
//! the device is removed, or until its keys or the configuration change while no guest is connected.
//!
//! # Changes of a disk in use
//!
//! `ringfence disk` orders a snapshot or another size at the status socket (`changes`).
//!
//! # Restart
//!
//! The backend itself finds the requests that an earlier daemon left in a ring
//! ([`ringfence_ring::AnyOrderRing`]). There are no other records of disks.

mod changes;
pub(super) mod keys;
mod opener;
pub(super) mod report;
mod steps;
pub(super) mod vbd;
