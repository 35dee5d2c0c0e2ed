#![forbid(unsafe_code)]
//! Access of a backend to the pages that a frontend granted.
//!
//! | mode | cost per I/O | memory that the backend uses |
//! |---|---|---|
//! | [`Mode::Copy`] | one copy element per slot, executed by the platform | private bytes |
//! | [`Mode::Staging`] | one look-up per slot | the pages that the frontend staged |
//! | [`Mode::Window`] | one look-up per slot, two stores and a shared fence | the pages of the frontend's grant window |
//! | [`Mode::Map`] | one map and one unmap per page | the granted page, for the duration of the I/O |
//! | [`Mode::Persistent`] | one look-up per page; a map on a miss | the granted page, for many I/Os |
//!
//! Two interfaces hide the mode; they share its operations:
//!
//! * [`PageAccess`] serves a network backend: every use of a page ends in the round that began it.
//! * [`RequestAccess`] serves a disk backend: the pages of a request are in use until asynchronous I/O ends. Its module
//!   says when a page is mapped and unmapped in each mode.
//!
//! Each element of a batch has its own status: an invalid reference fails its own packet or request only (XSA-361,
//! XSA-362, XSA-367).
//!
//! * [`staging`]: pages that a frontend stages over netif's control ring.
//! * [`persistent`]: pages of a disk that stay mapped between requests.
//! * [`window`]: the granter's side of a grant window.
//! * [`iommu`]: grants that an IOMMU enforces.
//! * [`index`]: the look-up table from grant references to positions.
//!
//! ```
//! use ringfence_access::Mode;
//!
//! assert_eq!(Mode::for_network("staging"), Ok(Mode::Staging));
//! assert!(Mode::for_disk("staging").is_err());
//! ```

mod batch;
mod bounce;
pub mod index;
pub mod iommu;
mod mode;
mod page_access;
pub mod persistent;
pub mod request_access;
pub mod staging;
pub mod window;

pub use mode::{Mode, UnknownMode};
pub use page_access::{PageAccess, ReadData, ReadRange, Source, WriteBatch};
pub use request_access::RequestAccess;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
