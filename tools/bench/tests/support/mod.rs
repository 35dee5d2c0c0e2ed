//! The part of the product's test support that benchmarks' tests use, and a browser.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part of this")]

pub mod browser;
#[path = "../../../../crates/ringfence/tests/support/needs.rs"]
pub mod needs;
