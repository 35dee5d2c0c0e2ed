#![forbid(unsafe_code)]
//! Layouts and numbers of Xen's PV interfaces, of virtqueues, of kernel vhost and of frames on a byte stream.
//! Bytes in, values or errors out; no I/O.
//!
//! An untrusted peer wrote everything that this crate parses. The crate guarantees:
//!
//! * Parsers are total. Any bytes give a value or an error, never a panic or an endless loop.
//! * The peer never chooses the size of an allocation.
//! * Numbers that the interface does not define are kept as `Unknown(n)`.
//! * Error enums have one variant for each broken rule and carry the numbers offered and allowed.
//!
//! [`numbers`] converts between integer types for every crate.
//!
//! The crate relies on its caller for shared memory: every input was fetched once into private memory
//! before it is parsed (XSA-155).
//!
//! All integers are little endian, except those exchanged with the kernel ([`vhost`]) and the lengths of
//! [`frame_stream`].
//!
//! # Example
//!
//! A chain of TX slots that a hostile frontend wrote:
//!
//! ```
//! use ringfence_wire::grant::Gref;
//! use ringfence_wire::netif::tx::{TxChain, TxChainParser, TxOutcome};
//! use ringfence_wire::netif::{TxFlags, TxRequest};
//!
//! let slot = TxRequest { gref: Gref(9), offset: 4000, flags: TxFlags::NONE, id: 1, size: 200 };
//! let ring = [slot.to_bytes()];
//! let mut chain = TxChain::new(256);
//! let parser = TxChainParser::new(256);
//! let outcome = parser.next(1, &mut |index| ring[index as usize], &mut chain);
//! let TxOutcome::Refused(rule) = outcome else { panic!("{outcome:?}") };
//! assert_eq!(rule.label(), "tx_crosses_page"); // the packet is lost, the ring stays in step
//! ```

pub mod blkif;
pub mod decimal;
pub mod frame_stream;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grant;
mod macros;
pub mod netif;
pub use ringfence_base::numbers;
pub mod ring;
pub mod stream_buffer;
pub mod vhost;
pub mod vhost_user;
pub mod virtio;
pub mod virtio_blk;
pub mod xenbus;
pub mod xenstore;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
