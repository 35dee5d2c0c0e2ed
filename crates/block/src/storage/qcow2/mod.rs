//! Disk on a qcow2 image with its backing files.
//!
//! ```text
//! outside the sandbox                    in the sandbox
//! chain.rs, headers   ── descriptors ──> disk.rs ── mapping? ──> imago ──> file.rs ── order.rs ──> file
//! (paths, locks, limits)   and facts       └── allocated: the file itself, from and to lent pages
//! ```
//!
//! The library `imago` knows the format. This module adds what a backend for hostile guests and hostile images needs:
//!
//! * [`OpenChain`] opens and locks all files and validates their headers. The library opens no path.
//! * Reads and writes of allocated clusters go from and to lent pages without the library, once it has told the place of
//!   the clusters. Everything else goes through private memory, because the library takes Rust references.
//! * A request that changes metadata holds the disk alone ([`QcowDisk`]), and pointers are written after the refcounts of
//!   their targets (`order.rs`), so that an image is consistent at each moment a process may be killed.
//!
//! A failed assertion of the library about a damaged image fails its request and each one after it.

mod chain;
mod disk;
mod executor;
mod file;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
mod live;
mod order;
mod overlay;
mod pieces;

pub use chain::{
    BackingLocks, ChainError, ChainFacts, DEPTH_MAX, FILES_MAX, ImageOptions, Member, MemberFacts,
    MemberFormat, OpenChain,
};
pub use disk::QcowDisk;
pub use overlay::{Overlay, OverlayError, OverlaySpec};

pub use super::qcow2_header::{Backing, DataFile, Header, HeaderError};

#[cfg(test)]
mod tests;
