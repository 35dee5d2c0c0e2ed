#![forbid(unsafe_code)]
//! Frames in private memory: header parsing, checksums, segmentation, coalescing and offload metadata.
//!
//! The crate does no I/O. It allocates only in [`Coalescer::new`](coalesce::Coalescer::new) and
//! [`ToeplitzKey::new`](flow_hash::ToeplitzKey::new). No input makes it panic or loop beyond the bytes
//! given. The caller must copy a peer's bytes to private memory first: a header that can change between
//! two reads cannot be validated.
//!
//! # The path of a frame
//!
//! 1. The backend copies the first bytes (256 are enough), and [`packet::Layers::parse`] finds the
//!    headers.
//! 2. The sender's metadata comes from a virtio-net header ([`vnet`]) or from netif's flags ([`blank`]).
//!    [`accept`] validates it and returns [`OffloadMeta`].
//! 3. The frame moves between ports unchanged; no checksum is computed.
//! 4. A port that receives small packets may join those of a round ([`coalesce`]).
//! 5. The egress port passes the metadata on ([`vnet::VnetHeader::for_frame`], [`blank::to_netif`]). If
//!    its receiver lacks an offload, the port segments the frame ([`segment`]) or completes the checksum
//!    ([`checksum::complete_scattered`]).
//!
//! Offsets are bytes from the start of the Ethernet header. Numbers are in host order, except where a
//! comment says "bytes".

pub mod accept;
pub mod blank;
pub mod checksum;
pub mod coalesce;
pub mod flow_hash;
pub mod frame_bytes;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod meta;
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
