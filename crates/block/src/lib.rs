#![forbid(unsafe_code)]
//! Disks over shared rings: blkfront, blkback, their handshake, disks of virtual machines, and storage.
//!
//! * [`blkback`]: serves the rings of a frontend ([`blkback::Blkback`]).
//! * [`blkfront`]: a disk whose storage is a backend ([`blkfront::FrontDisk`]).
//! * [`storage`]: the traits [`storage::Disk`] and [`storage::DiskQueue`], and their implementations for
//!   files, block devices and memory.
//! * [`vbd`]: the xenbus handshake of both ends ([`vbd::backend::VbdBackend`],
//!   [`vbd::frontend::VbdFrontend`]).
//! * [`vhost_user`]: the disk of a virtual machine ([`vhost_user::VhostUserDisk`]).
//!
//! ```
//! use ringfence_block::storage::memory::MemoryDisk;
//! use ringfence_block::storage::{Disk, Op, Request};
//!
//! let disk = MemoryDisk::new(1 << 20, 512)?;
//! let mut queue = disk.queue(1)?;
//! queue.submit(Request { token: 7, op: Op::Flush, offset: 0, len: 0, segments: vec![] });
//! queue.kick();
//! let mut done = vec![];
//! queue.reap(&mut done);
//! assert_eq!((done[0].token, done[0].result), (7, Ok(())));
//! # Ok::<(), std::io::Error>(())
//! ```

pub mod blkback;
pub mod blkfront;
pub mod storage;
pub mod vbd;
pub mod vhost_user;
mod work;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
