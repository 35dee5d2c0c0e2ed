#![forbid(unsafe_code)]
//! Disks over shared rings: blkfront, blkback, and the storage behind them.
//!
//! * [`export`]: a disk for ordinary programs, as an NBD server.
//! * [`nbd`]: the protocol of network block devices, as bytes.
//! * [`storage`]: what a disk is to whoever serves it, and the kinds there are.

pub mod export;
pub mod nbd;
pub mod storage;
