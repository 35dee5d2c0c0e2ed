#![forbid(unsafe_code)]
//! Types that every crate may use: they know no protocol, no system call and no hypervisor.
//!
//! * [`address`]: hardware addresses and IP prefixes.
//! * [`numbers`]: conversions between integer types that lose nothing unnoticed.

pub mod address;
pub mod numbers;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
