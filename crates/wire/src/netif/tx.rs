//! Packets from the frontend, as the backend reads them off the tx ring.

use super::extra::{ExtraError, ExtraFault, Extras, RawExtra};
use super::{
    Checksum, EXTRA_LIMIT, PACKET_MIN, SLOT_LIMIT, SLOTS_MAX, Status, TxFlags, TxRequest,
    TxResponse, within_page,
};
use crate::grant::Gref;
use arrayvec::ArrayVec;
use thiserror::Error;

/// A piece of a packet: never empty, never across the end of its page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fragment {
    /// The page.
    pub gref: Gref,
    /// Where in the page it starts.
    pub offset: u16,
    /// Its bytes, 1 to 4096.
    pub len: u16,
}

/// What a consumed slot was, which decides what it is answered with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SlotKind {
    /// A request: `OKAY`, `ERROR` or `DROPPED`.
    Request,
    /// An extra info: `NULL`.
    Extra,
}

/// A slot that was consumed and needs one response.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owed {
    /// The request's id; 0 for an extra info, which has none.
    pub id: u16,
    /// What the slot was.
    pub kind: SlotKind,
}

impl Owed {
    /// The response, where requests end with `status`.
    #[inline]
    pub fn response(self, status: Status) -> TxResponse {
        let status = match self.kind {
            SlotKind::Request => status,
            SlotKind::Extra => Status::Null,
        };
        TxResponse { id: self.id, status }
    }
}

/// A rule that a packet breaks. The packet is gone, the queue is in step.
///
/// When several are broken, the one that stands first here is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum TxRefusal {
    /// An extra info is unusable.
    #[error("bad extra info: {0}")]
    BadExtra(#[from] ExtraError),
    /// More extra infos than we take.
    #[error("{found} extra infos with one packet, the limit is {limit}")]
    TooManyExtras {
        /// Extra infos found.
        found: u32,
        /// [`EXTRAS_MAX`](super::EXTRAS_MAX).
        limit: u32,
    },
    /// More requests than we take.
    #[error("{found} slots for one packet, the limit is {limit}")]
    TooManySlots {
        /// Request slots found.
        found: u32,
        /// The parser's limit.
        limit: u32,
    },
    /// Not even an Ethernet header.
    #[error("a packet of {total} bytes, the least is {least}")]
    TooShort {
        /// Bytes announced.
        total: u32,
        /// [`PACKET_MIN`].
        least: u32,
    },
    /// The fragments after the first have more bytes than the whole.
    #[error("the packet has {total} bytes, its fragments after the first alone {fragments}")]
    SmallerThanFragments {
        /// Bytes announced for the whole.
        total: u32,
        /// Sum of the fragments after the first.
        fragments: u32,
    },
    /// A fragment reaches over the end of its page.
    #[error("fragment {index}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage {
        /// Which fragment, counted from 0.
        index: u32,
        /// Its offset.
        offset: u16,
        /// Its bytes.
        len: u32,
    },
}

impl TxRefusal {
    /// A name for a counter.
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

/// The ring holds something that has no end: the queue cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum TxFatal {
    /// The last slot published says that the packet goes on.
    #[error("a packet goes on beyond the {published} slots that are published")]
    Unfinished {
        /// Slots published.
        published: u32,
    },
    /// Every slot of the ring says that the packet goes on.
    #[error("a packet goes on after all {entries} slots of the ring")]
    LongerThanRing {
        /// Slots of the ring.
        entries: u32,
    },
}

impl TxFatal {
    /// A name for a counter.
    pub fn label(&self) -> &'static str {
        match self {
            TxFatal::Unfinished { .. } => "tx_unfinished_chain",
            TxFatal::LongerThanRing { .. } => "tx_chain_longer_than_ring",
        }
    }
}

/// What [`TxChainParser::next`] found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum TxOutcome {
    /// Nothing is published.
    Empty,
    /// A packet. The chain tells all about it.
    Packet,
    /// Not a packet but a dummy request that carries changes of the multicast filter
    /// ([`Extras::multicast`]). The request is answered `OKAY` or `ERROR`; the chain has no
    /// fragments and no total.
    FilterRequest,
    /// A packet that breaks a rule: answer [`TxChain::responses`] with [`Status::Error`].
    Refused(TxRefusal),
    /// Stop using the ring. Nothing is to be answered.
    Fatal(TxFatal),
}

/// One packet as parsed, and storage to be used again for the next.
///
/// After [`TxOutcome::Packet`]: there are 1 to 18 fragments, each keeps the rules of [`Fragment`],
/// their bytes add up to [`total`](Self::total), and that is 14 to 65535.
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
    /// Room for any packet of a ring with `entries` slots: from here on nothing is allocated.
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

    /// The packet's bytes, in order.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Bytes of the packet.
    pub fn total(&self) -> u16 {
        self.total
    }

    /// What the first slot says of the checksum.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// What the extra infos say.
    pub fn extras(&self) -> &Extras {
        &self.extras
    }

    /// Fragments without bytes, which are legal, useless, and not in the list (XSA-448).
    pub fn empty_fragments(&self) -> u32 {
        self.empty_fragments
    }

    /// The slots consumed, in order: advance the consumer index by their number, and answer each.
    pub fn owed(&self) -> &[Owed] {
        &self.owed
    }

    /// The responses to the slots consumed, where requests end with `status`.
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

    /// Notes a request slot; keeps it as a fragment of `request.size` bytes while there is room.
    #[inline]
    fn take_request(&mut self, request: &TxRequest) {
        self.owed.push(Owed { id: request.id, kind: SlotKind::Request });
        let TxRequest { gref, offset, size: len, .. } = *request;
        // No room: above every limit, so the packet is going to be refused.
        let _ = self.fragments.try_push(Fragment { gref, offset, len });
    }
}

/// Reads packets off a tx ring.
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
/// // The first request announces the whole packet, so its own fragment is what the others leave.
/// assert_eq!(chain.fragments()[0], Fragment { gref: Gref(8), offset: 64, len: 60 });
/// assert_eq!(chain.fragments()[1], Fragment { gref: Gref(9), offset: 0, len: 40 });
/// assert!(chain.responses(Status::Okay).map(|response| response.id).eq([1, 2]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxChainParser {
    entries: u32,
    slot_limit: u32,
}

/// The slots of one chain, each fetched once, in order, and none that was not published.
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
    /// A parser for a ring of `entries` slots that takes packets of up to [`SLOTS_MAX`] of them.
    pub fn new(entries: u32) -> TxChainParser {
        TxChainParser { entries, slot_limit: SLOT_LIMIT }
    }

    /// Takes packets of up to `limit` request slots, within 1 to [`SLOTS_MAX`]: a frontend without
    /// `feature-sg` is held to 1.
    #[must_use]
    pub fn with_slot_limit(self, limit: u32) -> TxChainParser {
        TxChainParser { slot_limit: limit.clamp(1, SLOT_LIMIT), ..self }
    }

    /// Parses the chain at the consumer index. `available` slots are published and not consumed
    /// (the ring has bounded that), and `fetch(i)` copies the `i`-th of them into private memory.
    ///
    /// `fetch` is called for 0, 1, 2 … once each, as far as the chain reaches. What was fetched is
    /// consumed, unless the outcome is fatal: `chain.owed()` has one element for each slot.
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
        chain.take_request(&first);
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
        self.judge(&first, &tail, chain)
    }

    /// Applies the rules to a chain that was walked to its end.
    #[inline]
    fn judge(&self, first: &TxRequest, tail: &Tail, chain: &mut TxChain) -> TxOutcome {
        let verdict = tail.verdict().and_then(|()| {
            let found = tail.requests + 1;
            if found > self.slot_limit {
                return Err(TxRefusal::TooManySlots { found, limit: self.slot_limit });
            }
            if !chain.extras.multicast.is_empty() {
                return Ok(TxOutcome::FilterRequest);
            }
            check_sizes(first, tail, chain).map(|()| TxOutcome::Packet)
        });
        match verdict {
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

/// What the slots after the first amount to.
#[derive(Default)]
struct Tail {
    /// Extra infos.
    extras: u32,
    /// The first thing that is wrong with them.
    fault: Option<ExtraFault>,
    /// Requests.
    requests: u32,
    /// Sum of the requests' sizes.
    bytes: u32,
}

impl Tail {
    #[inline]
    fn verdict(&self) -> Result<(), TxRefusal> {
        match self.fault {
            None => Ok(()),
            Some(ExtraFault::Bad(error)) => Err(TxRefusal::BadExtra(error)),
            Some(ExtraFault::TooMany) => {
                Err(TxRefusal::TooManyExtras { found: self.extras, limit: EXTRA_LIMIT })
            }
        }
    }
}

/// Consumes the rest of a chain whatever it holds, so that the next one is found.
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
        if let Err(fault) = chain.extras.take(tail.extras as usize, raw) {
            tail.fault.get_or_insert(fault);
        }
        more = raw.has_more();
    }
    more = first.flags.contains(TxFlags::MORE_DATA);
    while more {
        let request = TxRequest::from_bytes(slots.fetch()?);
        chain.take_request(&request);
        tail.requests += 1;
        // At most as many as the ring has slots, so far from u32's end; saturates all the same.
        tail.bytes = tail.bytes.saturating_add(u32::from(request.size));
        more = request.flags.contains(TxFlags::MORE_DATA);
    }
    Ok(tail)
}

/// Gives the first fragment its length, checks all of them, and drops the empty ones.
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
