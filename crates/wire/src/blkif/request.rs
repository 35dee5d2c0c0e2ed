//! Requests, as the backend reads them off the ring.

use arrayvec::ArrayVec;
use thiserror::Error;

use super::{
    Abi, INDIRECT_PAGES, SECTOR, SEGMENT_BYTES, SEGMENTS_DIRECT, SEGMENTS_PER_PAGE, Slot, Status,
};
use crate::grant::Gref;
use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// What is asked for (`BLKIF_OP_*`).
    pub enum Operation(u8) {
        /// Fill pages from the disk.
        Read = 0,
        /// Write pages to the disk.
        Write = 1,
        /// Write, after all that came before and before all that comes after, and for good.
        Barrier = 2,
        /// What was written before is to stay; then, if there are segments, write them.
        Flush = 3,
        /// The content of a range is of no more use.
        Discard = 5,
        /// Read or write with more segments than a slot holds.
        Indirect = 6,
    }
}

/// A piece of a page: whole sectors, inside it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentRange {
    gref: Gref,
    first: u8,
    last: u8,
}

/// The last sector of a page.
const LAST: u8 = 7;

impl SegmentRange {
    /// Sectors `first` to `last`, both included, of the page `gref`; `None` unless
    /// `first <= last <= 7`.
    pub fn new(gref: Gref, first: u8, last: u8) -> Option<SegmentRange> {
        (first <= last && last <= LAST).then_some(SegmentRange { gref, first, last })
    }

    /// The page.
    pub fn gref(self) -> Gref {
        self.gref
    }

    /// Where in the page it begins, in bytes: below 4096.
    pub fn offset(self) -> u16 {
        u16::from(self.first) * 512
    }

    /// Its bytes: 512 to 4096.
    pub fn len(self) -> u16 {
        (u16::from(self.last - self.first) + 1) * 512
    }

    /// Never: a segment has at least one sector.
    pub fn is_empty(self) -> bool {
        false
    }

    pub(super) fn to_bytes(self) -> [u8; SEGMENT_BYTES] {
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        [g0, g1, g2, g3, self.first, self.last, 0, 0]
    }

    fn judge(bytes: [u8; SEGMENT_BYTES], index: u32) -> Result<SegmentRange, Refusal> {
        let [g0, g1, g2, g3, first, last, _, _] = bytes;
        if first > last {
            return Err(Refusal::SectorsReversed { index, first, last });
        }
        if last > LAST {
            return Err(Refusal::BeyondPage { index, last });
        }
        Ok(SegmentRange { gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])), first, last })
    }
}

/// What a request is judged by: the disk, and what was offered to this frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Size of the disk in units of 512 bytes.
    pub sectors: u64,
    /// Bytes that positions and lengths are multiples of: 512 or 4096.
    pub sector_size: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// Flushes are served.
    pub flush: bool,
    /// Barriers are served.
    pub barrier: bool,
    /// Discards are served.
    pub discard: bool,
    /// Most segments of an indirect request; 0 where there are none.
    pub indirect_segments: u16,
}

/// A rule that a request breaks. The request is answered, and the ring is in step.
///
/// When several are broken, the one that stands first here is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum Refusal {
    /// An operation that the interface does not define.
    #[error("operation {operation} is unknown")]
    UnknownOperation {
        /// The number.
        operation: u8,
    },
    /// An operation that this disk does not serve.
    #[error("operation {operation} is not offered")]
    NotOffered {
        /// The number.
        operation: u8,
    },
    /// The operation of an indirect request is neither read nor write.
    #[error("operation {operation} cannot be indirect")]
    NotIndirect {
        /// The number.
        operation: u8,
    },
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// A read or write of nothing, or a discard of nothing.
    #[error("a request without a sector")]
    Nothing,
    /// More segments than fit.
    #[error("{found} segments, the limit is {limit}")]
    TooManySegments {
        /// Segments announced.
        found: u16,
        /// The limit.
        limit: u16,
    },
    /// A segment ends before it begins.
    #[error("segment {index}: first sector {first}, last sector {last}")]
    SectorsReversed {
        /// Which segment, counted from 0.
        index: u32,
        /// First sector.
        first: u8,
        /// Last sector.
        last: u8,
    },
    /// A segment reaches over the end of its page.
    #[error("segment {index}: sector {last} does not lie in the page, the last one is 7")]
    BeyondPage {
        /// Which segment, counted from 0.
        index: u32,
        /// Last sector.
        last: u8,
    },
    /// Sector and length have no sum.
    #[error("{count} sectors from {sector} on: the sum overflows")]
    Overflow {
        /// First sector.
        sector: u64,
        /// Sectors.
        count: u64,
    },
    /// The range does not lie on the disk.
    #[error("{count} sectors from {sector} on: the disk has {limit}")]
    BeyondDisk {
        /// First sector.
        sector: u64,
        /// Sectors.
        count: u64,
        /// Sectors of the disk.
        limit: u64,
    },
    /// Position or length are no multiples of the sector size.
    #[error("{count} sectors from {sector} on: not multiples of {sector_size} bytes")]
    Unaligned {
        /// First sector.
        sector: u64,
        /// Sectors.
        count: u64,
        /// The sector size.
        sector_size: u32,
    },
}

impl Refusal {
    /// What the request is answered with.
    pub fn status(&self) -> Status {
        match self {
            Refusal::UnknownOperation { .. } | Refusal::NotOffered { .. } => Status::NotSupported,
            _ => Status::Error,
        }
    }

    /// A name for a counter.
    pub fn label(&self) -> &'static str {
        match self {
            Refusal::UnknownOperation { .. } => "blk_unknown_operation",
            Refusal::NotOffered { .. } => "blk_not_offered",
            Refusal::NotIndirect { .. } => "blk_bad_indirect_operation",
            Refusal::ReadOnly => "blk_read_only",
            Refusal::Nothing => "blk_no_sectors",
            Refusal::TooManySegments { .. } => "blk_too_many_segments",
            Refusal::SectorsReversed { .. } => "blk_sectors_reversed",
            Refusal::BeyondPage { .. } => "blk_crosses_page",
            Refusal::Overflow { .. } => "blk_sector_overflow",
            Refusal::BeyondDisk { .. } => "blk_beyond_disk",
            Refusal::Unaligned { .. } => "blk_unaligned",
        }
    }
}

impl Rules {
    /// Whether `count` sectors from `sector` on are a range that can be served.
    fn range(&self, sector: u64, count: u64) -> Result<(), Refusal> {
        let end = sector.checked_add(count).ok_or(Refusal::Overflow { sector, count })?;
        if end > self.sectors {
            return Err(Refusal::BeyondDisk { sector, count, limit: self.sectors });
        }
        let unit = (u64::from(self.sector_size) / SECTOR).max(1);
        if !sector.is_multiple_of(unit) || !count.is_multiple_of(unit) {
            return Err(Refusal::Unaligned { sector, count, sector_size: self.sector_size });
        }
        Ok(())
    }
}

/// Which way the bytes of a request go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// A read or write whose range lies on the disk and whose segments have as many sectors as it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// First sector.
    pub sector: u64,
    /// Sectors, at least one.
    pub sectors: u64,
}

/// What a request that keeps the rules asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// Read or write the segments.
    Transfer(Transfer),
    /// As [`Body::Transfer`], once [`IndirectHead::segments`] has judged the descriptors.
    Indirect(IndirectHead),
    /// Flush; then write the segments, if there are any.
    Flush(Option<Transfer>),
    /// Wait for all before it, write the segments if there are any, flush, then go on.
    Barrier(Option<Transfer>),
    /// Give up a range.
    Discard {
        /// First sector.
        sector: u64,
        /// Sectors, at least one.
        sectors: u64,
        /// The content must not be readable afterwards.
        secure: bool,
    },
}

/// A request that was judged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Comes back in the response.
    pub id: u64,
    /// The operation, which comes back too: of an indirect request the inner one, as Linux' frontend,
    /// which disables its disk otherwise, and its backend have it.
    pub operation: u8,
    /// What is asked for, or the rule that is broken.
    pub body: Result<Body, Refusal>,
}

/// An indirect request whose descriptors have yet to be read.
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

impl Request {
    /// Judges a slot that was copied out of the ring once. Segments of the slot itself are appended to
    /// `segments`, none if it is refused.
    pub fn parse(
        abi: Abi,
        slot: &Slot,
        rules: &Rules,
        segments: &mut Vec<SegmentRange>,
    ) -> Request {
        let before = segments.len();
        let id = u64_at(slot, abi.id());
        let operation = match Operation::from_raw(slot[0]) {
            Operation::Indirect => slot[1],
            _ => slot[0],
        };
        let body = body(abi, slot, rules, segments);
        if body.is_err() {
            segments.truncate(before);
        }
        Request { id, operation, body }
    }
}

fn body(
    abi: Abi,
    slot: &Slot,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Body, Refusal> {
    let operation = slot[0];
    let offered = match Operation::from_raw(operation) {
        Operation::Unknown(operation) => return Err(Refusal::UnknownOperation { operation }),
        Operation::Read | Operation::Write => true,
        Operation::Barrier => rules.barrier,
        Operation::Flush => rules.flush,
        Operation::Discard => rules.discard,
        Operation::Indirect => rules.indirect_segments > 0,
    };
    if !offered {
        return Err(Refusal::NotOffered { operation });
    }
    match Operation::from_raw(operation) {
        Operation::Read => {
            some(direct(abi, slot, Direction::Read, rules, segments)?).map(Body::Transfer)
        }
        Operation::Barrier => {
            direct(abi, slot, Direction::Write, rules, segments).map(Body::Barrier)
        }
        Operation::Flush => direct(abi, slot, Direction::Write, rules, segments).map(Body::Flush),
        Operation::Discard => discard(abi, slot, rules),
        Operation::Indirect => indirect(abi, slot, rules).map(Body::Indirect),
        _ => some(direct(abi, slot, Direction::Write, rules, segments)?).map(Body::Transfer),
    }
}

fn some(transfer: Option<Transfer>) -> Result<Transfer, Refusal> {
    transfer.ok_or(Refusal::Nothing)
}

fn writable(rules: &Rules, writes: bool) -> Result<(), Refusal> {
    if writes && rules.read_only { Err(Refusal::ReadOnly) } else { Ok(()) }
}

fn direct(
    abi: Abi,
    slot: &Slot,
    direction: Direction,
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Option<Transfer>, Refusal> {
    let count = slot[1];
    // A flush or barrier of nothing writes nothing.
    writable(rules, direction == Direction::Write && (count > 0 || slot[0] == 1))?;
    if count == 0 {
        return Ok(None);
    }
    if usize::from(count) > SEGMENTS_DIRECT {
        let (found, limit) = (u16::from(count), 11);
        return Err(Refusal::TooManySegments { found, limit });
    }
    let descriptors = slot.get(abi.tail()..).unwrap_or_default();
    let sector = u64_at(slot, abi.sector());
    judge_segments(descriptors, u16::from(count), (direction, sector), rules, segments).map(Some)
}

/// Judges the first `count` descriptors, which the caller has seen to be there.
fn judge_segments(
    descriptors: &[u8],
    count: u16,
    (direction, sector): (Direction, u64),
    rules: &Rules,
    segments: &mut Vec<SegmentRange>,
) -> Result<Transfer, Refusal> {
    let mut bytes = 0u64;
    for (index, descriptor) in (0..u32::from(count)).zip(descriptors.as_chunks::<SEGMENT_BYTES>().0)
    {
        let segment = SegmentRange::judge(*descriptor, index)?;
        // At most 4096 segments of at most 4096 bytes.
        bytes += u64::from(segment.len());
        segments.push(segment);
    }
    let sectors = bytes / SECTOR;
    rules.range(sector, sectors)?;
    Ok(Transfer { direction, sector, sectors })
}

fn discard(abi: Abi, slot: &Slot, rules: &Rules) -> Result<Body, Refusal> {
    writable(rules, true)?;
    let (sector, sectors) = (u64_at(slot, abi.sector()), u64_at(slot, abi.tail()));
    if sectors == 0 {
        return Err(Refusal::Nothing);
    }
    rules.range(sector, sectors)?;
    Ok(Body::Discard { sector, sectors, secure: slot[1] & 1 != 0 })
}

fn indirect(abi: Abi, slot: &Slot, rules: &Rules) -> Result<IndirectHead, Refusal> {
    let operation = slot[1];
    let direction = match Operation::from_raw(operation) {
        Operation::Read => Direction::Read,
        Operation::Write => Direction::Write,
        _ => return Err(Refusal::NotIndirect { operation }),
    };
    writable(rules, direction == Direction::Write)?;
    let count = u16::from_le_bytes(array(slot, 2));
    if count == 0 {
        return Err(Refusal::Nothing);
    }
    // Whatever was offered, a request names no more than eight pages.
    let limit = rules.indirect_segments.min(4096);
    if count > limit {
        return Err(Refusal::TooManySegments { found: count, limit });
    }
    let pages = usize::from(count).div_ceil(SEGMENTS_PER_PAGE);
    let gref = |page| Gref(u32::from_le_bytes(array(slot, abi.indirect_grefs() + 4 * page)));
    let sector = u64_at(slot, abi.sector());
    Ok(IndirectHead { direction, sector, count, pages: (0..pages).map(gref).collect() })
}

impl IndirectHead {
    /// Which way.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The pages with the descriptors, in order: all but the last one are full.
    pub fn pages(&self) -> &[Gref] {
        &self.pages
    }

    /// Bytes of all descriptors.
    pub fn descriptor_bytes(&self) -> usize {
        usize::from(self.count) * SEGMENT_BYTES
    }

    /// Judges the descriptors, which were copied out of [`IndirectHead::pages`] once, and appends the
    /// segments to `segments`, none if the request is refused. Fewer bytes than
    /// [`IndirectHead::descriptor_bytes`] are refused like a request without a sector.
    ///
    /// # Errors
    ///
    /// The first rule that is broken.
    pub fn segments(
        &self,
        descriptors: &[u8],
        rules: &Rules,
        segments: &mut Vec<SegmentRange>,
    ) -> Result<Transfer, Refusal> {
        let before = segments.len();
        let Some(descriptors) = descriptors.get(..self.descriptor_bytes()) else {
            return Err(Refusal::Nothing);
        };
        let place = (self.direction, self.sector);
        let judged = judge_segments(descriptors, self.count, place, rules, segments);
        if judged.is_err() {
            segments.truncate(before);
        }
        judged
    }
}
