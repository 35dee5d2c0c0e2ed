#![forbid(unsafe_code)]
//! Types that every crate may use: they know no protocol, no system call and no hypervisor.
//!
//! * [`address`]: hardware addresses and IP prefixes.
//! * [`json`]: JSON texts that are safe on a terminal.
//! * [`numbers`]: conversions between integer types that lose nothing unnoticed.
//! * [`prerequisite`]: objects of the host that Ringfence uses, and the remedies if they are missing.

pub mod address;
pub mod json;
pub mod numbers;
pub mod prerequisite;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
