//! Encoders for requests, used by the frontend.

use super::{
    Abi, Direction, INDIRECT_PAGES, Operation, SEGMENT_BYTES, SEGMENTS_DIRECT, SegmentRange, Slot,
};
use crate::grant::Gref;

/// Names that a request carries beside its operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestName {
    /// Number of the frontend's choice, which the response repeats.
    pub id: u64,
    /// Number of the virtual device. Backends ignore it.
    pub handle: u16,
}

fn put(slot: &mut Slot, at: usize, bytes: &[u8]) {
    if let Some(place) = slot.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Encodes a read, write, flush or barrier with its segments in the slot. Returns `None` if there are
/// more than 11 segments.
pub fn direct(
    abi: Abi,
    operation: Operation,
    RequestName { id, handle }: RequestName,
    sector: u64,
    segments: &[SegmentRange],
) -> Option<Slot> {
    if segments.len() > SEGMENTS_DIRECT {
        return None;
    }
    let mut slot = [0; 112];
    slot[0] = operation.to_raw();
    slot[1] = u8::try_from(segments.len()).ok()?;
    put(&mut slot, 2, &handle.to_le_bytes());
    put(&mut slot, abi.id(), &id.to_le_bytes());
    put(&mut slot, abi.sector(), &sector.to_le_bytes());
    for (segment, at) in segments.iter().zip((abi.tail()..).step_by(SEGMENT_BYTES)) {
        put(&mut slot, at, &segment.to_bytes());
    }
    Some(slot)
}

/// Encodes a discard of a sector range.
pub fn discard(abi: Abi, name: RequestName, sector: u64, sectors: u64, secure: bool) -> Slot {
    let mut slot = range(abi, Operation::Discard, name, sector, sectors);
    slot[1] = u8::from(secure);
    slot
}

/// Encodes a write of zeros to a sector range. With `allocate` its storage stays allocated.
pub fn write_zeroes(
    abi: Abi,
    name: RequestName,
    sector: u64,
    sectors: u64,
    allocate: bool,
) -> Slot {
    let mut slot = range(abi, Operation::WriteZeroes, name, sector, sectors);
    slot[1] = u8::from(allocate);
    slot
}

/// Encodes an operation on a sector range, without segments.
fn range(
    abi: Abi,
    operation: Operation,
    RequestName { id, handle }: RequestName,
    sector: u64,
    sectors: u64,
) -> Slot {
    let mut slot = [0; 112];
    slot[0] = operation.to_raw();
    put(&mut slot, 2, &handle.to_le_bytes());
    put(&mut slot, abi.id(), &id.to_le_bytes());
    put(&mut slot, abi.sector(), &sector.to_le_bytes());
    put(&mut slot, abi.tail(), &sectors.to_le_bytes());
    slot
}

/// Encodes a query of the extents of a sector range, whose list the backend writes to the page `gref`.
pub fn extents(abi: Abi, name: RequestName, sector: u64, sectors: u64, gref: Gref) -> Slot {
    let mut slot = range(abi, Operation::Extents, name, sector, sectors);
    put(&mut slot, abi.extents_gref(), &gref.0.to_le_bytes());
    slot
}

/// Encodes a request whose `count` segments are described in `pages`. Returns `None` for more than
/// eight pages.
pub fn indirect(
    abi: Abi,
    direction: Direction,
    RequestName { id, handle }: RequestName,
    sector: u64,
    count: u16,
    pages: &[Gref],
) -> Option<Slot> {
    if pages.len() > INDIRECT_PAGES {
        return None;
    }
    let operation = match direction {
        Direction::Read => Operation::Read,
        Direction::Write => Operation::Write,
    };
    let mut slot = [0; 112];
    slot[0] = Operation::Indirect.to_raw();
    slot[1] = operation.to_raw();
    put(&mut slot, 2, &count.to_le_bytes());
    put(&mut slot, abi.id(), &id.to_le_bytes());
    put(&mut slot, abi.sector(), &sector.to_le_bytes());
    put(&mut slot, abi.tail(), &handle.to_le_bytes());
    for (page, at) in pages.iter().zip((abi.indirect_grefs()..).step_by(4)) {
        put(&mut slot, at, &page.0.to_le_bytes());
    }
    Some(slot)
}

/// Encodes segment descriptors for the pages of an indirect request. Each page is filled before the
/// next one begins.
pub fn indirect_descriptors(
    segments: &[SegmentRange],
) -> impl Iterator<Item = [u8; SEGMENT_BYTES]> {
    segments.iter().map(|segment| segment.to_bytes())
}
