//! The part of the product's test support that benchmarks' tests use.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part of this")]

#[path = "../../../../crates/ringfence/tests/support/needs.rs"]
pub mod needs;
