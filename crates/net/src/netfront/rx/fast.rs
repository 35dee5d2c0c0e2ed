//! RX fast path: packets from the backend that lie in one page.
//!
//! The path works in batches of two passes. The first validates the responses and prefetches the packets'
//! first bytes. The second copies the headers and adds the frames. A response of another kind ends the
//! batch.

use arrayvec::ArrayVec;
use ringfence_memory::LentSlice;
use ringfence_offload::packet::Layers;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_wire::netif::{RxFlags, RxResponse};
use ringfence_wire::numbers::bounded;

use super::FrontendRx;
use crate::fast::{BATCH_MAX, FastRun, qualifies};
use ringfence_frame::batch::{Batch, HEADER_MAX, LentRange};
use ringfence_frame::counters::DropReason;
use ringfence_frame::port::Fault;

/// Validated packet of one response.
struct Validated<'a> {
    page: &'a LentSlice,
    offset: usize,
    len: usize,
    checksum_valid: bool,
}

impl FrontendRx {
    /// Receives packets while they qualify, at most `budget`.
    pub(super) fn receive_fast(
        &mut self,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<FastRun, Fault> {
        let mut run = FastRun::default();
        while run.looked < budget {
            let waiting = self.ring.unconsumed().map_err(|e| self.overflow(e))? as usize;
            let most = BATCH_MAX.min(budget - run.looked).min(waiting);
            let (ring, first) = (&self.ring, self.ring.consumed_index());
            // At most BATCH_MAX.
            let ahead = bounded(most, u32::MAX);
            self.prefetch.fetch(first, ahead, |from, into| ring.responses(from, into));
            let mut validated = ArrayVec::<Validated<'_>, BATCH_MAX>::new();
            let mut room = batch.room();
            for index in (0..ahead).map(|ahead| first.wrapping_add(ahead)) {
                let response = RxResponse::from_bytes(self.prefetch.get(index));
                let Some(packet) = self.qualifying_packet(index, response) else { break };
                if !room.fits(packet.len) {
                    batch.refuse(packet.len);
                    run.ends = true;
                    break;
                }
                room.take(packet.len, None);
                packet.page.prefetch(packet.offset, packet.len.min(HEADER_MAX));
                validated.push(packet);
            }
            let found = validated.len();
            let (mut taken, mut copied) = (0, 0);
            for packet in validated {
                let head = packet.len.min(HEADER_MAX);
                if !batch.has_place_for(head) {
                    run.ends = true;
                    break;
                }
                if packet.make(batch) {
                    run.frames += 1;
                    run.bytes += packet.len as u64;
                    copied += head as u64;
                } else {
                    self.counters.dropped(DropReason::Unreadable);
                }
                taken += 1;
            }
            self.counters.copied_bytes.add(copied);
            self.ring.consume(taken);
            if run.advance(taken, found, most) {
                return Ok(run);
            }
        }
        run.ends = true;
        Ok(run)
    }

    /// Returns the packet of a response that qualifies for the fast path.
    #[inline]
    fn qualifying_packet(&self, index: u32, response: RxResponse) -> Option<Validated<'_>> {
        let (offset, len) = (usize::from(response.offset), usize::from(response.size().ok()?));
        if !qualifies(response.flags.is_plain(), offset, len) {
            return None;
        }
        let (_, page) = self.pages.get(self.slot(index))?;
        let checksum_valid = response.flags.contains(RxFlags::DATA_VALIDATED);
        Some(Validated { page, offset, len, checksum_valid })
    }
}

impl Validated<'_> {
    /// Adds the packet's frame; returns false if the batch refuses it.
    #[inline]
    fn make(&self, batch: &mut Batch) -> bool {
        let Validated { page, offset, len, checksum_valid } = *self;
        let head = len.min(HEADER_MAX);
        let rest = LentRange { slice: page, offset: offset + head, len: len - head };
        let rest = (len > head).then_some(rest);
        let made = batch.push(head, rest, |header| {
            page.copy_to(offset, header)?;
            let total = bounded(len, u32::MAX);
            let verified = checksum_valid && Layers::parse(header, total).is_ok();
            let checksum = if verified { Checksum::Verified } else { Checksum::None };
            Ok::<_, ringfence_memory::OutOfRange>(OffloadMeta { checksum, gso: None })
        });
        made.is_ok()
    }
}
