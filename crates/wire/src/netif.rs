//! Network interface protocol (Xen's `io/netif.h`): ring slots, multi-slot packets, and the names of
//! the store keys.
//!
//! Each queue has two rings. On **tx** the frontend posts requests that name pages with packet data.
//! On **rx** it posts requests that name empty pages, and the backend answers with the data that it
//! placed there. On both rings a packet is a *chain* of slots:
//!
//! ```text
//! first slot ──EXTRA_INFO──> extra ──MORE──> extra … ──> data slot ──MORE_DATA──> data slot …
//!      └───────MORE_DATA (without extras)──────────────────┘
//! ```
//!
//! The other end controls every slot. [`tx::TxChainParser`] and [`rx::RxChainParser`] fetch each slot
//! of a chain exactly once, through a closure, and validate the copy. A chain that breaks a rule is
//! **refused**: the parser consumes it to its end, finds the next chain, and only that packet is lost.
//! A chain without an end among the published slots is **fatal** for the queue, because the parser
//! cannot tell the next chain from its tail.
//!
//! [`emit`] builds both kinds of chains. The parsers accept every chain that it builds.

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

/// Slots that a backend must accept for one packet (`XEN_NETIF_NR_SLOTS_MIN`), without extra infos.
pub const SLOTS_MAX: usize = SLOT_LIMIT as usize;
const SLOT_LIMIT: u32 = 18;

/// Maximum bytes of a packet on tx (`XEN_NETIF_MAX_TX_SIZE`); Ringfence applies it to rx as well.
pub const PACKET_MAX: u32 = 0xFFFF;

/// Minimum bytes of a packet: an Ethernet header.
pub const PACKET_MIN: u32 = 14;

/// Maximum extra infos of one packet. The protocol defines six types and no limit; the two multicast
/// types may repeat.
pub const EXTRAS_MAX: usize = EXTRA_LIMIT as usize;
const EXTRA_LIMIT: u32 = 8;

/// Slots of a single-page tx or rx ring.
pub const RING_ENTRIES: u32 = crate::ring::entry_count(crate::ring::PAGE_SIZE, TxRequest::SIZE);

/// Page size in bytes: no fragment crosses the end of a page.
const PAGE: u32 = 4096;

/// Returns `true` if `len` bytes from `offset` on stay inside a page.
fn within_page(offset: u16, len: u32) -> bool {
    u32::from(offset).checked_add(len).is_some_and(|end| end <= PAGE)
}

#[cfg(test)]
mod tests;
