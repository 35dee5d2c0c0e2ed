#![forbid(unsafe_code)]
//! Network block devices (NBD): disks on servers, and disks for programs that speak NBD.
//!
//! * [`protocol`]: the messages of NBD as bytes, without I/O.
//! * [`client`]: a disk on an NBD server, as storage of a backend.
//! * [`export`]: a disk for ordinary programs, as an NBD server.

pub mod client;
pub mod export;
pub mod protocol;
