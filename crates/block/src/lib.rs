#![forbid(unsafe_code)]
//! Disks over shared rings: blkfront, blkback, and the storage behind them.
//!
//! * [`storage`]: what a disk is to whoever serves it, and the kinds there are.

pub mod storage;
