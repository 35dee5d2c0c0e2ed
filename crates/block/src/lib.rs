#![forbid(unsafe_code)]
//! Disks over shared rings: blkfront, blkback, and the storage behind them.
//!
//! * [`blkback`]: the end of a ring that serves.
//! * [`blkfront`]: the end that asks.
//! * [`storage`]: what a disk is to whoever serves it, and the kinds there are.
//! * [`vbd`]: the handshake between the ends.

pub mod blkback;
pub mod blkfront;
pub mod storage;
pub mod vbd;
