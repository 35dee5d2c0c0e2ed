#![forbid(unsafe_code)]
//! The `ringfence` command: everything that is not a crate of its own.

pub mod guest;
pub mod names;
pub mod sys;
