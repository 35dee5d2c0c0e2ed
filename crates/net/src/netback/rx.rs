//! RX ring of the backend: packets to the guest.

mod fast;

use core::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_access::staging::StagingTable;
use ringfence_access::{PageAccess, Source};
use ringfence_memory::PAGE_SIZE;
use ringfence_offload::flow_hash::FlowFields;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_platform::{GrantStatus, Grantee, Gref};
use ringfence_ring::{BackRing, ProducerOverflow, RingPages};
use ringfence_wire::netif::extra::{Extra, HashAlgorithm, HashType, PacketHash};
use ringfence_wire::netif::{RxFlags, RxRequest, RxResponse, SLOTS_MAX, Status};
use ringfence_wire::numbers::bounded;

use crate::features::extra_from_gso;
use crate::prefetch::PrefetchBuffer;
use crate::rules::{RuleCounters, rx_grant_rule};
use ringfence_frame::batch::{Batch, FrameView, SegmentView};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{Fault, SUPER_FRAME_MAX, Transmitted};
use ringfence_frame::steer::Steering;

/// Returns the hash that a frame carries to the guest; `None` if the hashed fields do not cover the frame.
fn packet_hash(steering: &Steering, frame: &FrameView<'_>) -> Option<PacketHash> {
    let hash = steering.hash(frame.header(), frame.len())?;
    let kind = match hash.fields {
        FlowFields::Ipv4 => HashType::Ipv4,
        FlowFields::Ipv4Tcp => HashType::Ipv4Tcp,
        FlowFields::Ipv6 => HashType::Ipv6,
        FlowFields::Ipv6Tcp => HashType::Ipv6Tcp,
    };
    Some(PacketHash { kind, algorithm: HashAlgorithm::Toeplitz, value: hash.value })
}

/// Frame and the posted buffers that it takes.
struct Planned {
    frame: u32,
    /// Range of its slots, those of extra infos included.
    slots: Range<usize>,
    /// Range of its pages: the slots that hold data.
    pages: Range<usize>,
    len: usize,
    meta: OffloadMeta,
    extras: Extras,
}

/// Extra infos of one packet: segmentation request and flow hash.
type Extras = ArrayVec<Extra, 2>;

/// Returns the flags of a packet's first response that describe its checksum.
#[inline]
fn checksum_flags(checksum: Checksum) -> RxFlags {
    match checksum {
        Checksum::Partial { .. } => RxFlags::CHECKSUM_BLANK.with_if(true, RxFlags::DATA_VALIDATED),
        Checksum::Verified => RxFlags::DATA_VALIDATED,
        Checksum::None => RxFlags::NONE,
    }
}

impl Planned {
    fn flags(&self) -> RxFlags {
        checksum_flags(self.meta.checksum).with_if(!self.extras.is_empty(), RxFlags::EXTRA_INFO)
    }

    /// Passes the response slots to `put` in ring order. `ids` are the ids of all requests taken. A failed
    /// packet has the same number of slots.
    fn responses(&self, ids: &[u16], failed: bool, mut put: impl FnMut([u8; RxResponse::SIZE])) {
        let ids = ids.get(self.slots.clone()).unwrap_or_default();
        let mut left = self.len;
        let data = ids.iter().enumerate().filter(|(i, _)| !is_extra(*i, &self.extras));
        for (i, &id) in data {
            let here = left.min(PAGE_SIZE);
            left -= here;
            let flags = if i == 0 { self.flags() } else { RxFlags::NONE };
            let flags = flags.with_if(left > 0, RxFlags::MORE_DATA);
            let size = i16::try_from(here).unwrap_or(i16::MAX);
            let status = if failed { Status::Error.to_raw() } else { size };
            put(RxResponse { id, offset: 0, flags, status }.to_bytes());
            if i == 0 {
                for (n, extra) in self.extras.iter().enumerate() {
                    put(extra.emit(n + 1 < self.extras.len()).0);
                }
            }
        }
    }
}

/// Returns true if this slot of a packet holds an extra info: extra infos follow the first slot.
fn is_extra(slot: usize, extras: &Extras) -> bool {
    (1..=extras.len()).contains(&slot)
}

/// Backend side of the RX ring.
pub(super) struct BackendRx<G> {
    ring: BackRing<RingPages>,
    prefetch: PrefetchBuffer<{ RxRequest::SIZE }>,
    access: PageAccess<G>,
    planned: Vec<Planned>,
    /// Ids of the requests taken, in ring order.
    ids: Vec<u16>,
    /// Pages of the requests taken, without those of slots with extra infos.
    pages: Vec<Gref>,
    statuses: Vec<GrantStatus>,
    /// Encoded responses of one batch of the fast path.
    responses: Vec<[u8; RxResponse::SIZE]>,
    /// Number of buffers that a sender waits for; 0 if none waits.
    starved_of: u32,
    /// Hash configuration of the guest.
    steering: Option<Arc<Steering>>,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl<G: Grantee> BackendRx<G> {
    pub(super) fn new(
        ring: BackRing<RingPages>,
        access: PageAccess<G>,
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        BackendRx {
            prefetch: PrefetchBuffer::new(ring.consumed_index()),
            ring,
            access,
            planned: Vec::new(),
            ids: Vec::new(),
            pages: Vec::new(),
            statuses: Vec::new(),
            responses: Vec::new(),
            starved_of: 0,
            steering: None,
            rules,
            counters,
        }
    }

    fn fatal(&self, why: ProducerOverflow) -> Fault {
        self.rules.count("rx_producer_overflow");
        Fault::misbehaved(why)
    }

    /// Replaces the port counters that the ring updates.
    pub(super) fn count_in(&mut self, counters: Arc<PortCounters>) {
        self.counters = counters;
    }

    /// Replaces the hash configuration.
    pub(super) fn hash_by(&mut self, steering: Option<Arc<Steering>>) {
        self.steering = steering;
    }

    fn extras_of(&self, frame: FrameView<'_>) -> Extras {
        let gso = frame.meta().gso.and_then(extra_from_gso);
        let hash = self.steering.as_ref().and_then(|steering| packet_hash(steering, &frame));
        gso.into_iter().chain(hash.map(Extra::Hash)).collect()
    }

    /// Returns the number of frames of at most `frame_max` bytes that fit the posted buffers.
    pub(super) fn room(&mut self, frame_max: usize) -> Result<usize, Fault> {
        let slots = self.slots_of(frame_max);
        let posted = self.ring.unconsumed().map_err(|e| self.fatal(e))?;
        self.starved_of = if posted < slots { slots } else { 0 };
        Ok((posted / slots) as usize)
    }

    /// Returns the number of posted buffers; 0 for an impossible index.
    pub(super) fn posted(&self) -> u32 {
        self.ring.unconsumed().unwrap_or(0)
    }

    /// Returns the maximum number of buffers that a frame of `frame_max` bytes takes.
    #[inline]
    fn slots_of(&self, frame_max: usize) -> u32 {
        let extras = usize::from(frame_max > PAGE_SIZE) + usize::from(self.steering.is_some());
        bounded(frame_max.div_ceil(PAGE_SIZE).max(1) + extras, u32::MAX)
    }

    /// Returns true if a frame of `frame_max` bytes fits the posted buffers.
    pub(super) fn fits(&self, frame_max: usize) -> Result<bool, Fault> {
        Ok(self.ring.unconsumed().map_err(|e| self.fatal(e))? >= self.slots_of(frame_max))
    }

    /// Returns the number of posted buffers.
    pub(super) fn slots(&self) -> Result<usize, Fault> {
        Ok(self.ring.unconsumed().map_err(|e| self.fatal(e))? as usize)
    }

    /// Registers a sender that waits for `slots` buffers. The minimum of all registrations counts.
    pub(super) fn await_slots(&mut self, slots: usize) {
        let slots = u32::try_from(slots).unwrap_or(u32::MAX).clamp(1, self.ring.count());
        self.starved_of = if self.starved_of == 0 { slots } else { self.starved_of.min(slots) };
    }

    /// Requests an event for the buffers that a sender waits for; returns true if they are posted.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        // A sender that still waits after the sleep registers again.
        let wanted = core::mem::take(&mut self.starved_of);
        if wanted == 0 {
            return Ok(false);
        }
        self.ring.final_check_for(wanted).map_err(|e| self.fatal(e))
    }

    pub(super) fn transmit(
        &mut self,
        batch: &Batch,
        frames: &[u32],
        staged: &StagingTable,
    ) -> Result<Transmitted, Fault> {
        let (done, sent) = self.transmit_fast(batch, frames, staged)?;
        let mut outcome = Transmitted { sent, dropped: done - sent };
        if let Some(rest) = frames.get(done..).filter(|rest| !rest.is_empty()) {
            let planned = self.transmit_planned(batch, rest, staged)?;
            outcome.sent += planned.sent;
            outcome.dropped += planned.dropped;
        }
        Ok(outcome)
    }

    /// Slow path: sends frames of any kind, in every access mode.
    fn transmit_planned(
        &mut self,
        batch: &Batch,
        frames: &[u32],
        staged: &StagingTable,
    ) -> Result<Transmitted, Fault> {
        let posted = self.ring.unconsumed().map_err(|e| self.fatal(e))?;
        let dropped = self.plan(batch, frames, posted);
        if self.planned.is_empty() {
            return Ok(Transmitted { sent: 0, dropped });
        }
        let mut writing = self.access.begin_write(&self.pages, staged);
        for planned in &self.planned {
            if let Some(frame) = batch.get(planned.frame) {
                spread(frame, |slot, offset, source| {
                    writing.put(planned.pages.start + slot, offset, source)
                });
            }
        }
        self.counters.copied_bytes.add(writing.finish());
        self.statuses.clear();
        self.access.write_statuses(&mut self.statuses);
        self.access.end_write();
        let sent = self.respond();
        Ok(Transmitted { sent, dropped: dropped + self.planned.len() - sent })
    }

    /// Assigns posted buffers to frames; drops and counts the frames that do not fit.
    fn plan(&mut self, batch: &Batch, frames: &[u32], posted: u32) -> usize {
        self.planned.clear();
        self.ids.clear();
        self.pages.clear();
        let mut dropped = 0;
        for &index in frames {
            let Some(frame) = batch.get(index) else { continue };
            let (first, first_page) = (self.ids.len(), self.pages.len());
            let extras = self.extras_of(frame);
            let pages = frame.len().div_ceil(PAGE_SIZE).max(1);
            let slots = pages + extras.len();
            let too_long = pages > SLOTS_MAX || frame.len() > SUPER_FRAME_MAX;
            // `first` counts the requests taken, at most the ring's 256.
            if too_long || first + slots > posted as usize {
                let reason = if too_long { DropReason::TooLong } else { DropReason::PortFull };
                self.counters.dropped(reason);
                dropped += 1;
                continue;
            }
            let (ring, consumed) = (&self.ring, self.ring.consumed_index());
            // At most the number of posted buffers.
            let taken = bounded(first + slots, u32::MAX);
            self.prefetch.fetch(consumed, taken, |from, into| ring.requests(from, into));
            for (ahead, place) in (0u32..).skip(first).zip(0..slots) {
                let request =
                    RxRequest::from_bytes(self.prefetch.get(consumed.wrapping_add(ahead)));
                self.ids.push(request.id);
                // The page of a slot with an extra info is not written.
                if !is_extra(place, &extras) {
                    self.pages.push(request.gref);
                }
            }
            self.planned.push(Planned {
                frame: index,
                slots: first..first + slots,
                pages: first_page..first_page + pages,
                len: frame.len(),
                meta: frame.meta(),
                extras,
            });
        }
        dropped
    }

    /// Writes the responses of the planned frames; returns the number of frames that were written whole.
    fn respond(&mut self) -> usize {
        let (mut sent, mut bytes) = (0, 0);
        // At most the ring's 256 entries.
        self.ring.consume(bounded(self.ids.len(), u32::MAX));
        for planned in &self.planned {
            let statuses = self.statuses.get(planned.pages.clone()).unwrap_or_default();
            let missing =
                (statuses.len() != planned.pages.len()).then_some(&GrantStatus::GeneralError);
            let failure = statuses.iter().find(|s| **s != GrantStatus::Okay).or(missing);
            let failed = failure.is_some();
            if let Some(status) = failure {
                self.counters.dropped(DropReason::Unwritable);
                let rule = rx_grant_rule(*status);
                if self.rules.count(rule) == 0 {
                    tracing::warn!(
                        rule,
                        "a buffer of a guest cannot be written (logged once a rule)"
                    );
                }
            } else {
                sent += 1;
                bytes += planned.len as u64;
                self.counters.sent_with(planned.meta, planned.pages.len());
            }
            planned.responses(&self.ids, failed, |response| {
                let written = self.ring.respond(&response);
                debug_assert!(written, "each response is owed to a consumed request");
            });
        }
        self.counters.sent(sent as u64, bytes);
        sent
    }

    /// Publishes the round's responses; returns true if the guest requests a notification.
    pub(super) fn publish(&mut self) -> bool {
        self.access.end();
        self.ring.publish()
    }
}

/// Splits a frame at page boundaries: calls `put(page, offset, bytes)` for each piece.
fn spread<'a>(frame: FrameView<'a>, mut put: impl FnMut(usize, usize, Source<'a>)) {
    if let Some(bytes) = frame.contiguous() {
        for (page, piece) in bytes.chunks(PAGE_SIZE).enumerate() {
            put(page, 0, Source::Private(piece));
        }
        return;
    }
    let mut at = 0;
    for piece in frame.pieces() {
        let (mut from, len) = (0, piece.len());
        while from < len {
            let n = (PAGE_SIZE - at % PAGE_SIZE).min(len - from);
            let source = match piece {
                SegmentView::Private(bytes) => Source::Private(&bytes[from..from + n]),
                SegmentView::Lent(slice, offset, _) => Source::Lent(slice, offset + from, n),
            };
            put(at / PAGE_SIZE, at % PAGE_SIZE, source);
            at += n;
            from += n;
        }
    }
}
