//! Tx chain parser: packets from the frontend, read by the backend from requests on the tx ring.
//!
//! [`TxChainParser::next`] walks one chain into a [`TxChain`], fetches each slot once, and then applies
//! the rules. The chain records every consumed slot, because the backend owes each one a response. The
//! first request carries the length of the whole packet; its own fragment is the remainder.

use super::extra::{ExtraError, ExtraFault, Extras, RawExtra};
use super::{
    Checksum, EXTRA_LIMIT, PACKET_MIN, SLOT_LIMIT, SLOTS_MAX, Status, TxFlags, TxRequest,
    TxResponse, within_page,
};
use crate::grant::Gref;
use arrayvec::ArrayVec;
use thiserror::Error;

/// Fragment of a packet: never empty, never across a page boundary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fragment {
    pub gref: Gref,
    pub offset: u16,
    /// Length in bytes, 1 to 4096.
    pub len: u16,
}

/// Kind of a consumed slot, which decides the status of its response.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SlotKind {
    /// Request, answered `OKAY`, `ERROR` or `DROPPED`.
    Request,
    /// Extra info, answered with `NULL`.
    Extra,
}

/// Consumed slot that needs one response.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owed {
    /// Id of the request; 0 for an extra info, which has none.
    pub id: u16,
    pub kind: SlotKind,
}

impl Owed {
    /// Builds the response; requests get `status`, extra infos get `NULL`.
    #[inline]
    pub fn response(self, status: Status) -> TxResponse {
        let status = match self.kind {
            SlotKind::Request => status,
            SlotKind::Extra => Status::Null,
        };
        TxResponse { id: self.id, status }
    }
}

/// Broken rule of a packet. The packet is lost; the queue stays in step.
///
/// If a packet breaks several rules, the first variant in this order is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum TxRefusal {
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
    /// More request slots than the limit.
    #[error("{found} slots for one packet, the limit is {limit}")]
    TooManySlots {
        /// Request slots in the chain.
        found: u32,
        /// Maximum of the parser.
        limit: u32,
    },
    /// Packet shorter than an Ethernet header.
    #[error("a packet of {total} bytes, the least is {least}")]
    TooShort {
        /// Bytes that the first request announces.
        total: u32,
        /// Minimum, equal to [`PACKET_MIN`].
        least: u32,
    },
    /// Fragments after the first exceed the announced total.
    #[error("the packet has {total} bytes, its fragments after the first alone {fragments}")]
    SmallerThanFragments {
        /// Bytes that the first request announces.
        total: u32,
        /// Sum of the fragments after the first.
        fragments: u32,
    },
    /// Fragment reaches over the end of its page.
    #[error("fragment {index}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage {
        /// Fragment index, counted from 0.
        index: u32,
        offset: u16,
        len: u32,
    },
}

impl TxRefusal {
    /// Returns the label of the rule's counter.
    pub fn label(&self) -> &'static str {
        match self {
            TxRefusal::BadExtra(_) => "tx_bad_extra",
            TxRefusal::TooManyExtras { .. } => "tx_too_many_extras",
            TxRefusal::TooManySlots { .. } => "tx_too_many_slots",
            TxRefusal::TooShort { .. } => "tx_too_short",
            TxRefusal::SmallerThanFragments { .. } => "tx_smaller_than_fragments",
            TxRefusal::CrossesPage { .. } => "tx_crosses_page",
        }
    }
}

/// Chain without an end. The queue cannot continue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum TxFatal {
    /// Last published slot announces more data.
    #[error("a packet goes on beyond the {published} slots that are published")]
    Unfinished {
        /// Slots published by the frontend.
        published: u32,
    },
    /// Every slot of the ring announces more data.
    #[error("a packet goes on after all {entries} slots of the ring")]
    LongerThanRing {
        /// Slots of the ring.
        entries: u32,
    },
}

impl TxFatal {
    /// Returns the label of the fault's counter.
    pub fn label(&self) -> &'static str {
        match self {
            TxFatal::Unfinished { .. } => "tx_unfinished_chain",
            TxFatal::LongerThanRing { .. } => "tx_chain_longer_than_ring",
        }
    }
}

/// Result of one call to [`TxChainParser::next`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum TxOutcome {
    /// No request is published.
    Empty,
    /// Valid packet in the chain.
    Packet,
    /// Dummy request with changes of the multicast filter ([`Extras::multicast`]), not a packet. The
    /// backend answers the request `OKAY` or `ERROR`; the chain has no fragments and no total.
    FilterRequest,
    /// Packet that breaks a rule: answer with [`TxChain::responses`] and [`Status::Error`].
    Refused(TxRefusal),
    /// Chain without an end: stop using the ring and answer nothing.
    Fatal(TxFatal),
}

/// Parsed packet, with storage that is reused for the next one.
///
/// After [`TxOutcome::Packet`] the chain has 1 to 18 fragments, and each keeps the rules of
/// [`Fragment`]. Their bytes add up to [`total`](Self::total), which is 14 to 65535.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TxChain {
    fragments: ArrayVec<Fragment, SLOTS_MAX>,
    owed: Vec<Owed>,
    extras: Extras,
    checksum: Checksum,
    total: u16,
    empty_fragments: u32,
}

impl TxChain {
    /// Creates a chain with room for any packet of a ring with `entries` slots. Parsing allocates nothing.
    pub fn new(entries: u32) -> TxChain {
        TxChain {
            fragments: ArrayVec::new(),
            owed: Vec::with_capacity(entries as usize),
            extras: Extras::default(),
            checksum: Checksum::default(),
            total: 0,
            empty_fragments: 0,
        }
    }

    /// Returns the packet's fragments in order.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Returns the packet's length in bytes.
    pub fn total(&self) -> u16 {
        self.total
    }

    /// Returns the checksum state from the first slot.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Returns the packet's extra infos.
    pub fn extras(&self) -> &Extras {
        &self.extras
    }

    /// Returns the number of fragments without bytes: legal, and not in the list (XSA-448).
    pub fn empty_fragments(&self) -> u32 {
        self.empty_fragments
    }

    /// Returns the consumed slots in order. The caller advances the consumer index by their number and
    /// answers each.
    pub fn owed(&self) -> &[Owed] {
        &self.owed
    }

    /// Builds the responses to all consumed slots; requests get `status`.
    pub fn responses(&self, status: Status) -> impl ExactSizeIterator<Item = TxResponse> {
        self.owed.iter().map(move |owed| owed.response(status))
    }

    #[inline]
    fn clear(&mut self) {
        self.fragments.clear();
        self.owed.clear();
        self.extras.clear();
        self.checksum = Checksum::default();
        self.total = 0;
        self.empty_fragments = 0;
    }

    /// Records a request slot and adds its fragment of `request.size` bytes while there is room.
    #[inline]
    fn push_request(&mut self, request: &TxRequest) {
        self.owed.push(Owed { id: request.id, kind: SlotKind::Request });
        let TxRequest { gref, offset, size: len, .. } = *request;
        // A full list means more than every limit, so the packet is refused later.
        let _ = self.fragments.try_push(Fragment { gref, offset, len });
    }
}

/// Parser for packets on a tx ring.
///
/// ```
/// use ringfence_wire::grant::Gref;
/// use ringfence_wire::netif::tx::{Fragment, TxChain, TxChainParser, TxOutcome};
/// use ringfence_wire::netif::{RING_ENTRIES, Status, TxFlags, TxRequest};
///
/// let first =
///     TxRequest { gref: Gref(8), offset: 64, flags: TxFlags::MORE_DATA, id: 1, size: 100 };
/// let second = TxRequest { gref: Gref(9), offset: 0, flags: TxFlags::NONE, id: 2, size: 40 };
/// let slots = [first.to_bytes(), second.to_bytes()];
///
/// let parser = TxChainParser::new(RING_ENTRIES);
/// let mut chain = TxChain::new(RING_ENTRIES);
/// let outcome = parser.next(2, &mut |index| slots[index as usize], &mut chain);
/// assert_eq!(outcome, TxOutcome::Packet);
/// assert_eq!(chain.total(), 100);
/// // The first request announces the whole packet; its own fragment is the remainder.
/// assert_eq!(chain.fragments()[0], Fragment { gref: Gref(8), offset: 64, len: 60 });
/// assert_eq!(chain.fragments()[1], Fragment { gref: Gref(9), offset: 0, len: 40 });
/// assert!(chain.responses(Status::Okay).map(|response| response.id).eq([1, 2]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxChainParser {
    entries: u32,
    slot_limit: u32,
}

/// Slots of one chain, each fetched once, in order, and only if published.
struct Slots<'a, F> {
    fetch: &'a mut F,
    next: u32,
    available: u32,
    entries: u32,
}

impl<F: FnMut(u32) -> [u8; TxRequest::SIZE]> Slots<'_, F> {
    fn fetch(&mut self) -> Result<[u8; TxRequest::SIZE], TxFatal> {
        if self.next >= self.entries {
            return Err(TxFatal::LongerThanRing { entries: self.entries });
        }
        if self.next >= self.available {
            return Err(TxFatal::Unfinished { published: self.available });
        }
        let slot = (self.fetch)(self.next);
        self.next += 1;
        Ok(slot)
    }
}

impl TxChainParser {
    /// Creates a parser for a ring of `entries` slots with a limit of [`SLOTS_MAX`] request slots.
    pub fn new(entries: u32) -> TxChainParser {
        TxChainParser { entries, slot_limit: SLOT_LIMIT }
    }

    /// Limits packets to `limit` request slots, clamped to 1..=[`SLOTS_MAX`]. A frontend without
    /// `feature-sg` has the limit 1.
    #[must_use]
    pub fn with_slot_limit(self, limit: u32) -> TxChainParser {
        TxChainParser { slot_limit: limit.clamp(1, SLOT_LIMIT), ..self }
    }

    /// Parses the chain at the consumer index. `available` is the number of published, unconsumed slots,
    /// bounded by the ring. `fetch(i)` copies the `i`-th of them into private memory.
    ///
    /// The parser calls `fetch` once each for 0, 1, 2 … as far as the chain reaches. Fetched slots are
    /// consumed unless the outcome is fatal; `chain.owed()` has one element for each.
    #[inline]
    pub fn next<F: FnMut(u32) -> [u8; TxRequest::SIZE]>(
        &self,
        available: u32,
        fetch: &mut F,
        chain: &mut TxChain,
    ) -> TxOutcome {
        chain.clear();
        if available == 0 {
            return TxOutcome::Empty;
        }
        let mut slots = Slots { fetch, next: 0, available, entries: self.entries };
        let first = match slots.fetch() {
            Ok(slot) => TxRequest::from_bytes(slot),
            Err(fatal) => return TxOutcome::Fatal(fatal),
        };
        chain.checksum = first.flags.checksum();
        chain.push_request(&first);
        let mut tail = Tail::default();
        if first.flags.0 & (TxFlags::MORE_DATA.0 | TxFlags::EXTRA_INFO.0) != 0 {
            match walk(&first, &mut slots, chain) {
                Ok(found) => tail = found,
                Err(fatal) => {
                    chain.fragments.clear();
                    return TxOutcome::Fatal(fatal);
                }
            }
        }
        self.validate(&first, &tail, chain)
    }

    /// Applies the rules to a chain that was walked to its end.
    #[inline]
    fn validate(&self, first: &TxRequest, tail: &Tail, chain: &mut TxChain) -> TxOutcome {
        let outcome = tail.check_extras().and_then(|()| {
            let found = tail.requests + 1;
            if found > self.slot_limit {
                return Err(TxRefusal::TooManySlots { found, limit: self.slot_limit });
            }
            if !chain.extras.multicast.is_empty() {
                return Ok(TxOutcome::FilterRequest);
            }
            check_sizes(first, tail, chain).map(|()| TxOutcome::Packet)
        });
        match outcome {
            Ok(TxOutcome::Packet) => {
                chain.total = first.size;
                TxOutcome::Packet
            }
            Ok(other) => {
                chain.fragments.clear();
                other
            }
            Err(refusal) => {
                chain.fragments.clear();
                TxOutcome::Refused(refusal)
            }
        }
    }
}

/// Totals of the slots after the first.
#[derive(Default)]
struct Tail {
    /// Number of extra infos.
    extras: u32,
    /// First fault of the extra infos.
    fault: Option<ExtraFault>,
    /// Number of request slots.
    requests: u32,
    /// Sum of the requests' lengths.
    bytes: u32,
}

impl Tail {
    #[inline]
    fn check_extras(&self) -> Result<(), TxRefusal> {
        match self.fault {
            None => Ok(()),
            Some(ExtraFault::Bad(error)) => Err(TxRefusal::BadExtra(error)),
            Some(ExtraFault::TooMany) => {
                Err(TxRefusal::TooManyExtras { found: self.extras, limit: EXTRA_LIMIT })
            }
        }
    }
}

/// Consumes the rest of a chain, even a faulty one, so that the next chain is found.
fn walk<F: FnMut(u32) -> [u8; TxRequest::SIZE]>(
    first: &TxRequest,
    slots: &mut Slots<'_, F>,
    chain: &mut TxChain,
) -> Result<Tail, TxFatal> {
    let mut tail = Tail::default();
    let mut more = first.flags.contains(TxFlags::EXTRA_INFO);
    while more {
        let [t, f, b0, b1, b2, b3, b4, b5, ..] = slots.fetch()?;
        let raw = RawExtra([t, f, b0, b1, b2, b3, b4, b5]);
        chain.owed.push(Owed { id: 0, kind: SlotKind::Extra });
        tail.extras += 1;
        if let Err(fault) = chain.extras.push(tail.extras as usize, raw) {
            tail.fault.get_or_insert(fault);
        }
        more = raw.has_more();
    }
    more = first.flags.contains(TxFlags::MORE_DATA);
    while more {
        let request = TxRequest::from_bytes(slots.fetch()?);
        chain.push_request(&request);
        tail.requests += 1;
        // The ring bounds the number of requests, so the sum cannot reach u32::MAX; saturate anyway.
        tail.bytes = tail.bytes.saturating_add(u32::from(request.size));
        more = request.flags.contains(TxFlags::MORE_DATA);
    }
    Ok(tail)
}

/// Computes the first fragment's length, checks all fragments, and drops the empty ones.
#[inline]
fn check_sizes(first: &TxRequest, tail: &Tail, chain: &mut TxChain) -> Result<(), TxRefusal> {
    let total = u32::from(first.size);
    if total < PACKET_MIN {
        return Err(TxRefusal::TooShort { total, least: PACKET_MIN });
    }
    let rest = u16::try_from(tail.bytes).ok().and_then(|bytes| first.size.checked_sub(bytes));
    let Some(len) = rest else {
        return Err(TxRefusal::SmallerThanFragments { total, fragments: tail.bytes });
    };
    chain.fragments[0].len = len;
    let mut empty = 0;
    for (index, fragment) in (0..).zip(&chain.fragments) {
        let Fragment { offset, len, .. } = *fragment;
        let len = u32::from(len);
        if !within_page(offset, len) {
            return Err(TxRefusal::CrossesPage { index, offset, len });
        }
        empty += u32::from(len == 0);
    }
    if empty != 0 {
        chain.fragments.retain(|fragment| fragment.len != 0);
        chain.empty_fragments = empty;
    }
    Ok(())
}
