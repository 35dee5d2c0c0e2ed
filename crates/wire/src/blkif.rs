//! The block interface protocol (Xen's `io/blkif.h`): requests, responses, and the names of the keys in
//! the store.
//!
//! One ring a queue. The frontend posts requests that name sectors of the disk and pages of its memory;
//! the backend answers each with a status. A request is laid out as the frontend's architecture would
//! ([`Abi`], by the key `protocol`), and has one of three forms in the same slot:
//!
//! ```text
//! direct     op, up to 11 segments in the slot itself
//! indirect   op INDIRECT, the real one beside it; the segments are in up to 8 pages of their own
//! discard    a range and no segments
//! ```
//!
//! Everything in a slot and in an indirect page is the frontend's word. [`Request::parse`] judges a slot
//! that was copied out once, [`IndirectHead::segments`] the descriptors that were copied out once; what
//! they give back names only sectors that the disk has and bytes that lie inside one page. A request
//! that breaks a rule is answered ([`Refusal::status`]) and costs nothing else.
//!
//! Sectors are units of 512 bytes whatever the sector size of the disk, which only says what lengths and
//! positions must be multiples of.

mod emit;
pub mod keys;
mod layout;
mod request;

pub use emit::{direct, discard, indirect, indirect_descriptors};
pub use layout::{Abi, Response, Slot, Status};
pub use request::{
    Body, Direction, IndirectHead, Operation, Refusal, Request, Rules, SegmentRange, Transfer,
};

/// Bytes of the unit in which sectors are counted.
pub const SECTOR: u64 = 512;

/// Segments in a slot.
pub const SEGMENTS_DIRECT: usize = 11;

/// Pages of descriptors that an indirect request can name.
pub const INDIRECT_PAGES: usize = 8;

/// Descriptors in a page.
pub const SEGMENTS_PER_PAGE: usize = 512;

/// Bytes of a segment's descriptor.
pub const SEGMENT_BYTES: usize = 8;

/// Most segments of an indirect request that a backend of ours offers to take, as Linux' does: 1 MiB.
pub const SEGMENTS_MAX: u16 = 256;

/// Highest order of a ring that a backend of ours offers to map, as Linux' does: 16 pages.
pub const RING_ORDER_MAX: u32 = 4;

/// Bit of the key `info`: a CD.
pub const INFO_CDROM: u32 = 1;
/// Bit of the key `info`: the medium can be taken out.
pub const INFO_REMOVABLE: u32 = 2;
/// Bit of the key `info`: nothing may be written.
pub const INFO_READ_ONLY: u32 = 4;

#[cfg(test)]
mod tests;
