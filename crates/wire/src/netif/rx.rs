//! Packets for the frontend, as it reads them off the rx ring.
//!
//! The slot of a response says which posted page it is about: the backend has to answer in the slot
//! of the request. Ids are not to be relied on, since extra infos overwrite them.

use super::extra::{ExtraError, ExtraFault, Extras, RawExtra};
use super::{
    Checksum, EXTRA_LIMIT, PACKET_MAX, PACKET_MIN, RxFlags, RxResponse, SLOT_LIMIT, SLOTS_MAX,
    Status, within_page,
};
use arrayvec::ArrayVec;
use thiserror::Error;

/// A piece of a received packet: never empty, never across the end of its page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RxFragment {
    /// Which slot of the chain, counted from 0: consumer index + `slot` is where the page was
    /// posted.
    pub slot: u32,
    /// Where in the page it starts.
    pub offset: u16,
    /// Its bytes, 1 to 4096.
    pub len: u16,
}

/// A rule that a packet breaks. The packet is gone, the queue is in step.
///
/// When several are broken, the one that stands first here is reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum RxRefusal {
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
    /// More responses than we take.
    #[error("{found} slots for one packet, the limit is {limit}")]
    TooManySlots {
        /// Data slots found.
        found: u32,
        /// [`SLOTS_MAX`].
        limit: u32,
    },
    /// The old form of GSO information, which was never agreed on.
    #[error("the packet begins with a GSO prefix, which was not negotiated")]
    GsoPrefix,
    /// The backend says that a part of the packet failed.
    #[error("the backend reports {status:?} for slot {slot}")]
    BackendFailed {
        /// The slot in the chain.
        slot: u32,
        /// What it reports.
        status: Status,
    },
    /// A fragment reaches over the end of its page.
    #[error("slot {slot}: {len} bytes from offset {offset} on cross the page")]
    CrossesPage {
        /// The slot in the chain.
        slot: u32,
        /// The fragment's offset.
        offset: u16,
        /// Its bytes.
        len: u32,
    },
    /// Not even an Ethernet header.
    #[error("a packet of {total} bytes, the least is {least}")]
    TooShort {
        /// Bytes of all fragments.
        total: u32,
        /// [`PACKET_MIN`].
        least: u32,
    },
    /// More than an IP packet can have.
    #[error("a packet of {total} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes of all fragments.
        total: u32,
        /// [`PACKET_MAX`].
        limit: u32,
    },
}

impl RxRefusal {
    /// A name for a counter.
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

/// The ring holds something that has no end: the queue cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum RxFatal {
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

impl RxFatal {
    /// A name for a counter.
    pub fn label(&self) -> &'static str {
        match self {
            RxFatal::Unfinished { .. } => "rx_unfinished_chain",
            RxFatal::LongerThanRing { .. } => "rx_chain_longer_than_ring",
        }
    }
}

/// What [`RxChainParser::next`] found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum RxOutcome {
    /// Nothing is published.
    Empty,
    /// A packet.
    Packet,
    /// A packet that breaks a rule. Its slots are consumed, their pages free for use.
    Refused(RxRefusal),
    /// Stop using the ring.
    Fatal(RxFatal),
}

/// One packet as parsed, and storage to be used again for the next.
///
/// After [`RxOutcome::Packet`]: there are 1 to 18 fragments, each keeps the rules of
/// [`RxFragment`], their slots rise, their bytes add up to [`total`](Self::total), and that is 14
/// to 65535.
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
    /// An empty chain.
    pub fn new() -> RxChain {
        RxChain::default()
    }

    /// The packet's bytes, in order.
    pub fn fragments(&self) -> &[RxFragment] {
        &self.fragments
    }

    /// Bytes of the packet.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// What the first slot says of the checksum.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// What the extra infos say. Changes of the multicast filter mean nothing to a frontend.
    pub fn extras(&self) -> &Extras {
        &self.extras
    }

    /// Slots consumed: advance the consumer index by that many, and take back a page for each. The
    /// page of a slot with an extra info was not touched.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Fragments without bytes, which are not in the list.
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

/// Reads packets off an rx ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxChainParser {
    entries: u32,
}

/// A chain on its way: what is wrong with it, and how far it got.
#[derive(Default)]
struct Walk {
    extras: u32,
    extra_fault: Option<ExtraFault>,
    data_slots: u32,
    slot_fault: Option<RxRefusal>,
}

impl Walk {
    /// Takes the response in slot `slot` of the chain as a fragment.
    #[inline]
    fn take_data(&mut self, slot: u32, response: RxResponse, chain: &mut RxChain) {
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
            // No room: above the limit, so the packet is going to be refused.
            let _ = chain.fragments.try_push(RxFragment { slot, offset, len });
        }
    }

    /// Applies the rules to a chain that was walked to its end.
    #[inline]
    fn verdict(&self, first: RxFlags, total: u32) -> Result<(), RxRefusal> {
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
    /// A parser for a ring of `entries` slots.
    pub fn new(entries: u32) -> RxChainParser {
        RxChainParser { entries }
    }

    /// Parses the chain at the consumer index. `available` responses are published and not consumed
    /// (the ring has bounded that), and `fetch(i)` copies the `i`-th of them into private memory.
    ///
    /// `fetch` is called for 0, 1, 2 … once each, as far as the chain reaches. What was fetched is
    /// consumed, unless the outcome is fatal: [`RxChain::slots`] says how many that are.
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
        match walk.verdict(first, chain.total) {
            Ok(()) => RxOutcome::Packet,
            Err(refusal) => {
                chain.fragments.clear();
                chain.total = 0;
                RxOutcome::Refused(refusal)
            }
        }
    }

    /// Consumes a chain whatever it holds, so that the next one is found.
    #[inline]
    fn walk<F: FnMut(u32) -> [u8; RxResponse::SIZE]>(
        &self,
        available: u32,
        fetch: &mut F,
        chain: &mut RxChain,
    ) -> Result<(RxFlags, Walk), RxFatal> {
        let mut walk = Walk::default();
        let first = RxResponse::from_bytes(self.slot(available, fetch, chain)?);
        chain.checksum = first.flags.checksum();
        walk.take_data(0, first, chain);
        let mut more = first.flags.contains(RxFlags::EXTRA_INFO);
        while more {
            let raw = RawExtra(self.slot(available, fetch, chain)?);
            walk.extras += 1;
            if let Err(fault) = chain.extras.take(walk.extras as usize, raw) {
                walk.extra_fault.get_or_insert(fault);
            }
            more = raw.has_more();
        }
        more = first.flags.contains(RxFlags::MORE_DATA);
        while more {
            let slot = chain.slots;
            let response = RxResponse::from_bytes(self.slot(available, fetch, chain)?);
            walk.take_data(slot, response, chain);
            more = response.flags.contains(RxFlags::MORE_DATA);
        }
        Ok((first.flags, walk))
    }

    /// The next slot of the chain, counted by `chain.slots`.
    #[inline]
    fn slot<F: FnMut(u32) -> [u8; RxResponse::SIZE]>(
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
