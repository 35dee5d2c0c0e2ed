#![forbid(unsafe_code)]
//! Packets in private memory: headers, checksums, and what is left to be done to a frame.
//!
//! The crate is pure: bytes in, values or typed errors out. It does no I/O, allocates nothing (but for
//! [`Coalescer::new`](coalesce::Coalescer::new)), and no input makes it panic or loop beyond the bytes
//! given. Bytes from a peer must be copied to private
//! memory first; a header that can change between two looks cannot be checked.
//!
//! # The path of a frame
//!
//! 1. The first bytes (256 are plenty) are copied, and [`packet::Layers::parse`] finds the headers.
//! 2. The sender's metadata, from a virtio-net header ([`vnet`]) or from netif's flags ([`blank`]),
//!    passes [`accept`] and becomes [`OffloadMeta`].
//! 3. The frame moves between ports as it is; nothing is summed.
//! 4. A port fed with small packets may join those of a round ([`coalesce`]).
//! 5. The port a frame leaves by either passes the metadata on ([`vnet::VnetHeader::for_frame`],
//!    [`blank::to_netif`]) or, if its receiver cannot take it, splits the frame ([`segment`]) or
//!    finishes the checksum ([`checksum::complete_scattered`]).
//!
//! Positions are octets from the start of the Ethernet header. Numbers are in host order, except
//! where a doc says "octets".

pub mod accept;
pub mod blank;
pub mod checksum;
pub mod coalesce;
pub mod flow_hash;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod meta;
pub mod octets;
pub mod packet;
mod rewrite;
pub mod segment;
#[cfg(test)]
mod test_frames;
pub mod vnet;

pub use meta::{Checksum, ChecksumPlace, Gso, GsoKind, OffloadMeta};
pub use packet::Layers;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
