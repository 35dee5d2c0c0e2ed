//! TX fast path: single-slot packets without extra info whose page needs no operation of the platform.
//!
//! The path works in batches of two passes. The first validates the slots and prefetches the packets'
//! bytes, so that the cache misses overlap. The second copies the headers and adds the frames. A slot of
//! another kind ends the batch and takes the slow path.

use arrayvec::ArrayVec;
use ringfence_access::PageAccess;
use ringfence_access::staging::StagingTable;
use ringfence_memory::LentSlice;
use ringfence_offload::OffloadMeta;
use ringfence_platform::{Access, Grantee};
use ringfence_wire::netif::{Status, TxRequest, TxResponse};
use ringfence_wire::numbers::bounded;

use super::BackendTx;
use crate::fast::{BATCH_MAX, FastRun, qualifies};
use crate::netback::policy::GuestPolicy;
use ringfence_frame::batch::{Batch, HEADER_MAX, LentRange};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::Fault;

/// Validated packet and its page.
struct Validated<'a> {
    page: &'a LentSlice,
    request: TxRequest,
}

impl<G: Grantee> BackendTx<G> {
    /// Receives packets while they qualify, at most `budget`.
    pub(super) fn receive_fast(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        policy: &mut GuestPolicy,
        staged: &StagingTable,
    ) -> Result<FastRun, Fault> {
        let mut run = FastRun::default();
        if !self.access.has_pages(staged) {
            return Ok(run);
        }
        while run.looked < budget {
            let waiting =
                self.ring.unconsumed().map_err(|e| self.fatal("tx_producer_overflow", e))?;
            let most = BATCH_MAX.min(budget - run.looked).min(waiting as usize);
            let mut validated = ArrayVec::<Validated<'_>, BATCH_MAX>::new();
            let (ring, first) = (&self.ring, self.ring.consumed_index());
            // At most BATCH_MAX.
            let ahead = bounded(most, u32::MAX);
            self.prefetch.fetch(first, ahead, |from, into| ring.requests(from, into));
            let mut room = batch.room();
            for index in (0..most).zip(0u32..).map(|(_, ahead)| first.wrapping_add(ahead)) {
                let request = TxRequest::from_bytes(self.prefetch.get(index));
                let Some(page) = qualifying_page(&self.access, &request, staged) else { break };
                let size = usize::from(request.size);
                if !room.fits(size) {
                    batch.refuse(size);
                    run.ends = true;
                    break;
                }
                room.take(size, None);
                page.prefetch(usize::from(request.offset), size.min(HEADER_MAX));
                validated.push(Validated { page, request });
            }
            if !self.access.settle() {
                // The slow path determines which of them were revoked meanwhile.
                return Ok(FastRun { ends: false, ..run });
            }
            // All packets were processed, or the next one takes the slow path.
            let found = validated.len();
            let taken =
                make_all(validated, &mut self.answers, &self.counters, batch, policy, &mut run);
            self.ring.consume(taken);
            if run.advance(taken, found, most) {
                return Ok(run);
            }
        }
        run.ends = true;
        Ok(run)
    }
}

/// Adds frames within the batch's room and the guest's credit; returns the number of packets consumed.
#[inline]
fn make_all(
    validated: ArrayVec<Validated<'_>, BATCH_MAX>,
    answers: &mut Vec<TxResponse>,
    counters: &PortCounters,
    batch: &mut Batch,
    policy: &mut GuestPolicy,
    run: &mut FastRun,
) -> u32 {
    let (mut copied, mut taken, limited) = (0, 0, policy.is_limited());
    for packet in validated {
        let size = usize::from(packet.request.size);
        let head = size.min(HEADER_MAX);
        if !batch.has_place_for(head) || (limited && !policy.admits(size)) {
            run.ends = true;
            break;
        }
        let mut status = Status::Okay;
        if packet.make(batch) {
            run.frames += 1;
            run.bytes += size as u64;
            copied += head as u64;
        } else {
            // The page is shorter than a page, which no platform permits.
            counters.dropped(DropReason::Unreadable);
            status = Status::Error;
        }
        answers.push(TxResponse { id: packet.request.id, status });
        taken += 1;
    }
    counters.copied_bytes.add(copied);
    taken
}

impl Validated<'_> {
    /// Adds the packet's frame; returns false if the batch refuses it.
    #[inline]
    fn make(&self, batch: &mut Batch) -> bool {
        let Validated { page, request } = self;
        let (offset, size) = (usize::from(request.offset), usize::from(request.size));
        let head = size.min(HEADER_MAX);
        let rest = LentRange { slice: page, offset: offset + head, len: size - head };
        let rest = (size > head).then_some(rest);
        let fill = |header: &mut [u8]| page.copy_to(offset, header).map(|()| OffloadMeta::PLAIN);
        batch.push(head, rest, fill).is_ok()
    }
}

/// Returns the page of a packet that qualifies for the fast path.
#[inline]
fn qualifying_page<'a, G: Grantee>(
    access: &'a PageAccess<G>,
    request: &TxRequest,
    staged: &'a StagingTable,
) -> Option<&'a LentSlice> {
    let (offset, size) = (usize::from(request.offset), usize::from(request.size));
    if !qualifies(request.flags.is_plain(), offset, size) {
        return None;
    }
    access.page(request.gref, Access::ReadOnly, staged)
}
