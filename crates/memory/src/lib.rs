//! Lent memory: pages that another domain can change at any instant.
//!
//! # Contract
//!
//! This crate is the only place that owns raw pointers into memory shared with a peer. Everything
//! outside it sees a [`LentSlice`]: an owned handle (the mapping stays while a handle to it lives)
//! that copies in, copies out, loads and stores atomically, and joins scatter-gather lists for the
//! kernel ([`ReadList`], [`WriteList`]). It never yields a Rust reference into lent memory, so no
//! optimiser may assume that two reads give the same bytes.
//!
//! * What is copied in is *raw*: [`Raw<T>`] marks a value as fetched once and not yet validated.
//! * Copies are inline assembly on x86-64 and relaxed atomics elsewhere, never `ptr::copy`, which is
//!   undefined where another thread or process writes at the same time.
//! * Every access is bounds-checked against the slice and answered with [`OutOfRange`]. Nothing in
//!   here panics on a number that a peer chose.
//!
//! # Life of a page
//!
//! 1. A [`Mapping`] (or a page of a [`Window`]) is made from a file that both domains hold.
//! 2. [`LentSlice`]s are cut from it; each holds a reference to it.
//! 3. While an I/O is in flight it holds a slice; the mapping is removed when the last one is gone.
//!
//! I/O that goes on while the program does something else is started by a [`Uring`], which holds the
//! slices itself until the kernel says that it is done with them.
//!
//! # Memory that a device reaches by address
//!
//! Kernel vhost is told addresses, not slices. A [`DeviceRange`] is one that cannot be made up: only a slice
//! gives one that may be written, and a [`SendArea`], which has Rust references, only ones to be read.

mod copy;
mod device;
mod iolist;
mod lent;
mod mapping;
mod uring;

pub use device::{DeviceAccess, DeviceRange, DeviceRegion, FIRST_IO_ADDRESS, SendArea};
pub use iolist::{LIST_MAX, ListFull, PushError, ReadList, WriteList};
pub use lent::{LentSlice, OutOfRange, Owner, Raw};
pub use mapping::{Mapping, Protection, Window, WindowBatch};
pub use uring::{Completion, Uring};

/// Bytes of a page in ring protocols and in grants, whatever the operating system uses
/// (`ring.h`).
pub const PAGE_SIZE: usize = 4096;
