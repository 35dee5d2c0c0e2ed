#![forbid(unsafe_code)]
//! Build tasks.
fn main() {}
