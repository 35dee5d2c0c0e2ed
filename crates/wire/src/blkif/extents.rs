//! List of extents: the reply to [`Operation::Extents`](super::Operation::Extents), in one page.
//!
//! Each entry has two little-endian 32-bit numbers: a number of sectors, and flags. The first extent begins at the
//! first sector of the request, each later one at the end of the one before. An entry without sectors ends a list
//! that does not fill its page. A list may end before the range does; the frontend asks again from there.

/// Bytes of one entry.
pub const EXTENT_BYTES: usize = 8;

/// Maximum entries of a list: those of a page.
pub const EXTENTS_MAX: usize = 4096 / EXTENT_BYTES;

/// Flag: the range has no storage of its own.
const HOLE: u32 = 1;
/// Flag: the range reads as zeros.
const ZERO: u32 = 2;

/// Allocation flags of a sector range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExtentState {
    /// Storage is not allocated.
    pub hole: bool,
    /// Every byte reads as zero.
    pub zero: bool,
}

impl ExtentState {
    /// Allocated range of unknown content.
    pub const DATA: ExtentState = ExtentState { hole: false, zero: false };
    /// Range of a sparse file without storage.
    pub const HOLE: ExtentState = ExtentState { hole: true, zero: true };
}

/// Entry of a list: one extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Number of sectors; 0 ends the list.
    pub sectors: u32,
    pub state: ExtentState,
}

impl Extent {
    /// Encodes an entry of a list.
    pub fn to_bytes(self) -> [u8; EXTENT_BYTES] {
        let ExtentState { hole, zero } = self.state;
        let flags = if hole { HOLE } else { 0 } | if zero { ZERO } else { 0 };
        let mut bytes = [0; EXTENT_BYTES];
        bytes[..4].copy_from_slice(&self.sectors.to_le_bytes());
        bytes[4..].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    /// Parses an entry. Unknown flags have no effect.
    pub fn from_bytes(bytes: [u8; EXTENT_BYTES]) -> Extent {
        let [s0, s1, s2, s3, f0, f1, f2, f3] = bytes;
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        let state = ExtentState { hole: flags & HOLE != 0, zero: flags & ZERO != 0 };
        Extent { sectors: u32::from_le_bytes([s0, s1, s2, s3]), state }
    }
}
