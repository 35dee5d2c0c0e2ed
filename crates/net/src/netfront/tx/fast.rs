//! TX fast path: frames to the backend that take one slot.
//!
//! The path works in batches. It takes buffers for the frames and prefetches their cache lines for writing.
//! Then it writes the bytes and puts all requests on the ring together.

use arrayvec::ArrayVec;
use ringfence_memory::PAGE_SIZE;
use ringfence_offload::Checksum;
use ringfence_platform::Gref;
use ringfence_wire::netif::{PACKET_MIN, TxFlags, TxRequest};
use ringfence_wire::numbers::bounded;

use super::{FrontendTx, sent_checksum};
use crate::netfront::heads::HEAD;
use crate::staging::TxStaging;
use ringfence_frame::batch::{Batch, FrameView};

/// Maximum number of frames of a batch.
const BATCH_MAX: usize = 64;

/// Number of page bytes that are prefetched; longer frames are written sequentially anyway.
const AHEAD: usize = 256;

/// Frame and its buffer.
struct Placed<'a> {
    frame: FrameView<'a>,
    id: u16,
    offset: u16,
}

impl FrontendTx {
    /// Sends the first of `frames` while each takes one slot and there is room. Returns the number of frames
    /// and of bytes sent.
    pub(super) fn transmit_fast(&mut self, batch: &Batch, frames: &[u32]) -> (usize, u64) {
        let free = self.ring.free() as usize;
        let mut placed = ArrayVec::<Placed<'_>, BATCH_MAX>::new();
        let mut requests = ArrayVec::<[u8; TxRequest::SIZE], BATCH_MAX>::new();
        for &index in frames.iter().take(BATCH_MAX.min(free)) {
            let Some(frame) = batch.get(index).filter(is_simple) else { break };
            let Some((id, gref, offset)) = self.place(frame.len()) else { break };
            let flags = TxFlags::from(sent_checksum(frame.meta().checksum));
            // At most a page.
            let size = bounded(frame.len(), u16::MAX);
            requests.push(TxRequest { gref, offset, flags, id, size }.to_bytes());
            placed.push(Placed { frame, id, offset });
        }
        let mut bytes = 0;
        for Placed { frame, id, offset } in &placed {
            let Some(page) = self.memory(*id) else { continue };
            let copied = frame.copy_to_lent(page, usize::from(*offset));
            debug_assert!(copied.is_ok(), "a place is long enough");
            bytes += frame.len() as u64;
            if let Checksum::Partial { .. } = frame.meta().checksum {
                self.counters.sent_with(frame.meta(), 1);
            }
        }
        for Placed { id, .. } in &placed {
            self.in_flight[usize::from(*id)] = true;
        }
        let posted = self.ring.request_all(&requests);
        debug_assert_eq!(posted, placed.len(), "there were as many free slots");
        (placed.len(), bytes)
    }

    /// Takes one buffer for a frame of `len` bytes; returns its id, its page's reference and its offset.
    #[inline]
    fn place(&mut self, len: usize) -> Option<(u16, Gref, u16)> {
        if len <= HEAD && self.staged != TxStaging::Off {
            if let Some(head) = self.heads.take() {
                let place = self.heads.get(head)?;
                place.page.prefetch_for_writing(usize::from(place.offset), len);
                return Some((head + self.first_head, place.gref, place.offset));
            }
        } else if len > HEAD && self.staged == TxStaging::Heads {
            return None;
        }
        let page = self.pool.take_one()?;
        self.pool.memory(page)?.prefetch_for_writing(0, len.min(AHEAD));
        Some((page, self.pool.gref(page), 0))
    }
}

/// Returns true if the frame can take one slot.
#[inline]
fn is_simple(frame: &FrameView<'_>) -> bool {
    frame.len() <= PAGE_SIZE && frame.len() >= PACKET_MIN as usize && frame.meta().gso.is_none()
}
