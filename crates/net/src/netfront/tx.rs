//! Packets to the backend.

use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_grants::Source;
use ringfence_memory::PAGE_SIZE;
use ringfence_offload::meta::Checksum;
use ringfence_platform::Lease;
use ringfence_ring::{FrontRing, RingPages};
use ringfence_wire::netif::emit::{TxPart, emit_tx};
use ringfence_wire::netif::extra::Extra;
use ringfence_wire::netif::{self, SLOTS_MAX, TxResponse};

use super::pool::Pool;
use crate::batch::{Batch, FrameView};
use crate::counters::{DropReason, PortCounters};
use crate::features::extra_of;
use crate::netback::spread;
use crate::port::{Fault, Transmitted};
use crate::rules::RuleCounters;

/// A response that names no packet under way.
#[derive(Debug, thiserror::Error)]
#[error("a transmit response for id {id}, which is not under way")]
struct ForeignId {
    id: u16,
}

/// The frontend's side of the tx ring.
pub(super) struct ToBackend {
    ring: FrontRing<RingPages>,
    pool: Pool,
    under_way: Vec<bool>,
    /// Extra infos whose responses did not come yet.
    extras_under_way: u32,
    /// Somebody was told that there is no room: wake us for responses.
    starved: bool,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl ToBackend {
    pub(super) fn new(
        ring: FrontRing<RingPages>,
        leases: &[Lease],
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        ToBackend {
            ring,
            pool: Pool::new(leases),
            under_way: vec![false; leases.len()],
            extras_under_way: 0,
            starved: false,
            rules,
            counters,
        }
    }

    /// Takes back the pages whose responses came; how many.
    pub(super) fn reap(&mut self) -> Result<usize, Fault> {
        let responses = self.ring.unconsumed().map_err(|e| {
            self.rules.count("tx_response_overflow");
            Fault::misbehaved(e)
        })?;
        for ahead in 0..responses {
            let response = TxResponse::from_bytes(self.ring.response(ahead).into_unchecked());
            // An extra info has no page, and its response no id.
            if response.status == netif::Status::Null && self.extras_under_way > 0 {
                self.extras_under_way -= 1;
                continue;
            }
            let page = response.id;
            match self.under_way.get_mut(usize::from(page)) {
                Some(flag @ true) => *flag = false,
                _ => {
                    self.rules.count("tx_response_foreign_id");
                    return Err(Fault::misbehaved(ForeignId { id: page }));
                }
            }
            if response.status != netif::Status::Okay {
                self.counters.dropped(DropReason::Refused);
            }
            self.pool.give_back(page);
        }
        self.ring.consume(responses);
        Ok(responses as usize)
    }

    /// Frames of at most `frame_max` octets that there is room for.
    pub(super) fn room(&mut self, frame_max: usize) -> Result<usize, Fault> {
        let pages = frame_max.div_ceil(PAGE_SIZE).max(1);
        let slots = pages + usize::from(frame_max > PAGE_SIZE);
        let now = |this: &Self| (this.pool.free() / pages).min(this.ring.free() as usize / slots);
        // Reaping is only worth a look at the shared index when less than a batch would fit.
        if now(self) < 64 {
            self.reap()?;
        }
        let room = now(self);
        self.starved = room == 0;
        Ok(room)
    }

    /// Free slots with a page each.
    pub(super) fn slots(&mut self) -> Result<usize, Fault> {
        // Who still waits says so again.
        self.starved = false;
        let now = |this: &Self| this.pool.free().min(this.ring.free() as usize);
        if now(self) < self.ring.count() as usize / 2 {
            self.reap()?;
        }
        Ok(now(self))
    }

    /// Somebody waits for room.
    pub(super) fn await_slots(&mut self) {
        self.starved = true;
    }

    pub(super) fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut done = Transmitted::default();
        let mut bytes = 0;
        for frame in batch.select(frames) {
            let slots = frame.len().div_ceil(PAGE_SIZE).max(1);
            let extra = frame.meta().gso.and_then(extra_of);
            let extras = usize::from(extra.is_some());
            if !self.has_room(slots, extras) {
                self.reap()?;
            }
            if !self.has_room(slots, extras) {
                self.starved = true;
                self.counters.dropped(DropReason::PortFull);
                done.dropped += 1;
            } else if self.send(frame, slots, extra.as_slice()) {
                bytes += frame.len() as u64;
                done.sent += 1;
                self.counters.sent_with(frame.meta(), slots);
            } else {
                self.counters.dropped(DropReason::TooLong);
                done.dropped += 1;
            }
        }
        self.counters.copied_bytes.add(bytes);
        self.counters.sent(done.sent as u64, bytes);
        Ok(done)
    }

    fn has_room(&self, slots: usize, extras: usize) -> bool {
        self.pool.free() >= slots && self.ring.free() as usize >= slots + extras
    }

    /// Copies a frame into pages and posts them; `false` when it is too long or too short.
    fn send(&mut self, frame: FrameView<'_>, slots: usize, extras: &[Extra]) -> bool {
        let mut parts = ArrayVec::<TxPart, SLOTS_MAX>::new();
        let mut left = frame.len();
        let mut pages = ArrayVec::<u16, SLOTS_MAX>::new();
        // The caller saw that there are enough; one that does not fit is of no use.
        self.pool.take(slots.min(SLOTS_MAX), |page| pages.push(page));
        for page in pages {
            let here = left.min(PAGE_SIZE);
            left -= here;
            // At most 4096.
            let len = u16::try_from(here).unwrap_or(0);
            let part = TxPart { gref: self.pool.gref(page), offset: 0, len, id: page };
            parts.push(part);
        }
        let blank = matches!(frame.meta().checksum, Checksum::Partial { .. });
        let checksum = netif::Checksum { blank, validated: blank };
        let ring = &mut self.ring;
        let mut posted = true;
        let emitted = if left > 0 {
            None
        } else {
            emit_tx(&parts, checksum, extras, |slot| posted &= ring.request(&slot)).ok()
        };
        if emitted.is_none() {
            parts.iter().for_each(|part| self.pool.give_back(part.id));
            return false;
        }
        debug_assert!(posted, "the caller saw enough free slots");
        // At most one.
        self.extras_under_way += u32::try_from(extras.len()).unwrap_or(0);
        for part in &parts {
            self.under_way[usize::from(part.id)] = true;
        }
        let pool = &self.pool;
        spread(frame, |page, offset, source| {
            let memory = pool.memory(parts[page].id);
            let copied = match source {
                Source::Private(bytes) => memory.copy_from(offset, bytes),
                Source::Lent(lent, from, len) => memory.copy_from_lent(offset, lent, from, len),
            };
            debug_assert!(copied.is_ok(), "pieces end at page boundaries");
        });
        true
    }

    /// Publishes what was posted; whether the backend wants to be told.
    pub(super) fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Asks for responses if somebody waits for room; whether some are there.
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
