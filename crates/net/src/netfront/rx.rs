//! Packets from the backend.

use std::sync::Arc;

use ringfence_memory::LentSlice;
use ringfence_offload::packet::Layers;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_platform::{Gref, Lease};
use ringfence_ring::{FrontRing, RingPages};
use ringfence_wire::netif::RxRequest;
use ringfence_wire::netif::rx::{RxChain, RxChainParser, RxOutcome};

use crate::batch::{Batch, HEADER_MAX};
use crate::counters::{DropReason, PortCounters};
use crate::features::OffloadKeys;
use crate::offered::Offered;
use crate::port::{Fault, Received};
use crate::rules::RuleCounters;

/// The frontend's side of the rx ring.
pub(super) struct FromBackend {
    ring: FrontRing<RingPages>,
    parser: RxChainParser,
    chain: RxChain,
    /// The page of each slot of the ring, which is posted in no other.
    pages: Vec<(Gref, LentSlice)>,
    own: OffloadKeys,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl FromBackend {
    pub(super) fn new(
        ring: FrontRing<RingPages>,
        leases: &[Lease],
        own: OffloadKeys,
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        let entries = ring.count();
        FromBackend {
            parser: RxChainParser::new(entries),
            chain: RxChain::new(),
            pages: leases.iter().map(|l| (l.gref(), l.memory().clone())).collect(),
            ring,
            own,
            rules,
            counters,
        }
    }

    fn slot(&self, index: u32) -> usize {
        (index & (self.ring.count() - 1)) as usize
    }

    /// Posts the pages of all delivered packets again, and publishes that; whether the backend wants
    /// to be told.
    pub(super) fn post(&mut self) -> bool {
        while self.ring.free() > 0 {
            let slot = self.slot(self.ring.produced_index());
            let Some(&(gref, _)) = self.pages.get(slot) else { break };
            // The id is the slot: 256 of them.
            let id = u16::try_from(slot).unwrap_or(0);
            let posted = self.ring.request(&RxRequest { id, gref }.to_bytes());
            debug_assert!(posted, "a slot was free");
        }
        self.ring.publish()
    }

    pub(super) fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let mut available = self.ring.unconsumed().map_err(|e| {
            self.rules.count("rx_response_overflow");
            Fault::misbehaved(e)
        })?;
        let mut done = Received::default();
        let mut bytes = 0;
        while done.work < budget && batch.frames_left() > 0 && batch.scratch_left() >= HEADER_MAX {
            let ring = &self.ring;
            let mut fetch = |ahead| ring.response(ahead).into_unchecked();
            match self.parser.next(available, &mut fetch, &mut self.chain) {
                RxOutcome::Empty => break,
                RxOutcome::Packet if !batch.has_room_for(self.octets()) => break,
                RxOutcome::Packet => match self.deliver(batch) {
                    Ok(()) => {
                        done.frames += 1;
                        bytes += u64::from(self.chain.total());
                    }
                    Err(rule) => self.refused(rule),
                },
                RxOutcome::Refused(refusal) => self.refused(refusal.label()),
                RxOutcome::Fatal(fatal) => {
                    self.rules.count(fatal.label());
                    return Err(Fault::misbehaved(fatal));
                }
            }
            let slots = self.chain.slots();
            self.ring.consume(slots);
            available = available.saturating_sub(slots);
            done.work += 1;
        }
        self.counters.received(done.frames as u64, bytes);
        Ok(done)
    }

    /// Asks to be told of the next response; whether one is there.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        self.ring.final_check().map_err(|e| {
            self.rules.count("rx_response_overflow");
            Fault::misbehaved(e)
        })
    }

    #[cold]
    fn refused(&self, rule: &'static str) {
        self.counters.dropped(DropReason::BadRequest);
        if self.rules.count(rule) == 0 {
            tracing::warn!(rule, "a packet of the backend was refused (logged once a rule)");
        }
    }

    /// Octets of the parsed chain.
    fn octets(&self) -> usize {
        usize::try_from(self.chain.total()).unwrap_or(usize::MAX)
    }

    /// Makes a frame of the parsed chain: its header private, its payload where it is.
    fn deliver(&self, batch: &mut Batch) -> Result<(), &'static str> {
        let total = self.chain.total();
        self.check_negotiated()?;
        let header_len = self.octets().min(HEADER_MAX);
        let full = |_| "rx_no_room";
        let at = batch.reserve(header_len).ok_or("rx_no_room")?;
        let first = self.ring.consumed_index();
        let page = |slot: u32| self.pages.get(self.slot(first.wrapping_add(slot)));
        let mut builder = batch.frame(at, header_len).map_err(full)?;
        let mut done = 0;
        for fragment in self.chain.fragments() {
            let (offset, len) = (usize::from(fragment.offset), usize::from(fragment.len));
            let head = len.min(header_len - done);
            let (_, memory) = page(fragment.slot).ok_or("rx_no_room")?;
            let header = &mut builder.header_mut()[done..done + head];
            memory.copy_to(offset, header).map_err(|_| "rx_crosses_page")?;
            self.counters.copied_bytes.add(head as u64);
            done += head;
            if head < len {
                builder.lent(memory.clone(), offset + head, len - head).map_err(full)?;
            }
        }
        let meta = self.metadata(total, builder.header_mut())?;
        builder.finish(meta);
        Ok(())
    }

    /// The rules that the chain's form can break.
    fn check_negotiated(&self) -> Result<(), &'static str> {
        if self.chain.fragments().len() > 1 && !self.own.scatter_gather {
            return Err("rx_scatter_gather_not_negotiated");
        }
        match self.chain.extras().gso {
            Some(gso) if !self.own.takes(gso.protocol) => Err("rx_gso_not_negotiated"),
            _ => Ok(()),
        }
    }

    fn metadata(&self, total: u32, header: &mut [u8]) -> Result<OffloadMeta, &'static str> {
        let offered = Offered { checksum: self.chain.checksum(), gso: self.chain.extras().gso };
        if offered.is_plain() {
            let validated = offered.checksum.validated && Layers::parse(header, total).is_ok();
            let checksum = if validated { Checksum::Verified } else { Checksum::None };
            return Ok(OffloadMeta { checksum, gso: None });
        }
        let total = usize::try_from(total).unwrap_or(usize::MAX);
        let accepted = offered.accept_from_backend(self.own, header, total);
        accepted.map_err(|refused| refused.rx_rule())
    }
}
