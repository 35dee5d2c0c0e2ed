//! Lent memory: pages that another domain can change at any instant.
//!
//! # Contract
//!
//! This crate is the only place that owns raw pointers into memory shared with a peer. Other crates see
//! a [`LentSlice`], an owned handle that keeps the mapping alive. It copies in, copies out, loads and
//! stores atomically, and adds ranges to scatter-gather lists for the kernel ([`ReadList`],
//! [`WriteList`]). It never gives a Rust reference into lent memory, so the optimiser may not assume that
//! two reads give the same bytes.
//!
//! * Values that are copied in are *raw*: [`Raw<T>`] marks a value as fetched once and not yet validated.
//! * Copies are inline assembly on x86-64 and aarch64, and volatile or atomic words elsewhere. They never use `ptr::copy`,
//!   which is undefined if another thread or process writes at the same time.
//! * Every access is bounds-checked against the slice and fails with [`OutOfRange`]. No number from a peer
//!   causes a panic.
//!
//! # Life of a page
//!
//! 1. A [`Mapping`] (or a page of an [`AddressReservation`]) is made from a file that both domains hold.
//! 2. [`LentSlice`]s are cut from it; each holds a reference to it.
//! 3. An I/O in flight holds a slice. Dropping the last slice removes the mapping.
//!
//! A [`Uring`] starts asynchronous I/O. It holds the slices of each operation until the kernel has completed
//! it.
//!
//! # Example
//!
//! ```
//! use ringfence_memory::Mapping;
//!
//! let page = Mapping::private(4096)?.lent(); // a page of a peer comes from `Mapping::new`
//! page.copy_from(16, b"request")?;
//! let request = page.fetch::<7>(16)?.into_unchecked(); // fetched once; validate before use
//! assert_eq!(&request, b"request");
//! assert!(page.copy_from(4090, &request).is_err()); // out of range: an error, no panic
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Memory that a device reaches by address
//!
//! Kernel vhost takes addresses, not slices. Safe code cannot construct a [`DeviceRange`] from a number. Only a
//! slice gives a writable range. A [`SendArea`], which has Rust references, gives read-only ranges.

mod aligned;
mod copy;
mod device;
mod iolist;
mod lent;
mod mapping;
mod page;
mod uring;

pub use aligned::page_aligned;
pub use copy::CopyRoutine;
pub use device::{DeviceAccess, DeviceRange, DeviceRegion, FIRST_IO_ADDRESS, SendArea};
pub use iolist::{LIST_MAX, ListFull, PushError, ReadList, WriteList};
pub use lent::{LentSlice, OutOfRange, Owner, Raw};
pub use mapping::{AddressReservation, HUGE_PAGE, Mapping, Protection, ReservedPages};
pub use page::PAGE_SIZE;
pub use uring::{Completion, Uring, UringPool};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
