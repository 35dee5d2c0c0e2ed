//! The short way for packets from the backend that lie in one page.
//!
//! As elsewhere: first the responses of a run are judged and the caches asked for the first bytes, then
//! headers are copied and frames made. The first response of another kind ends the run.

use arrayvec::ArrayVec;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_offload::packet::Layers;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_wire::netif::{PACKET_MIN, RxFlags, RxResponse};

use super::FrontendRx;
use ringfence_frame::batch::{Batch, HEADER_MAX};
use ringfence_frame::counters::DropReason;
use ringfence_frame::port::Fault;

/// Packets of a run.
const BATCH_MAX: usize = 64;

/// A packet that was judged.
struct Judged<'a> {
    page: &'a LentSlice,
    offset: usize,
    len: usize,
    validated: bool,
}

/// How far the short way went.
#[derive(Default)]
pub(super) struct FastRun {
    /// Responses looked at.
    pub(super) looked: usize,
    /// Of these, frames that were made, and their bytes.
    pub(super) frames: usize,
    pub(super) bytes: u64,
    /// What comes next is not for this round.
    pub(super) ends: bool,
}

impl FrontendRx {
    /// Takes packets as long as they are of the simple kind, at most `budget`.
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
            let ahead = u32::try_from(most).unwrap_or(0);
            self.prefetch.fetch(first, ahead, |from, into| ring.responses(from, into));
            let mut judged = ArrayVec::<Judged<'_>, BATCH_MAX>::new();
            let mut room = batch.room();
            for index in (0..ahead).map(|ahead| first.wrapping_add(ahead)) {
                let response = RxResponse::from_bytes(self.prefetch.get(index));
                let Some(packet) = self.simple(index, response) else { break };
                if !room.fits(packet.len) {
                    batch.refuse(packet.len);
                    run.ends = true;
                    break;
                }
                room.take(packet.len, None);
                packet.page.prefetch(packet.offset, packet.len.min(HEADER_MAX));
                judged.push(packet);
            }
            let (short, all) = (judged.len() < BATCH_MAX, judged.len() == most);
            let (mut taken, mut copied) = (0, 0);
            for packet in judged {
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
            run.looked += taken as usize;
            run.ends |= short && all;
            if short || run.ends {
                return Ok(run);
            }
        }
        run.ends = true;
        Ok(run)
    }

    /// The packet of a response that is a whole one and needs nothing but its bytes.
    #[inline]
    fn simple(&self, index: u32, response: RxResponse) -> Option<Judged<'_>> {
        let (offset, len) = (usize::from(response.offset), usize::from(response.size().ok()?));
        let plain = response.flags.0 & !RxFlags::DATA_VALIDATED.0 == 0;
        if !plain || len < PACKET_MIN as usize || offset + len > PAGE_SIZE {
            return None;
        }
        let (_, page) = self.pages.get(self.slot(index))?;
        let validated = response.flags.contains(RxFlags::DATA_VALIDATED);
        Some(Judged { page, offset, len, validated })
    }
}

impl Judged<'_> {
    /// Makes a frame of it; whether that worked.
    #[inline]
    fn make(&self, batch: &mut Batch) -> bool {
        let Judged { page, offset, len, validated } = *self;
        let head = len.min(HEADER_MAX);
        let rest = (len > head).then_some((page, offset + head, len - head));
        let made = batch.push(head, rest, |header| {
            page.copy_to(offset, header)?;
            let total = u32::try_from(len).unwrap_or(u32::MAX);
            let verified = validated && Layers::parse(header, total).is_ok();
            let checksum = if verified { Checksum::Verified } else { Checksum::None };
            Ok::<_, ringfence_memory::OutOfRange>(OffloadMeta { checksum, gso: None })
        });
        made.is_ok()
    }
}
