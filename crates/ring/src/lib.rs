//! Shared request/response rings (`ring.h`), both ends, and split virtqueues ([`split`]).
//!
//! A ring is a page (or several) that both domains map. Its header holds two producer indices and
//! two event indices, all free-running u32; behind 64 bytes come the entries, each a union of one
//! request and one response.
//!
//! ```text
//!    0 req_prod   frontend      8 rsp_prod   backend     64.. entries
//!    4 req_event  backend      12 rsp_event  frontend
//! ```
//!
//! # Contract
//!
//! * A peer's producer index is checked against the ring's size before any use (XSA-39). A violation is
//!   [`ProducerOverflow`], which is fatal for the device.
//! * A slot is fetched whole, once, into private memory (XSA-155, XSA-478). The result is raw: the caller
//!   validates it.
//! * Private indices (consumed, produced) never live in shared memory.
//! * Publication and the final check before sleeping order their accesses as the header requires. loom
//!   explores them (`cargo test` with `--cfg loom`).
//!
//! [`FrontRing`] is the frontend's end, [`BackRing`] the backend's. [`AnyOrderRing`] is a backend's end that
//! answers requests out of order and survives its own crash.
//!
//! The code is generic over [`RingMemory`], so that the same code runs on lent memory and in loom.
//!
//! # Example
//!
//! ```
//! use ringfence_memory::LentSlice;
//! use ringfence_ring::{BackRing, FrontRing, RingLayout, RingPages};
//!
//! let layout = RingLayout::new(4096, 12, 4, 4).unwrap(); // netif's TX ring: 256 entries
//! let page = LentSlice::anonymous(4096); // both ends map this page
//! let mut front = FrontRing::init(RingPages::new(page.clone(), 4096)?, layout);
//! let mut back = BackRing::attach(RingPages::new(page, 4096)?, layout);
//!
//! assert!(front.request(b"twelve bytes"));
//! let notify = front.publish(); // `true`: send an event to the backend
//! assert!(notify);
//! assert_eq!(back.unconsumed()?, 1); // a producer index beyond the ring is an error
//! let request = back.request::<12>(0).into_unchecked(); // private copy, not yet validated
//! assert_eq!(&request, b"twelve bytes");
//! back.consume(1);
//! back.respond(b"done");
//! back.publish();
//! assert_eq!(front.unconsumed()?, 1);
//! assert_eq!(&front.response::<4>(0).into_unchecked(), b"done");
//! front.consume(1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod any_order;
mod back;
mod front;
mod memory;
pub mod split;
pub mod sync;

#[cfg(loom)]
#[cfg(test)]
mod loom_tests;
#[cfg(not(loom))]
#[cfg(test)]
mod resume_tests;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

pub use any_order::{AnyOrderRing, AttachState, RESPONSE_MAX};
pub use back::{BackRing, ResumeError};
pub use front::FrontRing;
pub use memory::{RingMemory, RingPages, Word};

/// Length of the ring header in bytes.
pub const HEADER_BYTES: usize = 64;

/// Entry size and entry count of one kind of ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLayout {
    entry: usize,
    count: u32,
}

impl RingLayout {
    /// Returns the layout of a ring of `ring_bytes` with requests and responses of the given sizes, the
    /// union aligned to `align`. The count is the largest power of two that fits.
    ///
    /// Returns `None` if no entry fits or `align` is no power of two.
    pub const fn new(
        ring_bytes: usize,
        request: usize,
        response: usize,
        align: usize,
    ) -> Option<RingLayout> {
        if !align.is_power_of_two() || ring_bytes <= HEADER_BYTES || ring_bytes > 1 << 24 {
            return None;
        }
        let larger = if request > response { request } else { response };
        let entry = (larger + align - 1) & !(align - 1);
        if entry == 0 || entry > ring_bytes - HEADER_BYTES {
            return None;
        }
        let fit = (ring_bytes - HEADER_BYTES) / entry;
        let count = 1u32 << fit.ilog2();
        Some(RingLayout { entry, count })
    }

    /// Returns the number of entries, a power of two.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Returns the distance in bytes from one entry to the next.
    pub const fn entry_bytes(self) -> usize {
        self.entry
    }

    /// Returns the number of entries from the free-running `index` to the ring's end.
    #[inline]
    pub fn until_end(self, index: u32) -> u32 {
        self.count - (index & (self.count - 1))
    }

    /// Returns the byte offset of the entry at the free-running `index`.
    #[inline]
    pub fn offset(self, index: u32) -> usize {
        HEADER_BYTES + (index & (self.count - 1)) as usize * self.entry
    }
}

/// Layout of the netif transmit ring, one page: 256 entries of 12 bytes.
pub const NETIF_TX: RingLayout = RingLayout { entry: 12, count: 256 };
/// Layout of the netif receive ring, one page: 256 entries of 8 bytes.
pub const NETIF_RX: RingLayout = RingLayout { entry: 8, count: 256 };
/// Layout of the netif control ring, one page: 128 entries of 16 bytes.
pub const NETIF_CTRL: RingLayout = RingLayout { entry: 16, count: 128 };

/// Producer index of the peer further ahead than the ring has entries (XSA-39).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer announced {announced} entries in a ring of {count}")]
pub struct ProducerOverflow {
    /// Distance that the peer claims.
    pub announced: u32,
    /// Entries of the ring.
    pub count: u32,
}

/// Returns `true` if a producer that moved from `old` to `new` must notify a consumer that requested an
/// event at index `event` (`RING_PUSH_*_AND_CHECK_NOTIFY`).
#[inline]
pub fn passes_event(old: u32, new: u32, event: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
