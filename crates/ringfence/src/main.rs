#![forbid(unsafe_code)]
//! The `ringfence` command.
fn main() {}
