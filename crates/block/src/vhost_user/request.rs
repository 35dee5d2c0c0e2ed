//! Parser of a virtual machine's requests: a chain of descriptors becomes work for the disk.
//!
//! The header, a range and the place of the status may lie in any descriptors, also in parts (virtio 1.x, 2.7.4.3). The
//! header and a range are fetched once. Data stays in the machine's memory.

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::usize_from;
use ringfence_vhost_user::ClientFault;
use ringfence_vhost_user::memory::GuestMemory;
use ringfence_wire::blkif::{Direction, Transfer};
use ringfence_wire::virtio::{Descriptor, flag};
use ringfence_wire::virtio_blk::{
    BlkRange, BlkStatus, HEADER_BYTES, RANGE_BYTES, RequestHeader, RequestKind, SECTOR,
};

use crate::storage::{Geometry, Segment};
use crate::work::Work;

/// Maximum length of a segment in bytes, as the configuration space says.
pub(super) const SIZE_MAX: u32 = 1 << 20;
/// Maximum number of segments, as the configuration space says. A queue of 128 entries has room for one such request.
pub(super) const SEG_MAX: u32 = 126;
/// Maximum bytes of a read or a write.
const BYTES_MAX: u64 = SIZE_MAX as u64 * SEG_MAX as u64;
/// Maximum sectors of a discard or of zeros: 2 GiB.
pub(super) const RANGE_MAX: u32 = 1 << 22;

/// Request of a virtual machine.
#[derive(Debug)]
pub(super) struct ParsedRequest {
    pub(super) action: Action,
    /// Byte for the status.
    pub(super) status: LentSlice,
}

/// Action that a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Run(Work),
    /// Storing of the disk's identity in the segments.
    Identify,
    /// Request that breaks this rule.
    Refuse(&'static str, BlkStatus),
}

/// Parser with the buffers that it uses again.
#[derive(Debug, Default)]
pub(super) struct RequestParser {
    readable: Vec<LentSlice>,
    writable: Vec<LentSlice>,
}

impl RequestParser {
    /// Parses a chain. Replaces the content of `segments` by the memory of the data.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault`] for a chain outside of the machine's memory, and for one without a header or a place for
    /// the status, which no answer could reach.
    pub(super) fn parse(
        &mut self,
        chain: &[Descriptor],
        memory: &GuestMemory,
        geometry: &Geometry,
        segments: &mut Vec<Segment>,
    ) -> Result<ParsedRequest, ClientFault> {
        segments.clear();
        self.gather(chain, memory)?;
        let [readable, writable] = [&self.readable, &self.writable].map(|side| bytes(side));
        let incomplete = ClientFault::NoStatus { readable, writable };
        let mut header = [0; HEADER_BYTES];
        let (Some(status), true) =
            (take_last(&mut self.writable), take_first(&mut self.readable, &mut header))
        else {
            return Err(incomplete);
        };
        let RequestHeader { kind, sector } = RequestHeader::from_bytes(&header);
        let action = match kind {
            RequestKind::Read => {
                segments.extend(self.writable.drain(..).map(Segment::from));
                self.transfer(Direction::Read, sector, writable - 1, geometry)
            }
            RequestKind::Write => {
                segments.extend(self.readable.drain(..).map(Segment::from));
                let len = readable - HEADER_BYTES as u64;
                self.transfer(Direction::Write, sector, len, geometry)
            }
            RequestKind::Flush => Action::Run(Work::Flush(None)),
            RequestKind::Identity => {
                segments.extend(self.writable.drain(..).map(Segment::from));
                Action::Identify
            }
            RequestKind::Discard | RequestKind::WriteZeroes => self.range(kind, geometry),
            RequestKind::Unknown(_) => {
                Action::Refuse("blk_unknown_request", BlkStatus::Unsupported)
            }
        };
        // The memory of a request that is not in flight stays mapped no longer.
        self.readable.clear();
        self.writable.clear();
        Ok(ParsedRequest { action, status })
    }

    /// Looks the memory of each descriptor up.
    fn gather(&mut self, chain: &[Descriptor], memory: &GuestMemory) -> Result<(), ClientFault> {
        self.readable.clear();
        self.writable.clear();
        for &Descriptor { address, len, flags, .. } in chain.iter().filter(|link| link.len > 0) {
            let len = usize_from(len);
            let (lent, offset) = memory.at(address, len)?;
            let piece = lent.slice(offset, len);
            let piece = piece.map_err(|_| ClientFault::Unmapped { address, len })?;
            let is_readable = flags & flag::WRITE == 0;
            if is_readable { &mut self.readable } else { &mut self.writable }.push(piece);
        }
        Ok(())
    }

    fn transfer(&self, direction: Direction, sector: u64, len: u64, disk: &Geometry) -> Action {
        let refused = |rule| Action::Refuse(rule, BlkStatus::Error);
        if len > BYTES_MAX {
            return refused("blk_too_long");
        }
        if direction == Direction::Write && disk.read_only {
            return refused("blk_read_only");
        }
        match place(sector, len, disk) {
            Ok(sectors) => Action::Run(Work::Transfer(Transfer { direction, sector, sectors })),
            Err(rule) => refused(rule),
        }
    }

    /// Reads the only range of a discard or of zeros.
    fn range(&mut self, kind: RequestKind, disk: &Geometry) -> Action {
        let refused = |rule| Action::Refuse(rule, BlkStatus::Error);
        let is_discard = kind == RequestKind::Discard;
        let is_offered = if is_discard { disk.discard.is_some() } else { disk.write_zeroes };
        let mut bytes = [0; RANGE_BYTES];
        if !is_offered {
            return Action::Refuse("blk_not_offered", BlkStatus::Unsupported);
        }
        if !take_first(&mut self.readable, &mut bytes) || !self.readable.is_empty() {
            return refused("blk_range_count");
        }
        let BlkRange { sector, sectors, unmap, has_reserved } = BlkRange::from_bytes(&bytes);
        if has_reserved || is_discard && unmap {
            return Action::Refuse("blk_range_flags", BlkStatus::Unsupported);
        }
        if disk.read_only {
            return refused("blk_read_only");
        }
        if sectors > RANGE_MAX {
            return refused("blk_too_long");
        }
        match place(sector, u64::from(sectors) * SECTOR, disk) {
            Ok(sectors) if is_discard => {
                Action::Run(Work::Discard { sector, sectors, secure: false })
            }
            Ok(sectors) => Action::Run(Work::Zeroes { sector, sectors, allocate: !unmap }),
            Err(rule) => refused(rule),
        }
    }
}

/// Checks that a request lies on the disk. Returns its number of sectors, or the broken rule.
fn place(sector: u64, len: u64, disk: &Geometry) -> Result<u64, &'static str> {
    let unit = u64::from(disk.sector_size);
    let start = sector.checked_mul(SECTOR);
    let end = start.and_then(|start| start.checked_add(len));
    match (start, end) {
        (Some(start), Some(end)) if end <= disk.bytes => {
            let is_aligned = start.is_multiple_of(unit) && len.is_multiple_of(unit);
            if is_aligned && len > 0 { Ok(len / SECTOR) } else { Err("blk_alignment") }
        }
        _ => Err("blk_beyond_end"),
    }
}

fn bytes(side: &[LentSlice]) -> u64 {
    side.iter().map(|piece| piece.len() as u64).sum()
}

/// Fills `wanted` with the first bytes of the pieces, and removes them. Returns `false` if there are too few.
fn take_first(side: &mut Vec<LentSlice>, wanted: &mut [u8]) -> bool {
    let (mut filled, mut used) = (0, 0);
    for piece in side.iter_mut() {
        let len = piece.len().min(wanted.len() - filled);
        if piece.copy_to(0, &mut wanted[filled..filled + len]).is_err() {
            return false;
        }
        filled += len;
        if len < piece.len() {
            let Ok(rest) = piece.slice(len, piece.len() - len) else { return false };
            *piece = rest;
            break;
        }
        used += 1;
    }
    side.drain(..used);
    filled == wanted.len()
}

/// Removes the last byte of the pieces, and returns it.
fn take_last(side: &mut Vec<LentSlice>) -> Option<LentSlice> {
    let piece = side.pop()?;
    let before = piece.len() - 1;
    if before > 0 {
        side.push(piece.slice(0, before).ok()?);
    }
    piece.slice(before, 1).ok()
}
