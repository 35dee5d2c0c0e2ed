//! The network interface protocol (Xen's `io/netif.h`): ring slots, packets that span several of
//! them, and the names of the keys in the store.
//!
//! There are two rings a queue. On **tx** the frontend posts requests that name pages with a packet
//! in them; on **rx** it posts requests that name empty pages, and the backend answers with what it
//! put there. In both a packet is a *chain* of slots:
//!
//! ```text
//! first slot ──EXTRA_INFO──> extra ──MORE──> extra … ──> data slot ──MORE_DATA──> data slot …
//!      └───────MORE_DATA (without extras)──────────────────┘
//! ```
//!
//! Every slot is written by the other end. [`tx::TxChainParser`] and [`rx::RxChainParser`] fetch
//! each slot of a chain exactly once, through a closure, and judge the copy. A chain that breaks a
//! rule is **refused**: it is consumed to its end, so the next chain is found, and costs only
//! itself. A chain that has no end within what was published is **fatal** for the queue, because
//! what follows cannot be told from its tail.
//!
//! [`emit`] builds both kinds of chains; what it builds, the parsers take.

pub mod ctrl;
pub mod emit;
pub mod extra;
pub mod keys;
mod layout;
pub mod rx;
pub mod tx;

pub use layout::{
    Checksum, RxFlags, RxRequest, RxResponse, Status, TxFlags, TxRequest, TxResponse,
};

/// Slots that a backend has to accept for one packet (`XEN_NETIF_NR_SLOTS_MIN`), extra infos not
/// counted.
pub const SLOTS_MAX: usize = SLOT_LIMIT as usize;
const SLOT_LIMIT: u32 = 18;

/// Most bytes of a packet on tx (`XEN_NETIF_MAX_TX_SIZE`); we hold rx to the same.
pub const PACKET_MAX: u32 = 0xFFFF;

/// Fewest bytes of a packet: an Ethernet header.
pub const PACKET_MIN: u32 = 14;

/// Extra infos taken with one packet. There are six types, of which the two for multicast may
/// reasonably repeat; the protocol has no limit.
pub const EXTRAS_MAX: usize = EXTRA_LIMIT as usize;
const EXTRA_LIMIT: u32 = 8;

/// Slots in a tx or rx ring of one page.
pub const RING_ENTRIES: u32 = crate::ring::entry_count(crate::ring::PAGE_SIZE, TxRequest::SIZE);

/// Bytes of a page: no fragment reaches across its end.
const PAGE: u32 = 4096;

/// Whether `len` bytes from `offset` on stay inside a page.
fn within_page(offset: u16, len: u32) -> bool {
    u32::from(offset).checked_add(len).is_some_and(|end| end <= PAGE)
}

#[cfg(test)]
mod tests;
