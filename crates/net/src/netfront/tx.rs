//! TX ring of the frontend: packets to the backend.

mod fast;

use std::sync::Arc;

use crate::staging::TxStaging;
use arrayvec::ArrayVec;
use ringfence_memory::{LentSlice, PAGE_SIZE};
use ringfence_offload::meta::Checksum;
use ringfence_platform::Lease;
use ringfence_ring::{FrontRing, RingPages};
use ringfence_wire::netif::emit::{TxPart, emit_tx};
use ringfence_wire::netif::extra::Extra;
use ringfence_wire::netif::{self, SLOTS_MAX, TxRequest, TxResponse};
use ringfence_wire::numbers::bounded;

use super::heads::{HEAD, Head, Heads};
use super::pages::TxPages;
use super::windows::WindowPages;
use crate::features::extra_from_gso;
use crate::rules::RuleCounters;
use ringfence_frame::batch::{Batch, FrameView, SegmentView};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{Fault, Transmitted};

/// Number of responses fetched at a time.
const REAPED: usize = 64;
const REAPED_AT_ONCE: u32 = 64;

/// Rule violation: a response whose id is not in flight.
#[derive(Debug, thiserror::Error)]
#[error("a transmit response for id {id}, which is not under way")]
struct ForeignId {
    id: u16,
}

/// Frontend side of the TX ring.
pub(super) struct FrontendTx {
    ring: FrontRing<RingPages>,
    pool: TxPages,
    /// Header buffers; their ids follow those of the pages.
    heads: Heads,
    first_head: u16,
    staged: TxStaging,
    /// In-flight flag of each id.
    in_flight: Vec<bool>,
    /// Number of extra infos without a response.
    extras_in_flight: u32,
    /// Set if a sender waits for room, so that responses must raise an event.
    starved: bool,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

/// Buffers of one packet: header buffers, and whole pages.
#[derive(Clone, Copy)]
struct PartCounts {
    heads: usize,
    pages: usize,
}

impl PartCounts {
    /// Returns the number of slots without extra infos.
    #[inline]
    fn total(self) -> usize {
        self.heads + self.pages
    }
}

/// Returns the checksum state that a packet's first request carries.
#[inline]
fn sent_checksum(checksum: Checksum) -> netif::Checksum {
    let blank = matches!(checksum, Checksum::Partial { .. });
    netif::Checksum { blank, validated: blank }
}

impl FrontendTx {
    pub(super) fn new(
        ring: FrontRing<RingPages>,
        pool: TxPages,
        heads: &[Lease],
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        let heads = Heads::new(heads);
        FrontendTx {
            ring,
            in_flight: vec![false; pool.len() + heads.len()],
            heads,
            // Ids have 16 bits, and no queue has more pages.
            first_head: bounded(pool.len(), u16::MAX),
            pool,
            staged: TxStaging::Off,
            extras_in_flight: 0,
            starved: false,
            rules,
            counters,
        }
    }

    /// Replaces the port counters that the ring updates.
    pub(super) fn count_in(&mut self, counters: Arc<PortCounters>) {
        self.counters = counters;
    }

    /// Frees the pages of all new responses; returns the number of responses.
    pub(super) fn reap(&mut self) -> Result<usize, Fault> {
        let responses = self.ring.unconsumed().map_err(|e| {
            self.rules.count("tx_response_overflow");
            Fault::misbehaved(e)
        })?;
        let mut left = responses;
        while left > 0 {
            let mut entries = [[0; TxRequest::SIZE]; REAPED];
            let now = left.min(REAPED_AT_ONCE);
            let entries = &mut entries[..now as usize];
            self.ring.responses(responses - left, entries);
            for &[i0, i1, s0, s1, ..] in entries.iter() {
                self.take_back(TxResponse::from_bytes([i0, i1, s0, s1]))?;
            }
            left -= now;
        }
        self.ring.consume(responses);
        Ok(responses as usize)
    }

    /// Returns the number of requests that the backend has not answered.
    pub(super) fn unanswered(&self) -> u32 {
        // The next round reports a wrong index.
        let answered = self.ring.unconsumed().unwrap_or(0);
        (self.ring.count() - self.ring.free()).saturating_sub(answered)
    }

    #[inline]
    fn take_back(&mut self, response: TxResponse) -> Result<(), Fault> {
        // An extra info has no page, and its response has no id.
        if response.status == netif::Status::Null && self.extras_in_flight > 0 {
            self.extras_in_flight -= 1;
            return Ok(());
        }
        let id = response.id;
        match self.in_flight.get_mut(usize::from(id)) {
            Some(flag @ true) => *flag = false,
            _ => {
                self.rules.count("tx_response_foreign_id");
                return Err(Fault::misbehaved(ForeignId { id }));
            }
        }
        if response.status != netif::Status::Okay {
            self.counters.dropped(DropReason::Refused);
        }
        self.release(id);
        Ok(())
    }

    /// Frees the buffer with this id.
    #[inline]
    fn release(&mut self, id: u16) {
        match id.checked_sub(self.first_head) {
            Some(head) => self.heads.give_back(head),
            None => self.pool.give_back(id),
        }
    }

    /// Returns the page of the buffer with this id.
    #[inline]
    fn memory(&self, id: u16) -> Option<&LentSlice> {
        match id.checked_sub(self.first_head) {
            Some(head) => self.heads.get(head).map(|head| head.page),
            None => self.pool.memory(id),
        }
    }

    /// Returns the grant window's pages, if there is one.
    pub(super) fn window(&mut self) -> Option<&mut WindowPages> {
        match &mut self.pool {
            TxPages::Lent(_) => None,
            TxPages::Window(pages) => Some(pages),
        }
    }

    /// Sets the use of staged pages.
    pub(super) fn stage(&mut self, staged: TxStaging) {
        self.staged = staged;
    }

    /// Returns the numbers of buffers that a packet of `len` bytes needs.
    #[inline]
    fn parts_of(&self, len: usize) -> PartCounts {
        let head = match self.staged {
            TxStaging::Heads => len.min(HEAD),
            TxStaging::Full if len <= HEAD => len,
            TxStaging::Full | TxStaging::Off => 0,
        };
        let pages = (len - head).div_ceil(PAGE_SIZE);
        PartCounts {
            heads: usize::from(head > 0),
            pages: if head > 0 { pages } else { pages.max(1) },
        }
    }

    /// Returns the number of frames of at most `frame_max` bytes that fit.
    pub(super) fn room(&mut self, frame_max: usize) -> Result<usize, Fault> {
        let PartCounts { heads, pages } = self.parts_of(frame_max);
        let slots = heads + pages + usize::from(frame_max > PAGE_SIZE);
        let now = |this: &Self| {
            let free = this.pool.free().checked_div(pages).unwrap_or(usize::MAX);
            free.min(this.ring.free() as usize / slots)
        };
        // Read the shared index only if less than a batch would fit.
        if now(self) < 64 {
            self.reap()?;
        }
        let room = now(self);
        self.starved = room == 0;
        Ok(room)
    }

    /// Returns the number of free slots with a page each.
    pub(super) fn slots(&mut self) -> Result<usize, Fault> {
        // A sender that still waits registers again.
        self.starved = false;
        // A split packet takes one slot more than it has pages, so at most twice as many.
        let share = if self.staged == TxStaging::Heads { 2 } else { 1 };
        let now = |this: &Self| this.pool.free().min(this.ring.free() as usize / share);
        if now(self) < self.ring.count() as usize / (2 * share) {
            self.reap()?;
        }
        Ok(now(self))
    }

    /// Registers a sender that waits for room.
    pub(super) fn await_slots(&mut self) {
        self.starved = true;
    }

    pub(super) fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut done = Transmitted::default();
        let mut bytes = 0;
        let mut rest = frames;
        if (self.ring.free() as usize) < rest.len() {
            self.reap()?;
        }
        while let [index, others @ ..] = rest {
            let (sent, copied) = self.transmit_fast(batch, rest);
            if sent > 0 {
                done.sent += sent;
                bytes += copied;
                rest = rest.get(sent..).unwrap_or_default();
                continue;
            }
            rest = others;
            let Some(frame) = batch.get(*index) else { continue };
            match self.send_parts(frame)? {
                None => {
                    bytes += frame.len() as u64;
                    done.sent += 1;
                }
                Some(reason) => {
                    self.counters.dropped(reason);
                    done.dropped += 1;
                }
            }
        }
        self.counters.copied_bytes.add(bytes);
        self.counters.sent(done.sent as u64, bytes);
        Ok(done)
    }

    fn has_room(&self, parts: PartCounts, extras: usize) -> bool {
        self.pool.free() >= parts.pages
            && self.heads.free() >= parts.heads
            && self.ring.free() as usize >= parts.total() + extras
    }

    /// Slow path: sends a frame of any kind; returns the drop reason of a frame that was dropped.
    fn send_parts(&mut self, frame: FrameView<'_>) -> Result<Option<DropReason>, Fault> {
        let parts = self.parts_of(frame.len());
        let extra = frame.meta().gso.and_then(extra_from_gso);
        let extras = usize::from(extra.is_some());
        if !self.has_room(parts, extras) {
            self.reap()?;
        }
        if !self.has_room(parts, extras) {
            self.starved = true;
            return Ok(Some(DropReason::PortFull));
        }
        if !self.send(frame, parts, extra.as_slice()) {
            return Ok(Some(DropReason::TooLong));
        }
        self.counters.sent_with(frame.meta(), parts.total());
        Ok(None)
    }

    /// Copies a frame into buffers and posts them; returns `false` for an invalid length.
    fn send(&mut self, frame: FrameView<'_>, wanted: PartCounts, extras: &[Extra]) -> bool {
        let (parts, left) = self.take_parts(frame.len(), wanted);
        let checksum = sent_checksum(frame.meta().checksum);
        let ring = &mut self.ring;
        let mut posted = true;
        let emitted = if left > 0 {
            None
        } else {
            emit_tx(&parts, checksum, extras, |slot| posted &= ring.request(&slot)).ok()
        };
        if emitted.is_none() {
            parts.iter().for_each(|part| self.release(part.id));
            return false;
        }
        debug_assert!(posted, "the caller saw enough free slots");
        // At most one.
        self.extras_in_flight += bounded(extras.len(), u32::MAX);
        for part in &parts {
            self.in_flight[usize::from(part.id)] = true;
        }
        self.scatter(frame, &parts);
        true
    }

    /// Takes the buffers of a frame of `len` bytes; returns the number of bytes without a buffer. The caller has
    /// checked that there are enough buffers. A rest occurs only for a frame of too many parts.
    fn take_parts(
        &mut self,
        len: usize,
        PartCounts { heads, pages }: PartCounts,
    ) -> (ArrayVec<TxPart, SLOTS_MAX>, usize) {
        let mut parts = ArrayVec::<TxPart, SLOTS_MAX>::new();
        let mut left = len;
        if heads > 0
            && let Some(head) = self.heads.take()
            && let Some(place) = self.heads.get(head)
        {
            let here = left.min(HEAD);
            left -= here;
            // At most 256.
            let len = bounded(here, u16::MAX);
            let Head { gref, offset, .. } = place;
            parts.push(TxPart { gref, offset, len, id: head + self.first_head });
        }
        let mut ids = ArrayVec::<u16, SLOTS_MAX>::new();
        self.pool.take(pages.min(SLOTS_MAX - parts.len()), |page| ids.push(page));
        for id in ids {
            let here = left.min(PAGE_SIZE);
            left -= here;
            // At most 4096.
            let len = bounded(here, u16::MAX);
            parts.push(TxPart { gref: self.pool.gref(id), offset: 0, len, id });
        }
        (parts, left)
    }

    /// Copies a frame into its parts.
    fn scatter(&self, frame: FrameView<'_>, parts: &[TxPart]) {
        let (mut parts, mut filled) = (parts.iter(), 0);
        let Some(mut part) = parts.next() else { return };
        for piece in frame.pieces() {
            let mut from = 0;
            while from < piece.len() {
                if filled == usize::from(part.len) {
                    let Some(next) = parts.next() else { return };
                    (part, filled) = (next, 0);
                }
                let n = (usize::from(part.len) - filled).min(piece.len() - from);
                let Some(page) = self.memory(part.id) else { return };
                let at = usize::from(part.offset) + filled;
                let copied = match piece {
                    SegmentView::Private(bytes) => page.copy_from(at, &bytes[from..from + n]),
                    SegmentView::Lent(lent, start, _) => {
                        page.copy_from_lent(at, lent, start + from, n)
                    }
                };
                debug_assert!(copied.is_ok(), "a part lies inside its page");
                (from, filled) = (from + n, filled + n);
            }
        }
    }

    /// Publishes the posted requests; returns true if the backend requests a notification.
    pub(super) fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Requests an event for responses if a sender waits; returns true if there are some already.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        if !self.starved {
            return Ok(false);
        }
        self.ring.final_check().map_err(|e| {
            self.rules.count("tx_response_overflow");
            Fault::misbehaved(e)
        })
    }
}
