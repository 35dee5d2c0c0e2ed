#![forbid(unsafe_code)]
//! See the README.
