//! RX fast path: frames to the guest that fit one buffer whose page needs no operation of the platform.
//!
//! The path works in batches. It looks up the buffers and prefetches their cache lines for writing. Then it
//! writes the bytes and puts all responses on the ring together. A frame of another kind, or a buffer
//! without a look-up, ends the batch and takes the slow path.

use arrayvec::ArrayVec;
use ringfence_access::staging::StagingTable;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_offload::Checksum;
use ringfence_platform::{Access, Grantee};
use ringfence_wire::netif::{RxRequest, RxResponse, Status};

use super::{BackendRx, checksum_flags};
use ringfence_frame::batch::{Batch, FrameView};
use ringfence_frame::counters::DropReason;
use ringfence_frame::port::Fault;

/// Maximum number of frames of a batch.
const BATCH_MAX: usize = 64;

/// Number of buffer bytes that are prefetched; longer frames are written sequentially anyway.
const AHEAD: usize = 256;

/// Frame and the buffer that it goes to.
struct Placed<'a> {
    frame: FrameView<'a>,
    page: &'a LentSlice,
    id: u16,
}

impl<G: Grantee> BackendRx<G> {
    /// Sends the first of `frames` while they qualify. Returns the number of frames processed, and the number
    /// of these that were sent.
    pub(super) fn transmit_fast(
        &mut self,
        batch: &Batch,
        frames: &[u32],
        staged: &StagingTable,
    ) -> Result<(usize, usize), Fault> {
        let (mut done, mut sent) = (0, 0);
        if !self.access.has_pages(staged) || self.steering.is_some() {
            return Ok((done, sent));
        }
        while let Some(rest) = frames.get(done..).filter(|rest| !rest.is_empty()) {
            let posted = self.ring.unconsumed().map_err(|e| self.fatal(e))?;
            let most = BATCH_MAX.min(rest.len()).min(posted as usize);
            let (ring, first) = (&self.ring, self.ring.consumed_index());
            // At most BATCH_MAX.
            let ahead = u32::try_from(most).unwrap_or(0);
            self.prefetch.fetch(first, ahead, |from, into| ring.requests(from, into));
            let mut placed = ArrayVec::<Placed<'_>, BATCH_MAX>::new();
            for (&index, ahead) in rest.iter().take(most).zip(0u32..) {
                let Some(frame) = batch.get(index).filter(is_simple) else { break };
                let request = RxRequest::from_bytes(self.prefetch.get(first.wrapping_add(ahead)));
                let page = self.access.page(request.gref, Access::ReadWrite, staged);
                let Some(page) = page.filter(|page| page.len() >= PAGE_SIZE) else { break };
                page.prefetch_for_writing(0, frame.len().min(AHEAD));
                placed.push(Placed { frame, page, id: request.id });
            }
            if !self.access.settle() {
                // The slow path determines which of them were revoked meanwhile.
                break;
            }
            let run = placed.len();
            sent += write(&placed, &mut self.responses, &self.counters);
            // At most BATCH_MAX.
            self.ring.consume(u32::try_from(run).unwrap_or(0));
            let written = self.ring.respond_all(&self.responses);
            debug_assert_eq!(written, run, "each response is owed to a consumed request");
            done += run;
            if run < most || most == 0 {
                break;
            }
        }
        Ok((done, sent))
    }
}

/// Returns true if the frame takes one slot.
#[inline]
fn is_simple(frame: &FrameView<'_>) -> bool {
    frame.len() <= PAGE_SIZE && frame.meta().gso.is_none()
}

/// Writes frames into their buffers and encodes their responses; returns the number of frames sent.
fn write(
    placed: &[Placed<'_>],
    responses: &mut Vec<[u8; RxResponse::SIZE]>,
    counters: &ringfence_frame::counters::PortCounters,
) -> usize {
    responses.clear();
    let (mut sent, mut bytes) = (0, 0);
    for Placed { frame, page, id } in placed {
        let (len, meta) = (frame.len(), frame.meta());
        let flags = checksum_flags(meta.checksum);
        if let Checksum::Partial { .. } = meta.checksum {
            counters.sent_with(meta, 1);
        }
        let size = i16::try_from(len).unwrap_or(i16::MAX);
        let status = if frame.copy_to_lent(page, 0).is_ok() {
            sent += 1;
            bytes += len as u64;
            size
        } else {
            counters.dropped(DropReason::Unwritable);
            Status::Error.to_raw()
        };
        responses.push(RxResponse { id: *id, offset: 0, flags, status }.to_bytes());
    }
    if sent > 0 {
        counters.copied_bytes.add(bytes);
        counters.sent(sent as u64, bytes);
    }
    sent
}
