#![forbid(unsafe_code)]
//! Types that every crate may use: they know no protocol, no system call and no hypervisor.
//!
//! * [`numbers`]: conversions between integer types that lose nothing unnoticed.

pub mod numbers;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
