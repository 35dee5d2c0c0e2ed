#![forbid(unsafe_code)]
//! How a backend gets at the pages that a frontend lent it.
//!
//! | mode | per I/O | what the backend sees |
//! |---|---|---|
//! | [`Mode::Copy`] | one copy element a slot, done by the platform | private bytes |
//! | [`Mode::Staging`] | a look-up a slot; nothing else | the pages that the frontend staged |
//! | [`Mode::Window`] | a look-up a slot, two stores and a shared fence | the pages that the frontend issues and revokes alone |
//! | [`Mode::Map`] | one map and one unmap a page | the page itself, as long as the I/O lasts |
//!
//! A backend talks to [`PageAccess`] and does not know which it is. Each element has a status of its
//! own: one bad reference costs its own packet (XSA-361, XSA-362, XSA-367).

pub mod index;
pub mod iommu;
mod page_access;
pub mod persistent;
pub mod staging;
pub mod window;

pub use page_access::{Mode, PageAccess, ReadData, ReadRange, Source, UnknownMode, WriteBatch};
