#![forbid(unsafe_code)]
//! Layouts and numbers of Xen's PV interfaces, and of virtqueues and vhost. Bytes in, values or errors out;
//! no I/O.
//!
//! Everything parsed here was written by a peer that is not trusted. The contract of the crate:
//!
//! * Parsers are total: any bytes give a value or an error, never a panic, an endless loop, or an
//!   allocation that the peer chose the size of.
//! * Numbers that the interface does not define are kept as `Unknown(n)`.
//! * Errors have one variant for each rule broken and carry the numbers offered and allowed.
//! * Bytes in shared memory are the caller's affair: what comes in here has been fetched once into
//!   private memory already (XSA-155).
//!
//! All integers are little endian, but those for the kernel ([`vhost`]).

pub mod blkif;
pub mod decimal;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grant;
mod macros;
pub mod netif;
pub mod ring;
pub mod vhost;
pub mod virtio;
pub mod xenbus;
pub mod xenstore;
