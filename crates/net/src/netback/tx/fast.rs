//! The short way for packets from the guest that need nothing but a look-up.
//!
//! Most packets take one slot, have no extra info, and lie in a page that is within reach already. They
//! are looked at twice: first their slots are judged and the caches asked for their bytes, so that the
//! processor waits for all of them at once and not for one after the other; then their headers are
//! copied and frames made. The first slot that is of another kind ends the run, and goes the long way.

use arrayvec::ArrayVec;
use ringfence_access::PageAccess;
use ringfence_access::staging::StagingTable;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_offload::OffloadMeta;
use ringfence_platform::{Access, Grantee};
use ringfence_wire::netif::{PACKET_MIN, Status, TxFlags, TxRequest, TxResponse};

use super::BackendTx;
use crate::netback::policy::GuestPolicy;
use ringfence_frame::batch::{Batch, HEADER_MAX};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::Fault;

/// Packets of a run.
const BATCH_MAX: usize = 64;

/// A packet that was judged.
struct Judged<'a> {
    page: &'a LentSlice,
    request: TxRequest,
}

/// How far the short way went.
pub(super) struct FastRun {
    /// Packets looked at.
    pub(super) looked: usize,
    /// Of these, frames that were made, and their bytes.
    pub(super) frames: usize,
    pub(super) bytes: u64,
    /// What comes next is not for this round.
    pub(super) ends: bool,
}

impl<G: Grantee> BackendTx<G> {
    /// Takes packets as long as they are of the simple kind, at most `budget`.
    pub(super) fn receive_fast(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        policy: &mut GuestPolicy,
        staged: &StagingTable,
    ) -> Result<FastRun, Fault> {
        let mut run = FastRun { looked: 0, frames: 0, bytes: 0, ends: false };
        if !self.access.has_pages(staged) {
            return Ok(run);
        }
        while run.looked < budget {
            let waiting =
                self.ring.unconsumed().map_err(|e| self.fatal("tx_producer_overflow", e))?;
            let most = BATCH_MAX.min(budget - run.looked).min(waiting as usize);
            let mut judged = ArrayVec::<Judged<'_>, BATCH_MAX>::new();
            let (ring, first) = (&self.ring, self.ring.consumed_index());
            // At most BATCH_MAX.
            let ahead = u32::try_from(most).unwrap_or(0);
            self.prefetch.fetch(first, ahead, |from, into| ring.requests(from, into));
            let mut room = batch.room();
            for index in (0..most).zip(0u32..).map(|(_, ahead)| first.wrapping_add(ahead)) {
                let request = TxRequest::from_bytes(self.prefetch.get(index));
                let Some(page) = simple(&self.access, &request, staged) else { break };
                let size = usize::from(request.size);
                if !room.fits(size) {
                    batch.refuse(size);
                    run.ends = true;
                    break;
                }
                room.take(size, None);
                page.prefetch(usize::from(request.offset), size.min(HEADER_MAX));
                judged.push(Judged { page, request });
            }
            if !self.access.settle() {
                // The long way finds out which of them were taken back meanwhile.
                return Ok(FastRun { ends: false, ..run });
            }
            // All that there was, or something that goes the long way.
            let (short, all) = (judged.len() < BATCH_MAX, judged.len() == most);
            let taken =
                make_all(judged, &mut self.answers, &self.counters, batch, policy, &mut run);
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
}

/// Makes frames of packets as long as there is room for them and their guest may send; how many it took.
#[inline]
fn make_all(
    judged: ArrayVec<Judged<'_>, BATCH_MAX>,
    answers: &mut Vec<TxResponse>,
    counters: &PortCounters,
    batch: &mut Batch,
    policy: &mut GuestPolicy,
    run: &mut FastRun,
) -> u32 {
    let (mut copied, mut taken, limited) = (0, 0, policy.is_limited());
    for packet in judged {
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
            // A page shorter than a page: no platform's is.
            counters.dropped(DropReason::Unreadable);
            status = Status::Error;
        }
        answers.push(TxResponse { id: packet.request.id, status });
        taken += 1;
    }
    counters.copied_bytes.add(copied);
    taken
}

impl Judged<'_> {
    /// Makes a frame of it; whether that worked.
    #[inline]
    fn make(&self, batch: &mut Batch) -> bool {
        let Judged { page, request } = self;
        let (offset, size) = (usize::from(request.offset), usize::from(request.size));
        let head = size.min(HEADER_MAX);
        let rest = (size > head).then_some((*page, offset + head, size - head));
        let fill = |header: &mut [u8]| page.copy_to(offset, header).map(|()| OffloadMeta::PLAIN);
        batch.push(head, rest, fill).is_ok()
    }
}

/// The page of a packet that needs nothing but its bytes, if it is within reach.
#[inline]
fn simple<'a, G: Grantee>(
    access: &'a PageAccess<G>,
    request: &TxRequest,
    staged: &'a StagingTable,
) -> Option<&'a LentSlice> {
    let (offset, size) = (usize::from(request.offset), usize::from(request.size));
    let plain = request.flags.0 & !TxFlags::DATA_VALIDATED.0 == 0;
    if !plain || u32::from(request.size) < PACKET_MIN || offset + size > PAGE_SIZE {
        return None;
    }
    access.page(request.gref, Access::ReadOnly, staged)
}
