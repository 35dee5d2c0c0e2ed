//! TX ring of the backend: packets from the guest.

mod fast;

use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_access::staging::StagingTable;
use ringfence_access::{PageAccess, ReadData, ReadRange};
use ringfence_offload::OffloadMeta;
use ringfence_platform::{GrantStatus, Grantee};
use ringfence_ring::{BackRing, RingPages};
use ringfence_wire::netif::tx::{TxChain, TxChainParser, TxOutcome};
use ringfence_wire::netif::{SLOTS_MAX, Status, TxRequest, TxResponse};
use ringfence_wire::numbers::bounded;

use super::policy::GuestPolicy;
use crate::features::{OffloadKeys, gso_from_extra};
use crate::offered::Offered;
use crate::prefetch::PrefetchBuffer;
use crate::rules::{RuleCounters, tx_grant_rule};
use ringfence_frame::batch::{Batch, HEADER_MAX};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{Fault, Received};

/// Alignment of packets in the scratch memory, so that no two of them share a cache line.
const ALIGN: usize = 64;

/// Number of responses encoded at a time.
const ANSWERS: usize = 64;

/// Number of slots fetched at a time.
const FETCHED_AHEAD: u32 = 16;

/// Parsed packet whose bytes are being read.
struct Planned {
    /// Range of its fragments in `ranges`.
    ranges: core::ops::Range<usize>,
    /// Range of its responses.
    answers: core::ops::Range<usize>,
    /// Offset of its bytes (copied) or header (mapped) in the scratch tail.
    at: usize,
    total: usize,
    offered: Offered,
}

/// Backend side of the TX ring.
pub(super) struct BackendTx<G> {
    ring: BackRing<RingPages>,
    prefetch: PrefetchBuffer<{ TxRequest::SIZE }>,
    access: PageAccess<G>,
    parser: TxChainParser,
    chain: TxChain,
    planned: Vec<Planned>,
    ranges: Vec<ReadRange>,
    data: Vec<Result<ReadData, GrantStatus>>,
    answers: Vec<TxResponse>,
    own: OffloadKeys,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl<G: Grantee> BackendTx<G> {
    pub(super) fn new(
        ring: BackRing<RingPages>,
        access: PageAccess<G>,
        own: OffloadKeys,
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        let slots = if own.scatter_gather { SLOTS_MAX } else { 1 };
        let parser = TxChainParser::new(ring.count());
        BackendTx {
            // At most 18.
            parser: parser.with_slot_limit(bounded(slots, u32::MAX)),
            chain: TxChain::new(ring.count()),
            prefetch: PrefetchBuffer::new(ring.consumed_index()),
            ring,
            access,
            planned: Vec::new(),
            ranges: Vec::new(),
            data: Vec::new(),
            answers: Vec::new(),
            own,
            rules,
            counters,
        }
    }

    /// Replaces the port counters that the ring updates.
    pub(super) fn count_in(&mut self, counters: Arc<PortCounters>) {
        self.counters = counters;
    }

    /// Returns the number of posted requests that wait; 0 for an impossible index.
    pub(super) fn waiting(&self) -> u32 {
        self.ring.unconsumed().unwrap_or(0)
    }

    pub(super) fn receive(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        policy: &mut GuestPolicy,
        staged: &StagingTable,
    ) -> Result<Received, Fault> {
        if self.answers.is_empty() {
            // Slots that had no room in the last round are looked up again.
            self.access.end();
        }
        let budget = budget.min(batch.frames_left());
        let run = self.receive_fast(batch, budget, policy, staged)?;
        let mut done = Received { frames: run.frames, work: run.looked };
        let mut bytes = run.bytes;
        if !run.ends && run.looked < budget {
            let planned = self.receive_planned(batch, budget - run.looked, policy, staged)?;
            done.frames += planned.0.frames;
            done.work += planned.0.work;
            bytes += planned.1;
        }
        if done.frames > 0 {
            self.counters.received(done.frames as u64, bytes);
        }
        Ok(done)
    }

    /// Slow path: receives packets of any kind, in every access mode.
    fn receive_planned(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        policy: &mut GuestPolicy,
        staged: &StagingTable,
    ) -> Result<(Received, u64), Fault> {
        let (looked, scratch) = self.plan(budget, batch, policy)?;
        if self.planned.is_empty() {
            return Ok((Received { frames: 0, work: looked }, 0));
        }
        let base = batch.scratch_used();
        self.data.clear();
        let tail = batch.scratch_tail_mut().get_mut(..scratch).unwrap_or_default();
        self.access.read(&self.ranges, staged, tail, &mut self.data);
        // `plan` stays within the free scratch memory.
        batch.reserve(scratch);
        let (mut frames, mut bytes) = (0, 0);
        for i in 0..self.planned.len() {
            match self.deliver(i, batch, base) {
                Ok(()) => {
                    frames += 1;
                    bytes += self.planned[i].total as u64;
                }
                Err((rule, reason)) => self.refuse(i, rule, reason),
            }
        }
        // The batch has the slices of its frames; release the others.
        self.data.clear();
        Ok((Received { frames, work: looked }, bytes))
    }

    /// Parses up to `budget` packets, within the batch's room. Returns the number of packets parsed and of
    /// scratch bytes reserved.
    fn plan(
        &mut self,
        budget: usize,
        batch: &mut Batch,
        policy: &mut GuestPolicy,
    ) -> Result<(usize, usize), Fault> {
        let (space, mut room) = (batch.scratch_left(), batch.room());
        self.planned.clear();
        self.ranges.clear();
        let mut available =
            self.ring.unconsumed().map_err(|e| self.fatal("tx_producer_overflow", e))?;
        let (mut looked, mut at) = (0, 0);
        // Refused packets count too, so that they cannot extend the guest's time quantum.
        while looked < budget {
            let (ring, prefetch) = (&self.ring, &mut self.prefetch);
            let first = ring.consumed_index();
            let mut fetch = |ahead: u32| {
                let ahead_too = available.min(ahead.saturating_add(FETCHED_AHEAD));
                prefetch.fetch(first, ahead_too, |from, into| ring.requests(from, into));
                prefetch.get(first.wrapping_add(ahead))
            };
            match self.parser.next(available, &mut fetch, &mut self.chain) {
                TxOutcome::Empty => break,
                TxOutcome::Packet => {
                    let total = usize::from(self.chain.total());
                    if !room.fits(total) {
                        batch.refuse(total);
                        break;
                    }
                    room.take(total, self.chain.extras().gso.map(gso_from_extra));
                    let Some(next) = self.plan_packet(at, space, policy) else { break };
                    at = next;
                }
                TxOutcome::FilterRequest => {
                    let done = policy.change_filter(&self.chain.extras().multicast);
                    self.answer_all(if done { Status::Okay } else { Status::Error });
                }
                TxOutcome::Refused(refusal) => {
                    self.counters.dropped(DropReason::BadRequest);
                    self.note(refusal.label(), &refusal);
                    self.answer_all(Status::Error);
                }
                TxOutcome::Fatal(fatal) => return Err(self.fatal(fatal.label(), fatal)),
            }
            // A chain has at most the available slots.
            let slots = bounded(self.chain.owed().len(), u32::MAX);
            self.ring.consume(slots);
            available = available.saturating_sub(slots);
            looked += 1;
        }
        Ok((looked, at.min(space)))
    }

    /// Plans the parsed packet with its bytes at `at`; returns the next free offset. The result is `None` if
    /// there is no room, or the rate limit leaves no credit. Then the slots stay unconsumed for a later round.
    fn plan_packet(&mut self, at: usize, room: usize, policy: &mut GuestPolicy) -> Option<usize> {
        let total = usize::from(self.chain.total());
        // Pages that are neither looked up nor mapped are copied.
        let space = if self.access.maps() { total.min(HEADER_MAX) } else { total };
        if at + space > room || !policy.admits(total) {
            return None;
        }
        let gso = self.chain.extras().gso;
        if gso.is_some_and(|gso| !self.own.takes(gso.protocol)) {
            self.counters.dropped(DropReason::GsoUnsupported);
            self.rules.count("tx_gso_not_negotiated");
            self.answer_all(Status::Error);
            return Some(at);
        }
        // Both are permitted and have no effect.
        if self.chain.empty_fragments() > 0 {
            self.rules.count("tx_zero_length_fragment");
        }
        if self.chain.extras().skipped > 0 {
            self.rules.count("tx_unknown_extra");
        }
        let first = self.ranges.len();
        let mut place = at;
        for fragment in self.chain.fragments() {
            self.ranges.push(ReadRange {
                gref: fragment.gref,
                offset: fragment.offset,
                len: fragment.len,
                at: place,
            });
            place += usize::from(fragment.len);
        }
        let answered = self.answers.len();
        self.answers.extend(self.chain.responses(Status::Okay));
        self.planned.push(Planned {
            ranges: first..self.ranges.len(),
            answers: answered..self.answers.len(),
            at,
            total,
            offered: Offered { checksum: self.chain.checksum(), gso },
        });
        Some((at + space).next_multiple_of(ALIGN))
    }

    /// Adds the frame of a planned packet to the batch, or returns the rule and the drop reason.
    fn deliver(
        &mut self,
        i: usize,
        batch: &mut Batch,
        base: usize,
    ) -> Result<(), (&'static str, DropReason)> {
        let planned = &self.planned[i];
        let data = &self.data[planned.ranges.clone()];
        if let Some(status) = data.iter().find_map(|r| r.as_ref().err()) {
            return Err((tx_grant_rule(*status), DropReason::Unreadable));
        }
        let bad = |_| ("tx_bad_frame", DropReason::BadRequest);
        let at = base + planned.at;
        let header_len = planned.total.min(HEADER_MAX);
        let copied = data.iter().all(|r| matches!(r, Ok(ReadData::Copied)));
        if !copied {
            let ranges = &self.ranges[planned.ranges.clone()];
            gather_header(ranges, data, batch, at, header_len);
        }
        let mut builder = batch.frame(at, header_len).map_err(bad)?;
        // Do not trust the flag "validated" of a guest: the next receiver verifies the checksum itself.
        let meta = if planned.offered.is_plain() {
            OffloadMeta::PLAIN
        } else {
            let header = builder.header_mut();
            let meta = planned.offered.accept_from_guest(self.own, header, planned.total);
            meta.map_err(|refused| (refused.tx_rule(), DropReason::BadOffload))?
        };
        if copied {
            builder.private(at + header_len, planned.total - header_len).map_err(bad)?;
        } else {
            self.counters.copied_bytes.add(header_len as u64);
            let mut place = 0;
            let ranges = &self.ranges[planned.ranges.clone()];
            for (range, piece) in ranges.iter().zip(data) {
                let len = usize::from(range.len);
                let hidden = header_len.saturating_sub(place).min(len);
                let (from, rest) = (at + place + hidden, len - hidden);
                match piece {
                    Ok(ReadData::Mapped(slice)) => builder.lent(slice.clone(), hidden, rest),
                    _ => builder.private(from, rest),
                }
                .map_err(bad)?;
                place += len;
            }
        }
        builder.finish(meta);
        Ok(())
    }

    fn refuse(&mut self, i: usize, rule: &'static str, reason: DropReason) {
        self.counters.dropped(reason);
        if self.rules.count(rule) == 0 {
            tracing::warn!(rule, "a packet of a guest was refused (logged once a rule)");
        }
        for answer in &mut self.answers[self.planned[i].answers.clone()] {
            if answer.status == Status::Okay {
                answer.status = Status::Error;
            }
        }
    }

    /// Queues a response with this status for every slot of the parsed chain.
    fn answer_all(&mut self, status: Status) {
        self.answers.extend(self.chain.responses(status));
    }

    fn note(&self, rule: &'static str, why: &dyn std::error::Error) {
        if self.rules.count(rule) == 0 {
            tracing::warn!(rule, %why, "a packet of a guest was refused (logged once a rule)");
        }
    }

    fn fatal(
        &self,
        rule: &'static str,
        why: impl std::error::Error + Send + Sync + 'static,
    ) -> Fault {
        self.rules.count(rule);
        Fault::misbehaved(why)
    }

    /// Writes and publishes the responses; returns true if the guest requests a notification.
    pub(super) fn answer(&mut self) -> bool {
        for answers in self.answers.chunks(ANSWERS) {
            let bytes: ArrayVec<_, ANSWERS> = answers.iter().map(|a| a.to_bytes()).collect();
            let written = self.ring.respond_all(&bytes);
            debug_assert_eq!(written, bytes.len(), "each answer is owed to a consumed slot");
        }
        self.answers.clear();
        self.access.end();
        self.ring.publish()
    }

    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        self.ring.final_check().map_err(|e| self.fatal("tx_producer_overflow", e))
    }
}

/// Copies the frame's first bytes from mapped fragments into the header. Copied fragments are there
/// already.
fn gather_header(
    ranges: &[ReadRange],
    data: &[Result<ReadData, GrantStatus>],
    batch: &mut Batch,
    at: usize,
    len: usize,
) {
    let Ok(header) = batch.scratch_mut(at..at + len) else { return };
    let mut place = 0;
    for (range, piece) in ranges.iter().zip(data) {
        let here = usize::from(range.len).min(len - place);
        if let Ok(ReadData::Mapped(slice)) = piece
            // The slice ends with its fragment, so no byte beyond it is copied.
            && slice.copy_to(0, &mut header[place..place + here]).is_err()
        {
            return;
        }
        place += here;
    }
}
