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
mod layout;
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
pub use layout::{
    HEADER_BYTES, NETIF_CTRL, NETIF_RX, NETIF_TX, ProducerOverflow, RingLayout, passes_event,
};
pub use memory::{RingMemory, RingPages, Word};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
