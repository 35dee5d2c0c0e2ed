//! A frontend that breaks the rules, one at a time, beside a neighbour that keeps them. Each case
//! must not stop the backend, must show under a counter of its own, and may cost no more than the
//! packet or the device that it is about. docs/advisories.md says which advisory is which test.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod channels;
mod cycles;
mod flips;
mod grants;
mod keys;
mod packets;
mod rings;
mod storms;
mod windows;
