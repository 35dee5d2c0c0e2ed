//! Request parser and validation, used by the backend.

use arrayvec::ArrayVec;
use thiserror::Error;

use super::{
    Abi, INDIRECT_PAGES, SECTOR, SEGMENT_BYTES, SEGMENTS_DIRECT, SEGMENTS_PER_PAGE, Slot, Status,
};
use crate::grant::Gref;
use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// Operation of a request (`BLKIF_OP_*`).
    pub enum Operation(u8) {
        /// Reads sectors into pages.
        Read = 0,
        /// Writes pages to the disk.
        Write = 1,
        /// Ordered, durable write: after all earlier requests and before all later ones.
        Barrier = 2,
        /// Makes earlier writes durable, then writes the segments, if any.
        Flush = 3,
        /// Declares the content of a check_range unused.
        Discard = 5,
        /// Read or write with more segments than a slot holds.
        Indirect = 6,
        /// Ringfence only: writes the list of the extents of a range ([`Extent`](super::Extent)) to a page. Offered
        /// by the key [`FEATURE_RINGFENCE_EXTENTS`](super::keys::FEATURE_RINGFENCE_EXTENTS).
        Extents = 0xE0,
        /// Ringfence only: writes zeros to a range, without pages. Offered by the key
        /// [`FEATURE_RINGFENCE_WRITE_ZEROES`](super::keys::FEATURE_RINGFENCE_WRITE_ZEROES).
        WriteZeroes = 0xE1,
    }
}

/// Run of whole sectors inside one granted page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentRange {
    gref: Gref,
    first: u8,
    last: u8,
}

/// Last sector of a page.
const LAST: u8 = 7;

impl SegmentRange {
    /// Creates a segment of sectors `first` to `last`, both included, in the page `gref`. Returns `None`
    /// unless `first <= last <= 7`.
    pub fn new(gref: Gref, first: u8, last: u8) -> Option<SegmentRange> {
        (first <= last && last <= LAST).then_some(SegmentRange { gref, first, last })
    }

    /// Returns the granted page.
    pub fn gref(self) -> Gref {
        self.gref
    }

    /// Returns the offset in the page in bytes, below 4096.
    pub fn offset(self) -> u16 {
        u16::from(self.first) * 512
    }

    /// Returns the length in bytes, 512 to 4096.
    pub fn len(self) -> u16 {
        (u16::from(self.last - self.first) + 1) * 512
    }

    /// Returns `false`: a segment has at least one sector.
    pub fn is_empty(self) -> bool {
        false
    }

    pub(super) fn to_bytes(self) -> [u8; SEGMENT_BYTES] {
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        [g0, g1, g2, g3, self.first, self.last, 0, 0]
    }

    fn parse(bytes: [u8; SEGMENT_BYTES], index: u32) -> Result<SegmentRange, BlkRefusal> {
        let [g0, g1, g2, g3, first, last, _, _] = bytes;
        if first > last {
            return Err(BlkRefusal::SectorsReversed { index, first, last });
        }
        if last > LAST {
            return Err(BlkRefusal::BeyondPage { index, last });
        }
        Ok(SegmentRange { gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])), first, last })
    }
}

/// Limits for validation: the disk's geometry and the features offered to this frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Size of the disk in units of 512 bytes.
    pub sectors: u64,
    /// Sector size in bytes, 512 or 4096.
    pub sector_size: u32,
    pub read_only: bool,
    pub flush: bool,
    pub barrier: bool,
    pub discard: bool,
    pub extents: bool,
    pub write_zeroes: bool,
    /// Maximum segments of an indirect request; 0 if indirect requests are not offered.
    pub indirect_segments: u16,
}

/// Broken rule of a request. The backend answers the request, and the ring stays in step.
///
/// If a request breaks several rules, the first variant in this order is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum BlkRefusal {
    /// Operation that the interface does not define.
    #[error("operation {operation} is unknown")]
    UnknownOperation { operation: u8 },
    /// Operation that this disk does not offer.
    #[error("operation {operation} is not offered")]
    NotOffered { operation: u8 },
    /// Inner operation of an indirect request is neither read nor write.
    #[error("operation {operation} cannot be indirect")]
    NotIndirect { operation: u8 },
    #[error("the disk is read-only")]
    ReadOnly,
    /// Read, write, discard, write of zeros or query of no sectors.
    #[error("a request without a sector")]
    Nothing,
    #[error("{found} segments, the limit is {limit}")]
    TooManySegments {
        /// Segments in the request.
        found: u16,
        limit: u16,
    },
    /// Segment's last sector is before its first.
    #[error("segment {index}: first sector {first}, last sector {last}")]
    SectorsReversed {
        /// Segment index, counted from 0.
        index: u32,
        first: u8,
        last: u8,
    },
    /// Segment reaches over the end of its page.
    #[error("segment {index}: sector {last} does not lie in the page, the last one is 7")]
    BeyondPage {
        /// Segment index, counted from 0.
        index: u32,
        last: u8,
    },
    /// Sum of sector and count overflows.
    #[error("{count} sectors from {sector} on: the sum overflows")]
    Overflow { sector: u64, count: u64 },
    /// Range reaches beyond the end of the disk.
    #[error("{count} sectors from {sector} on: the disk has {limit}")]
    BeyondDisk {
        sector: u64,
        count: u64,
        /// Sectors of the disk.
        limit: u64,
    },
    /// Position or length is not a multiple of the sector size.
    #[error("{count} sectors from {sector} on: not multiples of {sector_size} bytes")]
    Unaligned { sector: u64, count: u64, sector_size: u32 },
}

impl BlkRefusal {
    /// Returns the status of the response.
    pub fn status(&self) -> Status {
        match self {
            BlkRefusal::UnknownOperation { .. } | BlkRefusal::NotOffered { .. } => {
                Status::NotSupported
            }
            _ => Status::Error,
        }
    }

    /// Returns the label of the rule's counter.
    pub fn label(&self) -> &'static str {
        match self {
            BlkRefusal::UnknownOperation { .. } => "blk_unknown_operation",
            BlkRefusal::NotOffered { .. } => "blk_not_offered",
            BlkRefusal::NotIndirect { .. } => "blk_bad_indirect_operation",
            BlkRefusal::ReadOnly => "blk_read_only",
            BlkRefusal::Nothing => "blk_no_sectors",
            BlkRefusal::TooManySegments { .. } => "blk_too_many_segments",
            BlkRefusal::SectorsReversed { .. } => "blk_sectors_reversed",
            BlkRefusal::BeyondPage { .. } => "blk_crosses_page",
            BlkRefusal::Overflow { .. } => "blk_sector_overflow",
            BlkRefusal::BeyondDisk { .. } => "blk_beyond_disk",
            BlkRefusal::Unaligned { .. } => "blk_unaligned",
        }
    }
}

impl Rules {
    /// Checks that `count` sectors from `sector` on lie on the disk and are aligned.
    fn check_range(&self, sector: u64, count: u64) -> Result<(), BlkRefusal> {
        let end = sector.checked_add(count).ok_or(BlkRefusal::Overflow { sector, count })?;
        if end > self.sectors {
            return Err(BlkRefusal::BeyondDisk { sector, count, limit: self.sectors });
        }
        let unit = (u64::from(self.sector_size) / SECTOR).max(1);
        if !sector.is_multiple_of(unit) || !count.is_multiple_of(unit) {
            return Err(BlkRefusal::Unaligned { sector, count, sector_size: self.sector_size });
        }
        Ok(())
    }
}

/// Direction of the data of a request: from the disk (read) or to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    Read,
    Write,
}

/// Validated read or write: the check_range lies on the disk and equals the sum of the segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    pub direction: Direction,
    pub sector: u64,
    /// Number of sectors, at least one.
    pub sectors: u64,
}

/// Validated action of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// Reads or writes the segments.
    Transfer(Transfer),
    /// Transfer whose descriptors [`IndirectHead::segments`] has yet to validate.
    Indirect(IndirectHead),
    /// Flushes, then writes the segments, if any.
    Flush(Option<Transfer>),
    /// Waits for all earlier requests, writes the segments, if any, flushes, then lets later ones start.
    Barrier(Option<Transfer>),
    /// Discards a sector check_range.
    Discard {
        sector: u64,
        /// Number of sectors, at least one.
        sectors: u64,
        /// Content must not be readable afterwards.
        secure: bool,
    },
    /// Writes zeros to a sector range.
    WriteZeroes {
        sector: u64,
        /// Number of sectors, at least one.
        sectors: u64,
        /// Storage of the range stays allocated. Otherwise the backend may free it.
        allocate: bool,
    },
    /// Writes the extents of a range to the only segment, which is a whole page.
    Extents {
        sector: u64,
        /// Number of sectors, at least one.
        sectors: u64,
    },
}

/// Parsed and validated request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlkRequest {
    /// Id that the response echoes.
    pub id: u64,
    /// Operation that the response echoes. An indirect request gives its inner operation, as Linux'
    /// backend does: Linux' frontend disables its disk otherwise.
    pub operation: u8,
    /// Validated action, or the broken rule.
    pub body: Result<Body, BlkRefusal>,
}

/// Indirect request whose descriptors are not read yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndirectHead {
    direction: Direction,
    sector: u64,
    count: u16,
    pages: ArrayVec<Gref, INDIRECT_PAGES>,
}

fn array<const N: usize>(slot: &Slot, at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    // Every offset of either layout lies in the slot.
    if let Some(found) = slot.get(at..at + N) {
        bytes.copy_from_slice(found);
    }
    bytes
}

fn u64_at(slot: &Slot, at: usize) -> u64 {
    u64::from_le_bytes(array(slot, at))
}

impl BlkRequest {
    /// Validates a slot that was copied out of the ring once. Appends the slot's own segments to
    /// `segments`, or nothing if the request is refused.
    pub fn parse(
        abi: Abi,
        slot: &Slot,
        rules: &Rules,
        segments: &mut Vec<SegmentRange>,
    ) -> BlkRequest {
        let before = segments.len();
        let id = u64_at(slot, abi.id());
        let operation = match Operation::from_raw(slot[0]) {
            Operation::Indirect => slot[1],
            _ => slot[0],
        };
        let body = parse_body(abi, slot, rules, segments);
        if body.is_err() {
            segments.truncate(before);
        }
        BlkRequest { id, operation, body }
    }
}

fn parse_body(
    abi: Abi,
    slot: &Slot,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Body, BlkRefusal> {
    let operation = slot[0];
    let offered = match Operation::from_raw(operation) {
        Operation::Unknown(operation) => return Err(BlkRefusal::UnknownOperation { operation }),
        Operation::Read | Operation::Write => true,
        Operation::Barrier => rules.barrier,
        Operation::Flush => rules.flush,
        Operation::Discard => rules.discard,
        Operation::Indirect => rules.indirect_segments > 0,
        Operation::Extents => rules.extents,
        Operation::WriteZeroes => rules.write_zeroes,
    };
    if !offered {
        return Err(BlkRefusal::NotOffered { operation });
    }
    match Operation::from_raw(operation) {
        Operation::Read => {
            require_sectors(parse_direct(abi, slot, Direction::Read, rules, segments)?)
                .map(Body::Transfer)
        }
        Operation::Barrier => {
            parse_direct(abi, slot, Direction::Write, rules, segments).map(Body::Barrier)
        }
        Operation::Flush => {
            parse_direct(abi, slot, Direction::Write, rules, segments).map(Body::Flush)
        }
        Operation::Discard => parse_discard(abi, slot, rules),
        Operation::Indirect => parse_indirect(abi, slot, rules).map(Body::Indirect),
        Operation::Extents => parse_extents(abi, slot, rules, segments),
        Operation::WriteZeroes => parse_write_zeroes(abi, slot, rules),
        _ => require_sectors(parse_direct(abi, slot, Direction::Write, rules, segments)?)
            .map(Body::Transfer),
    }
}

fn require_sectors(transfer: Option<Transfer>) -> Result<Transfer, BlkRefusal> {
    transfer.ok_or(BlkRefusal::Nothing)
}

fn check_writable(rules: &Rules, writes: bool) -> Result<(), BlkRefusal> {
    if writes && rules.read_only { Err(BlkRefusal::ReadOnly) } else { Ok(()) }
}

fn parse_direct(
    abi: Abi,
    slot: &Slot,
    direction: Direction,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Option<Transfer>, BlkRefusal> {
    let count = slot[1];
    // A flush or barrier without segments writes nothing.
    check_writable(rules, direction == Direction::Write && (count > 0 || slot[0] == 1))?;
    if count == 0 {
        return Ok(None);
    }
    if usize::from(count) > SEGMENTS_DIRECT {
        let (found, limit) = (u16::from(count), 11);
        return Err(BlkRefusal::TooManySegments { found, limit });
    }
    let descriptors = slot.get(abi.tail()..).unwrap_or_default();
    let sector = u64_at(slot, abi.sector());
    parse_segments(
        descriptors,
        u16::from(count),
        TransferStart { direction, sector },
        rules,
        segments,
    )
    .map(Some)
}

/// Direction and first sector of a transfer whose length follows from its segments.
struct TransferStart {
    direction: Direction,
    sector: u64,
}

/// Validates the first `count` descriptors; the caller guarantees that they are present.
fn parse_segments(
    descriptors: &[u8],
    count: u16,
    start: TransferStart,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Transfer, BlkRefusal> {
    let mut bytes = 0u64;
    for (index, descriptor) in (0..u32::from(count)).zip(descriptors.as_chunks::<SEGMENT_BYTES>().0)
    {
        let segment = SegmentRange::parse(*descriptor, index)?;
        // At most 4096 segments of at most 4096 bytes.
        bytes += u64::from(segment.len());
        segments.push(segment);
    }
    let TransferStart { direction, sector } = start;
    let sectors = bytes / SECTOR;
    rules.check_range(sector, sectors)?;
    Ok(Transfer { direction, sector, sectors })
}

fn parse_discard(abi: Abi, slot: &Slot, rules: &Rules) -> Result<Body, BlkRefusal> {
    check_writable(rules, true)?;
    let (sector, sectors) = parse_range(abi, slot, rules)?;
    Ok(Body::Discard { sector, sectors, secure: slot[1] & 1 != 0 })
}

fn parse_write_zeroes(abi: Abi, slot: &Slot, rules: &Rules) -> Result<Body, BlkRefusal> {
    check_writable(rules, true)?;
    let (sector, sectors) = parse_range(abi, slot, rules)?;
    Ok(Body::WriteZeroes { sector, sectors, allocate: slot[1] & 1 != 0 })
}

/// Validates the sector range of a request without segments.
fn parse_range(abi: Abi, slot: &Slot, rules: &Rules) -> Result<(u64, u64), BlkRefusal> {
    let (sector, sectors) = (u64_at(slot, abi.sector()), u64_at(slot, abi.tail()));
    if sectors == 0 {
        return Err(BlkRefusal::Nothing);
    }
    rules.check_range(sector, sectors)?;
    Ok((sector, sectors))
}

fn parse_extents(
    abi: Abi,
    slot: &Slot,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Body, BlkRefusal> {
    let (sector, sectors) = parse_range(abi, slot, rules)?;
    let gref = Gref(u32::from_le_bytes(array(slot, abi.extents_gref())));
    segments.push(SegmentRange { gref, first: 0, last: LAST });
    Ok(Body::Extents { sector, sectors })
}

fn parse_indirect(abi: Abi, slot: &Slot, rules: &Rules) -> Result<IndirectHead, BlkRefusal> {
    let operation = slot[1];
    let direction = match Operation::from_raw(operation) {
        Operation::Read => Direction::Read,
        Operation::Write => Direction::Write,
        _ => return Err(BlkRefusal::NotIndirect { operation }),
    };
    check_writable(rules, direction == Direction::Write)?;
    let count = u16::from_le_bytes(array(slot, 2));
    if count == 0 {
        return Err(BlkRefusal::Nothing);
    }
    // The grefs in the slot cover eight pages of descriptors, whatever was offered.
    let limit = rules.indirect_segments.min(4096);
    if count > limit {
        return Err(BlkRefusal::TooManySegments { found: count, limit });
    }
    let pages = usize::from(count).div_ceil(SEGMENTS_PER_PAGE);
    let gref = |page| Gref(u32::from_le_bytes(array(slot, abi.indirect_grefs() + 4 * page)));
    let sector = u64_at(slot, abi.sector());
    Ok(IndirectHead { direction, sector, count, pages: (0..pages).map(gref).collect() })
}

impl IndirectHead {
    /// Returns the direction of the transfer.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the descriptor pages in order; all but the last one are full.
    pub fn pages(&self) -> &[Gref] {
        &self.pages
    }

    /// Returns the length of all descriptors in bytes.
    pub fn descriptor_bytes(&self) -> usize {
        usize::from(self.count) * SEGMENT_BYTES
    }

    /// Validates descriptors that were copied out of [`IndirectHead::pages`] once. Appends the segments
    /// to `segments`, or nothing if the request is refused.
    ///
    /// # Errors
    ///
    /// Returns the first broken rule. A slice shorter than [`IndirectHead::descriptor_bytes`] gives
    /// [`BlkRefusal::Nothing`].
    pub fn segments(
        &self,
        descriptors: &[u8],
        rules: &Rules,
        segments: &mut Vec<SegmentRange>,
    ) -> Result<Transfer, BlkRefusal> {
        let before = segments.len();
        let Some(descriptors) = descriptors.get(..self.descriptor_bytes()) else {
            return Err(BlkRefusal::Nothing);
        };
        let start = TransferStart { direction: self.direction, sector: self.sector };
        let result = parse_segments(descriptors, self.count, start, rules, segments);
        if result.is_err() {
            segments.truncate(before);
        }
        result
    }
}
