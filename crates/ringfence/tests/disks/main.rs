//! Disks of `run --disk`.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod changes;
mod errors;
mod foreign_driver;
mod images;
mod killed;
mod machines;
mod pool_proxy;
mod remote;
mod shield;
#[path = "../support/mod.rs"]
mod support;
mod tools;
