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
//! [`PageAccess`] is the interface of a network backend and hides the mode: every use of a page ends in the
//! round that began it. A disk's request uses its pages until asynchronous I/O ends. So blkback holds pages
//! per request, with [`persistent`] and a window view, and shares only [`Mode`]. Each element of a batch has its own
//! status: an invalid reference fails its own packet only (XSA-361, XSA-362, XSA-367).
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

pub mod index;
pub mod iommu;
mod mode;
mod page_access;
pub mod persistent;
pub mod staging;
pub mod window;

pub use mode::{Mode, UnknownMode};
pub use page_access::{PageAccess, ReadData, ReadRange, Source, WriteBatch};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
