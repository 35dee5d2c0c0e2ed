//! Ring requests that carry pages: reads, writes, and zeros for backends without an operation for them.

use ringfence_memory::PAGE_SIZE;
use ringfence_platform::{Access, Granter};
use ringfence_sys::numbers::usize_from;
use ringfence_wire::blkif::{
    Abi, Direction, Operation, RequestName, SEGMENTS_DIRECT, SegmentRange, Slot, direct, indirect,
    indirect_descriptors,
};

use super::super::bytes::to_page;
use super::super::pool::Page;
use super::{Kind, LaneConnection, Piece, Posted};
use crate::storage::Segment;

/// Copies as much of a piece as fits into pages, and builds the ring request.
pub(super) fn build_transfer<G: Granter, C>(
    connection: &mut LaneConnection<G, C>,
    segments: &[Segment],
    piece: Piece,
    name: RequestName,
    sector: u64,
) -> Option<(Slot, Posted)> {
    let pool = &mut connection.pool;
    let reads = piece.kind == Kind::Read;
    let access = if reads { Access::ReadWrite } else { Access::ReadOnly };
    let wanted = usize_from(piece.len.div_ceil(PAGE_SIZE as u64));
    let wanted = wanted.min(connection.terms.segments);
    let mut descriptors = None;
    if wanted > SEGMENTS_DIRECT {
        descriptors = pool.take(Access::ReadOnly);
    }
    let most = if descriptors.is_some() { wanted } else { wanted.min(SEGMENTS_DIRECT) };
    let mut pages = Vec::with_capacity(most);
    while pages.len() < most {
        let Some(page) = pool.take(access) else { break };
        pages.push(page);
    }
    if pages.len() <= SEGMENTS_DIRECT
        && let Some(page) = descriptors.take()
    {
        pool.give_back(page);
    }
    let len = piece.len.min((pages.len() * PAGE_SIZE) as u64);
    let piece = Piece { len, ..piece };
    let filled = fill(&pages, segments, piece);
    let request = filled.and_then(|ranges| {
        let direction = if reads { Direction::Read } else { Direction::Write };
        let operation = if reads { Operation::Read } else { Operation::Write };
        let Some(list) = &descriptors else {
            return Some((direct(Abi::NATIVE, operation, name, sector, &ranges)?, operation));
        };
        let bytes: Vec<u8> = indirect_descriptors(&ranges).flatten().collect();
        list.memory().copy_from(0, &bytes).ok()?;
        let count = u16::try_from(ranges.len()).ok()?;
        let slot = indirect(Abi::NATIVE, direction, name, sector, count, &[list.gref()])?;
        // The response names the inner operation.
        Some((slot, operation))
    });
    match request.filter(|_| len > 0) {
        Some((slot, operation)) => {
            let posted =
                Posted { piece, operation, pages, descriptors, generation: 0, sequence: 0 };
            Some((slot, posted))
        }
        None => {
            pages.into_iter().chain(descriptors).for_each(|page| pool.give_back(page));
            None
        }
    }
}

/// Fills the pages of a write and returns the used range of each page.
fn fill(pages: &[Page], segments: &[Segment], piece: Piece) -> Option<Vec<SegmentRange>> {
    let mut at = usize::try_from(piece.at).ok()?;
    let mut left = usize::try_from(piece.len).ok()?;
    let mut ranges = Vec::with_capacity(pages.len());
    for page in pages {
        let len = left.min(PAGE_SIZE);
        let filled = match piece.kind {
            Kind::Write => to_page(segments, at, page.memory(), len),
            Kind::Zero { .. } => page.memory().zero(0, len),
            _ => Ok(()),
        };
        filled.ok()?;
        let last = u8::try_from((len / 512).checked_sub(1)?).ok()?;
        ranges.push(SegmentRange::new(page.gref(), 0, last)?);
        at += len;
        left -= len;
    }
    Some(ranges)
}
