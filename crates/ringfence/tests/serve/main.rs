//! `serve` and `attach` without a hypervisor.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod attach;
mod attach_disk;
mod disks;
mod operator;
#[path = "../support/mod.rs"]
mod support;
mod unit_file;
