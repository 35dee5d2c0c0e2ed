//! Rx chain parser: packets for the frontend, read from responses on the rx ring.
//!
//! A response stands in the slot of its request, and that slot identifies the posted page. The id
//! does not: extra infos overwrite it. [`RxChainParser::next`] walks one chain into an [`RxChain`],
//! fetches each slot once, and then applies the rules.

use super::extra::{ExtraError, ExtraFault, Extras, RawExtra};
use super::{
    Checksum, EXTRA_LIMIT, PACKET_MAX, PACKET_MIN, RxFlags, RxResponse, SLOT_LIMIT, SLOTS_MAX,
    Status, within_page,
};
use arrayvec::ArrayVec;
use thiserror::Error;

/// Fragment of a received packet: never empty, never across a page boundary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RxFragment {
    /// Slot of the chain, counted from 0: consumer index + `fetch_slot` identifies the posted page.
    pub slot: u32,
    pub offset: u16,
    /// Length in bytes, 1 to 4096.
    pub len: u16,
}

/// Broken rule of a packet. The packet is lost; the queue stays in step.
///
/// If a packet breaks several rules, the first variant in this order is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum RxRefusal {
    /// Unusable extra info in the chain.
    #[error("bad extra info: {0}")]
    BadExtra(#[from] ExtraError),
    /// More extra infos than the limit.
    #[error("{found} extra infos with one packet, the limit is {limit}")]
    TooManyExtras {
        /// Extra infos in the chain.
        found: u32,
        /// Maximum, equal to [`EXTRAS_MAX`](super::EXTRAS_MAX).
        limit: u32,
    },
    /// More data slots than the limit.
    #[error("{found} slots for one packet, the limit is {limit}")]
    TooManySlots {
        /// Data slots in the chain.
        found: u32,
        /// Maximum, equal to [`SLOTS_MAX`].
        limit: u32,
    },
    /// Obsolete GSO prefix, which is never negotiated.
    #[error("the packet begins with a GSO prefix, which was not negotiated")]
    GsoPrefix,
    /// Failure of a fragment reported by the backend.
    #[error("the backend reports {status:?} for slot {slot}")]
    BackendFailed { slot: u32, status: Status },
    /// Fragment reaches over the end of its page.
    #[error("slot {slot}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage { slot: u32, offset: u16, len: u32 },
    /// Packet shorter than an Ethernet header.
    #[error("a packet of {total} bytes, the least is {least}")]
    TooShort {
        /// Bytes of all fragments.
        total: u32,
        /// Minimum, equal to [`PACKET_MIN`].
        least: u32,
    },
    /// Packet longer than the maximum.
    #[error("a packet of {total} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes of all fragments.
        total: u32,
        /// Maximum, equal to [`PACKET_MAX`].
        limit: u32,
    },
}

impl RxRefusal {
    /// Returns the label of the rule's counter.
    pub fn label(&self) -> &'static str {
        match self {
            RxRefusal::BadExtra(_) => "rx_bad_extra",
            RxRefusal::TooManyExtras { .. } => "rx_too_many_extras",
            RxRefusal::TooManySlots { .. } => "rx_too_many_slots",
            RxRefusal::GsoPrefix => "rx_gso_prefix",
            RxRefusal::BackendFailed { .. } => "rx_backend_failed",
            RxRefusal::CrossesPage { .. } => "rx_crosses_page",
            RxRefusal::TooShort { .. } => "rx_too_short",
            RxRefusal::TooLong { .. } => "rx_too_long",
        }
    }
}

/// Chain without an end. The queue cannot continue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum RxFatal {
    /// Last published slot announces more data.
    #[error("a packet goes on beyond the {published} slots that are published")]
    Unfinished {
        /// Slots published by the backend.
        published: u32,
    },
    /// Every slot of the ring announces more data.
    #[error("a packet goes on after all {entries} slots of the ring")]
    LongerThanRing {
        /// Slots of the ring.
        entries: u32,
    },
}

impl RxFatal {
    /// Returns the label of the fault's counter.
    pub fn label(&self) -> &'static str {
        match self {
            RxFatal::Unfinished { .. } => "rx_unfinished_chain",
            RxFatal::LongerThanRing { .. } => "rx_chain_longer_than_ring",
        }
    }
}

/// Result of one call to [`RxChainParser::next`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum RxOutcome {
    /// No response is published.
    Empty,
    /// Valid packet in the chain.
    Packet,
    /// Packet that breaks a rule. Its slots are consumed; their pages are free again.
    Refused(RxRefusal),
    /// Chain without an end: stop using the ring.
    Fatal(RxFatal),
}

/// Parsed packet, with storage that is reused for the next one.
///
/// After [`RxOutcome::Packet`] the chain has 1 to 18 fragments. Each keeps the rules of
/// [`RxFragment`], and their slots rise. Their bytes add up to [`total`](Self::total), which is 14 to
/// 65535.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RxChain {
    fragments: ArrayVec<RxFragment, SLOTS_MAX>,
    extras: Extras,
    checksum: Checksum,
    total: u32,
    slots: u32,
    empty_fragments: u32,
}

impl RxChain {
    /// Creates an empty chain.
    pub fn new() -> RxChain {
        RxChain::default()
    }

    /// Returns the packet's fragments in order.
    pub fn fragments(&self) -> &[RxFragment] {
        &self.fragments
    }

    /// Returns the packet's length in bytes.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Returns the checksum state from the first slot.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Returns the packet's extra infos. Changes of the multicast filter have no meaning for a frontend.
    pub fn extras(&self) -> &Extras {
        &self.extras
    }

    /// Returns the number of consumed slots. The caller advances the consumer index by it and takes back
    /// one page for each slot. The page of an extra info's slot is untouched.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the number of fragments without bytes; they are not in the list.
    pub fn empty_fragments(&self) -> u32 {
        self.empty_fragments
    }

    #[inline]
    fn clear(&mut self) {
        self.fragments.clear();
        self.extras.clear();
        self.checksum = Checksum::default();
        self.total = 0;
        self.slots = 0;
        self.empty_fragments = 0;
    }
}

/// Parser for packets on an rx ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxChainParser {
    entries: u32,
}

/// Progress through one chain: slots so far and the first faults.
#[derive(Default)]
struct Walk {
    extras: u32,
    extra_fault: Option<ExtraFault>,
    data_slots: u32,
    slot_fault: Option<RxRefusal>,
}

impl Walk {
    /// Adds the response in slot `fetch_slot` of the chain as a fragment.
    #[inline]
    fn push_data(&mut self, slot: u32, response: RxResponse, chain: &mut RxChain) {
        self.data_slots += 1;
        let len = match response.size() {
            Ok(len) => len,
            Err(status) => {
                self.slot_fault.get_or_insert(RxRefusal::BackendFailed { slot, status });
                return;
            }
        };
        let offset = response.offset;
        if !within_page(offset, u32::from(len)) {
            let len = u32::from(len);
            self.slot_fault.get_or_insert(RxRefusal::CrossesPage { slot, offset, len });
            return;
        }
        chain.total = chain.total.saturating_add(u32::from(len));
        if len == 0 {
            chain.empty_fragments += 1;
        } else {
            // A full list means more than the limit, so the packet is refused later.
            let _ = chain.fragments.try_push(RxFragment { slot, offset, len });
        }
    }

    /// Applies the rules to a chain that was walked to its end.
    #[inline]
    fn validate(&self, first: RxFlags, total: u32) -> Result<(), RxRefusal> {
        match self.extra_fault {
            None => {}
            Some(ExtraFault::Bad(error)) => return Err(RxRefusal::BadExtra(error)),
            Some(ExtraFault::TooMany) => {
                let limit = EXTRA_LIMIT;
                return Err(RxRefusal::TooManyExtras { found: self.extras, limit });
            }
        }
        if self.data_slots > SLOT_LIMIT {
            return Err(RxRefusal::TooManySlots { found: self.data_slots, limit: SLOT_LIMIT });
        }
        if first.contains(RxFlags::GSO_PREFIX) {
            return Err(RxRefusal::GsoPrefix);
        }
        if let Some(fault) = self.slot_fault {
            return Err(fault);
        }
        match total {
            ..PACKET_MIN => Err(RxRefusal::TooShort { total, least: PACKET_MIN }),
            PACKET_MIN..=PACKET_MAX => Ok(()),
            _ => Err(RxRefusal::TooLong { total, limit: PACKET_MAX }),
        }
    }
}

impl RxChainParser {
    /// Creates a parser for a ring of `entries` slots.
    pub fn new(entries: u32) -> RxChainParser {
        RxChainParser { entries }
    }

    /// Parses the chain at the consumer index. `available` is the number of published, unconsumed
    /// responses, bounded by the ring. `fetch(i)` copies the `i`-th of them into private memory.
    ///
    /// The parser calls `fetch` once each for 0, 1, 2 … as far as the chain reaches. Fetched slots are
    /// consumed unless the outcome is fatal; [`RxChain::slots`] gives their number.
    #[inline]
    pub fn next<F: FnMut(u32) -> [u8; RxResponse::SIZE]>(
        &self,
        available: u32,
        fetch: &mut F,
        chain: &mut RxChain,
    ) -> RxOutcome {
        chain.clear();
        if available == 0 {
            return RxOutcome::Empty;
        }
        let (first, walk) = match self.walk(available, fetch, chain) {
            Ok(walked) => walked,
            Err(fatal) => {
                chain.fragments.clear();
                chain.total = 0;
                return RxOutcome::Fatal(fatal);
            }
        };
        match walk.validate(first, chain.total) {
            Ok(()) => RxOutcome::Packet,
            Err(refusal) => {
                chain.fragments.clear();
                chain.total = 0;
                RxOutcome::Refused(refusal)
            }
        }
    }

    /// Consumes a chain to its end, even a faulty one, so that the next chain is found.
    #[inline]
    fn walk<F: FnMut(u32) -> [u8; RxResponse::SIZE]>(
        &self,
        available: u32,
        fetch: &mut F,
        chain: &mut RxChain,
    ) -> Result<(RxFlags, Walk), RxFatal> {
        let mut walk = Walk::default();
        let first = RxResponse::from_bytes(self.fetch_slot(available, fetch, chain)?);
        chain.checksum = first.flags.checksum();
        walk.push_data(0, first, chain);
        let mut more = first.flags.contains(RxFlags::EXTRA_INFO);
        while more {
            let raw = RawExtra(self.fetch_slot(available, fetch, chain)?);
            walk.extras += 1;
            if let Err(fault) = chain.extras.push(walk.extras as usize, raw) {
                walk.extra_fault.get_or_insert(fault);
            }
            more = raw.has_more();
        }
        more = first.flags.contains(RxFlags::MORE_DATA);
        while more {
            let slot = chain.slots;
            let response = RxResponse::from_bytes(self.fetch_slot(available, fetch, chain)?);
            walk.push_data(slot, response, chain);
            more = response.flags.contains(RxFlags::MORE_DATA);
        }
        Ok((first.flags, walk))
    }

    /// Fetches the next slot of the chain and advances `chain.slots`.
    #[inline]
    fn fetch_slot<F: FnMut(u32) -> [u8; RxResponse::SIZE]>(
        &self,
        available: u32,
        fetch: &mut F,
        chain: &mut RxChain,
    ) -> Result<[u8; RxResponse::SIZE], RxFatal> {
        if chain.slots >= self.entries {
            return Err(RxFatal::LongerThanRing { entries: self.entries });
        }
        if chain.slots >= available {
            return Err(RxFatal::Unfinished { published: available });
        }
        let slot = fetch(chain.slots);
        chain.slots += 1;
        Ok(slot)
    }
}
