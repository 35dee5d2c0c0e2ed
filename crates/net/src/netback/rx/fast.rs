//! RX fast path: frames to the guest that fit one buffer whose page needs no operation of the platform.
//!
//! The path works in batches. It looks up the buffers and prefetches their cache lines for writing. Then it
//! writes the bytes and puts all responses on the ring together. A frame that carries its flow's hash takes
//! a second slot, for the extra info. A frame of another kind, or a buffer without a look-up, ends the batch
//! and takes the slow path.

use arrayvec::ArrayVec;
use ringfence_access::staging::StagingTable;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_offload::Checksum;
use ringfence_platform::{Access, Grantee};
use ringfence_wire::netif::extra::{Extra, RawExtra};
use ringfence_wire::netif::{RxFlags, RxRequest, RxResponse, Status};
use ringfence_wire::numbers::bounded;

use super::{BackendRx, checksum_flags, packet_hash};
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
    /// Extra info with the flow's hash, in the slot behind the frame's.
    hash: Option<RawExtra>,
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
        if !self.access.has_pages(staged) {
            return Ok((done, sent));
        }
        let slots_per_frame = 1 + usize::from(self.steering.is_some());
        while let Some(rest) = frames.get(done..).filter(|rest| !rest.is_empty()) {
            let posted = self.ring.unconsumed().map_err(|e| self.fatal(e))?;
            let most = BATCH_MAX.min(rest.len());
            let (ring, first) = (&self.ring, self.ring.consumed_index());
            // At most twice BATCH_MAX.
            let available = bounded(most * slots_per_frame, u32::MAX).min(posted);
            self.prefetch.fetch(first, available, |from, into| ring.requests(from, into));
            let mut placed = ArrayVec::<Placed<'_>, BATCH_MAX>::new();
            let mut slots = 0;
            for &index in rest.iter().take(most) {
                let Some(frame) = batch.get(index).filter(is_simple) else { break };
                let steering = self.steering.as_ref();
                let hash = steering.and_then(|steering| packet_hash(steering, &frame));
                let taken = 1 + u32::from(hash.is_some());
                if slots + taken > available {
                    break;
                }
                let request = RxRequest::from_bytes(self.prefetch.get(first.wrapping_add(slots)));
                let page = self.access.page(request.gref, Access::ReadWrite, staged);
                let Some(page) = page.filter(|page| page.len() >= PAGE_SIZE) else { break };
                page.prefetch_for_writing(0, frame.len().min(AHEAD));
                let hash = hash.map(|hash| Extra::Hash(hash).emit(false));
                placed.push(Placed { frame, page, id: request.id, hash });
                slots += taken;
            }
            if !self.access.settle() {
                // The slow path determines which of them were revoked meanwhile.
                break;
            }
            let run = placed.len();
            sent += write(&placed, &mut self.responses, &self.counters);
            self.ring.consume(slots);
            let written = self.ring.respond_all(&self.responses);
            debug_assert_eq!(written, self.responses.len(), "a response is owed to a request");
            done += run;
            if run < most {
                break;
            }
        }
        Ok((done, sent))
    }
}

/// Returns true if the frame takes one buffer.
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
    for Placed { frame, page, id, hash } in placed {
        let (len, meta) = (frame.len(), frame.meta());
        let flags = checksum_flags(meta.checksum).with_if(hash.is_some(), RxFlags::EXTRA_INFO);
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
        responses.extend(hash.as_ref().map(|extra| extra.0));
    }
    if sent > 0 {
        counters.copied_bytes.add(bytes);
        counters.sent(sent as u64, bytes);
    }
    sent
}

#[cfg(test)]
mod tests {
    use ringfence_frame::counters::PortCounters;
    use ringfence_offload::OffloadMeta;
    use ringfence_wire::netif::extra::{HashAlgorithm, HashType, PacketHash};

    use super::*;

    #[test]
    fn hash_of_frame_follows_its_response_in_slot_of_its_own() {
        let mut batch = Batch::default();
        let at = batch.reserve(60).unwrap();
        batch.push_contiguous(at, 60, OffloadMeta::PLAIN).unwrap();
        let page = LentSlice::anonymous(PAGE_SIZE);
        let hash =
            PacketHash { kind: HashType::Ipv4, algorithm: HashAlgorithm::Toeplitz, value: 0x1234 };
        let extra = Extra::Hash(hash);
        let placed = |id, hash| Placed { frame: batch.get(0).unwrap(), page: &page, id, hash };
        let (mut responses, counters) = (Vec::new(), PortCounters::default());
        let placed = [placed(7, Some(extra.emit(false))), placed(9, None)];
        assert_eq!(write(&placed, &mut responses, &counters), 2);
        let data = |id, flags| RxResponse { id, offset: 0, flags, status: 60 }.to_bytes();
        let plain = RxFlags::NONE;
        let wanted = [
            data(7, plain.with_if(true, RxFlags::EXTRA_INFO)),
            extra.emit(false).0,
            data(9, plain),
        ];
        assert_eq!(responses, wanted);
    }
}
