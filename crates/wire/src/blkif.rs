//! Block interface protocol (Xen's `io/blkif.h`): requests, responses, and the names of the store keys.
//!
//! Each queue has one ring. The frontend posts requests that name sectors of the disk and pages of its
//! memory; the backend answers each with a status. The key `protocol` selects the layout of requests
//! ([`Abi`]). A request has one of five forms in the same slot:
//!
//! ```text
//! direct     operation and up to 11 segments in the slot itself
//! indirect   INDIRECT and the inner operation; segments are in up to 8 pages of their own
//! discard    a sector range, no segments
//! extents    a sector range, and the page for the list of its extents (Ringfence only)
//! zeros      a sector range to fill with zeros, no segments (Ringfence only)
//! ```
//!
//! The frontend controls every byte of a slot and of an indirect page. [`BlkRequest::parse`] validates a
//! private copy of a slot; [`IndirectHead::segments`] validates a private copy of the descriptors. Their
//! results name only sectors on the disk and bytes inside one page. A request that breaks a rule is
//! answered with [`BlkRefusal::status`]; the ring stays usable.
//!
//! A sector number counts units of 512 bytes, whatever the sector size of the disk. Positions and
//! lengths must be multiples of the sector size.

mod emit;
mod extents;
pub mod keys;
mod layout;
mod request;

pub use emit::{
    RequestName, direct, discard, extents, indirect, indirect_descriptors, write_zeroes,
};
pub use extents::{EXTENT_BYTES, EXTENTS_MAX, Extent, ExtentState};
pub use layout::{Abi, Response, Slot, Status};
pub use request::{
    BlkRefusal, BlkRequest, Body, Direction, IndirectHead, Operation, Rules, SegmentRange, Transfer,
};

/// Unit in bytes of sector numbers.
pub const SECTOR: u64 = 512;

/// Maximum segments in a slot.
pub const SEGMENTS_DIRECT: usize = 11;

/// Maximum descriptor pages of an indirect request.
pub const INDIRECT_PAGES: usize = 8;

/// Segment descriptors in one page.
pub const SEGMENTS_PER_PAGE: usize = 512;

/// Bytes of one segment descriptor.
pub const SEGMENT_BYTES: usize = 8;

/// Maximum segments of an indirect request that our backend offers: 1 MiB, as Linux does.
pub const SEGMENTS_MAX: u16 = 256;

/// Maximum ring order that our backend offers: 16 pages, as Linux does.
pub const RING_ORDER_MAX: u32 = 4;

/// Bit of the key `info`: the medium is a CD.
pub const INFO_CDROM: u32 = 1;
/// Bit of the key `info`: the medium is removable.
pub const INFO_REMOVABLE: u32 = 2;
/// Bit of the key `info`: the disk is read-only.
pub const INFO_READ_ONLY: u32 = 4;

#[cfg(test)]
mod tests;
