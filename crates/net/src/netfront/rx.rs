//! RX ring of the frontend: packets from the backend.

mod fast;

use std::sync::Arc;

use ringfence_access::window::mark;
use ringfence_memory::LentSlice;
use ringfence_offload::packet::Layers;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_platform::{Gref, Lease};
use ringfence_ring::{FrontRing, ProducerOverflow, RingPages};
use ringfence_wire::netif::rx::{RxChain, RxChainParser, RxOutcome};
use ringfence_wire::netif::{RxRequest, RxResponse};
use ringfence_wire::numbers::usize_from;

use super::windows::WindowPages;
use crate::features::OffloadKeys;
use crate::offered::Offered;
use crate::prefetch::PrefetchBuffer;
use crate::rules::RuleCounters;
use ringfence_frame::batch::{Batch, HEADER_MAX};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{Fault, Received};

/// Number of slots fetched at a time.
const FETCHED_AHEAD: u32 = 16;

/// Buffers of an RX ring, by the kind of their grants.
pub(super) enum RxPages<'a> {
    /// One page per slot, granted as long as the connection lasts.
    Lent(&'a [Lease]),
    /// Pages of a grant window, assigned to a slot for each post.
    Window(WindowPages),
}

/// Grant window and the page of each slot.
struct Places {
    pages: WindowPages,
    taken: Vec<Option<u16>>,
}

/// Frontend side of the RX ring.
pub(super) struct FrontendRx {
    ring: FrontRing<RingPages>,
    parser: RxChainParser,
    chain: RxChain,
    prefetch: PrefetchBuffer<{ RxResponse::SIZE }>,
    /// Page of each slot; no page is in two slots.
    pages: Vec<(Gref, LentSlice)>,
    /// Encoded request of each slot.
    posts: Vec<[u8; RxRequest::SIZE]>,
    /// Grant window of the pages, if there is one.
    places: Option<Places>,
    /// Set if a slot has no page.
    short: bool,
    own: OffloadKeys,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl FrontendRx {
    pub(super) fn new(
        ring: FrontRing<RingPages>,
        pages: RxPages<'_>,
        own: OffloadKeys,
        rules: Arc<RuleCounters>,
        counters: Arc<PortCounters>,
    ) -> Self {
        let entries = ring.count();
        let (pages, places) = match pages {
            RxPages::Lent(leases) => {
                let page = |lease: &Lease| (lease.gref(), lease.memory().clone());
                (leases.iter().map(page).collect(), None)
            }
            RxPages::Window(pages) => {
                let slots = entries as usize;
                let nothing = (mark(Gref(0)), LentSlice::anonymous(0));
                (vec![nothing; slots], Some(Places { pages, taken: vec![None; slots] }))
            }
        };
        // The id is the slot number, below 256.
        let post = |(id, (gref, _)): (u16, &(Gref, _))| RxRequest { id, gref: *gref }.to_bytes();
        FrontendRx {
            parser: RxChainParser::new(entries),
            chain: RxChain::new(),
            prefetch: PrefetchBuffer::new(ring.consumed_index()),
            posts: (0u16..).zip(&pages).map(post).collect(),
            pages,
            places,
            short: false,
            ring,
            own,
            rules,
            counters,
        }
    }

    /// Replaces the port counters that the ring updates.
    pub(super) fn count_in(&mut self, counters: Arc<PortCounters>) {
        self.counters = counters;
    }

    fn overflow(&self, error: ProducerOverflow) -> Fault {
        self.rules.count("rx_response_overflow");
        Fault::misbehaved(error)
    }

    #[inline]
    fn slot(&self, index: u32) -> usize {
        (index & (self.ring.count() - 1)) as usize
    }

    /// Posts pages for all delivered packets and publishes the requests. Returns true if the backend requests a
    /// notification.
    pub(super) fn post(&mut self) -> bool {
        let mut ready = self.refill();
        while ready > 0 {
            let slot = self.slot(self.ring.produced_index());
            let Some(posts) = self.posts.get(slot..) else { break };
            // Up to the end of the ring.
            let posts = &posts[..posts.len().min(ready)];
            let posted = self.ring.request_all(posts);
            if posted == 0 {
                break;
            }
            ready = ready.saturating_sub(posted);
        }
        self.ring.publish()
    }

    /// Assigns a page to each slot to post; returns the number of slots with a page.
    fn refill(&mut self) -> usize {
        let free = self.ring.free() as usize;
        let (next, mask) = (self.ring.produced_index(), self.ring.count() - 1);
        let Some(Places { pages, taken }) = &mut self.places else { return free };
        let slots = (0..self.ring.free()).map(|ahead| (next.wrapping_add(ahead) & mask) as usize);
        // Return delivered pages before taking new ones: then most slots keep their page.
        for slot in slots.clone().rev() {
            if let Some(page) = taken.get_mut(slot).and_then(Option::take) {
                pages.give_back(page);
            }
        }
        let mut ready = 0;
        for slot in slots {
            let Some(page) = pages.take() else { break };
            let gref = pages.gref(page);
            let (Some(taken), Some(known), Some(memory), Some(post), Ok(id)) = (
                taken.get_mut(slot),
                self.pages.get_mut(slot),
                pages.memory(page),
                self.posts.get_mut(slot),
                u16::try_from(slot),
            ) else {
                break;
            };
            *taken = Some(page);
            // The same reference may refer to another page now.
            *known = (gref, memory.clone());
            *post = RxRequest { id, gref }.to_bytes();
            ready += 1;
        }
        self.short = ready < free;
        ready
    }

    /// Returns true if a slot has no page.
    pub(super) fn is_short(&self) -> bool {
        self.short
    }

    /// Returns the grant window's pages, if there is one.
    pub(super) fn window(&mut self) -> Option<&mut WindowPages> {
        self.places.as_mut().map(|places| &mut places.pages)
    }

    pub(super) fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let run = self.receive_fast(batch, budget.min(batch.frames_left()))?;
        let mut done = Received { frames: run.frames, work: run.looked };
        let mut bytes = run.bytes;
        if !run.ends {
            bytes += self.receive_chains(batch, budget, &mut done)?;
        }
        if done.frames > 0 {
            self.counters.received(done.frames as u64, bytes);
        }
        Ok(done)
    }

    /// Slow path: receives packets of any kind. Adds frames and work to `done`, and returns the number of bytes received.
    fn receive_chains(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        done: &mut Received,
    ) -> Result<u64, Fault> {
        let mut available = self.ring.unconsumed().map_err(|e| self.overflow(e))?;
        let mut bytes = 0;
        while done.work < budget && batch.frames_left() > 0 && batch.scratch_left() >= HEADER_MAX {
            let (ring, prefetch) = (&self.ring, &mut self.prefetch);
            let (first, there) = (ring.consumed_index(), available);
            let mut fetch = |ahead: u32| {
                let ahead_too = there.min(ahead.saturating_add(FETCHED_AHEAD));
                prefetch.fetch(first, ahead_too, |from, into| ring.responses(from, into));
                prefetch.get(first.wrapping_add(ahead))
            };
            match self.parser.next(available, &mut fetch, &mut self.chain) {
                RxOutcome::Empty => break,
                RxOutcome::Packet if !batch.has_room_for(self.chain_len()) => break,
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
        Ok(bytes)
    }

    /// Requests an event for the next response; returns true if there is one already.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        self.ring.final_check().map_err(|e| self.overflow(e))
    }

    #[cold]
    fn refused(&self, rule: &'static str) {
        self.counters.dropped(DropReason::BadRequest);
        if self.rules.count(rule) == 0 {
            tracing::warn!(rule, "a packet of the backend was refused (logged once a rule)");
        }
    }

    /// Returns the length of the parsed chain in bytes.
    #[inline]
    fn chain_len(&self) -> usize {
        usize_from(self.chain.total())
    }

    /// Adds the frame of the parsed chain to the batch: private header, payload in the granted pages.
    fn deliver(&self, batch: &mut Batch) -> Result<(), &'static str> {
        let total = self.chain.total();
        self.check_negotiated()?;
        let header_len = self.chain_len().min(HEADER_MAX);
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

    /// Validates the chain against the negotiated features.
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
        let total = usize_from(total);
        let accepted = offered.accept_from_backend(self.own, header, total);
        accepted.map_err(|refused| refused.rx_rule())
    }
}
