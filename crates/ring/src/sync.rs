//! The atomics and fences of the shared protocols: `core`'s, or loom's when it explores them.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
